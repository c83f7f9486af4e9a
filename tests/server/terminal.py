"""Output that says it is a terminal."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """What was written to it is read back."""

    def isatty(self) -> bool:
        return True
