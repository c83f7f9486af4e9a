"""How a process imports what it needs: without garbage collections between, and transformers without torch.

Transformers' tokenizers need no torch, but it imports torch where it finds it, which takes a second and 390 MB of a
process that computes nothing.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


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


#: Held by whoever hides torch, and by whoever imports it for the first time in a process that may do so.
importing = Lock()
_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_tokenizers(name: str = "PreTrainedTokenizerFast") -> None:
    """Import transformers' class of this name, which reads tokenizers. Where torch is not imported yet, transformers
    takes it for missing for ever: to be called by a process alone that never runs one of its models."""
    with importing:
        if "torch" not in sys.modules:
            with _hidden(), uncollected():
                import transformers

                getattr(transformers, name)


@contextmanager
def _hidden() -> Iterator[None]:
    """torch cannot be found meanwhile, and nobody is told."""
    told = os.environ.get(_QUIET)
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(_QUIET)
        if told is not None:
            os.environ[_QUIET] = told
