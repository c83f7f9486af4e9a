"""The prediction drafter: the request brought along what its answer will probably be (OpenAI's ``prediction``).

Costs no model. As long as the text goes as predicted, the next tokens are drafted off the prediction, as many as pay:
each is worth its chance to be accepted, which is learnt per request, and costs its row. When the text has gone its own
way, the places where it may be back (:mod:`foresay.drafters.alignment`) are drafted side by side, as a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from foresay.drafters.alignment import FAR, INSERTED, KINDS, MOST, NEAR, REPLACED, Alignment, Place, cell_of
from foresay.drafters.suffix.growth import Grown
from foresay.spec.budget import CostModel
from foresay.spec.budget.chance import Cells
from foresay.spec.names import PREDICTION
from foresay.spec.protocols import FeatureRequest, or_roots
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

#: What is less likely than this to be accepted is not drafted, however little a row costs.
LEAST_CHANCE = 0.02
#: Tokens that are read at once, at most, of an output that nobody followed.
MOST_READ = 64
#: What is believed in the beginning of a place's token, by kind and length from 1 on.
FIRST = {
    NEAR: (0.60, 0.84, 0.88, 0.92, 0.94, 0.94, 0.95, 0.97),
    FAR: (0.25, 0.45, 0.60, 0.70, 0.78, 0.83, 0.87, 0.92),
    REPLACED: (0.20, 0.05, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
    INSERTED: (0.15, 0.08, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
}


def _beginning() -> list[float]:
    chances = [0.0] * (KINDS * (MOST + 1))
    for kind, row in FIRST.items():
        for length in range(MOST + 1):
            chances[cell_of(kind, length)] = row[max(length, 1) - 1]
    return chances


@dataclass(slots=True, eq=False)
class _Running:
    """What is kept of a sequence: where it is, what was learnt, and the last draft with the length it was made at."""

    alignment: Alignment
    trust: Cells
    grown: Grown | None = None
    length: int = 0


class PredictionDrafter:
    """Chains along the prediction, trees where it was left; implements :class:`foresay.spec.protocols.Drafter`.

    cost: what rows cost; without it as many are drafted as the shape has. learning: False leaves the chances as they
    begin, for comparison.
    """

    name = PREDICTION
    needs: FeatureRequest | None = None

    def __init__(self, cost: CostModel | None = None) -> None:
        self.learning = True
        self._cost = cost
        self._running: dict[str, _Running] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """A draft per sequence, empty where it has no prediction or that has nothing to say: at most the shape's levels
        and nodes."""
        return or_roots(self.find(sequences, shapes), sequences, self.name)

    def find(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree | None]:
        """The same; None for an empty one."""
        return [self._tree(sequence, shape) for sequence, shape in zip(sequences, shapes, strict=True)]

    def extend(self, sequence: SequenceState) -> None:
        """Nothing to do: the prediction is known, and the prompt does not matter."""

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Nothing to do: what was committed is read when a draft is asked for."""

    def finished(self, sequence: SequenceState) -> None:
        """Forget the sequence."""
        self._running.pop(sequence.id, None)

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree | None:
        tokens = sequence.tokens
        if not sequence.prediction or not shape.levels:
            return None
        running = self._running.get(sequence.id)
        if running is None:
            # One that was preempted comes back with all it had said.
            begins = max(sequence.prompt_length, len(tokens) - MOST_READ)
            running = _Running(Alignment(sequence.prediction, begins), Cells(_beginning()))
            self._running[sequence.id] = running
        if running.grown is not None and self.learning:
            running.grown.teach(running.trust, tokens[running.length :])
        alignment = running.alignment
        alignment.follow(tokens, running.trust.chances)
        running.length = len(tokens)
        running.grown = grow(tokens[-1], alignment.tokens, alignment.places, shape, running.trust)
        return self._worthwhile(running.grown)

    def _worthwhile(self, grown: Grown) -> DraftTree | None:
        """So many of the likeliest nodes as give the most tokens for their time."""
        nodes = len(grown.tokens)
        if self._cost is not None:
            expected, best = 0.0, 0.0
            for count, chance in enumerate(grown.chances, start=1):
                expected += chance
                speed = expected / self._cost.seconds(count)
                if speed > best:
                    best, nodes = speed, count
        if nodes == 1:
            return None
        tokens, chances = grown.tokens[:nodes], tuple(grown.chances[:nodes])
        parents = grown.parents[:nodes]
        if parents == list(range(-1, nodes - 1)):
            return DraftTree.chain(tokens, self.name, chances)
        return DraftTree.build(tokens, parents, self.name, chances)


def grow(root: int, prediction: Sequence[int], places: Sequence[Place], shape: TreeShape, trust: Cells) -> Grown:
    """What follows at the places, the likeliest tokens first; places that agree share their nodes."""
    if len(places) == 1:
        return _grow_chain(root, prediction, places[0], shape, trust)
    grown, children = Grown([root]), dict[tuple[int, int], int]()
    # Smallest first: minus the chance; then the order of the places; parent, depth.
    heap = [(-trust.chances[place.cell(0)], order, 0, 0) for order, place in enumerate(places)]
    heapq.heapify(heap)
    while heap and len(grown.tokens) < shape.nodes:
        chance, order, parent, depth = heapq.heappop(heap)
        place = places[order]
        token = prediction[place.at + depth]
        node = children.get((parent, token))
        if node is None:
            node = children[parent, token] = grown.add(token, parent, -chance, place.cell(depth))
        further = depth + 1
        if further < shape.levels and place.at + further < len(prediction):
            next_chance = -grown.chances[node] * trust.chances[place.cell(further)]
            if -next_chance >= LEAST_CHANCE:
                heapq.heappush(heap, (next_chance, order, node, further))
    return grown


def _grow_chain(root: int, prediction: Sequence[int], place: Place, shape: TreeShape, trust: Cells) -> Grown:
    """The same for one place, in less time: that of most steps."""
    tokens = [root, *prediction[place.at : place.at + shape.levels]]
    cells = [0, *(place.cell(depth) for depth in range(len(tokens) - 1))]
    chances = list(accumulate((trust.chances[cell] for cell in cells[1:]), mul, initial=1.0))
    nodes = next((node for node, chance in enumerate(chances) if node > 1 and chance < LEAST_CHANCE), len(tokens))
    return Grown(tokens[:nodes], list(range(-1, nodes - 1)), chances[:nodes], cells[:nodes])
