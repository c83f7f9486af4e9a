"""What a step's draws do to a sequence, whoever computed them: the accepted run goes out, its rows become text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spec.accept import Acceptance, accept
from spec.draw import BROKEN
from spec.errors import ForesayError
from spec.sequence import Sequence
from spec.tree import DraftTree


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


def emit(sequence: Sequence, tree: DraftTree, drawn: Tensor, why_nothing: Callable[[], ForesayError]) -> Run:
    """Append what was drawn on the path and tell the grammar; whatever is wrong ends this sequence alone.

    drawn: int64[N], on the host. why_nothing: asked if no token could be drawn at the root.
    """
    acceptance = accept(tree, drawn)
    emitted = _append(sequence, acceptance, why_nothing)
    count = len(emitted)
    return Run(acceptance.path[:count], acceptance.path[1 : count + 1], emitted, min(acceptance.accepted, count))


def _append(sequence: Sequence, acceptance: Acceptance, why_nothing: Callable[[], ForesayError]) -> list[int]:
    constraint = sequence.constraint
    if constraint is not None and constraint.error is not None:
        sequence.fail(constraint.error)
        return []
    # A broken draw is no child, so it is the last of its run: what came before it stands, and the next step, whose root
    # that node is, draws the same again.
    sound = [token for token in acceptance.emitted if token != BROKEN]
    emitted = sequence.append(sound)
    if not emitted:
        sequence.fail(why_nothing())
    elif constraint is not None and not sequence.finished:
        constraint.advance(emitted)
        if constraint.error is not None:
            sequence.fail(constraint.error)
    return emitted


def moves(sequence: Sequence, path: list[int]) -> tuple[Tensor, Tensor] | None:
    """Source and destination slots that make the accepted path contiguous; None if it is already (any chain)."""
    jumped = [(node, depth) for depth, node in enumerate(path) if node != depth]
    if not jumped:
        return None
    base = sequence.table.length
    slots = sequence.table.slots(base, base + path[-1] + 1)
    nodes, depths = zip(*jumped, strict=True)
    return slots[torch.tensor(nodes)], slots[torch.tensor(depths)]
