"""How long a step without drafts takes: as measured at start-up, and live wherever one happens."""

from __future__ import annotations

from collections import deque
from statistics import median

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

    def of(self, sequences: int, at_start: float) -> float:
        """Of a step with so many sequences. at_start: measured at start-up, with one; 0 if nobody did."""
        return self._middle.get(sequences, at_start)
