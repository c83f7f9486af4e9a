"""The progress of a long phase: a bar on a terminal, elsewhere a plain line every half minute."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import Progress as Bar

#: Seconds between two plain lines, and between two drawings of the bar, which takes 2 ms.
LINE_EVERY, DRAWN_EVERY = 30.0, 0.5


class ProgressBar:
    """Shows ``done`` of ``total`` on stderr. first: how many were done before; shown: False for no output."""

    def __init__(self, text: str, total: int, unit: str, first: int = 0, shown: bool = True) -> None:
        self._text, self._total, self._unit, self._first, self.done = text, total, unit, first, first
        self._begun = self._printed = time.monotonic()
        self._shown, self._terminal = shown, shown and sys.stderr.isatty()
        self._bar = Bar(
            *Bar.get_default_columns(),
            "{task.completed}/{task.total} {task.fields[unit]} {task.fields[note]}",
            console=Console(stderr=True),
            auto_refresh=False,
            disable=not self._terminal,
        )
        self._task = self._bar.add_task(text, total=total, completed=first, unit=unit, note="")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def to(self, done: int, note: str = "") -> None:
        """Set how many are done now."""
        self.done, now = done, time.monotonic()
        self._bar.update(self._task, completed=done, note=note)
        if self._shown and now - self._printed >= (DRAWN_EVERY if self._terminal else LINE_EVERY):
            self._printed = now
            if self._terminal:
                self._bar.refresh()
            else:
                print(self._line(now - self._begun, note), file=sys.stderr, flush=True)

    def _line(self, seconds: float, note: str) -> str:
        """``the target writes: 384 of 2000 texts, 0:01:20 so far, about 0:05:37 left``."""
        here = self.done - self._first
        left = f", about {_clock(seconds * (self._total - self.done) / here)} left" if here else ""
        line = f"{self._text}: {self.done} of {self._total} {self._unit}, {_clock(seconds)} so far{left}"
        return f"{line}, {note}" if note else line


def _clock(seconds: float) -> timedelta:
    return timedelta(seconds=int(seconds))
