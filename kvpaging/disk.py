"""Pages on disk: what pages of texts hold, for engines that start later.

::

    FOLDER/KEY/DIGEST.rows      what one model, or all who draft, keep of a page in layers that see the whole text
                     .window    of the target's layers with a window, while the page has a window page
                     .state     of its recurrent layers, where the page has a checkpoint

KEY names all that the bytes follow from beside the text, DIGEST the text up to the page's end and its tenant
(:mod:`foresay.kvpaging.prefix`). A file is in the format of safetensors, and its header can be foretold: of the key,
the text, the shapes and the sum of the data. One that has any other, be it damaged, cut short or somebody else's, is
removed, and its page is computed.

Files are written under another name and renamed, so any number of engines may share a folder. What was not used for
longest goes first; of a text, its end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from foresay.kvpaging.pool import PADDING_PAGE, PagePool
from foresay.kvpaging.states import NONE
from foresay.kvpaging.store import KVStore, as_bytes, touch

log = logging.getLogger("foresay.kv")

#: What safetensors calls the types.
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
_ROWS, _WINDOW, _STATE = "rows", "window", "state"
#: Files are removed until so many eighths of the room are left, and looked through again when one is filled.
_LEFT, _EIGHTHS = 7, 8
#: What is used within a minute is used at once, the end of a text before its beginning. In ns.
_MOMENT, _DEEPER = 60_000_000_000, 1_000_000
#: What a file takes at least, headers at most, what is read before others may go on, and copied, in bytes.
_BLOCK, _LONGEST, _PIECE, _SLICE = 4096, 1 << 20, 1 << 19, 1 << 16
#: Files that are read at once; and pages whose memory is touched at once.
_THREADS, _RUN = 2, 64
#: The cores of this process; and what lets others run.
_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
_yield: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


class Text(NamedTuple):
    """A page as the prefix index knows it. digest: of it and everything before. said: parent's digest and tokens, of
    which that is one. depth: pages before it."""

    digest: bytes
    said: bytes
    depth: int


class _File(NamedTuple):
    """One file of a page. holds: type and shape of each of its tensors."""

    key: str
    kind: str
    holds: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * dtype.itemsize for dtype, shape in self.holds]

    def header(self, text: Text, found: str) -> bytes:
        """Length and JSON. found: SHA-256 of all that follows."""
        tensors, at = {}, 0
        for number, ((dtype, shape), size) in enumerate(zip(self.holds, self.sizes, strict=True)):
            tensors[f"{number}"] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [at, at + size]}
            at += size
        said = sha256(text.said).hexdigest()
        about = {"key": self.key, "kind": self.kind, "page": text.digest.hex(), "said": said, "sha256": found}
        head = json.dumps({"__metadata__": about, **tensors}).encode()
        return (len(head) + -len(head) % 8).to_bytes(8, "little") + head + b" " * (-len(head) % 8)


#: What was read of a page; nothing if there is nothing of it.
Loaded = Mapping[_File, Tensor]


class DiskPages:
    """The pages of one pool on disk. Files are read and written by threads of its own, which see nothing of the pool;
    all else is for the engine's.

    stores: by their key, the target's first: what it holds of a page has to be there for the page to be read. most:
    bytes that all files below the folder may take, those of other keys too; nobody else may be able to write there.
    Raises OSError if there can be no such folder.
    """

    def __init__(self, folder: Path, stores: Mapping[str, Sequence[KVStore]], pool: PagePool, most: int) -> None:
        self._news = deque[str]()
        self._folder, self._stores, self._pool, self._most = folder, stores, pool, most
        self._room = 0
        self._writes = True
        self._threads = ThreadPoolExecutor(_THREADS, "KV on disk", _on_all_cores)
        self._written: Future[None] | None = None
        self._touched = dict[int, Future[None]]()
        target = next(iter(stores))
        kinds = [*((key, _ROWS) for key in stores), (target, _WINDOW), (target, _STATE)]
        self._files = [file for pair in kinds if (file := self._file(*pair)).holds or pair == (target, _ROWS)]
        for each in (folder, *(folder / key for key in stores)):  # a mode is not that of parents
            each.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, text: Text) -> bool:
        """Whether there is something to read."""
        return os.path.exists(self._path(self._files[0], text))  # false after any error

    def news(self) -> dict[str, int]:
        """Tokens since the last time: ``read``, ``written``, ``damaged``, and ``slow``, where reading was given up."""
        news: Counter[str] = Counter()
        while self._news:
            news[self._news.popleft()] += self._pool.page_size
        return news

    def slow(self, pages: int) -> None:
        """Reading so many pages took longer than computing them would have: the rest of the text is computed."""
        log.info("a text is not read from disk: computing it takes less")
        self._news += ["slow"] * pages

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, text: Text, page: int) -> Future[Loaded]:
        """Have the files of a text read that is to be in this page."""
        if (run := page // _RUN) not in self._touched:
            memory = [part for stores in self._stores.values() for store in stores for part in store.run(run, _RUN)]
            self._touched[run] = self._threads.submit(touch, memory)
        return self._threads.submit(self._load, text)

    def _load(self, text: Text) -> Loaded:
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
                self._news.append("damaged")
                with suppress(OSError):
                    path.unlink()
            if not parts:
                break
        return parts

    def fill(self, page: int, loaded: Loaded) -> Iterator[Future[None] | None]:
        """Put it into a page that nobody reads yet, in slices; between two says what is to be waited for. Window page
        and checkpoint come along if there is room."""
        while not (touched := self._touched[page // _RUN]).done():
            yield touched
        for file, data in loaded.items():
            with self._filled(file, page) as own:
                yield from _copied(self._parts(file, own), data.split(file.sizes)) if own != NONE else ()
        self._news.append("read")

    def _filled(self, file: _File, page: int) -> AbstractContextManager[int]:
        """What :meth:`_parts` is to be asked for; ``NONE`` if there is no room."""
        if file.kind == _WINDOW and self._pool.windows is not None:
            return self._pool.windows.filled(page)
        if file.kind == _STATE and self._pool.states is not None:
            return self._pool.states.filled(page)
        for store in self._stores[file.key]:
            store.marks[page] = self._pool.page_size
        return nullcontext(page)

    # -- writing -------------------------------------------------------------------------------------------------------

    def is_free(self, seconds: float) -> bool:
        """Whether a page can be written now, after waiting for the one before for so long."""
        return self._written is None or bool(wait([self._written], seconds).done)

    def write(self, page: int, text: Text) -> None:
        """Have what a page holds written, or note that it was used, if :meth:`is_free`. After an error nothing is
        written any more."""
        used = time.time_ns() // _MOMENT * _MOMENT - text.depth * _DEEPER
        news = list[tuple[_File, Tensor]]()
        for file in self._files if self._writes else ():
            own, stores = self._own(file, page), self._stores[file.key]
            whole = own != NONE and all(store.marks[page] == self._pool.page_size for store in stores)
            if whole and not _used(self._path(file, text), used):
                flat = [part.contiguous().flatten().view(torch.uint8).cpu() for part in self._parts(file, own)]
                news.append((file, torch.cat([torch.empty(0, dtype=torch.uint8), *flat])))
        if news:
            self._written = self._threads.submit(self._keep, news, text, used)

    def _keep(self, news: Sequence[tuple[_File, Tensor]], text: Text, used: int) -> None:
        try:
            kept = [file for file, data in news if self._kept(file, data, text, used)]
        except OSError as error:
            self._writes, kept = False, []
            log.warning("KV is no longer kept on disk until the engine restarts: %s", error)
        self._news += ["written"] * (self._files[0] in kept)

    def _kept(self, file: _File, data: Tensor, text: Text, used: int) -> bool:
        """Whether there was room."""
        head, path = file.header(text, sha256(data.numpy().data).hexdigest()), self._path(file, text)
        if self._room < (size := _taken(len(head) + data.nbytes)):
            self._make_room()
        if self._room < size:
            return False
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as target:
                target.write(head)
                target.write(data.numpy().data)
            os.utime(part, ns=(used, used))
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._room -= size
        return True

    def _make_room(self) -> None:
        """Remove what was not used for longest."""
        found = sorted(_files_in(self._folder, time.time_ns() + _MOMENT))
        total, system = sum(size for _, size, _ in found), os.statvfs(self._folder)
        most = min(self._most, total + system.f_bavail * system.f_frsize // 2)  # a cache is no reason to fill a disk
        for _, size, path in found:
            if total * _EIGHTHS <= most * _LEFT:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        self._room = min(most - total, most // _EIGHTHS)

    # -- what a page has -----------------------------------------------------------------------------------------------

    def _file(self, key: str, kind: str) -> _File:
        """It holds the same of all pages, the padding page too."""
        parts = self._parts(empty := _File(key, kind, ()), PADDING_PAGE)
        return empty._replace(holds=tuple((part.dtype, tuple(part.shape)) for part in parts))

    def _own(self, file: _File, page: int) -> int:
        """What :meth:`_parts` is to be asked for; ``NONE`` if the page has nothing of the kind."""
        windows, states = self._pool.windows, self._pool.states
        if file.kind == _STATE:
            return NONE if states is None else states.checkpoints.get(page, NONE)
        return page if file.kind == _ROWS or (windows is not None and windows.of[page]) else NONE

    def _parts(self, file: _File, page: int) -> list[Tensor]:
        """Parts of the stores, the widest numbers first, so that all lie at multiples of their size. page: of a state,
        the state page."""
        stores = self._stores[file.key]
        if file.kind == _STATE:
            of = [store.states for store in stores if store.states is not None]
            return [part[:, page] for each in of for part in each.layers[:2] if part.numel()]
        found = [view for store in stores for view in store.views(page, file.kind == _WINDOW)]
        return sorted(found, key=lambda view: -view.dtype.itemsize)

    def _path(self, file: _File, text: Text) -> Path:
        return self._folder / file.key / f"{text.digest.hex()}.{file.kind}"


def _read(path: Path, file: _File, text: Text, data: Tensor) -> bool:
    """Fill data, uint8, a piece at a time; whether it is what was written."""
    found, room = sha256(), data.numpy()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as source:
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


def _used(path: Path, used: int) -> bool:
    """Note that a file was; whether it is there."""
    try:
        os.utime(path, ns=(used, used), follow_symlinks=False)
    except OSError:
        return False
    return True


def _on_all_cores() -> None:
    """For a thread: the one that started it may have a core of its own."""
    with suppress(OSError):  # if they were taken away meanwhile; a thread that cannot begin fails whoever asks it
        if _CORES:
            os.sched_setaffinity(0, _CORES)


def _taken(size: int) -> int:
    """What a file takes of a disk, about."""
    return -(-size // _BLOCK) * _BLOCK


def _files_in(folder: Path, latest: int) -> Iterator[tuple[int, int, str]]:
    """Of all keys: when it was used, what it takes, its path. latest: what was used later was so by a
    wrong clock."""
    for place in os.scandir(folder):
        for entry in os.scandir(place) if place.is_dir(follow_symlinks=False) else ():
            with suppress(FileNotFoundError):
                seen = entry.stat(follow_symlinks=False)
                yield seen.st_mtime_ns * (seen.st_mtime_ns < latest), _taken(seen.st_size), entry.path
