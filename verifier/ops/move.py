"""Moving accepted rows down, in every layer and for several sequences at once, without a number on the host.

:func:`kvpaging.ops.move_rows` takes as many rows as its index tensors name. Inside a captured graph the tensors have
one size, and how many rows count is known to the device alone. The kernel is on this floor and not in kvpaging, since
only the graph of a step has such a count: kvpaging keeps to torch and numpy, and its own op runs on any device.
"""

from __future__ import annotations

from torch import Tensor

from kvpaging.ops import move_rows
from verifier.ops.eager import compiled


def move_paths(keys: Tensor, values: Tensor, sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """Move the first ``lengths[b]`` rows of each sequence, in every layer, in place: all are read, then written.

    keys, values: [L, slots, G, D], contiguous; values may be of width 0. sources, destinations: int64[B, N], slots, N
    at most 64; what is behind a sequence's length is not looked at. lengths: int64[B]. A sequence's destinations are
    distinct and may be its sources; no two sequences share a slot.
    """
    if keys.is_cuda:
        from verifier.ops.kernels import move as kernels

        kernels.move_paths(keys, values, sources, destinations, lengths)
        return
    if compiled(keys):
        from verifier.ops.kernels.cpu import accept as of_cpu

        of_cpu.move_paths(keys, values, sources, destinations, lengths)
        return
    for row, length in enumerate(lengths.tolist()):
        move_rows(keys, values, sources[row, :length], destinations[row, :length])
