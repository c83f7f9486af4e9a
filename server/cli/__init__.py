"""The commands of ``foresay``. Importing them is cheap: torch is imported only by the one that runs. Still it takes a
while, in which Ctrl-C ends the process without a traceback."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def _leave(*interrupt: object) -> None:
    os._exit(INTERRUPTED)  # there is nothing to clean up yet


def begin() -> None:
    """Leave at once at Ctrl-C, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def ready() -> None:
    """All is imported: Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
