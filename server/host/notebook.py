"""What a notebook shows while an engine loads: one line, updated with each stage."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

#: Called with what is being loaded, and the share done if known (0 to 1).
Progress = Callable[..., None]
#: Shortest time between updates.
_FRAME_SECONDS = 0.1


@contextmanager
def loading(progress: Progress | None) -> Iterator[Progress | None]:
    """The progress callback for loading: ``progress`` itself, else a notebook's line, else None. The line finally says
    how long loading took, and vanishes on failure."""
    if progress is not None or not in_notebook():
        yield progress
        return
    warnings.filterwarnings("ignore", "IProgress not found")  # of the hub client; we use no widgets
    line = _Line()
    try:
        yield line
    except BaseException:
        line.write("", "")
        raise
    line.write(f"loaded in {line.seconds:.1f} s")


def in_notebook() -> bool:
    """Whether this is a notebook's kernel. Imports nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _Line:
    """A line of progress; called with each stage."""

    def __init__(self) -> None:
        self._began = self._drawn = time.monotonic()
        self._phase = ""
        self._display: Any = None

    @property
    def seconds(self) -> float:
        """Since loading began."""
        return time.monotonic() - self._began

    def __call__(self, phase: str, share: float | None = None) -> None:
        """Show the current phase."""
        if phase == self._phase and time.monotonic() - self._drawn < _FRAME_SECONDS:
            return
        self._phase, self._drawn = phase, time.monotonic()
        bar = "" if share is None else f'<progress value="{share:.2f}" style="vertical-align: middle"></progress> '
        done = "" if share is None else f", {share:.0%}"
        self.write(f"{self.seconds:.1f} s: {phase}{done} ...", bar)

    def write(self, text: str, bar: str = "") -> None:
        """Replace what the line shows."""
        display = import_module("IPython.display").display  # not our dependency: notebooks have it
        data = {"text/plain": text, "text/html": f'<span style="opacity: 0.8">{bar}{escape(text)}</span>'}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)
