"""API keys at rest and at the door: hashing, comparing, and the file."""

from __future__ import annotations

import hmac
import stat
from pathlib import Path

import pytest

from foresay.server.cli.main import main
from foresay.server.gateway import keys
from foresay.server.gateway.keys import Caller, KeyStore, hashed, matches
from foresay.spec.errors import ConfigurationError
from tests.gateway.guarded import ALICE, BOB, append

ENTRY = "[[key]]\nid = 'a'\nname = 'a'\nhash = 'HASH'\n"


def holder(chain: KeyStore, key: str) -> Caller:
    """Who holds a key that must be somebody's."""
    caller = chain.caller(key)
    assert caller is not None
    return caller


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    append(path, "alice", ALICE)
    append(path, "bob", BOB)
    return path


# -- hashing -----------------------------------------------------------------------------------------------------------


def test_a_key_is_recognised_by_its_hash_and_no_other_is():
    chain = KeyStore((ALICE, BOB))
    assert [holder(chain, key).name for key in (ALICE, BOB)] == ["key-1", "key-2"]
    for wrong in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), "\udcff", "x" * 100_000):
        assert chain.caller(wrong) is None


def test_the_hash_is_salted_and_does_not_hold_the_key():
    once, again = hashed(ALICE), hashed(ALICE)
    assert once != again and matches(once, ALICE) and not matches(once, BOB)
    assert ALICE not in once and ALICE.encode().hex() not in once


@pytest.mark.parametrize("presented", [ALICE, BOB, "sk-carol-0123456789abcdef", "wrong"])
def test_every_key_is_compared_whole_whichever_fits(monkeypatch, presented):
    """What keeps the time from telling anything: equal work for a right key, a wrong one and a nearly right one."""
    compared: list[tuple[int, int]] = []

    def counted(left: str, right: str) -> bool:
        compared.append((len(left), len(right)))
        return constant_time(left, right)

    constant_time = hmac.compare_digest
    chain = KeyStore((ALICE, BOB, "sk-carol-0123456789abcdef", "sk-dave-0123456789abcdef"))
    monkeypatch.setattr(hmac, "compare_digest", counted)
    chain.caller(presented)
    assert compared == [(len(hashed(ALICE)), len(hashed(ALICE)))] * 4


def test_made_keys_are_long_and_never_alike():
    made = {keys.new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith(keys.PREFIX) and len(key) == len(keys.PREFIX) + 43 for key in made)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_its_owners_and_holds_no_key(file):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not file.stat().st_mode & 0o077
    assert ALICE not in file.read_text() and BOB not in file.read_text()
    assert [entry.name for entry in keys.read(file)] == ["alice", "bob"]
    assert len({entry.id for entry in keys.read(file)}) == 2


def test_a_file_that_others_can_read_is_warned_about(file, caplog):
    file.chmod(0o640)
    KeyStore(file=str(file))
    assert f"can read the key file {file}: chmod 600 it" in caplog.text


@pytest.mark.parametrize(("own", "limit"), [(7, 7), (0, None)])
def test_a_limit_in_the_file_wins_and_zero_is_none(file, own, limit):
    file.write_text(f"{file.read_text()}max_requests_per_minute = {own}\n")
    chain = KeyStore(file=str(file), per_minute=60)
    assert [holder(chain, key).rate_limiter.per_minute for key in (ALICE, BOB)] == [60, limit]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[key]]\nname = 'a'\n", "key[0]: Object missing required field `id`; an entry is [[key]], id = "),
        (
            ENTRY + "\n[[key]]\nid = 'b'\nname = 'b'\nhash = 'sk-plain-text-secret'\n",
            "key[1].hash: Expected text matching",
        ),
        ("[[key]]\nid = 'a.b'\nname = 'a'\nhash = 'HASH'\n", "key[0].id: Expected text matching"),
        (
            ENTRY + "max_request_per_minute = 3\n",
            "key[0]: Object contains unknown field `max_request_per_minute`",
        ),
        (ENTRY + "max_requests_per_minute = -3\n", "key[0].max_requests_per_minute: Expected a whole number >= 0"),
        ("keys = 3\n", "Object contains unknown field `keys`"),
        ("sk-plain-text-secret\n", "(at line 1, column 21); an entry is [[key]], id = "),
        ("[[key]]\nid = 'a'\nname = 'a'\nhash = 'HASH'\n" * 2, "has the id 'a' twice"),
        ("[[key]\n", "not valid TOML"),
        ("", "holds no key"),
        ("key = []\n", "holds no key"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_wrong_is_named_and_its_values_are_not_repeated(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text.replace("HASH", hashed(ALICE)))
    with pytest.raises(ConfigurationError) as caught:
        KeyStore(file=str(path))
    assert str(path) in str(caught.value) and message in str(caught.value)
    assert "sk-plain-text-secret" not in str(caught.value)


# -- who holds what ----------------------------------------------------------------------------------------------------


def test_keys_of_the_settings_and_of_the_file_open_the_server(file):
    chain = KeyStore(["sk-from-the-flags-01"], str(file))
    assert chain.needed
    callers = [holder(chain, key) for key in ("sk-from-the-flags-01", ALICE, BOB)]
    assert [caller.name for caller in callers] == ["key-1", "alice", "bob"]
    tenants = {caller.tenant for caller in callers}
    assert len(tenants) == 3 and "" not in tenants
    assert chain.caller("sk-another-one-0123456") is None


def test_the_tenant_shows_nothing_of_the_key(file):
    again = file.with_name("again.toml")
    append(again, "alice", ALICE)
    assert holder(KeyStore(file=str(again)), ALICE).tenant != holder(KeyStore(file=str(file)), ALICE).tenant


def test_without_keys_nobody_needs_one():
    chain = KeyStore(per_minute=3)
    assert not chain.needed
    assert (chain.anyone.tenant, chain.anyone.alone, chain.anyone.rate_limiter.per_minute) == ("", True, 3)


def test_each_key_has_a_limit_of_its_own(file):
    chain = KeyStore(file=str(file), per_minute=2)
    assert holder(chain, ALICE).rate_limiter is not holder(chain, BOB).rate_limiter
    assert holder(chain, ALICE) is holder(chain, ALICE), "which stays from request to request"
    assert not holder(chain, ALICE).alone and holder(KeyStore([ALICE]), ALICE).alone


# -- the command -------------------------------------------------------------------------------------------------------


def test_keys_new_shows_the_key_once_and_prints_what_goes_into_the_file(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    assert main(["keys", "new", "alice"]) == 0
    entry, reported = capsys.readouterr()
    made = reported.split()[-1]
    path.write_text(entry)
    assert holder(KeyStore(file=str(path)), made).name == "alice"
    assert made not in entry
    assert main(["keys", "new", "bob"]) == 0
    path.write_text(entry + capsys.readouterr().out)
    assert [entry.name for entry in keys.read(path)] == ["alice", "bob"]


def test_keys_list_names_who_has_one_and_its_own_limit_and_no_hash(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    append(path, "al", ALICE)
    path.write_text(path.read_text() + "max_requests_per_minute = 0\n")
    append(path, "bob", BOB)
    assert main(["keys", "list", "--api-key-file", str(path)]) == 0
    listed, reported = capsys.readouterr()
    ids = [entry.id for entry in keys.read(path)]
    assert listed.splitlines() == [f"al   {ids[0]}  max_requests_per_minute none", f"bob  {ids[1]}"]
    assert reported == f"2 keys in {path}\n"


def test_a_name_that_would_not_fit_into_a_log_line_is_refused(capsys):
    assert main(["keys", "new", "alice smith"]) == 2
    assert "a name is 1 to 64 letters" in capsys.readouterr().err
