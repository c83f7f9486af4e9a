"""Evaluates ways of drafting on a trace, with what a step would cost, and prints what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from foresay.server.engine.drafters.registry import at_once
from foresay.server.engine.trace import Session, Step, Told, drafting
from foresay.server.observe.replay.ways import RECORDED, Outcome, Way, judge_lookups, judge_recorded
from foresay.spec.acceptance import ByDepth
from foresay.spec.budget import CostModel
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import NONE
from foresay.spec.trace import depths_of


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of the parts of a step of one request.

    curve: of a forward pass, by rows, at start-up; slower: what it took while recording, as a multiple of that.
    level: of drafting one level; propose: of drafting at all, where that is not by levels. draw: per node. rest: of a
    step beyond that. measured: the median recorded step.
    """

    curve: CostModel
    slower: float
    level: float
    propose: float
    draw: float
    rest: float
    measured: float

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> Cost:
        """From the steps that decoded one request, or, if there are none, from all that read no prompt.

        Raises ConfigurationError if nothing was decoded.
        """
        start = sessions[-1].start
        curve = CostModel([rows for rows, _ in start.cost], [seconds for _, seconds in start.cost])
        decoding = [step for session in sessions for step in session.steps if _decodes(step)]
        steps = [step for step in decoding if len(step.parts) == 1] or decoding
        if not steps:
            raise ConfigurationError("the trace holds no step that decoded anything")
        drafted = [step for step in steps if _levels(step)]
        # Fewer levels save such a drafter nothing.
        whole = at_once(part.drafter for step in drafted for part in step.parts)
        return cls(
            curve=curve,
            slower=_middle(steps, lambda step: step.ms.get("forward", 0.0) / (1000 * curve.seconds(step.rows))),
            level=0.0 if whole else _middle(drafted, lambda step: step.ms.get("propose", 0.0) / _levels(step)),
            propose=_middle(drafted, lambda step: step.ms.get("propose", 0.0)) if whole else 0.0,
            draw=_middle(steps, lambda step: step.ms.get("draw", 0.0) / step.rows),
            rest=_middle(steps, lambda step: sum(step.ms.get(phase, 0.0) for phase in ("plan", "mask", "commit"))),
            measured=_middle(steps, lambda step: sum(step.ms.values())),
        )

    def step(self, way: Way, outcome: Outcome) -> float:
        """Milliseconds of a mean step of a way."""
        total = sum(times * self._sized(way, *size) for size, times in outcome.sizes.items())
        again = 0.0 if outcome.seconds is None else 1000 * outcome.seconds
        return (total + again) / outcome.steps

    def plain(self) -> float:
        """Milliseconds of a step that drafts nothing."""
        return self._sized(Way(NONE, NONE), 0, 0)

    def _sized(self, way: Way, drafted: int, levels: int) -> float:
        rows = 1 + drafted
        verify = 1000 * self.slower * self.curve.seconds(rows) + self.draw * rows + self.rest
        if way.source != RECORDED or not drafted:
            return verify
        return verify + self.propose + self.level * levels


def _middle(steps: Sequence[Step], figure: Callable[[Step], float]) -> float:
    return median(map(figure, steps)) if steps else 0.0


def _decodes(step: Step) -> bool:
    return bool(step.parts) and not any(part.lead for part in step.parts)


def _levels(step: Step) -> int:
    """The deepest tree of a step."""
    return max(_depths(part.parents for part in step.parts), default=0)


def _depths(trees: Iterable[list[int]]) -> Iterable[int]:
    return (max(depths_of(parents)) for parents in trees if parents)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way. Per step of one request behind the one that read its prompt; milliseconds, tokens_per_second and
    speed_up (over drafting nothing) are estimated. at_least: the recorded trees were too small to tell how much more
    would have been accepted."""

    draft: str
    steps: int
    tokens_per_step: float
    drafted_per_step: float
    acceptance_rate: float | None
    accepted_by_depth: ByDepth
    milliseconds: float
    tokens_per_second: float
    speed_up: float
    at_least: bool


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What was evaluated. milliseconds: of the median recorded step."""

    target: str
    drafter: str
    requests: int
    tokens: int
    steps: int
    milliseconds: float
    rows: list[Row]


def largest(sessions: Sequence[Session]) -> tuple[int, int]:
    """The most levels, and the most nodes, that were drafted in a step."""
    trees = [part.parents for session in sessions for step in session.steps for part in step.parts if part.parents]
    return max((max(depths_of(tree)) for tree in trees), default=0), max((len(tree) - 1 for tree in trees), default=0)


def evaluate(sessions: Sequence[Session], ways: Sequence[Way]) -> Evaluation:
    """All ways, on the requests that may be drafted for."""
    requests = [told for session in sessions for told in drafting(session)]
    cost, engine = Cost.of(sessions), sessions[-1].start.engine
    return Evaluation(
        target=str(engine.get("target", "")),
        drafter=str(engine.get("drafter", "")),
        requests=len(requests),
        tokens=sum(told.kept for told in requests),
        steps=sum(len(told.parts) for told in requests),
        milliseconds=cost.measured,
        rows=[_row(way, _outcome(way, requests), cost) for way in ways],
    )


def _outcome(way: Way, requests: Sequence[Told]) -> Outcome:
    if way.source == RECORDED:
        return judge_recorded(way, requests)
    return _nothing(requests) if way.source == NONE else judge_lookups(way, requests)


def _nothing(requests: Sequence[Told]) -> Outcome:
    """Plain decoding: a step for each token behind those that came with the prompt."""
    outcome = Outcome()
    for told in requests:
        with_prompt = sum(part.emitted for part in told.parts if part.lead)
        for _ in range(told.kept - min(with_prompt, told.kept)):
            outcome.count(0, 0, 0)
    return outcome


def _row(way: Way, outcome: Outcome, cost: Cost) -> Row:
    milliseconds = cost.step(way, outcome) if outcome.steps else cost.plain()
    rate = 1000 * outcome.tokens_per_step / milliseconds
    return Row(
        draft=way.text,
        steps=outcome.steps,
        tokens_per_step=outcome.tokens_per_step,
        drafted_per_step=outcome.drafted / outcome.steps if outcome.steps else 0.0,
        acceptance_rate=outcome.accepted / outcome.drafted if outcome.drafted else None,
        accepted_by_depth=ByDepth.of(outcome.accepted_per_depth, outcome.drafts),
        milliseconds=milliseconds,
        tokens_per_second=rate,
        speed_up=rate * cost.plain() / 1000,
        at_least=outcome.short > 0 and way.source == RECORDED,
    )
