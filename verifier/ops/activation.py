"""The gated activation of the MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` where ``gate_up`` is [R, 2I], gate first. Returns [R, I].

    The halves are strided views, so each row is a loop of its own: no row's bits depend on its neighbours.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
