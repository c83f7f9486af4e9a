"""The suffix drafter: proposes what followed the text's longest known suffix, in the text or in earlier answers.

Needs no model. Earlier occurrences of a sequence's last tokens, up to 16 of them, are looked up in its own text and in
earlier answers of the same salt; the positions found vote, and the draft is as long as its chance to be right is good
(reference: algorithms, 3.10). Text is indexed in time slices, one each step, so that a long prompt delays no other
request: what is not indexed yet is not found yet.

::

    positions     p     q     r           of the longest context, in the sequence itself and in earlier answers
    runs       x a b x a c y a b       what followed there; the latest position counts most
    nodes      x: 2 of 3   y: 1 of 3   each node continues with the runs that agree so far
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from foresay.drafters.lookup import DraftNodes, LookupDrafter
from foresay.drafters.suffix.suffix_tree import (
    END,
    MAX_CONTEXT,
    MAX_POSITIONS,
    SHORTER,
    Answers,
    History,
    Match,
    SuffixTree,
    cell_of,
    kind_of,
)
from foresay.spec.budget.chance import Cells
from foresay.spec.names import SUFFIX
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

    def index(self, text: SuffixTree) -> bool:
        """Index as much of a text as there is time for; returns whether that is all of it."""
        while (behind := text.pending) > 0 and (self._owed or time.perf_counter() < self._until):
            text.index(PIECE)
            self._owed = False
        return behind <= 0

    def dispose(self, text: SuffixTree) -> bool:
        """Free as much of its memory as there is time for; returns whether that is all of it."""
        while not text.is_empty and time.perf_counter() < self._until:
            text.dispose(PIECE)
        return text.is_empty


#: Tokens less likely than this to be accepted are not drafted. With a lower value more are drafted, and hardly more
#: accepted.
MIN_CHANCE = 0.01
#: How many lengths of context a tree uses.
_LENGTHS = 4


@dataclass(slots=True, eq=False)
class _SuffixState:
    """State of a sequence: its text, its salt's answers, and the last draft."""

    tree: SuffixTree
    answers: Answers
    draft: DraftNodes | None = None


class SuffixDrafter(LookupDrafter[_SuffixState]):
    """Chains, and trees where positions disagree.

    history: earlier answers, which are extended. slice_seconds: of each step, for indexing text. learning: False keeps
    the initial chances, for comparison.
    """

    name = SUFFIX

    def __init__(self, history: History | None = None, slice_seconds: float = SLICE) -> None:
        super().__init__()
        self.history = History() if history is None else history
        self.learning = True
        self._slices = Slices(slice_seconds)

    def find(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree | None]:
        """Like ``propose``; None where nothing matches."""
        self._slices.begin()
        texts = [self._of(sequence).tree for sequence in sequences]
        for text in texts if len(texts) == 1 else sorted(texts, key=lambda text: text.pending):
            self._slices.index(text)
        if self.history.pending or self.history.dropped:
            self._catch_up()
        return super().find(sequences, shapes)

    def extend(self, sequence: SequenceState) -> None:
        """Index a slice of the prompt, all of which is known, while the target computes it."""
        self._slices.extend(sequence.id)
        self._slices.index(self._of(sequence).tree)
        self._catch_up()

    def finished(self, sequence: SequenceState) -> None:
        """Keep the answer, if it is one: not of a preempted sequence, which comes back, nor of a background one."""
        running = self._running.pop(sequence.id, None)
        if running is not None:
            self.history.dropped.append(running.tree)
        if sequence.finished and sequence.finish_reason != "error" and sequence.speculate and not sequence.aside:
            self.history.add(sequence.salt, sequence.tokens[max(0, sequence.prompt_length - MAX_CONTEXT) :])

    def _begin(self, sequence: SequenceState) -> _SuffixState:
        return _SuffixState(SuffixTree(sequence.tokens), self.history.answers(sequence.salt))

    def _catch_up(self) -> None:
        """In the rest of the slice: index earlier answers, and free memory."""
        behind, dropped = self.history.pending, self.history.dropped
        while behind and self._slices.index(behind[0]):
            del behind[0]
        while dropped and self._slices.dispose(dropped[-1]):
            dropped.pop()

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree | None:
        tokens, running = sequence.tokens, self._of(sequence)
        calibration = running.answers.calibration
        if running.draft is not None and self.learning:
            running.draft.teach(calibration, tokens)
        running.draft = None
        texts = [running.tree, *running.answers.texts]
        matches = [text.matches(tokens) for text in texts]
        if not (shape.levels and any(matches)):
            return None
        found = Continuations.merge(texts, matches, 1 if shape.is_chain else _LENGTHS, shape.levels)
        if not found.runs[0]:
            return None
        if shape.is_chain:
            running.draft = build_chain(tokens, found, shape.levels, calibration)
        else:
            running.draft = build_tree(tokens, found, shape, calibration)
        return running.draft.tree(self.name, len(running.draft.tokens))


#: What followed a position.
Run = list[int]
#: The weights of votes: the latest position's, the one before it, and so on.
_WEIGHTS = tuple((1 + age) ** -0.75 for age in range(MAX_POSITIONS))


@dataclass(slots=True)
class Continuations:
    """What followed earlier occurrences of a text's suffix. lengths: of the contexts, the longest first; runs: for
    each, at most ``MAX_POSITIONS`` from all texts, beginning with the first text's latest position."""

    lengths: list[int]
    runs: list[list[Run]]

    @classmethod
    def merge(cls, texts: Sequence[SuffixTree], matches: Sequence[list[Match]], top: int, levels: int) -> Continuations:
        """From the matches in each text. top: how many lengths of context; levels: tokens of each run."""
        if top == 1:
            lengths = [max((found[-1][0] for found in matches if found), default=0)]
        else:
            lengths = sorted({length for found in matches for length, _ in found}, reverse=True)[:top]
        return cls(lengths, [_runs(texts, matches, length, levels) for length in lengths])


def _runs(texts: Sequence[SuffixTree], matches: Sequence[list[Match]], length: int, levels: int) -> list[Run]:
    """What followed where at least ``length`` tokens of context match."""
    runs: list[Run] = []
    for text, found in zip(texts, matches, strict=True):
        if not found or found[-1][0] < length:
            continue
        positions = next(positions for known, positions in found if known >= length)
        runs += [_run(text.tokens, position, levels) for position in positions[: len(runs) - MAX_POSITIONS - 1 : -1]]
    return runs


def _run(text: list[int], position: int, levels: int) -> Run:
    """``levels`` tokens from a position on; if the text ends, what followed is repeated."""
    run = text[position : position + levels]
    return run if len(run) == levels else (run * levels)[:levels]


def build_chain(text: Sequence[int], found: Continuations, levels: int, calibration: Cells) -> DraftNodes:
    """The token with the most votes at each level, until the chance that all of them are right is too low."""
    draft, chance = DraftNodes.below(text), 1.0
    length, runs = found.lengths[0], found.runs[0]
    for depth in range(levels):
        voters, token = len(runs), runs[0][depth]
        if voters > 1:
            votes = _votes(runs, depth)
            if len(votes) > 1:
                token, (_, runs) = max(votes.items(), key=lambda vote: vote[1][0])
        cell = cell_of(length + depth, kind_of(len(runs), voters))
        chance *= calibration.chances[cell]
        if token == END or chance < MIN_CHANCE:
            break
        draft.add(token, depth, chance, cell)
    return draft


def build_tree(text: Sequence[int], found: Continuations, shape: TreeShape, calibration: Cells) -> DraftNodes:
    """The likeliest nodes, as many as the shape has.

    Below the root are the continuations of the longest context and, with the chance that is left, those of shorter
    ones.
    """
    draft, levels, nodes = DraftNodes.below(text), shape.levels, shape.nodes
    # Minus the chance, a number to break ties, token, parent, cell, depth, context length, the runs that agree.
    heap: list[tuple[float, int, int, int, int, int, int, list[Run]]] = []
    numbers = count()

    def push(token: int, parent: int, chance: float, cell: int, depth: int, length: int, runs: list[Run]) -> None:
        if token != END and chance >= MIN_CHANCE:
            heapq.heappush(heap, (-chance, next(numbers), token, parent, cell, depth, length, runs))

    def expand(node: int, depth: int, length: int, runs: list[Run]) -> set[int]:
        votes = _votes(runs, depth)
        for token, (_, agreeing) in votes.items():
            cell = cell_of(length, kind_of(len(agreeing), len(runs)))
            push(token, node, draft.chances[node] * calibration.chances[cell], cell, depth + 1, length + 1, agreeing)
        return set(votes)

    known = expand(0, 0, found.lengths[0], found.runs[0])
    left = max(0.0, 1.0 + sum(entry[0] for entry in heap))
    for length, runs in zip(found.lengths[1:], found.runs[1:], strict=True):
        cell = cell_of(length, SHORTER)
        for token, (_, agreeing) in _votes(runs, 0).items():
            if token not in known:
                push(token, 0, left * calibration.chances[cell], cell, 1, length + 1, agreeing)
                known.add(token)
    while heap and len(draft.tokens) < nodes:
        chance, _, token, parent, cell, depth, length, runs = heapq.heappop(heap)
        node = draft.add(token, parent, -chance, cell)
        if depth < levels:
            expand(node, depth, length, runs)
    return draft


def _votes(runs: list[Run], depth: int) -> dict[int, tuple[float, list[Run]]]:
    """The votes ``depth`` tokens on: the weight of each token, and the runs that have it."""
    tokens = [run[depth] for run in runs]
    if tokens.count(tokens[0]) == len(tokens):
        return {tokens[0]: (1.0, runs)}
    votes: dict[int, tuple[float, list[Run]]] = {}
    for token, weight, run in zip(tokens, _WEIGHTS, runs, strict=False):
        if token in votes:
            before, agreeing = votes[token]
            agreeing.append(run)
            votes[token] = before + weight, agreeing
        else:
            votes[token] = weight, [run]
    return votes
