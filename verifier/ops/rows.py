"""Row-wise ops: rows of a table, norms, the gate of attention's output, scaling and capping of logits.

Kernels are in the file of the same name (:mod:`foresay.verifier.ops.kernels.rows`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import as_normed, as_read, empty, launch, of_any_width, on_triton, row_of, warps
from foresay.verifier.ops.records import Norm, SplitKSums
from foresay.verifier.ops.trees import known_tokens


@op()
def take_rows(table: Tensor, indices: Tensor, count: Tensor | None = None) -> Tensor:
    """``table[indices]``. table: [N, ..], contiguous. indices: int64[R]. Returns [R, ..].

    count: int64[1], how many rows are taken, read when it runs (of kernels of a CPU; None: all).
    """
    return table.index_select(0, indices)


@take_rows.kernel
def _take_rows(table: Tensor, indices: Tensor, count: Tensor | None = None) -> Tensor:
    return _taken(table, indices, len(indices), count, placed=True)


@op()
def copy_rows(x: Tensor, count: Tensor | None = None) -> Tensor:
    """A copy of the rows. x: [R, ..], contiguous; count: see :func:`take_rows`."""
    return x.clone()


@copy_rows.kernel
def _copy_rows(x: Tensor, count: Tensor | None = None) -> Tensor:
    return _taken(x, x, len(x), count, placed=False)


def _taken(table: Tensor, indices: Tensor, rows: int, count: Tensor | None, placed: bool) -> Tensor:
    out, width = empty((rows, *table.shape[1:]), table), table.shape[1:].numel()
    constants = {"PLACED": placed} | of_any_width(table, width)
    launch("rows.taken_rows", (rows,), (table, indices, out, width, width, 0), constants, count, rows=True)
    return out


@op()
def put_rows(table: Tensor, indices: Tensor, rows: Tensor) -> None:
    """``table[indices] = rows``. table: [N, D], contiguous. indices: int64[R], of which only row 0, which is padding's,
    may be there twice. rows: [R, D]."""
    table.index_copy_(0, indices, rows)


@put_rows.kernel
def _put_rows(table: Tensor, indices: Tensor, rows: Tensor) -> None:
    width = table.shape[1]
    arguments = (table, indices, rows, width)
    launch("rows.put_rows", (len(rows),), arguments, of_any_width(table, width), rows=True, num_warps=warps(width))


@op()
def join_columns(*parts: Tensor) -> Tensor:
    """[R, sum of D]: rows side by side, [R, D] each, contiguous and of one dtype."""
    return torch.cat(parts, dim=1)


@join_columns.kernel
def _join_columns(*parts: Tensor) -> Tensor:
    if on_triton(parts[0]):  # a launch for each part takes longer there
        return torch.cat(parts, dim=1)
    rows, widths = len(parts[0]), [part.shape[1] for part in parts]
    out = empty((rows, sum(widths)), parts[0])
    for number, (part, width) in enumerate(zip(parts, widths, strict=True)):
        constants = {"PLACED": False} | of_any_width(part, width)
        launch("rows.taken_rows", (rows,), (part, part, out, width, sum(widths), sum(widths[:number])), constants,
               rows=True)  # fmt: skip
    return out


@op()
def take_both(first: Tensor, second: Tensor, indices: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same rows of two tables of one shape. first, second: [N, D]."""
    return take_rows(first, indices, count), take_rows(second, indices, count)


@take_both.kernel
def _take_both(first: Tensor, second: Tensor, indices: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = len(indices), first.shape[1]
    made = empty(shape, first), empty(shape, second)
    arguments = (first, second, indices, *made)
    launch("rows.both_rows", shape[:1], arguments, row_of(first, shape[1]), count, rows=True, num_warps=1)
    return made


@op()
def take_columns(x: Tensor, indices: Tensor, count: Tensor | None = None) -> Tensor:
    """``x[:, indices]``. x: [R, N], contiguous. indices: int64[K]. Returns [R, K]; count: see :func:`take_rows`."""
    return x.index_select(1, indices)


@take_columns.kernel
def _take_columns(x: Tensor, indices: Tensor, count: Tensor | None = None) -> Tensor:
    (rows, width), taken = x.shape, len(indices)
    out = empty((rows, taken), x)
    launch("rows.taken_columns", (rows,), (x, indices, out, width, taken), of_any_width(x, taken), count)
    return out


@op()
def norm(x: Tensor, how: Norm, count: Tensor | None = None) -> Tensor:
    """``x / rms(x) * weight + bias`` over the last dimension, or the same of ``x - mean(x)``; computed in fp32.

    x: [..., D]. Each row's result depends only on that row. count: int64[1], the number of rows, read when it runs (by
    compiled kernels; None: all).
    """
    if x.dtype.itemsize == 4 and not how.centred and how.bias is None:
        return functional.rms_norm(x, (x.shape[-1],), how.weight, how.eps)
    wide = x.float()
    if how.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * wide.square().mean(-1, keepdim=True).add_(how.eps).rsqrt_()
    if how.weight.dtype is x.dtype:
        wide = wide.to(x.dtype).float()
    wide = wide.mul_(how.weight)
    return (wide if how.bias is None else wide.add_(how.bias)).to(x.dtype)


@norm.kernel
def _norm(x: Tensor, how: Norm, count: Tensor | None = None) -> Tensor:
    return _normed(x.reshape(-1, x.shape[-1]), None, how, count).view(x.shape)


@op()
def add_norm(
    x: Tensor,
    y: Tensor | SplitKSums,
    how: Norm | None,
    count: Tensor | None = None,
    share: float = 1.0,
    scalar: Tensor | None = None,
) -> Tensor:
    """``x += share * y``, then ``x *= scalar``, and the norm of that as in :func:`norm`; without ``how`` x itself is
    returned.

    x, y: [R, D], contiguous; x is the residual stream and is changed in place. y may be an unfinished product.
    share: ``share * y`` is rounded before it is added. scalar: [1], of x's dtype; the sum is rounded before too.
    Returns [R, D].
    """
    if isinstance(y, SplitKSums):
        y = y.reduce(x.dtype)
    x.add_(y if share == 1.0 else y * share)
    if scalar is not None:
        x.mul_(scalar)
    return x if how is None else norm(x, how)


@add_norm.kernel
def _add_norm(
    x: Tensor,
    y: Tensor | SplitKSums,
    how: Norm | None,
    count: Tensor | None = None,
    share: float = 1.0,
    scalar: Tensor | None = None,
) -> Tensor:
    assert x.shape == (y if isinstance(y, Tensor) else y.sums).shape[-2:], "x and y are of one shape"
    return _normed(x, y, how, count, share, scalar)


def _normed(
    x: Tensor,
    y: Tensor | SplitKSums | None,
    how: Norm | None,
    count: Tensor | None,
    share: float = 0.0,
    scalar: Tensor | None = None,
) -> Tensor:
    rows, width = x.shape
    out = x if how is None else empty(x.shape, x)
    (weights, eps, norming), (added, apart, about) = as_normed(how, x), as_read(x if y is None else y)
    launch(
        "rows.norm_rows", (rows,), (x, *added, *weights, x if scalar is None else scalar, out, apart, eps),
        {"SHARE": share, "SCALED": scalar is not None} | row_of(x, width) | norming | about, count, rows=True,
        num_warps=warps(width),
    )  # fmt: skip
    return out


@op()
def embed(table: Tensor, tokens: Tensor, how: Norm | None, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The embeddings of the tokens, which start the residual stream, and their norm: [R, D] each.

    Without ``how`` both are one tensor: the second must be read before the first is changed. This holds for a product
    that runs before the residual add.
    table: [V, D]. tokens: int64[R]. count: see :func:`~foresay.verifier.ops.rows.take_rows`.
    """
    x = take_rows(table, tokens, count)
    return x, x if how is None else norm(x, how, count)


@embed.kernel
def _embed(table: Tensor, tokens: Tensor, how: Norm | None, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = rows, width = len(tokens), table.shape[1]
    x = empty(shape, table)
    out = x if how is None else empty(shape, table)
    weights, eps, norming = as_normed(how, x)
    launch(
        "rows.embedded_rows", (rows,), (table, tokens, *weights, x, out, eps), row_of(table, width) | norming, count,
        rows=True, num_warps=warps(width),
    )  # fmt: skip
    return x, out


@op()
def pair(
    table: Tensor, tokens: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    """The RMS norms of the tokens' embeddings and of ``hidden``, concatenated, [R, 2 D]; and a copy of ``hidden``, or
    its norm.

    table: [V, D]; tokens past it are clamped to its last row, negative ones to its first. tokens: int64[R]. hidden: [R,
    D].
    weights: [D] each.
    """
    of_token, of_hidden = (Norm(weight, eps) for weight in weights)
    normed = norm(hidden, of_hidden)
    embedded = norm(take_rows(table, known_tokens(tokens, len(table))), of_token)
    return torch.cat((embedded, normed), dim=-1), normed if keep_normed else copy_rows(hidden)


@pair.kernel
def _pair(
    table: Tensor, tokens: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor], eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    rows, width = hidden.shape
    out, stream = empty((rows, 2 * width), hidden), empty(hidden.shape, hidden)
    constants = {"KNOWN": len(table), "NORMED": keep_normed} | row_of(table, width) | row_of(hidden, width)
    arguments = (table, tokens, hidden, *weights, out, stream, eps)
    launch("rows.paired_rows", (rows, 2), arguments, constants, rows=True, num_warps=warps(width))
    return out, stream


@op()
def gate_heads(x: Tensor, gate: Tensor | SplitKSums, count: Tensor | None = None) -> Tensor:
    """``x *= sigmoid(gate)``, number by number, the sigmoid rounded first. Returns x, which is changed in place.

    x, gate: [R, Q * D], of one dtype and contiguous; gate may be an unfinished product. count: int64[1], the number of
    rows, read when it runs (by compiled kernels; None: all).
    """
    if isinstance(gate, SplitKSums):
        gate = gate.reduce(x.dtype)
    return x.mul_(gate.sigmoid())


@gate_heads.kernel
def _gate_heads(x: Tensor, gate: Tensor | SplitKSums, count: Tensor | None = None) -> Tensor:
    (product, bias), apart, about = as_read(gate)
    assert x.shape == product.shape[-2:], "each number has a gate"
    (rows, width), columns = x.shape, 1024 if on_triton(x) else 256  # a single row is shared among threads too
    launch(
        "rows.gate_rows", (rows, -(-width // columns)), (x, product, bias, apart),
        {"WIDTH": width, "COLUMNS": columns} | about, count, rows=True, enable_fp_fusion=False,
    )  # fmt: skip
    return x


@op()
def layer_inputs(
    product: Tensor | SplitKSums,
    dtype: torch.dtype,
    table: Tensor,
    tokens: Tensor,
    how: Norm,
    factors: tuple[float, float],
    count: Tensor | None = None,
) -> Tensor:
    """What layers read of a row's token and of its embedding: ``(norm(product * factor) + table[token] * scale) /
    sqrt(2)``, rounded to ``dtype`` after each step.

    product: [R, L * P] of ``dtype``, perhaps unfinished. table: [V, L * P], of any float type. tokens: int64[R]. how:
    the norm of each layer's P numbers, with a weight. factors: factor and scale. Returns [R, L * P]; count: see
    :func:`take_rows`.
    """
    if isinstance(product, SplitKSums):
        product = product.reduce(dtype)
    projected = norm((product * factors[0]).unflatten(1, (-1, len(how.weight))), how)
    rows = table.index_select(0, tokens).to(dtype) * factors[1]
    return (projected.flatten(1) + rows) * _HALF


#: The share of each of two numbers of one size in a sum of that size.
_HALF = math.sqrt(0.5)


@layer_inputs.kernel
def _layer_inputs(
    product: Tensor | SplitKSums,
    dtype: torch.dtype,
    table: Tensor,
    tokens: Tensor,
    how: Norm,
    factors: tuple[float, float],
    count: Tensor | None = None,
) -> Tensor:
    (made, bias), apart, about = as_read(product)
    rows, width = len(tokens), len(how.weight)
    out, layers = empty((rows, table.shape[1]), made, dtype), table.shape[1] // width
    constants = {"FACTOR": factors[0], "SCALE": factors[1], "HALF": _HALF, "LAYERS": layers}
    launch(
        "rows.layer_input_rows", (rows, layers), (made, bias, table, tokens, how.weight, out, apart, how.eps),
        constants | row_of(out, width) | about, count, rows=True, num_warps=warps(width), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@op()
def gate_inputs(gate: Tensor | SplitKSums, inputs: Tensor, number: int, count: Tensor | None = None) -> Tensor:
    """``gelu(gate) * inputs`` of one layer, the activation rounded first. Returns [R, P].

    gate: [R, P], perhaps unfinished. inputs: [R, L * P], of :func:`layer_inputs`. number: of the layer. count: see
    :func:`take_rows`.
    """
    if isinstance(gate, SplitKSums):
        gate = gate.reduce(inputs.dtype)
    width = gate.shape[1]
    return functional.gelu(gate, approximate="tanh") * inputs[:, number * width : (number + 1) * width]


@gate_inputs.kernel
def _gate_inputs(gate: Tensor | SplitKSums, inputs: Tensor, number: int, count: Tensor | None = None) -> Tensor:
    (product, bias), apart, about = as_read(gate)
    rows, width = product.shape[-2:]
    out = empty((rows, width), inputs)
    constants = {"STRIDE": inputs.shape[1]} | row_of(out, width) | about
    arguments = (product, bias, inputs, out, apart, number * width)
    launch("rows.gated_input_rows", (rows,), arguments, constants, count, rows=True, enable_fp_fusion=False)
    return out


@op()
def finish_logits(logits: Tensor, scale: float = 1.0, cap: float | None = None, count: Tensor | None = None) -> Tensor:
    """``x = logits * scale``, then ``cap * tanh(x / cap)`` if there is a cap; in place. Returns the logits.

    logits: fp32[W, V], contiguous; each number's result depends only on that number. With neither a factor nor a cap
    nothing runs. count: int64[1], the number of rows, read when it runs (by compiled kernels; None: all).
    """
    if scale == 1.0 and cap is None:
        return logits
    logits.mul_(scale)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


@finish_logits.kernel
def _finish_logits(logits: Tensor, scale: float = 1.0, cap: float | None = None, count: Tensor | None = None) -> Tensor:
    if scale == 1.0 and cap is None:
        return logits
    (rows, width), columns = logits.shape, 1024 if on_triton(logits) else 4096
    constants = {"WIDTH": width, "CAP": cap or 0.0, "COLUMNS": columns}
    grid = rows, -(-width // columns)
    launch("rows.finish_rows", grid, (logits, scale), constants, count, rows=True, enable_fp_fusion=False)
    return logits
