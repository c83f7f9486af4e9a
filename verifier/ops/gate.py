"""The gate of what attention puts out."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import as_read, launch, on_triton
from foresay.verifier.ops.records import Partials


@op()
def gate_heads(x: Tensor, gate: Tensor | Partials, count: Tensor | None = None) -> Tensor:
    """``x *= sigmoid(gate)``, number by number, the sigmoid rounded first. Returns x, which is changed in place.

    x, gate: [R, Q * D], of one dtype and contiguous; gate may be a product that is not finished. count: int64[1], of
    how many rows, read when it runs (of compiled kernels; None: all).
    """
    if isinstance(gate, Partials):
        gate = gate.finished(x.dtype)
    return x.mul_(gate.sigmoid())


@gate_heads.kernel
def _gate_heads(x: Tensor, gate: Tensor | Partials, count: Tensor | None = None) -> Tensor:
    (product, bias), about = as_read(gate)
    assert x.shape == product.shape[-2:], "each number has a gate"
    (rows, width), columns = x.shape, 1024 if on_triton(x) else 256  # a single row is shared among threads too
    launch(
        "rows.gate_rows", (rows, -(-width // columns)), (x, product, bias, rows),
        {"WIDTH": width, "COLUMNS": columns} | about, count, rows=True, enable_fp_fusion=False,
    )  # fmt: skip
    return x
