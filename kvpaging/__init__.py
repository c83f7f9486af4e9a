"""Paged keys and values: one pool of page ids, one page table per sequence, one prefix index, one store per model.

`PagePool` counts references to page ids; a `PageTable` maps a sequence's positions to slots (`page * page_size +
offset`) and carries its committed length; a `PrefixIndex` finds full pages of earlier text again; each `KVStore`
holds one model's key and value rows in those slots and knows by a fill mark per page which of them are valid. Layers
that see a window keep the end of each text alone, in `WindowPages`. `DiskPages` keeps pages for later engines.
Rollback is lowering a length, forking is counting references, and a shared page is copied before a sequence writes
behind its own text.
"""

from __future__ import annotations

from foresay.kvpaging.disk import DiskPages
from foresay.kvpaging.pool import OutOfPages, PagePool
from foresay.kvpaging.prefix import PrefixIndex
from foresay.kvpaging.states import LayerStates, StatePages, StateStore
from foresay.kvpaging.store import KVArrays, KVStore, move_rows, store_rows
from foresay.kvpaging.table import PageTable
from foresay.kvpaging.window import WindowPages

__all__ = [
    "DiskPages",
    "KVArrays",
    "KVStore",
    "LayerStates",
    "OutOfPages",
    "PagePool",
    "PageTable",
    "PrefixIndex",
    "StatePages",
    "StateStore",
    "WindowPages",
    "move_rows",
    "store_rows",
]
