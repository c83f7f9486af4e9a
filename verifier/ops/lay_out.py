"""Where the rows of a step go: positions and slots, from lengths and page tables, without a number on the host."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import compiled


def lay_out(
    tables: Tensor, page_size: int, lengths: Tensor, depths: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """The position and the slot of each of the S * N rows of S sequences.

    tables: int32[S, P], the page ids of each sequence. lengths: int32[S], the committed tokens. depths: int32[S, N], or
    [N] for all sequences, how far below the root each row is. nodes: int64[S, N], the row's place behind the committed
    ones. live: int32[S], 0 for a sequence that is only padding: its rows are at position 0, in slot 0 of page 0.
    The pages of a live sequence reach as far as its rows. Returns positions and slots, int64[S * N].
    """
    if tables.is_cuda:
        from foresay.verifier.ops.kernels import lay_out as kernels

        return kernels.lay_out(tables, page_size, lengths, depths, nodes, live)
    if compiled(lengths):
        from foresay.verifier.ops.kernels.cpu import recent as of_cpu

        return of_cpu.lay_out(tables, page_size, lengths, depths, nodes, live)
    real = (live != 0)[:, None]
    start = lengths.long()[:, None]
    places = (start + nodes).where(real, 0)
    slots = tables.long().gather(1, places // page_size) * page_size + places % page_size
    return (start + depths).where(real, 0).flatten(), slots.where(real, 0).flatten()
