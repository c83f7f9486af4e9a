"""Imports without garbage collections between them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected in the block. What is imported stays, and yet each full collection looks through all of
    it: 0.2 s for torch.

    A process of ours freezes it afterwards (:func:`gc.freeze`); in one of the user's it is not ours to say.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
