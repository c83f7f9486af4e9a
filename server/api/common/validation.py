"""From bytes to a request that the engine can run, or an :class:`~foresay.spec.errors.InvalidRequest` naming the field.

Null always means the default. Unknown fields are ignored; known but unsupported fields are refused unless their value
is harmless. An empty field name means the body as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import fields as fields_of
from msgspec.structs import replace

from foresay.server.gateway.keys import ID_WANTED, usable_id
from foresay.server.schemas import bounds
from foresay.server.schemas.chat import ChatRequest, CompletionRequest
from foresay.server.schemas.errors import complaint
from foresay.server.schemas.shared import ErrorDetail, GenerationRequest
from foresay.server.text import options
from foresay.server.text.choice import Choice
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.prompt import Room
from foresay.server.text.tokenizer import SamplingDefaults
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import InvalidRequest, Path, inside, path_of
from foresay.spec.sampling import SEED_RANGE, SamplingParams, check_tokens

COMPLETION_MAX_TOKENS = 16
MOST_PROMPTS = 128
_TRANSLATED = {
    *("top_k", "seed", "max_tokens", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids"),
    *("logprobs", "prompt_logprobs"),
}
#: Fields with the same meaning in the request and the engine.
_SAME = sorted({*SamplingParams.__struct_fields__} & {*GenerationRequest.__struct_fields__} - _TRANSLATED)
#: The fields that limit the output, by precedence.
_LIMITING = ("max_completion_tokens", "max_tokens")

S = TypeVar("S", bound=msgspec.Struct)

_decoder = lru_cache(msgspec.json.Decoder)


def decoded(body: bytes, kind: type[S]) -> S:
    """The request in ``body``, with all fields checked."""
    bounds.weigh(body)
    try:
        request: S = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise named(error) from None
    except UnicodeDecodeError:  # its position is that in a string, not in the body
        raise InvalidRequest((), "The body is not valid JSON: it is not in UTF-8") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest((), f"The body is not valid JSON: {error}") from None
    return checked(request)


#: Fields of the official clients that mean nothing here; docs/compatibility.md lists them.
IGNORED = {
    *("access_programs", "cache_control", "container", "diagnostics", "height", "image", "inference_geo"),
    *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "speed", "steps", "user", "user_profile_id", "width", "workspace_id"),
}
#: Most unknown fields of a request that are named, and characters of a name.
_MOST_UNKNOWN, _LONGEST_NAME = 8, 64


def unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a valid body that a struct does not have and that are not null."""
    known = {*kind.__struct_encode_fields__, *IGNORED}
    given = _decoder(dict[str, msgspec.Raw]).decode(body)
    unknown = (name[:_LONGEST_NAME] for name, value in given.items() if name not in known and bytes(value) != b"null")
    return tuple(islice(unknown, _MOST_UNKNOWN))


def converted(fields: dict[str, Any], kind: type[S]) -> S:
    """A request converted from another API's: ``fields`` as in its JSON."""
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise named(error) from None
    return checked(request)


def checked(request: S) -> S:
    """``request``, from any route, if it holds nothing unsupported."""
    if isinstance(request, ChatRequest | CompletionRequest):
        _check(request)
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            with inside("messages", index):
                refuse(message)
    return request


def _check(request: GenerationRequest) -> None:
    refuse(request)
    if request.request_id is not None and not usable_id(request.request_id):
        raise InvalidRequest("request_id", f" must be {ID_WANTED}, got {request.request_id!r}")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", " is only allowed with stream: true")


def named(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec's error as one that names the field."""
    message, path = complaint(error)
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    if missing:
        return InvalidRequest((*path, missing[1]), " is required")
    if not path:
        return InvalidRequest((), f"The body must be a JSON object: {message}")
    return InvalidRequest(path, f": {message[0].lower()}{message[1:]}")


def refuse(record: msgspec.Struct) -> None:
    """Raise for the first known but unsupported field whose value is not harmless."""
    for name, (harmless, wrong) in refused_fields(type(record)).items():
        value = getattr(record, name)
        if value is not None and (type(value), value) not in harmless:
            raise InvalidRequest(name, wrong)


def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[list[tuple[type, object]], str]]:
    """The known but unsupported fields of a struct: their harmless values, by type, and the message for all others."""
    return marked_fields(kind, "wrong")


@lru_cache(maxsize=64)
def marked_fields(kind: type[msgspec.Struct], mark: str) -> dict[str, tuple[list[tuple[type, object]], str]]:
    """The fields whose annotation has ``mark``: their harmless values, by type, and the value of ``mark``."""
    fields = [(field.name, one.extra) for field in fields_of(kind) for one in getattr(field.type, "__metadata__", ())]
    return {name: (extra["harmless"], extra[mark]) for name, extra in fields if extra and mark in extra}


def check_window(options: Any) -> None:
    """Raise for a window of repeat_penalty, which always counts the whole text; one without a penalty is ignored."""
    if options.repeat_penalty not in (None, 1.0) and options.repeat_last_n not in (None, -1):
        raise InvalidRequest("repeat_last_n", " must be -1: repeat_penalty counts the whole text on this server")


def not_followed(request: GenerationRequest) -> tuple[Warned, ...]:
    """Warnings about ignored fields whose value is not harmless."""
    given = [(name, getattr(request, name), *marks) for name, marks in marked_fields(type(request), "why").items()]
    noted = [(name, why) for name, value, harmless, why in given if (type(value), value) not in harmless]
    return tuple(warning("not_followed", name, why=why) for name, why in noted if getattr(request, name) is not None)


def sampling_params(request: GenerationRequest, defaults: SamplingDefaults, vocab_size: int) -> SamplingParams:
    """Sampling parameters: the request's, else the model's recommendation, else OpenAI's default."""
    bounds.check_count(request.allowed_token_ids, vocab_size, "allowed_token_ids")
    field, most = _most_tokens(request)
    if most is None:
        most = defaults.max_new_tokens if isinstance(request, ChatRequest) else COMPLETION_MAX_TOKENS
    if options.scores_only(request):
        most = 1  # the engine emits at least one token; the choice drops it
        if request.min_tokens:
            raise InvalidRequest("min_tokens", f" must be at most max_tokens (0), got {request.min_tokens}")
    if most is not None and most < 1:
        raise InvalidRequest(field, f" must be at least 1, got {most}")
    drawn = {name: _first(getattr(request, name), getattr(defaults, name, None), None) for name in _SAME}
    params = SamplingParams(
        **{name: value for name, value in drawn.items() if value is not None},
        top_k=min(_first(request.top_k, defaults.top_k, 0), vocab_size),  # more means all, and may overflow
        seed=None if request.seed is None else request.seed % SEED_RANGE,
        max_tokens=most,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=options.logit_bias(request),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        logprobs=options.logprobs(request),
        prompt_logprobs=options.prompt_logprobs(request),
    )
    params.validate(vocab_size)
    return params


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The strings that end the text."""
    stop = request.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    for stop in stops:
        bounds.check_count(stop, bounds.MOST_NAME, "stop", "characters")
    if "" in stops:
        raise InvalidRequest("stop", " strings must not be empty")
    return stops


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, one per choice."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not prompt or len(kinds) > 1:
        raise InvalidRequest(
            "prompt", " must be a string, token ids, a list of strings or a list of lists of token ids"
        )
    if int in kinds:
        return [cast("list[int]", prompt)]
    if len(prompt) > MOST_PROMPTS:
        raise InvalidRequest("prompt", f" holds {len(prompt)} prompts; at most {MOST_PROMPTS} are allowed")
    return [entry for entry in prompt if not isinstance(entry, int)]


def check_prompt(tokens: list[int], field: str, params: SamplingParams, vocab_size: int, longest: int) -> None:
    """Raise unless the prompt consists of the model's tokens and fits its context together with the requested
    output."""
    if not tokens:
        raise InvalidRequest(field, " must not be empty")
    Room(field, longest).check(len(tokens), params.max_tokens or 1)
    check_tokens(field, tokens, vocab_size)
    room = longest - len(tokens)
    if params.min_tokens > room:
        raise InvalidRequest("min_tokens", f" must be at most {room}, the room left after the prompt")


def capped(request: GenerationRequest, params: SamplingParams, most: int | None) -> SamplingParams:
    """``params`` with at most ``most`` output tokens, if the request sets any number of them. Raises if it wants more
    at least."""
    if most is not None and (request.min_tokens or 0) > most:
        raise InvalidRequest("min_tokens", f" must be at most {most} on this server, got {request.min_tokens}")
    if most is None or params.max_tokens is None:
        return params
    return replace(params, max_tokens=min(most, params.max_tokens))


def clamped(
    request: GenerationRequest, params: SamplingParams, room: int, allowed: int | None, strict: bool
) -> tuple[SamplingParams, tuple[Warned, ...]]:
    """``params`` with no more output tokens than are ``allowed``, nor than there is ``room`` for after the prompt, and
    warnings if that is less than the request asks for.

    strict: do not fit them to the room, so that :func:`check_prompt` refuses. The same happens if there is no room at
    all, and if the prompt was to be truncated so that the output fits.
    """
    most = params.max_tokens
    if most is None:
        return (params if allowed is None else replace(params, max_tokens=max(1, min(allowed, room)))), ()
    fits = strict or most <= room or room < 1 or request.truncate_prompt_tokens == -1
    why = "this server allows" if fits else "the context leaves after the prompt"
    most = most if fits else room
    given, wanted = _most_tokens(request)
    clamps = wanted is not None and wanted > most
    warnings = (warning("max_tokens_clamped", given, requested=wanted, room=most, why=why),) if clamps else ()
    return replace(params, max_tokens=most), warnings


def _most_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that limits the output, and its value; None if the request sets none."""
    given = ((field, most) for field in _LIMITING if (most := getattr(request, field, None)) is not None)
    return next(given, ("max_tokens", None))


T = TypeVar("T")


def _first(*values: T | None) -> T:
    """The first value that is not None, else the last."""
    return next((value for value in values[:-1] if value is not None), values[-1])  # type: ignore[return-value]


class FieldNames:
    """The client's names for the fields of a chat request that was converted from its own: by path prefix, the longest
    match; with ``.*`` for all paths with that prefix. Errors raised in its ``with`` block get the client's path.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = {path_of(field): path_of(name) for field, name in names.items()}

    def __setitem__(self, path: Path, name: Path) -> None:
        self._names[path] = name

    def also(self, names: Mapping[str, str] | Mapping[Path, Path]) -> FieldNames:
        """A copy with more names."""
        more = FieldNames({})
        more._names = self._names | {path_of(field): path_of(name) for field, name in names.items()}
        return more

    def __enter__(self) -> FieldNames:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, InvalidRequest):
            error.path = self.of(error.path)

    def of(self, path: Path) -> Path:
        """The client's path."""
        for end in range(len(path), 0, -1):
            beginning = path[:end]
            if (whole := self._names.get((*beginning, "*"))) is not None:
                return whole
            if (name := self._names.get(beginning)) is not None:
                return (*name, *path[end:])
        return path

    def warned(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        """The choices, with warnings that name the client's fields."""
        for choice in choices:
            choice.warnings = tuple(replace(one, path=self.of(one.path)) for one in choice.warnings)
        return choices


def naming(error: ErrorDetail) -> str:
    """The message of an error, with the field's name, for error bodies without a field for it."""
    return error.message if error.param is None or error.param in error.message else f"{error.param}: {error.message}"


def thinking(chat_format: ChatFormat, wanted: bool, field: str) -> dict[str, Any]:
    """The chat request's fields that switch the model's reasoning on or off. Raises InvalidRequest if the model cannot
    do that.
    """
    if wanted and chat_format.thinks is None:
        raise InvalidRequest(field, ": this model does not think before it answers")
    if "enable_thinking" in chat_format.words:
        return {"chat_template_kwargs": {"enable_thinking": wanted}}
    if not wanted and chat_format.thinks is not None:
        raise InvalidRequest(field, ": this model always thinks before it answers")
    return {}
