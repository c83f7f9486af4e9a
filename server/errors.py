"""What a client can be told, as one tree; each error knows its HTTP status and OpenAI's ``type`` and ``code``.

::

    ForesayError (spec)
    ├── InvalidRequest (spec)   a field is wrong: 400 invalid_request_error, param names the field
    └── ApiError
        ├── ModelNotFound       404  invalid_request_error  model_not_found
        ├── QueueFull           429  rate_limit_error       queue_full        (Retry-After)
        ├── EngineFailed        500  engine_error           engine_error
        ├── SlowReader          500  engine_error           slow_reader       (only ever seen inside a stream)
        └── Unavailable         503  unavailable_error      loading | engine_down | draining   (Retry-After)
"""

from __future__ import annotations

from server.wire.shared import ErrorBody, ErrorDetail
from spec.errors import ForesayError, InvalidRequest


class ApiError(ForesayError):
    """An error with an HTTP status. ``retry_after`` is in seconds; None leaves the header out."""

    status = 500
    type = "internal_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ModelNotFound(ApiError):
    """The request names a model this server does not serve."""

    status, type, code, param = 404, "invalid_request_error", "model_not_found", "model"


class QueueFull(ApiError):
    """As many requests are running and waiting as the server allows."""

    status, type, code, retry_after = 429, "rate_limit_error", "queue_full", 1


class EngineFailed(ApiError):
    """The engine gave up on this request, or died while it ran."""

    type, code = "engine_error", "engine_error"


class SlowReader(ApiError):
    """The client read so slowly that its stream was given up."""

    type, code = "engine_error", "slow_reader"


class Unavailable(ApiError):
    """No request is served right now: the model is loading, the engine is down, or the server is going away."""

    status, type, retry_after = 503, "unavailable_error", 2

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def described(error: ApiError | InvalidRequest) -> tuple[int, ErrorBody]:
    """The HTTP status of an error and the body that tells a client about it."""
    if isinstance(error, InvalidRequest):
        detail = ErrorDetail(error.message, "invalid_request_error", error.param or None, error.code)
        return 400, ErrorBody(detail)
    return error.status, ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code))
