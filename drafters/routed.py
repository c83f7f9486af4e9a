"""Who drafts for whom: the request's own prediction, wherever it has something to say, else the configured drafter.

::

    propose    predicted, certain ──> prediction          committed    who proposed hears its path,
               predicted, unsure  ──> configured ──empty──> prediction     the other that it rested
               no prediction      ──> configured
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.drafters.prediction import PredictionDrafter
from foresay.spec.protocols import Drafter, FeatureRequest, Features, reader_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape

#: A prediction whose next token is less likely than this to be accepted leaves the step to the configured drafter.
SURE_ENOUGH = 0.5


class RoutedDrafter:
    """Implements :class:`foresay.spec.protocols.Drafter` for requests with and without a prediction.

    configured: who drafts for the others, None for nobody; shape: the most it is asked for (the scheduler allows
    predictions more).
    """

    def __init__(self, prediction: PredictionDrafter, configured: Drafter | None, shape: TreeShape) -> None:
        self.prediction, self.configured, self.shape = prediction, configured, shape
        self.name = prediction.name if configured is None else configured.name
        self.needs: FeatureRequest | None = None if configured is None else configured.needs
        self._predicted: set[str] = set()

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, by whoever it is routed to."""
        trees = self.prediction.propose(sequences, shapes)
        left = [i for i, tree in enumerate(trees) if not _sure(tree)]
        if self.configured is not None and self.shape.levels and left:
            limited = [self.shape.limited(shapes[i].levels) for i in left]
            for i, tree in zip(left, self.configured.propose([sequences[i] for i in left], limited), strict=True):
                if len(tree) > 1 or len(trees[i]) == 1:
                    trees[i] = tree
        names = zip(sequences, trees, strict=True)
        self._predicted.update(sequence.id for sequence, tree in names if tree.drafter == self.prediction.name)
        return trees

    def extend(self, sequence: SequenceState) -> None:
        """Both may read on."""
        self.prediction.extend(sequence)
        if self.configured is not None:
            self.configured.extend(sequence)

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Features are for the configured drafter, whoever drafts: it stays up to date."""
        reader = reader_of(self.configured)
        if reader is not None:
            reader.observe(sequence, features)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """The path is that of the tree that was taken; to the other one all but the root came from elsewhere."""
        rested = [0, *(-1 for _ in path[1:])]
        predicted = sequence.id in self._predicted
        self._predicted.discard(sequence.id)
        self.prediction.committed(sequence, path if predicted else rested)
        if self.configured is not None:
            self.configured.committed(sequence, rested if predicted else path)

    def finished(self, sequence: SequenceState) -> None:
        """Both forget it."""
        self._predicted.discard(sequence.id)
        self.prediction.finished(sequence)
        if self.configured is not None:
            self.configured.finished(sequence)


def configured(drafter: Drafter | None) -> Drafter | None:
    """Who drafts for requests without a prediction."""
    return drafter.configured if isinstance(drafter, RoutedDrafter) else drafter


def _sure(tree: DraftTree) -> bool:
    """Whether the likeliest of the drafted tokens is likely enough; they come likeliest first."""
    return len(tree.chances) > 1 and tree.chances[1] >= SURE_ENOUGH
