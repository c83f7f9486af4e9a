from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foresay.server.api.responses.items import Toolbox, compaction_of, given_items, messages_of, output_as_input
from foresay.server.api.responses.request import chat_request
from foresay.server.api.responses.schemas import (
    FunctionCall,
    InputItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseRequest,
)
from foresay.server.text.conversation import messages
from foresay.spec.errors import InvalidRequest

USER = {"role": "user", "content": "Hi"}


def items(*given: dict[str, Any]) -> list[InputItem]:
    return given_items(msgspec.convert(list(given), list[InputItem]))


def chat(**fields: Any):
    body = msgspec.convert({"input": "Hi"} | fields, ResponseRequest)
    return chat_request(body, (), given := given_items(body.input), Toolbox.of(body.tools, given, ()))


def test_a_text_is_a_message_of_the_user():
    (item,) = given_items("Hi")
    assert (item.type, item.role, item.status) == ("message", "user", "completed")
    assert item.id is not None and item.id.startswith("msg_")
    assert messages_of(None, (), [item]) == [{"role": "user", "content": "Hi"}]


def test_what_the_model_wrote_without_interruption_is_one_message():
    given = items(
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x":1}'},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "now?"}]},
    )
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert messages_of(None, (), given) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "user", "content": "And\nnow?"},
    ]


def test_what_stands_between_calls_goes_before_them():
    """Their outputs come after all of them, and a template wants these right behind the calls' message."""
    thoughts = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("One.", "Two.")
    ]
    texts = [{"role": "assistant", "content": text} for text in ("Wait.", "More.")]
    calls = [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in "ab"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": id} for id in "ab"]
    written = [one for three in zip(thoughts, texts, calls, strict=True) for one in three]
    _, result, *results = messages_of(None, (), items(USER, *written, *outputs))
    assert (result["reasoning_content"], result["content"]) == ("One.\n\nTwo.", "Wait.\n\nMore.")
    assert [call["id"] for call in result["tool_calls"]] == [one["tool_call_id"] for one in results] == ["a", "b"]


def test_what_is_said_between_a_call_and_its_output_comes_after_the_output():
    """Templates want outputs right behind the message of their calls."""
    calls = [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in "abc"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": id} for id in "abc"]
    notes = [{"role": role, "content": text} for role, text in (("user", "Quick"), ("developer", "Be brief"))]
    late = {"role": "assistant", "content": "Well"}
    given = items(USER, *calls[:2], notes[0], outputs[1], notes[1], outputs[0], calls[2], USER, late, outputs[2])
    assert [
        (one["role"], one.get("tool_call_id", one["content"]), [call["id"] for call in one.get("tool_calls", ())])
        for one in messages(chat_request(ResponseRequest(), (), given, Toolbox.of((), given, ())))
    ] == [
        ("user", "Hi", []),
        ("assistant", "", ["a", "b"]),
        ("tool", "b", []),
        ("tool", "a", []),
        ("user", "Quick", []),
        ("system", "Be brief", []),
        ("assistant", "", ["c"]),
        ("tool", "c", []),
        ("user", "Hi", []),
        ("assistant", "Well", []),
    ]
    assert messages_of(None, given[:4], given[4:]) == messages_of(None, (), given), "whatever was stored before"


def test_a_compaction_stands_for_what_was_before_it():
    """The user's messages that are sent beside it are in it, and not read twice; what a client adds stays."""
    rule, added = {"role": "developer", "content": "Be brief"}, {"role": "developer", "content": "It is Monday"}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    held = items(rule, USER, call, {"type": "function_call_output", "call_id": "a", "output": "one"})
    compaction = msgspec.to_builtins(compaction_of(held))
    assert compaction["type"] == "compaction" and compaction["id"].startswith("cmp_")
    after = items({"role": "user", "content": "And now?"})
    given = items(USER, added, rule, {"role": "assistant", "content": "Before"}, compaction)
    read = messages_of(None, (), [*given, *after])
    expected = messages_of(None, (), [*items(added), *held, *after])
    assert read == expected == messages_of(None, given, after)
    assert messages_of(None, (), [*items(compaction), *given, *after]) == expected, "the last stands for all"


@pytest.mark.parametrize(
    "content",
    ["", "gAAAAABo", "e30=", "W10", "W3siYSI6IDF9XQ==", "WzFd", "é", "W" * 9 + "A===", "[]", "W1tbW1tbW1tbW1tbW1tb"],
)
def test_a_compaction_of_another_server_is_refused(content):
    with pytest.raises(InvalidRequest) as caught:
        items(USER, {"type": "compaction", "encrypted_content": content})
    assert caught.value.param == "input[1].encrypted_content"


def test_two_answers_in_a_row_stay_two():
    given = items(USER, {"role": "assistant", "content": "One"}, {"role": "assistant", "content": "Two"})
    assert [message["content"] for message in messages_of(None, (), given)] == ["Hi", "One", "Two"]


def test_instructions_and_leading_system_messages_are_one_system_message():
    given = items({"role": "developer", "content": "B"}, USER, {"role": "system", "content": "C"})
    assert messages_of("A", (), given) == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "C"},
    ]


def test_the_output_of_a_response_goes_on_as_items():
    output: list[OutputItem] = [
        ReasoningItem(id="rs_1", status="completed", content=[ReasoningText(text="Hm.")]),
        OutputMessage(id="msg_1", status="completed", content=[OutputText(text="Yes.")]),
        FunctionCall(id="fc_1", status="completed", call_id="c", name="f", arguments="{}"),
    ]
    again = given_items(msgspec.convert(msgspec.to_builtins(output), list[InputItem]))
    assert messages_of(None, output_as_input(output), []) == messages_of(None, (), again)
    (message,) = messages_of(None, output_as_input(output), [])
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


def test_each_option_becomes_the_one_of_chat():
    schema = {"type": "object"}
    request = chat(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        top_k=4,
        min_p=0.1,
        presence_penalty=1.0,
        stop=["x"],
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True, "description": "d"}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        user="ignored",
        metadata={"a": "b"},
    )
    assert (request.max_completion_tokens, request.temperature, request.top_p, request.seed) == (7, 0.5, 0.9, 3)
    assert (request.top_k, request.min_p, request.presence_penalty, request.stop) == (4, 0.1, 1.0, ["x"])
    assert (request.logprobs, request.top_logprobs, request.parallel_tool_calls) == (True, 2, False)
    assert request.tools is not None and request.tools[0].function is not None
    assert (request.tools[0].function.name, request.tools[0].function.strict) == ("f", True)
    assert msgspec.to_builtins(request.tool_choice) == {"type": "function", "function": {"name": "f"}}
    form = msgspec.to_builtins(request.response_format)
    assert form["type"] == "json_schema" and form["json_schema"]["schema"] == schema


def test_null_requests_nothing():
    fields = [field for field in ResponseRequest.__struct_fields__ if field != "input"]
    request = chat(**dict.fromkeys(fields))
    assert [message.content for message in request.messages] == ["Hi"]
