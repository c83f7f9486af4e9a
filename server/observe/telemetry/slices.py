"""Long work on the event loop in short slices: between two of them the streams have their turn."""

from __future__ import annotations

import asyncio
import time

#: After so long the event loop has its turn. A piece of work takes up to five times that by itself.
SLICE_SECONDS = 50e-6


class Slices:
    """The slices of one piece of work, begun now. ``pause`` between its pieces, where nothing is half done."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pause(self) -> None:
        """Let others have their turn, if it is time."""
        if time.perf_counter() - self._began > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
