"""Pages on disk: the KV of texts, for engines that start later.

::

    FOLDER/KEY/DIGEST.rows      KV of a page, of the target or drafters, in layers with full attention
                     .window    the target's in sliding-window layers, while the page has a window page
                     .state     the target's recurrent states, where the page has a checkpoint

KEY covers all that the bytes depend on besides the text, DIGEST the text up to the page's end and its tenant
(:mod:`foresay.kvpaging.prefix`). A file is in the format of safetensors, and its header follows from the key, the text,
the shapes and the hash of the data. A file with any other header (damaged, cut short, from elsewhere) is removed, and
its page is computed.

Any number of engines may share a folder (:mod:`foresay.kvpaging.file_cache`). The least recently used are removed
first; of a text, its end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from foresay.kvpaging import file_cache
from foresay.kvpaging.pool import PADDING_PAGE, PagePool
from foresay.kvpaging.store import KVStore, as_bytes, prefault
from foresay.kvpaging.threads import BackgroundThreads
from foresay.kvpaging.verbs import NONE

log = logging.getLogger("foresay.kv")

#: safetensors' names of the types.
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
#: Files are removed until this many eighths of the limit are used, and listed again once another eighth is filled.
_LEFT, _EIGHTHS = 7, 8
#: Uses within this many ns count as simultaneous; then a page deeper in a text counts as this much older.
_MOMENT, _DEEPER = 60_000_000_000, 1_000_000
#: In bytes: the longest header, what is read before yielding to other threads, and copied at once.
_LONGEST, _PIECE, _SLICE = 1 << 20, 1 << 19, 1 << 16
#: Files read at once; pages whose memory is touched at once, and for how many seconds that is waited for.
_THREADS, _RUN, _TOUCHING = 2, 64, 1.0
#: Seconds without writing after an error: at first, and at most after several in a row.
_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0
#: The cores of this process; and a call that yields to other threads.
_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
_yield: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


class PageText(NamedTuple):
    """A page as the prefix index identifies it. digest: of it and everything before. content: the parent's digest and
    the page's tokens, which digest is the hash of. depth: pages before it."""

    digest: bytes
    content: bytes
    depth: int


class _File(NamedTuple):
    """One file of a page. tensors: type and shape of each of its tensors."""

    key: str
    kind: str
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors]

    def header(self, text: PageText, checksum: str) -> bytes:
        """The header's length and the header in JSON. checksum: SHA-256 of all data after it."""
        tensors, at = {}, 0
        for number, ((dtype, shape), size) in enumerate(zip(self.tensors, self.sizes, strict=True)):
            tensors[f"{number}"] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [at, at + size]}
            at += size
        content = sha256(text.content).hexdigest()  # under the name that the first release gave it
        about = {"key": self.key, "kind": self.kind, "page": text.digest.hex(), "said": content, "sha256": checksum}
        head = json.dumps({"__metadata__": about, **tensors}).encode()
        return (len(head) + -len(head) % 8).to_bytes(8, "little") + head + b" " * (-len(head) % 8)


#: The files read for a page; empty if there are none.
Loaded = Mapping[_File, Tensor]


class DiskPages:
    """The pages of one pool on disk. Its own threads read and write files and never access the pool; everything else is
    for the engine's thread.

    stores: by their key, the target's first: a page can only be read if the target's part of it exists, and where the
    text is drafted for, what drafts need. most: bytes that all files in the folder may take, including those of other
    keys. clock: seconds. Raises OSError if the folder cannot be made, or other users can write there.
    """

    def __init__(
        self,
        folder: Path,
        stores: Mapping[str, Sequence[KVStore]],
        pool: PagePool,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._stores, self._pool, self._max_bytes = folder, stores, pool, max_bytes
        self._counts, self._room = deque[str](), 0
        self._clock, self._pause, self._writes_from = clock, _PAUSE, -math.inf
        self._threads = BackgroundThreads(_THREADS, "KV on disk", _on_all_cores)
        self._written: Future[None] | None = None
        self._hung: Future[Loaded] | None = None
        self._touched = dict[int, Future[None]]()
        self._kinds = {kind.name: kind for kind in (pool.rows, *pool.stores) if kind.name}
        first, *others = (self._file(key, kind) for kind in self._kinds for key in stores)
        self._files = [first, *(file for file in others if file.tensors)]
        drafts = [file for file in self._files if any(store.drafts for store in stores[file.key])]
        self._needed = [self._files[:1], [*self._files[:1], *drafts]]
        for each in (folder, *(folder / key for key in stores)):  # a mode is not that of parents
            if not file_cache.make_private(each):
                raise OSError(f"other users may write to {each}")

    def has(self, text: PageText, drafts: bool) -> bool:
        """Whether there is all to read that the text, drafted for or not, needs, and the disk does not hang."""
        if self._hung is not None and not self._hung.done():
            return False
        return all(os.path.exists(self._path(file, text)) for file in self._needed[drafts])  # false after any error

    def take_counts(self) -> dict[str, int]:
        """Tokens since the last call: ``read``, ``written``, ``damaged``, and ``slow``, where reading was given up."""
        news: Counter[str] = Counter()
        while self._counts:
            news[self._counts.popleft()] += self._pool.page_size
        return news

    def count_slow(self, pages: int) -> None:
        """Count so many pages that took longer to read than to compute: the rest of the text is computed."""
        log.info("a text is not read from disk: computing it takes less")
        self._counts += ["slow"] * pages

    def on_hang(self, loading: Future[Loaded], pages: int) -> None:
        """As :meth:`count_slow`, because of a file that does not arrive: nothing more is read until it does. Other
        threads do everything else."""
        self._hung = loading
        self._threads.replace()
        self.count_slow(pages)

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, text: PageText, page: int, drafts: bool) -> Future[Loaded]:
        """Start reading the files of a text that will fill this page; none if it needs one that is missing."""
        self._prefault(page // _RUN)
        return self._threads.submit(self._load, text, drafts)

    def _prefault(self, run: int) -> Future[None]:
        if run not in self._touched:
            memory = [part for stores in self._stores.values() for store in stores for part in store.run(run, _RUN)]
            self._touched[run] = self._threads.submit(prefault, memory)
        return self._touched[run]

    def prefault(self) -> Iterator[None]:
        """Touch the memory that the pages on disk would fill, a run at a time: the system takes half a second to clear
        that of a prompt of 8,000 tokens."""
        try:
            names = os.listdir(self._folder / self._files[0].key)
        except OSError:  # someone may have removed the folder
            return
        pages = min(sum(name.endswith(f".{self._files[0].kind}") for name in names), self._pool.num_pages - 1)
        for run in range(-(-pages // _RUN)):
            wait([self._prefault(run)], _TOUCHING)
            yield

    def _load(self, text: PageText, drafts: bool) -> Loaded:
        parts = dict[_File, Tensor]()
        for file in self._files:
            data, path = torch.empty(sum(file.sizes), dtype=torch.uint8), self._path(file, text)
            try:
                if is_whole := _read(path, file, text, data):
                    parts[file] = data
            except FileNotFoundError:
                is_whole = True
            except OSError as error:
                log.warning("%s", error)
                is_whole = False
            if not is_whole:
                log.warning("%s is damaged, or of something else: it is removed, and its page computed", path)
                self._counts.append("damaged")
                with suppress(OSError):
                    path.unlink()
            if file not in parts and file in self._needed[drafts]:
                return {}
        return parts

    def fill(self, page: int, loaded: Loaded) -> Iterator[Future[None] | None]:
        """Copy the files into a page that no table reads yet, in slices; yields what to wait for before the next. The
        window page and the checkpoint are filled too if there is room."""
        while not (touched := self._touched[page // _RUN]).done():
            yield touched
        for file, data in loaded.items():
            for store in self._stores[file.key]:
                store.marks[page] = self._pool.page_size
            with self._kinds[file.kind].loading(page) as own:
                yield from _copied(self._parts(file, own), data.split(file.sizes)) if own != NONE else ()
        self._counts.append("read")

    # -- writing -------------------------------------------------------------------------------------------------------

    def can_write(self, seconds: float) -> bool:
        """Whether a page can be written now, after waiting up to this long for the one before."""
        return self._written is None or bool(wait([self._written], seconds).done)

    def write(self, page: int, text: PageText) -> None:
        """Start writing a page, or record its use if it is on disk; only if :meth:`can_write`. After an error nothing
        is written for a while."""
        used = time.time_ns() // _MOMENT * _MOMENT - text.depth * _DEEPER
        news = list[tuple[_File, Tensor]]()
        for file in self._files if self._clock() >= self._writes_from else ():
            own, stores = self._kinds[file.kind].local_page(page), self._stores[file.key]
            whole = own != NONE and all(store.marks[page] == self._pool.page_size for store in stores)
            if whole and not file_cache.touch(self._path(file, text), used):
                flat = [part.contiguous().flatten().view(torch.uint8).cpu() for part in self._parts(file, own)]
                news.append((file, torch.cat([torch.empty(0, dtype=torch.uint8), *flat])))
        if news:
            self._written = self._threads.submit(self._write_files, news, text, used)

    def _write_files(self, news: Sequence[tuple[_File, Tensor]], text: PageText, used: int) -> None:
        try:
            kept, pause = [file for file, data in news if self._write_file(file, data, text, used)], _PAUSE
        except OSError as error:
            log.warning("KV is not kept on disk for %.0f s: %s", self._pause, error)
            kept, pause, self._room = [], min(2 * self._pause, _LONGEST_PAUSE), 0
            self._writes_from = self._clock() + self._pause
        self._pause = pause
        self._counts += ["written"] * (self._files[0] in kept)

    def _write_file(self, file: _File, data: Tensor, text: PageText, used: int) -> bool:
        """Write a file; False if there was no room, or another engine writes it."""
        head = file.header(text, sha256(data.numpy().data).hexdigest())
        if self._room < (size := file_cache.disk_size(len(head) + data.nbytes)):
            self._make_room()
        if self._room < size:
            return False
        self._room -= size
        return file_cache.write(self._path(file, text), lambda it: it.writelines((head, data.numpy().data)), used)

    def _make_room(self) -> None:
        """Remove the least recently used files: a cache is no reason to fill a disk."""
        found = file_cache.lru_files(self._folder)
        total = sum(file.size for file in found)
        most = min(self._max_bytes, (total + file_cache.free_bytes(self._folder)) // 2)
        self._room = min(most - file_cache.evict(found, most * _LEFT // _EIGHTHS), most // _EIGHTHS)

    # -- what a page has -----------------------------------------------------------------------------------------------

    def _file(self, key: str, kind: str) -> _File:
        """A file whose tensors have the shapes that all pages share; taken from the padding page."""
        parts = self._parts(empty := _File(key, kind, ()), PADDING_PAGE)
        return empty._replace(tensors=tuple((part.dtype, tuple(part.shape)) for part in parts))

    def _parts(self, file: _File, own: int) -> list[Tensor]:
        """What the stores have in one page of the file's kind, the widest types first, so that each is aligned to its
        size."""
        parts = [part for store in self._stores[file.key] for part in store.parts(self._kinds[file.kind], own)]
        return sorted(parts, key=lambda part: -part.dtype.itemsize)

    def _path(self, file: _File, text: PageText) -> Path:
        return self._folder / file.key / f"{text.digest.hex()}.{file.kind}"


def _read(path: Path, file: _File, text: PageText, data: Tensor) -> bool:
    """Fill data, uint8, a piece at a time; whether it is what was written."""
    found, room = sha256(), data.numpy()
    with file_cache.open_private(path) as source:
        length = os.fstat(source.fileno()).st_size - data.nbytes
        head = source.read(length) if 0 < length < _LONGEST else b""
        for at in range(0, data.nbytes, _PIECE):
            source.readinto(room[at : at + _PIECE].data)
            found.update(room[at : at + _PIECE].data)
            _yield()
    return head == file.header(text, found.hexdigest())


def _copied(views: Sequence[Tensor], parts: Sequence[Tensor]) -> Iterator[None]:
    """Copy each part of a file into its view, some layers at a time."""
    for view, part in zip(views, parts, strict=True):
        target = as_bytes(view)
        source = part.view(target.dtype).view(target.shape)
        layers = max(1, _SLICE * len(target) // part.nbytes)
        for layer in range(0, len(target), layers):
            target[layer : layer + layers].copy_(source[layer : layer + layers])
            yield


def _on_all_cores() -> None:
    """For a thread: use all cores, since the thread that started it may be pinned to one."""
    with suppress(OSError):  # cores may have been taken away; an error here would fail every task of the thread
        if _CORES:
            os.sched_setaffinity(0, _CORES)
