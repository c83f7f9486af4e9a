"""The ways of drafting that a trace can be evaluated for."""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.drafters.registry import LOOKUPS
from spec.errors import ConfigurationError
from spec.names import NONE
from spec.tree import MAX_NODES, TreeShape

RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Way:
    """How to draft. text: as it was asked for. source: ``"none"``, ``"recorded"`` or a lookup drafter.

    shape: the tree, None for the recorded one whole; most: drafted nodes kept of it, the likeliest, None for all.
    """

    text: str
    source: str
    shape: TreeShape | None = None
    most: int | None = None


def parse(text: str) -> Way:
    """Read ``none``, ``recorded``, ``recorded:4``, ``recorded:3,2,1``, ``recorded@8``, ``ngram`` or ``suffix:6``.

    Raises ConfigurationError saying what is known, for anything else.
    """
    source = text.partition(":")[0].partition("@")[0]
    rest = text[len(source) :]
    if source == NONE and not rest:
        return Way(text, NONE)
    if source == RECORDED:
        return _recorded(text, rest)
    if source in LOOKUPS and not rest.startswith("@"):
        return Way(text, source, TreeShape.chain(_count(text, rest[1:]) if rest else 4))
    known = ", ".join(f"{name}:4" for name in LOOKUPS)
    raise ConfigurationError(
        f"--draft {text}: expected none, recorded (as it was), recorded:4 (a chain), recorded:3,2,1 (a tree), "
        f"recorded@8 (its 8 likeliest nodes) or {known}"
    )


def _recorded(text: str, rest: str) -> Way:
    if not rest:
        return Way(text, RECORDED)
    if rest.startswith("@"):
        return Way(text, RECORDED, most=_count(text, rest[1:]))
    if "," in rest:
        return Way(text, RECORDED, TreeShape.parse(rest[1:]))
    return Way(text, RECORDED, TreeShape.chain(_count(text, rest[1:])))


def _count(text: str, count: str) -> int:
    if count.isdecimal() and 0 < int(count) < MAX_NODES:
        return int(count)
    raise ConfigurationError(f"--draft {text}: expected a number from 1 to {MAX_NODES - 1}, got {count!r}")


def usual(levels: int, nodes: int, text: bool) -> list[Way]:
    """What is evaluated if nobody says: the recorded trees, as chains of each length, and with fewer nodes; lookups if
    the trace has the text. levels, nodes: the most that was drafted in a step."""
    names = [NONE, RECORDED]
    if nodes > levels:
        names += [f"{RECORDED}@{most}" for most in (2, 4, 8, 16, 32) if most < nodes]
    names += [f"{RECORDED}:{length}" for length in range(1, levels + (nodes > levels))]
    names += [f"{name}:{length}" for name in LOOKUPS for length in (2, 4, 8) if text]
    return [parse(name) for name in names]
