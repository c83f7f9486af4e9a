"""The grammar of a chat answer: forced calls, calls or the requested format, and the thinking before them.

Special tokens of the bundled pair stand in for the tags of reasoning.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from foresay.server.schemas.chat import ChatRequest
from foresay.server.text.conversation import offered
from foresay.server.text.grammars.answers import chat_grammar
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar
from tests.grammar.oracle import DONE, TARGET, THINK, accepts

TOOLS = [{"type": "function", "function": {"name": "time"}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
TAGS = ("<|system|>", "<|user|>")
CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET)


async def grammar(
    chat_format: ChatFormat, prompt: str = "Hi", opened: bool = False, continues: bool = False, **fields: Any
) -> Grammar | None:
    given = {"messages": [{"role": "user", "content": "x"}], "continue_final_message": continues, **fields}
    request = msgspec.convert(given, ChatRequest)
    return await chat_grammar(request, offered(request), chat_format, tokenizer(), prompt, opened)


async def test_any_answer_without_a_format():
    assert await grammar(ChatFormat(calls="hermes", thinks=TAGS), tools=TOOLS) is None


async def test_required_calls():
    forced = await grammar(ChatFormat(calls="hermes"), tools=TOOLS, tool_choice="required", response_format=FORMAT)
    assert forced is not None and forced.param == "tool_choice"
    assert accepts(forced.text, CALL)
    assert not accepts(forced.text, "3")


async def test_calls_or_an_answer_in_the_format():
    either = await grammar(ChatFormat(calls="hermes"), tools=TOOLS, response_format=FORMAT)
    assert either is not None
    assert accepts(either.text, CALL)
    assert accepts(either.text, "3")
    assert not accepts(either.text, "three")
    answer = await grammar(ChatFormat(calls="hermes"), tools=TOOLS, tool_choice="none", response_format=FORMAT)
    assert answer is not None
    assert not accepts(answer.text, CALL)


async def test_calls_or_an_answer_by_a_lark_grammar():
    lark = {"grammar": 'start: "yes" | "no"'}
    either = await grammar(ChatFormat(calls="mistral"), tools=TOOLS, structured_outputs=lark)
    assert either is not None
    assert accepts(either.text, '[TOOL_CALLS][{"name": "time", "arguments": {}}]')
    assert accepts(either.text, "no")


async def test_calls_that_look_like_json_and_a_format_exclude_each_other():
    with pytest.raises(InvalidRequest, match="tool_choice none or required") as caught:
        await grammar(ChatFormat(calls="llama3"), tools=TOOLS, response_format=FORMAT)
    assert caught.value.param == "response_format"


async def test_forced_calls_and_a_least_length_exclude_each_other():
    with pytest.raises(InvalidRequest, match="says where the text ends") as caught:
        await grammar(ChatFormat(calls="hermes"), tools=TOOLS, tool_choice="required", min_tokens=3)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("prompt", "opened", "continues", "after", "opens"),
    [
        ("Hi<|system|>\n", True, False, DONE, None),
        ("Hi", False, False, DONE, THINK),
        ("Hi<|system|>\n\n<|user|>\n\n", False, False, None, None),
        ("Hi: so", False, True, None, None),
    ],
)
async def test_where_the_grammar_begins(
    prompt: str, opened: bool, continues: bool, after: int | None, opens: int | None
):
    made = await grammar(ChatFormat(thinks=TAGS), prompt, opened, continues, response_format=FORMAT)
    assert made is not None
    assert (made.after, made.opens) == (after, opens)


async def test_reasoning_whose_end_is_no_token():
    spelled = ChatFormat(thinks=("<think>", "</think>"))
    with pytest.raises(InvalidRequest, match="are no tokens"):
        await grammar(spelled, "Hi<think>", opened=True, response_format=FORMAT)
    made = await grammar(spelled, response_format=FORMAT)
    assert made is not None
    assert made.after is None
