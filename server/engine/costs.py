"""Costs of steps and drafts, measured at start-up and reused by the next engine process, whose streams wait until it is
ready, and by servers, commands and scripts that start within a day.

::

    engine 1 ──Ready──> the server keeps it ──Start──> engine 2, which measures only if it is of anything else
        └──disk──> the first engine of another server

Recent step times are not included: a few dozen steps suffice to learn them again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from foresay.server.settings.config import EngineConfig
from foresay.spec.budget.cost import DraftCost
from foresay.verifier.ops.kernels.cpu import kernel_cache

#: Seconds for which measurements on a machine stay valid there.
_LASTS = 86400.0


class Costs(msgspec.Struct):
    """In seconds. of: a digest of what they depend on, except the machine, since a server starts its engines on its
    own; "" for given costs that were not measured, which the first engine takes as they are.

    steps: rows of a step, and its cost. drafts: by drafter, of
    those that have a cost. root: a whole step without drafts. measured: when, in seconds since 1970.
    """

    of: str = ""
    steps: list[tuple[int, float]] = []
    drafts: dict[str, DraftCost] = {}
    root: float | None = None
    measured: float = 0.0

    def given(self, of: str) -> bool:
        """Whether costs of this digest are known; others are dropped."""
        if self.of not in ("", of):
            self.steps, self.drafts, self.root = [], {}, None
        self.of = of
        return bool(self.steps)

    def recall(self) -> bool:
        """Load what an earlier server measured of the same within a day; whether there was any."""
        try:
            found = msgspec.json.decode(kernel_cache.find(self._key()) or b"null", type=Costs | None)
        except msgspec.MsgspecError:
            return False
        if found is None or not 0 <= time.time() - found.measured < _LASTS:
            return False
        for name in self.__struct_fields__:
            setattr(self, name, getattr(found, name))
        return True

    def keep(self) -> None:
        """Store on disk, for servers that start later."""
        self.measured = time.time()
        kernel_cache.keep(self._key(), msgspec.json.encode(self))

    def _key(self) -> str:
        """The key on disk; it depends on the processor and the code that is timed."""
        from foresay.verifier.ops.kernels.cpu.jit import Processor  # imports LLVM

        return kernel_cache.key_of("costs", self.of, repr(Processor.here()), kernel_cache.sources())


def digest(config: EngineConfig, directories: Iterable[Path], *others: object) -> str:
    """Hash of the engine's settings but the seed, which is for requests without one, of the models' files by size and
    time, and of ``others``."""
    settings = {name: getattr(config, name) for name in EngineConfig.__struct_fields__ if name != "seed"}
    files = [(str(path), *kernel_cache.seen(path)[:3]) for each in directories for path in sorted(each.iterdir())]
    return hashlib.sha256(msgspec.json.encode((settings, files, others))).hexdigest()
