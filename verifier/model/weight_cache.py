"""Packed weights on disk, so that a second start need not read and pack them again.

A file's name is a hash of everything its numbers depend on: the weight files (size, times, inode, device), the
configuration, the kind of packing, the processor, torch, and the state of our sources. The weight files themselves are
not read: hashing them would take as long as packing, and any write to one changes its times.

::

    magic, digest, size of the header
    header          JSON: dtype, shape and offset of each tensor; the decoder's weights, with numbers for tensors
    (next page)     the tensors, at multiples of 64 bytes

The file is mapped, in huge pages if the system can (:mod:`foresay.verifier.ops.kernels.cpu.huge_pages`): so all
processes that serve a model share one copy. Each start checks the digest, which covers the header and a sum for each 64
KiB: of its 64-bit words, each times its own odd number, so that every wrong word is noticed. This takes 0.2 s for each
GB, several times less than sha256. It detects damage, not forgery: files are only used if no other user can write to
them (:mod:`foresay.kvpaging.file_cache`). A whole one is at most unlinked, never truncated: so mappings stay valid. A
damaged one is removed, and the model's own files are read.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.kvpaging import file_cache
from foresay.verifier.model.checkpoint import files_of
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Packed
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.kernels.cpu import huge_pages, kernel_cache
from foresay.verifier.ops.kernels.cpu.integers import PackedIntegers
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.linear import PackedFloats

log = logging.getLogger("foresay.models")

#: Smaller models are packed about as fast as they are loaded.
LEAST_BYTES = 32 << 20
#: That all files may take; the least recently used ones are removed.
MOST_BYTES = 20_000_000_000
_MAGIC = b"foresay1"
_START = struct.Struct("<8s32sQ")
_PAGE, _LINE = 4096, 64
#: Words per checksum.
_BLOCK = 8192
_SOURCES = kernel_cache.sources()
_ending = threading.Event()


class _Location(msgspec.Struct, array_like=True):
    """start: bytes after the header's pages."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _dtype(self.dtype).itemsize


class _Header(msgspec.Struct):
    """packed: a :class:`Packed` with indices of locations instead of tensors."""

    locations: list[_Location] = msgspec.field(name="places")
    packed: msgspec.Raw


class _Linear(msgspec.Struct, omit_defaults=True):
    """A :class:`Linear`."""

    dtype: str
    floats: PackedFloats | None = None
    integers: PackedIntegers | None = None
    was: Tensor | None = None


def key_of(directory: Path, config: ModelConfig, *how: object) -> str:
    """The name of a model's packed weights. how: further options of packing. Raises a loader's error or OSError if its
    files are not all there."""
    files = [kernel_cache.file_id(path) for path in files_of(directory)]
    if () in files:
        raise FileNotFoundError(f"{directory}: weights are missing")
    return kernel_cache.key_of(
        *map(repr, ("weights", files, config, *how)), repr(Processor.here()), torch.__version__, _SOURCES
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def load(key: str) -> Packed | None:
    """Map what is stored under this name; None if there is nothing, or nothing usable, which is removed."""
    try:
        path = folder() / key
        if not file_cache.is_private(path.parent.stat()):
            log.warning("%s is not used: other users may write there", path.parent)
            return None
        with file_cache.open_private(path) as file:
            found = _unpacked(huge_pages.mapped(file.fileno()))
        file_cache.touch(path)
        return found
    except (FileNotFoundError, RuntimeError):
        return None
    except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
        log.warning("%s is removed, and the model's own files are read: %s", path, error)
        with suppress(OSError):
            path.unlink()
        return None


def folder() -> Path:
    """The folder of packed weights. RuntimeError if the home directory is unknown."""
    return kernel_cache.directory("weights")


def _unpacked(memory: mmap.mmap) -> Packed:
    magic, digest, size = _START.unpack_from(memory)
    begin = _filled(_START.size + size, _PAGE)
    if magic != _MAGIC or begin > len(memory) or len(memory) % _PAGE:
        raise ValueError("it is incomplete")
    if _digest(memory, _START.size + size) != digest:
        raise ValueError("its digest does not match")
    header = msgspec.json.decode(memoryview(memory)[_START.size : _START.size + size], type=_Header)
    data = torch.frombuffer(memory, dtype=torch.uint8, offset=begin)
    tensors = [
        data[one.start : one.start + one.nbytes].view(_dtype(one.dtype)).view(one.shape) for one in header.locations
    ]
    return msgspec.json.decode(header.packed, type=Packed, dec_hook=partial(_made, tensors))


def _made(tensors: Sequence[Tensor], kind: type, value: Any) -> Any:
    if kind is Tensor:
        return tensors[value]
    found = msgspec.convert(value, _Linear, dec_hook=partial(_made, tensors))
    packed = found.floats or found.integers
    assert packed is not None, "a weight is one or the other"
    return Linear.from_packed(packed, found.was, _dtype(found.dtype))


def _digest(memory: mmap.mmap, header: int) -> bytes:
    """header: where it ends."""
    begin = _filled(header, _PAGE)
    words, keys = np.frombuffer(memory, np.uint64, offset=begin), _keys()
    whole = len(words) // _BLOCK * _BLOCK
    sums: NDArray[np.uint64] = words[:whole].reshape(-1, _BLOCK) @ keys
    rest = words[whole:] @ keys[: len(words) - whole]
    ends = b"".join(int(each).to_bytes(8, "little") for each in (rest, len(memory)))
    return hashlib.sha256(memory[_START.size : header] + sums.tobytes() + ends).digest()


@cache
def _keys() -> NDArray[np.uint64]:
    """Odd pseudo-random numbers (splitmix64)."""
    x = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _filled(size: int, whole: int) -> int:
    return -(-size // whole) * whole


# -- writing -----------------------------------------------------------------------------------------------------------


def save_later(these: Sequence[tuple[str, Packed]]) -> None:
    """Write them in a thread of lowest priority. A process that ends waits for it, unless it calls
    :func:`cancel_saves`."""

    def run() -> None:
        with suppress(OSError):  # niceness is per thread on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for key, packed in these:
            save(key, packed)

    threading.Thread(target=run, name="packed weights").start()


def cancel_saves() -> None:
    """The process ends now: what is not written yet is written by a later start."""
    _ending.set()


def save(key: str, packed: Packed) -> None:
    """Write it, if it is large enough to be worth it and there is room. Failure to write is no error."""
    tensors: list[Tensor] = []
    packed = replace(packed, table=None)  # a mapped file's, which stays there
    text = msgspec.json.encode(packed, enc_hook=partial(_as_json, tensors))
    locations, size = _locations(tensors)
    header = msgspec.json.encode(_Header(locations, msgspec.Raw(text)))
    whole = _filled(_START.size + len(header), _PAGE) + size
    if not LEAST_BYTES <= whole <= MOST_BYTES:
        return
    try:
        there = folder()
        if file_cache.make_private(there) and not (there / key).exists():
            file_cache.evict(file_cache.lru_files(there), MOST_BYTES - whole)
            if file_cache.free_bytes(there) > 2 * whole:  # a cache is no reason to fill a disk
                file_cache.write(there / key, lambda file: _fill(file, header, locations, tensors, whole), sync=True)
    except (OSError, RuntimeError) as error:
        log.info("packed weights are not kept: %s", error)


def _as_json(tensors: list[Tensor], part: Any) -> Any:
    """A tensor or a linear layer as JSON."""
    if isinstance(part, Tensor):
        tensors.append(part)
        return len(tensors) - 1
    assert isinstance(part, Linear), "nothing else has weights"
    packed, was = part.packed
    name = str(part.dtype).removeprefix("torch.")
    if isinstance(packed, PackedFloats):
        return _Linear(name, floats=packed, was=was)
    assert isinstance(packed, PackedIntegers), "a CPU has these two"
    return _Linear(name, integers=packed, was=was)


def _locations(tensors: Sequence[Tensor]) -> tuple[list[_Location], int]:
    """The location of each tensor, and the total size."""
    locations, at = [], 0
    for each in tensors:
        locations.append(_Location(str(each.dtype).removeprefix("torch."), tuple(each.shape), at))
        at = _filled(at + each.nbytes, _LINE)
    return locations, _filled(at, _PAGE)


def _fill(file: BinaryIO, header: bytes, locations: Sequence[_Location], tensors: Sequence[Tensor], whole: int) -> None:
    begin, end = _filled(_START.size + len(header), _PAGE), _START.size + len(header)
    file.truncate(whole)
    file.seek(_START.size)
    file.write(header)
    for location, tensor in zip(locations, tensors, strict=True):
        if _ending.is_set():
            raise OSError("the process ends")
        file.seek(begin + location.start)
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    file.flush()
    huge_pages.remap(file.fileno())
    with huge_pages.mapped(file.fileno()) as memory:
        digest = _digest(memory, end)
    file.seek(0)
    file.write(_START.pack(_MAGIC, digest, len(header)))
