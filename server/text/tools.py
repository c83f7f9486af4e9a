"""What a request says about tools: which functions are offered, and what is expected of the model."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from server.schemas.bounds import MOST_TOOLS, check_count
from server.schemas.chat import ChatRequest
from server.schemas.shared import RequestWarning
from server.schemas.tools import AllowedChoice, Function, FunctionChoice, NamedTool, Tool
from server.text.warned import tools_left_out
from spec.errors import InvalidRequest

FUNCTION = "function"
MODES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The functions the model may call; none where it must not call any.

    listed: all functions the prompt tells of. places: their fields in the request, if not simply those of the tools in
    order. functions: those that may be called. required: at least one call must be made. parallel: more than one may
    be. warnings: about tools that cannot be run here.
    """

    listed: tuple[Function, ...] = ()
    places: tuple[str, ...] = ()
    functions: tuple[Function, ...] = ()
    required: bool = False
    parallel: bool = True
    warnings: tuple[RequestWarning, ...] = ()

    def place_of(self, function: Function) -> str:
        """The field of one of the listed functions."""
        index = self.listed.index(function)
        return self.places[index] if self.places else f"tools[{index}].function"

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The functions that may be called, by name, with the schema of their arguments."""
        return {function.name: function.parameters or {} for function in self.functions}

    def rendered(self) -> list[dict[str, Any]]:
        """The functions as chat templates take them."""
        return [{"type": "function", "function": _described(function)} for function in self.listed]


def offered(request: ChatRequest) -> Offer:
    """What the request offers, checked; errors name the field."""
    check_count(request.tools, MOST_TOOLS, "tools")
    given = [(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ())]
    functions = {place: _function(tool, place) for place, tool in given if tool.type == FUNCTION}
    warnings = tools_left_out([(place, tool.type) for place, tool in given if tool.type != FUNCTION])
    names: dict[str, None] = {}
    for place, function in functions.items():
        if function.name in names:
            raise InvalidRequest(f"{place}.function.name", f"tools: there are two functions named {function.name!r}")
        names[function.name] = None
    mode, chosen = _choice(request, names)
    if mode == "none" or not functions:
        return Offer(warnings=warnings)
    return Offer(
        listed=tuple(functions.values()),
        places=tuple(f"{place}.function" for place in functions),
        functions=tuple(function for function in functions.values() if function.name in chosen),
        required=mode == "required",
        parallel=request.parallel_tool_calls is not False and not isinstance(request.tool_choice, FunctionChoice),
        warnings=warnings,
    )


def _function(tool: Tool, place: str) -> Function:
    if tool.function is None:
        raise InvalidRequest(f"{place}.function", f"{place}.function is required")
    if not _NAME.fullmatch(tool.function.name):
        field = f"{place}.function.name"
        wanted = "1 to 128 letters, digits or _ - . : /"
        raise InvalidRequest(field, f"{field} must be {wanted}, got {tool.function.name!r}")
    return tool.function


def _choice(
    request: ChatRequest, names: Collection[str]
) -> tuple[Literal["none", "auto", "required"], Collection[str]]:
    """The mode, and the names that may be called."""
    match request.tool_choice:
        case None | "auto":
            return "auto", names
        case "none":
            return "none", names
        case "required":
            if not names:
                raise InvalidRequest("tool_choice", "tool_choice is required, but there are no tools to call")
            return "required", names
        case FunctionChoice(function=function):
            return "required", {_known(function.name, names, "tool_choice.function.name")}
        case AllowedChoice(allowed_tools=allowed):
            place = "tool_choice.allowed_tools"
            if allowed.mode not in ("auto", "required"):
                raise InvalidRequest(f"{place}.mode", f"{place}.mode must be auto or required, got {allowed.mode!r}")
            chosen = {_allowed(tool, names, f"{place}.tools[{index}]") for index, tool in enumerate(allowed.tools)}
            if not chosen:
                raise InvalidRequest(f"{place}.tools", f"{place}.tools must not be empty")
            return ("auto" if allowed.mode == "auto" else "required"), chosen
        case other:
            modes = ", ".join(MODES)
            raise InvalidRequest("tool_choice", f"tool_choice must be {modes} or name a function, got {other!r}")


def _allowed(tool: NamedTool, names: Collection[str], place: str) -> str:
    if tool.type != "function":
        raise InvalidRequest(f"{place}.type", f"{place}.type must be function, got {tool.type!r}")
    return _known(tool.function.name, names, f"{place}.function.name")


def _known(name: str, names: Collection[str], field: str) -> str:
    if name not in names:
        raise InvalidRequest(field, f"{field}: there is no tool named {name!r}")
    return name


def _described(function: Function) -> dict[str, Any]:
    """A function as the model sees it. strict is a word to the server; without parameters there are none to give."""
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    return described | {"parameters": function.parameters or {"type": "object", "properties": {}}}
