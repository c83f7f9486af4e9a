"""From bytes to a request the engine can run, or an :class:`~spec.errors.InvalidRequest` that names the field.

Null means default everywhere. Unknown fields are ignored; known fields that the server does not do are refused unless
their value asks for nothing. An empty field name means the body as a whole.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from server.text import SamplingDefaults
from server.wire.chat import ChatRequest, ContentPart, Message
from server.wire.completions import CompletionRequest
from server.wire.shared import NOT_SUPPORTED, GenerationRequest
from spec.errors import ContextLengthExceeded, InvalidRequest
from spec.sampling import SEED_RANGE, SamplingParams

COMPLETION_MAX_TOKENS = 16
MOST_STOPS = 16
MOST_PROMPTS = 128
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

R = TypeVar("R", CompletionRequest, ChatRequest)

_completions = msgspec.json.Decoder(CompletionRequest)
_chats = msgspec.json.Decoder(ChatRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """The request in ``body``, every field of a known type and none that cannot be served."""
    return _checked(body, _completions)


def decode_chat(body: bytes) -> ChatRequest:
    """The request in ``body``, every field of a known type and none that cannot be served."""
    request = _checked(body, _chats)
    for index, message in enumerate(request.messages):
        refuse_unsupported(message, f"messages[{index}].")
    return request


def _checked(body: bytes, decoder: msgspec.json.Decoder[R]) -> R:
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("", f"The body is not valid JSON: {error}") from None
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "stream_options is only allowed with stream: true")
    return request


def named(complaint: str) -> InvalidRequest:
    """Msgspec's complaint as an error that names the field: ``Expected `int`, got `str` - at `$.max_tokens```."""
    message, _, place = complaint.partition(" - at ")
    field = place.strip("`").removeprefix("$").removeprefix(".")
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return InvalidRequest(field, f"{field} is required")
    if not field:
        return InvalidRequest("", f"The body must be a JSON object: {message}")
    return InvalidRequest(field, f"{field}: {message[0].lower()}{message[1:]}")


def refuse_unsupported(record: msgspec.Struct, prefix: str = "") -> None:
    """Raise for the first known field whose value asks for something the server does not do."""
    for field in record.__struct_fields__:
        harmless = NOT_SUPPORTED.get(field)
        if harmless is None:
            continue
        value = getattr(record, field)
        if value is None or (field == "echo" and isinstance(record, CompletionRequest)):
            continue
        if not any(type(value) is type(good) and value == good for good in harmless):
            raise InvalidRequest(prefix + field, f"{prefix}{field} is not supported by this server")


def sampling_params(request: GenerationRequest, defaults: SamplingDefaults, vocab_size: int) -> SamplingParams:
    """How to draw: the request's word, else the model's recommendation, else OpenAI's default."""
    field, most = _most_tokens(request, defaults)
    if most is not None and most < 1:
        raise InvalidRequest(field, f"{field} must be at least 1, got {most}")
    params = SamplingParams(
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_k=_first(request.top_k, defaults.top_k, 0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        seed=None if request.seed is None else request.seed % SEED_RANGE,
        max_tokens=most,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )
    if not 0.0 <= params.temperature <= 2.0:
        raise InvalidRequest("temperature", f"temperature must be between 0 and 2, got {params.temperature}")
    params.validate(vocab_size)
    return params


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The strings that end the text."""
    stop = request.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MOST_STOPS:
        raise InvalidRequest("stop", f"stop holds {len(stops)} strings; at most {MOST_STOPS} are allowed")
    if "" in stops:
        raise InvalidRequest("stop", "stop strings must not be empty")
    return stops


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, one per choice."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(entry) for entry in prompt}
    if not prompt or len(kinds) > 1:
        raise InvalidRequest(
            "prompt", "prompt must be a text, token ids, a list of texts or a list of lists of token ids"
        )
    if int in kinds:
        return [[entry for entry in prompt if isinstance(entry, int)]]
    if len(prompt) > MOST_PROMPTS:
        raise InvalidRequest("prompt", f"prompt holds {len(prompt)} prompts; at most {MOST_PROMPTS} are allowed")
    return [entry for entry in prompt if not isinstance(entry, int)]


def messages(request: ChatRequest) -> list[dict[str, str]]:
    """The conversation as chat templates take it."""
    if not request.messages:
        raise InvalidRequest("messages", "messages must not be empty")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]


def check_prompt(tokens: list[int], field: str, params: SamplingParams, vocab_size: int, longest: int) -> None:
    """Raise unless the prompt is made of the model's tokens and fits, with the output asked for, into its context."""
    if not tokens:
        raise InvalidRequest(field, f"{field} must not be empty")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequest(field, f"{field} holds a token id outside 0 .. {vocab_size - 1}")
    asked = len(tokens) + (params.max_tokens or 1)
    if asked > longest:
        raise ContextLengthExceeded(
            field,
            f"This model's maximum context length is {longest} tokens. However, you requested {asked} tokens "
            f"({len(tokens)} in the prompt, {params.max_tokens or 1} in the completion).",
        )


def _most_tokens(request: GenerationRequest, defaults: SamplingDefaults) -> tuple[str, int | None]:
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            return "max_completion_tokens", request.max_completion_tokens
        return "max_tokens", _first(request.max_tokens, defaults.max_new_tokens, None)
    return "max_tokens", _first(request.max_tokens, COMPLETION_MAX_TOKENS, None)


def _message(message: Message, place: str) -> dict[str, str]:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"{place}.role", f"{place}.role must be one of {', '.join(ROLES)}, got {message.role!r}")
    if message.content is None:
        raise InvalidRequest(f"{place}.content", f"{place}.content is required")
    rendered = {"role": role, "content": _content(message.content, f"{place}.content")}
    return rendered if message.name is None else rendered | {"name": message.name}


def _content(content: str | list[ContentPart], place: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(f"{place}[{index}]", f"{place}[{index}]: only parts of type text are supported")
    return "\n".join(part.text or "" for part in content)


T = TypeVar("T")


def _first(*values: T | None) -> T:
    """The first value that is given; the last one anyway."""
    return next((value for value in values[:-1] if value is not None), values[-1])  # type: ignore[return-value]
