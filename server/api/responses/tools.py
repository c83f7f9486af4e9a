"""The tools of a response, which may stand in namespaces and take plain text, as the functions of a chat.

::

    client                                           chat
    function  look                                   look
    namespace files { function read, custom patch }  files.read   files.patch(input)
    web_search                                       left out, and named

What the model calls goes back by the client's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from foresay.server.api.responses.schemas import FunctionTool, InputItem
from foresay.server.text.conversation import FUNCTION
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import InvalidRequest, Path

NAMESPACE, CUSTOM = "namespace", "custom"
#: An item of a conversation that brings more tools.
ADDITIONAL = "additional_tools"
_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
Json = dict[str, Any]


class ClientName(NamedTuple):
    """What the client calls a function of the chat. custom: it takes a text, not arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


class _Placed(NamedTuple):
    """A tool, the path to it, and its namespace."""

    tool: FunctionTool
    path: Path
    namespace: FunctionTool | None = None


class Toolbox(msgspec.Struct, frozen=True):
    """The tools of one response.

    chat: as a chat request has them. paths: to each in the client's request. names: the client's name of each function,
    by the chat's. warnings: about custom tools.
    """

    chat: tuple[Json, ...]
    paths: tuple[Path, ...]
    names: dict[str, ClientName]
    warnings: tuple[Warned, ...]

    @classmethod
    def of(
        cls, tools: Sequence[FunctionTool] | None, given: Sequence[InputItem], before: Sequence[InputItem]
    ) -> Toolbox:
        """Of the request's tools and of those that items bring, now and before; errors name the field."""
        placed = list(_placed(tools or (), ("tools",)))
        bringing: list[tuple[Path, InputItem]] = [(("previous_response_id",), item) for item in before]
        bringing += [(("input", index, "tools"), item) for index, item in enumerate(given)]
        for path, item in bringing:
            if item.type == ADDITIONAL:
                placed += _placed(item.tools or (), path)
        functions = [(one, _called(one)) for one in placed if one.tool.type in (FUNCTION, CUSTOM)]
        return cls(
            chat=tuple(_chat_tool(one) for one in placed),
            paths=tuple(one.path for one in placed),
            names={full_name(*name[:2]): name for _, name in functions},
            warnings=tuple(
                warning("format_not_enforced", (*one.path, "format")) for one, _ in functions if _grammar(one.tool)
            ),
        )

    @property
    def fields(self) -> dict[Path, Path]:
        """The client's fields by those of the chat."""
        placed = enumerate(self.paths)
        return {(*tool, *more): path for n, path in placed for tool in [("tools", n)] for more in ((), ("function",))}

    def client_name(self, name: str) -> ClientName:
        """What the client calls a function that the model calls ``name``."""
        return self.names.get(name, ClientName(name))


def served(tools: Sequence[FunctionTool] | None) -> list[FunctionTool]:
    """Those that are not left out."""
    return [tool for tool in tools or () if tool.type in (FUNCTION, CUSTOM, NAMESPACE)]


def full_name(name: str | None, namespace: str | None) -> str:
    """What a function of a namespace is called in the chat. No name of OpenAI's has a dot in it."""
    return f"{namespace}.{name}" if namespace else name or ""


def spoken_input(arguments: str) -> str:
    """The text that a call of a custom tool is: what its arguments hold; or they themselves, if the model broke off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (msgspec.DecodeError, KeyError, RecursionError):
        return arguments


def arguments_of(text: str) -> str:
    """The arguments that say ``text`` to a custom tool."""
    return msgspec.json.encode({"input": text}).decode()


def _placed(tools: Sequence[FunctionTool], path: Path, namespace: FunctionTool | None = None) -> Iterator[_Placed]:
    for index, tool in enumerate(tools):
        at = (*path, index)
        if tool.type == NAMESPACE and namespace is None:
            if tool.name is None:
                raise InvalidRequest((*at, "name"), " is required")
            yield from _placed(tool.tools or (), (*at, "tools"), tool)
        else:
            yield _Placed(tool, at, namespace)


def _called(one: _Placed) -> ClientName:
    if one.tool.name is None:
        raise InvalidRequest((*one.path, "name"), " is required")
    namespace = None if one.namespace is None else one.namespace.name
    return ClientName(one.tool.name, namespace, one.tool.type == CUSTOM)


def _chat_tool(one: _Placed) -> Json:
    tool = one.tool
    if tool.type not in (FUNCTION, CUSTOM):
        return {"type": tool.type}
    custom = tool.type == CUSTOM
    function = {
        "name": full_name(*_called(one)[:2]),
        "description": _description(one),
        "parameters": _TEXT if custom else tool.parameters,
        "strict": None if custom else tool.strict,
    }
    return {"type": FUNCTION, "function": function}


def _description(one: _Placed) -> str | None:
    """What the model reads about the tool; the first of a namespace tells what that is for."""
    said = [one.tool.description] if one.tool.description else []
    space = one.namespace
    if space is not None and space.description and space.tools and one.tool is space.tools[0]:
        said.insert(0, f"({space.name}: {space.description})")
    if grammar := _grammar(one.tool):
        said.append(f"The input follows this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}")
    return "\n".join(said) or None


def _grammar(tool: FunctionTool) -> Json:
    """The grammar that a custom tool's input is to follow; empty if any text will do."""
    shape = tool.format or {}
    return shape if tool.type == CUSTOM and shape.get("type") == "grammar" else {}
