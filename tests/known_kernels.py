"""Kernels of a CPU that tests of the same sources wrote are found again.

Writing a kernel's text takes most of the time of tests that have many, compiled though it was before. So the text's key
is found by what it was written from, as our own processes do it, but in a file for the contents of the sources, which
another checkout has too (:class:`foresay.verifier.ops.kernels.cpu.launch.Compiled`). Where a test changes anything of
them, every kernel is written, and none noted.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from foresay.verifier.ops.kernels.cpu import kept
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import Compiled

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("spec", "kvpaging", "drafters", "verifier")
#: States of the sources whose kernels are known, at most.
MOST = 8
#: What is noted of a kernel is short; its code is not.
LONGEST = 1000


class Known:
    """What is known of kernels that were written from the sources as they are."""

    def __init__(self) -> None:
        self._files = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
        self._begun = self._state()
        hashes = (hashlib.sha256(path.read_bytes()).hexdigest() for path in self._files)
        names = (str(path.relative_to(ROOT)) for path in self._files)
        self.key = kept.key_of(*map(" ".join, zip(names, hashes, strict=True)))
        self._found = Compiled._found
        self._plain = {name: getattr(kept, name) for name in ("sources", "find", "keep", "unpatched")}
        self._file = kept.directory().with_name("kernels-of-tests") / self.key
        self._noted = dict(line.split(" ", 1) for line in self._lines() if " " in line)

    def _state(self) -> list[tuple[int, ...]]:
        return [kept.seen(path) for path in self._files]

    def _lines(self) -> list[str]:
        with suppress(OSError):
            if kept.is_ours(self._file.parent.stat()):
                return self._file.read_text("utf-8").splitlines()
        return []

    def give(self, patch: pytest.MonkeyPatch) -> None:
        """To all tests; those that change the sources take it away while they do."""
        plain, found = pytest.MonkeyPatch.setattr, self._found

        def noticed(self: pytest.MonkeyPatch, target: Any, *rest: Any, **how: Any) -> None:
            if writes_kernels(target, *rest):
                plain(self, kept, "unpatched", False)
            plain(self, target, *rest, **how)

        def found_of_ours(kernel: Compiled, constants: tuple[object, ...]) -> Any:
            """One that a test writes may hang on more than its constants."""
            ours = kernel.write.__module__.startswith("foresay.")
            return found(kernel, constants) if ours else kernel._written(constants)[0]

        patch.setattr(Compiled, "_found", found_of_ours)
        patch.setattr(kept, "sources", lambda: self.key)
        patch.setattr(kept, "find", self.find)
        patch.setattr(kept, "keep", self.keep)
        patch.setattr(kept, "unpatched", True)
        patch.setattr(pytest.MonkeyPatch, "setattr", noticed)

    def take(self, patch: pytest.MonkeyPatch) -> None:
        """From a test of what is given."""
        for name, value in self._plain.items():
            patch.setattr(kept, name, value)
        patch.setattr(Compiled, "_found", self._found)

    def find(self, key: str) -> bytes | None:
        """As the plain one."""
        noted = self._noted.get(key)
        return self._plain["find"](key) if noted is None else noted.replace("\\n", "\n").encode()

    def keep(self, key: str, code: bytes) -> None:
        """As the plain one, unless it is a note, and somebody has edited the sources since they were read."""
        if len(code) > LONGEST:
            self._plain["keep"](key, code)
        elif self._state() == self._begun:
            self._noted[key] = code.decode().replace("\n", "\\n")
            with suppress(OSError):
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(f"{key} {self._noted[key]}\n")
                for path in sorted(self._file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-MOST]:
                    path.unlink()


def writes_kernels(target: Any, name: Any = "", *_: Any) -> bool:
    """Whether a test changes what kernels may be written by; which processor they are for is in their keys."""
    if target is kept or (target is Processor and name == "here"):
        return False
    where = target if isinstance(target, str) else getattr(target, "__module__", getattr(target, "__name__", ""))
    return str(where).removeprefix("foresay.").startswith(PARTS)


KNOWN = Known()
