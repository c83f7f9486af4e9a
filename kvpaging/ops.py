"""Writing and moving rows of keys and values. Torch on every device; the contract is what a kernel has to meet."""

from __future__ import annotations

from torch import Tensor


def store_rows(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write one layer's new rows into their slots, in place.

    keys, values: [slots, G, D], one layer of a store. slots: int64 [N], distinct but for padding rows, which all go to
    slots of page 0. k, v: [N, G, D], of the store's dtype.
    """
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def move_rows(keys: Tensor, values: Tensor, source: Tensor, destination: Tensor) -> None:
    """Move rows between slots in every layer, in place: first all are read, then all are written.

    keys, values: [L, slots, G, D]. source, destination: int64 [N], destinations distinct. A destination may be another
    row's source, as it is when an accepted path 0, 2, 5 is moved down to 0, 1, 2.
    """
    if source.numel():
        keys.index_copy_(1, destination, keys.index_select(1, source))
        values.index_copy_(1, destination, values.index_select(1, source))
