"""Ollama's requests as chat requests."""

from __future__ import annotations

from typing import Any

import msgspec

from foresay.server.api.common import validation
from foresay.server.api.common.validation import FieldNames, thinking
from foresay.server.api.ollama import schemas
from foresay.server.catalog.formats import EFFORTS
from foresay.server.models.resident import Keep
from foresay.server.schemas.bounds import MOST_CALLS, check_count
from foresay.server.schemas.chat import ChatRequest
from foresay.server.settings.units import seconds_of
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.spec.errors import InvalidRequest, inside

Json = dict[str, Any]

#: Seconds from which keep_alive means for ever.
_FOREVER = 1e9

#: The options by the chat request's names.
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OPTIONS = {name: name for name in _SAME} | {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
#: The client's names of fields that the chat request names differently.
NAMES = FieldNames(
    {field: f"options.{name}" for field, name in _OPTIONS.items()}
    | {
        "response_format": "format",
        "response_format.json_schema.schema": "format",
        "chat_template_kwargs": "think",
        "reasoning_effort": "think",
    }
)
NAMES_OF_PROMPT = NAMES.also({"messages.*": "prompt"})


def chat_of(body: schemas.OllamaChatRequest, chat_format: ChatFormat) -> ChatRequest:
    """The equivalent chat request."""
    messages = _messages(body.messages or [])
    fields = _shared(body) | _thinking(body.think, chat_format)
    return validation.converted({"messages": messages, "tools": body.tools} | fields, ChatRequest)


def chat_of_prompt(body: schemas.OllamaGenerateRequest, chat_format: ChatFormat) -> ChatRequest:
    """The chat request of a prompt that uses the chat template. Errors call its messages ``prompt``."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    fields = _shared(body) | _thinking(body.think, chat_format)
    return validation.converted({"messages": messages} | fields, ChatRequest)


def fields_of_raw(body: schemas.OllamaGenerateRequest) -> Json:
    """The completion request's fields for a raw prompt, without the prompt."""
    if body.system:
        raise InvalidRequest("system", " and raw cannot be combined")
    if body.think:
        raise InvalidRequest("think", " and raw cannot be combined")
    listed = body.top_logprobs or 0
    if listed and not body.logprobs:
        raise InvalidRequest("top_logprobs", " is only allowed with logprobs: true")
    return _shared(body) | {"logprobs": listed if body.logprobs else None, "top_logprobs": None}


def refuse_unsupported(body: schemas.OllamaRequest) -> None:
    """Raise for a known but unsupported field whose value is not harmless."""
    validation.refuse(body)
    if isinstance(body, schemas.OllamaChatRequest):
        for index, message in enumerate(body.messages or ()):
            with inside("messages", index):
                validation.refuse(message)
    if body.options is not None:
        with inside("options"):
            validation.refuse(body.options)
            validation.check_window(body.options)


def keep_alive(body: schemas.OllamaRequest) -> Keep:
    """How long the model stays loaded after the request, in seconds; None: for ever."""
    given = body.keep_alive
    if given is None:
        return "usual"
    try:
        seconds = given if not isinstance(given, str) else 0.0 if given == "0" else seconds_of(given)
    except ValueError as error:
        raise InvalidRequest("keep_alive", f": {error}") from None
    return seconds if 0 <= seconds < _FOREVER else None


def _shared(body: schemas.OllamaRequest) -> Json:
    """Fields that chat and completion requests share."""
    options = body.options or schemas.OllamaOptions()
    drawn = {field: getattr(options, name) for field, name in _OPTIONS.items()}
    if options.num_predict is not None and options.num_predict < 0:
        drawn["max_tokens"] = None
    return drawn | {
        "stream": body.stream is not False,
        "response_format": _format(body.format),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }


def _format(wanted: str | Json | None) -> Json | None:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if isinstance(wanted, str):
        raise InvalidRequest("format", f" must be json or a JSON schema, got {wanted!r}")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted, "strict": True}}


def _thinking(think: bool | str | None, chat_format: ChatFormat) -> Json:
    if isinstance(think, str):
        if think not in EFFORTS:
            raise InvalidRequest("think", f" must be true, false, low, medium or high, got {think!r}")
        return thinking(chat_format, True, "think") | {"reasoning_effort": think}
    if think is False and chat_format.form.efforts:  # Ollama ignores it for gpt-oss; the template warns of the effort
        return {"reasoning_effort": "false"}
    return {} if think is None else thinking(chat_format, think, "think")


def _messages(messages: list[schemas.OllamaMessage]) -> list[Json]:
    """The conversation; calls without an id get one, and results get the id of their call."""
    converted: list[Json] = []
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        check_count(message.tool_calls, MOST_CALLS, ("messages", index, "tool_calls"))
        one: Json = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            waiting = [
                (call.id or f"call_{index}_{n}", call.function.name) for n, call in enumerate(message.tool_calls)
            ]
            one["tool_calls"] = [_call(id, call) for (id, _), call in zip(waiting, message.tool_calls, strict=True)]
        if message.role == "tool":
            one["tool_call_id"] = _answered(message, waiting)
        converted.append(one)
    return converted


def _call(id: str, call: schemas.OllamaToolCall) -> Json:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return {"id": id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _answered(message: schemas.OllamaMessage, waiting: list[tuple[str, str]]) -> str | None:
    """The id of a result's call: by its id, else by the tool's name, else the first call without a result."""
    if message.tool_call_id is not None:
        return message.tool_call_id
    found = next((call for call in waiting if call[1] == message.tool_name), waiting[0] if waiting else None)
    if found is None:
        return None
    waiting.remove(found)
    return found[0]
