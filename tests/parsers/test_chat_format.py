"""How a model writes is read off its chat template; settings and requests can override it."""

from __future__ import annotations

import re

import pytest

from foresay.server.catalog.formats import FORMATS, REASONING
from foresay.server.schemas.chat import Function
from foresay.server.text.conversation import Offer
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parts import PlainText, ToolCallPart
from tests.parsers.families import family_tokenizer
from tests.parsers.reading import text_of

THINK = ("<think>", "</think>")
OFFER = Offer(listed=(Function(name="f"),), functions=(Function(name="f"),))


@pytest.mark.parametrize(
    ("family", "calls", "thinks"),
    [
        ("hermes", "hermes", None),
        ("qwen3", "hermes", THINK),
        ("deepseek", "hermes", THINK),
        ("qwen3_coder", "qwen3_coder", None),
        ("llama3", "llama3", None),
        ("mistral", "mistral", None),
        ("gemma4", "gemma4", REASONING["gemma4"]),
        ("plain", "hermes", None),
    ],
)
def test_the_template_shows_the_dialect(tokenizer, calls, thinks):
    chat_format = ChatFormat.of(tokenizer)
    assert (chat_format.calls, chat_format.thinks) == (calls, thinks)
    assert ("tools" in chat_format.words) != chat_format.generic


def test_settings_have_the_last_word():
    tokenizer = family_tokenizer("qwen3")
    assert ChatFormat.of(tokenizer, "none", "none") == ChatFormat(words=ChatFormat.of(tokenizer).words)
    assert ChatFormat.of(tokenizer, "mistral").calls == "mistral"
    for calls, thinks in (("llama3", "think"), ("gemma4", "gemma4")):
        other = ChatFormat.of(family_tokenizer("plain"), calls, thinks)
        assert (other.calls, other.thinks) == (calls, REASONING[thinks])


def test_only_special_tokens_are_markers():
    """Others have a text, which is how they are found."""
    assert ChatFormat.of(family_tokenizer("qwen3")).markers == {}
    mistral = family_tokenizer("mistral")
    assert set(ChatFormat.of(mistral).markers.values()) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert set(ChatFormat.of(family_tokenizer("deepseek")).markers.values()) == set(THINK)
    assert set(ChatFormat.of(family_tokenizer("gemma4")).markers.values()) == set(FORMATS["gemma4"].control)


def test_nothing_is_parsed_that_was_not_requested():
    hermes, qwen3 = ChatFormat.of(family_tokenizer("hermes")), ChatFormat.of(family_tokenizer("qwen3"))
    assert isinstance(hermes.parser("r", Offer(), opened=False), PlainText)
    assert not isinstance(hermes.parser("r", OFFER, opened=False), PlainText)
    assert not isinstance(qwen3.parser("r", Offer(), opened=False), PlainText)
    unparsed = qwen3.parser("r", Offer(), opened=False)
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert text_of(unparsed.feed(text) + unparsed.flush()) == text


@pytest.mark.parametrize(("family", "form"), [("hermes", r"call_[A-Za-z0-9]{24}"), ("mistral", "[A-Za-z0-9]{9}")])
def test_ids_of_calls_look_as_the_family_wants_and_follow_from_the_request(tokenizer, form):
    chat_format = ChatFormat.of(tokenizer)
    call = '{"name": "f", "arguments": {}}'
    text = f"[TOOL_CALLS][{call}, {call}]" if chat_format.calls == "mistral" else f"<tool_call>{call}</tool_call>" * 2

    def ids(request_id: str) -> list[str]:
        parser = chat_format.parser(request_id, OFFER, opened=False)
        parts = parser.feed(text) + parser.flush()
        return [part.id for part in parts if isinstance(part, ToolCallPart) and part.id is not None]

    assert len({*ids("a"), *ids("b")}) == 4
    assert ids("a") == ids("a")
    assert all(re.fullmatch(form, id) for id in ids("a"))


@pytest.mark.parametrize(
    ("prompt", "continues", "opened"),
    [
        ("<|user|>Hi<|assistant|><think>\n", False, True),
        ("<|user|>What does <think> do?<|assistant|>", False, False),
        ("<|assistant|><think>\n\n</think>\n\n", False, False),
        ("<|assistant|><think>Let me", True, True),
        ("<|assistant|><think>Let me</think>Well", True, False),
        ("<|assistant|>Well", True, False),
    ],
)
def test_the_prompt_shows_whether_the_model_is_thinking(prompt, continues, opened):
    assert ChatFormat.of(family_tokenizer("qwen3")).opened_by(prompt, continues) is opened
