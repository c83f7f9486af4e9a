"""Costs of steps and drafts, measured at start-up and reused by the next engine process, whose streams wait until it is
ready, and by servers, commands and scripts that start within a day; and how anything is kept for that long.

::

    engine 1 ──Ready──> the server keeps it ──Start──> engine 2, which measures only if it is of anything else
        └──disk──> the first engine of another server

Recent step times are not included: a few dozen steps suffice to learn them again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from foresay.server.settings.config import EngineConfig
from foresay.spec.budget.cost import DraftCost
from foresay.verifier.ops.kernels.cpu import kernel_cache

#: Seconds for which what was found on a machine stays valid there.
_LASTS = 86400.0
T = TypeVar("T")


def recalled(key: str, kind: type[T]) -> tuple[float, T] | None:
    """What an earlier start kept under this key within a day, and when, in seconds since 1970; None if nothing."""
    with suppress(msgspec.MsgspecError):
        dated: Any = msgspec.json.decode(kernel_cache.load(key) or b"[-1,null]", type=tuple[float, kind | None])  # type: ignore[valid-type]
        when, found = dated
        if found is not None and 0 <= time.time() - when < _LASTS:
            return when, found
    return None


def keep(key: str, found: object) -> None:
    """Store on disk, for those that start later."""
    kernel_cache.save(key, msgspec.json.encode((time.time(), found)))


class Costs(msgspec.Struct):
    """In seconds. of: a digest of what they depend on, except the machine, since a server starts its engines on its
    own; "" for given costs that were not measured, which the first engine takes as they are.

    steps: rows of a step, and its cost. drafts: by drafter, of those that have a cost. root: a whole step without
    drafts.
    """

    of: str = ""
    steps: list[tuple[int, float]] = []
    drafts: dict[str, DraftCost] = {}
    root: float | None = None

    def given(self, of: str) -> bool:
        """Whether costs of this digest are known; others are dropped."""
        if self.of not in ("", of):
            self.steps, self.drafts, self.root = [], {}, None
        self.of = of
        return bool(self.steps)

    def recall(self) -> bool:
        """Load what an earlier server measured of the same within a day; whether there was any."""
        if (found := recalled(self._key(), Costs)) is None:
            return False
        for name in self.__struct_fields__:
            setattr(self, name, getattr(found[1], name))
        return True

    def keep(self) -> None:
        """Store on disk, for servers that start later."""
        keep(self._key(), self)

    def _key(self) -> str:
        """The key on disk; it depends on the processor and the code that is timed."""
        from foresay.verifier.ops.kernels.cpu.jit import Processor  # imports LLVM

        return kernel_cache.key_of("costs", self.of, repr(Processor.here()), kernel_cache.sources())


def digest(config: EngineConfig, directories: Iterable[Path], *others: object) -> str:
    """Hash of the engine's settings but the seed, which is for requests without one, of the models' files by size and
    time, and of ``others``."""
    settings = {name: getattr(config, name) for name in EngineConfig.__struct_fields__ if name != "seed"}
    files = [(str(path), *kernel_cache.file_id(path)[:3]) for each in directories for path in sorted(each.iterdir())]
    return hashlib.sha256(msgspec.json.encode((settings, files, others))).hexdigest()
