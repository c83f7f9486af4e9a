"""How long a step without drafts takes: as measured at start-up, and live wherever one happens."""

from __future__ import annotations

from spec.trace import StepTrace

#: After so many live steps they are trusted more than the measurement at start-up.
TRUSTED = 3
#: Weight of a new step: the last few dozen count.
WEIGHT = 0.05


class PlainPace:
    """Seconds of steps without drafts, by how many sequences decode in them."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, float]] = {}

    def see(self, trace: StepTrace) -> None:
        """Learn from a step, if it decoded without drafts. Looking for drafts in vain is not its time."""
        if trace.drafted or trace.prefill_rows:
            return
        seconds = sum(trace.seconds.values()) - trace.seconds.get("propose", 0.0)
        seen, mean = self._live.get(trace.sequences, (0, seconds))
        self._live[trace.sequences] = seen + 1, mean + (seconds - mean) * max(WEIGHT, 1 / (seen + 1))

    def of(self, sequences: int, at_start: float) -> float:
        """Of a step with so many sequences. at_start: measured at start-up, with one; 0 if nobody did."""
        live = self._live.get(sequences)
        return live[1] if live is not None and live[0] >= TRUSTED else at_start
