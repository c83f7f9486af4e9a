"""Where an engine runs, the CPU or one GPU; and the context of loading models: one engine's settings, target, device
and pages.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from foresay.kvpaging import KVStore, PagePool, StatePages
from foresay.server.engine.parameters import Device, kv_kind, state_pages, wanted_rows
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun
from foresay.spec.errors import ForesayError
from foresay.spec.protocols import Drafter
from foresay.spec.tree import MAX_NODES
from foresay.verifier.forward_batch import Sizes
from foresay.verifier.model import weight_cache
from foresay.verifier.model.config import ModelConfig, kv_shapes, window_shapes
from foresay.verifier.model.decoder import Decoder, Packed
from foresay.verifier.model.weights import Where, load, table_of
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu.walk import unsupported


def find_device(config: EngineConfig) -> Device:
    """The device that ``--device`` names; ``auto`` is a GPU if there is one.

    Raises CannotRun for a missing GPU, a share of GPU memory without a GPU, and for a processor without kernels.
    """
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise CannotRun("--device cuda: this machine has no CUDA device that PyTorch can use", "--device cpu runs here")
    if config.device != "cpu" and there:  # the first GPU that CUDA shows to this process
        free, total = torch.cuda.mem_get_info(0)
        return Device("cuda:0", total, free, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    if config.gpu_memory_utilization is not None:
        raise CannotRun(
            f"--gpu-memory-utilization {config.gpu_memory_utilization:g}: the engine runs on the CPU",
            "leave the flag out; --kv-tokens sizes the KV cache there",
        )
    if reason := unsupported():
        raise CannotRun(f"--device {config.device}: {reason}", "only --device cuda is left, and it needs a GPU")
    return Device.cpu()


# -- what is loaded ----------------------------------------------------------------------------------------------------


#: What ``--kv-dtype`` names.
KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class LoadProgress(Protocol):
    """Called while the engine loads: with the current phase, and the share done (0 to 1, None if unknown)."""

    def __call__(self, phase: str, share: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadContext:
    """target: the target's directory. model: its configuration. length: the longest text, prompt and output together.
    dtype: of all weights. rounds: whether activations become 8 bits where weights have kernels for it. report: called
    with progress. unkept: packed weights yet to be kept on disk, and their keys. made: the loaded drafters, by their
    names in ``--draft``. away: the target's layers whose experts stay in the host's memory; hosted: whether its table
    of embeddings per layer does."""

    config: EngineConfig
    target: Path
    model: ModelConfig
    dtype: str
    length: int
    device: Device
    pool: PagePool
    rounds: bool
    report: LoadProgress
    unkept: list[tuple[str, Packed]] = field(default_factory=list)
    made: dict[str, Drafter] = field(default_factory=dict)
    away: Sequence[int] = ()
    hosted: bool = False

    def paged_model(
        self,
        role: str,
        directory: Path,
        model: ModelConfig,
        columns: torch.Tensor | None = None,
        kv_dtype: str = "auto",
    ) -> ModelRunner:
        """A model with a KV cache on the engine's pages.

        role: its name in progress messages. columns: int64[V'], the only tokens whose logits are needed; None: all.
        kv_dtype: as ``--kv-dtype`` names it.
        """
        decoder = Decoder(model, self.packed(role, directory, model, columns), self.length + MAX_NODES)
        kept = KV_DTYPES.get(kv_kind(model, kv_dtype), decoder.dtype)
        # A draft model may pause and catch up on a text later, so it keeps everything.
        shapes = window_shapes(model) if role == "target" else kv_shapes(model)
        apart = role != "target" and model.stack.recurrence is not None
        states = StatePages(*state_pages(self.config, self.device.is_gpu), self.pool.page_size) if apart else None
        store = KVStore(self.pool, shapes, kept, decoder.device, states)
        most, wanted = self.config.max_seqs, wanted_rows(self.config) if role == "target" else 1
        room = Sizes(self.device.chunk + wanted, most, self.pool.pages_for(self.length), wanted)
        return ModelRunner(decoder, store, self.length, room)

    def packed(self, role: str, directory: Path, model: ModelConfig, columns: torch.Tensor | None = None) -> Packed:
        """The weights as an earlier start packed them, else read and packed."""
        key, dtype = self._key(directory, model, columns), getattr(torch, self.dtype)
        # The target's copy ("draft") reads the target's.
        table: dict[str, Where] = {"target": "host" if self.hosted else "here", "draft": "file"}
        if key is not None and (found := weight_cache.load(key)) is not None:
            found.table = None if table.get(role) == "file" else table_of(directory, model, dtype)
            return found
        made = model.quantization is not None and model.quantization.is_on_the_fly
        reading = f"{'quantising' if made else 'reading'} the {role}'s weights"
        self.report(reading)
        away = self.away if role == "target" else ()
        reported = partial(self.report, reading)
        weights = load(directory, model, dtype, self.device.name, reported, away, table.get(role, "here"))
        if columns is not None:
            weights.lm_head = weights.lm_head[columns.to(weights.lm_head.device)]
        self.report(f"packing the {role}'s weights")
        packed = Packed.pack(model, weights, self.rounds, bool(away))
        if key is not None and key == self._key(directory, model, columns):  # the files did not change meanwhile
            self.unkept.append((key, packed))
        return packed

    def _key(self, directory: Path, model: ModelConfig, columns: torch.Tensor | None) -> str | None:
        """The key under which the packed weights are kept; None if they are not."""
        if not self.config.weight_cache or self.device.is_gpu:
            return None
        chosen = None if columns is None else columns.numpy().tobytes()
        with suppress(OSError, ForesayError):  # the loader reports it
            return weight_cache.key_of(directory, model, self.dtype, self.rounds, chosen)
        return None


def give_back() -> None:
    """Return memory freed after loading to the system: glibc would keep it, 470 MiB for a 1B model in int4."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
