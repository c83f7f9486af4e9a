"""From messages and tools as clients send them to the input of chat templates; errors name the field.

Templates expect a call's arguments as an object and missing content as ""; clients send JSON text and null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from itertools import takewhile
from typing import Any, Literal

import msgspec

from foresay.server.schemas import bounds
from foresay.server.schemas import chat as schemas
from foresay.server.text.warned import Warned, tools_left_out
from foresay.spec.errors import InvalidRequest, Path, inside


def messages(request: schemas.ChatRequest) -> list[dict[str, Any]]:
    """The conversation as input for chat templates."""
    if not request.messages:
        raise InvalidRequest("messages", " must not be empty")
    bounds.check_count(request.messages, bounds.MOST_MESSAGES, "messages")
    _check_arguments(request.messages)
    rendered, called = [], frozenset[str]()
    for index, message in enumerate(request.messages):
        with inside("messages", index):
            rendered.append(_message(message, called))
        if message.role != "tool":
            called = frozenset(call.id for call in message.tool_calls or ())
    return rendered


def folded(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """The conversation with a system message only at its beginning, and the indices of the later ones.

    Later ones become user messages, merged with neighbouring ones, since templates often require alternating turns.
    """
    adapted: list[dict[str, Any]] = []
    moved: list[int] = []
    for index, message in enumerate(messages):
        late = message["role"] == "system" and index > 0
        if late:
            moved.append(index)
            message = message | {"role": "user"}
        if adapted and message["role"] == adapted[-1]["role"] == "user" and (late or index - 1 in moved):
            adapted[-1] = adapted[-1] | {"content": f"{adapted[-1]['content']}\n\n{message['content']}"}
        else:
            adapted.append(message)
    return adapted, moved


def in_channels(messages: list[dict[str, Any]], words: Collection[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """The conversation as gpt-oss's template expects it: one call per message, followed by its results; a call's text
    is added to the reasoning, which has another name there; a system message only at the beginning."""
    messages, moved = folded(messages)
    adapted: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        own = {name: value for name, value in message.items() if name != "reasoning_content"}
        thought = message.get("reasoning_content")
        if calls := message.get("tool_calls"):
            results = list(takewhile(lambda other: other["role"] == "tool", messages[index + 1 :]))
            own |= {"content": "", "thinking": "\n\n".join(filter(None, (thought, message["content"])))}
            for call in calls:
                adapted.append(own | {"tool_calls": [call]})
                adapted += [result for result in results if result["tool_call_id"] == call["id"]]
                own["thinking"] = ""
        elif message["role"] != "tool":
            adapted.append(own if thought is None else own | {"thinking": thought})
    return adapted, moved


def in_turns(messages: list[dict[str, Any]], words: Collection[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """The conversation as Gemma 4's template expects it: arguments are objects, and text next to calls is a message
    before them, since behind their results it would end the turn. Its first versions want results in the message with
    the calls, and what was said next, too."""
    embedded = "tool_responses" in words and "tool_call_id" not in words
    adapted: list[dict[str, Any]] = []
    for message in messages:
        calls = [_mapped(call) for call in message.get("tool_calls", ())]
        if calls and message["content"]:
            adapted.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": "assistant", "content": ""}
        asked = adapted[-1] if adapted and "tool_calls" in adapted[-1] else {}
        if embedded and asked and message["role"] == "tool":
            names = (call["function"]["name"] for call in asked["tool_calls"] if call["id"] == message["tool_call_id"])
            result = {"name": next(names), "response": message["content"]}
            adapted[-1] = asked | {"tool_responses": [*asked.get("tool_responses", ()), result]}
        elif (
            embedded
            and "tool_responses" in asked
            and message["role"] == "assistant"
            and not (calls or asked["content"])
        ):
            adapted[-1] = asked | message
        else:
            adapted.append(message | {"tool_calls": calls} if calls else message)
    return adapted, []


def _mapped(call: dict[str, Any]) -> dict[str, Any]:
    """The call with arguments that are an object: if they broke off, their text is in one."""
    function, given = call["function"], call["function"]["arguments"]
    return call | {"function": function | {"arguments": {"arguments": given}}} if isinstance(given, str) else call


#: Conversations as templates expect them, by the name in a format's entry: made of messages and of the names in the
#: template; and the indices of the system messages that were moved.
SHAPES = {"channels": in_channels, "objects": in_turns}


#: Describes tools to a model whose chat template has none. Its calls have the format ``hermes``.
_TOOLS = """You can call functions. To call one, write nothing but its name and arguments, as JSON between tags:
<tool_call>
{"name": "function", "arguments": {"parameter": "value"}}
</tool_call>
The functions are:
"""


def spelled_out(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template without tools: they are described in the system message, or in the first message
    if there is none; calls and results become text of messages, results as the user's.
    """
    adapted: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if index and messages[index - 1]["role"] == "tool":
                adapted[-1]["content"] += f"\n{result}"
            else:
                adapted.append({"role": "user", "content": result})
            continue
        functions = [call["function"] for call in message.get("tool_calls", ())]
        objects = [json.dumps({"name": one["name"], "arguments": one["arguments"]}) for one in functions]
        calls = [f"<tool_call>\n{one}\n</tool_call>" for one in objects]
        content = "\n".join(filter(None, [message["content"], *calls]))
        adapted.append({name: value for name, value in message.items() if name != "tool_calls"} | {"content": content})
    if tools:
        listed = _TOOLS + "\n".join(json.dumps(tool["function"]) for tool in tools)
        order = (adapted[0]["content"], listed) if adapted[0]["role"] == "system" else (listed, adapted[0]["content"])
        adapted[0] = adapted[0] | {"content": "\n\n".join(filter(None, order))}
    return adapted


def _check_arguments(messages: list[schemas.Message]) -> None:
    """Raise if the JSON of the calls' arguments is too large."""
    parts = 0
    for index, message in enumerate(messages):
        field = ("messages", index, "tool_calls")
        bounds.check_count(message.tool_calls, bounds.MOST_CALLS, field)
        for call in message.tool_calls or ():
            parts += bounds.weigh(call.function.arguments.encode(), field, "The text of arguments in ")
            if parts > bounds.MOST_PARTS:
                raise InvalidRequest(field, f"The arguments in messages have {bounds.TOO_MANY}")


def _message(message: schemas.Message, called: frozenset[str]) -> dict[str, Any]:
    """One message. called: ids of the calls that a message of role ``tool`` may be the result of."""
    role = schemas.ROLES.get(message.role)
    if role is None:
        raise InvalidRequest("role", f" must be one of {', '.join(schemas.ROLES)}, got {message.role!r}")
    rendered: dict[str, Any] = {"role": role, "content": _content_of(message)}
    if message.name is not None:
        rendered["name"] = message.name
    if message.role == "tool":
        rendered["tool_call_id"] = _answered(message, called)
    elif message.role == "assistant":
        rendered |= _of_assistant(message)
    elif message.tool_calls:
        raise InvalidRequest("tool_calls", ": only the assistant calls tools")
    return rendered


def _content_of(message: schemas.Message) -> str:
    if message.content is None:
        if message.role == "assistant" and (message.tool_calls or message.reasoning_content):
            return ""
        raise InvalidRequest("content", " is required")
    if isinstance(message.content, str):
        return message.content
    for index, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(("content", index), ": only parts of type text are supported")
    return "\n".join(part.text or "" for part in message.content)


def _answered(message: schemas.Message, called: frozenset[str]) -> str:
    if message.tool_call_id is None:
        raise InvalidRequest("tool_call_id", " is required in a message of role tool")
    if message.tool_call_id not in called:
        wrong = f": the assistant's message before it has no call {message.tool_call_id!r}"
        raise InvalidRequest("tool_call_id", wrong)
    return message.tool_call_id


def _of_assistant(message: schemas.Message) -> dict[str, Any]:
    """What only assistant messages have: reasoning (templates decide whether the model sees it again) and calls."""
    rendered: dict[str, Any] = {}
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        rendered["tool_calls"] = [_call(call, index) for index, call in enumerate(message.tool_calls)]
    return rendered


def _call(call: schemas.ToolCall, index: int) -> dict[str, Any]:
    if call.type != "function":
        raise InvalidRequest(("tool_calls", index, "type"), f" must be function, got {call.type!r}")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """The JSON object in ``text``; the text itself if it is invalid, as a model's call may be broken or cut off."""
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


FUNCTION = "function"
MODES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The functions the model may call; empty if it must not call any.

    listed: all functions described in the prompt. places: their indices in the request's tools, if not 0, 1, 2 ..
    functions: those that may be called. required: at least one call must be made. parallel: more than one may be made.
    warnings: about tools that cannot be run here.
    """

    listed: tuple[schemas.Function, ...] = ()
    places: tuple[int, ...] = ()
    functions: tuple[schemas.Function, ...] = ()
    required: bool = False
    parallel: bool = True
    warnings: tuple[Warned, ...] = ()

    def path_of(self, function: schemas.Function) -> Path:
        """The field of one of the listed functions."""
        index = self.listed.index(function)
        return "tools", self.places[index] if self.places else index, "function"

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The functions that may be called, by name, with the schema of their arguments."""
        return {function.name: function.parameters or {} for function in self.functions}

    def rendered(self) -> list[dict[str, Any]]:
        """The functions as input for chat templates."""
        return [{"type": "function", "function": _described(function)} for function in self.listed]


def offered(request: schemas.ChatRequest) -> Offer:
    """The tools that the request offers, checked; errors name the field."""
    bounds.check_count(request.tools, bounds.MOST_TOOLS, "tools")
    given = list(enumerate(request.tools or ()))
    functions = {index: _function(tool, index) for index, tool in given if tool.type == FUNCTION}
    others = [(("tools", index), tool.type) for index, tool in given if tool.type != FUNCTION]
    warnings = tools_left_out(others) if others else ()
    names: dict[str, None] = {}
    for index, function in functions.items():
        if function.name in names:
            twice = f"tools: there are two functions named {function.name!r}"
            raise InvalidRequest(("tools", index, "function", "name"), twice)
        names[function.name] = None
    mode, chosen = _choice(request, names)
    if mode == "none" or not functions:
        return Offer(warnings=warnings)
    return Offer(
        listed=tuple(functions.values()),
        places=tuple(functions),
        functions=tuple(function for function in functions.values() if function.name in chosen),
        required=mode == "required",
        parallel=request.parallel_tool_calls is not False
        and not isinstance(request.tool_choice, schemas.FunctionChoice),
        warnings=warnings,
    )


def _function(tool: schemas.Tool, index: int) -> schemas.Function:
    path = ("tools", index, "function")
    if tool.function is None:
        raise InvalidRequest(path, " is required")
    if not _NAME.fullmatch(tool.function.name):
        wanted = "1 to 128 letters, digits or _ - . : /"
        raise InvalidRequest((*path, "name"), f" must be {wanted}, got {tool.function.name!r}")
    return tool.function


def _choice(
    request: schemas.ChatRequest, names: Collection[str]
) -> tuple[Literal["none", "auto", "required"], Collection[str]]:
    """The mode, and the names that may be called."""
    match request.tool_choice:
        case None | "auto":
            return "auto", names
        case "none":
            return "none", names
        case "required":
            if not names:
                raise InvalidRequest("tool_choice", " is required, but there are no tools to call")
            return "required", names
        case schemas.FunctionChoice(function=function):
            return "required", {_known(function.name, names, ("tool_choice", "function", "name"))}
        case schemas.AllowedChoice(allowed_tools=allowed):
            path = ("tool_choice", "allowed_tools")
            if allowed.mode not in ("auto", "required"):
                raise InvalidRequest((*path, "mode"), f" must be auto or required, got {allowed.mode!r}")
            chosen = {_allowed(tool, names, (*path, "tools", index)) for index, tool in enumerate(allowed.tools)}
            if not chosen:
                raise InvalidRequest((*path, "tools"), " must not be empty")
            return ("auto" if allowed.mode == "auto" else "required"), chosen
        case other:
            modes = ", ".join(MODES)
            raise InvalidRequest("tool_choice", f" must be {modes} or name a function, got {other!r}")


def _allowed(tool: schemas.NamedTool, names: Collection[str], path: Path) -> str:
    if tool.type != "function":
        raise InvalidRequest((*path, "type"), f" must be function, got {tool.type!r}")
    return _known(tool.function.name, names, (*path, "function", "name"))


def _known(name: str, names: Collection[str], path: Path) -> str:
    if name not in names:
        raise InvalidRequest(path, f": there is no tool named {name!r}")
    return name


def _described(function: schemas.Function) -> dict[str, Any]:
    """A function as the model sees it. ``strict`` is only for the server; missing parameters mean none."""
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    return described | {"parameters": function.parameters or {"type": "object", "properties": {}}}
