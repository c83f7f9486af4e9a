"""Where the rows of a step go: positions and slots, from lengths and page tables, without a number on the host."""

from __future__ import annotations

from torch import Tensor

from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import launch, new, on_triton


@op()
def lay_out(
    tables: Tensor, page_size: int, lengths: Tensor, depths: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """The position and the slot of each of the S * N rows of S sequences.

    tables: int32[S, P], the page ids of each sequence. lengths: int32[S], the committed tokens. depths: int32[S, N], or
    [N] for all sequences, how far below the root each row is. nodes: int64[S, N], the row's place behind the committed
    ones. live: int32[S], 0 for a sequence that is only padding: its rows are at position 0, in slot 0 of page 0.
    The pages of a live sequence reach as far as its rows. Returns positions and slots, int64[S * N].
    """
    real = (live != 0)[:, None]
    start = lengths.long()[:, None]
    places = (start + nodes).where(real, 0)
    slots = tables.long().gather(1, places // page_size) * page_size + places % page_size
    return (start + depths).where(real, 0).flatten(), slots.where(real, 0).flatten()


@lay_out.kernel
def _lay_out(
    tables: Tensor, page_size: int, lengths: Tensor, depths: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    rows, width, together = nodes.numel(), nodes.shape[1], 128 if on_triton(nodes) else 1
    positions, slots = new((rows,), nodes), new((rows,), nodes)
    launch(
        "trees.lay_out_rows", (-(-rows // together),),
        (tables, lengths, depths, nodes, live, positions, slots,
         rows, tables.shape[1], width, width if depths.dim() == 2 else 0),
        {"PAGE_SIZE": page_size, "ROWS": together},
    )  # fmt: skip
    return positions, slots
