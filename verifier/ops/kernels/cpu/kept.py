"""Compiled kernels on disk, so that a second start need not compile them again.

A file is found by all that its code follows from: its text, the processor, LLVM itself. Code is only run from a
directory that nobody else can write to, and only if it is whole; whatever is amiss, it is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

#: Files kept, about, of 16 KB; of more those that were not used for longest go. An engine has some 15, our tests
#: thousands.
_MOST = 8000
#: How the names begin that make room, one in 256: to look at thousands of files takes as long as to compile one.
_LOOKS = "00"
_DIGEST = 32


def directory() -> Path:
    """Where kernels are kept: ``foresay/kernels`` in ``XDG_CACHE_HOME``, which is ``~/.cache`` unless it is set."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = asked if asked.is_absolute() else Path.home() / ".cache"
    return folder / "foresay" / "kernels"


def key_of(*parts: str) -> str:
    """The name of what follows from these."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def seen(path: Path) -> tuple[int, ...]:
    """A file's size, time and number, by which another is told from it; () if it is not there."""
    try:
        found = path.stat()
    except OSError:  # a link that leads nowhere, or somebody is just putting another in its place
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino


@cache
def sources() -> str:
    """Which state the code that is run in steps is in. An engine process asks before it imports that code: asked later,
    after an upgrade in place, it would keep old kernels under the name of new ones.
    """
    root, parts = Path(__file__).parents[4], ("spec", "kvpaging", "drafters", "verifier")
    return key_of(*(f"{path} {seen(path)}" for part in parts for path in sorted(root.glob(f"{part}/**/*.py"))))


def find(key: str) -> bytes | None:
    """The code that was kept under this name; None if there is none that may be run."""
    try:
        if not is_ours(directory().stat()):
            return None
        path = directory() / key
        found = path.read_bytes()
        os.utime(path)
    except (OSError, RuntimeError):  # RuntimeError: nobody knows where home is
        return None
    digest, code = found[:_DIGEST], found[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def keep(key: str, code: bytes) -> None:
    """Keep it, if there is a place; a reader sees all of it or nothing."""
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


def is_ours(found: os.stat_result) -> bool:
    """Whether nobody else can write to this file or folder."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _make_room() -> None:
    paths = list(directory().iterdir())
    if len(paths) > _MOST:
        files = sorted((path.stat().st_mtime, path) for path in paths)
        for _, path in files[: len(files) - _MOST]:
            path.unlink(missing_ok=True)
