"""A machine whose costs are known, on which a budget plans the steps of a text: no time passes but what is counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import Member
from foresay.spec.price import worth
from foresay.spec.protocols import FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence, VerifyResult
from foresay.spec.trace import StepTrace
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.test_combined import sequence

#: What comes next is token 1 as often as the model is right; half of the other times it is 2.
FIRST, SECOND, OTHER = 1, 2, 3


@dataclass(frozen=True)
class Prices:
    """Seconds by rows of a step, and of a draft."""

    steps: Sequence[tuple[int, float]]
    draft: DraftCost

    def curve(self) -> CostModel:
        """What a start measures."""
        rows, seconds = zip(*self.steps, strict=True)
        return CostModel(rows, seconds)

    def wrong(self, dice: random.Random) -> Prices:
        """What it measures while something else keeps the machine busy: each cost up to three times off."""
        steps = [(rows, seconds * 3 ** dice.uniform(-1, 1)) for rows, seconds in self.steps]
        return Prices(steps, DraftCost(*(part * 3 ** dice.uniform(-1, 1) for part in astuple(self.draft))))


class Guesser:
    """Drafts chains of first choices, and trees that grow by their price, with a second choice next to each first one.
    It knows how often it is right."""

    name = "model"
    needs: FeatureRequest | None = None

    def __init__(self, right: float) -> None:
        self.right = right

    def chain_chances(self, sequence: SequenceState, levels: int) -> Sequence[float]:
        return [self.right**depth for depth in range(1, levels + 1)]

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        return [self._chain(shape) if shape.price is None else self._tree(shape) for shape in shapes]

    def _chain(self, shape: TreeShape) -> DraftTree:
        chances = tuple(self.right**depth for depth in range(1 + shape.levels))
        return DraftTree.chain([FIRST] * (1 + shape.levels), self.name, chances)

    def _tree(self, shape: TreeShape) -> DraftTree:
        assert shape.price is not None
        bar, levels = shape.price.bar(self.right), 1
        while levels < shape.levels and bar.reached([self.right**levels]):
            levels += 1
        firsts = [(self.right ** (depth + 1), depth, FIRST) for depth in range(levels)]
        seconds = [(self.right**depth * (1 - self.right) / 2, depth, SECOND) for depth in range(levels)]
        ordered = sorted([*firsts, *seconds], reverse=True)
        kept = sorted(
            ordered[: max(1, worth([chance for chance, _, _ in ordered], shape.price.rows))], key=lambda node: node[1:]
        )
        number = {-1: 0} | {
            depth: number_of for number_of, (_, depth, token) in enumerate(kept, start=1) if token == FIRST
        }
        tree = DraftTree.build(
            [FIRST, *(token for _, _, token in kept)],
            [-1, *(number[depth - 1] for _, depth, _ in kept)],
            self.name,
            (1.0, *(chance for chance, _, _ in kept)),
        )
        return replace(tree, grown=levels)

    def extend(self, sequence: SequenceState) -> None: ...

    def committed(self, sequence: SequenceState, path: list[int]) -> None: ...

    def finished(self, sequence: SequenceState) -> None: ...


class Machine:
    """right: how often the model is. measured: what the start took for its prices. choosing: seconds that a choice
    takes. hidden: what a step with drafts takes that no estimate holds. rates: of each step the tokens in a second that
    its plan brings on average, what choosing takes left out; choices: who drafted; chosen: seconds spent on choosing,
    of all. news: of the budget. alone: how many steps the guard measured."""

    def __init__(
        self, prices: Prices, right: float, measured: Prices | None = None, choosing: float = 0.0, hidden: float = 0.0
    ) -> None:
        self.hidden, self.news, self.alone = hidden, list[str](), 0
        self.prices, self.true, self.choosing, self.dice = prices, prices.curve(), choosing, random.Random(1)
        measured = measured or prices
        self.guesser, self.cost = Guesser(right), measured.curve()
        self.budget = Budget([Member.model(self.guesser, measured.draft)], self.cost)
        self.one = sequence()
        self.one.limit = 10**9
        self.rates: list[float] = []
        self.choices: list[str] = []
        self.chosen = self.spent = 0.0

    def run(self, steps: int) -> None:
        """So many steps of one text."""
        for _ in range(steps):
            self._step()

    def rate(self, first: int) -> float:
        """The mean rate from this step on."""
        return fmean(self.rates[first:])

    def _step(self) -> None:
        (plan,) = self.budget.plan([self.one])
        choosing = self.choosing * self.budget.looks
        tree = self.guesser.propose([self.one], [plan.shares[0].shape])[0] if plan.shares else DraftTree.chain([FIRST])
        rows, accepted = len(tree), tree.accepted(self._coming())
        more = max(0, rows - 1 - tree.levels)
        drafting = self.prices.draft.seconds(tree.levels, more, bool(tree.grown)) if rows > 1 else 0.0
        forward = self.true.seconds(rows)
        hidden = self.hidden if plan.shares else 0.0
        self.rates.append((1 + sum(tree.chances[1:])) / (drafting + forward + hidden))
        self.choices.append(self.budget.choice)
        self.alone += self.budget.guard.now
        self.news += filter(None, [self.budget.news])
        self.chosen, self.spent = self.chosen + choosing, self.spent + choosing + drafting + forward
        phases = {"propose": self._noisy(drafting), "forward": self._noisy(forward)}
        self.cost.saw(rows, 1, 0, phases)
        emitted = [FIRST] * (1 + accepted)
        self.one.tokens += emitted
        trace = StepTrace(
            number=len(self.rates), rows=rows, sequences=1, prefill_rows=0, drafted=rows - 1, accepted=accepted,
            emitted=len(emitted), seconds=phases | {"plan": choosing, "mask": hidden},
        )  # fmt: skip
        scheduled = ScheduledSequence(self.one, 0, plan.shape, plan=plan)
        self.budget.stepped(trace, [VerifyResult(scheduled, tree, path=range(1, accepted + 1), emitted=emitted)])

    def _coming(self) -> list[int]:
        rolls = (self.dice.random() for _ in range(20))
        right = self.guesser.right
        return [FIRST if roll < right else SECOND if roll < (1 + right) / 2 else OTHER for roll in rolls]

    def _noisy(self, seconds: float) -> float:
        """Some steps are held up by something else."""
        held_up = 5.0 if self.dice.random() < 0.01 else 1.0
        return seconds * held_up * self.dice.lognormvariate(0, 0.05)
