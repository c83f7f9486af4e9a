"""What is done otherwise than requested is in the answer and in the log, whatever the API."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from foresay.server.models.service import WarningLog
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import model_names
from foresay.server.text.tokenizer import Tokenizer
from foresay.server.text.warned import tools_left_out, warning
from foresay.spec.errors import ConfigurationError
from tests.routes.apis import APIS as PLAIN
from tests.routes.apis import RAW, TURN
from tests.routes.conftest import AGENT_TEMPLATE
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import END, INFO, ScriptedEngine, served

#: With another name of a field, and another way of reading a prompt.
APIS = PLAIN | {
    "chat, new name": replace(PLAIN["chat"], names={"max_tokens": "max_completion_tokens"}, tools=()),
    "ollama raw": RAW,
}


@pytest.fixture
def engine(agent) -> ScriptedEngine:
    return ScriptedEngine([*agent.encode("Yes", False), END])


async def warned(client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The warnings of an answer, streamed or whole."""
    response = await client.post(path, json=body)
    text = await response.text()
    assert response.status == 200, text
    return found(text)


def found(text: str) -> list[dict[str, Any]]:
    """The warnings in a body: of events, of lines, or of one object. A stream tells them in one form only."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "{" in line[:7]]
    output = [json.loads(line) for line in lines]
    holders = [one for chunk in output for one in (chunk, chunk.get("message"), chunk.get("response"))]
    lists = [one["warnings"] for one in holders if isinstance(one, dict) and "warnings" in one]
    assert all(one == lists[0] for one in lists)
    return lists[0] if lists else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [name for name, api in APIS.items() if api.tools])
async def test_tools_that_cannot_be_run_are_left_out_and_named(agent, engine, caplog, name, stream):
    api = APIS[name]
    async with served(engine, agent) as client:
        with caplog.at_level(logging.WARNING, "foresay.server"):
            (warning,) = await warned(client, api.path, api.request(stream, tools=api.tools))
        assert await warned(client, api.path, api.request(stream, tools=api.tools[:1])) == []
        everything = await warned(client, api.path, api.request(stream, tools=api.tools[1:]))
    assert (warning["code"], warning["param"]) == ("tool_left_out", "tools[1]")
    assert warning["message"].startswith("tools[1]: tools of type 'web_search")
    ours = [record.getMessage() for record in caplog.records if record.name == "foresay.server"]
    assert [line.partition(": ")[2] for line in ours] == [warning["message"]]
    assert everything[0]["param"] == "tools[0]"
    first, second, third = (agent.decode(request.prompt, False) for request in engine.requests)
    assert first == second and '"look"' in first
    assert "web_search" not in first and '"look"' not in third


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", APIS)
async def test_more_output_than_there_is_room_for_is_clamped_with_a_warning(agent, engine, name, stream):
    api = APIS[name]
    async with served(engine, agent) as client:
        (warning,) = await warned(client, api.path, api.request(stream, max_tokens=32_000))
        [request] = engine.requests
        room = INFO.max_model_len - len(request.prompt)
        exact = await warned(client, api.path, api.request(stream, max_tokens=room))
    assert (warning["code"], warning["param"]) == ("max_tokens_clamped", api.most)
    assert warning["message"].startswith(f"{api.most}: 32,000 tokens") and f"at most {room} " in warning["message"]
    assert request.params.max_tokens == room
    assert exact == []
    assert engine.requests[-1].params.max_tokens == room


async def test_a_default_is_clamped_without_a_warning(agent, engine):
    """A completion has 16 tokens unless it says otherwise; nobody is misled by fewer."""
    body = {"prompt": [40] * (INFO.max_model_len - 5)}
    async with served(engine, agent) as client:
        assert await warned(client, "/v1/completions", body) == []
    assert engine.requests[0].params.max_tokens == 5


async def test_a_prompt_that_is_cut_for_the_output_is_not_cut_to_nothing(agent, engine):
    body = {"prompt": [40] * 700, "truncate_prompt_tokens": -1, "max_tokens": 600}
    async with served(engine, agent) as client:
        response = await client.post("/v1/completions", json=body)
        refused = await response.json()
        assert (await client.post("/v1/completions", json=body | {"max_tokens": 12})).status == 200
    assert (response.status, refused["error"]["code"]) == (400, "context_length_exceeded")
    assert len(engine.requests[0].prompt) == 500


async def test_every_prompt_has_one_warning_of_its_own_room(agent, engine):
    body = {"prompt": ["a", "a b c d", "a"], "max_tokens": 600, "n": 2}
    async with served(engine, agent) as client:
        warnings = await warned(client, "/v1/completions", body)
    rooms = {INFO.max_model_len - len(request.prompt) for request in engine.requests}
    assert len(warnings) == len(rooms) == 2
    assert all(any(f"at most {room} " in one["message"] for one in warnings) for room in rooms)


async def test_old_turns_make_room_for_all_the_output_if_they_can(agent, engine):
    """With ``truncation: auto`` nothing is clamped that dropping turns makes room for."""
    turns = [TURN | {"content": "fox " * 40} for _ in range(15)]
    async with served(engine, agent) as client:
        body = {"input": turns, "truncation": "auto"}
        assert await warned(client, "/v1/responses", body | {"max_output_tokens": 300}) == []
        (warning,) = await warned(client, "/v1/responses", body | {"max_output_tokens": 32_000})
    roomy, clamped = engine.requests
    assert len(roomy.prompt) + 300 <= 512
    assert warning["code"] == "max_tokens_clamped" and len(clamped.prompt) > len(roomy.prompt)


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", APIS)
async def test_any_name_is_served_and_answers_have_the_real_one(agent, engine, name):
    api = APIS[name]
    async with served(engine, agent, aliases=("gpt-4o",)) as client:
        assert (await client.post(api.path, json=api.request(False, model="claude"))).status == 404
        for known in ("toy", "toy:latest", "gpt-4o", "gpt-4o:latest"):
            assert await warned(client, api.path, api.request(False, model=known)) == []
    async with served(engine, agent, any_model=True) as client:
        response = await client.post(api.path, json=api.request(False, model="claude"))
        answer = await response.json()
        (warning,) = await warned(client, api.path, api.request(True, model="claude"))
    assert answer["model"] == ("claude" if name.startswith("ollama") else "toy"), "Ollama's clients see their own word"
    assert (warning["code"], warning["param"]) == ("model_renamed", "model")
    assert [warning["message"]] == ["model: 'claude' is served by 'toy'"]
    assert answer["warnings"] == [warning]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", APIS)
async def test_fields_that_an_api_does_not_have_are_named_with_the_one_that_was_meant(agent, engine, name, stream):
    api = APIS[name]
    body = api.request(stream) | {"strem": True, "x" * 500: [1], "service_tier": "auto", "user": "me", "nothing": None}
    async with served(engine, agent) as client:
        warnings = await warned(client, api.path, body)
        many = await warned(
            client, api.path, api.request(stream) | {f"{at} of many": at for at in range(99)} | {"nothing": None}
        )
    assert [(one["code"], one["param"]) for one in warnings] == [
        ("unknown_field", "strem"),
        ("unknown_field", "x" * 64),
    ]
    assert warnings[0]["message"] == "strem: there is no such field here, so it changes nothing"
    assert len(many) == 8


def test_the_log_does_not_remember_names_that_clients_make_up(caplog):
    log = WarningLog()
    with caplog.at_level(logging.WARNING, "foresay.server"):
        log.note(warning("unknown_field", (f"made up {number}",), hint="") for number in range(1000))
    assert len(caplog.records) == len(log._logged_at) == 1


async def test_lists_have_all_names(agent, engine):
    async with served(engine, agent, aliases=("gpt-4o", "a/b")) as client:
        models = await (await client.get("/v1/models")).json()
        tags = await (await client.get("/api/tags")).json()
        one = await (await client.get("/v1/models/a/b")).json()
        missing = await client.get("/v1/models/other")
    assert [card["id"] for card in models["data"]] == ["toy", "gpt-4o", "a/b"]
    assert (models["first_id"], models["last_id"], models["has_more"]) == ("toy", "a/b", False)
    assert [model["name"] for model in tags["models"]] == ["toy:latest", "gpt-4o:latest", "a/b:latest"]
    assert (one["id"], one["type"], one["display_name"], missing.status) == ("a/b", "model", "a/b", 404)


def test_a_directory_is_called_by_its_last_part(tmp_path, monkeypatch):
    model = tmp_path / "Tiny-1B"
    model.mkdir()
    monkeypatch.chdir(model)
    for target in (str(model), f"{model}/", ".", "../Tiny-1B"):
        assert model_names(ServeConfig(target=target)) == ("Tiny-1B",)
    for target in ("bundled", "Qwen/Qwen3-0.6B", str(tmp_path / "not-there")):
        assert model_names(ServeConfig(target=target)) == (target,)
    (tmp_path / "Tiny-1B-Q8_0.gguf").write_bytes(b"GGUF")
    assert model_names(ServeConfig(target=str(tmp_path / "Tiny-1B-Q8_0.gguf"))) == ("Tiny-1B-Q8_0",)
    assert model_names(ServeConfig(target=".", served_model_name=("a", "b"))) == ("a", "b")


def test_names_are_given_one_by_one():
    from foresay.server.settings.load import load

    assert load(ServeConfig, {"served_model_name": ["a", "b c"]}, {}).config.served_model_name == ("a", "b c")
    assert load(ServeConfig, {}, {"FORESAY_SERVED_MODEL_NAME": "a"}).config.served_model_name == ("a",)
    with pytest.raises(ConfigurationError, match=r"without a comma.*several times"):
        load(ServeConfig, {"served_model_name": ["a,b"]}, {})
    with pytest.raises(ConfigurationError, match="given twice"):
        load(ServeConfig, {"served_model_name": ["a", "a"]}, {})


# -- system messages -----------------------------------------------------------------------------------------------

ONLY_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def strict_template() -> Tokenizer:
    """A model whose template wants its system message first, as Qwen 3.5's does."""
    return byte_level_tokenizer(ONLY_FIRST + AGENT_TEMPLATE)


LATE = [TURN, {"role": "system", "content": "Be kind"}, {"role": "user", "content": "Now"}]


@pytest.mark.parametrize("name", ["chat", "messages", "ollama"])
async def test_system_messages_in_the_middle_are_rendered_as_the_template_can(agent, strict_template, engine, name):
    api = APIS[name]
    async with served(engine, agent) as client:
        assert await warned(client, api.path, api.request(False, messages=LATE)) == []
    async with served(engine, strict_template) as client:
        (warning,) = await warned(client, api.path, api.request(False, messages=LATE))
    assert (warning["code"], warning["param"]) == ("system_moved", "messages[1]")
    free, strict = (agent.decode(request.prompt, False) for request in engine.requests)
    assert "<|user|>Tell<|end|><|system|>Be kind<|end|><|user|>Now<|end|>" in free
    assert "<|user|>Tell\n\nBe kind\n\nNow<|end|><|assistant|>" in strict


async def test_a_template_that_refuses_more_than_that_says_so(engine):
    template = byte_level_tokenizer("{{ raise_exception('never!') }}")
    async with served(engine, template) as client:
        response = await client.post("/v1/chat/completions", json={"messages": LATE})
        assert (response.status, "never!" in await response.text()) == (400, True)


# -- the log -------------------------------------------------------------------------------------------------------


def test_few_tools_that_are_left_out_are_named_and_the_others_counted():
    many = tools_left_out([(f"tools[{index}]", "x" * 5000) for index in range(1000)])
    assert len(many) == 17 and "984 more" in many[-1].message
    assert all(len(one.message) < 250 for one in many)


def test_the_log_says_the_same_once_a_minute(caplog):
    log = WarningLog()
    with caplog.at_level(logging.WARNING, "foresay.server"):
        for room in range(50):
            log.note(
                [
                    warning("max_tokens_clamped", "max_tokens", requested=9000, room=room, why="fits"),
                    *tools_left_out([(f"tools[{room}]", "mcp")]),
                ]
            )
    assert len(caplog.records) == 2
