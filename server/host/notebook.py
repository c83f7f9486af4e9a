"""What a notebook shows while an engine loads: one line, written anew with each stage."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

#: Told what is being loaded, and where known how much of it (0 to 1).
Progress = Callable[..., None]
#: A notebook draws no faster.
_FRAME_SECONDS = 0.1


@contextmanager
def loading(progress: Progress | None) -> Iterator[Progress | None]:
    """What to call while an engine loads: ``progress`` itself, else the line of a notebook, else nothing. The line says
    in the end how long it took, and goes away where that failed."""
    if progress is not None or not in_notebook():
        yield progress
        return
    warnings.filterwarnings("ignore", "IProgress not found")  # the hub's client asks for widgets that we do not use
    line = _Line()
    try:
        yield line
    except BaseException:
        line.write("", "")
        raise
    line.write(f"loaded in {line.seconds:.1f} s")


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook. Nothing is imported for that."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _Line:
    """Called with each stage."""

    def __init__(self) -> None:
        self._began = self._drawn = time.monotonic()
        self._phase = ""
        self._display: Any = None

    @property
    def seconds(self) -> float:
        """Since the engine began to load."""
        return time.monotonic() - self._began

    def __call__(self, phase: str, share: float | None = None) -> None:
        """This is going on now."""
        if phase == self._phase and time.monotonic() - self._drawn < _FRAME_SECONDS:
            return
        self._phase, self._drawn = phase, time.monotonic()
        bar = "" if share is None else f'<progress value="{share:.2f}" style="vertical-align: middle"></progress> '
        done = "" if share is None else f", {share:.0%}"
        self.write(f"{self.seconds:.1f} s: {phase}{done} ...", bar)

    def write(self, text: str, bar: str = "") -> None:
        """Show this in the place of what was there."""
        display = import_module("IPython.display").display  # no dependency of ours: a notebook brings it
        data = {"text/plain": text, "text/html": f'<span style="opacity: 0.8">{bar}{escape(text)}</span>'}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)
