"""The budget on texts whose kind is known: what it chooses, how soon it changes its mind, what it loses by trying.

Samples are forced and costs are invented (those of a 135M-class target on two cores), so that only the choice is
tested.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from foresay.drafters.combined import CombinedDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import TRYING, Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import Member
from foresay.spec.budget.plan import Plan
from foresay.spec.protocols import FeatureRequest
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import SWITCHED_OFF, StepTrace
from foresay.spec.tree import DraftTree, TreeShape
from tests.spec.harness import Harness
from tests.spec.tables import TableModel

#: Seconds by rows of a step, and of a draft.
CURVE = CostModel([1, 2, 4, 8, 16, 32, 64], [0.006, 0.0061, 0.0064, 0.0070, 0.0085, 0.012, 0.019])
DRAFT = DraftCost(0.0002, 0.0006, 0.00002)
WORDS = 1024
#: A text that is written after a prompt, as long as that.
Text = list[int]


class Foresight:
    """Implements :class:`foresay.spec.protocols.Drafter`: knows the text, and drafts each token right with a chance of
    its own.

    chance: by position. What it says its chances are is what it has seen of them, as models' calibrations do.
    """

    needs: FeatureRequest | None = None

    def __init__(self, text: Text, chance: Callable[[int], float], name: str = "draft_model") -> None:
        self.name, self._text, self._chance = name, text, chance
        self.calls = 0
        self._hits, self._trials = 2.4, 4.0
        self._drafted: dict[str, int] = {}
        self._read: dict[str, int] = {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        self.calls += 1
        self._read.update((s.id, len(s.tokens)) for s in sequences)
        trees = [self._draft(s.tokens, shape) for s, shape in zip(sequences, shapes, strict=True)]
        self._drafted = {s.id: len(tree) - 1 for s, tree in zip(sequences, trees, strict=True)}
        return trees

    def _draft(self, tokens: list[int], shape: TreeShape) -> DraftTree:
        """A chain as long as requested, or as its price lets it grow."""
        chances, claimed = [1.0], self._hits / self._trials
        for _ in range(shape.levels):
            below, price = claimed * chances[-1], shape.price
            if len(chances) > 1 and price is not None and not price.bar(claimed).reached(chances[-1:]):
                break
            chances.append(below)
        emitted = [self._said(len(tokens) + depth) for depth in range(len(chances) - 1)]
        return DraftTree.chain([tokens[-1], *emitted], self.name, tuple(chances))

    def _said(self, position: int) -> int:
        if position < len(self._text) and random.Random(f"{self.name}/{position}").random() < self._chance(position):
            return self._text[position]
        return 0

    def unread(self, sequence: SequenceState) -> int:
        return len(sequence.tokens) - self._read.get(sequence.id, 0)

    def extend(self, sequence: SequenceState) -> None:
        self._read[sequence.id] = len(sequence.tokens)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Each level below one that came shows how often they do."""
        levels, came = self._drafted.pop(sequence.id, 0), sum(node > 0 for node in path)
        for hit in [True] * came + [False] * (came < levels):
            self._hits, self._trials = 0.97 * self._hits + hit, 0.97 * self._trials + 1.0

    def finished(self, sequence: SequenceState) -> None:
        """Nothing is kept."""


@dataclass
class Step:
    """What one step was to do, at which length of the text, and the milliseconds it would take. most: who was to draft
    more of it."""

    at: int
    choice: str
    probe: bool
    ms: float
    most: str


class Noted(Budget):
    """Keeps what it planned."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members, CURVE, timed=False)
        self.steps: list[Step] = []

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        plans = super().plan(sequences)
        if self.why is not None:
            way = self.why.ways[0]
            most = "model" if way.nodes > 2 * sum(way.found) else "lookup" if any(way.found) else "nobody"
            self.steps.append(Step(len(sequences[0].tokens), self.choice, self.why.probe, 1000 * way.seconds, most))
        return plans


def wrote(
    text: Text, prompt: int, *, model: Foresight, again: int = 1, cost: DraftCost = DRAFT
) -> tuple[Noted, list[int]]:
    """The budget after writing the text, ``again`` times, and how many steps each took. cost: of the model."""
    budget = Noted([Member.model(model, cost), Member.looking(NgramDrafter()), Member.looking(SuffixDrafter())])
    harness = Harness(
        TableModel(0, WORDS), CombinedDrafter(budget), pages=600, max_model_len=2048, prefix=False, budget=budget
    )
    sampling = SamplingParams(seed=0, max_tokens=len(text) - prompt, ignore_eos=True)
    steps = []
    for number in range(again):
        before = len(harness.traces)
        harness.add(f"r{number}", text[:prompt], sampling, forced=text[prompt:], salt=str(number))
        assert harness.run()[f"r{number}"].tokens == text[prompt:]
        steps.append(len(harness.traces) - before)
    return budget, steps


def prose(rng: random.Random, length: int) -> Text:
    return [rng.randrange(1, WORDS) for _ in range(length)]


def share(steps: Sequence[Step], begin: int, end: int, wanted: Callable[[str], bool]) -> float:
    """Of the steps at these lengths of the text, how many chose as wanted."""
    chosen = [step.choice for step in steps if begin <= step.at < end and not step.probe]
    return sum(map(wanted, chosen)) / len(chosen)


def led(steps: Sequence[Step], begin: int, end: int, by: str) -> float:
    """Of the steps at these lengths of the text, how many had most of their nodes from models, or from lookups."""
    chosen = [step.most for step in steps if begin <= step.at < end and not step.probe]
    return chosen.count(by) / len(chosen)


def spent(budget: Noted) -> float:
    """Milliseconds of all steps."""
    return sum(step.ms for step in budget.steps)


@pytest.mark.parametrize("seed", range(4))
def test_a_change_of_regime_moves_the_choice_within_30_tokens(seed: int) -> None:
    """Prose, which a draft model guesses well; a block quoted from the prompt; prose again."""
    rng = random.Random(seed)
    quoted = prose(rng, 150)
    prompt = prose(rng, 40) + quoted + prose(rng, 40)
    text = prompt + prose(rng, 120) + quoted + prose(rng, 150)
    first = len(prompt)
    block, after = first + 120, first + 120 + 150
    budget, _ = wrote(text, first, model=Foresight(text, lambda position: 0.7))
    assert led(budget.steps, first + 30, block, "model") > 0.9
    assert led(budget.steps, block + 30, after - 5, "lookup") > 0.9
    assert led(budget.steps, after + 30, len(text), "model") > 0.8


def test_where_nothing_helps_nothing_is_drafted_and_trying_costs_little() -> None:
    rng = random.Random(5)
    text = rng.sample(range(1, WORDS), 700)
    model = Foresight(text, lambda position: 0.0)
    budget, steps = wrote(text, 100, model=model, again=3)
    plain = CURVE.seconds(1) * 1000
    assert sum(steps) > 3 * 590
    assert spent(budget) < (1 + TRYING + 0.004) * plain * len(budget.steps)
    assert model.calls > 12
    assert share(budget.steps[200:], 0, 2000, lambda choice: choice == "none") > 0.98
    assert budget.leader.name == "none"


def test_who_is_at_rest_is_noticed_when_it_would_help() -> None:
    """A model that was of no use for 300 tokens knows the next 500, and reads what it has missed in no time."""
    rng = random.Random(6)
    text = rng.sample(range(1, WORDS), 900)
    model = Foresight(text, lambda position: 0.9 * (position > 400))
    budget, steps = wrote(text, 100, model=model, cost=DraftCost(0.0002, 0.0006, 0.000002))
    assert share(budget.steps, 200, 400, lambda choice: choice == "none") > 0.9
    assert share(budget.steps, 700, 900, lambda choice: choice == "draft_model") > 0.9
    assert steps[0] < 600


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_two_that_know_different_halves_draft_together(seed: int) -> None:
    """What is looked up is wrong now and then, and a cheap model knows those positions: both go into one tree.

    As soon as that was seen: in a text as short as this it is not always (seed 7).
    """
    rng = random.Random(seed)
    emitted = prose(rng, 300)
    text = emitted + [token if rng.random() < 0.75 else rng.randrange(1, WORDS) for token in emitted]
    changed = [text[position] != emitted[position - 300] for position in range(300, 600)]
    model = Foresight(text, lambda position: 0.95 * changed[position - 300] if position >= 300 else 0.0)
    budget, _ = wrote(text, 300, model=model, cost=DraftCost(0.00005, 0.0001, 0.0))
    alone, _ = wrote(text, 300, model=Foresight(text, lambda position: 0.0), cost=DRAFT)
    assert share(budget.steps, 330, 600, lambda choice: "+draft_model" in choice) > 0.15
    assert spent(budget) < 0.95 * spent(alone)


def test_a_budget_that_failed_drafts_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    quoted = prose(random.Random(8), 200)
    text = quoted + quoted

    class Failing(Budget):
        def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
            super().stepped(trace, results)
            if trace.number == 10:
                raise ZeroDivisionError("no seconds")

    model = Foresight(text, lambda position: 0.5)
    budget = Failing([Member.looking(SuffixDrafter()), Member.model(model, DRAFT)], CURVE, timed=False)
    harness = Harness(TableModel(0, WORDS), CombinedDrafter(budget), pages=600, max_model_len=2048, budget=budget)
    sampling = SamplingParams(seed=0, max_tokens=200, ignore_eos=True)
    for name in "ab":
        harness.add(name, text[:200], sampling, forced=text[200:])
        assert harness.run()[name].tokens == text[200:]
    steps = [trace for trace in harness.traces if not trace.prefill_rows]
    assert any(trace.drafted for trace in steps if trace.number <= 10)
    after = [trace for trace in steps if trace.number > 10]
    assert {(trace.drafted, trace.choice) for trace in after} == {(0, "none")}
    assert {trace.unable for trace in after} == {f"{SWITCHED_OFF}: ZeroDivisionError: no seconds."}
    assert [record.message for record in caplog.records] == ["Failing failed and is no longer notified"]
    assert all(member.resting for member in budget.members.values() if not member.looks)


def test_news_come_with_reasons_and_not_at_every_step() -> None:
    rng = random.Random(8)
    quoted = prose(rng, 400)
    text = quoted + quoted
    heard: list[str] = []

    class Heard(Noted):
        def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
            plans = super().plan(sequences)
            heard.append(self.leader.news)
            return plans

    budget = Heard([Member.looking(SuffixDrafter())])
    harness = Harness(TableModel(0, WORDS), CombinedDrafter(budget), pages=600, max_model_len=2048, budget=budget)
    harness.add("r", text[:400], SamplingParams(seed=0, max_tokens=400, ignore_eos=True), forced=text[400:])
    harness.run()
    news = [line for line in heard if line]
    assert 1 <= len(news) <= 3
    assert re.fullmatch(
        r"Drafting with suffix now: \d+\.\d\d tokens in \d+\.\d\d ms with \d+ drafted by suffix, "
        r"against 1\.00 tokens in 6\.00 ms without drafts",
        news[-1],
    )
    assert {trace.choice for trace in harness.traces if not trace.prefill_rows} >= {"suffix"}
    assert [trace.news for trace in harness.traces if trace.news] == news
