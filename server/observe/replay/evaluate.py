"""Evaluates ways of drafting on a trace, and prints what they are worth."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from server.engine.trace.reader import Session, Told, drafting
from server.observe.replay import lookups, recorded
from server.observe.replay.cost import Cost
from server.observe.replay.ways import RECORDED, Outcome, Way
from spec.acceptance import ByDepth
from spec.names import NONE
from spec.trace import depths_of


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
        return recorded.judge(way, requests)
    return _nothing(requests) if way.source == NONE else lookups.judge(way, requests)


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
