"""Other names for the fields of a chat request, so that errors speak of what the client wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from server.parsers.dialect import Dialect
from server.wire.shared import ErrorDetail
from spec.errors import InvalidRequest


@contextmanager
def in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name fields as ``names`` says: from the chat request's name to the client's."""
    try:
        yield
    except InvalidRequest as error:
        error.param, error.message = _renamed(error, names)
        raise


def _renamed(error: InvalidRequest, names: Mapping[str, str]) -> tuple[str, str]:
    """Field and message with the longest known beginning of the field replaced."""
    for known in sorted(names, key=len, reverse=True):
        if error.param == known or error.param.startswith((f"{known}.", f"{known}[")):
            param = names[known] + error.param[len(known) :]
            return param, error.message.replace(error.param, param)
    return error.param, error.message


def naming(error: ErrorDetail) -> str:
    """The message of an error, with the field's name where the body has no other place for it."""
    return error.message if error.param is None or error.param in error.message else f"{error.param}: {error.message}"


def thinking(dialect: Dialect, wanted: bool, field: str) -> dict[str, Any]:
    """The chat request's fields that make the model think before it answers, or not; an error if it cannot but do the
    other.
    """
    if wanted and dialect.thinks is None:
        raise InvalidRequest(field, f"{field}: this model does not think before it answers")
    if "enable_thinking" in dialect.words:
        return {"chat_template_kwargs": {"enable_thinking": wanted}}
    if not wanted and dialect.thinks is not None:
        raise InvalidRequest(field, f"{field}: this model always thinks before it answers")
    return {}
