"""The progress of a training phase: a bar on a terminal, elsewhere a plain line every half minute."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

#: Seconds between two plain lines.
LINE_EVERY = 30.0


class Progress:
    """Shows ``done`` of ``total`` on stderr. first: how many were done before; shown: False for no output."""

    def __init__(self, text: str, total: int, unit: str, first: int = 0, shown: bool = True) -> None:
        self._text, self._total, self._unit, self._first, self.done = text, total, unit, first, first
        self._begun = self._printed = time.monotonic()
        terminal = shown and sys.stderr.isatty()
        self._lines = shown and not terminal
        self._bar: tqdm[Any] = tqdm(
            total=total,
            initial=first,
            desc=text,
            unit=f" {unit}",
            file=sys.stderr,
            ncols=(os.get_terminal_size(sys.stderr.fileno()).columns or 80) if terminal else None,
            nrows=24,  # a terminal that reports no size (often in a container) would show nothing
            disable=not terminal,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def to(self, done: int, note: str = "") -> None:
        """Set how many are done now."""
        self.done = done
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)
        now = time.monotonic()
        if self._lines and now - self._printed >= LINE_EVERY:
            self._printed = now
            print(self._line(now - self._begun, note), file=sys.stderr, flush=True)

    def _line(self, seconds: float, note: str) -> str:
        """``the target writes: 384 of 2000 texts, 01:20 so far, about 05:37 left``."""
        here = self.done - self._first
        left = f", about {tqdm.format_interval(seconds * (self._total - self.done) / here)} left" if here else ""
        line = f"{self._text}: {self.done} of {self._total} {self._unit}, {tqdm.format_interval(seconds)} so far{left}"
        return f"{line}, {note}" if note else line
