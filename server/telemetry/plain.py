"""How long a step without drafts takes: as measured at start-up, and live wherever one happens."""

from __future__ import annotations

from collections import deque
from statistics import median

from spec.request import EngineInfo
from spec.trace import StepTrace

#: After so many live steps they are trusted more than the measurement at start-up.
TRUSTED = 3
#: So many of the last ones count: one that something held up does not matter then.
KEPT = 15


class PlainPace:
    """Seconds of steps without drafts, by how many sequences decode in them."""

    def __init__(self) -> None:
        self._live: dict[int, deque[float]] = {}
        self._middle: dict[int, float] = {}

    def see(self, trace: StepTrace) -> None:
        """Learn from a step, if it decoded without drafts. Looking for drafts in vain is not its time."""
        if trace.drafted or trace.prefill_rows:
            return
        seconds = sum(trace.seconds.values()) - trace.seconds.get("propose", 0.0)
        live = self._live.setdefault(trace.sequences, deque(maxlen=KEPT))
        live.append(seconds)
        if len(live) >= TRUSTED:
            self._middle[trace.sequences] = median(live)

    def of(self, sequences: int, info: EngineInfo | None) -> float:
        """Of a step with so many sequences: as it was live, else as measured at start-up; 0 if nobody knows."""
        live = self._middle.get(sequences)
        if live is not None or info is None or not info.root_seconds:
            return live or 0.0
        known = info.more_seconds
        return info.root_seconds + (known[min(sequences, len(known)) - 1] if known else 0.0)
