"""What one sequence's tree is asked of: drafters by name, how much of each, and why.

The plan carries it in the place of a shape, to whoever routes it (:mod:`drafters.combined`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import zip_longest

from spec.budget.ways import Taken
from spec.names import NONE, together
from spec.trace import Weighed
from spec.tree import MAX_NODES, DraftTree, TreeShape


@dataclass(frozen=True, slots=True)
class Share:
    """What one drafter is asked for. tree: what it proposed already, where looking cost nothing."""

    drafter: str
    shape: TreeShape
    tree: DraftTree | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """Why a step drafts what it does, all its sequences together. ways: the choice first, then what it was preferred
    to. looked: who found nodes. probe: it is asked to be seen, not because it is the best."""

    ways: tuple[Taken, ...]
    looked: tuple[str, ...]
    probe: bool = False

    @property
    def weighed(self) -> list[Weighed]:
        """The ways in numbers, for people."""
        return [Weighed(self._name(way), way.nodes, way.tokens, 1000 * way.seconds) for way in self.ways]

    @property
    def choice(self) -> str:
        """Who drafts, such as ``suffix+draft_model``; ``none`` for nobody."""
        return self._name(self.ways[0])

    def _name(self, way: Taken) -> str:
        model, found = way.kind
        return together((*self.looked, model) if found else (model,)) or NONE


@dataclass(frozen=True, slots=True)
class Mixed(TreeShape):
    """A shape that says who drafts it, and why."""

    shares: tuple[Share, ...] = ()
    why: Why | None = None

    @classmethod
    def sharing(cls, shares: Many[Share], why: Why | None = None) -> Mixed:
        """The shape that has room for all of them, as far as a tree may have nodes."""
        if len(shares) == 1:
            return cls(shares[0].shape.widths, shares=tuple(shares), why=why)
        widths, left = [], MAX_NODES - 1
        for column in zip_longest(*(share.shape.widths for share in shares), fillvalue=0):
            width = min(sum(column), left)
            if width:
                widths.append(width)
            left -= width
        return cls(tuple(widths), shares=tuple(shares), why=why)

    @property
    def likely_levels(self) -> int:
        """Levels that are expected to be drafted."""
        return max((share.shape.likely_levels for share in self.shares), default=0)

    def limited(self, levels: int) -> TreeShape:
        """The shape cut to at most ``levels`` levels."""
        if levels >= self.levels:
            return self
        shares = [replace(share, shape=share.shape.limited(levels)) for share in self.shares]
        return Mixed.sharing([share for share in shares if share.shape.levels], self.why)


def shares_of(shape: TreeShape | None) -> tuple[Share, ...]:
    """Who drafts a shape; empty for one that does not say."""
    return shape.shares if isinstance(shape, Mixed) else ()


def to_draft(shape: TreeShape | None) -> list[Share]:
    """The shares that models are still asked for: what was looked up is there already."""
    return [share for share in shares_of(shape) if share.tree is None]


def shape_of(tree: DraftTree) -> TreeShape:
    """The shape that a tree has."""
    if tree.is_chain:
        return TreeShape.chain(len(tree) - 1)
    counts = Counter(tree.depths.tolist())
    return TreeShape(tuple(counts[depth] for depth in range(1, max(counts) + 1)))


def drafted_by(name: str, tree: DraftTree) -> tuple[int, int]:
    """How many levels and nodes a drafter proposed, of what became this tree."""
    part = next((part for part in tree.parts or (tree,) if part.drafter == name), None)
    if part is None:
        return 0, 0
    return len(part) - 1 if part.is_chain else max(part.depths.tolist()), len(part) - 1


def branches(tree: DraftTree | None, shape: TreeShape | None) -> bool:
    """Whether a model's draft became a tree that is no chain, which is expected to take more to verify."""
    return tree is not None and not tree.is_chain and bool(to_draft(shape))
