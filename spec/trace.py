"""Records per step and per sequence, and the summaries sent with a response."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from foresay.spec.accept import ByDepth, tokens_per_step
from foresay.spec.names import NONE


class Statistics(msgspec.Struct, kw_only=True):
    """One finished request in numbers. Times in seconds; lists by depth start at depth 1.

    steps: target passes that emitted tokens. drafted, accepted: drafted tokens verified, and accepted ones that were
    emitted. forced: those of the drafted that a grammar forced. acceptance_histogram[j]: steps that accepted exactly j.
    num_spec_tokens: the deepest draft configured, or accepted if a grammar forced more. discarded: tokens computed past
    the point where the text ended. resumed: how many tokens there were, each time that another engine went on;
    changed: those times that it was one which may write another text.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    steps: int
    drafted: int
    accepted: int
    drafted_per_depth: list[int]
    accepted_per_depth: list[int]
    acceptance_histogram: list[int]
    num_spec_tokens: int
    discarded: int
    preemptions: int
    seconds: dict[str, float]
    time_to_first_token: float
    decode_seconds: float
    decode_tokens_per_second: float
    per_step_drafted: list[int]
    per_step_accepted: list[int]
    forced: int = 0
    resumed: list[int] = []
    changed: list[int] = []

    @property
    def tokens_per_step(self) -> float | None:
        """As :mod:`foresay.spec.accept` defines it."""
        return tokens_per_step(self.completion_tokens, self.steps)

    @property
    def drafts(self) -> int:
        """How many steps drafted anything."""
        return sum(map(bool, self.per_step_drafted))

    @property
    def by_depth(self) -> ByDepth:
        """Acceptance by depth."""
        return ByDepth.of(self.accepted_per_depth, self.drafts)


#: The beginning of a budget's news when it drafts nothing.
NOT_PAYING = "Nothing is drafted now, since it would not pay"
#: The same when it failed, so that nothing is drafted any more.
SWITCHED_OFF = "Speculation is off until the engine restarts, since choosing drafts failed"


class Weighed(msgspec.Struct, frozen=True, array_like=True):
    """One way of drafting that was considered for a step. drafter: ``none`` drafts nothing. nodes: drafted ones.
    tokens: the expected emitted tokens of all sequences together; ms: the expected time of the step, including
    drafting."""

    drafter: str
    nodes: int
    tokens: float
    ms: float

    def __str__(self) -> str:
        what = f"with {self.nodes} drafted by {self.drafter}" if self.drafter != NONE else "without drafts"
        return f"{self.tokens:.2f} tokens in {self.ms:.2f} ms {what}"


class StepTrace(msgspec.Struct, kw_only=True):
    """One step of the engine. seconds: by phase (plan, propose, mask, forward, draw, commit; ``draw`` is sampling, also
    in metrics and responses).

    mask: pruning by grammars, and what is left of computing their masks once the forward pass is done. running,
    waiting: sequences after the step. pages, kept_pages: of the KV cache, in use and holding only reusable prefixes.
    preemptions: in this step. plain: sequences whose requests switched speculation off. aside: background sequences.
    root_seconds: the time the step would have taken without drafts, if it computed no prompt; 0 if unknown; doubt: why
    that may be wrong; spread: how far a speed-up by it may be off, as a share, where it was measured; else 0. choice:
    which drafter, where a budget chooses. news: a sentence, if it is another one than for some time before, and why.
    unable: a sentence, if a drafter that was to draft could not. crowded: the share of their recent runnable time that
    the engine's threads waited for a core; 0 if unknown. disk: tokens whose KV was read from or written to disk since
    the step before, by outcome. woken: experts of a mixture that the pass used, per layer. reading: by id of those
    whose prompt is not read to its end, tokens of it that are, and how many of these were cached.
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
    doubt: str = ""
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


@dataclass(slots=True)
class SequenceTrace:
    """Counters of one sequence, filled step by step. Clock times are ``time.perf_counter`` seconds, which all processes
    of a machine share: another engine continues the counters of the one before."""

    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    drafted_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    first_run: int = 0
    forced: int = 0
    discarded: int = 0
    preemptions: int = 0
    resumed: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)

    @property
    def queued(self) -> float:
        """Seconds in the queue."""
        return (self.started or self.arrived) - self.arrived

    def charge(self, seconds: dict[str, float]) -> None:
        """Add a step's phase times to this sequence's."""
        for phase, spent in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def record(self, depths: list[int], accepted: int, emitted: int) -> None:
        """One step that emitted: the depths of its drafted nodes, how many were accepted, how many tokens were
        emitted."""
        self.last_token = time.perf_counter()
        if self.first_token is None:
            self.first_token, self.first_run = self.last_token, emitted
        self.per_step_drafted.append(len(depths))
        self.per_step_accepted.append(accepted)
        deepest = max(depths, default=0)
        for counts in (self.drafted_per_depth, self.accepted_per_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in depths:
            self.drafted_per_depth[depth - 1] += 1
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1

    def cut(self, surplus: int) -> None:
        """The text ended ``surplus`` emitted tokens ago: accepted tokens past the cut count as discarded."""
        self.discarded += surplus
        for index in range(len(self.per_step_accepted) - 1, -1, -1):
            if surplus <= 0:
                return
            accepted = self.per_step_accepted[index]
            gone = min(accepted, surplus - 1)  # a step's last token is the bonus token, which was not drafted
            for depth in range(accepted - gone, accepted):
                self.accepted_per_depth[depth] -= 1
            self.per_step_accepted[index] -= gone
            surplus -= accepted + 1

    def statistics(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, levels: int) -> Statistics:
        """The summary sent with the last delta. ``levels`` is the deepest draft configured."""
        histogram = [0] * (max([levels, *self.per_step_accepted]) + 1)
        for accepted in self.per_step_accepted:
            histogram[accepted] += 1
        first, last = self.first_token or self.arrived, self.last_token or self.arrived
        after_first = max(completion_tokens - self.first_run, 0)
        queued = {"queue": self.queued if self.started else last - self.arrived}
        return Statistics(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            steps=len(self.per_step_accepted),
            drafted=sum(self.per_step_drafted),
            accepted=sum(self.per_step_accepted),
            drafted_per_depth=self.drafted_per_depth,
            accepted_per_depth=self.accepted_per_depth,
            acceptance_histogram=histogram,
            num_spec_tokens=len(histogram) - 1,
            discarded=self.discarded,
            preemptions=self.preemptions,
            seconds=queued | self.seconds,
            time_to_first_token=first - self.arrived,
            decode_seconds=last - first,
            decode_tokens_per_second=after_first / (last - first) if last > first else self._rate(completion_tokens),
            per_step_drafted=self.per_step_drafted,
            per_step_accepted=self.per_step_accepted,
            forced=self.forced,
            resumed=self.resumed,
            changed=self.changed,
        )

    def _rate(self, tokens: int) -> float:
        """Tokens per second of a text that was generated in one step; 0 if that step also computed the prompt."""
        spent = 0.0 if "prefill" in self.seconds else sum(self.seconds.values())
        return tokens / spent if spent else 0.0


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node of a tree; the root's is 0."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths
