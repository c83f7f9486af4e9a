"""What each API refuses of a request, in its own shape and by the name that the field has there: a table for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient

from foresay.server.text.tokenizer import Tokenizer
from tests.parsers.asking import CALLED, MADE, RESULT, TOOL, USER
from tests.responses.test_tools import FILES, LOOK, SEARCH, TOOLS
from tests.server.scripted import END, ScriptedEngine, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]


class Refused(NamedTuple):
    """The field that the error names, what the request has besides what would be served (``...``: what it lacks), and
    what else the error says."""

    param: str
    fields: Json
    says: str = ""
    status: int = 400
    code: str | None = None


def each(field: str, *wrong: Any) -> list[Refused]:
    """Of a field that is wrong by itself."""
    return [Refused(field, {field: value}) for value in wrong]


TURN: Json = {"role": "user", "content": "Tell"}
LONG = [{"role": "user", "content": "fox " * 90}]
#: A request of each that would be served.
SERVED: dict[str, Json] = {
    "/v1/completions": {"prompt": "Tell"},
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/responses": {"input": "Tell"},
    "/v1/messages": {"model": "toy", "max_tokens": 200, "messages": [TURN], "system": "Be kind"},
    "/api/chat": {"model": "toy", "messages": [TURN]},
    "/api/generate": {"model": "toy", "prompt": "Tell"},
    "/tokenize": {"prompt": "Tell"},
    "/detokenize": {"tokens": [40]},
    "/apply-template": {"messages": [TURN]},
}

# -- options of sampling -----------------------------------------------------------------------------------------------

OPTIONS = [
    *each("presence_penalty", 2.1, "much"),
    *each("frequency_penalty", -2.1),
    *each("repetition_penalty", 0),
    *each("logit_bias", {"17": 101}, {"fox": 1}, {"-1": 1}, {"330": 1}, {"²": 1}, [[17, 101]], [[17, 60], [17, 60]]),
    *each("logit_bias", [[330, 1]], [[330, False]], [["x" * 8193, 1]], [[17, 1]] * 4097),
    Refused("logit_bias[0]", {"logit_bias": [17]}),
    Refused("logit_bias[1]", {"logit_bias": [[5, 1], [17, True]]}),
    *each("grammar", "no grammar"),
    Refused("grammar", {"grammar": "start: /a/", "response_format": {"type": "json_object"}}),
    Refused("grammar", {"json_schema": {"type": "object"}, "grammar": "start: /a/"}),
    *each("min_tokens", -1),
    Refused("min_tokens", {"max_tokens": 5, "min_tokens": 6}),
    *each("stop_token_ids", [330]),
    Refused("min_tokens", {"json_schema": {"type": "object"}, "min_tokens": 2}),
    *each("json_schema", {"nullable": True}),
    *each("bad_words", [""], ["  "], ["x"] * 257, "fox"),
    *each("allowed_token_ids", [], [330]),
    Refused("allowed_token_ids[0]", {"allowed_token_ids": ["5"]}),
    *each("n", 0, 129, 1.5),
    *each("best_of", 2),
    Refused("best_of", {"n": 2, "best_of": 3}),
    *each("prompt_logprobs", 21, -1),
    *each("truncate_prompt_tokens", 0, -2),
    *each("priority", 1),
]

# -- predictions -------------------------------------------------------------------------------------------------------


def predicting(content: Any, **besides: Any) -> Json:
    return {"prediction": {"type": "content", "content": content}} | besides


PREDICTIONS = [
    Refused("prediction", {"prediction": "once"}, "expected an object"),
    Refused("prediction.type", {"prediction": {"content": "once"}}, "is required"),
    Refused("prediction.content", {"prediction": {"type": "content"}}, "is required"),
    Refused("prediction.type", {"prediction": {"type": "tokens", "content": "a"}}, "invalid enum value 'tokens'"),
    Refused("prediction.content", predicting(5), "got a whole number"),
    Refused("prediction.content", predicting(None), "got null"),
    Refused("prediction.content[0]", predicting(["once"]), "expected an object, got text"),
    Refused("prediction.content[0].text", predicting([{"type": "text"}]), "is required"),
    Refused("prediction.content[1].type", predicting([
        {"type": "text", "text": "a"}, {"type": "image_url", "text": "b"}]), "invalid enum value 'image_url'"),
    Refused("prediction", predicting("once ", speculation={"off": True}), "speculation.off cannot be combined"),
    Refused("prediction.content", predicting("too long " * 100), "has more tokens than the answer may have (512)"),
]  # fmt: skip

# -- tools of chats ----------------------------------------------------------------------------------------------------


def function(**fields: Any) -> Json:
    return {"type": "function", "function": fields}


def with_call(**call: Any) -> Json:
    return {"messages": [USER, {"role": "assistant", "tool_calls": [MADE | call]}]}


def choosing(**choice: Any) -> Json:
    return {"tools": [TOOL], "tool_choice": choice}


def among(mode: str, *tools: Json) -> Json:
    return choosing(type="allowed_tools", allowed_tools={"mode": mode, "tools": list(tools)})


CHAT_TOOLS = [
    *each("tools", {}),
    Refused("tools[0].type", {"tools": [{"type": 5}]}),
    Refused("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    Refused("tool_choice.type", {"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
    Refused("tools[0].function", {"tools": [{"type": "function"}]}),
    Refused("tools[0].function.name", {"tools": [function()]}),
    Refused("tools[0].function.name", {"tools": [function(name="a b")]}),
    Refused("tools[1].function.name", {"tools": [TOOL, TOOL]}),
    Refused("tools[0].function.parameters", {"tools": [function(name="f", parameters=1)]}),
    Refused("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
    Refused("tool_choice", {"tools": [TOOL], "tool_choice": 1}),
    *each("tool_choice", "required"),
    Refused("tool_choice.type", choosing(type="custom")),
    Refused("tool_choice.function", choosing(type="function")),
    Refused("tool_choice.function.name", choosing(type="function", function={"name": "add"})),
    Refused("tool_choice.allowed_tools.mode", among("none")),
    Refused("tool_choice.allowed_tools.tools", among("auto")),
    Refused("tool_choice.allowed_tools.tools[0].function.name", among("auto", function(name="add"))),
    *each("parallel_tool_calls", "no"),
    Refused("messages[0].role", {"messages": [{"role": "function", "name": "f", "content": "a"}]}),
    Refused("messages[1].tool_calls[0].id", with_call(id=None)),
    Refused("messages[1].tool_calls[0].type", with_call(type="custom")),
    Refused("messages[1].tool_calls[0].function.name", with_call(function={"arguments": ""})),
    Refused("messages[1].tool_calls[0].function.arguments", with_call(function={"name": "f", "arguments": {}})),
    Refused("messages[0].tool_calls", {"messages": [CALLED | {"role": "user", "content": "a"}]}),
    Refused("messages[1].content", {"messages": [USER, {"role": "assistant", "tool_calls": []}]}),
    Refused("messages[2].tool_call_id", {"messages": [USER, CALLED, {"role": "tool", "content": "a"}]}),
    Refused("messages[2].tool_call_id", {"messages": [USER, CALLED, RESULT | {"tool_call_id": "other"}]}),
    Refused("messages[1].tool_call_id", {"messages": [USER, RESULT]}),
    Refused("messages[2].content", {"messages": [USER, CALLED, RESULT | {"content": None}]}),
    *each("functions", [{"name": "f"}]),
    *each("function_call", {"name": "f"}),
    Refused(
        "messages[0].function_call",
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
    ),
]

# -- who drafts --------------------------------------------------------------------------------------------------------


def speculating(param: str, says: str = "", **given: Any) -> Refused:
    return Refused(f"speculation{param}", {"speculation": given}, says)


SPECULATION = [
    speculating(".method", 'one of auto, none, draft_model, ngram on this server, got "eagle3"', method="eagle3"),
    speculating(".max_tokens", "speculation.max_tokens: expected a whole number <= 63", max_tokens=64),
    speculating(".max_tokens", "speculation.max_tokens: expected a whole number >= 0", max_tokens=-1),
    speculating(".off", "leave out either method or off", off=True, method="ngram"),
    speculating(".off", "leave out either max_tokens or off", off=True, max_tokens=4),
    speculating(".off", off=1),
    speculating("", on=True),
    Refused("speculation", {"speculation": True}),
]

# -- items of responses ------------------------------------------------------------------------------------------------

#: One that is wrong behind one that is not, and which member of it the error names.
ITEMS: list[tuple[str, Json]] = [
    (".id", {"type": "item_reference", "id": "x"}),
    (".type", {"type": "image_generation_call", "id": "x"}),
    (".type", {"content": "x"}),
    (".role", {"role": "tool", "content": "x"}),
    (".content", {"role": "user"}),
    (".content[0]", {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
    (".call_id", {"type": "function_call", "name": "f", "arguments": "{}"}),
    (".output", {"type": "function_call_output", "call_id": "a"}),
    (".call_id", {"type": "function_call_output", "call_id": "a", "output": "x"}),
]

# -- all of it ---------------------------------------------------------------------------------------------------------

#: By path; what several paths refuse alike is above.
REFUSED: dict[str, list[Refused]] = {
    "/v1/completions": [
        *OPTIONS,
        *PREDICTIONS,
        *SPECULATION,
        Refused("prediction", predicting("once", prompt=["one", "two"]), "holds 2 prompts"),
        Refused("prediction", predicting("once", echo=True, max_tokens=0), "no tokens are generated"),
        *each("temperature", 3),
        *each("prompt", ..., "", [50, 330]),
        Refused("prompt", {"prompt": [40] * 512, "max_tokens": 1}, code="context_length_exceeded"),
        Refused("model", {"model": "gpt-9"}, status=404, code="model_not_found"),
        *each("logprobs", True, 21, -1),
        *each("top_logprobs", 3),
        *each("max_tokens", 0),
        Refused("min_tokens", {"max_tokens": 0, "echo": True, "min_tokens": 1}),
        Refused("n", {"prompt": ["a"] * 3, "n": 50}),
        Refused("prompt_logprobs", {"prompt": [[5] * 100] * 2, "n": 40, "prompt_logprobs": 20}),
        Refused("logprobs", {"prompt": [5] * 200, "n": 100, "echo": True, "logprobs": 5}),
    ],
    "/v1/chat/completions": [
        *OPTIONS,
        *PREDICTIONS,
        *SPECULATION,
        *CHAT_TOOLS,
        *each("messages", []),
        Refused("messages[1].role", {"messages": [TURN, {"content": "b"}]}),
        Refused("messages[0].content", {"messages": [{"role": "user"}]}),
        Refused("messages[0].content[0]", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "x"}}]}]}),
        Refused("messages[0].tool_calls[0].function", {"messages": [
            {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}),
        Refused("messages[0].audio", {"messages": [{"role": "assistant", "content": "a", "audio": {"id": "1"}}]}),
        Refused("stop", {"model": "toy", "stop": [""]}),
        *each("top_logprobs", 3),
        Refused("top_logprobs", {"logprobs": False, "top_logprobs": 3}),
        Refused("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        *each("logprobs", 3),
        *each("echo", True),
        Refused("prompt_logprobs", {"messages": LONG, "n": 128, "prompt_logprobs": 19}),
    ],
    "/v1/responses": [
        *PREDICTIONS,
        *SPECULATION,
        Refused("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
        Refused("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "web_search"}}),
        Refused("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "patch"}}),
        Refused("tool_choice.tools[0].name", {"tools": TOOLS, "tool_choice": {
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}}),
        Refused("tools[1].tools[1].name", {"tools": [SEARCH, FILES | {"tools": [LOOK, LOOK | {"name": "what?"}]}]}),
        *(Refused(f"input[1]{member}", {"input": [USER, item]}) for member, item in ITEMS),
        *each("background", True),
        *each("conversation", "conv_1"),
        *each("prompt", {"id": "p"}),
        *each("n", 2),
        *each("max_tokens", 5),
        *each("response_format", {"type": "json_object"}),
        *each("prompt_logprobs", 1),
        *each("input", None),
        *each("truncation", "middle"),
        Refused("include[0]", {"include": ["something"]}),
        Refused("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
        *(Refused("tools[0].name", {"tools": [tool]}) for tool in (
            {"type": "function"}, {"type": "custom"}, {"type": "namespace", "tools": []})),
        Refused("tools[0].tools[0].name", {"tools": [
            {"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}),
        Refused("tool_choice.type", {"tool_choice": {"type": "mcp"}}),
        Refused("text.format.type", {"text": {"format": {"type": "xml"}}}),
        Refused("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
        Refused("use_beam_search", {"best_of": 3, "use_beam_search": True}),
    ],
    "/v1/messages": [
        *each("max_tokens", None),
        *each("messages", []),
        Refused("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        Refused("messages[1].content[0]", {"messages": [TURN, {"role": "system", "content": [
            {"type": "thinking", "thinking": "x"}]}]}),
        Refused("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
        Refused("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        Refused("messages[1].content[0]", {"messages": [TURN, {"role": "user", "content": [
            {"type": "thinking", "thinking": "x"}]}]}),
        Refused("messages[1].content[0]", {"messages": [TURN, {"role": "assistant", "content": [
            {"type": "tool_result", "tool_use_id": "x"}]}]}),
        *each("temperature", 1.5),
        *each("stop_sequences", "x"),
        Refused("tool_choice.name", {"tools": [{"type": "web_search_20250305", "name": "web_search"}],
                                     "tool_choice": {"type": "tool", "name": "web_search"}}),
        Refused("tools[0].name", {"tools": [{"name": "what?", "input_schema": {}}]}),
        Refused("tools[1].name", {"tools": [{"type": "mcp_toolset"}, {"input_schema": {}}]}),
        Refused("tool_choice.name", {"tool_choice": {"type": "tool"}, "tools": []}),
    ],
    "/api/chat": [
        Refused("options.mirostat", {"options": {"mirostat": 2}}),
        Refused("options.typical_p", {"options": {"typical_p": 0.5}}),
        Refused("options.repeat_last_n", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}),
        *each("format", "xml"),
        *each("think", "hard"),
        Refused("top_logprobs", {"logprobs": True, "top_logprobs": 99}),
        *each("top_logprobs", 1),
        Refused("messages[0].images", {"messages": [TURN | {"images": ["aGk="]}]}),
        Refused("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        *each("messages", "Tell"),
        *each("model", None),
    ],
    "/api/generate": [
        *each("suffix", "x"),
        *each("template", "{{ .Prompt }}"),
        *each("context", [1, 2]),
        Refused("system", {"raw": True, "system": "x"}),
        Refused("top_logprobs", {"raw": True, "top_logprobs": 1}),
        Refused("logprobs", {"raw": True, "logprobs": True, "top_logprobs": 99}),
    ],
    "/tokenize": [
        *each("prompt", ...),
        *each("messages", [TURN]),
        Refused("messages", {"prompt": ..., "messages": []}),
        *(Refused(name, {"prompt": ..., "messages": [TURN], name.partition("[")[0]: value}) for name, value in (
            ("tools", True), ("tools[0].function", [{"type": "function"}]), ("chat_template", "{{ x }}"))),
        Refused("model", {"model": "other"}, status=404, code="model_not_found"),
    ],
    "/detokenize": each("tokens", [330], [-1], [10**30], ...),
    "/apply-template": [Refused("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]})],
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(agent: Tokenizer) -> AsyncIterator[tuple[ScriptedEngine, TestClient]]:
    engine = ScriptedEngine([END])
    async with served(engine, agent) as client:
        yield engine, client


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        pytest.param(path, refused, id=f"{path}-{refused.param}-{number}")
        for path, all_of_it in REFUSED.items()
        for number, refused in enumerate(all_of_it)
    ],
)
async def test_it_is_named_before_the_engine_hears_of_it(
    server: tuple[ScriptedEngine, TestClient], path: str, refused: Refused
) -> None:
    engine, client = server
    body = {name: value for name, value in (SERVED[path] | refused.fields).items() if value is not ...}
    for stream in (False, True):
        response = await client.post(path, json=body | {"stream": stream})
        answer = await response.json()
        assert response.status == refused.status, answer
        error = answer["error"]
        if path.startswith("/api/"):
            assert set(answer) == {"error"} and refused.param in error
        elif path == "/v1/messages":
            assert (answer["type"], error["type"], error["param"]) == ("error", "invalid_request_error", refused.param)
            assert refused.param in error["message"]
        else:
            assert set(answer) == {"error"} and set(error) == {"message", "type", "param", "code"}
            assert (error["param"], error["type"]) == (refused.param, "invalid_request_error")
            assert error["code"] == refused.code
            assert refused.param.partition("[")[0] in error["message"] and refused.says in error["message"]
    assert engine.requests == []
