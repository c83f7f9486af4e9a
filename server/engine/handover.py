"""What an engine takes over from earlier starts on this machine: KV on disk (how much, in which folder, and what the
bytes of a page depend on besides its text), and whether it is exact.

Exactness is probed at this start, or was at an earlier start of the same engine, and then again while no request runs.

The probe takes longer than everything else in a start with cached kernels and weights. Its result is cached under a key
of all that it depends on: settings, the model's files, threads, the processor, torch and our sources. A result is valid
for a day, only "exact" is cached, and if a later probe contradicts it the engine process ends: the next one probes
before it is ready.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch

from foresay.kvpaging import DiskPages, KVStore, PagePool, WindowPages
from foresay.server.engine.device import Device, LoadContext
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.parameters import kv_kind
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.units import bytes_in_words, bytes_of, moment
from foresay.verifier.model import kept_weights
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu import kept, threads
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.probe import EQUAL, Exactness, probe, probing

#: The default size: at most this many bytes, and this share of the free disk.
_MOST, _SHARE = 8 << 30, 0.1


def folder() -> Path:
    """The folder of KV on disk. RuntimeError if the home directory is unknown."""
    return kept.directory("kv")


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
    key, drafting = _key(loading), repr(_drafting(loading.config, drafts))
    needed, others = kept.key_of(key, drafting, "features"), kept.key_of(key, drafting)
    keyed = {key: [target.store]}
    for store in (each for each in stores if each is not target.store):
        keyed.setdefault(needed if store.drafts else others, []).append(store)
    try:
        return DiskPages(folder(), keyed, loading.pool, size), note
    except (OSError, RuntimeError) as error:
        return None, f"off ({error})"


def _key(loading: LoadContext) -> str:
    """A key of all that any bit of a page depends on: the model's files and configuration, including rotary embedding,
    the length that may select it, types, kernels, threads and the processor; and of which layers a page has rows: those
    with a window may have pages of their own."""
    kind, config = kv_kind(loading.model, loading.config.kv_dtype), loading.config
    how = loading.dtype, loading.rounds, kind, loading.length, config.page_size, threads.wanted(), str(loading.device)
    windows = loading.pool.store(WindowPages) is not None
    return kept_weights.key_of(loading.target, loading.model, "kv", *how, windows)


def _drafting(config: EngineConfig, drafts: Sequence[Entry]) -> tuple[object, ...]:
    """What drafters' pages depend on besides the target's. Never affects which tokens are emitted."""
    directories = [one.directory for each in drafts if isinstance(one := each.spared, FromFiles)]
    files = [(str(path), *kept.seen(path)) for each in directories for path in sorted(each.iterdir())]
    return config.draft, config.draft_quantize, config.draft_kv_dtype, files


# -- exactness ---------------------------------------------------------------------------------------------------------

#: Seconds for which a result is valid; and idle seconds before it is probed again, doubled each time a trial is
#: interrupted.
_LASTS, _QUIET = 86400.0, 10.0


class NotExact(RuntimeError):
    """Rows differ, although they did not at an earlier start."""


class Witness:
    """The exactness of one engine process. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._quiet_since, self._pause = clock, clock(), _QUIET
        self._key = ""
        self._begin: Callable[[], Generator[None, None, Exactness]] | None = None
        self._passes: Generator[None, None, Exactness] | None = None

    def exactness(self, of: str, model: ModelRunner, pool: PagePool, report: Callable[[str], None]) -> Exactness:
        """The cached result, else the probe's. of: a digest of what it depends on, besides the machine and the code."""
        self._key = kept.key_of("probe", of, repr(Processor.here()), torch.__version__, kept.sources())
        if (when := self._known()) is not None:
            own = ModelRunner(model.decoder, model.store, model.max_positions)  # keeps the recordings of requests
            self._begin = lambda: probing(own, pool)
            return Exactness(True, f"{EQUAL} (probed at an earlier start, {moment(when)[:16].replace('T', ' ')} UTC)")
        report("probing exactness")
        return self._noted(probe(model, pool))

    def _known(self) -> float | None:
        """When rows were found to be equal; None if no valid result is cached."""
        try:
            when = float(kept.find(self._key) or b"")
        except ValueError:
            return None
        return when if 0 <= self._clock() - when < _LASTS else None

    def _noted(self, found: Exactness) -> Exactness:
        kept.keep(self._key, str(self._clock()).encode() if found.exact else b"")
        return found

    # -- trials while no request runs -----------------------------------------------------------------------------

    @property
    def going(self) -> bool:
        """Whether a trial is in progress."""
        return self._passes is not None

    def rest(self, requested: bool) -> None:
        """The engine has something else to do: abort a trial, which leaves nothing behind. requested: whether that is a
        request."""
        if requested or self._passes is not None:
            self._quiet_since = self._clock()
        if self._passes is not None:
            self._passes.close()
            self._passes, self._pause = None, 2 * self._pause

    def go_on(self) -> None:
        """Run one pass of the trial, if it is time. Raises :class:`NotExact` if the last one shows that rows differ."""
        if self._begin is None or self._clock() - self._quiet_since < self._pause:
            return
        self._passes = self._passes or self._begin()
        try:
            next(self._passes)
        except StopIteration as done:
            self._begin = self._passes = None
            found = self._noted(done.value)
            if not found.exact:
                raise NotExact(f"{found.reason}, although they did not at an earlier start") from None
