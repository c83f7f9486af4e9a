"""Amounts for people: bytes and numbers of weights."""

from __future__ import annotations


def in_words(count: int) -> str:
    """Bytes: ``14.7 MiB``."""
    amount, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "bytes" or amount >= 100 else f"{amount:.1f} {units[0]}"


def count_in_words(count: int) -> str:
    """A number of weights: ``7.3M``, ``8.0B``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
