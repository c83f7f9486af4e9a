"""Who runs an op on a CPU: a compiled kernel, or its torch reference, op by op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_references: ContextVar[bool] = ContextVar("references", default=False)


@contextmanager
def references() -> Iterator[None]:
    """In this block ops on a CPU are computed as their contracts say, by torch: slowly."""
    token = _references.set(True)
    try:
        yield
    finally:
        _references.reset(token)


def compiled(x: Tensor) -> bool:
    """Whether an op on this tensor runs a compiled kernel of a CPU."""
    return x.device.type == "cpu" and not _references.get()
