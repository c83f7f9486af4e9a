"""Converts a request to ``/v1/responses`` to the equivalent chat request, and maps errors back to its fields. Options
are handled where chat handles them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from foresay.server.api.common import validation
from foresay.server.api.common.validation import FieldNames
from foresay.server.api.responses import schemas
from foresay.server.api.responses.items import CUSTOM, Toolbox, full_name, messages_of
from foresay.server.schemas.bounds import MOST_TOOLS, check_count, check_metadata
from foresay.server.schemas.chat import ChatRequest
from foresay.server.schemas.shared import GenerationRequest
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import InvalidRequest, Path

#: Valid values of ``include``. All but logprobs belong to tools and inputs that do not exist here, or to output that is
#: always included (reasoning).
INCLUDABLE = (
    schemas.LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
#: This API's names of the chat request's fields.
NAMES = FieldNames(
    {
        "messages.*": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "logprobs": "include",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function": "tool_choice",
        "tool_choice.allowed_tools": "tool_choice",
    }
)

#: Values of hints that a model without the hint follows anyway.
DEFAULT_HINTS = ("none", "medium")

_own = ("stream", "stream_options", "n", "logprobs", "max_tokens", "request_id", "response_format")
_shared = [field for field in GenerationRequest.__struct_fields__ if field not in _own]


def chat_request(
    body: schemas.ResponseRequest,
    before: Sequence[schemas.InputItem],
    given: Sequence[schemas.InputItem],
    toolbox: Toolbox,
    generates: bool = True,
    words: Collection[str] = (),
) -> ChatRequest:
    """The chat request that continues the items ``before`` with the items ``given``.

    generates: false only prepares the conversation, as far as it does not depend on what comes next. words: names in
    the chat template; see :func:`hints_left_out`.
    """
    check(body)
    hints = {word: value for word, _, value in _hints(body) if word in words}
    messages = messages_of(body.instructions, before, given)
    if not messages:
        raise InvalidRequest("input", " is required: there is nothing to answer")
    fields: dict[str, Any] = {name: getattr(body, name) for name in _shared}
    fields |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "store": None if body.store else body.store,  # chats are not kept, and warn of it
        "logprobs": True if schemas.LOGPROBS in (body.include or ()) or body.top_logprobs else None,
        "tools": toolbox.chat or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None),
        "chat_template_kwargs": hints | (body.chat_template_kwargs or {}) or None,
    }
    if not generates:
        fields |= {"max_completion_tokens": 1, "min_tokens": None, "add_generation_prompt": False, "logprobs": None}
        fields |= {"top_logprobs": None, "response_format": None, "stop": None, "prediction": None}
        fields["tool_choice"] = "none" if body.tool_choice == "none" else None
    with NAMES.also(toolbox.fields):
        return validation.converted(fields, ChatRequest)


def hints_left_out(body: schemas.ResponseRequest, words: Collection[str]) -> tuple[Warned, ...]:
    """Warnings about hints that the chat template does not support. Agents send them to every model; they are not
    errors."""
    untold = [hint for hint in _hints(body) if hint[0] not in words and hint[2] not in DEFAULT_HINTS]
    return tuple(warning("hint_left_out", field, value=value) for _, field, value in untold)


def _hints(body: schemas.ResponseRequest) -> list[tuple[str, str, str]]:
    """The template's variable, the field and the value of each given hint."""
    given = (
        ("reasoning_effort", "reasoning.effort", body.reasoning.effort if body.reasoning else None),
        ("verbosity", "text.verbosity", body.text.verbosity if body.text else None),
    )
    return [(word, field, value) for word, field, value in given if value is not None]


def check(body: schemas.ResponseRequest) -> None:
    """Raise for what only this API has and the server does not support."""
    validation.refuse(body)
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise InvalidRequest(("include", index), f" must be one of {', '.join(INCLUDABLE)}")
    if body.reasoning is not None and body.reasoning.summary not in (None, "auto"):
        raise InvalidRequest("reasoning.summary", ": reasoning is shown as it is, never summarized")
    if body.truncation not in (None, "disabled", "auto"):
        raise InvalidRequest("truncation", f" must be auto or disabled, got {body.truncation!r}")
    check_metadata(body.metadata)
    check_count(body.tools, MOST_TOOLS, "tools")


def _tool_choice(choice: str | schemas.NamedChoice | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    match choice.type:
        case "function" | "custom":
            return {"type": "function", "function": {"name": _name(choice, ("tool_choice",))}}
        case "allowed_tools":
            tools = [
                {
                    "type": "function" if tool.type == CUSTOM else tool.type,
                    "function": {"name": _name(tool, ("tool_choice", "tools", index))},
                }
                for index, tool in enumerate(choice.tools or ())
            ]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": tools}}
    known = "function, custom or allowed_tools"
    raise InvalidRequest("tool_choice.type", f" must be {known}, got {choice.type!r}")


def _name(choice: schemas.NamedChoice, path: Path) -> str:
    if choice.name is None:
        raise InvalidRequest((*path, "name"), " is required")
    return full_name(choice.name, choice.namespace)


def _response_format(text: schemas.TextFormat | None) -> Any:
    if text is None or text.type == "text":
        return None
    if text.type == "json_object":
        return {"type": "json_object"}
    if text.type != "json_schema":
        known = "text, json_object or json_schema"
        raise InvalidRequest("text.format.type", f" must be {known}, got {text.type!r}")
    for field in ("name", "schema"):
        if getattr(text, field) is None:
            raise InvalidRequest(("text", "format", field), " is required")
    schema = {"name": text.name, "schema": text.schema, "strict": text.strict, "description": text.description or None}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}
