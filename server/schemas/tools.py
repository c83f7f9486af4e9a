"""Tools on the wire, as ``/v1/chat/completions`` spells them: offered functions, the choice among them, calls."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

# -- requests ------------------------------------------------------------------------------------------------------


class Function(msgspec.Struct, kw_only=True):
    """A function the model may call. parameters: a JSON schema of its arguments. strict: they must match it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Something the model may use; those of other types than ``function`` are left out, and named."""

    type: str
    function: Function | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """An offered tool by its name."""

    type: str = "function"
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """Some of the offered tools. mode: ``auto`` or ``required``."""

    mode: str
    tools: list[NamedTool]


class FunctionChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """``tool_choice``: this function must be called."""

    function: FunctionName


class AllowedChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """``tool_choice``: only some of the offered tools count."""

    allowed_tools: AllowedTools


#: ``none``, ``auto``, ``required``, or one of the objects.
ToolChoice = str | FunctionChoice | AllowedChoice

# -- what requests and answers share -------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct, kw_only=True):
    """Which function was called. arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: CalledFunction


# -- streams -------------------------------------------------------------------------------------------------------


class FunctionDelta(msgspec.Struct, kw_only=True):
    """More of a call. name: in its first delta."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """More of call number ``index`` of the answer. id, type: in its first delta."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta
