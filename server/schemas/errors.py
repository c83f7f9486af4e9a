"""All errors that clients can get, as one tree: an :class:`InvalidRequest` (400, with the field's name), or an
:class:`ApiError`. Each knows its HTTP status, OpenAI's ``type`` and ``code``, and further headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from foresay.server.schemas.shared import ErrorBody, ErrorDetail
from foresay.spec.errors import ForesayError, InvalidRequest, Path, path_of

#: The header that OpenAI's and Anthropic's clients check before they retry.
NO_RETRY = {"X-Should-Retry": "false"}
#: The accepted encodings (RFC 9110, 15.5.16).
PLAIN = {"Accept-Encoding": "identity"}


class ApiError(ForesayError):
    """An error with an HTTP status. ``retry_after`` is in seconds; None leaves the header out. more: other headers."""

    status = 500
    type = "internal_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None
    more: ClassVar[Mapping[str, str]] = {}

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def headers(self) -> dict[str, str]:
        """The response's extra headers."""
        return {**self.more} if self.retry_after is None else {**self.more, "Retry-After": str(self.retry_after)}


class Unauthorized(ApiError):
    """No key was sent, or not a valid one. given: whether one was sent."""

    status, type, code = 401, "authentication_error", "invalid_api_key"

    def __init__(self, message: str, given: bool = True) -> None:
        super().__init__(message)
        self.given = given

    @property
    def headers(self) -> dict[str, str]:
        """How to authenticate (RFC 6750: no error code if no key was sent)."""
        return {"WWW-Authenticate": 'Bearer realm="foresay"' + (', error="invalid_token"' if self.given else "")}


class Forbidden(ApiError):
    """A web page of this origin may not use the server."""

    status, type, code = 403, "permission_error", "origin_not_allowed"


class NotAdmin(ApiError):
    """This path needs the admin key."""

    status, type, code = 403, "permission_error", "admin_key_required"


class SlowBody(ApiError):
    """The body did not arrive within ``seconds``."""

    status, type, code = 408, "timeout_error", "body_timeout"

    def __init__(self, arrived: int, seconds: float) -> None:
        super().__init__(
            f"{arrived:,} bytes of the body came in {seconds:g} s, and more of it is missing (body_timeout)"
        )


class NotNow(ApiError):
    """What is requested is already in progress."""

    status, type, code = 409, "invalid_request_error", "not_now"


class ModelNotFound(ApiError):
    """The request names a model this server does not serve."""

    status, type, code, param = 404, "invalid_request_error", "model_not_found", "model"


class TooLarge(ApiError):
    """The body is larger than this server reads. most: bytes that it reads."""

    status, type, code = 413, "invalid_request_error", "body_too_large"

    def __init__(self, most: int) -> None:
        super().__init__(f"The body is larger than {most:,} bytes, the limit of this server (max_body_bytes)")


class Compressed(ApiError):
    """The body is compressed. Inflating one costs a thousand times what sending it did, and no client needs it."""

    status, type, code, param = 415, "invalid_request_error", "unsupported_encoding", "Content-Encoding"
    more = PLAIN


class NotJson(ApiError):
    """The body says that it is something else than JSON."""

    status, type, code, param = 415, "invalid_request_error", "unsupported_media_type", "Content-Type"

    def __init__(self, given: str) -> None:
        super().__init__(f"The body must be JSON (Content-Type: application/json), not {given[:100]}")


class Busy(ApiError):
    """Refused for now. retry_after: when to retry, in seconds; None if that would not help."""

    status, type = 429, "rate_limit_error"

    def __init__(self, message: str, retry_after: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Busy):
    """As many requests are running and waiting as the server allows."""

    code = "queue_full"


class TooManyWaiting(Busy):
    """As many messages of a WebSocket wait as the server allows."""

    code = "too_many_waiting"


class RateLimited(Busy):
    """The caller has used up their key's limit for now."""

    code = "rate_limit_exceeded"


class EngineFailed(ApiError):
    """The engine gave up on this request, or died while it ran."""

    type, code = "engine_error", "engine_error"


class KillsEngine(EngineFailed):
    """The engine died twice, and only this request was present both times: clients should not retry."""

    code, more = "kills_engine", NO_RETRY


class SlowReader(ApiError):
    """The client read too slowly, so its stream was ended."""

    type, code = "engine_error", "slow_reader"


class Unavailable(ApiError):
    """No request is served right now: the model is loading, the engine is down, or the server is shutting down."""

    status, type, retry_after = 503, "unavailable_error", 2

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def going_away() -> Unavailable:
    """The error while the server shuts down."""
    return Unavailable("The server is shutting down", "draining")


class LoadFailed(Unavailable):
    """The model that the request names could not be loaded; it is not retried for ``retry_after`` seconds."""

    def __init__(self, model: str, reason: str, retry_after: int) -> None:
        super().__init__(f"The model {model!r} could not be loaded: {reason}", "load_failed")
        self.retry_after = retry_after


class TookTooLong(ApiError):
    """The request took longer than the server allows, and would again: clients should not retry."""

    status, type, code, more = 504, "timeout_error", "request_timeout", NO_RETRY


def complaint(error: msgspec.ValidationError) -> tuple[str, Path]:
    """msgspec's message, types in words, and the path: ``Expected `int`, got `str` - at `$.stop[0]``` has the path
    ``("stop", 0)``.

    Messages quote values, which may look like a path; the real path comes last, and holds no value.
    """
    message, _, path = str(error).rpartition(" - at `$")
    if not message:
        message, path = path, ""
    if message.startswith("Expected"):  # null beside another type means the default everywhere
        message = message.replace(" | null", "").replace(" | ", " or ").replace("`", "")
        message = re.sub(rf"\b({'|'.join(_TYPES)})\b", lambda kind: _TYPES[kind[0]], message)
    return message, path_of(path.removesuffix("`"))


#: What JSON has, as people call it.
_TYPES = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip


class Mistake(ApiError):
    """An internal error of the server. Its log has details."""

    code = "internal_error"


#: Messages quote what the client sent, which may be megabytes.
_LONGEST = 2000


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [..] {text[-_LONGEST // 2 :]}"


def described(error: ApiError | InvalidRequest) -> tuple[int, ErrorBody]:
    """The HTTP status of an error and its body."""
    if isinstance(error, InvalidRequest):
        param = _brief(error.param) or None
        return 400, ErrorBody(ErrorDetail(_brief(error.message), "invalid_request_error", param, error.code))
    return error.status, ErrorBody(ErrorDetail(_brief(error.message), error.type, error.param, error.code))
