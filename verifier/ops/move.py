"""Moving accepted rows down, in every layer and for several sequences at once, without a number on the host.

:func:`foresay.kvpaging.ops.move_rows` takes as many rows as its index tensors name. Inside a captured graph the tensors
have one size, and how many rows count is known to the device alone. The kernel is on this floor and not in kvpaging,
since only the graph of a step has such a count: kvpaging keeps to torch and numpy, and its own op runs on any device.
"""

from __future__ import annotations

from torch import Tensor

from foresay.kvpaging.ops import move_rows
from foresay.verifier.ops.eager import compiled


def move_paths(parts: tuple[Tensor, ...], sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """Move the first ``lengths[b]`` rows of each sequence, in every layer, in place: all are read, then written.

    parts: of a store, [L, slots, ..] each, contiguous, of width 0 too. sources, destinations: int64[B, N], slots, N
    at most 64; what is behind a sequence's length is not looked at. lengths: int64[B]. A sequence's destinations are
    distinct and may be its sources; no two sequences share a slot.
    """
    if parts[0].is_cuda:
        from foresay.verifier.ops.kernels import move as kernels

        kernels.move_paths(parts, sources, destinations, lengths)
        return
    if compiled(parts[0]):
        from foresay.verifier.ops.kernels.cpu import accept as of_cpu

        of_cpu.move_paths(parts, sources, destinations, lengths)
        return
    for row, length in enumerate(lengths.tolist()):
        move_rows(parts, sources[row, :length], destinations[row, :length])
