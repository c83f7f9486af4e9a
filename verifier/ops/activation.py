"""The gated activation of the MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

#: An elementwise op over fewer elements is never split among threads. A split may fall inside a row, and an element
#: at the end of a piece takes another path, with other bits.
_SERIAL = 32768


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` where ``gate_up`` is [R, 2I], gate first. Returns [R, I].

    The halves are strided views, so each row is a loop of its own: no row's bits depend on its neighbours.
    """
    if gate_up.is_cuda:
        from verifier.ops.kernels import activation

        return activation.silu_mul(gate_up)
    rows = max(1, 2 * (_SERIAL - 1) // gate_up.shape[-1])
    if len(gate_up) <= rows:
        return _silu_mul(gate_up)
    return torch.cat([_silu_mul(part) for part in gate_up.split(rows)])


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
