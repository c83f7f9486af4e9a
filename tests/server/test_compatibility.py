"""docs/compatibility.md says of every field of every API what the code does with it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anthropic.resources
import msgspec
import ollama
import openai.resources
import pytest
from openai.resources.responses import Responses
from tokenizers import processors

from foresay.server.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from foresay.server.api.common.validation import IGNORED, refused_fields
from foresay.server.api.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from foresay.server.api.openai.tokens import TokenizeRequest
from foresay.server.api.responses.schemas import ResponseRequest
from foresay.server.schemas.chat import ChatRequest, CompletionRequest
from foresay.server.schemas.shared import GenerationRequest
from foresay.server.text.tokenizer import Tokenizer
from tests.routes.apis import FUNCTION, SCHEMA, TURN
from tests.routes.conftest import AGENT_TEMPLATE
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import END, ScriptedEngine, served

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text("utf-8")
#: Parameters of every call of a client, which are none of the request's fields.
OF_CALLS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
#: Typed, so that its type is checked, and without any effect.
WITHOUT_EFFECT = {"spaces_between_special_tokens"}
#: What no answer to a request without a conversation can show; tests/parsers does.
OF_TOOLS = {"parallel_tool_calls", "include_reasoning"}
SHARED = "Shared by"


def parameters(function: Callable[..., Any]) -> set[str]:
    """What the official client takes."""
    return set(inspect.signature(function).parameters) - OF_CALLS


class Documented(NamedTuple):
    """struct: of its requests. of_client: what the official client takes. shared: with others, in a table of theirs."""

    struct: type[msgspec.Struct]
    of_client: set[str]
    path: str
    ask: dict[str, Any]
    shared: bool = False


CHAT: dict[str, Any] = {"model": "toy", "messages": [TURN]}
COMPLETIONS, CHATS, OPTIONS = "`POST /v1/completions`", "`POST /v1/chat/completions`", "Ollama's `options`"
APIS: dict[str, Documented] = {
    COMPLETIONS: Documented(
        CompletionRequest, parameters(openai.resources.Completions.create), "/v1/completions", {"prompt": "Tell"}, True
    ),
    CHATS: Documented(
        ChatRequest,
        parameters(openai.resources.chat.Completions.create),
        "/v1/chat/completions",
        {"messages": [TURN]},
        True,
    ),
    "`POST /v1/messages`": Documented(
        MessagesRequest, parameters(anthropic.resources.Messages.create), "/v1/messages", CHAT | {"max_tokens": 40}
    ),
    "`POST /api/chat`": Documented(OllamaChatRequest, parameters(ollama.Client.chat), "/api/chat", CHAT),
    "`POST /api/generate`": Documented(
        OllamaGenerateRequest, parameters(ollama.Client.generate), "/api/generate", {"model": "toy", "prompt": "Tell"}
    ),
    OPTIONS: Documented(OllamaOptions, set(ollama.Options.model_fields), "/api/chat", CHAT),
    "`POST /tokenize`": Documented(TokenizeRequest, set(), "/tokenize", {"messages": [TURN]}),
}


def table(heading: str) -> dict[str, str]:
    """What the section says of each field: those in its table are supported, its paragraphs list the others."""
    section = TEXT.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = [(field, "supported") for field in re.findall(r"^\| `(\w+)` \|.*\|$", section, re.MULTILINE)]
    assert len(rows) == len(re.findall(r"^\| `", section, re.MULTILINE)), heading
    listed = re.findall(r"^\*\*(Refused|Ignored)\*\*: (.*?)(?:\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    for status, fields in listed:
        rows += [(field, status.lower()) for field in re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", fields))]
    assert len(rows) == len(dict(rows)), heading
    return dict(rows)


def fields(heading: str, status: str | None = None) -> set[str]:
    """The fields of an API, its own and the shared ones."""
    shared, own = table(SHARED) if APIS[heading].shared else {}, table(heading)
    assert not set(shared) & set(own), "no field is in two tables"
    return {field for field, what in (shared | own).items() if status in (None, what)}


@pytest.mark.parametrize("heading", APIS)
def test_every_field_of_the_struct_and_of_the_official_client_has_a_row(heading):
    struct, of_client, _, _, shared = APIS[heading]
    known = set(struct.__struct_fields__)
    assert fields(heading) == known | of_client
    assert fields(heading, "ignored") == (of_client - known) | (WITHOUT_EFFECT & known)
    assert not shared or fields(heading, "refused") == set(refused_fields(struct))


def test_no_warning_comes_of_fields_that_are_listed_as_ignored():
    responses = {field for field, what in table("`POST /v1/responses`").items() if what == "ignored"}
    listed = {field for heading in APIS if heading != OPTIONS for field in fields(heading, "ignored")} | responses
    assert listed - WITHOUT_EFFECT == IGNORED


def test_fields_that_several_apis_have():
    assert set(GenerationRequest.__struct_fields__) <= set(table(SHARED))
    assert set(CountTokensRequest.__struct_fields__) < set(MessagesRequest.__struct_fields__)
    rows, known = table("`POST /v1/responses`"), set(ResponseRequest.__struct_fields__) | parameters(Responses.create)
    own = set(refused_fields(ResponseRequest)) - set(refused_fields(GenerationRequest))
    assert set(rows) == (known - set(table(SHARED))) | own
    assert {field for field, what in rows.items() if what == "refused"} == own


#: For each supported field a value that shows, and what has to be said besides to see it.
VISIBLE: dict[str, Any] = {
    "model": "other", "stream": True, "provenance": True, "max_tokens": 3, "min_tokens": 2,
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "seed": 9, "presence_penalty": 1,
    "frequency_penalty": 1, "repetition_penalty": 1.5, "repeat_penalty": 1.5, "logit_bias": {"40": 1},
    "bad_words": ["fox"], "allowed_token_ids": [40], "n": 2, "best_of": 2, "stop": ["fox"], "stop_sequences": ["fox"],
    "stop_token_ids": [40], "ignore_eos": True, "skip_special_tokens": False, "add_special_tokens": True,
    "add_special": True, "with_pieces": True,
    "truncate_prompt_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True, "return_token_strs": True,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}, "request_id": "mine",
    "cache_salt": "salt", "spec_decode_metrics": "none", "speculation": {"off": True}, "echo": True, "logprobs": True,
    "prediction": {"type": "content", "content": "Once"}, "prompt": "Tell me", "system": "Be kind",
    "content": "Tell me",
    "messages": [{"role": "user", "content": "Tell me"}], "max_completion_tokens": 3, "num_predict": 3,
    "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low",
    "tools": [FUNCTION], "thinking": {"type": "disabled"}, "think": False, "format": "json", "raw": True,
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}, "options": {"num_predict": 3},
    "grammar": 'root ::= "a"', "json_schema": {"const": "a"}, "suffix": "fox",
    "samplers": ["top_k"], "cache_prompt": False, "return_progress": True, "timings_per_token": True, "store": True,
    "keep_alive": "soon",  # what it does shows in tests/models/test_idle.py
    "tool_choice": "none", "stream_options": {"include_usage": True}, "top_logprobs": 2,
    "include_stop_str_in_output": True, "return_tokens_as_token_ids": True, "continue_final_message": True,
}  # fmt: skip
BESIDES: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [FUNCTION]},
    "stream_options": {"stream": True},
    "return_progress": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "include_stop_str_in_output": {"stop": "fox"},
    "return_tokens_as_token_ids": {"prompt_logprobs": 0},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "Tell"}]},
}
TOOL = {"name": "look", "input_schema": SCHEMA}
#: What is otherwise in one of them.
OWN: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    (COMPLETIONS, "logprobs"): (1, {}),
    (COMPLETIONS, "top_logprobs"): (2, {}),
    (COMPLETIONS, "add_special_tokens"): (False, {}),
    ("`POST /v1/messages`", "tools"): ([TOOL], {}),
    ("`POST /v1/messages`", "tool_choice"): ({"type": "none"}, {"tools": [TOOL]}),
    ("`POST /api/chat`", "stream"): (False, {}),
    ("`POST /api/generate`", "stream"): (False, {}),
}
#: What is never twice the same.
TIMES = r'"created_at":"[^"]*"|"created":\d+|"\w+_duration":\d+|"\w+_ms":[\d.e-]+|"\w+_per_second":[\d.e+]+'


@pytest.fixture(scope="module")
def agent() -> Tokenizer:
    """A model that thinks and calls tools, begins texts with a special token, and whose template has a variable."""
    tokenizer = byte_level_tokenizer(AGENT_TEMPLATE + "{{ reasoning_effort }}")
    special = [("<|system|>", tokenizer.encode("<|system|>")[0])]
    tokenizer._backend.post_processor = processors.TemplateProcessing(single="<|system|> $A", special_tokens=special)
    return tokenizer


async def seen(tokenizer: Tokenizer, heading: str, said: dict[str, Any]) -> tuple[str, int, str]:
    """What a request makes the engine do, and its answer, without ids and times."""
    api = APIS[heading]
    engine = ScriptedEngine([*tokenizer.encode("Once upon a fox<|user|>there was", False), END], run=3)
    async with served(engine, tokenizer) as client:
        body = api.ask | ({"options": said} if heading == OPTIONS else said)
        response = await client.post(api.path, json=body, headers={"X-Request-Id": "r"})
        answer = re.sub(TIMES, "", await response.text())
    return repr([msgspec.structs.replace(one, id="", fork_of=None) for one in engine.requests]), response.status, answer


@pytest.mark.parametrize(
    ("heading", "field"), [(one, field) for one in APIS for field in sorted(fields(one, "supported") - OF_TOOLS)]
)
async def test_every_supported_field_makes_a_difference(agent, heading, field):
    """One that is typed and then forgotten would be ignored in silence."""
    value, besides = OWN.get((heading, field)) or (VISIBLE[field], BESIDES.get(field, {}))
    without = await seen(agent, heading, besides)
    assert without == await seen(agent, heading, besides), "the comparison is not sound"
    assert without != await seen(agent, heading, besides | {field: value})


@pytest.mark.parametrize("heading", APIS)
async def test_refused_fields_are_refused_by_name_and_ignored_ones_ignored(agent, heading):
    for field in sorted(fields(heading, "refused")):
        said: dict[str, Any] = {field: 5} | ({"repeat_penalty": 1.5} if field == "repeat_last_n" else {})
        requested, status, answer = await seen(agent, heading, said)
        assert (requested, status, field in answer) == ("[]", 400, True), field
        assert not APIS[heading].shared or f'"type":"invalid_request_error","param":"{field}"' in answer
    for value in (True, False, None):
        assert await seen(agent, heading, dict.fromkeys(fields(heading, "ignored"), value)) == await seen(
            agent, heading, {}
        )
