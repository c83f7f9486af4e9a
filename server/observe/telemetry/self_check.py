"""What the self-check has found, counted, and in Prometheus' words."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric

from server.observe.telemetry.families import Families, one


class SelfCheckCounts(msgspec.Struct):
    """share: of the finished requests, how many are decoded again plainly. checked: those that were; tokens: compared
    with them; mismatches: requests whose tokens differ. waiting: for the engine to be idle. skipped: had to give way to
    newer ones, or were lost with the engine."""

    share: float = 0.0
    checked: int = 0
    tokens: int = 0
    mismatches: int = 0
    waiting: int = 0
    skipped: int = 0


def self_check(families: Families, counts: SelfCheckCounts) -> Iterator[Metric]:
    """The counters; all 0 where nobody asked for it."""
    yield from families.counter(
        "self_check_requests", "Finished requests that were decoded again plainly.", one(counts.checked)
    )
    yield from families.counter("self_check_tokens", "Tokens compared with plain decoding.", one(counts.tokens))
    yield from families.counter(
        "self_check_mismatch", "Requests whose tokens differ from plain decoding.", one(counts.mismatches)
    )
    yield from families.gauge(
        "self_check_waiting",
        "Requests that wait to be decoded again.",
        one(counts.waiting),
    )
    yield from families.counter(
        "self_check_skipped", "Requests that were picked but had to give way, or were lost.", one(counts.skipped)
    )
