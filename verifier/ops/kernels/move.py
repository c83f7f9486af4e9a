"""Moving the rows of accepted paths in all layers in one launch.

A program owns a few columns of one layer's keys or values, for all rows of one sequence: no other program reads or
writes what it does, so programs may run in any order. Inside a program the rows are read into registers, then all
threads meet at a barrier, then the rows are written. Without the barrier a warp could write a row that another warp has
yet to read; with it, any destination may be any source.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn

#: Words of a row that one program moves: 64 rows of them take 32 registers in each of 128 threads.
_COLUMNS = 64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["slots", "path_width"])
def move_columns(
    keys,
    values,
    sources,
    destinations,
    lengths,
    slots,
    path_width,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """COLUMNS words of all ROWS of a sequence, in one layer. The last programs of the first axis take the values."""
    wait_turn(CHAINED)
    KEY_PIECES: tl.constexpr = (KEY_WIDTH + COLUMNS - 1) // COLUMNS
    piece, layer, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.arange(0, ROWS)
    real = rows < tl.load(lengths + sequence)
    source = tl.load(sources + sequence * path_width + rows, real, 0)
    destination = tl.load(destinations + sequence * path_width + rows, real, 0)
    moving = (real & (source != destination))[:, None]
    base, width, first = keys, KEY_WIDTH, piece * COLUMNS
    if piece >= KEY_PIECES:
        base, width, first = values, VALUE_WIDTH, (piece - KEY_PIECES) * COLUMNS
    columns = (first + tl.arange(0, COLUMNS))[None, :]
    inside = moving & (columns < width)
    start = base + layer.to(tl.int64) * slots * width + columns
    held = tl.load(start + source[:, None] * width, inside, 0)
    tl.debug_barrier()
    tl.store(start + destination[:, None] * width, held, inside)


def move_paths(parts: tuple[Tensor, ...], sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """As :func:`foresay.verifier.ops.move.move_paths`. A launch for keys and values, one for their scales if there are
    any."""
    for first in range(0, len(parts), 2):
        pair = parts[first : first + 2]
        _move(pair[0], pair[1] if len(pair) > 1 else pair[0][..., :0].contiguous(), sources, destinations, lengths)


def _move(keys: Tensor, values: Tensor, sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    layers, slots = keys.shape[:2]
    sequences, width = sources.shape
    assert width <= 64, "a path holds at most 64 nodes"
    whole = (keys, values, sources, destinations, lengths)
    assert all(tensor.is_contiguous() for tensor in whole), "rows lie one behind the other"
    keys, values = _as_words(keys, values)
    key_width, value_width = (math.prod(tensor.shape[2:]) for tensor in (keys, values))
    pieces = triton.cdiv(key_width, _COLUMNS) + triton.cdiv(value_width, _COLUMNS)
    if sequences:
        move_columns[(pieces, layers, sequences)](
            keys,
            values,
            sources,
            destinations,
            lengths,
            slots,
            width,
            key_width,
            value_width,
            triton.next_power_of_2(width),
            _COLUMNS,
            **chained(),
        )


def _as_words(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory as integers, the widest that divide both kinds of head: moving looks at no number."""
    sizes = [tensor.shape[-1] * tensor.element_size() for tensor in (keys, values)]
    kind = _WORDS[math.gcd(4, *sizes)]
    return keys.view(kind), values.view(kind) if values.numel() else values.to(kind)
