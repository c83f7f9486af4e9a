"""A grammar as a step uses it: a llguidance matcher at the committed text, and walks from there over draft trees.

A walk uses a copy of the matcher, depth first: it consumes a token on the way down and rolls it back on the way up.
Copying costs a microsecond, since copies share the automaton; so no draft can affect the committed state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from foresay.spec.errors import ForesayError
from foresay.spec.request import Grammar

Words = NDArray[np.int32]
#: Before the grammar; at its first token, where reasoning could begin instead; inside; after its end.
State = Literal["before", "first", "inside", "ended"]


class Stuck(Exception):
    """The matcher hit its limits or a dead end of the grammar, and cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens as masks see them.

    columns: int32 words of a row that the matcher writes; the first ``words`` are the model's. end_ids: tokens that end
    the text; ends: int32[columns], their bits. known: int32[columns], bits of the tokenizer's tokens: a model may have
    more, for padding.
    """

    words: int
    columns: int
    end_ids: frozenset[int]
    ends: Words
    known: Words

    @classmethod
    def of(cls, size: int, known: Sequence[int], end_ids: Sequence[int], matcher_size: int) -> Vocabulary:
        """For a model of ``size`` tokens. matcher_size: of the llguidance tokenizer, at least ``size``."""
        columns = -(-matcher_size // 32)
        real = {token for token in (*known, *end_ids) if token < size}
        return cls(-(-size // 32), columns, frozenset(end_ids), _bits(end_ids, columns), _bits(sorted(real), columns))


def _bits(tokens: Sequence[int], columns: int) -> Words:
    flags = np.zeros(columns * 32, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class GrammarMatcher:
    """A matcher that moves through a grammar and the text before it."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, grammar: Grammar, state: State) -> None:
        self.state = state
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._past: list[State] = []

    def down(self, token: int) -> bool:
        """Consume ``token``; False, without change, if the grammar does not allow it."""
        state = self._behind(token)
        if state is None:
            return False
        self._past.append(self.state)
        self.state = state
        return True

    def _behind(self, token: int) -> State | None:
        if self.state == "before":
            return "inside" if token == self._grammar.after else "before"
        if self.state == "first" and token == self._grammar.opens:
            return "before"
        if self.state == "ended":
            return None
        if token in self._vocabulary.end_ids:
            return "ended" if self._matcher.is_accepting() else None
        if self._matcher.try_consume_tokens([token]) == 1:
            return "inside"
        if self._matcher.is_error():
            raise Stuck(complaint(self._matcher))
        return None

    def up(self) -> None:
        """Undo the last step down."""
        state = self._past.pop()
        if self.state == "inside" and state != "before":
            self._matcher.rollback(1)
        self.state = state

    def fill(self, row: Words) -> None:
        """Write the mask of allowed next tokens into ``row`` (int32[columns]); all zeros if that raises."""
        if self.state == "before":
            row[:] = -1
        elif self.state == "ended" or (self._matcher.is_accepting() and self._matcher.is_stopped()):
            row[:] = self._vocabulary.ends
        else:
            self._fill(row)
        if self.state == "first" and self._grammar.opens is not None:
            row |= _bits([self._grammar.opens], len(row))

    def _fill(self, row: Words) -> None:
        accepting = self._matcher.is_accepting()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        row &= self._vocabulary.known
        if not accepting:  # llguidance allows the end of text at dead ends, too
            row &= ~self._vocabulary.ends
        if self._matcher.is_error() or not row.any():
            row[:] = 0
            raise Stuck(complaint(self._matcher))


def complaint(matcher: LLMatcher) -> str:
    """A failed matcher's error message, without its internal state."""
    message: str = matcher.get_error().partition("\n<")[0].strip()
    return "it allows nothing here" if message in ("", "NoExtensionBias") else message


def visits(walker: GrammarMatcher, tokens: list[int], parents: list[int]) -> Iterator[int]:
    """The nodes that the grammar allows, depth first, with ``walker`` positioned at each."""
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


#: After this long a walk skips the rest of its tree: acceptance ends there. (The compiler bounds a single mask.)
MOST_SECONDS = 0.02
#: CPU time that a grammar may take for the committed text: in every step on average, and in a burst. An ambiguous one
#: takes more with each token and blocks all steps. CPU time, not wall time: a busy machine is not the grammar's fault.
STEADY_SECONDS, BURST_SECONDS = 0.02, 0.25


class GrammarFailed(ForesayError):
    """The grammar cannot determine what follows the committed text: it is too complex there, or allows nothing."""


class TimeBudget:
    """The remaining CPU time of one request's grammar."""

    def __init__(self, seconds: float = BURST_SECONDS) -> None:
        self.seconds = seconds

    def renew(self) -> None:
        """Add a step's allowance."""
        self.seconds = min(BURST_SECONDS, self.seconds + STEADY_SECONDS)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the CPU time of the block. Raises :class:`GrammarFailed` if the budget is exceeded."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds -= time.thread_time() - began
        if self.seconds < 0:
            raise GrammarFailed("it takes too long at this text; make it less ambiguous, or its terminals longer")


class LlguidanceConstraint:
    """A :class:`~foresay.spec.constrain.Constraint`, of a grammar that may begin after other text.

    fresh: makes a new matcher of the same grammar, with its own automaton.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, grammar: Grammar, fresh: Callable[[], LLMatcher]
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._fresh = fresh
        self._state: State = "inside" if grammar.after is None else "before" if grammar.opens is None else "first"
        self._taken: list[int] = []
        self._budget = TimeBudget()
        self._forces = True

    def forced(self, most: int) -> list[int]:
        """Tokens that the grammar forces, at most ``most``, including the end of text if that must follow."""
        if self._state != "inside" or most <= 0 or not self._forces:
            return []
        began = time.thread_time()
        matcher = self._matcher.deep_copy()
        run: list[int] = matcher.compute_ff_tokens()[:most]
        if len(run) < most and len(self._vocabulary.end_ids) == 1 and (not run or matcher.consume_tokens(run)):
            run += self._vocabulary.end_ids if matcher.is_stopped() and matcher.is_accepting() else ()
        self._forces = time.thread_time() - began < MOST_SECONDS  # too slow: no forced drafts from now on
        return run

    def legal(self, tokens: list[int], parents: list[int]) -> list[bool]:
        """Which nodes the grammar allows; a node below an illegal one is illegal. The root is legal."""
        reached, deadline = [False] * len(tokens), time.monotonic() + MOST_SECONDS
        try:
            for node in visits(self._walker(), tokens, parents):
                reached[node] = True
                if time.monotonic() > deadline:
                    return [True] * len(tokens)
        except Stuck:
            return [True] * len(tokens)  # the masks will tell
        return reached

    def masks(self, tokens: list[int], parents: list[int]) -> Tensor | None:
        """int32[N, ceil(V / 32)]; None if no node is constrained. Safe to call in another thread.

        Unreachable nodes have all bits set. A node has none if the grammar failed or time ran out there: acceptance
        stops at its token, and the next step decides. Raises :class:`GrammarFailed` if that is the root.
        """
        if self._state == "before" and self._grammar.after not in tokens[1:]:
            return None
        rows, problem = self._filled(tokens, parents)
        if problem is not None and self._refresh():
            rows, problem = self._filled(tokens, parents)
        if not rows[0].any():
            raise GrammarFailed(problem or "it was given no time")
        return torch.from_numpy(np.ascontiguousarray(rows[:, : self._vocabulary.words]))

    def _filled(self, tokens: list[int], parents: list[int]) -> tuple[Words, str | None]:
        """The masks, and why some could not be computed."""
        rows = np.zeros((len(tokens), self._vocabulary.columns), dtype=np.int32)
        unseen, deadline = set(range(len(tokens))), time.monotonic() + MOST_SECONDS
        walker = self._walker()
        try:
            for node in visits(walker, tokens, parents):
                with nullcontext() if node else self._budget.spent():
                    walker.fill(rows[node])
                unseen.remove(node)
                if time.monotonic() > deadline:
                    return rows, None
        except Stuck as error:
            return rows, str(error)
        rows[list(unseen)] = -1
        return rows, None

    def advance(self, tokens: list[int]) -> None:
        """Advance over committed tokens. Raises :class:`GrammarFailed` if the grammar does not allow them."""
        self._budget.renew()
        for token in tokens:
            if self._state != "ended" and not (self._takes(token) or (self._refresh() and self._takes(token))):
                raise GrammarFailed(f"the grammar does not allow token {token} after the text so far")

    def _takes(self, token: int) -> bool:
        """Advance the committed state; False if the grammar does not allow it."""
        walker = GrammarMatcher(self._matcher, self._vocabulary, self._grammar, self._state)
        try:
            with self._budget.spent():
                allowed = walker.down(token)
            if not allowed:
                return False
        except Stuck:
            return False
        if walker.state == "inside" and self._state != "before":
            self._taken.append(token)
        self._state = walker.state
        return True

    def _refresh(self) -> bool:
        """Restart with a new automaton: a shared one may be full of other requests' states."""
        with self._budget.spent():
            self._matcher = self._fresh()
            return not self._matcher.is_error() and self._matcher.consume_tokens(self._taken)

    def fork(self) -> LlguidanceConstraint:
        """An independent copy in the same state."""
        twin = LlguidanceConstraint(self._matcher.deep_copy(), self._vocabulary, self._grammar, self._fresh)
        twin._state, twin._taken = self._state, list(self._taken)
        twin._budget, twin._forces = TimeBudget(self._budget.seconds), self._forces
        return twin

    def _walker(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary, self._grammar, self._state)
