"""NaN wherever a store may not be read, and what is in a recurrent state."""

from __future__ import annotations

import torch

from foresay.kvpaging import KVStore, StateStore
from foresay.kvpaging.pool import PADDING_PAGE
from foresay.kvpaging.states import TextState


def poison_store(store: KVStore) -> None:
    """NaN in every row that must not be read (in its scales, if quantised), that is all but page 0 and the marked rows
    of used pages; and in recurrent states."""
    used = torch.tensor([mark if store.pool.references(page) else 0 for page, mark in enumerate(store.marks)])
    for arrays in store.arrays:
        marks = torch.zeros(arrays.pages.num_pages, dtype=used.dtype)
        marks[arrays.pages.page_map] = used
        marks[PADDING_PAGE] = store.pool.page_size
        unread = torch.arange(store.pool.page_size) >= marks[:, None]
        rows = unread.flatten().nonzero()[:, 0].to(store.device)
        for part in arrays.tensors if arrays.scales is None else (arrays.scales,):
            part.index_fill_(1, rows, torch.nan)
    if store.states is not None:
        poison_states(store.states)


def poison_states(store: StateStore) -> None:
    """NaN in every page without a reference, and in all records."""
    free = [page for page in range(1, store.pages.num_pages) if not store.pages._references[page]]
    for part in store.layers[:2]:
        part[:, free] = torch.nan
    for part in store.layers[2:]:
        part.fill_(torch.nan)


def parts_of(store: StateStore, text: TextState) -> list[torch.Tensor]:
    """States and tails of a text; zeros where it has none."""
    return [part[:, text.page] * (text.page != 0) for part in store.layers[:2]]
