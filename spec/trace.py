"""Records per step, and the counts of a request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from foresay.spec.accept import ByDepth, tokens_per_step
from foresay.spec.request import Delta, RequestEnd


class Statistics(msgspec.Struct, kw_only=True):
    """One request in numbers, counted delta by delta by the only reader that knows how much of each is in the text.

    Times in seconds; lists by depth start at depth 1. drafted is of everything verified, what was accepted of tokens in
    the text. first, last: from the request's arrival to the end of the first and the latest step that emitted tokens;
    first_tokens: how many that first step emitted. delivered: until the first text was passed on, if a server measures
    that. forced: drafted tokens that a grammar forced. discarded: tokens computed past the point where the text ended.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_per_depth: list[int] = []
    accepted_per_depth: list[int] = []
    per_step_drafted: list[int] = []
    per_step_accepted: list[int] = []
    forced: int = 0
    discarded: int = 0
    seconds: dict[str, float] = {}
    first: float | None = None
    first_tokens: int = 0
    last: float = 0.0
    delivered: float | None = None
    ending: RequestEnd = RequestEnd()

    def take(self, delta: Delta, kept: int) -> None:
        """Count a step's delta, of which ``kept`` tokens are in the text."""
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.ending = delta.ending or self.ending
        if self.first is None:
            self.seconds["queue"] = delta.queued
        if not delta.tokens:
            return
        depths = depths_of(delta.origin.parents)[1:] if delta.origin is not None else []
        if self.first is None:
            self.first, self.first_tokens = delta.elapsed, kept
        if not (self.steps or depths):
            self.seconds["prefill"] = max(delta.elapsed - delta.queued, 0.0)
        elif delta.origin is not None:
            for phase, spent in delta.origin.seconds.items():
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        self.last = delta.elapsed
        self.completion_tokens += kept
        self.discarded += len(delta.tokens) - kept
        self.forced += delta.origin.forced if delta.origin is not None else 0
        self._run(depths, min(delta.accepted, kept))

    def _run(self, depths: list[int], accepted: int) -> None:
        self.per_step_drafted.append(len(depths))
        self.per_step_accepted.append(accepted)
        deepest = max(depths, default=0)
        for counts in (self.drafted_per_depth, self.accepted_per_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in depths:
            self.drafted_per_depth[depth - 1] += 1
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1

    @property
    def steps(self) -> int:
        """Target passes that emitted tokens."""
        return len(self.per_step_accepted)

    @property
    def drafts(self) -> int:
        """How many steps drafted anything."""
        return sum(map(bool, self.per_step_drafted))

    @property
    def drafted(self) -> int:
        """Drafted tokens that were verified."""
        return sum(self.per_step_drafted)

    @property
    def accepted(self) -> int:
        """Those of them that were accepted and are in the text."""
        return sum(self.per_step_accepted)

    @property
    def num_spec_tokens(self) -> int:
        """The deepest draft configured, or accepted if a grammar forced more."""
        return max([self.ending.levels, *self.per_step_accepted])

    @property
    def time_to_first_token(self) -> float:
        """Until the first text was passed on, or else emitted; 0 if there is none."""
        return (self.first or 0.0) if self.delivered is None else self.delivered

    @property
    def decode_seconds(self) -> float:
        """From the first step that emitted tokens to the latest."""
        return 0.0 if self.first is None else self.last - self.first

    @property
    def decode_tokens_per_second(self) -> float:
        """Of the tokens after the first step's. Of a text that came in one step of drafts, that step's; 0 if it only
        computed the prompt."""
        if self.decode_seconds:
            return (self.completion_tokens - self.first_tokens) / self.decode_seconds
        spent = 0.0 if "prefill" in self.seconds else sum(self.seconds.values()) - self.seconds.get("queue", 0.0)
        return self.completion_tokens / spent if spent else 0.0

    @property
    def tokens_per_step(self) -> float | None:
        """As :mod:`foresay.spec.accept` defines it."""
        return tokens_per_step(self.completion_tokens, self.steps)

    @property
    def by_depth(self) -> ByDepth:
        """Acceptance by depth."""
        return ByDepth.of(self.accepted_per_depth, self.drafts)


#: The beginning of a budget's news when it drafts nothing.
NOT_PAYING = "Nothing is drafted now, since it would not pay"
#: The same when it failed, so that nothing is drafted any more.
SWITCHED_OFF = "Speculation is off until the engine restarts, since choosing drafts failed"


class StepTrace(msgspec.Struct, kw_only=True):
    """One step of the engine. seconds: by phase (plan, propose, mask, forward, draw, commit; ``draw`` is sampling, also
    in metrics and responses).

    mask: pruning by grammars, and what is left of computing their masks once the forward pass is done. running,
    waiting: sequences after the step. pages, kept_pages: of the KV cache, in use and holding only reusable prefixes.
    preemptions: in this step. plain: sequences whose requests switched speculation off. aside: background sequences.
    root_seconds: the time the step would have taken without drafts, if it computed no prompt; 0 if unknown; unsure:
    it was estimated, and the machine's pace has changed since steps without drafts were timed; spread: how far a
    speed-up by it may be off, as a share, where it was measured; else 0. choice: which drafter, where a budget
    chooses. news: a sentence, if it is another one than for some time before, and why. unable: a sentence, if a
    drafter that was to draft could not. crowded: the share of their recent runnable time that the engine's threads
    waited for a core; 0 if unknown. disk: tokens whose KV was read from or written to disk since the step before,
    by outcome. woken: experts of a mixture that the pass used, per layer. reading: by id of those whose prompt is
    not read to its end, tokens of it that are, and how many of these were cached.
    """

    number: int
    rows: int
    sequences: int
    prefill_rows: int
    drafted: int
    accepted: int
    emitted: int
    seconds: dict[str, float]
    running: int = 0
    waiting: int = 0
    pages: int = 0
    kept_pages: int = 0
    preemptions: int = 0
    plain: int = 0
    aside: int = 0
    root_seconds: float = 0.0
    unsure: bool = False
    spread: float = 0.0
    choice: str = ""
    news: str = ""
    unable: str = ""
    crowded: float = 0.0
    disk: dict[str, int] = {}
    woken: float = 0.0
    reading: dict[str, tuple[int, int]] = {}


class Stopwatch:
    """Splits a stretch of time into named phases: each ``lap`` ends the phase it names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def share(self, phase: str, other: str, part: float) -> None:
        """Move this share of a phase's time to another phase, where a lap could not separate them."""
        moved = part * self.seconds[phase]
        self.seconds[phase] -= moved
        self.seconds[other] = self.seconds.get(other, 0.0) + moved


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node of a tree; the root's is 0."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths
