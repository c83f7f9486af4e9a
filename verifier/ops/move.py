"""Moving accepted rows down, in every layer and for several sequences at once, without a number on the host.

:func:`foresay.kvpaging.ops.move_rows` takes as many rows as its index tensors name. Inside a captured graph the tensors
have one size, and how many rows count is known to the device alone. The kernel is on this floor and not in kvpaging,
since only the graph of a step has such a count: kvpaging keeps to torch and numpy, and its own op runs on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foresay.kvpaging.ops import move_rows
from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import launch, on_triton, padded

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@op()
def move_paths(parts: tuple[Tensor, ...], sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """Move the first ``lengths[b]`` rows of each sequence, in every layer, in place: all are read, then written.

    parts: of a store, [L, slots, ..] each, contiguous, of width 0 too. sources, destinations: int64[B, N], slots, N
    at most 64; what is behind a sequence's length is not looked at. lengths: int64[B]. A sequence's destinations are
    distinct and may be its sources; no two sequences share a slot.
    """
    for row, length in enumerate(lengths.tolist()):
        move_rows(parts, sources[row, :length], destinations[row, :length])


@move_paths.kernel
def _move_paths(parts: tuple[Tensor, ...], sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """A launch for keys and values, one for their scales if there are any."""
    sequences, width = sources.shape
    assert width <= 64, "a path holds at most 64 nodes"
    # Of a row that a program moves: 64 rows of so many words take 32 registers in each of 128 threads.
    columns, rows = (64, padded(width)) if on_triton(sources) else (256, 64)
    for pair in (parts[first : first + 2] for first in range(0, len(parts), 2)):
        keys, *values = _as_words([each for each in pair if each.numel()] or list(pair[:1]))
        widths = [math.prod(each.shape[2:]) for each in (keys, *values)]
        grid = sequences, sum(-(-each // columns) for each in widths), len(keys)
        launch(
            "trees.move_columns", grid,
            (keys, values[0] if values else keys, sources, destinations, lengths, keys.shape[1], width),
            {"KEY_WIDTH": widths[0], "VALUE_WIDTH": sum(widths[1:]), "ROWS": rows, "COLUMNS": columns}, rows=True,
        )  # fmt: skip


def _as_words(pair: list[Tensor]) -> list[Tensor]:
    """The same memory as integers, the widest that divide both kinds of head: moving looks at no number."""
    kind = _WORDS[math.gcd(4, *(each.shape[-1] * each.element_size() for each in pair))]
    return [each.view(kind) for each in pair]
