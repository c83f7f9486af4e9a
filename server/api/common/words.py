"""Other names for the fields of a chat request, so that errors speak of what the client wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from server.schemas.shared import ErrorDetail
from server.text.choice import Choice
from server.text.parsers.chat_format import ChatFormat
from spec.errors import InvalidRequest


@contextmanager
def in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name fields as ``names`` says: from the chat request's name to the client's."""
    try:
        yield
    except InvalidRequest as error:
        error.param, error.message = renamed(error.param, error.message, names)
        raise


def reword(choices: Sequence[Choice], names: Mapping[str, str]) -> Sequence[Choice]:
    """The choices, their warnings in the same words."""
    for choice in choices:
        said = [(one, renamed(one.param, one.message, names)) for one in choice.warnings]
        choice.warnings = tuple(replace(one, param=param, message=message) for one, (param, message) in said)
    return choices


def renamed(param: str, message: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Field and message with the longest known beginning of the field replaced: all of the field where the beginning
    is known with a ``*`` behind it."""
    ends = [len(param), *(place for place in reversed(range(len(param))) if param[place] in ".[")]
    for end in ends:
        whole, beginning = names.get(f"{param[:end]}*"), names.get(param[:end])
        if whole is not None or beginning is not None:
            name = whole if whole is not None else f"{beginning}{param[end:]}"
            return name, message.replace(param, name)
    return param, message


def naming(error: ErrorDetail) -> str:
    """The message of an error, with the field's name where the body has no other place for it."""
    return error.message if error.param is None or error.param in error.message else f"{error.param}: {error.message}"


def thinking(chat_format: ChatFormat, wanted: bool, field: str) -> dict[str, Any]:
    """The chat request's fields that make the model think before it answers, or not; an error if it cannot but do the
    other.
    """
    if wanted and chat_format.thinks is None:
        raise InvalidRequest(field, f"{field}: this model does not think before it answers")
    if "enable_thinking" in chat_format.words:
        return {"chat_template_kwargs": {"enable_thinking": wanted}}
    if not wanted and chat_format.thinks is not None:
        raise InvalidRequest(field, f"{field}: this model always thinks before it answers")
    return {}
