"""Compiled kernels on disk, so that a second start need not compile them again.

A file's key covers everything its code depends on: its text, the processor, LLVM. Code is only run from a directory
that no other user can write to, and only if it is complete; otherwise it is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

#: About how many files, of 16 KB, are kept; beyond that the least recently used are removed. An engine has some 15, our
#: tests thousands.
_MOST = 8000
#: The prefix of names, one in 256, at which files are removed: checking thousands of files takes as long as compiling
#: one.
_LOOKS = "00"
_DIGEST = 32
#: Whether the source files are what runs: in a process of our own, but not where a test has patched a module.
unpatched = False


def directory() -> Path:
    """The directory of kernels: ``foresay/kernels`` in ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    requested = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = requested if requested.is_absolute() else Path.home() / ".cache"
    return folder / "foresay" / "kernels"


def key_of(*parts: str) -> str:
    """A hash of these."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def seen(path: Path) -> tuple[int, ...]:
    """A file's size, time and inode, which identify its version; () if it does not exist."""
    try:
        found = path.stat()
    except OSError:  # a broken link, or a file that is just being replaced
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino


@cache
def sources() -> str:
    """The state of the source code used in steps. Our processes call this before they import that code: later, after an
    upgrade in place, they would store old kernels under the key of new ones.
    """
    root, parts = Path(__file__).parents[4], ("spec", "kvpaging", "drafters", "verifier")
    return key_of(*(f"{path} {seen(path)}" for part in parts for path in sorted(root.glob(f"{part}/**/*.py"))))


def run_unpatched() -> None:
    """This process runs the source files as they are now; called before it imports them."""
    global unpatched
    unpatched = True
    sources()


def find(key: str) -> bytes | None:
    """The code stored under this key; None if there is none that may be run."""
    try:
        if not is_ours(directory().stat()):
            return None
        path = directory() / key
        found = path.read_bytes()
        used(path)
    except (OSError, RuntimeError):  # RuntimeError: the home directory is unknown
        return None
    digest, code = found[:_DIGEST], found[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def keep(key: str, code: bytes) -> None:
    """Store it, if possible; atomically for readers."""
    try:
        directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_ours(directory().stat()):
            return
        with tempfile.NamedTemporaryFile(dir=directory(), delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, directory() / key)
        if key.startswith(_LOOKS):
            _make_room()
    except (OSError, RuntimeError):
        return


def used(path: Path) -> None:
    """Note its use: the least recently used file is removed first. In a read-only folder none is."""
    with suppress(OSError):
        os.utime(path)


def is_ours(found: os.stat_result) -> bool:
    """Whether no other user can write to this file or folder."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _make_room() -> None:
    paths = list(directory().iterdir())
    if len(paths) > _MOST:
        files = sorted((path.stat().st_mtime, path) for path in paths)
        for _, path in files[: len(files) - _MOST]:
            path.unlink(missing_ok=True)
