"""Parts of an answer as a chat message, whole or in deltas."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from server.schemas.chat import AssistantMessage, ChatDelta
from server.schemas.tools import CalledFunction, FunctionDelta, ToolCall, ToolCallDelta
from server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, joined


def delta_of(part: Part) -> ChatDelta:
    """What the part adds to the message."""
    match part:
        case TextPart(text=text):
            return ChatDelta(content=text)
        case ReasoningPart(text=text):
            return ChatDelta(reasoning_content=text)
        case ToolCallPart():
            return ChatDelta(tool_calls=[_call_delta(part)])


def message_of(parts: Sequence[Part]) -> AssistantMessage:
    """The message that all parts make."""
    whole = joined(list(parts))
    text = "".join(part.text for part in whole if isinstance(part, TextPart))
    thought = "".join(part.text for part in whole if isinstance(part, ReasoningPart))
    calls = [_call(part) for part in whole if isinstance(part, ToolCallPart)]
    return AssistantMessage(
        content=text or (None if thought or calls else ""),
        reasoning_content=thought or UNSET,
        tool_calls=calls or UNSET,
    )


def _call_delta(part: ToolCallPart) -> ToolCallDelta:
    if part.id is None:
        return ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.arguments))
    function = FunctionDelta(name=part.name or "", arguments=part.arguments)
    return ToolCallDelta(index=part.index, id=part.id, type="function", function=function)


def _call(part: ToolCallPart) -> ToolCall:
    return ToolCall(id=part.id or "", function=CalledFunction(name=part.name or "", arguments=part.arguments))
