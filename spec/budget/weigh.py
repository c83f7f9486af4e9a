"""The best draft plan of a step, by the tokens expected for the time it takes.

A step of S sequences emits S tokens plus the accepted ones of its drafted nodes; each adds its chance. Time is worth
the recent pace of tokens: where they come in bursts (a text that is copied with edits), a step between two bursts
should be short, rather than buy at a high price what the next one brings for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import attrgetter
from typing import NamedTuple

from foresay.spec.budget.cost import DraftCost
from foresay.spec.price import Price, worth

Chances = Sequence[float]
#: The sizes of trees that are weighed, relative to the usual, and their share of its tokens: the likeliest come first.
_SIZES = ((1.0, 1.0), (0.5, 0.75), (0.25, 0.44))


class ExpectedTree(NamedTuple):
    """The expectation of a model's tree: accepted nodes, verified ones, and levels drafted."""

    tokens: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0


NO_TREE = ExpectedTree()
#: Of a sequence what each model may draft: a tree, and of a chain each node's chance.
Expected = Mapping[str, tuple[ExpectedTree, Chances]]


class DraftOption(NamedTuple):
    """One option of what to draft. model: "" for found nodes only. found: how many found nodes for each sequence;
    trees: the model's expected ones. tokens, seconds, nodes: of the step. worth: tokens beyond those that the same time
    brings at the pace. chain: whether the model drafts chains without checks between levels, rather than trees that
    grow. first: how many found nodes of each sequence the model checks first and continues from, or empty."""

    model: str
    found: tuple[int, ...]
    trees: tuple[ExpectedTree, ...]
    tokens: float
    seconds: float
    nodes: int
    worth: float
    chain: bool = False
    first: tuple[int, ...] = ()

    @property
    def kind(self) -> tuple[str, bool]:
        """Which drafters take part: the model, and whether any lookup does."""
        return self.model, any(self.found)


class StepCosts(NamedTuple):
    """seconds: of a step by its rows; their number limits a plan's rows. drafts: of each model. pace: tokens a second,
    the worth of time. checks: the models that check found nodes and continue from them."""

    seconds: Sequence[float] = ()
    drafts: Mapping[str, DraftCost] = {}
    pace: float = 0.0
    checks: Collection[str] = ()

    def way(
        self,
        found: Sequence[Chances],
        model: str = "",
        trees: Sequence[ExpectedTree] = (),
        chain: bool = False,
        first: Sequence[Chances] = (),
    ) -> DraftOption:
        """A plan of this size. found, first: of each sequence the found nodes that are verified, or checked."""
        drafted, levels = sum([tree.nodes for tree in trees]), max([tree.levels for tree in trees], default=0.0)
        nodes = min(sum(map(len, found)) + round(drafted), len(self.seconds) - 1 - len(found))
        spent = self.seconds[len(found) + nodes]
        if model:
            spent += self._drafting(model, levels, drafted, not chain, first)
        tokens = len(found) + sum(map(sum, found)) + sum([tree.tokens for tree in trees])
        counts, checked = tuple(map(len, found)), tuple(map(len, first))
        worth = tokens - self.pace * spent
        return DraftOption(model, counts, tuple(trees), tokens, spent, nodes, worth, chain, checked)

    def _drafting(self, model: str, levels: float, nodes: float, grown: bool, first: Sequence[Chances] = ()) -> float:
        """Seconds of a draft. Each correct one of the found nodes that are checked saves a pass: as many as in the
        sequence with the fewest."""
        passes = max(1.0, levels - min(map(sum, first), default=0.0))
        return self.drafts[model].seconds(passes, max(0.0, nodes - levels + sum(map(len, first))), grown)

    def price(self, way: DraftOption, index: int, pace: float, nodes: int) -> Price:
        """The price of a sequence's tree in this plan, with up to so many nodes, but no more than its part of all rows:
        one pass drafts a level for all sequences. pace: tokens a second."""
        tree, nodes = way.trees[index], min(nodes, len(self.seconds) // len(way.found))
        cost, first = self.drafts[way.model], max(1, len(way.found) + way.nodes - round(tree.nodes))
        level = (cost.level + cost.deciding) / sum([each.levels > 0 for each in way.trees])
        rows = self.seconds[min(first, len(self.seconds) - 1) :][:nodes]
        prices = [pace * (spent - rows[0]) for spent in rows]
        return Price(pace * level, prices, max(1, round(tree.levels)), round(tree.nodes))

    def kept(self, found: Sequence[Chances]) -> list[Chances]:
        """The likeliest of all found nodes that are worth their rows. found: of each sequence, likeliest first."""
        rows = len(found)
        every = sorted([(chance, index) for index, chances in enumerate(found) for chance in chances], reverse=True)
        prices = [self.pace * (spent - self.seconds[rows]) for spent in self.seconds[rows : rows + 1 + len(every)]]
        taken = Counter(index for _, index in every[: worth([chance for chance, _ in every], prices)])
        return [chances[: taken[index]] for index, chances in enumerate(found)]

    def tree(self, model: str, texts: Sequence[Expected], found: Sequence[Chances], left: Chances) -> DraftOption:
        """Its trees as usual, or smaller next to others and to what was found. left: the share of
        a tree's tokens that remains next to found nodes."""
        usual, ways = [one.get(model, (NO_TREE,))[0] for one in texts], []
        shares = [share if hits else 1.0 for share, hits in zip(left, found, strict=True)]
        for nodes, tokens in _SIZES[: 3 if len(texts) > 1 or any(found) else 1]:
            trees = [
                ExpectedTree(share * tokens * t.tokens, nodes * t.nodes, max(nodes * t.levels, min(1.0, t.levels)))
                for t, share in zip(usual, shares, strict=True)
            ]
            ways.append(self.way(found, model, trees))
        return max(ways, key=attrgetter("worth"))

    def chain(self, model: str, texts: Sequence[Expected], found: Sequence[Chances] = ()) -> Iterator[DraftOption]:
        """Its chains of the length that is worth most, the same for all: a level is drafted for all at once. found:
        nodes that it checks first."""
        chains, rows = [one.get(model, (NO_TREE, ()))[1] for one in texts], len(texts)
        levels = [[chance for chance in level if chance is not None] for level in zip_longest(*chains)]
        if not levels:
            return
        nodes = [count for count in accumulate(map(len, levels)) if rows + count < len(self.seconds)] or [rows]
        worths = [
            tokens
            - self.pace * self.seconds[rows + count]
            - self.pace * self._drafting(model, deep, count, False, [one[: deep - 1] for one in found])
            for deep, (count, tokens) in enumerate(zip(nodes, accumulate(map(sum, levels)), strict=False), start=1)
        ]
        length = 1 + worths.index(max(worths))
        trees = [ExpectedTree(sum(chain[:length]), *[min(length, len(chain))] * 2) for chain in chains]
        yield self.way([()] * rows, model, trees, True, [one[: length - 1] for one in found])

    def ways(
        self, texts: Sequence[Expected], found: Sequence[Chances] = (), left: Chances = ()
    ) -> Iterator[DraftOption]:
        """The plans without anything found: none, and each model's tree and chain; or those with what was found: alone,
        next to each model's tree, and checked by its chain."""
        hits = self.kept(found) if found else [()] * len(texts)
        if any(hits) or not found:
            yield self.way(hits)
        for model in self.drafts:
            if any(model in one for one in texts) and (any(hits) or not found):
                yield self.tree(model, texts, hits, left or [1.0] * len(texts))
            if not found or model in self.checks:
                yield from self.chain(model, texts, found)
