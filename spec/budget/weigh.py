"""The best draft plan of a step, by the tokens expected for the time it takes.

A step of S sequences emits S tokens plus the accepted ones of its drafted nodes; each adds its chance. Time is worth
the recent pace of tokens: where they come in bursts (a text that is copied with edits), a step between two bursts
should be short, rather than buy at a high price what the next one brings for nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple

from foresay.spec.budget.cost import DraftCost
from foresay.spec.price import Price, worth
from foresay.spec.tree import TreeShape

#: The sizes of trees that are weighed, relative to the usual, and their share of its tokens: the likeliest come first.
_SIZES = ((1.0, 1.0), (0.5, 0.75), (0.25, 0.44))


class ExpectedTree(NamedTuple):
    """The expectation of a model's tree: accepted nodes, verified ones, and levels drafted."""

    tokens: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0


NO_TREE = ExpectedTree()


class Estimate(NamedTuple):
    """What could be drafted for one sequence: found nodes' chances, likeliest first; the tree and the chain of each
    model, of a chain each node's chance. remaining: the share of a tree's tokens that remains next to found nodes."""

    found: Sequence[float] = ()
    trees: Mapping[str, ExpectedTree] = {}
    remaining: float = 1.0
    chains: Mapping[str, Sequence[float]] = {}


class CandidatePlan(NamedTuple):
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
    """seconds: of a step by its rows; their number limits a plan's rows. drafts: of each model, and unread: how many
    tokens it catches up with in a draft. pace: tokens a second, the worth of time. checks: the models that check found
    nodes and continue from them."""

    seconds: Sequence[float]
    drafts: Mapping[str, DraftCost]
    pace: float
    unread: Mapping[str, float] = {}
    checks: Collection[str] = ()

    def way(
        self,
        found: Sequence[Sequence[float]],
        model: str = "",
        trees: Sequence[ExpectedTree] = (),
        chain: bool = False,
        first: Sequence[Sequence[float]] = (),
    ) -> CandidatePlan:
        """A plan of this size. first: found nodes that the model checks."""
        drafted = sum([tree.nodes for tree in trees])
        nodes = min(sum(map(len, found)) + round(drafted), len(self.seconds) - 1 - len(found))
        spent = self.seconds[len(found) + nodes]
        if model:
            levels = max([tree.levels for tree in trees])
            spent += self._drafting(model, levels, drafted, not chain, first)
        tokens = len(found) + sum(map(sum, found)) + sum([tree.tokens for tree in trees])
        counts = tuple(map(len, found))
        worth, checked = tokens - self.pace * spent, tuple(map(len, first))
        return CandidatePlan(model, counts, tuple(trees), tokens, spent, nodes, worth, chain, checked)

    def _drafting(
        self, model: str, levels: float, nodes: float, grown: bool, first: Sequence[Sequence[float]] = ()
    ) -> float:
        """Seconds of a draft. Each correct one of the found nodes that are checked saves a pass: as many as in the
        sequence with the fewest."""
        passes = max(1.0, levels - min(map(sum, first), default=0.0))
        more = max(0.0, nodes - levels + sum(map(len, first))) + self.unread.get(model, 0.0)
        return self.drafts[model].seconds(passes, more, grown)

    def price(self, way: CandidatePlan, index: int, pace: float, nodes: int) -> Price:
        """The price of a sequence's tree in this plan, with up to so many nodes, but no more than its part of all rows:
        one pass drafts a level for all sequences."""
        tree, nodes = way.trees[index], min(nodes, len(self.seconds) // len(way.found))
        levels, rows = max(1, round(tree.levels)), len(way.found) + way.nodes - round(tree.nodes)
        cost = self.drafts[way.model]
        level = (cost.level + cost.deciding) / sum([each.levels > 0 for each in way.trees])
        first = min(max(1, rows), len(self.seconds) - 1)
        return Price.of(pace, level, self.seconds[first : first + nodes], levels, round(tree.nodes))

    def found(self, estimates: Sequence[Estimate]) -> list[Sequence[float]]:
        """The likeliest of all found nodes that are worth their rows."""
        rows, every = len(estimates), [(c, i) for i, estimate in enumerate(estimates) for c in estimate.found]
        if not every:
            return [()] * rows
        every.sort(reverse=True)
        prices = [self.pace * (spent - self.seconds[rows]) for spent in self.seconds[rows:]]
        taken = Counter(index for _, index in every[: worth([chance for chance, _ in every], prices)])
        return [estimate.found[: taken[index]] for index, estimate in enumerate(estimates)]

    def tree(self, model: str, estimates: Sequence[Estimate], found: Sequence[Sequence[float]]) -> CandidatePlan:
        """Its trees as usual or smaller, next to what was found."""
        ways = []
        for nodes, tokens in _SIZES[: 3 if len(estimates) > 1 or any(found) else 1]:
            pairs = zip(estimates, found, strict=True)
            shares = [(one.trees.get(model, NO_TREE), tokens * (one.remaining if hits else 1.0)) for one, hits in pairs]
            trees = [
                ExpectedTree(share * t.tokens, nodes * t.nodes, max(nodes * t.levels, min(1.0, t.levels)))
                for t, share in shares
            ]
            ways.append(self.way(found, model, trees))
        return max(ways, key=attrgetter("worth"))

    def chain(
        self, model: str, chains: Sequence[Sequence[float]], first: Sequence[Sequence[float]] = ()
    ) -> CandidatePlan:
        """Its chains of the length that is worth most, the same for all: a level is drafted for all at once. first:
        found nodes that it checks."""
        seconds, rows = self.seconds, len(chains)
        best, length = -math.inf, 1
        most = sum(map(sum, chains))
        tokens, nodes = 0.0, 0
        for levels, level in enumerate(zip_longest(*chains), start=1):
            for chance in level:
                if chance is not None:
                    tokens, nodes = tokens + chance, nodes + 1
            if rows + nodes >= len(seconds):
                break
            checked = [found[: levels - 1] for found in first]
            price = self.pace * (seconds[rows + nodes] + self._drafting(model, levels, nodes, False, checked))
            if tokens - price > best:
                best, length = tokens - price, levels
            elif most - price <= best:  # all that is left could not make up for it
                break
        trees = [ExpectedTree(sum(chain[:length]), *[min(length, len(chain))] * 2) for chain in chains]
        return self.way([()] * rows, model, trees, True, [found[: length - 1] for found in first])


def weigh(estimates: Sequence[Estimate], costs: StepCosts) -> list[CandidatePlan]:
    """The best plan of each kind, the choice first; no draft is always among them."""
    nothing, found = [()] * len(estimates), costs.found(estimates)
    ways = [costs.way(nothing), *([costs.way(found)] if any(found) else [])]
    for model in costs.drafts:
        if not any(model in estimate.trees for estimate in estimates):
            continue
        ways += [costs.tree(model, estimates, each) for each in (nothing, found)[: 1 + any(map(bool, found))]]
        chains = [estimate.chains.get(model, ()) for estimate in estimates]
        if any(chains):
            ways.append(costs.chain(model, chains))
            if model in costs.checks and any(found):
                ways.append(costs.chain(model, chains, [estimate.found for estimate in estimates]))
    return sorted(ways, key=attrgetter("worth"), reverse=True)


def weigh_pinned(estimates: Sequence[Estimate], costs: StepCosts, shape: TreeShape) -> list[CandidatePlan]:
    """The same with a given shape: only the drafter is chosen, and one that can propose anything always drafts."""
    nothing, nodes = [()] * len(estimates), shape.nodes - 1
    ways = [costs.way(nothing), costs.way([estimate.found[:nodes] for estimate in estimates])]
    for model in costs.drafts:
        trees = []
        for estimate in estimates:
            chain = estimate.chains.get(model, ()) if shape.is_chain else ()
            tokens = sum(chain[:nodes]) if chain else estimate.trees.get(model, NO_TREE).tokens
            trees.append(ExpectedTree(tokens, nodes, shape.levels) if model in estimate.trees else NO_TREE)
        ways.append(costs.way(nothing, model, trees, shape.is_chain))
    return sorted(ways, key=lambda way: (way.nodes > 0, way.tokens / way.seconds), reverse=True)
