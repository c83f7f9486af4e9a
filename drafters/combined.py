"""Several drafters as one: each sequence's tree comes from whom its shape names, and all are told what was committed.

::

    shape      suffix: 3 found nodes, draft_model: 4 levels       from the budget (:mod:`spec.budget.mixed`)
    propose    the found nodes as they are, the model's chain     merged into one tree
    committed  its own path, in its own numbers, to whoever was asked; to the others, that others were
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from drafters.routed import configured
from spec.budget.budget import Budget
from spec.budget.merge import Merged, likeliest, merge, straightened
from spec.budget.mixed import shares_of, to_draft
from spec.features import Features, reader_of
from spec.protocols import Drafter, FeatureRequest
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape


class CombinedDrafter:
    """Implements :class:`spec.protocols.Drafter` for the members of a budget.

    A shape that names nobody is drafted by the first member.
    """

    name = "combined"

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.members: dict[str, Drafter] = {name: member.drafter for name, member in budget.members.items()}
        self.needs: FeatureRequest | None = united([member.needs for member in self.members.values()])
        self._asked: dict[str, dict[str, list[int]]] = {}

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        """A tree for each, of all who are named in its shape."""
        trees: list[list[DraftTree]] = [[] for _ in sequences]
        models: dict[str, list[tuple[int, TreeShape]]] = {}
        for index, shape in enumerate(shapes):
            for share in shares_of(shape):
                if share.tree is not None:
                    trees[index].append(share.tree)
                else:
                    models.setdefault(share.drafter, []).append((index, share.shape))
            if not shares_of(shape):
                models.setdefault(next(iter(self.members)), []).append((index, shape))
        for name, asked in models.items():
            drafted = self.members[name].propose([sequences[i] for i, _ in asked], [shape for _, shape in asked])
            for (index, _), tree in zip(asked, drafted, strict=True):
                trees[index].append(tree)
        return [self._merged(*parts) for parts in zip(sequences, trees, shapes, strict=True)]

    def _merged(self, sequence: Sequence, trees: list[DraftTree], shape: TreeShape) -> DraftTree:
        if len(trees) == 1 and trees[0].is_chain and len(trees[0]) <= shape.nodes and shares_of(shape):
            return self._chain(sequence, trees[0], shape)
        merged = merge(trees, most=shape.nodes)
        growing = any(share.shape.price is not None for share in shares_of(shape)) or not all(
            tree.is_chain for tree in trees
        )
        if self._budget.pinned is None and growing:
            merged = self._cut(sequence, merged, shape)
        self._asked[sequence.id] = _numbers(trees, merged)
        return merged.tree

    def _chain(self, sequence: Sequence, tree: DraftTree, shape: TreeShape) -> DraftTree:
        """The same of a chain that nobody else proposed anything beside."""
        (share,) = shares_of(shape)
        grown = self._budget.pinned is None and share.tree is None and share.shape.price is not None
        if grown and len(tree.chances) == len(tree):
            worth, _ = self._budget.worth(sequence, tree.chances[1:], tree.chances[1:])
            if worth + 1 < len(tree):
                tree = replace(merge([tree], most=worth + 1).tree, parts=(tree,))
        self._asked[sequence.id] = {tree.drafter: list(range(len(tree)))}
        return tree

    def _cut(self, sequence: Sequence, merged: Merged, shape: TreeShape) -> Merged:
        """Without the nodes that are not worth their rows, as their drafter sees their chances now."""
        tree = merged.tree
        if not to_draft(shape) or len(tree.chances) != len(tree):
            return merged
        found = any(share.tree is not None for share in shares_of(shape))
        path = [] if found else likeliest(tree)
        along = None if found else [tree.chances[node] for node in path]
        worth, straight = self._budget.worth(sequence, tree.chances[1:], along)
        if worth + 1 >= len(tree):
            return merged
        cut = straightened(tree, path[:worth]) if straight else merge([tree], most=worth + 1)
        places = cut.numbers[0]
        kept = replace(cut.tree, parts=tree.parts or (tree,))
        return Merged(kept, [[places[node] if node >= 0 else -1 for node in own] for own in merged.numbers])

    def extend(self, sequence: Sequence) -> None:
        """To all but those at rest: they catch up when they are asked."""
        for name, member in self.members.items():
            if not self._budget.resting(name):
                member.extend(sequence)

    def observe(self, sequence: Sequence, features: Features) -> None:
        """To all who read features, at rest or not: these do not come again."""
        for member in self.members.values():
            reader = reader_of(member)
            if reader is not None:
                reader.observe(sequence, features)

    def committed(self, sequence: Sequence, path: list[int]) -> None:
        """To each, the path through what it proposed."""
        asked = self._asked.pop(sequence.id, {})
        for name, member in self.members.items():
            places = asked.get(name)
            if places is None:
                member.committed(sequence, [0, *(-1 for _ in path[1:])])
            else:
                member.committed(sequence, _own(path, places))

    def finished(self, sequence: Sequence) -> None:
        """To all."""
        self._asked.pop(sequence.id, None)
        for member in self.members.values():
            member.finished(sequence)


def members_of(drafter: Drafter | None) -> dict[str, Drafter]:
    """Those that an engine's drafter consists of, by name, the prediction aside where one has one shape."""
    if isinstance(drafter, CombinedDrafter):
        return drafter.members
    one = configured(drafter)
    return {} if one is None else {one.name: one}


def united(needs: Many[FeatureRequest | None]) -> FeatureRequest | None:
    """What all of them need together."""
    asked = [request for request in needs if request is not None]
    layers = sorted({layer for request in asked for layer in request.layers})
    return FeatureRequest(any(request.final for request in asked), tuple(layers)) if asked else None


def _numbers(trees: Many[DraftTree], merged: Merged) -> dict[str, list[int]]:
    """For whoever proposed a tree: its own number of each node of the merged one, -1 for those of others."""
    numbers: dict[str, list[int]] = {}
    for tree, places in zip(trees, merged.numbers, strict=True):
        own = numbers[tree.drafter] = [-1] * len(merged.tree)
        for node, place in enumerate(places):
            if place >= 0:
                own[place] = node
    return numbers


def _own(path: Many[int], places: Many[int]) -> list[int]:
    """A path in a drafter's own numbers: -1 from the first node on that is none of its."""
    own: list[int] = []
    for node in path:
        known = places[node] if node >= 0 and (not own or own[-1] >= 0) else -1
        own.append(known)
    return own
