"""MessagePack before it is decoded: how much it holds, and that it holds nothing that JSON could not.

Extensions, binary and names that are no text would come out as values that nothing behind the decoder knows.
"""

from __future__ import annotations

from server.schemas.bounds import MOST_DEPTH, MOST_PARTS, TOO_DEEP
from spec.errors import InvalidRequest

#: Bytes that follow the first one, by the first one: of numbers (and null, true, false).
_NUMBERS = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {
    first: 1 << first % 4 for first in (*range(0xCC, 0xD0), *range(0xD0, 0xD4))
}
#: Bytes of the length that follows, by the first byte.
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_OBJECTS = {0xDE: 2, 0xDF: 4}


def check_packed(message: bytes) -> None:
    """Raise :class:`InvalidRequest` for what is too much, too deep or no JSON; if it is cut off, the decoder does."""
    at = values = 0
    open_: list[list[int]] = []  # of each list or object around: values left, and whether they are names and values
    while at < len(message):
        values += 1
        if values > MOST_PARTS:
            raise InvalidRequest("", f"The message has too many values: at most {MOST_PARTS:,} are allowed")
        is_name = bool(open_ and open_[-1][1] and open_[-1][0] % 2 == 0)
        at, inside, is_text, of_pairs = _value(message, at)
        if is_name and not is_text:
            raise InvalidRequest("", "The message has a name that is no text")
        if open_:
            open_[-1][0] -= 1
        if inside:
            open_.append([inside, of_pairs])
        if len(open_) > MOST_DEPTH:
            raise InvalidRequest("", f"The message is {TOO_DEEP}")
        while open_ and not open_[-1][0]:
            open_.pop()
        if not open_:
            return


def _value(message: bytes, at: int) -> tuple[int, int, bool, bool]:
    """Where the value at ``at`` ends or what is in it begins, how many values that is, whether it is text, or pairs."""
    first = message[at]
    if first < 0x80 or first >= 0xE0:
        return at + 1, 0, False, False
    if first < 0x90:
        return at + 1, 2 * (first & 15), False, True
    if first < 0xA0:
        return at + 1, first & 15, False, False
    if first < 0xC0:
        return at + 1 + (first & 31), 0, True, False
    if first in _NUMBERS:
        return at + 1 + _NUMBERS[first], 0, False, False
    for kinds, text, pairs in ((_TEXTS, True, False), (_LISTS, False, False), (_OBJECTS, False, True)):
        if first in kinds:
            behind = at + 1 + kinds[first]
            count = int.from_bytes(message[at + 1 : behind], "big")
            return (behind + count, 0, True, False) if text else (behind, count * (1 + pairs), False, pairs)
    raise InvalidRequest("", "The message holds binary or an extension; JSON's types are what is read")
