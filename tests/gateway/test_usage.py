"""What each key has used: its owner sees that, the operator sees all, and no key sees another's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from foresay.server.cli.main import main
from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import AuthMiddleware
from tests.gateway.guarded import ALICE, ASK, BOB, append, bearer, guarded
from tests.server.scripted import END, ScriptedEngine

ADMIN = "sk-admin-0123456789abcdef"
WRITES = [10, 11, 12, END]


def counts(body: dict[str, object]) -> tuple[object, ...]:
    return body["name"], body["requests"], body["prompt_tokens"], body["completion_tokens"]


async def used(client, key: str | None, path: str = "/v1/usage"):
    response = await client.get(path, headers=bearer(key) if key else {})
    return response.status, await response.json()


async def test_a_key_sees_what_it_has_used_and_nothing_of_another(tokenizer):
    auth = AuthMiddleware(KeyStore([ALICE, BOB]), admin_key=ADMIN)
    prompt = len(tokenizer.encode("Tell"))
    async with guarded(ScriptedEngine(WRITES), tokenizer, auth) as client:
        assert (await used(client, ALICE))[1]["last_request"] is None
        for n in (1, 2):
            response = await client.post("/v1/completions", json=ASK | {"n": n}, headers=bearer(ALICE))
            assert response.status == 200
        refused = await client.post("/v1/completions", json=ASK | {"temperature": -1}, headers=bearer(ALICE))
        assert refused.status == 400, "one that did not run is not counted"
        status, alice = await used(client, ALICE)
        assert (status, counts(alice)) == (200, ("key-1", 2, 2 * prompt, 9 + 3))
        assert alice["object"] == "usage"
        assert alice["since"] <= alice["last_request"]
        assert counts((await used(client, BOB))[1]) == ("key-2", 0, 0, 0)
        status, everyone = await used(client, ADMIN, "/admin/usage")
        assert status == 200
        assert [counts(one) for one in everyone["data"]] == [counts(alice), ("key-2", 0, 0, 0)]
        assert (await used(client, ALICE, "/admin/usage"))[0] == 403
        assert (await used(client, None))[0] == 401
        assert (await used(client, ADMIN))[0] == 401, "the admin key opens /admin/ only"
        metrics = await client.get("/metrics", headers=bearer(BOB))
        assert "key-1" not in await metrics.text(), "every key may read the metrics"


async def test_without_keys_it_is_what_all_clients_have_used(tokenizer):
    async with guarded(ScriptedEngine(WRITES), tokenizer, AuthMiddleware(admin_key=ADMIN)) as client:
        await client.post("/v1/completions", json=ASK)
        _, body = await used(client, None)
        assert counts(body)[:2] == ("", 1)
        assert (await used(client, ADMIN, "/admin/usage"))[1]["data"] == [body]


def test_totals_survive_a_change_of_the_key_file_and_end_with_their_key(tmp_path: Path):
    path = tmp_path / "keys.toml"
    append(path, "alice", ALICE)
    store = KeyStore(file=str(path))

    def caller(key: str):
        found = store.caller(key)
        assert found is not None
        return found

    caller(ALICE).usage.requests = 7
    append(path, "bob", BOB)
    store.refresh()
    assert (caller(ALICE).usage.requests, caller(BOB).usage.requests) == (7, 0)
    path.unlink()
    append(path, "bob", BOB)
    append(path, "alice", ALICE)
    store.refresh()
    assert caller(ALICE).usage.requests == 0, "a new key of the same name may be another person's"


async def test_keys_list_shows_what_each_key_has_used(tokenizer, capsys):
    auth = AuthMiddleware(KeyStore([ALICE, BOB]), admin_key=ADMIN)
    async with guarded(ScriptedEngine(WRITES), tokenizer, auth) as client:
        await client.post("/v1/completions", json=ASK, headers=bearer(ALICE))
        words = ["keys", "list", "--url", str(client.make_url("/")).rstrip("/"), "--admin-key"]
        assert await asyncio.to_thread(main, [*words, ADMIN]) == 0
        captured = capsys.readouterr()
        header, alice, bob = captured.out.splitlines()
        assert header.split() == ["name", "requests", "prompt", "tokens", "completion", "tokens", "last", "used"]
        assert alice.split()[:2] == ["key-1", "1"]
        assert bob.split() == ["key-2", "0", "0", "0", "never"]
        assert captured.err.startswith("counted since 2")
        assert await asyncio.to_thread(main, [*words, ALICE]) == 1
        assert "This is not the admin key of this server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("keys new alice --url http://127.0.0.1:1", "--url is for foresay keys list only, not for new"),
        ("keys list --url http://127.0.0.1:1", "this needs the server's admin key: give --admin-key"),
        ("keys list --url http://127.0.0.1:1 --admin-key x", "no Foresay server answers there"),
    ],
)
def test_what_cannot_be_listed_is_an_error(words: str, said: str, capsys, monkeypatch):
    monkeypatch.delenv("FORESAY_ADMIN_KEY", raising=False)
    assert main(words.split()) in (1, 2)
    assert said in capsys.readouterr().err
