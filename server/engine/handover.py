"""What an engine takes over from earlier starts on this machine: KV on disk (how much, in which folder, and what the
bytes of a page depend on besides its text), and whether it is exact. And what a text depends on besides its request:
engines with one identity write the same text for one request and seed.

Exactness is probed at this start, or was at an earlier start of the same engine. The probe takes longer than everything
else in a start with cached kernels and weights. Its result is cached under a key of all that it depends on: settings,
the model's files, threads, the processor, torch and our sources. A result is valid for a day; only "exact" is cached.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from foresay.kvpaging import DiskPages, KVStore, PagePool, WindowPages
from foresay.server.engine.costs import keep, recalled
from foresay.server.engine.device import LoadContext
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.parameters import PORTABLE, Device, kv_kind
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.units import bytes_in_words, bytes_of, moment
from foresay.verifier.model import weight_cache
from foresay.verifier.model.checkpoint import Checkpoint
from foresay.verifier.model.gguf.file import LINK, parts_of
from foresay.verifier.model.rope_config import LongScaling
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu import kernel_cache, threads
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.probe import EQUAL, Exactness, probe

#: The default size: at most this many bytes, and this share of the free disk.
_MOST, _SHARE = 8 << 30, 0.1


def folder() -> Path:
    """The folder of KV on disk. RuntimeError if the home directory is unknown."""
    return kernel_cache.directory("kv")


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
    needed, others = kernel_cache.key_of(key, drafting, "features"), kernel_cache.key_of(key, drafting)
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
    how = loading.dtype, loading.rounds, kind, loading.length, config.page_size, threads.num_threads()
    where = str(loading.device), loading.pool.find_store(WindowPages) is not None
    return weight_cache.key_of(loading.target, loading.model, "kv", *how, *where)


def _drafting(config: EngineConfig, drafts: Sequence[Entry]) -> tuple[object, ...]:
    """What drafters' pages depend on besides the target's. Never affects which tokens are emitted."""
    directories = [one.directory for each in drafts if isinstance(one := each.spared, FromFiles)]
    files = [(str(path), *kernel_cache.file_id(path)) for each in directories for path in sorted(each.iterdir())]
    return config.draft, config.draft_quantize, config.draft_kv_dtype, files


# -- exactness ---------------------------------------------------------------------------------------------------------


def exactness_of(of: str, model: ModelRunner, pool: PagePool, report: Callable[[str], None]) -> Exactness:
    """The cached result, else the probe's. of: a digest of what it depends on, besides the machine and the code."""
    key = kernel_cache.key_of("probe", of, repr(Processor.here()), torch.__version__, kernel_cache.sources())
    if (known := recalled(key, bool)) is not None:
        when = moment(known[0])[:16].replace("T", " ")
        return Exactness(True, f"{EQUAL} (probed at an earlier start, {when} UTC)")
    report("probing exactness")
    found = probe(model, pool)
    keep(key, True if found.exact else None)
    return found


# -- identity ----------------------------------------------------------------------------------------------------------


#: The number of the order of sums, roundings and draws (docs/same-tokens.md#the-bits) where bits are not portable: one
#: more when a change of ours changes the tokens that anybody's model writes.
RULES = 2
#: Which files are what, besides the weights; all others of a model change no token.
_PARTS = {
    "tokenizer": ("tokenizer*", "tekken*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*"),
    "settings": ("config.json", "generation_config.json"),
}
#: A hub's cache names a large file by its sha256.
_HUB = 64


def identity(loading: LoadContext, activations: str, bits: str, exact: bool) -> dict[str, str]:
    """The parts, each as a string. activations: the type that weights are multiplied with. bits: the class. Weights are
    read once for each version of a file, unless the hub's cache names it by its content."""
    loading.report("reading the fingerprint")
    config, kind, directory = loading.config, kv_kind(loading.model, loading.config.kv_dtype), loading.target
    keys = loading.dtype if kind == "auto" else kind
    numbers = f"{loading.dtype}, activations {activations}, kv {keys}, quantize {config.quantize or 'none'}"
    for scaling in dict.fromkeys(rope.parameters for rope in loading.model.ropes if rope is not None):
        if isinstance(scaling, LongScaling):  # which of its factors are used follows from the longest text
            numbers += f", {'long' if loading.length > scaling.original_positions else 'short'} texts"
    link = directory / LINK
    weights = parts_of(link.resolve()) if link.is_symlink() else Checkpoint.open(directory).files
    claim = "" if exact else ", not exact"
    found = {part: [path for each in patterns for path in directory.glob(each)] for part, patterns in _PARTS.items()}
    return {
        "weights": _digest(weights),
        **{part: _digest(files) for part, files in found.items()},
        "numbers": numbers,
        "arithmetic": f"{_arithmetic(loading, bits)}{claim}",
    }


def _arithmetic(loading: LoadContext, bits: str) -> str:
    if bits == PORTABLE:
        return bits
    here, on = Processor.here(), loading.device.model
    if not loading.device.is_gpu:
        on = f"{here.name}{' with dot products of bf16' if here.multiplies_bf16 else ''}"
    return f"{bits}, rules {RULES} on {on}, torch {torch.__version__}"


def _digest(files: Iterable[Path]) -> str:
    """Of contents, in the order of the files' names; of a single file the name says nothing."""
    ordered = sorted(set(files))
    contents = [f"{path.name if len(ordered) > 1 else ''}={_content(path.resolve())}" for path in ordered]
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()


def _content(path: Path) -> str:
    """The sha256 of a file's content; a large one is read once for each version of it."""
    if len(path.name) == _HUB and path.parent.name == "blobs":
        return path.name
    key = kernel_cache.key_of("content", str(path), repr(kernel_cache.file_id(path)))
    if (known := kernel_cache.load(key)) is not None:
        return known.decode()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    kernel_cache.save(key, found.encode())
    return found
