"""Functions in namespaces and custom tools through ``/v1/responses``, as coding agents send them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest

from foresay.server.api.responses.items import Toolbox, arguments_of, spoken_input
from foresay.server.api.responses.schemas import FunctionTool
from foresay.server.text.tokenizer import Tokenizer
from tests.responses.serving import asking, saying, serving
from tests.routes.conftest import AGENT_TEMPLATE
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import INFO, ScriptedEngine

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Mends",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
FILES: dict[str, Any] = {"type": "namespace", "name": "files", "description": "On disk", "tools": [LOOK, PATCH]}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": True}
TOOLS: Any = [LOOK, SEARCH, FILES]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = call("files.look", at="x") + call("files.patch", input='+ "new"\n') + call("look", at="y")


def roomy(tokenizer: Tokenizer, text: str, **options: Any) -> ScriptedEngine:
    """An engine whose context holds what is said about tools, in tokens that are hardly more than characters."""
    engine = saying(tokenizer, text, **options)
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096)
    return engine


def prompt_of(engine, agent) -> str:
    text: str = agent.decode(engine.requests[-1].prompt, False)
    return text


@pytest.mark.parametrize("run", [1, 7, 500])
async def test_calls_go_back_by_the_clients_names(agent, run):
    engine = roomy(agent, CALLS, run=run)
    ask: Any = {"model": "toy", "input": "Go", "tools": TOOLS, "max_output_tokens": 900}
    async with asking(engine, agent) as client:
        whole = await client.responses.create(**ask)
        async with client.responses.stream(**ask) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        look, patch, bare = (item.model_dump(exclude={"id", "call_id"}, exclude_unset=True) for item in response.output)
        assert (look["type"], look["namespace"], look["name"]) == ("function_call", "files", "look")
        assert (patch["type"], patch["namespace"], patch["name"]) == ("custom_tool_call", "files", "patch")
        assert patch["input"] == '+ "new"\n'
        assert (bare["type"], bare["name"], "namespace" in bare) == ("function_call", "look", False)
        assert [tool.type for tool in response.tools] == ["function", "namespace"]
    kinds = [event.type for event in events]
    assert kinds.count("response.custom_tool_call_input.delta") == 1
    done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == '+ "new"\n'


async def test_the_model_sees_the_tools_and_the_client_which_ones_are_left_out(agent):
    engine = roomy(agent, "Yes")
    async with asking(engine, agent) as client:
        response = await client.responses.with_raw_response.create(model="toy", input="Go", tools=TOOLS)
    prompt = prompt_of(engine, agent)
    for part in ('"look"', '"files.look"', "(files: On disk)", '"files.patch"', "Mends", "(lark)", "start: /.+/"):
        assert part in prompt
    assert "web_search" not in prompt
    warnings = json.loads(response.text)["warnings"]
    assert [(one["code"], one["param"]) for one in warnings] == [
        ("tool_left_out", "tools[1]"),
        ("format_not_enforced", "tools[2].tools[1].format"),
    ]


async def test_items_may_be_referred_to_as_long_as_they_are_kept(agent):
    """As Vercel's AI SDK does with every item it was given."""
    engine = roomy(agent, call("look", at="x"))
    async with asking(engine, agent) as client:
        kept = await client.responses.create(model="toy", input="Go", tools=[LOOK])
        lost = await client.responses.create(model="toy", input="Go", tools=[LOOK], store=False)
        for first, status in ((kept, 200), (lost, 400)):
            (made,) = first.output
            assert made.type == "function_call"
            result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "a.py"}
            given: Any = [{"role": "user", "content": "Go"}, {"type": "item_reference", "id": made.id}, result]
            if status == 200:
                await client.responses.create(model="toy", input=given, tools=[LOOK])
            else:
                with pytest.raises(openai.BadRequestError, match=made.id or "") as caught:
                    await client.responses.create(model="toy", input=given, tools=[LOOK])
                assert caught.value.param == "input[1].id"
        await client.responses.delete(kept.id)
        given[1]["id"] = kept.output[0].id
        with pytest.raises(openai.BadRequestError, match="there is no item"):
            await client.responses.create(model="toy", input=given, tools=[LOOK])
    assert '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>' in prompt_of(engine, agent)


@pytest.mark.parametrize("follow", [False, True])
async def test_calls_and_results_are_read_again(agent, follow):
    engine = roomy(agent, CALLS)
    async with asking(engine, agent) as client:
        first = await client.responses.create(model="toy", input="Go", tools=TOOLS)
        calls: Any = [item.model_dump(exclude_none=True) for item in first.output]
        results: Any = [
            {"type": kind, "call_id": made["call_id"], "output": f"result {number}"}
            for number, (kind, made) in enumerate(
                zip(["function_call_output", "custom_tool_call_output", "function_call_output"], calls, strict=True)
            )
        ]
        more: Any = {"previous_response_id": first.id} if follow else {}
        given = results if follow else [{"role": "user", "content": "Go"}, *calls, *results]
        await client.responses.create(model="toy", input=given, tools=TOOLS, max_output_tokens=1, **more)
    prompt = prompt_of(engine, agent)
    assert "result 0<|end|><|user|>result 1<|end|><|user|>result 2<|end|><|assistant|>" in prompt
    if not follow:  # else the model reads its own words again
        for name in ("files.look", "files.patch", "look"):
            assert f'{{"name": "{name}", "arguments": ' in prompt
        assert '{"input": "+ \\"new\\"\\n"}' in prompt


async def test_tools_may_come_with_the_conversation(agent):
    engine = roomy(agent, call("functions.exec", input="ls"))
    item: Any = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [
            {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
            {"type": "mcp", "server_label": "x"},
        ],
    }
    async with asking(engine, agent) as client:
        raw = await client.responses.with_raw_response.create(
            model="toy", input=[item, {"role": "user", "content": "Go"}]
        )
        first = raw.parse()
        (made,) = first.output
        assert made.type == "custom_tool_call"
        result: Any = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "a.py"}
        again = await client.responses.create(model="toy", previous_response_id=first.id, input=[result])
    for response in (first, again):
        assert (response.output[0].type, response.output[0].input) == ("custom_tool_call", "ls")  # type: ignore[union-attr]
    assert [one["param"] for one in json.loads(raw.text)["warnings"]] == ["input[0].tools[1]"]
    assert '"functions.exec"' in prompt_of(engine, agent)


async def test_over_a_websocket_the_first_event_has_the_warnings(agent):
    engine = roomy(agent, CALLS)
    create = {"type": "response.create", "model": "toy", "input": "Go", "tools": TOOLS, "max_output_tokens": 9000}
    async with serving(engine, agent) as (http, _), http.ws_connect("/v1/responses") as socket:
        await socket.send_json(create)
        event = await socket.receive_json(timeout=60)
    warnings = event["response"]["warnings"]
    assert event["type"] == "response.created"
    codes = [one["code"] for one in warnings]
    assert codes == ["tool_left_out", "max_tokens_clamped", "format_not_enforced"]
    assert warnings[1]["param"] == "max_output_tokens"


@pytest.mark.parametrize("kind", ["function", "custom"])
async def test_a_choice_of_a_namespaces_tool(agent, kind):
    name = {"function": "look", "custom": "patch"}[kind]
    choice = {"type": kind, "name": name, "namespace": "files"}
    engine = roomy(agent, CALLS)
    async with serving(engine, agent) as (http, _):
        response = await http.post("/v1/responses", json={"input": "Go", "tools": TOOLS, "tool_choice": choice})
        assert response.status == 200, await response.text()
    grammar = engine.requests[0].grammar
    assert grammar is not None and f"files.{name}" in grammar.text


async def test_hints_that_the_model_has_no_word_for_are_named(agent):
    hints: Any = {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}
    effort = byte_level_tokenizer(AGENT_TEMPLATE + "{{ reasoning_effort }}{{ verbosity }}")
    nothing: Any = {"reasoning": {"effort": "none"}, "text": {"verbosity": "medium"}}
    answers = []
    for tokenizer, fields in ((agent, hints), (agent, nothing), (effort, hints)):
        engine = roomy(tokenizer, "Yes")
        async with serving(engine, tokenizer) as (http, _):
            body = await (await http.post("/v1/responses", json={"input": "Go", **fields})).json()
        answers.append((body.get("warnings", []), prompt_of(engine, tokenizer)))
    assert [one["param"] for one in answers[0][0]] == ["reasoning.effort", "text.verbosity"]
    assert {one["code"] for one in answers[0][0]} == {"hint_left_out"}
    assert (answers[1][0], answers[2][0]) == ([], [])
    assert answers[2][1].endswith("<|assistant|>highlow")


def test_what_a_custom_tool_gets():
    assert spoken_input(arguments_of('a "b"\n')) == 'a "b"\n'
    for broken in ('{"input": "a', "ls -l", "[1]", '{"input": 5}', '{"other": "x"}', ""):
        assert spoken_input(broken) == broken


def test_names_that_nobody_offered_stay_as_they_are():
    toolbox = Toolbox.of([FunctionTool(type="function", name="look")], (), ())
    assert toolbox.client_name("a.b.c") == ("a.b.c", None, False)
