"""The items of a conversation: checked, normalised, and converted to chat messages; and the tools of a response,
which may be in namespaces and take plain text, as functions of a chat request.

::

    items       message(user)  reasoning  message(assistant)  function_call  function_call  function_call_output ..
    messages    user           assistant{reasoning_content, content, tool_calls[2]}         tool ..

    tools       function look   namespace files { function read, custom patch }    web_search
    functions   look            files.read   files.patch(input)                    left out, and named

Calls are returned under the client's names.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from foresay.server.api.responses.schemas import FunctionTool, InputItem, InputPart, OutputItem
from foresay.server.schemas.bounds import MOST_MESSAGES, weigh
from foresay.server.text.conversation import FUNCTION
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import ContextLengthExceeded, InvalidRequest, Path, inside

NAMESPACE, CUSTOM = "namespace", "custom"
#: The types of tools that are not left out.
SERVED = (FUNCTION, CUSTOM, NAMESPACE)
#: The type of items that add tools, and of those that stand for others.
ADDITIONAL, COMPACTION = "additional_tools", "compaction"
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


class Toolbox(msgspec.Struct, frozen=True):
    """The tools of one response.

    chat: as in a chat request. paths: of each in the client's request. names: the client's names of functions, by the
    chat's. warnings: about custom tools.
    """

    chat: list[Json] = []
    paths: list[Path] = []
    names: dict[str, ClientName] = {}
    warnings: list[Warned] = []

    @classmethod
    def of(
        cls, tools: Sequence[FunctionTool] | None, given: Sequence[InputItem], before: Sequence[InputItem]
    ) -> Toolbox:
        """Collect the request's tools and those added by items, now and earlier; errors name the field."""
        toolbox = cls()
        toolbox._add(tools or (), ("tools",))
        bringing: list[tuple[Path, InputItem]] = [(("previous_response_id",), item) for item in before]
        bringing += [(("input", index, "tools"), item) for index, item in enumerate(given)]
        for path, item in bringing:
            if item.type == ADDITIONAL:
                toolbox._add(item.tools or (), path)
        return toolbox

    def _add(self, tools: Sequence[FunctionTool], path: Path, space: FunctionTool | None = None) -> None:
        """Add tools, those of a namespace one by one. path: of them all. space: their namespace."""
        for index, tool in enumerate(tools):
            at = (*path, index)
            if tool.name is None and tool.type in SERVED:
                raise InvalidRequest((*at, "name"), " is required")
            if tool.type == NAMESPACE and space is None:
                self._add(tool.tools or (), (*at, "tools"), tool)
                continue
            chat: Json = {"type": tool.type}
            if tool.type in (FUNCTION, CUSTOM):
                name = ClientName(tool.name or "", space.name if space else None, tool.type == CUSTOM)
                self.names[full_name(*name[:2])] = name
                about = {"name": full_name(*name[:2]), "description": _description(tool, space)}
                takes = {"parameters": _TEXT} if name.custom else {"parameters": tool.parameters, "strict": tool.strict}
                chat = {"type": FUNCTION, "function": about | takes}
            if _grammar(tool):
                self.warnings.append(warning("format_not_enforced", (*at, "format")))
            self.chat.append(chat)
            self.paths.append(at)

    @property
    def fields(self) -> dict[Path, Path]:
        """The client's fields by the chat's."""
        placed = enumerate(self.paths)
        return {(*tool, *more): path for n, path in placed for tool in [("tools", n)] for more in ((), ("function",))}

    def client_name(self, name: str) -> ClientName:
        """The client's name of the function that the model calls ``name``."""
        return self.names.get(name, ClientName(name))


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


def _description(tool: FunctionTool, space: FunctionTool | None) -> str | None:
    """The description for the model; the first tool of a namespace includes the namespace's."""
    lines = [tool.description] if tool.description else []
    if space is not None and space.description and space.tools and tool is space.tools[0]:
        lines.insert(0, f"({space.name}: {space.description})")
    if grammar := _grammar(tool):
        lines.append(f"The input follows this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}")
    return "\n".join(lines) or None


def _grammar(tool: FunctionTool) -> Json:
    """The grammar of a custom tool's input; empty if any text is allowed."""
    shape = tool.format or {}
    return shape if tool.type == CUSTOM and shape.get("type") == "grammar" else {}


ROLES = ("user", "system", "developer", "assistant")


class ItemType(NamedTuple):
    """A type of item. prefix: of its ids. required: its required fields."""

    prefix: str
    required: tuple[str, ...] = ()


KINDS = {
    "message": ItemType("msg", ("content",)),
    "function_call": ItemType("fc", ("call_id", "name", "arguments")),
    "function_call_output": ItemType("fco", ("call_id", "output")),
    "custom_tool_call": ItemType("ctc", ("call_id", "name", "input")),
    "custom_tool_call_output": ItemType("ctco", ("call_id", "output")),
    "reasoning": ItemType("rs"),
    ADDITIONAL: ItemType("at", ("tools",)),
    COMPACTION: ItemType("cmp", ("encrypted_content",)),
}
REFERENCE = "item_reference"
TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")

# -- normalised ------------------------------------------------------------------------------------------------------


def new_id(kind: str) -> str:
    """A fresh id for an item of type ``kind``."""
    return f"{KINDS[kind].prefix}_{uuid.uuid4().hex}"


def given_items(
    given: str | list[InputItem] | None, find: Callable[[str], InputItem | None] = lambda id: None
) -> list[InputItem]:
    """The items of ``input``, with type, id and content parts; errors name the field. find: returns an earlier output
    item by its id, for references.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    items = []
    for index, item in enumerate(given):
        with inside("input", index):
            items.append(_normal(_found(item, find)))
    return items


def _found(item: InputItem, find: Callable[[str], InputItem | None]) -> InputItem:
    """The item itself, or the one that it references."""
    if item.type != REFERENCE:
        return item
    _require(item, "id")
    found = find(item.id or "")
    if found is None:
        wrong = f": there is no item {item.id!r}: its response was not stored, or was dropped to make room"
        raise InvalidRequest("id", wrong)
    return found


def _normal(item: InputItem) -> InputItem:
    kind = item.type or ("message" if item.role is not None else None)
    if kind not in KINDS:
        known = ", ".join([*KINDS, REFERENCE])
        raise InvalidRequest("type", f" must be one of {known}, got {item.type!r}")
    if kind == "message" and item.role not in ROLES:
        raise InvalidRequest("role", f" must be one of {', '.join(ROLES)}, got {item.role!r}")
    _require(item, *KINDS[kind].required)
    changes: dict[str, Any] = {}
    if kind == "message":
        text = "output_text" if item.role == "assistant" else "input_text"
        changes = {"content": _parts(item.content, "content", text)}
    elif kind == "reasoning":
        content = _parts(item.content, "content", "reasoning_text")
        changes = {"summary": item.summary or [], "content": content}
    elif kind.endswith("_output"):
        _parts(item.output, "output", "input_text")
    elif kind == COMPACTION:
        _compacted(item)
    id, status = item.id or new_id(kind), item.status or "completed"
    return msgspec.structs.replace(item, type=kind, id=id, status=status, **changes)


def _require(item: InputItem, *fields: str) -> None:
    for field in fields:
        if getattr(item, field) is None:
            raise InvalidRequest(field, " is required")


def _parts(content: str | list[InputPart] | None, field: str, kind: str) -> list[InputPart]:
    """The parts of some content; a plain text becomes one of type ``kind``."""
    if isinstance(content, str):
        return [InputPart(type=kind, text=content)]
    for index, part in enumerate(content or ()):
        if part.type not in TEXTS or (part.refusal if part.type == "refusal" else part.text) is None:
            raise InvalidRequest((field, index), ": only parts with text are supported")
    return content or []


def compaction_of(items: Sequence[InputItem]) -> InputItem:
    """The item that stands for others. They are encoded, not encrypted: any server understands it, also after a
    restart, and its client has read them all."""
    content = base64.b64encode(msgspec.json.encode(items)).decode()
    return InputItem(type=COMPACTION, id=new_id(COMPACTION), encrypted_content=content)


def _compacted(item: InputItem) -> list[InputItem]:
    """The items that a compaction stands for."""
    field = "encrypted_content"
    try:
        content = base64.b64decode(item.encrypted_content or "", validate=True)
        weigh(content, field)
        items = [_normal(one) for one in msgspec.json.decode(content, type=list[InputItem]) if one.type != COMPACTION]
    except (ValueError, RecursionError, InvalidRequest):  # msgspec's and base64's errors are ValueErrors
        raise InvalidRequest(field, " is not that of a compaction of this server") from None
    return items


def unfolded(items: list[tuple[Path, InputItem]]) -> list[tuple[Path, InputItem]]:
    """Items, each with a path: the last compaction replaced by what it stands for, and before it nothing but what was
    said to the model and is not in it."""
    at = max((index for index, (_, item) in enumerate(items) if item.type == COMPACTION), default=None)
    if at is None:
        return items
    path, compaction = items[at]
    held = _compacted(compaction)
    known = {(one.role, _text(one.content)) for one in held if one.role}
    others = [(where, one) for where, one in items[:at] if one.role not in (None, "assistant")]
    added = [(where, one) for where, one in others if (one.role, _text(one.content)) not in known]
    return [*added, *((path, one) for one in held), *items[at + 1 :]]


def output_as_input(output: Sequence[OutputItem]) -> list[InputItem]:
    """The model's output as items of a continued conversation, just as a client would send them back."""
    return msgspec.json.decode(msgspec.json.encode(output), type=list[InputItem])


# -- as a chat -----------------------------------------------------------------------------------------------------


def messages_of(instructions: str | None, before: Sequence[InputItem], given: Sequence[InputItem]) -> list[Any]:
    """The conversation as chat messages: earlier items, and those given now (errors name these)."""
    placed: list[tuple[Path, InputItem]] = [(("previous_response_id",), item) for item in before]
    placed += [(("input", index, "call_id"), item) for index, item in enumerate(given)]
    placed = unfolded(placed)
    count = len(placed)
    if count > MOST_MESSAGES:
        wrong = f"The conversation has {count:,} items, those before it included; at most {MOST_MESSAGES:,} are allowed"
        raise ContextLengthExceeded("input", wrong)
    chat = _Chat()
    if instructions is not None:
        chat.add_text("system", instructions)
    for path, item in placed:
        chat.add(item, path)
    return chat.all_messages()


class _Chat:
    """Collects messages, each with the outputs of its calls behind it, whatever was said before these. Consecutive
    output of the model is one message."""

    def __init__(self) -> None:
        self._groups: list[list[dict[str, Any]]] = []  # a message, then the outputs of its calls
        self._opening: list[str] = []  # system messages before all others
        self._called: dict[str | None, list[dict[str, Any]]] = {}  # the group of each call

    def add(self, item: InputItem, path: Path) -> None:
        """Add an item. path: of the field that an error names."""
        match item.type:
            case "message" if item.role == "assistant":
                self._say("content", item.content, "content")
            case "message":
                self.add_text("system" if item.role == "developer" else str(item.role), _text(item.content))
            case "reasoning":
                self._say("reasoning_content", item.content, "content", "reasoning_content")
            case "additional_tools":
                pass
            case "function_call" | "custom_tool_call":
                arguments = item.arguments if item.type == "function_call" else arguments_of(item.input or "")
                function = {"name": full_name(item.name, item.namespace), "arguments": arguments}
                calls = self._last().setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
                self._called[item.call_id] = self._groups[-1]
            case _:
                if item.call_id not in self._called:
                    raise InvalidRequest(path, f": there is no call {item.call_id!r} for this output")
                result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                self._called[item.call_id].append(result)

    def add_text(self, role: str, text: str) -> None:
        """Add a message of another role. System messages at the beginning are merged: some templates allow only one."""
        if role == "system" and len(self._groups) == len(self._opening[:1]):
            self._opening.append(text)
            self._groups = [[{"role": role, "content": ""}]]
        else:
            self._groups.append([{"role": role, "content": text}])

    def all_messages(self) -> list[dict[str, Any]]:
        """All messages."""
        if self._opening:
            self._groups[0][0]["content"] = "\n\n".join(self._opening)
        return [message for group in self._groups for message in group]

    def _say(self, field: str, content: str | list[InputPart] | None, *taken: str) -> None:
        """Add to a field of the message that :meth:`_last` returns."""
        message = self._last(*taken)
        message[field] = "\n\n".join(filter(None, (message.get(field), _text(content))))

    def _last(self, *taken: str) -> dict[str, Any]:
        """The model's current message, or a new one if it already has one of the fields ``taken``; but none begins
        between calls and their outputs."""
        last, *results = self._groups[-1] if self._groups else [{"role": ""}]
        spoken = "tool_calls" not in last and any(last.get(field) for field in taken)
        if last["role"] != "assistant" or results or spoken:
            last = {"role": "assistant", "content": ""}
            self._groups.append([last])
        return last


def _text(content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)
