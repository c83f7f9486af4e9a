"""Bounds on the size of requests. Code that processes them runs on the event loop, where other streams wait: so
everything countable has a bound, and the complexity of a body is checked before it is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from foresay.spec.errors import InvalidRequest, Path

LARGEST_BODY = 4 << 20
#: A token is about four characters of text, which JSON may escape to six bytes each, or an id of up to seven digits.
BYTES_A_TOKEN = 32
#: Most strings, lists and objects of one body: at most 25 ms to decode. Numbers are cheap; the body's size bounds them.
MOST_PARTS = 50_000
#: Most nested lists and objects. Encoders and templates are recursive.
MOST_DEPTH = 200
MOST_MESSAGES = 2048
MOST_TOOLS = 1024
MOST_CALLS = 128
#: For what is repeated in responses, or sent to the engine with each choice.
MOST_NAME = 256
MOST_TEMPLATE_BYTES = 16 * 1024
MOST_REPEATED_BYTES = 1 << 20
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_BAD_WORDS = 256
#: Request ids appear in headers, in log lines and in every event of a stream.
ID = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")


def shown(**words: Any) -> Meta:
    """Schema keywords for a field that is checked elsewhere, with better messages than a schema check gives."""
    return Meta(extra_json_schema=words)


# Ranges of fields that only the server has; sampling's are in :mod:`foresay.spec.sampling`.
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Name = Annotated[str, Meta(max_length=MOST_NAME)]
TokenIds = Annotated[list[int], Meta(max_length=1024)]
Words = Annotated[list[str], Meta(max_length=MOST_BAD_WORDS)]
Stops = Annotated[list[str], Meta(max_length=MOST_STOPS)]
Stop = Annotated[str, Meta(max_length=MOST_NAME, extra_json_schema={"minLength": 1})]
RequestId = Annotated[str, shown(pattern=f"^{ID.pattern}$")]

TOO_DEEP = f"nested too deeply: at most {MOST_DEPTH} levels of lists and objects are allowed"
TOO_MANY = f"too many parts: at most {MOST_PARTS:,} texts, lists and objects are allowed"


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise for metadata beyond OpenAI's limits."""
    check_count(metadata, 16, "metadata")
    for key, value in (metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise InvalidRequest("metadata", ": keys have at most 64 characters, values at most 512")


def largest_body(longest: int) -> int:
    """Bytes that suffice for any prompt of ``longest`` tokens, as text or as token ids."""
    return max(LARGEST_BODY, BYTES_A_TOKEN * longest)


def weigh(json: bytes, field: str | Path = (), what: str = "The body") -> int:
    """Count the strings, lists and objects in some JSON. Raises :class:`InvalidRequest` if they are too many or too
    deep.
    what: its name in messages, before the field's.

    Invalid JSON may pass: the decoder reports it.
    """
    plain = json.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in json else json
    parts = plain.count(b'"') // 2
    if parts <= MOST_PARTS:
        brackets = b"".join(plain.split(b'"')[::2]).translate(None, _NO_BRACKETS)
        parts += brackets.count(b"[") + brackets.count(b"{")
    if parts > MOST_PARTS:
        raise InvalidRequest(field, f" has {TOO_MANY}", what)
    if _depth(brackets) > MOST_DEPTH:
        raise InvalidRequest(field, f" is {TOO_DEEP}", what)
    return parts


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _depth(brackets: bytes) -> int:
    """The greatest nesting depth."""
    opens = np.frombuffer(brackets, np.uint8) | 32 == ord("{")  # the bit by which [ and { differ
    return int(np.cumsum(np.where(opens, 1, -1)).max(initial=0))


def check_count(given: Sized | None, most: int, field: str | Path, what: str = "entries") -> None:
    """Raise for more than ``most`` entries (characters, if it is a string)."""
    if given is not None and len(given) > most:
        raise InvalidRequest(field, f" holds {len(given):,} {what}; at most {most:,} are allowed")


def check_bytes(given: Any, most: int, field: str | Path) -> None:
    """Raise for a value that takes more than ``most`` bytes as JSON."""
    size = 0 if given is None else len(msgspec.json.encode(given))
    if size > most:
        raise InvalidRequest(field, f" has {size:,} bytes as JSON; at most {most:,} are allowed")
