"""What models are loaded for and into: one engine's settings, target, device and pages."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kvpaging import KVStore, PagePool
from server.engine.device import Device
from server.engine.parameters import kv_kind
from server.settings.config import EngineConfig
from spec.tree import MAX_NODES
from verifier.model.config import ModelConfig
from verifier.model.decoder import Decoder
from verifier.model.weights import load
from verifier.paged_model import PagedModel

#: What ``--kv-dtype`` names.
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Progress(Protocol):
    """Told while the engine loads: what is being done now, and how much of it is done (0 to 1) where that is known."""

    def __call__(self, phase: str, share: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Loading:
    """target: the target's directory. model: its configuration. length: the longest text, prompt and output together.
    dtype: of all weights. say: told what is done now."""

    config: EngineConfig
    target: Path
    model: ModelConfig
    dtype: str
    length: int
    device: Device
    pool: PagePool
    say: Progress

    def paged_model(
        self,
        role: str,
        directory: Path,
        model: ModelConfig,
        columns: torch.Tensor | None = None,
        kv_dtype: str = "auto",
    ) -> PagedModel:
        """A model with a KV cache on the engine's pages.

        role: what it is called while it loads. columns: int64[V'], the only tokens of which logits are wanted; None for
        all. kv_dtype: as ``--kv-dtype`` names it.
        """
        made = model.quantization is not None and model.quantization.is_made
        reading = f"{'quantising' if made else 'reading'} the {role}'s weights"
        self.say(reading)
        dtype: torch.dtype = getattr(torch, self.dtype)
        weights = load(directory, model, dtype, self.device.name, lambda share: self.say(reading, share))
        if columns is not None:
            weights.lm_head = weights.lm_head[columns.to(weights.lm_head.device)]
        self.say(f"packing the {role}'s weights")
        decoder = Decoder(model, weights, self.length + MAX_NODES)
        kept = KV_DTYPES.get(kv_kind(model, kv_dtype), decoder.dtype)
        store = KVStore(self.pool, model.num_layers, model.num_kv_heads, model.head_dim, kept, decoder.device)
        return PagedModel(decoder, store, self.length)


def give_back() -> None:
    """Give the system what loading needed and freed: glibc would keep it, 470 MiB beside a 1B model in int4."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
