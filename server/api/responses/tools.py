"""The tools of a response, which may be in namespaces and take plain text, as functions of a chat request.

::

    client                                           chat
    function  look                                   look
    namespace files { function read, custom patch }  files.read   files.patch(input)
    web_search                                       left out, and named

Calls are returned under the client's names.
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
#: The type of items that add tools.
ADDITIONAL = "additional_tools"
_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
Json = dict[str, Any]


class ClientName(NamedTuple):
    """The client's name of a chat function. custom: it takes a text, not arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


class _Placed(NamedTuple):
    """A tool, its path in the request, and its namespace."""

    tool: FunctionTool
    path: Path
    namespace: FunctionTool | None = None


class Toolbox(msgspec.Struct, frozen=True):
    """The tools of one response.

    chat: as in a chat request. paths: of each in the client's request. names: the client's names of functions, by the
    chat's. warnings: about custom tools.
    """

    chat: tuple[Json, ...]
    paths: tuple[Path, ...]
    names: dict[str, ClientName]
    warnings: tuple[Warned, ...]

    @classmethod
    def of(
        cls, tools: Sequence[FunctionTool] | None, given: Sequence[InputItem], before: Sequence[InputItem]
    ) -> Toolbox:
        """Collect the request's tools and those added by items, now and earlier; errors name the field."""
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
        """The client's fields by the chat's."""
        placed = enumerate(self.paths)
        return {(*tool, *more): path for n, path in placed for tool in [("tools", n)] for more in ((), ("function",))}

    def client_name(self, name: str) -> ClientName:
        """The client's name of the function that the model calls ``name``."""
        return self.names.get(name, ClientName(name))


def served(tools: Sequence[FunctionTool] | None) -> list[FunctionTool]:
    """The tools that are not left out."""
    return [tool for tool in tools or () if tool.type in (FUNCTION, CUSTOM, NAMESPACE)]


def full_name(name: str | None, namespace: str | None) -> str:
    """The chat's name of a function in a namespace. OpenAI's names contain no dots."""
    return f"{namespace}.{name}" if namespace else name or ""


def spoken_input(arguments: str) -> str:
    """The input text of a custom tool's call, from its arguments; the arguments themselves if they are incomplete."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (msgspec.DecodeError, KeyError, RecursionError):
        return arguments


def arguments_of(text: str) -> str:
    """The arguments that pass ``text`` to a custom tool."""
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
    """The description for the model; the first tool of a namespace includes the namespace's."""
    lines = [one.tool.description] if one.tool.description else []
    space = one.namespace
    if space is not None and space.description and space.tools and one.tool is space.tools[0]:
        lines.insert(0, f"({space.name}: {space.description})")
    if grammar := _grammar(one.tool):
        lines.append(f"The input follows this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}")
    return "\n".join(lines) or None


def _grammar(tool: FunctionTool) -> Json:
    """The grammar of a custom tool's input; empty if any text is allowed."""
    shape = tool.format or {}
    return shape if tool.type == CUSTOM and shape.get("type") == "grammar" else {}
