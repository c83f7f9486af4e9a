"""Several drafters as one: each sequence's tree comes from the drafters in its plan, and all are notified of commits.

::

    plan       suffix: 3 found nodes, draft_model: 4 levels       from the budget (:mod:`foresay.spec.budget.plan`)
    draft      the found nodes as they are, the model's tree      cut to what is worth its rows, merged into one tree
    committed  drafters that were called get the path through their own trees; the others, that others drafted

With one drafter and one shape: the request's own prediction drafts wherever it can, else the configured drafter::

    propose    predicted, certain ──> prediction          committed    the one that proposed gets its path,
               predicted, unsure  ──> configured ──empty──> prediction     the other that it was not called
               no prediction      ──> configured
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.drafters.prediction import PredictionDrafter
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.plan import Plan, Share
from foresay.spec.price import worth
from foresay.spec.protocols import Drafter, FeatureRequest, Features, or_roots, reader_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape, merge
from foresay.spec.wall import Wall

#: If a prediction's next token is less likely than this to be accepted, the configured drafter drafts in the step.
SURE_ENOUGH = 0.5


class RoutedDrafter:
    """Implements :class:`foresay.spec.protocols.Drafter` for requests with and without a prediction.

    configured: the drafter for other requests, or None; shape: the largest requested from it (the scheduler allows
    predictions more).
    """

    def __init__(self, prediction: PredictionDrafter, configured: Drafter | None, shape: TreeShape) -> None:
        self.prediction, self.configured, self.shape = prediction, configured, shape
        self.name = prediction.name if configured is None else configured.name
        self.needs: FeatureRequest | None = None if configured is None else configured.needs
        self._predicted: set[str] = set()
        self.wall = Wall()

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, from the drafter it is routed to."""
        trees = list(proposed(self.wall, self.prediction, sequences, shapes))
        left = [i for i, tree in enumerate(trees) if not _sure(tree)]
        if self.configured is not None and self.shape.levels and left:
            limited = [self.shape.limited(shapes[i].levels) for i in left]
            asked = proposed(self.wall, self.configured, [sequences[i] for i in left], limited)
            for i, tree in zip(left, asked, strict=True):
                if len(tree) > 1 or len(trees[i]) == 1:
                    trees[i] = tree
        names = zip(sequences, trees, strict=True)
        self._predicted.update(sequence.id for sequence, tree in names if tree.drafter == self.prediction.name)
        return trees

    def extend(self, sequence: SequenceState) -> None:
        """Passed to both."""
        self.wall.tell(self.prediction.name, self.prediction.extend, sequence)
        if self.configured is not None:
            self.wall.tell(self.name, self.configured.extend, sequence)

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Features go to the configured drafter, whichever drafts, so that it stays up to date."""
        reader = reader_of(self.configured)
        if reader is not None:
            self.wall.tell(self.name, reader.observe, sequence, features)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """The drafter whose tree was used gets the path; for the other one all nodes but the root came from
        elsewhere."""
        rested = [0, *(-1 for _ in path[1:])]
        predicted = sequence.id in self._predicted
        self._predicted.discard(sequence.id)
        self.wall.tell(self.prediction.name, self.prediction.committed, sequence, path if predicted else rested)
        if self.configured is not None:
            self.wall.tell(self.name, self.configured.committed, sequence, rested if predicted else path)

    def finished(self, sequence: SequenceState) -> None:
        """Passed to both."""
        self._predicted.discard(sequence.id)
        self.wall.tell(self.prediction.name, self.prediction.finished, sequence)
        if self.configured is not None:
            self.wall.tell(self.name, self.configured.finished, sequence)


def proposed(
    wall: Wall, drafter: Drafter, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]
) -> Sequence[DraftTree]:
    """What a drafter proposes, behind the wall: only roots if it fails."""
    found = wall.ask(drafter.name, drafter.propose, sequences, shapes)
    return or_roots([None] * len(sequences), sequences, drafter.name) if found is None else found


def configured(drafter: Drafter | None) -> Drafter | None:
    """The drafter for requests without a prediction."""
    return drafter.configured if isinstance(drafter, RoutedDrafter) else drafter


def _sure(tree: DraftTree) -> bool:
    """Whether the likeliest of the drafted tokens, which is the first, is likely enough."""
    return len(tree.chances) > 1 and tree.chances[1] >= SURE_ENOUGH


class CombinedDrafter:
    """Implements :class:`foresay.spec.step.DraftsByPlan` and :class:`foresay.spec.protocols.Drafter` for the members of
    a budget."""

    name = "combined"

    def __init__(self, budget: Budget) -> None:
        self._known, self.wall = budget.members, budget.wall
        self.members: dict[str, Drafter] = {name: member.drafter for name, member in budget.members.items()}
        self.needs: FeatureRequest | None = united([member.needs for member in self.members.values()])
        self._drafted: dict[str, list[DraftTree]] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """Drafts with the first member only: a shape does not name a drafter."""
        first = next(iter(self.members))
        return self.draft(sequences, [Plan((Share(first, shape),), shape=shape) for shape in shapes])

    def draft(self, sequences: Sequence[SequenceState], plans: Sequence[Plan]) -> list[DraftTree]:
        """A tree for each, from all drafters in its plan."""
        trees: list[list[DraftTree]] = [[] for _ in sequences]
        models: dict[str, list[tuple[int, TreeShape]]] = {}
        for index, plan in enumerate(plans):
            for share in plan.shares:
                if share.tree is not None:
                    trees[index].append(share.tree)
                else:
                    models.setdefault(share.drafter, []).append((index, share.shape))
                if share.first is not None:
                    self.wall.tell(share.drafter, self._known[share.drafter].check, sequences[index], share.first)
        for name, wanted in models.items():
            texts, shapes = [sequences[i] for i, _ in wanted], [shape for _, shape in wanted]
            drafted = proposed(self.wall, self.members[name], texts, shapes)
            for (index, _), tree in zip(wanted, drafted, strict=True):
                trees[index].append(tree)
        self._drafted |= {sequence.id: drafted for sequence, drafted in zip(sequences, trees, strict=True)}
        return [
            merge([_worth(tree, plan) for tree in parts], plan.shape.nodes)
            for parts, plan in zip(trees, plans, strict=True)
        ]

    def extend(self, sequence: SequenceState) -> None:
        """Passed to all but those that rest: they catch up when they draft again."""
        for name, member in self.members.items():
            if not self._known[name].resting:
                self.wall.tell(name, member.extend, sequence)

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Passed to all that read features, resting or not: features are not sent again."""
        for name, member in self.members.items():
            reader = reader_of(member)
            if reader is not None:
                self.wall.tell(name, reader.observe, sequence, features)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Each gets the path through its own proposal."""
        drafted = {tree.drafter: tree for tree in self._drafted.pop(sequence.id, ())}
        emitted, none = sequence.tokens[-len(path) :], [0] + [-1] * (len(path) - 1)
        for name, member in self.members.items():
            own = drafted[name].path_of(emitted) if name in drafted else none
            self.wall.tell(name, member.committed, sequence, own)

    def finished(self, sequence: SequenceState) -> None:
        """Passed to all."""
        self._drafted.pop(sequence.id, None)
        for name, member in self.members.items():
            self.wall.tell(name, member.finished, sequence)


def members_of(drafter: Drafter | None) -> dict[str, Drafter]:
    """The drafters that an engine's drafter consists of, by name, without the prediction where there is one shape."""
    if isinstance(drafter, CombinedDrafter):
        return drafter.members
    one = configured(drafter)
    return {} if one is None else {one.name: one}


def united(needs: Sequence[FeatureRequest | None]) -> FeatureRequest | None:
    """The union of all requests."""
    given = [request for request in needs if request is not None]
    layers = sorted({layer for request in given for layer in request.layers})
    final = [request.sampled for request in given if request.final]
    return FeatureRequest(bool(final), tuple(layers), bool(final) and all(final)) if given else None


def _worth(tree: DraftTree, plan: Plan) -> DraftTree:
    """What of a drafter's tree is worth its rows; one that grew by the price of its plan has no other nodes."""
    of_it = (share for share in plan.shares if share.drafter == tree.drafter and share.tree is None)
    price = next((share.shape.price for share in of_it), None)
    if price is None or tree.grown or len(tree) == 1 or len(tree.chances) != len(tree):
        return tree
    return merge([tree], 1 + max(1, worth(sorted(tree.chances[1:], reverse=True), price.rows)))
