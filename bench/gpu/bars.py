"""The bars that the results are held against, and what was measured for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import record


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar on an H200: the measure is to be at most ``most``, and hopefully ``goal``."""

    key: str
    says: str
    most: float
    goal: float
    unit: str = ""


BARS = (
    Bar("plain_step_over_floor", "plain bf16 step of an 8B at 1k, over its floor", 1.15, 1.07),
    Bar("verify_64_over_1", "verifying 64 rows, over one row", 1.12, 1.07),
    Bar("eagle_chain_over_floor", "whole EAGLE-3 step, chain of 5, over its floor", 1.30, 1.15),
    Bar("host_gap_us_p50", "host gap between steps, p50", 40.0, 10.0, "us"),
    Bar("host_launches", "launches by the host for each step", 3.0, 1.0),
    Bar("temperature_1_over_0", "a step at T=1, over one at T=0", 1.015, 1.007),
    Bar("p99_over_p50", "step time, p99 over p50", 1.03, 1.01),
    Bar("ns_per_context_token", "step time for each token of context, to 32k", 38.0, 33.5, "ns"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar and what was measured; None: not measured in this run. rehearsal: the figure means nothing."""

    bar: Bar
    measured: float | None
    rehearsal: bool = False

    @property
    def met(self) -> str:
        """In one word."""
        if self.measured is None:
            return "not measured"
        if self.rehearsal:
            return "rehearsal"
        return "goal" if self.measured <= self.bar.goal else "yes" if self.measured <= self.bar.most else "NO"


def verdicts(measured: Mapping[str, float | None], rehearsal: bool = False) -> list[Verdict]:
    """Each bar with its measure; a rehearsal meets none.

    Raises KeyError for a measure that is no bar's, which is a slip of the pen.
    """
    unknown = set(measured) - {bar.key for bar in BARS}
    if unknown:
        raise KeyError(f"no bar is called {sorted(unknown)[0]}")
    return [Verdict(bar, measured.get(bar.key), rehearsal) for bar in BARS]


def show(found: Sequence[Verdict]) -> None:
    """The short table at the end."""
    rows = [
        [
            v.bar.says,
            f"<= {v.bar.most:g} {v.bar.unit}".rstrip(),
            f"{v.bar.goal:g}",
            "" if v.measured is None else v.measured,
            v.met,
        ]
        for v in found
    ]
    record.table("bars (of an H200)", ["measure", "bar", "goal", "measured", "met"], rows)


def as_json(found: Sequence[Verdict]) -> dict[str, Any]:
    """For the record."""
    return {v.bar.key: {"bar": v.bar.most, "goal": v.bar.goal, "measured": v.measured, "met": v.met} for v in found}
