"""docs/compatibility.md says of every field of the other APIs what the code does with it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import anthropic.resources
import msgspec
import ollama
import pytest
from tokenizers import processors

from foresay.server.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from foresay.server.api.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from foresay.server.api.openai.tokens import TokenizeRequest
from foresay.server.text.tokenizer import Tokenizer
from tests.routes.conftest import AGENT_TEMPLATE
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.test_compatibility import table

OF_CLIENTS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
TURN = {"role": "user", "content": "Tell"}
TOOL = {"name": "look", "input_schema": {"type": "object"}}


def parameters(function: Callable[..., Any]) -> set[str]:
    """What the official client takes."""
    return set(inspect.signature(function).parameters) - OF_CLIENTS


APIS: dict[str, tuple[type[msgspec.Struct], set[str]]] = {
    "`POST /v1/messages`": (MessagesRequest, parameters(anthropic.resources.Messages.create)),
    "`POST /api/chat`": (OllamaChatRequest, parameters(ollama.Client.chat)),
    "`POST /api/generate`": (OllamaGenerateRequest, parameters(ollama.Client.generate)),
    "Ollama's `options`": (OllamaOptions, set(ollama.Options.model_fields)),
    "`POST /tokenize`": (TokenizeRequest, set()),
}


@pytest.mark.parametrize("heading", APIS)
def test_every_field_of_the_struct_and_of_the_official_client_has_a_row(heading):
    struct, of_client = APIS[heading]
    rows, known = table(heading), set(struct.__struct_fields__)
    assert set(rows) == known | of_client
    ignored = {field for field, what in rows.items() if what == "ignored"}
    assert ignored == of_client - known
    assert set(rows.values()) <= {"supported", "refused", "ignored"}


def test_counting_takes_fields_of_messages():
    assert set(CountTokensRequest.__struct_fields__) < set(MessagesRequest.__struct_fields__)


ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "`POST /v1/messages`": ("/v1/messages", {"model": "toy", "max_tokens": 40, "messages": [TURN]}),
    "`POST /api/chat`": ("/api/chat", {"model": "toy", "messages": [TURN]}),
    "`POST /api/generate`": ("/api/generate", {"model": "toy", "prompt": "Tell"}),
    "`POST /tokenize`": ("/tokenize", {"messages": [TURN]}),
    "Ollama's `options`": ("/api/chat", {"model": "toy", "messages": [TURN]}),
}
#: For each supported field a value that shows, and what has to be said besides to see it.
VISIBLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("other", {}),
    "messages": ([{"role": "user", "content": "Tell me"}], {}),
    "prompt": ("Tell me", {}),
    "system": ("Be kind", {}),
    "max_tokens": (3, {}),
    "stream": (True, {}),
    "stop_sequences": (["fox"], {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (3, {}),
    "min_p": (0.5, {}),
    "seed": (9, {}),
    "tools": ([TOOL], {}),
    "tool_choice": ({"type": "none"}, {"tools": [TOOL]}),
    "thinking": ({"type": "disabled"}, {}),
    "output_config": ({"format": {"type": "json_schema", "schema": {"type": "object"}}}, {}),
    "format": ("json", {}),
    "options": ({"num_predict": 3}, {}),
    "think": (False, {}),
    "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "raw": (True, {}),
    "keep_alive": ("soon", {}),  # what it does shows in tests/models/test_idle.py
    "num_predict": (3, {}),
    "stop": (["fox"], {}),
    "repeat_penalty": (1.5, {}),
    "presence_penalty": (1, {}),
    "frequency_penalty": (1, {}),
    "add_special_tokens": (True, {}),
    "return_token_strs": (True, {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": [{"role": "assistant", "content": "Tell"}]}),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
}
#: What tools look like elsewhere.
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OWN_VALUES: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("`POST /api/chat`", "tools"): ([FUNCTION], {}),
    ("`POST /tokenize`", "tools"): ([FUNCTION], {}),
    ("`POST /api/chat`", "stream"): (False, {}),
    ("`POST /api/generate`", "stream"): (False, {}),
}


#: What is never twice the same.
TIMES = r'"created_at":"[^"]*"|"\w+_duration":\d+|"\w+_ms":[\d.]+|"tokens_per_second":[\d.]+'


@pytest.fixture(scope="module")
def agent() -> Tokenizer:
    """A model that thinks and calls tools, and begins texts with a special token."""
    tokenizer = byte_level_tokenizer(AGENT_TEMPLATE)
    special = [("<|system|>", tokenizer.encode("<|system|>")[0])]
    tokenizer._backend.post_processor = processors.TemplateProcessing(single="<|system|> $A", special_tokens=special)
    return tokenizer


async def seen(tokenizer, heading: str, fields: dict[str, Any]) -> tuple[str, int, str]:
    """What a request makes the engine do, and its answer, without ids and times."""
    path, ask = ASKS[heading]
    engine = ScriptedEngine([*tokenizer.encode("Once upon a fox there was", False), END], run=3)
    async with served(engine, tokenizer) as client:
        said = {"options": fields} if heading.startswith("Ollama") else fields
        response = await client.post(path, json=ask | said, headers={"X-Request-Id": "r"})
        body = re.sub(TIMES, "", await response.text())
    return repr([msgspec.structs.replace(one, id="") for one in engine.requests]), response.status, body


SUPPORTED = [(heading, field) for heading in APIS for field, what in table(heading).items() if what == "supported"]


@pytest.mark.parametrize(("heading", "field"), SUPPORTED)
async def test_every_supported_field_makes_a_difference(agent, heading, field):
    value, besides = OWN_VALUES.get((heading, field), VISIBLE[field])
    without = await seen(agent, heading, besides)
    assert without == await seen(agent, heading, besides), "the comparison is not sound"
    assert without != await seen(agent, heading, besides | {field: value})


@pytest.mark.parametrize("heading", ASKS)
async def test_refused_fields_are_refused_by_name_and_ignored_ones_ignored(agent, heading):
    path, ask = ASKS[heading]
    options = heading.startswith("Ollama")
    rows = table(heading)
    async with served(ScriptedEngine([END]), agent) as client:
        for field in [field for field, what in rows.items() if what == "refused"]:
            said: dict[str, Any] = {field: 5} | ({"repeat_penalty": 1.5} if field == "repeat_last_n" else {})
            response = await client.post(path, json=ask | ({"options": said} if options else said))
            assert (response.status, field in await response.text()) == (400, True), field
    ignored = {field: 5 for field, what in rows.items() if what == "ignored"}
    assert await seen(agent, heading, ignored) == await seen(agent, heading, {})
