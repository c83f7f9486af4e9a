"""The ends of texts and the places of rows, as entries of a recording: small enough for one thread a number."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.kernels.cpu import launch
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.types import I32, I64
from foresay.verifier.ops.records import TextEnd


def gather_recent(recent: Tensor, emitted: Tensor, lengths: Tensor) -> Tensor:
    """The last tokens of each sequence when the first ``lengths[s]`` of the emitted ones have come behind them.

    recent: int64[S, T]; emitted: int64[S, N]; lengths: int64[S], 0 to N. Returns int64[S, T]; ``BROKEN`` becomes 0.
    """
    out = launch.room(recent.shape, torch.int64)
    _gathering()(recent, emitted, lengths, out, recent.numel(), recent.shape[1], emitted.shape[1])
    return out


def text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    """As :func:`foresay.verifier.ops.recent.text_ends`."""
    sequences, reach = recent.shape
    tokens = launch.room((sequences, count), torch.int64)
    begins, roots = launch.room((sequences,), torch.int32), launch.room((sequences,), torch.int64)
    _ending()(recent, lengths, tokens, begins, roots, sequences, reach, count, first)
    return TextEnd(tokens, begins, roots)


def lay_out(
    tables: Tensor, page_size: int, lengths: Tensor, depths: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.lay_out.lay_out`."""
    positions, slots = (launch.room((nodes.numel(),), torch.int64) for _ in range(2))
    apart = int(depths.dim() == 2)
    _laying()(
        tables, lengths, depths, nodes, live, positions, slots,
        nodes.numel(), nodes.shape[1], tables.shape[1], page_size, apart,
    )  # fmt: skip
    return positions, slots


@Compiled
def _gathering() -> Kernel:
    k = Kernel("gather_recent")
    recent, emitted, lengths, out = (k.pointer(index) for index in range(4))
    reach, width = k.number(5), k.number(6)
    with k.share(k.number(4)) as place:
        sequence = place // reach
        at = place % reach + k.load(lengths, I64, sequence)
        with k.when(at < reach):
            k.store(k.load(recent, I64, sequence * reach + at), out, place)
        with k.when(at >= reach):
            token = k.load(emitted, I64, sequence * width + at - reach)
            k.store(k.select(token.equals(BROKEN), 0, token), out, place)
    return k


@Compiled
def _ending() -> Kernel:
    k = Kernel("text_ends")
    recent, lengths, tokens, begins, roots = (k.pointer(index) for index in range(5))
    reach, count, first = k.number(6), k.number(7), k.number(8)
    with k.share(k.number(5)) as sequence:
        length = k.integer(k.load(lengths, I32, sequence), I64)
        begin = k.select(length - count + 1 > first, length - count + 1, first)
        root = k.select(length > begin, length - begin, 0)
        k.store(k.integer(begin, I32), begins, sequence)
        k.store(sequence * count + root, roots, sequence)
        with k.loop(0, count) as place:
            back = k.select(root > place, root - place, 0)
            token = k.load(recent, I64, (sequence + 1) * reach - back - 1)
            k.store(token, tokens, sequence * count + place)
    return k


@Compiled
def _laying() -> Kernel:
    k = Kernel("lay_out")
    tables, lengths, depths, nodes, live, positions, slots = (k.pointer(index) for index in range(7))
    width, pages, size, apart = (k.number(index) for index in range(8, 12))
    with k.share(k.number(7)) as row:
        sequence = row // width
        length, alive = (k.integer(k.load(of, I32, sequence), I64) for of in (lengths, live))
        depth = k.integer(k.load(depths, I32, k.select(apart.differs(0), row, row % width)), I64)
        place = length + k.load(nodes, I64, row)
        position, slot = k.variable(k.constant(0)), k.variable(k.constant(0))
        with k.when(alive.differs(0)):
            page = k.integer(k.load(tables, I32, sequence * pages + place // size), I64)
            position.value = length + depth
            slot.value = page * size + place % size
        k.store(position.value, positions, row)
        k.store(slot.value, slots, row)
    return k
