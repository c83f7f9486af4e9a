"""What was counted in a span of time; tallies of neighbouring spans add up.

The tally of the running second is the only one that is written to. When the second is over it is folded into the totals
since the start, so nothing is counted twice on the path of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

from server.telemetry.histogram import LENGTH_BOUNDS, REQUEST_BOUNDS, RUN_BOUNDS, TOKEN_BOUNDS, Histogram
from server.telemetry.shapes import Shape
from spec.trace import StepTrace

K = TypeVar("K")
#: Of a request, as vLLM names them: their histograms hold seconds.
REQUEST_TIMES: tuple[str, ...] = (
    *("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"),
    *("request_decode_time", "request_inference_time"),
)
#: Of a request: their histograms hold tokens.
REQUEST_LENGTHS = ("request_prompt_tokens", "request_generation_tokens")


class Drafting:
    """One drafter's trees: how many, their nodes, and the accepted ones whose tokens are in the text; by depth too."""

    __slots__ = ("accepted", "accepted_per_depth", "drafted", "drafted_per_depth", "drafts")

    def __init__(self) -> None:
        self.drafts = self.drafted = self.accepted = 0
        self.drafted_per_depth: list[int] = []
        self.accepted_per_depth: list[int] = []

    def count(self, per_depth: Sequence[int], drafted: int, accepted: int) -> None:
        """One tree, and how many of its nodes were taken: one of each depth down to there."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        if len(per_depth) > len(self.drafted_per_depth):
            self._deepen(len(per_depth))
        for depth, nodes in enumerate(per_depth):
            self.drafted_per_depth[depth] += nodes
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1

    def add(self, other: Self) -> None:
        """Count what the other one has counted."""
        self.drafts += other.drafts
        self.drafted += other.drafted
        self.accepted += other.accepted
        self._deepen(len(other.drafted_per_depth))
        for depth, (drafted, accepted) in enumerate(
            zip(other.drafted_per_depth, other.accepted_per_depth, strict=True)
        ):
            self.drafted_per_depth[depth] += drafted
            self.accepted_per_depth[depth] += accepted

    def _deepen(self, depths: int) -> None:
        for counts in (self.drafted_per_depth, self.accepted_per_depth):
            counts.extend([0] * (depths - len(counts)))


class Tally:
    """Everything counted in one span. second: where it begins, in seconds since 1970.

    Of steps: steps, emitted (tokens the engine wrote), phases (seconds), preemptions; gauges as after the last step;
    decode_*, propose_seconds, forward_seconds: of steps that read no prompt; plain_seconds: what plain decoding would
    have taken for what these emitted, estimated. Of runs (a step of one request that wrote text): runs, tokens,
    discarded (written past the end of a text), drafting, trees, taken (accepted nodes by place). Of requests: the rest.
    """

    def __init__(self, second: int = 0) -> None:
        self.second = second
        self.steps = self.emitted = self.preemptions = 0
        self.decode_steps = self.decode_sequences = self.decode_emitted = self.decode_rows = 0
        self.decode_seconds = self.propose_seconds = self.forward_seconds = self.plain_seconds = 0.0
        self.running = self.waiting = self.pages = self.kept_pages = 0
        self.phases: dict[str, float] = {}
        self.runs = self.tokens = self.discarded = self.forced = 0
        self.drafting: dict[str, Drafting] = {}
        self.trees: dict[Shape, int] = {}
        self.taken: dict[int, int] = {}
        self.prompt_tokens = self.cached_tokens = 0
        self.finished: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.step_seconds = Histogram(TOKEN_BOUNDS)
        self.run_lengths = Histogram(RUN_BOUNDS)
        self.chunk_gaps = Histogram(TOKEN_BOUNDS)
        self.token_times = Histogram(TOKEN_BOUNDS)
        self.mean_token_times = Histogram(TOKEN_BOUNDS)
        self.times = {name: Histogram(REQUEST_BOUNDS) for name in REQUEST_TIMES}
        self.lengths = {name: Histogram(LENGTH_BOUNDS) for name in REQUEST_LENGTHS}

    @property
    def drafted(self) -> int:
        """Drafted nodes, of all drafters."""
        return sum(drafting.drafted for drafting in self.drafting.values())

    @property
    def accepted(self) -> int:
        """Accepted nodes, of all drafters."""
        return sum(drafting.accepted for drafting in self.drafting.values())

    @property
    def drafts(self) -> int:
        """Trees with at least one drafted node, of all drafters."""
        return sum(drafting.drafts for drafting in self.drafting.values())

    @property
    def speed_up(self) -> float | None:
        """How many times faster than plain decoding, estimated; None if nothing was decoded or nobody knows."""
        return self.plain_seconds / self.decode_seconds if self.plain_seconds and self.decode_seconds else None

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted nodes that was accepted."""
        drafted = self.drafted
        return self.accepted / drafted if drafted else None

    def step(self, trace: StepTrace, plain: float) -> None:
        """One step of the engine. plain: seconds it would take without drafts; 0 if nobody knows."""
        phases, total = self.phases, 0.0
        for phase, seconds in trace.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
            total += seconds
        self.steps += 1
        self.emitted += trace.emitted
        self.preemptions += trace.preemptions
        self.running, self.waiting = trace.running, trace.waiting
        self.pages, self.kept_pages = trace.pages, trace.kept_pages
        self.step_seconds.observe(total)
        if not trace.prefill_rows:
            self.decode_steps += 1
            self.decode_seconds += total
            self.decode_sequences += trace.sequences
            self.decode_emitted += trace.emitted
            self.decode_rows += trace.rows
            self.propose_seconds += trace.seconds.get("propose", 0.0)
            self.forward_seconds += trace.seconds.get("forward", 0.0)
            self.plain_seconds += plain * trace.emitted / trace.sequences

    def run(self, drafter: str, shape: Shape, path: Sequence[int], emitted: int, kept: int) -> int:
        """One run of ``emitted`` tokens, of which the text kept the first ones; returns how many kept were drafted."""
        drafted, accepted = len(shape.places) - 1, min(len(path), kept)
        self.runs += 1
        self.tokens += kept
        self.discarded += emitted - kept
        if kept:
            self.run_lengths.observe(kept)
        if drafted:
            drafting = self.drafting.get(drafter)
            if drafting is None:
                drafting = self.drafting[drafter] = Drafting()
            drafting.count(shape.per_depth, drafted, accepted)
            self.trees[shape] = self.trees.get(shape, 0) + 1
            taken = self.taken
            for node in path[:accepted]:
                place = shape.places[node]
                taken[place] = taken.get(place, 0) + 1
        return accepted

    def add(self, later: Self, trees: bool = True) -> None:
        """Count what a later tally has counted. trees: their shapes too, which are too many to keep for ever."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for counts, more in ((self.finished, later.finished), (self.failed, later.failed)):
            _add(counts, more)
        for phase, seconds in later.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        for name, drafting in later.drafting.items():
            self.drafting.setdefault(name, Drafting()).add(drafting)
        if trees:
            _add(self.trees, later.trees)
            _add(self.taken, later.taken)
        if later.steps:
            self.running, self.waiting = later.running, later.waiting
            self.pages, self.kept_pages = later.pages, later.kept_pages
        for mine, theirs in zip(self.histograms(), later.histograms(), strict=True):
            if any(theirs.counts):
                mine.add(theirs)

    def histograms(self) -> list[Histogram]:
        """All of them, in a fixed order."""
        gaps = [self.step_seconds, self.run_lengths, self.chunk_gaps, self.token_times, self.mean_token_times]
        return [*gaps, *self.times.values(), *self.lengths.values()]


_SUMS = (
    *("steps", "emitted", "preemptions", "decode_steps", "decode_sequences", "decode_emitted", "decode_rows"),
    *("decode_seconds", "propose_seconds", "forward_seconds", "plain_seconds"),
    *("runs", "tokens", "discarded", "forced", "prompt_tokens", "cached_tokens"),
)


def _add(counts: dict[K, int], more: Mapping[K, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count


def summed(tallies: Sequence[Tally]) -> Tally:
    """One tally of them all; begins where the first one does."""
    total = Tally(tallies[0].second if tallies else 0)
    for tally in tallies:
        total.add(tally)
    return total
