"""Benchmarks: ``python -m bench NAME``, or without a name for their list.

An experiment (:mod:`bench.experiment`) declares its variants and cases; one runner measures them in turns, compares
them and prints tables. Its results are printed as one JSON line, and written to ``bench/results/``. ``bench/gpu`` has
commands of its own, ``LOG.md`` lists what was tried. Nothing imports bench.
"""

from __future__ import annotations

import math
from typing import Any


class BadOption(ValueError):
    """An option that cannot be used, in words for its user."""


def plain(value: Any) -> Any:
    """For JSON: named tuples as objects, floats with six digits, infinities and NaN as strings."""
    match value:
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else str(value)
        case tuple() if hasattr(value, "_asdict"):
            return plain(value._asdict())
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value
