"""Compiled kernels on disk, so that a second start need not compile them again; and what else was found out.

A file's key covers everything its code depends on: its text, the processor, LLVM. Code is only run from a directory
that no other user can write to, and only if it is complete; otherwise it is compiled again.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

#: Bytes that are kept; then the least recently used are removed. An engine has some 15 kernels of 16 KB, tests many.
_MOST = 128 << 20
#: The prefix of names, one in 256, at which files are removed: checking thousands of files takes as long as compiling
#: one.
_LOOKS = "00"
_DIGEST = 32
#: Whether the source files are what runs: in a process of our own, but not where a test has patched a module.
unpatched = False


def directory(name: str = "kernels") -> Path:
    """A directory of ``foresay`` in ``XDG_CACHE_HOME``, by default ``~/.cache``. RuntimeError if the home directory is
    unknown."""
    requested = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = requested if requested.is_absolute() else Path.home() / ".cache"
    return folder / "foresay" / name


def key_of(*parts: str) -> str:
    """A hash of these."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def file_id(path: Path) -> tuple[int, ...]:
    """A file's size, time and inode, then its time of change and device, which identify its version; () if it does not
    exist. The last two of files in a container's image may be others at each start."""
    try:
        found = path.stat()
    except OSError:  # a broken link, or a file that is just being replaced
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns, found.st_dev


@cache
def sources() -> str:
    """The state of the source code used in steps. Our processes call this before they import that code: later, after an
    upgrade in place, they would store old kernels under the key of new ones.
    """
    root, parts = Path(__file__).parents[4], ("spec", "kvpaging", "drafters", "verifier")
    return key_of(*(f"{path} {file_id(path)[:3]}" for part in parts for path in sorted(root.glob(f"{part}/**/*.py"))))


def run_unpatched() -> None:
    """This process runs the source files as they are now; called before it imports them."""
    global unpatched
    unpatched = True
    sources()


def load(key: str) -> bytes | None:
    """The code stored under this key; None if there is none that may be run."""
    from foresay.kvpaging import file_cache  # after the sources have been looked at; imports torch

    try:
        if not file_cache.is_private(directory().stat()):
            return None
        with file_cache.open_private(path := directory() / key) as file:
            found = file.read()
    except (OSError, RuntimeError):
        return None
    file_cache.touch(path)
    digest, code = found[:_DIGEST], found[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def save(key: str, code: bytes) -> None:
    """Store it, if possible."""
    from foresay.kvpaging import file_cache

    try:
        if file_cache.make_private(folder := directory()):
            file_cache.write(folder / key, lambda file: file.write(hashlib.sha256(code).digest() + code))
            if key.startswith(_LOOKS):
                file_cache.evict(file_cache.lru_files(folder), _MOST)
    except (OSError, RuntimeError):
        return
