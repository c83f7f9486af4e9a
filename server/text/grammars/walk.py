"""Going down and up a tree of tokens with a matcher, writing a mask at each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Words = NDArray[np.int32]
#: Before the grammar; at its first token, where thinking could be opened instead; inside; behind its end.
State = Literal["before", "first", "inside", "ended"]


class Stuck(Exception):
    """The matcher ran into its limits, or to a dead end of the grammar, and is of no more use."""


@dataclass(frozen=True, slots=True)
class Border:
    """Where a grammar begins: see :class:`~spec.request.Grammar`."""

    after: int | None = None
    opens: int | None = None

    @property
    def state(self) -> State:
        """Where the first token stands."""
        return "inside" if self.after is None else "before" if self.opens is None else "first"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens as masks see them.

    columns: int32 words of a row that the matcher writes; ``words`` of them are the model's. end_ids: tokens that end
    the text; ends: int32[columns], their bits. known: int32[columns], the tokens that mean something: a model may have
    more than its tokenizer, for padding.
    """

    words: int
    columns: int
    end_ids: frozenset[int]
    ends: Words
    known: Words

    @classmethod
    def of(cls, size: int, known: Sequence[int], end_ids: Sequence[int], matcher_size: int) -> Vocabulary:
        """Of a model of ``size`` tokens. matcher_size: of the llguidance tokenizer, at least ``size``."""
        columns = -(-matcher_size // 32)
        real = {token for token in (*known, *end_ids) if token < size}
        return cls(-(-size // 32), columns, frozenset(end_ids), _bits(end_ids, columns), _bits(sorted(real), columns))


def _bits(tokens: Sequence[int], columns: int) -> Words:
    flags = np.zeros(columns * 32, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class Walker:
    """A matcher on its way through a grammar and whatever comes before it."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, border: Border, state: State) -> None:
        self.state = state
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._border = border
        self._past: list[State] = []

    def down(self, token: int) -> bool:
        """Take ``token``; False, and no change, if the grammar does not allow it."""
        state = self._behind(token)
        if state is None:
            return False
        self._past.append(self.state)
        self.state = state
        return True

    def _behind(self, token: int) -> State | None:
        if self.state == "before":
            return "inside" if token == self._border.after else "before"
        if self.state == "first" and token == self._border.opens:
            return "before"
        if self.state == "ended":
            return None
        if token in self._vocabulary.end_ids:
            return "ended" if self._matcher.is_accepting() else None
        if self._matcher.try_consume_tokens([token]) == 1:
            return "inside"
        self._check()
        return None

    def up(self) -> None:
        """Undo the last step down."""
        state = self._past.pop()
        if self.state == "inside" and state != "before":
            self._matcher.rollback(1)
        self.state = state

    def fill(self, row: Words) -> None:
        """Write what may follow into ``row`` (int32[columns]); nothing if that raises."""
        if self.state == "before":
            row[:] = -1
        elif self.state == "ended" or (self._matcher.is_accepting() and self._matcher.is_stopped()):
            row[:] = self._vocabulary.ends
        else:
            self._fill(row)
        if self.state == "first" and self._border.opens is not None:
            row |= _bits([self._border.opens], len(row))

    def _fill(self, row: Words) -> None:
        accepting = self._matcher.is_accepting()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        row &= self._vocabulary.known
        if not accepting:  # llguidance allows the end of text at dead ends, too
            row &= ~self._vocabulary.ends
        if self._matcher.is_error() or not row.any():
            row[:] = 0
            raise Stuck(complaint(self._matcher))

    def _check(self) -> None:
        if self._matcher.is_error():
            raise Stuck(complaint(self._matcher))


def complaint(matcher: LLMatcher) -> str:
    """What a matcher in error says, without its internal state."""
    said: str = matcher.get_error().partition("\n<")[0].strip()
    return "it allows nothing here" if said in ("", "NoExtensionBias") else said


def visits(walker: Walker, tokens: list[int], parents: list[int]) -> Iterator[int]:
    """The nodes the grammar can reach, depth first, with ``walker`` standing at each."""
    children: list[list[int]] = [[] for _ in tokens]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    yield 0
    path = [iter(children[0])]
    while path:
        node = next(path[-1], -1)
        if node < 0:
            path.pop()
            if path:
                walker.up()
        elif walker.down(tokens[node]):
            yield node
            path.append(iter(children[node]))
