"""KV on disk: how much of it, where, and what the bytes of a page follow from beside its text."""

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

#: Where no size is given: bytes, and the share of what is free, at most.
_MOST, _SHARE = 8 << 30, 0.1


def folder() -> Path:
    """Where it is kept. RuntimeError if nobody knows where home is."""
    return kept.directory().with_name("kv")


def room(config: EngineConfig, device: Device) -> tuple[int, str]:
    """The bytes that it may take, 0 for none; and that in words, with where it lies and how it is switched off."""
    try:
        size, told = _size(config, device)
        return size, f"{told} in {folder()}, readable by you alone (--kv-disk off: none)" if size else told
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
    return size, f"up to {bytes_in_words(size)}, by the free disk,"


def opened(loading: LoadContext, target: ModelRunner, drafts: Sequence[Entry]) -> tuple[DiskPages | None, str]:
    """What keeps the pages of an engine, whose stores are all there; None if none are kept. And that in words."""
    size, told = room(loading.config, loading.device)
    if not size:
        return None, told
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
    return found, told


def _key(loading: LoadContext) -> str:
    """Another where any bit of a page might be another: by the model's files and its configuration, rotary embedding
    included, the length that this may be chosen by, types, kernels, threads and the processor."""
    kind, config = kv_kind(loading.model, loading.config.kv_dtype), loading.config
    how = loading.dtype, loading.rounds, kind, loading.length, config.page_size, threads.wanted(), str(loading.device)
    return kept_weights.key_of(loading.target, loading.model, "kv", *how)


def _drafting(config: EngineConfig, drafts: Sequence[Entry]) -> tuple[object, ...]:
    """What the pages of those who draft follow from beside the target's. It never makes a wrong token."""
    directories = [one.directory for one in drafts if isinstance(one, FromFiles)]
    files = [(str(path), *kept.seen(path)) for each in directories for path in sorted(each.iterdir())]
    return config.draft, config.draft_quantize, config.draft_kv_dtype, config.draft_layers, files
