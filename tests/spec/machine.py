"""A machine whose costs are known, on which a budget plans the steps of a text: no time passes but what is counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import Member
from foresay.spec.budget.plan import Plan
from foresay.spec.protocols import FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence, VerifyResult
from foresay.spec.trace import StepTrace
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.test_combined import sequence


@dataclass(frozen=True)
class Prices:
    """Seconds by rows of a step, and of a draft."""

    steps: Sequence[tuple[int, float]]
    draft: DraftCost

    def model(self) -> CostModel:
        """What a start would measure."""
        rows, seconds = zip(*self.steps, strict=True)
        return CostModel(rows, seconds)

    def wrong(self, dice: random.Random) -> Prices:
        """What it measures while something else keeps the machine busy: each cost up to three times off."""
        off = [3 ** dice.uniform(-1, 1) for _ in range(len(self.steps) + 4)]
        draft = (self.draft.start, self.draft.level, self.draft.token, self.draft.deciding)
        return Prices(
            [(rows, spent * by) for (rows, spent), by in zip(self.steps, off, strict=False)],
            DraftCost(*(part * by for part, by in zip(draft, off[-4:], strict=True))),
        )


@dataclass
class Guesser:
    """Drafts chains, and trees of one branch that grow by their price; each token is right with the same chance, and it
    says so."""

    chance: float
    name: str = "model"
    needs: FeatureRequest | None = None

    def chain_chances(self, sequence: SequenceState, levels: int) -> Sequence[float]:
        return [self.chance**depth for depth in range(1, levels + 1)]

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        return [self._tree(shape) for shape in shapes]

    def _tree(self, shape: TreeShape) -> DraftTree:
        if shape.price is None:
            return DraftTree.chain(
                [1] * (1 + shape.levels), self.name, tuple(self.chance**d for d in range(1 + shape.levels))
            )
        levels = 1
        while levels < shape.levels and shape.price.bar(self.chance).reached([self.chance**levels]):
            levels += 1
        # Beside each first choice a second one, which comes half of the time when that does not.
        second, tokens, parents, chances = (1 - self.chance) / 2, [1], [-1], [1.0]
        for depth in range(levels):
            above = 2 * depth - 1 if depth else 0
            tokens += [1, 2]
            parents += [above, above]
            chances += [self.chance ** (depth + 1), self.chance**depth * second]
        nodes = shape.price.keeps(chances[1:])
        kept = sorted(sorted(range(1, len(tokens)), key=lambda node: (-chances[node], node))[:nodes])
        number = {node: place for place, node in enumerate([0, *kept])}
        tree = DraftTree.build(
            [1] + [tokens[node] for node in kept],
            [-1] + [number[parents[node]] for node in kept],
            self.name,
            (1.0, *(chances[node] for node in kept)),
        )
        return DraftTree(**{name: getattr(tree, name) for name in tree.__slots__} | {"grown": levels})

    def extend(self, sequence: SequenceState) -> None: ...

    def committed(self, sequence: SequenceState, path: list[int]) -> None: ...

    def finished(self, sequence: SequenceState) -> None: ...


@dataclass
class Machine:
    """right: how often the model is. measured: what the start took for its prices. took: seconds and tokens of each
    step; chosen: who drafted, and how many levels."""

    prices: Prices
    right: float
    measured: Prices
    seed: int = 0
    noise: float = 0.05
    choosing: float = 0.0
    took: list[tuple[float, int]] = field(default_factory=list)
    chosen: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.cost, self.true = self.measured.model(), self.prices.model()
        self.guesser = Guesser(self.right)
        self.budget = Budget([Member.model(self.guesser, self.measured.draft)], self.cost)
        self.one = sequence()
        self.one.limit = 10**9

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """Plan one, count what it takes, and let the budget learn."""
        (plan,) = self.budget.plan([self.one])
        tree = self.draft(plan)
        levels, rows = (tree.levels, len(tree)) if len(tree) > 1 else (0, 1)
        grown = bool(tree.grown)
        drafting = self.prices.draft.seconds(levels, max(0, rows - 1 - levels), grown) if levels else 0.0
        accepted = self.came(tree)
        forward = self.true.seconds(rows)
        seconds = {"propose": self.noisy(drafting), "forward": self.noisy(forward)}
        self.took.append((drafting + forward + self.choosing * self.budget._looks.now, 1 + accepted))
        self.chosen.append((self.budget.choice + (" tree" if grown else ""), levels))
        context = len(self.one.tokens)
        self.one.tokens += [1] * (1 + accepted)
        self.cost.saw(rows, 1, 0, rows - 1, seconds)
        trace = StepTrace(
            number=context, rows=rows, sequences=1, prefill_rows=0, drafted=rows - 1, accepted=accepted, emitted=1,
            seconds=seconds | {"plan": self.choosing * self.budget._looks.now},
        )  # fmt: skip
        scheduled = ScheduledSequence(self.one, 0, plan.shape, plan=plan)
        result = VerifyResult(scheduled, tree, emitted=[1] * (1 + accepted), accepted=accepted)
        self.budget.stepped(trace, [result])
        del self.one.tokens[:-2]

    def draft(self, plan: Plan) -> DraftTree:
        if not plan.shares:
            return DraftTree.chain([1])
        return self.guesser.propose([self.one], [plan.shares[0].shape])[0]

    def came(self, tree: DraftTree) -> int:
        """How deep it was right."""
        node, depth = 0, 0
        while True:
            below = {
                t: n
                for n, (t, p) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))
                if p == node
            }
            roll = self.dice.random()
            token = 1 if roll < self.right else 2 if roll < (1 + self.right) / 2 else 3
            if token not in below:
                return depth
            node, depth = below[token], depth + 1

    def noisy(self, seconds: float) -> float:
        return seconds * self.dice.lognormvariate(0, self.noise)

    def pace(self, begin: int, end: int) -> float:
        """Tokens in a second of these steps."""
        seconds, tokens = zip(*self.took[begin:end], strict=True)
        return sum(tokens) / sum(seconds)
