"""Writes the trace: an observer of the engine, whose lines are made when nobody waits for tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

import foresay
from server.engine.trace.lines import Lines
from server.engine.trace.records import VERSION, Begin, Choice, Cut, End, Part, Record, Start, Step
from spec.budget import CostModel
from spec.observer import Observer
from spec.request import EngineInfo
from spec.sequence import SequenceState
from spec.step import VerifyResult
from spec.trace import StepTrace


class TraceWriter(Observer):
    """Appends a line for each event. text: whether token ids are written down; without them nobody can tell from the
    trace what was said.
    """

    def __init__(self, lines: Lines, text: bool) -> None:
        self._lines, self._text = lines, text
        self._encoder = msgspec.json.Encoder()

    def started(self, info: EngineInfo, cost: CostModel) -> None:
        """An engine is ready. cost: what its passes take."""
        self._write(
            Start(
                version=VERSION,
                foresay=foresay.__version__,
                at=time.time(),
                text=self._text,
                engine=msgspec.to_builtins(info),
                cost=[(rows, round(seconds, 7)) for rows, seconds in cost.points],
            )
        )
        self._lines.flush()

    def begun(self, sequence: SequenceState) -> None:
        """A request was queued."""
        self._write(
            Begin(
                id=sequence.id,
                at=time.time(),
                prompt=sequence.prompt_length,
                resumed=sequence.resumed_at,
                limit=sequence.limit,
                temperature=sequence.sampling.temperature,
                speculate=sequence.speculate,
                grammar=sequence.constraint is not None,
                aside=sequence.aside,
                tokens=list(sequence.tokens) if self._text else None,
            )
        )

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """A step is over."""
        self._write(
            Step(
                number=trace.number,
                at=time.time(),
                ms={phase: round(1000 * seconds, 4) for phase, seconds in trace.seconds.items()},
                rows=trace.rows,
                running=trace.running,
                waiting=trace.waiting,
                pages=trace.pages,
                parts=[self._part(result) for result in results],
                choice=_choice(results),
            )
        )

    def ended(self, sequence: SequenceState) -> None:
        """A request is over."""
        self._write(
            End(
                id=sequence.id,
                at=time.time(),
                reason=sequence.finish_reason or "",
                tokens=sequence.output_length,
                preemptions=sequence.trace.preemptions,
            )
        )
        self._lines.flush()

    def cut(self, id: str, at_token: int) -> None:
        """The text of a request that is over is shorter than what it emitted."""
        self._write(Cut(id=id, tokens=at_token))
        self._lines.flush()

    def close(self) -> None:
        """The engine is gone."""
        self._lines.close()

    def _part(self, result: VerifyResult) -> Part:
        sequence, tree, drawn = result.scheduled.sequence, result.tree, result.sampled
        root = len(sequence.tokens) - len(result.emitted) - 1
        if tree is None or drawn is None:
            return Part(id=sequence.id, root=root, lead=result.scheduled.prefill, parents=[], drawn=[])
        tokens, parents, draws = tree.tokens.tolist(), tree.parents.tolist(), drawn.tolist()
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        return Part(
            id=sequence.id,
            root=root,
            lead=result.scheduled.prefill,
            drafter=tree.drafter,
            parents=parents,
            drawn=[children.get(place, -1) for place in enumerate(draws)],
            chances=[round(chance, 4) for chance in tree.chances] if len(tree.chances) == len(tokens) else [],
            forced=result.forced,
            accepted=result.accepted,
            emitted=len(result.emitted),
            tokens=tokens if self._text else None,
            draws=draws if self._text else None,
        )

    def _write(self, record: Record) -> None:
        self._lines.append(self._encoder.encode(record))


def _choice(results: Sequence[VerifyResult]) -> Choice | None:
    """What the budget weighed, which is the same for all sequences of a step."""
    for result in results:
        if (why := result.scheduled.plan.why) is not None:
            weighed = [(one.drafter, one.nodes, round(one.tokens, 3), round(one.ms, 3)) for one in why.weighed]
            return Choice(drafter=why.choice, probe=why.probe, weighed=weighed)
    return None
