"""docs/compatibility.md says of every field what the code does with it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai.resources
import pytest
from openai.resources.responses import Responses
from tokenizers import processors

from foresay.server.api.common.validation import refused_fields
from foresay.server.api.responses.schemas import ResponseRequest
from foresay.server.schemas.chat import ChatRequest
from foresay.server.schemas.completions import CompletionRequest
from foresay.server.schemas.shared import GenerationRequest
from foresay.server.text.tokenizer import Tokenizer
from tests.server.conftest import TEMPLATE, byte_level_tokenizer
from tests.server.scripted import END, ScriptedEngine, served

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
SHARED, COMPLETIONS, CHAT = "Shared by", "`POST /v1/completions`", "`POST /v1/chat/completions`"
ENDPOINTS = {
    "completions": (COMPLETIONS, CompletionRequest),
    "chat/completions": (CHAT, ChatRequest),
}
#: The official client's methods.
CREATE: dict[str, Callable[..., Any]] = {
    "completions": openai.resources.Completions.create,
    "chat/completions": openai.resources.chat.Completions.create,
}
#: Parameters of every call of a client, which are none of the request's fields.
OF_CALLS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
#: Typed, so that its type is checked, and without any effect.
WITHOUT_EFFECT = {"spaces_between_special_tokens"}
ASK: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Tell"},
    "chat/completions": {"messages": [{"role": "user", "content": "Tell"}]},
}


def table(heading: str) -> dict[str, str]:
    """What the section says of each field: those in its table are supported, its paragraphs list the others."""
    section = TEXT.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = [(field, "supported") for field in re.findall(r"^\| `(\w+)` \|.*\|$", section, re.MULTILINE)]
    assert len(rows) == len(re.findall(r"^\| `", section, re.MULTILINE)), heading
    for status, listed in re.findall(
        r"^\*\*(Refused|Ignored)\*\*: (.*?)(?:\n\n|\Z)", section, re.MULTILINE | re.DOTALL
    ):
        names = re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", listed))
        rows += [(field, status.lower()) for field in names]
    assert len(rows) == len(dict(rows)), heading
    return dict(rows)


def said(path: str, status: str | None = None) -> set[str]:
    """The fields of an endpoint, its own and the shared ones."""
    rows = table(SHARED) | table(ENDPOINTS[path][0])
    return {field for field, what in rows.items() if status in (None, what)}


def test_no_field_is_in_two_tables_and_every_row_says_one_of_three_things():
    shared = table(SHARED)
    for heading in (COMPLETIONS, CHAT):
        assert not set(shared) & set(table(heading))
    assert {what for heading in (SHARED, COMPLETIONS, CHAT) for what in table(heading).values()} == {
        "supported",
        "refused",
        "ignored",
    }
    assert set(GenerationRequest.__struct_fields__) <= set(shared)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_of_the_structs_and_of_the_official_client_has_a_row(path):
    _, model = ENDPOINTS[path]
    of_client = set(inspect.signature(CREATE[path]).parameters) - OF_CALLS
    known = set(model.__struct_fields__)
    assert said(path) == known | of_client
    assert said(path, "refused") == set(refused_fields(model))
    assert said(path, "ignored") == (of_client - known) | WITHOUT_EFFECT


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_refused_fields_are_refused_by_name_and_ignored_ones_ignored(tokenizer, path):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        for field in sorted(said(path, "refused")):
            response = await client.post(f"/v1/{path}", json=ASK[path] | {field: 5})
            assert response.status == 400, field
            error = (await response.json())["error"]
            assert (error["param"], error["type"]) == (field, "invalid_request_error")
            assert field in error["message"]
        assert engine.requests == []
        for value in (True, False, None):
            ignored = dict.fromkeys(said(path, "ignored"), value)
            assert (await client.post(f"/v1/{path}", json=ASK[path] | ignored)).status == 200
        assert (await client.post(f"/v1/{path}", json=ASK[path])).status == 200
    assert len({repr(request.params) for request in engine.requests}) == 1


def test_responses_have_rows_for_what_is_not_shared():
    known = set(ResponseRequest.__struct_fields__) | (set(inspect.signature(Responses.create).parameters) - OF_CALLS)
    rows = table("`POST /v1/responses`")
    own = set(refused_fields(ResponseRequest)) - set(refused_fields(GenerationRequest))
    assert set(rows) == (known - set(table(SHARED))) | own
    assert {field for field, what in rows.items() if what == "refused"} == own


#: For each supported field a value that shows, and what has to be said besides to see it.
VISIBLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("other", {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "stream_interval": (5, {"stream": True}),
    "stream_pacing": ("even", {"stream": True}),
    "provenance": (True, {}),
    "max_tokens": (3, {}),
    "min_tokens": (2, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (3, {}),
    "min_p": (0.5, {}),
    "seed": (9, {}),
    "presence_penalty": (1, {}),
    "frequency_penalty": (1, {}),
    "repetition_penalty": (1.5, {}),
    "logit_bias": ({"40": 1}, {}),
    "bad_words": (["fox"], {}),
    "allowed_token_ids": ([40], {}),
    "n": (2, {}),
    "best_of": (2, {}),
    "stop": ("fox", {}),
    "stop_token_ids": ([40], {}),
    "ignore_eos": (True, {}),
    "include_stop_str_in_output": (True, {"stop": "fox"}),
    "skip_special_tokens": (False, {}),
    "add_special_tokens": (None, {}),
    "truncate_prompt_tokens": (2, {}),
    "top_logprobs": (2, {}),
    "prompt_logprobs": (1, {}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {"prompt_logprobs": 0}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"regex": "a+"}, {}),
    "request_id": ("mine", {}),
    "cache_salt": ("salt", {}),
    "spec_decode_metrics": ("none", {}),
    "speculation": ({"off": True}, {}),
    "prediction": ({"type": "content", "content": "Once"}, {}),
    "prompt": ("Tell me", {}),
    "echo": (True, {}),
    "logprobs": (1, {}),
    "messages": ([{"role": "user", "content": "Tell me"}], {}),
    "max_completion_tokens": (3, {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": [{"role": "assistant", "content": "Tell"}]}),
    "chat_template_kwargs": ({"mood": "glad"}, {}),
    "reasoning_effort": ("low", {}),
}
#: What means something else in a chat.
VISIBLE_IN_CHAT: dict[str, tuple[Any, dict[str, Any]]] = {
    "top_logprobs": (2, {"logprobs": True}),
    "logprobs": (True, {}),
}
#: What a model that neither thinks nor calls tools cannot show; tests/parsers does.
OF_TOOLS = {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning"}


@pytest.fixture(scope="module")
def talkative() -> Tokenizer:
    """A tokenizer that begins texts with a special token, and whose template has variables."""
    plain = byte_level_tokenizer()
    plain._backend.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", plain.encode("<|system|>")[0])]
    )
    plain._templates.chat_template = TEMPLATE + "{{ mood }}{{ reasoning_effort }}"
    return plain


async def seen(tokenizer: Tokenizer, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """What a request makes the engine do, and its answer, without ids and times."""
    script = tokenizer.encode("Once upon a fox<|user|>there was", False)
    engine = ScriptedEngine([*script, END], run=3)
    async with served(engine, tokenizer) as client:
        response = await client.post(f"/v1/{path}", json=ASK[path] | fields, headers={"X-Request-Id": "r"})
        body = re.sub(r'"created":\d+|"\w+_ms":[\d.]+|"tokens_per_second":[\d.]+', "", await response.text())
    unnamed = [msgspec.structs.replace(one, id="", fork_of=None) for one in engine.requests]
    return repr(unnamed), body


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_supported_field_makes_a_difference(talkative, path):
    """A field that is typed and then forgotten would be ignored in silence."""
    visible = VISIBLE | (VISIBLE_IN_CHAT if path == "chat/completions" else {})
    supported = said(path, "supported")
    assert supported - OF_TOOLS <= set(visible)
    for field in sorted(supported - OF_TOOLS):
        value, besides = visible[field]
        if field == "add_special_tokens":
            value = path == "chat/completions"
        without = await seen(talkative, path, besides)
        assert without == await seen(talkative, path, besides), f"{field}: the comparison is not sound"
        assert without != await seen(talkative, path, besides | {field: value}), field
