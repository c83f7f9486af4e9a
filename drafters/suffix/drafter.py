"""The suffix drafter: proposes what followed the text's longest known suffix, in the text or in earlier answers.

Needs no model. Earlier occurrences of a sequence's last tokens, up to 16 of them, are looked up in its own text and in
earlier answers of the same salt; the positions found vote, and the draft is as long as its chance to be right is good
(reference: algorithms, 3.10). Text is indexed in time slices, one each step, so that a long prompt delays no other
request: what is not indexed yet is not found yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from foresay.drafters.suffix.contexts import MOST_CONTEXT, Answers, Contexts, History
from foresay.drafters.suffix.growth import Continuations, DraftNodes, grow_chain, grow_tree
from foresay.spec.names import SUFFIX
from foresay.spec.protocols import FeatureRequest, or_roots
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

#: Seconds of each step. Half a millisecond below what is promised, for the chunk that was begun in time.
SLICE = 0.5e-3
#: Tokens indexed, or entries freed, between two checks of the clock.
PIECE = 16


class Slices:
    """Gives one time slice per step. seconds: its length. At least one chunk is indexed, however late it is."""

    def __init__(self, seconds: float = SLICE) -> None:
        self._seconds, self._until = seconds, 0.0
        self._owed = True
        self._seen: set[str] = set()

    def begin(self) -> None:
        """A step begins: drafts are requested."""
        self._until = time.perf_counter() + self._seconds
        self._owed = True
        self._seen.clear()

    def extend(self, id: str) -> None:
        """A prompt chunk was computed: in the same step or, if it is the second one of its sequence, in the next."""
        if id in self._seen:
            self.begin()
        self._seen.add(id)

    def take(self, text: Contexts) -> bool:
        """Index as much of a text as there is time for; returns whether that is all of it."""
        while (behind := text.behind) > 0 and (self._owed or time.perf_counter() < self._until):
            text.take(PIECE)
            self._owed = False
        return behind <= 0

    def dispose(self, text: Contexts) -> bool:
        """Free as much of its memory as there is time for; returns whether that is all of it."""
        while not text.disposed and time.perf_counter() < self._until:
            text.dispose(PIECE)
        return text.disposed


#: Tokens less likely than this to be accepted are not drafted. With a lower value more are drafted, and hardly more
#: accepted.
LEAST_CHANCE = 0.01
#: How many lengths of context a tree uses.
_LENGTHS = 4


@dataclass(slots=True, eq=False)
class _LookedUp:
    """State of a sequence: its text, its salt's answers, and the last draft with the text length it was made at."""

    own: Contexts
    answers: Answers
    grown: DraftNodes | None = None
    length: int = 0


class SuffixDrafter:
    """Chains, and trees where positions disagree; implements :class:`foresay.spec.protocols.Drafter`.

    history: earlier answers, which are extended. slice_seconds: of each step, for indexing text. learning: False keeps
    the initial chances, for comparison.
    """

    name = SUFFIX
    needs: FeatureRequest | None = None

    def __init__(self, history: History | None = None, slice_seconds: float = SLICE) -> None:
        self.history = History() if history is None else history
        self.learning = True
        self._slices = Slices(slice_seconds)
        self._running: dict[str, _LookedUp] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """A draft per sequence, empty where nothing matches: a tree of at most the shape's levels and nodes."""
        return or_roots(self.find(sequences, shapes), sequences, self.name)

    def find(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree | None]:
        """Like ``propose``; None where nothing matches."""
        self._slices.begin()
        running = [self._running.get(sequence.id) or self._of(sequence) for sequence in sequences]
        for one in running if len(running) == 1 else sorted(running, key=lambda one: one.own.behind):
            self._slices.take(one.own)
        if self.history.behind or self.history.dropped:
            self._catch_up()
        return [self._tree(*parts) for parts in zip(running, sequences, shapes, strict=True)]

    def extend(self, sequence: SequenceState) -> None:
        """Index a slice of the prompt, all of which is known, while the target computes it."""
        self._slices.extend(sequence.id)
        self._slices.take(self._of(sequence).own)
        self._catch_up()

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Nothing to do: committed tokens are read when a draft is requested."""

    def finished(self, sequence: SequenceState) -> None:
        """Keep the answer, if it is one: not of a preempted sequence, which comes back, nor of a background one."""
        running = self._running.pop(sequence.id, None)
        if running is not None:
            self.history.dropped.append(running.own)
        if sequence.finished and sequence.finish_reason != "error" and sequence.speculate and not sequence.aside:
            self.history.add(sequence.salt, sequence.tokens[max(0, sequence.prompt_length - MOST_CONTEXT) :])

    def _of(self, sequence: SequenceState) -> _LookedUp:
        running = self._running.get(sequence.id)
        if running is None:
            running = _LookedUp(Contexts(sequence.tokens), self.history.of(sequence.salt))
            self._running[sequence.id] = running
        return running

    def _catch_up(self) -> None:
        """In the rest of the slice: index earlier answers, and free memory."""
        behind, dropped = self.history.behind, self.history.dropped
        while behind and self._slices.take(behind[0]):
            del behind[0]
        while dropped and self._slices.dispose(dropped[-1]):
            dropped.pop()

    def _tree(self, running: _LookedUp, sequence: SequenceState, shape: TreeShape) -> DraftTree | None:
        tokens, trust = sequence.tokens, running.answers.trust
        if running.grown is not None and self.learning:
            running.grown.teach(trust, tokens[running.length :])
        running.grown, running.length = None, len(tokens)
        texts = [running.own, *running.answers.texts]
        matches = [text.matches(tokens) for text in texts]
        if not (shape.levels and any(matches)):
            return None
        found = Continuations.of(texts, matches, 1 if shape.is_chain else _LENGTHS, shape.levels)
        if not found.runs[0]:
            return None
        if shape.is_chain:
            grown = grow_chain(tokens[-1], found, shape.levels, trust, LEAST_CHANCE)
        else:
            grown = grow_tree(tokens[-1], found, shape.levels, shape.nodes, trust, LEAST_CHANCE)
        if len(grown.tokens) == 1:
            return None
        running.grown = grown
        return DraftTree.build(grown.tokens, grown.parents, self.name, tuple(grown.chances))
