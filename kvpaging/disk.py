"""Pages on disk: what pages of texts hold, for engines that start later.

::

    FOLDER/KEY/DIGEST.rows      what one model, or all who draft, keep of a page in layers that see the whole text
                     .window    the same in layers with a window, while the page has a window page
                     .state     of recurrent layers, where the page has a checkpoint

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
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from foresay.kvpaging.pool import PagePool
from foresay.kvpaging.states import NONE
from foresay.kvpaging.store import KVStore, as_bytes

log = logging.getLogger("foresay.kv")

#: What safetensors calls the types.
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
_ROWS, _WINDOW, _STATE = _KINDS = ("rows", "window", "state")
#: Files are removed until so many eighths of the room are left, and looked through again when one is filled.
_LEFT, _EIGHTHS = 7, 8
#: What is used within a minute is used at once, the end of a text before its beginning. In ns.
_MOMENT, _DEEPER = 60_000_000_000, 1_000_000
#: What a file takes at least, and headers at most, in bytes.
_BLOCK, _LONGEST = 4096, 1 << 20


class Text(NamedTuple):
    """A page as the prefix index knows it. digest: of it and everything before. said: parent's digest and tokens, of
    which that is one. depth: pages before it."""

    digest: bytes
    said: bytes
    depth: int


class _File(NamedTuple):
    """One file of a page. views: what it holds, as parts of the stores."""

    key: str
    kind: str
    views: Sequence[Tensor]

    def header(self, text: Text, data: Tensor) -> bytes:
        """Length and JSON. data: all that follows."""
        tensors, at = {}, 0
        for number, view in enumerate(self.views):
            place = {"dtype": _DTYPES[view.dtype], "shape": list(view.shape), "data_offsets": [at, at + view.nbytes]}
            tensors[str(number)], at = place, at + view.nbytes
        said, found = sha256(text.said).hexdigest(), sha256(data.numpy().data).hexdigest()
        about = {"key": self.key, "kind": self.kind, "page": text.digest.hex(), "said": said, "sha256": found}
        head = json.dumps({"__metadata__": about, **tensors}).encode()
        return (len(head) + -len(head) % 8).to_bytes(8, "little") + head + b" " * (-len(head) % 8)

    def data(self) -> Tensor:
        """A copy, uint8 on the CPU."""
        return torch.cat([view.contiguous().flatten().view(torch.uint8) for view in self.views]).cpu()

    def fill(self, data: Tensor) -> None:
        """Put it back."""
        for view, part in zip(self.views, data.split([view.nbytes for view in self.views]), strict=True):
            target = as_bytes(view)
            target.copy_(part.view(target.dtype).view(target.shape))


class DiskPages:
    """The pages of one pool on disk. Not for several threads.

    stores: by their key; what the first one holds of a page has to be there for the page to be read. most: bytes that
    all files below the folder may take, those of other keys too; nobody else may be able to write there.
    """

    def __init__(self, folder: Path, stores: Mapping[str, Sequence[KVStore]], pool: PagePool, most: int) -> None:
        self._news: Counter[str] = Counter()
        self._folder, self._stores, self._pool, self._most = folder, stores, pool, most
        self._room = 0
        self._writes = True
        for key in stores:
            (folder / key).mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, text: Text) -> bool:
        """Whether there is something to read."""
        return self._path(next(iter(self._stores)), _ROWS, text).exists()

    def soon(self, text: Text) -> None:
        """It will be read: have the system fetch it meanwhile."""
        path = self._path(next(iter(self._stores)), _ROWS, text)
        with suppress(OSError, AttributeError), open(path, "rb", buffering=0) as file:  # some systems cannot
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def news(self) -> dict[str, int]:
        """Tokens since the last time: ``read``, ``written``, ``damaged``, and ``slow``, where reading was given up."""
        news, self._news = self._news, Counter()
        return news

    def slow(self, pages: int) -> None:
        """Reading so many pages took longer than computing them would have: the rest of the text is computed."""
        log.info("a text is not read from disk: computing it takes less")
        self._news["slow"] += pages * self._pool.page_size

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, page: int, text: Text) -> bool:
        """Fill a page that nobody reads yet; whether it is whole. Window page and checkpoint come along if there is
        room."""
        for number, (key, stores) in enumerate(self._stores.items()):
            if self._load(key, _ROWS, page, text):
                for store in stores:
                    store.marks[page] = self._pool.page_size
            elif not number:
                return False
        self._read_window(page, text)
        self._read_state(page, text)
        self._news["read"] += self._pool.page_size
        return True

    def _read_window(self, page: int, text: Text) -> None:
        windows = self._pool.windows
        if windows is None or not windows.available:
            return
        windows.see([page])
        windows.unsee(page, passed=True)
        if not self._load_all(_WINDOW, page, text):
            windows.forget(page)

    def _read_state(self, page: int, text: Text) -> None:
        states = self._pool.states
        if states is None or (own := states.allocate()) == NONE:
            return
        states.keep(page, own)
        states.release(own)
        if not self._load_all(_STATE, page, text):
            states.forget(page)

    def _load_all(self, kind: str, page: int, text: Text) -> bool:
        """Of all models that have something of the kind."""
        return all(self._load(key, kind, page, text) for key in self._stores)

    def _load(self, key: str, kind: str, page: int, text: Text) -> bool:
        """Whether it was there, and is now in the stores."""
        file, path = _File(key, kind, self._views(key, kind, page)), self._path(key, kind, text)
        if not (size := sum(view.nbytes for view in file.views)):
            return True
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as source:
                data, head = torch.empty(size, dtype=torch.uint8), os.fstat(source.fileno()).st_size - size
                found = source.read(head) if 0 < head < _LONGEST else b""
                source.readinto(data.numpy().data)
            if found != file.header(text, data):
                log.warning("%s is damaged, or of something else: it is removed, and its page computed", path)
                self._news["damaged"] += self._pool.page_size
                path.unlink(missing_ok=True)
                return False
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("a page is computed that is on disk: %s", error)
            return False
        file.fill(data)
        return True

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, page: int, text: Text) -> None:
        """Keep what a page holds, or note that it was used. After an error nothing is written any more."""
        if not self._writes:
            return
        used = time.time_ns() // _MOMENT * _MOMENT - text.depth * _DEEPER
        try:
            for key, stores in self._stores.items():
                for kind in _KINDS if all(store.marks[page] == self._pool.page_size for store in stores) else ():
                    self._keep(_File(key, kind, self._views(key, kind, page)), text, used)
        except OSError as error:
            self._writes = False
            log.warning("KV is no longer kept on disk until the engine restarts: %s", error)

    def _keep(self, file: _File, text: Text, used: int) -> None:
        path = self._path(file.key, file.kind, text)
        with suppress(FileNotFoundError):
            return os.utime(path, ns=(used, used)) if file.views else None
        head = file.header(text, data := file.data())
        if self._room < (size := _taken(len(head) + data.nbytes)):
            self._make_room()
        if self._room < size:
            return None
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
        if file.kind == _ROWS and file.key == next(iter(self._stores)):
            self._news["written"] += self._pool.page_size

    def _make_room(self) -> None:
        """Remove what was not used for longest."""
        found = sorted(_files_in(self._folder))
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

    def _views(self, key: str, kind: str, page: int) -> list[Tensor]:
        """What a page holds of a kind, the widest numbers first, so that all lie at multiples of their size."""
        stores, windows, states = self._stores[key], self._pool.windows, self._pool.states
        if kind == _STATE:
            own = NONE if states is None else states.checkpoints.get(page, NONE)
            of = [store.states for store in stores if store.states is not None and own != NONE]
            return [part[:, own] for each in of for part in each.layers[:2]]
        if kind == _WINDOW and (windows is None or not windows.of[page]):
            return []
        found = [view for store in stores for view in store.views(page, kind == _WINDOW)]
        return sorted(found, key=lambda view: -view.dtype.itemsize)

    def _path(self, key: str, kind: str, text: Text) -> Path:
        return self._folder / key / f"{text.digest.hex()}.{kind}"


def _taken(size: int) -> int:
    """What a file takes of a disk, about."""
    return -(-size // _BLOCK) * _BLOCK


def _files_in(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Of all keys: when it was used, what it takes, its path."""
    for place in os.scandir(folder):
        for entry in os.scandir(place) if place.is_dir(follow_symlinks=False) else ():
            with suppress(FileNotFoundError):
                seen = entry.stat(follow_symlinks=False)
                yield seen.st_mtime_ns, _taken(seen.st_size), entry.path
