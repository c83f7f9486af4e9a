"""What a step would cost, estimated from the recorded steps and the passes measured when the engine started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from server.engine.drafters.registry import at_once
from server.engine.trace.reader import Session
from server.engine.trace.records import Step
from server.observe.replay.ways import RECORDED, Outcome, Way
from spec.budget import CostModel
from spec.errors import ConfigurationError
from spec.names import NONE
from spec.trace import depths_of


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
