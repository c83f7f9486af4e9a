"""What can go wrong, as one tree.

::

    ForesayError
    ├── InvalidRequest          the request asks for something impossible: names the field      -> 400
    │   └── ContextLengthExceeded   prompt and output do not fit the model                      -> 400
    ├── ConfigurationError      flags, files or models do not fit together: names the flag
    └── NumericalError          the model produced NaN: ends the one sequence it happened to    -> 500
"""

from __future__ import annotations


class ForesayError(Exception):
    """Base of every error a user of Foresay can meet."""


class InvalidRequest(ForesayError):
    """A request that cannot be served. ``param`` is the field's name as the client wrote it."""

    code: str | None = None

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context or the KV cache."""

    code = "context_length_exceeded"


class ConfigurationError(ForesayError):
    """Settings, files or models that do not fit together. The message names the flag and what would be right."""


class NumericalError(ForesayError):
    """The model's logits hold NaN or only minus infinity; no token can be sampled from them."""
