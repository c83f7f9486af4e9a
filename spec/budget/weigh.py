"""The way of drafting that brings most tokens for the time it takes, of all that could be asked for in a step.

A step of S sequences emits S tokens and those of the drafted nodes that are accepted; each node adds its chance. So,
for one way of drafting, the likeliest nodes of all sequences are taken as long as the next one is worth its row. A node
is never likelier than its parent, so what is taken is a tree.

What time is worth is the pace at which tokens came lately. Where they come in bursts (a text that is copied with edits)
a step between two bursts should be short, rather than buy dearly what the next burst brings for nothing; taking the
best tokens per second of each step alone was up to 13 % slower there (docs/budget.md).

::

    found    nodes that looking up the text has brought already, with their chances
    trees    what a model would draft: known by what its trees promised lately, and how far that was kept
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter, itemgetter, mul
from typing import NamedTuple

from foresay.spec.price import worth
from foresay.spec.tree import MAX_NODES, TreeShape

#: Rounds in which a chance is found, at most, and what a round moves it by when it is close enough.
_ROUNDS, _CLOSE = 20, 1e-7


class ExpectedTree(NamedTuple):
    """What is expected of a model's tree: accepted nodes, verified ones, and levels drafted."""

    tokens: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0


NO_TREE = ExpectedTree()


class Estimate(NamedTuple):
    """What could be drafted for one sequence.

    found: the chances of nodes that were looked up, likeliest first. trees: of each model, by name, alone. beside: of
    their tokens, the share that comes although found nodes stand beside them. chains: of each model, the chances of a
    chain's nodes, empty where they are not known.
    """

    found: Sequence[float] = ()
    trees: Mapping[str, ExpectedTree] = {}
    beside: float = 1.0
    chains: Mapping[str, Sequence[float]] = {}

    def tree(self, model: str, beside: bool) -> ExpectedTree:
        """What a model brings; nothing if it is not to be asked."""
        expected = self.trees.get(model, NO_TREE)
        if beside and self.found:
            return ExpectedTree(expected.tokens * self.beside, expected.nodes, expected.levels)
        return expected

    def alone(self, model: str, shape: TreeShape) -> float:
        """The tokens that a model brings with this shape, as far as that is known."""
        chain = self.chains.get(model, ()) if shape.is_chain else ()
        return sum(chain[: shape.levels]) if chain else self.trees[model].tokens


class CandidatePlan(NamedTuple):
    """One way of drafting at its best size. model: "" for what was found alone. found: of each sequence, how many found
    nodes; trees: what is expected of the model's. tokens, seconds: expected of the step. nodes: drafted ones that are
    verified, of all sequences. worth: tokens beyond those that come in the same time at the pace. chain: whether the
    model drafts chains, without a stop, rather than trees that grow."""

    model: str
    found: tuple[int, ...]
    trees: tuple[ExpectedTree, ...]
    tokens: float
    seconds: float
    nodes: int
    worth: float
    chain: bool = False

    @property
    def kind(self) -> tuple[str, bool]:
        """Which drafters take part: the model, and whether anything found does."""
        return self.model, any(self.found)


#: Seconds of a draft by the model's name, levels and nodes, and whether it is a chain.
DraftSeconds = Callable[[str, float, float, bool], float]


def weigh(
    estimates: Sequence[Estimate], seconds: Sequence[float], drafting: DraftSeconds, pace: float
) -> list[CandidatePlan]:
    """The best of each way of drafting, the choice first, no draft always among them.

    seconds: of a step by its rows; no more rows than it knows are taken. pace: tokens in a second that time is worth.
    """
    looked = any(estimate.found for estimate in estimates)
    found = [estimate.found[: MAX_NODES - 1] for estimate in estimates]
    ways = [_way([()] * len(estimates), (), "", seconds, drafting, pace)]
    if looked:
        ways.append(_way(found, (), "", seconds, drafting, pace))
    for model in {name: None for estimate in estimates for name in estimate.trees}:
        for beside in (False, True)[: 1 + looked]:
            trees = [estimate.tree(model, beside) for estimate in estimates]
            ways.append(_way(found if beside else [()] * len(found), trees, model, seconds, drafting, pace))
        ways += _chains([estimate.chains.get(model, ()) for estimate in estimates], model, seconds, drafting, pace)
    kinds = {(way.kind, way.chain): way for way in reversed(ways)}
    return sorted(kinds.values(), key=attrgetter("worth"), reverse=True)


def weigh_pinned(
    estimates: Sequence[Estimate], seconds: Sequence[float], drafting: DraftSeconds, shape: TreeShape
) -> list[CandidatePlan]:
    """The same where the shape is given: only who drafts it is chosen, and somebody does who has anything to say."""
    nodes, levels = shape.nodes - 1, shape.levels
    pinned = [
        Estimate(
            estimate.found[:nodes],
            {name: ExpectedTree(estimate.alone(name, shape), nodes, levels) for name in estimate.trees},
        )
        for estimate in estimates
    ]

    def drafted(name: str, levels: float, nodes: float, _: bool) -> float:
        return drafting(name, levels, nodes, shape.is_chain)

    ways = [way for way in weigh(pinned, seconds, drafted, 0.0) if not all(way.kind)]
    return sorted(ways, key=lambda way: (way.nodes > 0, way.tokens / way.seconds), reverse=True)


def _way(
    found: Sequence[Sequence[float]],
    trees: Sequence[ExpectedTree],
    model: str,
    seconds: Sequence[float],
    drafting: DraftSeconds,
    pace: float,
) -> CandidatePlan:
    """The likeliest of all nodes, found and to be drafted, that are worth their rows; of the model's at least one."""
    pool = [(chance, index, False) for index, chances in enumerate(found) for chance in chances]
    pool += [(chance, index, True) for index, tree in enumerate(trees) for chance in falling(tree)]
    if len(found) + len(trees) > 1:
        pool.sort(key=itemgetter(0), reverse=True)
    rows = len(found)
    costs = [pace * (spent - seconds[rows]) for spent in seconds[rows : rows + len(pool) + 1]]
    count = worth([chance for chance, _, _ in pool], costs).nodes
    if model:
        count = max(count, 1 + next((place for place, (_, _, drafted) in enumerate(pool) if drafted), -1))
    count = min(count, len(seconds) - 1 - rows)
    taken = Counter((index, drafted) for _, index, drafted in pool[:count])
    asked = tuple(_first(tree, taken[index, True]) for index, tree in enumerate(trees))
    spent = seconds[rows + count]
    if model:
        spent += drafting(model, max(tree.levels for tree in asked), sum(tree.nodes for tree in asked), False)
    tokens = rows + sum(chance for chance, _, _ in pool[:count])
    counts = tuple(taken[index, False] for index in range(rows))
    return CandidatePlan(model, counts, asked, tokens, spent, count, tokens - pace * spent)


def _chains(
    chains: Sequence[Sequence[float]],
    model: str,
    seconds: Sequence[float],
    drafting: DraftSeconds,
    pace: float,
) -> list[CandidatePlan]:
    """Chains of the length that is worth most, the same for all sequences: a level is drafted for all of them at once.
    None for a model that does not say how often its chains come."""
    rows, sums, best = len(chains), [list(accumulate(chain, initial=0.0)) for chain in chains], list[CandidatePlan]()
    most = rows + sum(each[-1] for each in sums)
    for levels in range(1, max(map(len, chains)) + 1):
        trees = [(each[min(levels, len(each) - 1)], min(levels, len(each) - 1)) for each in sums]
        tokens, nodes = rows + sum(tokens for tokens, _ in trees), sum(nodes for _, nodes in trees)
        if rows + nodes >= len(seconds):
            break
        spent = seconds[rows + nodes] + drafting(model, levels, nodes, True)
        if best and most - pace * spent <= best[0].worth:  # all that is left could not make up for it
            break
        worth = tokens - pace * spent
        if not best or worth > best[0].worth:
            asked = tuple(ExpectedTree(tokens, nodes, nodes) for tokens, nodes in trees)
            best = [CandidatePlan(model, (0,) * rows, asked, tokens, spent, nodes, worth, True)]
    return best


@lru_cache(maxsize=64)
def falling(tree: ExpectedTree) -> list[float]:
    """The chances of a tree's nodes before they are known: each as much less likely than the one before, as on a chain
    whose nodes all are as likely below their parents."""
    nodes = round(tree.nodes) or int(tree.tokens > 0)
    return list(accumulate([_chance(tree.tokens, nodes)] * nodes, mul))


def _chance(tokens: float, nodes: int) -> float:
    """The chance ``a`` of which ``nodes`` powers, ``a + a**2 + ..``, add up to so many tokens; at most 1."""
    if tokens >= nodes * (1.0 - _CLOSE):
        return 1.0
    # Newton's method from above, where the sum, which is convex, is too large: it never falls below the root.
    chance: float = min(tokens, (tokens / nodes) ** (2 / (nodes + 1)))
    for _ in range(_ROUNDS):
        total = (1.0 - chance**nodes) / (1.0 - chance)  # of the powers from 0 on
        slope = (total - nodes * chance ** (nodes - 1)) / (1.0 - chance)
        step = (chance * total - tokens) / (total + chance * slope)
        chance -= step
        if step <= _CLOSE:
            break
    return chance


def _first(tree: ExpectedTree, nodes: int) -> ExpectedTree:
    """The likeliest nodes of a tree, which lie less deep."""
    whole = falling(tree)
    share = nodes / max(1, len(whole))
    return ExpectedTree(sum(whole[:nodes]), nodes, max(1.0, tree.levels * share)) if nodes else NO_TREE
