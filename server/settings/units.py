"""Amounts for people (bytes, numbers of weights), tables, and spans of time as people and Ollama have them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime


def bytes_in_words(count: int) -> str:
    """Bytes: ``14.7 MiB``."""
    amount, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "bytes" or amount >= 100 else f"{amount:.1f} {units[0]}"


#: The pattern of a size in a setting, and its description.
BYTES, BYTES_EXPECTED = r"[0-9]{1,9}(?:\.[0-9]{1,9})?[KMGT]i?B", "a size such as 8GiB or 500MB"


def bytes_of(size: str) -> int:
    """The bytes in a size: ``8GiB``, ``1.5GB``."""
    number, unit = re.fullmatch(r"([0-9.]+)(.+)", size).groups()  # type: ignore[union-attr]
    return int(float(number) * (1024 if "i" in unit else 1000) ** ("KMGT".index(unit[0]) + 1))


def count_in_words(count: int) -> str:
    """A number of weights: ``7.3M``, ``8.0B``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def counted(number: int, what: str) -> str:
    """``1 prompt``, ``2,304 prompts``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A table, line by line. right: the columns whose cells end below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if number in right else "<" for number in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


#: Seconds of each unit; ``ms`` before its prefix ``m``.
UNITS = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "h": 3600.0, "m": 60.0, "s": 1.0}
_NUMBER = r"(?:[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
_PART = rf"{_NUMBER}(?:{'|'.join(UNITS)})"
#: The pattern of a time span in a setting.
SPAN = rf"^(?:{_PART}){{1,4}}$"
#: Its description.
EXPECTED = "a time such as 30s, 10m, 2h or 1h30m"


def seconds_of(span: str) -> float:
    """The seconds in a span, which may have a sign. Raises ValueError for anything else."""
    sign, given = (-1.0, span[1:]) if span.startswith("-") else (1.0, span.removeprefix("+"))
    if not re.fullmatch(SPAN, given):
        raise ValueError(f"{span!r} is not {EXPECTED}")
    parts = re.findall(rf"([0-9.]+)({'|'.join(UNITS)})", given)
    return sign * sum(float(number) * UNITS[unit] for number, unit in parts)


def span_in_words(seconds: float) -> str:
    """A span for people: ``45 s``, ``10 min``, ``1 h 30 min``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    parts = [f"{hours} h"] if hours else []
    return " ".join([*parts, f"{rest} min"] if rest or not parts else parts)


def moment(seconds: float | None = None) -> str:
    """A point in time as Ollama writes it; now, unless ``seconds`` since 1970 are given."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat().replace("+00:00", "Z")
