"""The log for people: how speculation went, every 10 seconds in which something was drafted, and a warning if
speculation costs time or other programs keep the machine busy. Programs read ``/metrics``, which has acceptance by
depth and more.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from foresay.server.metrics.counters import Counters
from foresay.server.metrics.verdict import Verdict, judged
from foresay.spec.accept import tokens_per_step
from foresay.spec.trace import NOT_PAYING

if TYPE_CHECKING:
    from foresay.server.metrics.telemetry import Telemetry

EVERY_SECONDS = 10
#: How often a warning is repeated while its cause lasts.
WARN_EVERY_SECONDS = 300.0
#: A machine counts as busy if the engine waited for a core for this share of its steps' time.
BUSY = 0.25
log = logging.getLogger("foresay.speculation")


def to_stderr(whose: logging.Logger = log, form: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Write a logger's lines to stderr, with the time first."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter(form, "%Y-%m-%dT%H:%M:%S%z"))
    whose.addHandler(lines)
    whose.setLevel(logging.INFO)
    whose.propagate = False


def line(span: Counters) -> str:
    """How much was drafted and accepted, and the gain."""
    drafted, accepted = span.drafted, span.accepted
    return (
        f"Speculation: {tokens_per_step(span.generation_tokens, span.runs) or 0.0:.2f} tokens per step, "
        f"{accepted:,} of {drafted:,} drafted tokens accepted ({accepted / drafted:.0%})"
        f"{_speed(judged(span), span.spread)}"
    )


def _speed(verdict: Verdict, spread: float) -> str:
    if verdict.speed_up is None:
        return ""
    saved = verdict.saved_seconds
    known = (
        f"cannot tell: {verdict.doubt}" if verdict.doubt else f"{abs(saved):.2f} s {'lost' if saved < 0 else 'saved'}"
    )
    how = f"measured, ± {spread:.0%}" if spread and not verdict.doubt else "estimated"
    return f", {verdict.speed_up:.2f}x the speed of plain decoding ({how}; {known})"


class Reporter:
    """Logs how speculation goes, and warns when it costs time: at once, then repeatedly while it lasts.

    model: its name, if there are several.
    """

    def __init__(self, telemetry: Telemetry, model: str = "") -> None:
        self._telemetry = telemetry
        self._whose = f"{model}: " if model else ""
        self._reported = int(telemetry.clock())
        self._warned: dict[str, float] = {}

    def _due(self, what: str, now: int) -> bool:
        """Whether a warning is to be logged, the first time or again."""
        due = now >= self._warned.get(what, -WARN_EVERY_SECONDS) + WARN_EVERY_SECONDS
        if due:
            self._warned[what] = now
        return due

    def report(self) -> None:
        """Log the finished seconds since the last report, if anything was drafted in them."""
        now = int(self._telemetry.clock())
        span = self._telemetry.between(self._reported, now)
        self._reported = now
        if span.news is not None:
            self._log_choice(span.news.news, now)
        if span.unable is not None and self._due("unable", now):
            log.warning("%s%s", self._whose, span.unable.unable)
        if span.crowded >= BUSY and self._due("busy", now):
            wait = f"the engine spends {span.crowded:.0%} of its time waiting for a CPU core."
            log.warning("Other programs keep this machine busy: %s", wait)
        if not span.drafts:
            return
        log.info("%s%s", self._whose, line(span))
        verdict = judged(self._telemetry.minute())
        if verdict.pays is False and self._due("paying", now):
            log.warning("%s%s", self._whose, verdict.sentence)
        elif verdict.pays:
            self._warned.pop("paying", None)

    def _log_choice(self, news: str, now: int) -> None:
        """Log which drafter is now used most, since that has changed; a warning if, on enough evidence, nothing is
        drafted."""
        comes_again = news.startswith(NOT_PAYING)
        loses = comes_again and self._telemetry.minute().evident
        if not comes_again or self._due("choice", now):
            log.log(logging.WARNING if loses else logging.INFO, "%s%s", self._whose, news)

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        """Report while the server runs."""
        reporting = asyncio.create_task(self._run())
        yield
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            self.report()
