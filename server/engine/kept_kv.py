"""KV on disk: how much, in which folder, and what the bytes of a page depend on besides its text."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from foresay.kvpaging import DiskPages, KVStore
from foresay.server.engine.device import Device, LoadContext
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.parameters import kv_kind
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.units import bytes_in_words, bytes_of
from foresay.verifier.model import kept_weights
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu import kept, threads

#: The default size: at most this many bytes, and this share of the free disk.
_MOST, _SHARE = 8 << 30, 0.1


def folder() -> Path:
    """The folder of KV on disk. RuntimeError if the home directory is unknown."""
    return kept.directory().with_name("kv")


def room(config: EngineConfig, device: Device) -> tuple[int, str]:
    """The most bytes it may take, 0 for none; and a description with its folder and how to switch it off."""
    try:
        size, note = _size(config, device)
        return size, f"{note} in {folder()}, readable by you alone (--kv-disk off: none)" if size else note
    except (OSError, RuntimeError) as error:
        return 0, f"off ({error})"


def _size(config: EngineConfig, device: Device) -> tuple[int, str]:
    if config.kv_disk == "off" or not config.prefix_cache:
        return 0, "off"
    if config.kv_disk is not None:
        return (size := bytes_of(config.kv_disk)), f"up to {bytes_in_words(size)}"
    if device.is_gpu:
        return 0, "off (on a GPU only if a size is given)"
    there = next(each for each in folder().parents if each.exists())
    size = min(_MOST, int(_SHARE * shutil.disk_usage(there).free))
    return size, f"up to {bytes_in_words(size)}, by the free disk," if size else "off (the disk is full)"


def opened(loading: LoadContext, target: ModelRunner, drafts: Sequence[Entry]) -> tuple[DiskPages | None, str]:
    """The store on disk for an engine's pages, once all its KV stores exist, None for none; and a description."""
    size, note = room(loading.config, loading.device)
    if not size:
        return None, note
    stores = [store for store in loading.pool.stores if isinstance(store, KVStore)]
    own, others = (
        [store for store in stores if store is target.store],
        [store for store in stores if store is not target.store],
    )
    key = _key(loading)
    keyed = {key: own} | ({kept.key_of(key, repr(_drafting(loading.config, drafts))): others} if others else {})
    try:
        found = DiskPages(folder(), keyed, loading.pool, size)
        if not kept.is_ours(folder().stat()):
            return None, f"off (other users may write to {folder()})"
    except (OSError, RuntimeError) as error:
        return None, f"off ({error})"
    return found, note


def _key(loading: LoadContext) -> str:
    """A key of all that any bit of a page depends on: the model's files and configuration, including rotary embedding,
    the length that may select it, types, kernels, threads and the processor."""
    kind, config = kv_kind(loading.model, loading.config.kv_dtype), loading.config
    how = loading.dtype, loading.rounds, kind, loading.length, config.page_size, threads.wanted(), str(loading.device)
    return kept_weights.key_of(loading.target, loading.model, "kv", *how)


def _drafting(config: EngineConfig, drafts: Sequence[Entry]) -> tuple[object, ...]:
    """What drafters' pages depend on besides the target's. Never affects which tokens are emitted."""
    directories = [one.directory for each in drafts if isinstance(one := each.spared, FromFiles)]
    files = [(str(path), *kept.seen(path)) for each in directories for path in sorted(each.iterdir())]
    return config.draft, config.draft_quantize, config.draft_kv_dtype, config.draft_layers, files
