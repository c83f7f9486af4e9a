"""What a start measured of steps and drafts, for the engine process after it, whose streams wait while it gets ready.

::

    engine 1 ──Ready──> the server keeps it ──Start──> engine 2, which measures only if it is of anything else

What steps took lately is no part of it: that is learnt again in some dozen of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from foresay.server.settings.config import EngineConfig
from foresay.spec.budget.cost import DraftCost


class Costs(msgspec.Struct):
    """In seconds. of: a digest of what they hang on, the machine left out: a server starts its engines on its own; ""
    for what was given without being measured, which the first engine takes as it is.

    steps: rows of a step, and what it takes. context: rows, and what each token of context adds. drafts: by drafter, of
    those that have a price. root: a whole step without drafts.
    """

    of: str = ""
    steps: list[tuple[int, float]] = []
    context: list[tuple[int, float]] = []
    drafts: dict[str, DraftCost] = {}
    root: float | None = None

    def given(self, of: str) -> bool:
        """Whether something is known of this; what is known of anything else is forgotten."""
        if self.of not in ("", of):
            self.steps, self.context, self.drafts, self.root = [], [], {}, None
        self.of = of
        return bool(self.steps)


def digest(config: EngineConfig, directories: Iterable[Path], *beside: object) -> str:
    """Of the settings, of the files of models by size and time, and of what else counts."""
    files = [(str(path), *_seen(path)) for directory in directories for path in sorted(directory.iterdir())]
    return hashlib.sha256(msgspec.json.encode((config, files, beside))).hexdigest()


def _seen(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:  # a link that leads nowhere, or somebody is just putting another in its place
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino
