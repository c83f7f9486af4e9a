"""What a start measured of steps and drafts, for the engine process after it, whose streams wait while it gets ready,
and for servers that start within a day.

::

    engine 1 ──Ready──> the server keeps it ──Start──> engine 2, which measures only if it is of anything else
        └──disk──> the first engine of another server

What steps took lately is no part of it: that is learnt again in some dozen of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from foresay.server.settings.config import EngineConfig
from foresay.spec.budget.cost import DraftCost
from foresay.verifier.ops.kernels.cpu import kept

#: Seconds that what was measured on a machine is taken for true there.
_LASTS = 86400.0


class Costs(msgspec.Struct):
    """In seconds. of: a digest of what they hang on, the machine left out: a server starts its engines on its own; ""
    for what was given without being measured, which the first engine takes as it is.

    steps: rows of a step, and what it takes. context: rows, and what each token of context adds. drafts: by drafter, of
    those that have a price. root: a whole step without drafts. woken: rows of a text, and how many experts they wake;
    expert: what each of them takes a pass. measured: when, in seconds since 1970.
    """

    of: str = ""
    steps: list[tuple[int, float]] = []
    context: list[tuple[int, float]] = []
    drafts: dict[str, DraftCost] = {}
    root: float | None = None
    woken: list[tuple[int, float]] = []
    expert: float = 0.0
    measured: float = 0.0

    def given(self, of: str) -> bool:
        """Whether something is known of this; what is known of anything else is forgotten."""
        if self.of not in ("", of):
            self.steps, self.context, self.drafts, self.root, self.woken, self.expert = [], [], {}, None, [], 0.0
        self.of = of
        return bool(self.steps)

    def recall(self) -> bool:
        """Take over what an earlier server measured of the same within a day; whether there is any."""
        try:
            found = msgspec.json.decode(kept.find(self._key()) or b"null", type=Costs | None)
        except msgspec.MsgspecError:
            return False
        if found is None or not 0 <= time.time() - found.measured < _LASTS:
            return False
        for name in self.__struct_fields__:
            setattr(self, name, getattr(found, name))
        return True

    def keep(self) -> None:
        """For servers that start later."""
        self.measured = time.time()
        kept.keep(self._key(), msgspec.json.encode(self))

    def _key(self) -> str:
        """Another where the processor or the code that is timed is another."""
        from foresay.verifier.ops.kernels.cpu.jit import Processor  # imports LLVM

        return kept.key_of("costs", self.of, repr(Processor.here()), kept.sources())


def digest(config: EngineConfig, directories: Iterable[Path], *beside: object) -> str:
    """Of the engine's settings, of the files of models by size and time, and of what else counts."""
    settings = {name: getattr(config, name) for name in EngineConfig.__struct_fields__}
    files = [(str(path), *kept.seen(path)) for directory in directories for path in sorted(directory.iterdir())]
    return hashlib.sha256(msgspec.json.encode((settings, files, beside))).hexdigest()
