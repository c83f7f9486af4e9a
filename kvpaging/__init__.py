"""Paged keys and values: one pool of page ids, one page table per sequence, one prefix index, one store per model.

`PagePool` counts references to page ids; a `PageTable` maps a sequence's positions to slots (`page * page_size +
offset`) and holds its committed length; a `PrefixIndex` finds full pages of earlier text; each `KVStore` holds one
model's key and value rows in those slots and knows by a fill mark per page which of them are valid. Layers with
sliding-window attention keep only the end of each text, in `WindowPages`. `DiskPages` keeps pages for later engines.
Rollback lowers a length, forking counts references, and a shared page is copied before a sequence writes past its
text.
"""

from __future__ import annotations

from foresay.kvpaging.disk import DiskPages
from foresay.kvpaging.pool import PagePool
from foresay.kvpaging.prefix import PrefixIndex
from foresay.kvpaging.states import LayerStates, StatePages, StateStore
from foresay.kvpaging.store import KVArrays, KVStore, move_rows, store_rows
from foresay.kvpaging.table import PageTable
from foresay.kvpaging.verbs import OutOfPages, Store
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
    "Store",
    "WindowPages",
    "move_rows",
    "store_rows",
]
