"""Importing without garbage collections in between, and transformers without torch.

The tokenizers of transformers need no torch, but it imports torch wherever installed, which costs a process that
computes nothing a second and 390 MB.
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
    """Disable garbage collection in the block. Imported modules stay, yet each full collection traverses them: 0.2 s
    for torch.

    Our own processes freeze them afterwards (:func:`gc.freeze`); a user's process is left alone.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: Held while torch is hidden, and during the first import of torch in a process that may hide it.
importing = Lock()
_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_tokenizers(name: str = "PreTrainedTokenizerFast") -> None:
    """Import the tokenizer class of this name from transformers. If torch is not imported yet, transformers considers
    it missing from then on: only for processes that never run one of its models."""
    with importing:
        if "torch" not in sys.modules:
            with _hidden(), uncollected():
                import transformers

                getattr(transformers, name)


@contextmanager
def _hidden() -> Iterator[None]:
    """Hide torch from imports in the block, without transformers' warning."""
    previous = os.environ.get(_QUIET)
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(_QUIET)
        if previous is not None:
            os.environ[_QUIET] = previous
