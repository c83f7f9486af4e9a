"""Files that any number of processes share, in the user's cache directory: kernels, packed weights, KV of texts.

A file is written under another name and then renamed, by one process at a time, so whatever is found is whole. The
least recently used are removed first, and only files that no other user can write to are read. Their owners check what
is in them, since disks fail.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

#: Suffix of files that are being written, and the ns after which one counts as abandoned.
_PART, _ABANDONED = ".part", 600_000_000_000
#: Bytes of a disk block; and times further ahead than these ns are of a wrong clock and count as 0.
_BLOCK, _AHEAD = 4096, 60_000_000_000


class SharedFile(NamedTuple):
    """used: when it was last used, in ns. size: about how many bytes it takes on disk."""

    last_used: int
    size: int
    path: str


def is_private(found: os.stat_result) -> bool:
    """Whether no other user can write to this file or folder."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_private(folder: Path) -> bool:
    """Make a folder with those above it; whether no other user can write to it. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return is_private(folder.stat())


def open_private(path: Path, mode: Literal["rb", "r+b"] = "rb", more: int = 0) -> FileIO:
    """A file to read. Raises OSError, also if other users can write to it or it is not a plain file."""
    more |= os.O_NOFOLLOW | os.O_NONBLOCK
    file = open(path, mode, buffering=0, opener=lambda name, flags: os.open(name, flags | more, 0o600))  # noqa: SIM115
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or not is_private(found):
        file.close()
        raise OSError(f"other users may write to {path}, or it is not a plain file")
    return file


def touch(path: Path, when: int | None = None) -> bool:
    """Record a file's use, now or at ``when``, in ns; False if it does not exist, or in a read-only folder."""
    when = time.time_ns() if when is None else when
    try:
        os.utime(path, ns=(when, when), follow_symlinks=False)
    except OSError:
        return False
    return True


def write(
    path: Path, fill: Callable[[BinaryIO], object], when: int | None = None, sync: bool = False, own: str = ""
) -> bool:
    """Write a file, used at ``when``; False if another process is writing it. sync: wait until it is on disk. own: part
    of the other name where files cannot be locked. Raises OSError as :func:`open_private`, and what ``fill`` raises."""
    part = path.with_name(f"{path.name}{own}{_PART}")
    with BufferedRandom(open_private(part, "r+b", os.O_CREAT)) as file:
        if (locked := _locked(part, file)) is None and not own:
            part.unlink(missing_ok=True)
            return write(path, fill, when, sync, f".{os.getpid()}.{secrets.token_hex(4)}")
        if locked is False:
            return False
        try:
            file.truncate()
            fill(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            touch(part, when)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return True


def _locked(part: Path, file: BinaryIO) -> bool | None:
    """Whether this process alone writes the file, which no other one has finished or removed; None: it has no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(part), os.fstat(file.fileno()))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # some network disks
        return None


def lru_files(folder: Path) -> list[SharedFile]:
    """All files below a folder, the least recently used first. What was abandoned while it was written is removed."""
    return sorted(_below(folder, time.time_ns()))


def _below(folder: str | Path, now: int) -> Iterator[SharedFile]:
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            st = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode):
                yield from _below(entry.path, now)
            elif not entry.name.endswith(_PART):
                yield SharedFile(st.st_mtime_ns * (st.st_mtime_ns < now + _AHEAD), disk_size(st.st_size), entry.path)
            elif now - st.st_mtime_ns > _ABANDONED:
                os.unlink(entry.path)


def evict(files: Sequence[SharedFile], most: int) -> int:
    """Remove the first of these files until the others take at most ``most`` bytes; returns how many they take."""
    total = sum(file.size for file in files)
    for file in files:
        if total <= most:
            break
        with suppress(FileNotFoundError):
            os.unlink(file.path)
        total -= file.size
    return total


def disk_size(size: int) -> int:
    """About how many bytes a file of this size takes on disk."""
    return -(-size // _BLOCK) * _BLOCK


def free_bytes(folder: Path) -> int:
    """Free bytes of its disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
