"""The gate of what attention puts out."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.records import Partials


def gate_heads(x: Tensor, gate: Tensor | Partials, count: Tensor | None = None) -> Tensor:
    """``x *= sigmoid(gate)``, number by number, the sigmoid rounded first. Returns x, which is changed in place.

    x, gate: [R, Q * D], of one dtype and contiguous; gate may be a product that is not finished. count: int64[1], of
    how many rows, read when it runs (of compiled kernels; None: all).
    """
    if x.is_cuda:
        from foresay.verifier.ops.kernels import gate as kernels

        kernels.gate_heads(x, gate)
        return x
    if isinstance(gate, Partials):
        gate = gate.finished(x.dtype)
    if compiled(x):
        from foresay.verifier.ops.kernels.cpu import gate as on_cpu
        from foresay.verifier.ops.kernels.cpu.launch import counted

        on_cpu.gate_heads(x, gate, counted(count, len(x)))
        return x
    return x.mul_(gate.sigmoid())
