"""A soak's result at its end: a table in plain words, the record, and whether all was well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench import record
from bench.soak.storm import Round, Tally

#: Memory is flat if it rises by less than this in 1,000 requests; with fewer nothing is reported.
FLAT_MB, ENOUGH_REQUESTS = 2.0, 1000
MOST_FAULTS = 20
#: What the table shows in parts.
PARTS = ("counts", "restart_s", "memory", "totals")


class Memory(NamedTuple):
    """MB of a process at quiet moments of the calm round. slope: MB per 1,000 requests, over their second half, which
    are ``requests``."""

    first: float
    last: float
    slope: float
    requests: int

    @property
    def flat(self) -> bool | None:
        """Whether the slope is below ``FLAT_MB``; None if there were too few requests to tell."""
        return self.slope < FLAT_MB if self.requests >= ENOUGH_REQUESTS else None

    def __str__(self) -> str:
        return f"{self.first:.0f} -> {self.last:.0f}, {self.slope:+.1f} per 1,000 requests (last {self.requests})"


def memory(megabytes: Sequence[float], requests: Sequence[int]) -> Memory | None:
    """From its sizes and the number of requests before each; None if there are too few moments to tell."""
    half = len(requests) // 2
    if len(requests) - half < 2:
        return None
    slope = float(np.polyfit(requests[half:], megabytes[half:], 1)[0]) * 1000
    return Memory(megabytes[0], megabytes[-1], slope, requests[-1] - requests[half])


def memories(calm: Round) -> dict[str, Memory | None]:
    """The memory of the server and of the engine."""
    return {
        "server_mb": memory([quiet.server_mb for quiet in calm.quiets], calm.requests),
        "engine_mb": memory([quiet.engine_mb for quiet in calm.quiets], calm.requests),
    }


def results(tally: Tally, rounds: Sequence[Round]) -> dict[str, Any]:
    """Everything for the record."""
    whats = [fault.what for fault in tally.faults]
    last = [one.quiets[-1] for one in rounds if one.quiets]
    known = memories(rounds[0])
    return {
        "requests": tally.counts["requests"],
        "compared": tally.counts["compared"],
        "wrong": whats.count("wrong"),
        "leaked": whats.count("leaked"),
        "other_faults": len(whats) - whats.count("wrong") - whats.count("leaked"),
        "flat": _all([None if one is None else one.flat for one in known.values()]),
        "counts": dict(sorted(tally.counts.items())),
        "restart_s": {"median": median(tally.seconds_down), "longest": max(tally.seconds_down)}
        if tally.seconds_down
        else None,
        "longest_gap_ms": 1e3 * tally.gap,
        "longest_gap_of": tally.gapped,
        "memory": known,
        "pages_at_quiet_moments": max((quiet.pages for one in rounds for quiet in one.quiets), default=0),
        "quiet_moments": sum(len(one.quiets) for one in rounds),
        "totals": {
            name: sum(quiet.totals[name] for quiet in last)
            for name in ("num_preemptions", "prompt_tokens", "prompt_tokens_cached", "generation_tokens")
        },
        "rounds": [one.name for one in rounds],
        "faults": [asdict(fault) for fault in tally.faults[:MOST_FAULTS]],
    }


def _all(found: Sequence[bool | None]) -> bool | None:
    """False if any is, else None if any is unknown."""
    return False if False in found else None if None in found else True


def well(found: dict[str, Any]) -> bool:
    """Whether nothing was wrong."""
    return found["flat"] is not False and not (found["wrong"] or found["leaked"] or found["other_faults"])


def show(found: dict[str, Any]) -> None:
    """Print the table: all but what is only for the record."""
    rows = [(name, value) for name, value in found.items() if not isinstance(value, dict | list)]
    rows += [(f"{of}: {name}", value) for of in PARTS for name, value in (found[of] or {}).items()]
    record.table("soak", ["", "figure"], rows)
