"""From the rows of the qkv product to rotated queries and stored keys and values, head by head.

Legend: R rows, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.kvpaging.ops import LARGEST
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.rows import inverse_rms, weighted_row
from foresay.verifier.ops.kernels.cpu.types import F32, I32, I64, LANES, OF_TORCH, vector
from foresay.verifier.ops.kernels.cpu.values import Value
from foresay.verifier.ops.records import HeadNorms, Rotation


def rotate_and_store(
    qkv: Tensor,
    rotation: Rotation,
    layer: tuple[Tensor, Tensor, Tensor | None],
    slots: Tensor,
    norms: HeadNorms | None,
    query: Tensor,
    count: Tensor,
) -> None:
    """Norm and rotate the heads of the first ``count`` rows; keys and values go to their slots, queries to ``query``,
    [R, Q, D]. All else as :func:`foresay.verifier.ops.rope.rotate_and_store` takes it.
    """
    (keys, values, scales), (cos, sin, factor) = layer, rotation
    groups, dim = keys.shape[-2:]
    how = None if norms is None else _Norms(norms.eps, norms.query.dtype, norms.whole, norms.after)
    weights = (0, 0) if norms is None else (norms.query, norms.key)
    shape = _Shape(qkv.dtype, keys.dtype, cos.dtype, dim, query.shape[1], groups, how, factor is not None)
    more = (0 if one is None else one for one in (scales, factor))
    _kernel(shape)(qkv, cos, sin, keys, values, slots, *weights, query, count, *more)


@dataclass(frozen=True, slots=True)
class _Norms:
    """As :class:`~foresay.verifier.ops.records.HeadNorms`. weight: the dtype of the weights."""

    eps: float
    weight: torch.dtype
    whole: bool
    after: bool


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a kernel is compiled for. product, stored, angle: dtypes of what comes in, of keys and values as they are
    stored, and of cosines. queries, groups, dim: Q, G, D. factor: whether queries are multiplied by one."""

    product: torch.dtype
    stored: torch.dtype
    angle: torch.dtype
    dim: int
    queries: int
    groups: int
    norms: _Norms | None
    factor: bool


@Compiled
def _kernel(shape: _Shape) -> Kernel:
    return _Rotation(Kernel("rotate_and_store"), shape).write()


class _Rotation:
    """Writes the kernel. Arguments: qkv, cosines, sines, keys, values, slots, weights of the norms of queries and of
    keys, query, count, scales, query factors."""

    def __init__(self, kernel: Kernel, shape: _Shape) -> None:
        self.k, self.shape = kernel, shape
        self.of, self.angle = OF_TORCH[shape.product], OF_TORCH[shape.angle]
        self.qkv, self.cos, self.sin, self.keys, self.values, self.slots = map(kernel.pointer, range(6))
        self.weights, self.query = (kernel.pointer(6), kernel.pointer(7)), kernel.pointer(8)
        self.scales, self.factors = kernel.pointer(10), kernel.pointer(11)
        self.normed, self.turned = (kernel.array(self.of, shape.dim) for _ in range(2))
        self.heads = shape.queries + 2 * shape.groups
        self.seen = kernel.variable(kernel.constant(-1))
        self.inverses = [kernel.variable(kernel.constant(0.0, F32)) for _ in self.weights]

    def write(self) -> Kernel:
        """All of it."""
        k, (queries, groups) = self.k, (self.shape.queries, self.shape.groups)
        with k.share(k.counted(9) * self.heads) as unit:
            row, head = unit // self.heads, unit % self.heads
            source = k.at(self.qkv, unit * self.shape.dim, self.of)
            slot = k.load(self.slots, I64, row) * groups
            scale = k.at(self.scales, slot * 2 + (head - queries), F32)
            with k.when(head >= queries + groups):
                self._keep(source, self.values, slot + (head - (queries + groups)), scale)
            if self.shape.norms is not None and self.shape.norms.whole:
                self._look_at(row, self.shape.norms)
            with k.when(head < queries):
                self._write_query(source, row, head)
            with k.when((head >= queries) & (head < queries + groups)):
                self._write_key(source, row, head - queries, slot, scale)
        return k

    def _look_at(self, row: Value, norms: _Norms) -> None:
        """The statistics of all queries, and of all keys, of a row; of its further heads they are known."""
        k, dim = self.k, self.shape.dim
        with k.when(row.differs(self.seen.value)):
            self.seen.value = row
            parts = ((0, self.shape.queries), (self.shape.queries, self.shape.groups))
            for inverse, (first, count) in zip(self.inverses, parts, strict=True):
                source = k.at(self.qkv, (row * self.heads + first) * dim, self.of)
                inverse.value = inverse_rms(k, source, self.of, (count * dim, norms.eps))

    def _write_query(self, source: Value, row: Value, head: Value) -> None:
        k, of, dim = self.k, self.of, self.shape.dim
        target = k.at(self.query, (row * self.shape.queries + head) * dim, of)
        if not self.shape.factor:
            self._turn(source, row, 0, head, target)
            return
        self._turn(source, row, 0, head, self.turned)
        factor = k.read(self.factors, self.angle, row, 1)
        k.across(dim, lambda at, lanes: k.write(k.read(self.turned, of, at, lanes) * factor, target, of, at))

    def _write_key(self, source: Value, row: Value, head: Value, slot: Value, scale: Value) -> None:
        if OF_TORCH[self.shape.stored] is self.of:
            self._turn(source, row, 1, head, self.k.at(self.keys, (slot + head) * self.shape.dim, self.of))
        else:
            self._turn(source, row, 1, head, self.turned)
            self._keep(self.turned, self.keys, slot + head, scale)

    def _turn(self, source: Value, row: Value, part: int, head: Value, out: Value) -> None:
        """A head of queries (part 0) or of keys (part 1), normed where the model does that, and rotated."""
        norms = self.shape.norms
        if norms is None:
            self._rotate(source, row, out)
        elif norms.after:
            self._rotate(source, row, self.normed)
            self._norm(self.normed, norms, part, head, out)
        else:
            self._norm(source, norms, part, head, self.normed)
            self._rotate(self.normed, row, out)

    def _norm(self, source: Value, norms: _Norms, part: int, head: Value, out: Value) -> None:
        k, dim, weight, kind = self.k, self.shape.dim, self.weights[part], OF_TORCH[norms.weight]
        if norms.whole:
            weight, inverse = k.at(weight, head * dim, kind), self.inverses[part].value
        else:
            inverse = inverse_rms(k, source, self.of, (dim, norms.eps))
        weighted_row(k, source, weight, out, inverse, dim, (self.of, kind))

    def _rotate(self, source: Value, row: Value, out: Value) -> None:
        """``source * cos + swapped * sin``, the second product rounded first."""
        k, of, angle, dim = self.k, self.of, self.angle, self.shape.dim
        cos, sin = (k.at(table, row * dim, angle) for table in (self.cos, self.sin))
        for mine, other in ((0, dim // 2), (dim // 2, 0)):

            def turn(index: Value, lanes: int, mine: int = mine, other: int = other) -> None:
                at = index + mine
                swapped = k.rounded(k.read(source, of, index + other, lanes) * k.read(sin, angle, at, lanes), of)
                k.write(k.fma(k.read(source, of, at, lanes), k.read(cos, angle, at, lanes), swapped), out, of, at)

            k.across(dim // 2, turn)

    def _keep(self, source: Value, store: Value, place: Value, scale: Value) -> None:
        """A head into its slot of keys or values: as it is, or quantised."""
        k, of, dim, kept = self.k, self.of, self.shape.dim, OF_TORCH[self.shape.stored]
        target = k.at(store, place * dim, kept)
        if self.shape.stored in LARGEST:
            _quantized(k, source, target, scale, (dim, of, self.shape.stored))
        else:
            k.across(dim, lambda index, lanes: k.write(k.read(source, of, index, lanes), target, kept, index))


def _quantized(k: Kernel, source: Value, target: Value, scale: Value, shape: tuple[int, object, torch.dtype]) -> None:
    """A head as :func:`foresay.kvpaging.ops.quantized` has it."""
    dim, of, stored = shape
    kept, largest = OF_TORCH[stored], LARGEST[stored]
    # As integers sizes are in order too, and what is no number is the largest.
    most, rest = k.variable(k.constant(0, vector(I32))), k.variable(k.constant(0, I32))

    def look(index: Value, lanes: int) -> None:
        value, total = k.read(source, of, index, lanes), most if lanes == LANES else rest
        total.value = k.larger(k.bits(value, k.like(value, I32)) & 0x7FFFFFFF, total.value)

    k.across(dim, look)
    found = k.bits(k.larger(k.folded(most.value, k.larger), rest.value), F32) / largest
    k.store(found, scale)
    divisor = k.select(found > 0.0, found, 1.0)

    def write(index: Value, lanes: int) -> None:
        value = k.read(source, of, index, lanes) / divisor
        value = k.select(value > -largest, value, -largest)
        k.write(k.select(value < largest, value, largest), target, kept, index)

    k.across(dim, write)
