"""How much a request may hold. Whatever walks over what a client sent does so on the event loop, where tokens of others
wait: so everything that can be counted has a bound, and a body is weighed before it is decoded.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import msgspec
import numpy as np

from foresay.spec.errors import InvalidRequest, Path

LARGEST_BODY = 4 << 20
#: Bytes of a body that came give it another second.
BODY_PACE = 16 << 10
#: A token is four characters of a text, which JSON may write as six bytes each, or an id of up to seven digits.
BYTES_A_TOKEN = 32
#: Texts, lists and objects of one body: 25 ms to decode at the most. Numbers are light, the body's size bounds them.
MOST_PARTS = 50_000
#: Lists and objects within each other. Encoders and templates go down by recursion.
MOST_DEPTH = 200
MOST_MESSAGES = 2048
MOST_TOOLS = 1024
MOST_CALLS = 128
#: What is repeated in answers, or sent to the engine with each choice.
MOST_NAME = 256
MOST_TEMPLATE_BYTES = 16 * 1024
MOST_SAID_AGAIN = 1 << 20

TOO_DEEP = f"nested too deeply: at most {MOST_DEPTH} levels of lists and objects are allowed"
TOO_MANY = f"too many parts: at most {MOST_PARTS:,} texts, lists and objects are allowed"


def largest_body(longest: int) -> int:
    """Bytes that hold any prompt that fills a context of so many tokens, as text and as token ids."""
    return max(LARGEST_BODY, BYTES_A_TOKEN * longest)


def weigh(json: bytes, field: str | Path = (), what: str = "The body") -> int:
    """The texts, lists and objects in some JSON. Raises :class:`InvalidRequest` if they are too many or too deep.
    what: it is called, before the field's name.

    Text that is no JSON may pass: the decoder says what is wrong with it.
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
    """How many are open at once."""
    opens = np.frombuffer(brackets, np.uint8) | 32 == ord("{")  # the bit by which [ and { differ
    return int(np.cumsum(np.where(opens, 1, -1)).max(initial=0))


def check_count(given: Sized | None, most: int, field: str | Path, what: str = "entries") -> None:
    """Raise for more than ``most`` entries; of a text: characters."""
    if given is not None and len(given) > most:
        raise InvalidRequest(field, f" holds {len(given):,} {what}; at most {most:,} are allowed")


def check_bytes(given: Any, most: int, field: str | Path) -> None:
    """Raise for a value that takes more than ``most`` bytes as JSON."""
    size = 0 if given is None else len(msgspec.json.encode(given))
    if size > most:
        raise InvalidRequest(field, f" has {size:,} bytes as JSON; at most {most:,} are allowed")
