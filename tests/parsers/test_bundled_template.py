"""The bundled target's chat template: as it was trained without tools, and every part of a conversation with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foresay.server.settings.resolved import BUNDLED
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": " Be kind.\n"},
    {"role": "user", "content": "\nHello "},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "{{ x }}"},
]
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED / "target")


def text(tokenizer: Tokenizer, messages: list[Any], tools: list[Any] | None = None) -> str:
    rendered = tokenizer._templates.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(rendered, str)
    return rendered


@pytest.mark.parametrize("first", [0, 1, 3])
def test_without_tools_it_is_what_the_target_was_trained_on(tokenizer: Tokenizer, first: int) -> None:
    turns = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in TALK[first:])
    assert text(tokenizer, TALK[first:]) == f"{turns}<|assistant|>"


@pytest.mark.parametrize("first", [0, 1])
def test_with_tools_nothing_of_the_conversation_is_left_out(tokenizer: Tokenizer, first: int) -> None:
    turns = [
        *TALK[first:],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "Rain"},
    ]
    shown = text(tokenizer, turns, [WEATHER])
    assert shown.count("<|system|>") == 1 and ("Be kind." in shown) is (first == 0)
    assert json.dumps(WEATHER) in shown
    assert '<|assistant|><tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call><|end|>' in shown
    assert shown.endswith("<|user|><tool_response>Rain</tool_response><|end|><|assistant|>")


def test_its_calls_are_read_as_hermes_writes_them(tokenizer: Tokenizer) -> None:
    chat_format = ChatFormat.of(tokenizer)
    assert chat_format.calls == "hermes" and {"tools", "tool_calls", "tool"} <= chat_format.words
