"""A target without weights: its tensors have shapes and types, but no numbers, so that nothing is read or held.

The loaders of heads look at a target's shape alone, and put their own tensors where the target's are. On this one they
do all that they do on the real one, and what does not fit is refused in the same words.
"""

from __future__ import annotations

import torch

from kvpaging import KVStore, PagePool
from verifier.model.config import ModelConfig
from verifier.model.decoder import Decoder
from verifier.model.weights import allocate
from verifier.paged_model import PagedModel


def outline(model: ModelConfig, dtype: str) -> PagedModel:
    """The target on torch's meta device; it cannot be run."""
    kind: torch.dtype = getattr(torch, dtype)
    decoder = Decoder(model, allocate(model, kind, "meta"), max_positions=1)
    store = KVStore(PagePool(2, 1), model.num_layers, model.num_kv_heads, model.head_dim, kind, "meta")
    return PagedModel(decoder, store, model.max_positions)
