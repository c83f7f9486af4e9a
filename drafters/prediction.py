"""The prediction drafter: the request contains what its answer will probably be (OpenAI's ``prediction``).

Needs no model. As long as the text follows the prediction, the next tokens are drafted from it, as many as pay: each is
worth its chance to be accepted, which is learnt per request, and costs its row. When the text has diverged, the
positions where it may have rejoined (:class:`Alignment`) are drafted together, as a tree.

Where in a prediction a text is, and where it may be after it diverged::

    prediction   the cat sat on | the  mat  and slept        text: the cat sat on | a
    in step                                                  every token was the one at the cursor
    replaced     the cat sat on   the [mat                   one token replaced: continue one further
    inserted     the cat sat on  [the  mat                   one token inserted: continue where it was left
    matched      ... a [red  hat                             the end of the text occurs there too
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from foresay.drafters.lookup import DraftNodes, LookupDrafter
from foresay.spec.budget import CostModel
from foresay.spec.budget.chance import Cells
from foresay.spec.names import PREDICTION
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

#: How a position was found: by a match with the end of the text, near the expected one or far from it, or by a guess.
NEAR, FAR, REPLACED, INSERTED = range(4)
#: Larger numbers of matching tokens, or of tokens since the prediction was left, count as this.
MOST = 8
#: With this many matching tokens, near and far, the position is taken as certain.
SURE = (3, 6)
#: Tokens that are indexed at once, so that no step waits long: well below a millisecond.
_SLICE = 4096
#: A position is near if it is at most this far ahead of where the text should be.
_REACH = 64


class Candidate(NamedTuple):
    """A position of the prediction whose token may come next. length: tokens before it that match the end of the text;
    for a guess, tokens since the prediction was left."""

    at: int
    kind: int
    length: int

    @property
    def sure(self) -> bool:
        """Whether the text is certainly here."""
        return self.kind <= FAR and self.length >= SURE[self.kind]

    def cell(self, depth: int) -> int:
        """The number under which the chance of the token at this depth is kept; each token before it counts as a
        match."""
        if depth and self.kind > FAR:
            return cell_of(NEAR, depth)
        return cell_of(self.kind, self.length + depth)


def cell_of(kind: int, length: int) -> int:
    """The number of a kind and length."""
    return kind * (MOST + 1) + min(length, MOST)


class Alignment:
    """Follows a text along its prediction. begins: tokens of the text before the predicted part.

    candidates: where the text may be now, the likeliest first: one if that is certain, none if it is past the end.
    """

    def __init__(self, prediction: Sequence[int], begins: int) -> None:
        self.tokens = prediction
        self.candidates: list[Candidate] = []
        self._known = np.empty(0, dtype=np.int32)
        self._read = begins
        self._at = Candidate(0, NEAR, 0)
        #: The last certain position, and the text's length then.
        self._left, self._length = 0, begins

    def follow(self, text: Sequence[int], chances: Sequence[float]) -> None:
        """Follow the new tokens. chances: of a position to be right, by :meth:`Candidate.cell`.

        The result depends only on the text and the chances, not on how often this is called, once all of the prediction
        is indexed: a long one is indexed slice by slice, one each call.
        """
        taken = len(self._known)
        if taken < len(self.tokens):
            more = np.array(self.tokens[taken : taken + _SLICE], dtype=np.int32)
            self._known = np.concatenate((self._known, more))
        for length in range(self._read, len(text)):
            at, kind, common = self._at
            came = at < len(self.tokens) and self.tokens[at] == text[length]
            self._at = Candidate(at + 1, kind, common + 1) if came else Candidate(at, NEAR, 0)
            self._read = length + 1
            if not self._at.sure:
                self._find(text, chances)
            if self._at.sure:
                self._at = self._at._replace(kind=NEAR)
                self._left, self._length = self._at.at, self._read
                self.candidates = [self._at] if self._at.at < len(self.tokens) else []

    def _find(self, text: Sequence[int], chances: Sequence[float]) -> None:
        """Search for the end of the text read so far, and continue from the likeliest position."""
        self.candidates = sorted(self._candidates(text), key=lambda candidate: -chances[candidate.cell(0)])
        if self.candidates:
            first = self.candidates[0]
            self._at = first if first.kind <= FAR else Candidate(first.at, NEAR, 0)

    def _candidates(self, text: Sequence[int]) -> list[Candidate]:
        """For each number of matching tokens the nearest position ahead (before, if none), then the guesses."""
        end, since, found = self._read - 1, self._read - self._length, dict[int, Candidate]()
        ends = np.flatnonzero(self._known[:-1] == text[end]) + 1
        for length in range(1, MOST + 1):
            if not len(ends):
                break
            at = int(ends[min(int(np.searchsorted(ends, self._left)), len(ends) - 1)])
            found[at] = Candidate(at, NEAR if 0 <= at - self._left <= since + _REACH else FAR, length)
            ends = ends[ends > length]
            ends = ends[self._known[ends - length - 1] == text[end - length]] if length <= end else ends[:0]
        for at, kind in ((self._left + since, REPLACED), (self._left, INSERTED)):
            if 0 < since <= MOST and at < len(self.tokens):
                found.setdefault(at, Candidate(at, kind, since))
        return list(found.values())


#: Tokens less likely than this to be accepted are not drafted, however little a row costs.
LEAST_CHANCE = 0.02
#: The most tokens of an earlier output that are followed at once.
MOST_READ = 64
#: The initial chances of a position's token, by kind and length from 1 on, in the order of :func:`cell_of`.
FIRST = {
    NEAR: (0.60, 0.84, 0.88, 0.92, 0.94, 0.94, 0.95, 0.97),
    FAR: (0.25, 0.45, 0.60, 0.70, 0.78, 0.83, 0.87, 0.92),
    REPLACED: (0.20, 0.05, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
    INSERTED: (0.15, 0.08, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
}


@dataclass(slots=True, eq=False)
class _Followed:
    """State of a sequence: its alignment, the learnt chances, and the last draft."""

    alignment: Alignment
    trust: Cells
    grown: DraftNodes | None = None


class PredictionDrafter(LookupDrafter[_Followed]):
    """Chains along the prediction, trees after divergence.

    cost: what rows cost; without it as many nodes are drafted as the shape has. learning: False keeps the initial
    chances, for comparison.
    """

    name = PREDICTION

    def __init__(self, cost: CostModel | None = None) -> None:
        super().__init__()
        self.learning = True
        self._cost = cost

    def _begin(self, sequence: SequenceState) -> _Followed:
        # A preempted one comes back with all its output.
        begins = max(sequence.prompt_length, len(sequence.tokens) - MOST_READ)
        chances = Cells(row[max(length, 1) - 1] for row in FIRST.values() for length in range(MOST + 1))
        return _Followed(Alignment(sequence.prediction or (), begins), chances)

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree | None:
        if not sequence.prediction or not shape.levels:
            return None
        tokens, running = sequence.tokens, self._of(sequence)
        if running.grown is not None and self.learning:
            running.grown.teach(running.trust, tokens)
        running.alignment.follow(tokens, running.trust.chances)
        running.grown = grow(tokens, running.alignment, shape, running.trust)
        return running.grown.tree(self.name, self._worthwhile(running.grown))

    def _worthwhile(self, grown: DraftNodes) -> int:
        """How many of the likeliest nodes give the most tokens per second."""
        nodes, expected, best = len(grown.tokens), 0.0, 0.0
        if self._cost is None:
            return nodes
        for count, chance in enumerate(grown.chances, start=1):
            expected += chance
            speed = expected / self._cost.seconds(count)
            if speed > best:
                best, nodes = speed, count
        return nodes


def grow(text: Sequence[int], found: Alignment, shape: TreeShape, trust: Cells) -> DraftNodes:
    """A draft of what follows at the candidates, the likeliest tokens first; candidates that agree share nodes."""
    prediction, candidates = found.tokens, found.candidates
    if len(candidates) == 1:
        return _grow_chain(text, found, shape.levels, trust)
    grown, children = DraftNodes.below(text), dict[tuple[int, int], int]()
    # Smallest first: minus the chance; then the order of the positions; parent, depth.
    heap = [(-trust.chances[candidate.cell(0)], order, 0, 0) for order, candidate in enumerate(candidates)]
    heapq.heapify(heap)
    while heap and len(grown.tokens) < shape.nodes:
        chance, order, parent, depth = heapq.heappop(heap)
        candidate = candidates[order]
        token = prediction[candidate.at + depth]
        node = children.get((parent, token))
        if node is None:
            node = children[parent, token] = grown.add(token, parent, -chance, candidate.cell(depth))
        further = depth + 1
        if further < shape.levels and candidate.at + further < len(prediction):
            next_chance = -grown.chances[node] * trust.chances[candidate.cell(further)]
            if -next_chance >= LEAST_CHANCE:
                heapq.heappush(heap, (next_chance, order, node, further))
    return grown


def _grow_chain(text: Sequence[int], found: Alignment, levels: int, trust: Cells) -> DraftNodes:
    """The same for one candidate, faster: the case of most steps."""
    (candidate,) = found.candidates
    tokens = [text[-1], *found.tokens[candidate.at : candidate.at + levels]]
    cells = [0, *(candidate.cell(depth) for depth in range(len(tokens) - 1))]
    chances = list(accumulate((trust.chances[cell] for cell in cells[1:]), mul, initial=1.0))
    nodes = next((node for node, chance in enumerate(chances) if node > 1 and chance < LEAST_CHANCE), len(tokens))
    return DraftNodes(len(text), tokens[:nodes], list(range(-1, nodes - 1)), chances[:nodes], cells[:nodes])
