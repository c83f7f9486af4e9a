"""The ways of drafting that a trace can be evaluated for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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


# -- what a way would have done, counted -------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """Counts over the steps that were judged. sizes: steps by (drafted nodes, levels). seconds: spent drafting, where
    that was done again. short: steps whose recorded tree had fewer levels or nodes than were asked for, so that the
    accepted tokens may be too few.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    seconds: float | None = None
    short: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Of one request: the accepted tokens and the target's own."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def drafts(self) -> int:
        """Steps that drafted anything."""
        return sum(times for (drafted, _), times in self.sizes.items() if drafted)

    def count(self, drafted: int, levels: int, accepted: int) -> None:
        """One step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.sizes[drafted, levels] += 1
        self.accepted_per_depth.extend([0] * (accepted - len(self.accepted_per_depth)))
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1
