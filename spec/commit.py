"""What a step's samples do to a sequence, whoever computed them: the accepted run goes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foresay.spec.accept import Acceptance
from foresay.spec.errors import ForesayError
from foresay.spec.sample import BROKEN
from foresay.spec.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Run:
    """The run of tokens that goes out.

    path: nodes whose rows become text, from the root on, one for each emitted token. taken: the accepted nodes below
    the root whose tokens went out.
    """

    path: list[int]
    taken: list[int]
    emitted: list[int]
    accepted: int


def emit(sequence: SequenceState, taken: Acceptance, why_nothing: Callable[[], ForesayError]) -> Run:
    """Append what was sampled on the path and tell the grammar; whatever is wrong ends this sequence alone.

    why_nothing: asked if no token could be sampled at the root.
    """
    emitted = _append(sequence, taken, why_nothing)
    count = len(emitted)
    return Run(taken.path[:count], taken.path[1 : count + 1], emitted, min(taken.accepted, count))


def _append(sequence: SequenceState, acceptance: Acceptance, why_nothing: Callable[[], ForesayError]) -> list[int]:
    constraint = sequence.constraint
    if constraint is not None and constraint.error is not None:
        sequence.fail(constraint.error)
        return []
    # A broken sample is no child, so it is the last of its run: what came before it stands, and the next step, whose
    # root that node is, samples the same again.
    sound = [token for token in acceptance.emitted if token != BROKEN]
    emitted = sequence.append(sound)
    if not emitted:
        sequence.fail(why_nothing())
    elif constraint is not None and not sequence.finished:
        constraint.advance(emitted)
        if constraint.error is not None:
            sequence.fail(constraint.error)
    return emitted
