"""What was counted in a span of time; windows can be added up.

Steps are counted only into the window of the current second. When that second is over, it is added to the totals since
the start, so a step updates only one window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Self, get_origin, get_type_hints

import msgspec

from foresay.server.observe.telemetry import counts
from foresay.server.observe.telemetry.counts import DraftCounts, PositionCounts, Run, add, added
from foresay.spec.accept import GAIN
from foresay.spec.trace import StepTrace

TokenSeconds = Annotated[counts.Histogram, counts.TOKEN_BOUNDS]
RequestSeconds = Annotated[counts.Histogram, counts.REQUEST_BOUNDS]
Lengths = Annotated[counts.Histogram, counts.LENGTH_BOUNDS]


class Window:
    """Everything counted in one span. second: its beginning, in seconds since 1970. All fields declared here start
    empty and add up; metrics.py says which are exposed, and how.

    latest: the last step, for its gauges; news: the last change of the leading drafter; encoded: the JSON of its point,
    once requested. new_runs: runs that :meth:`settle` has yet to count.
    """

    # Of steps; phases are seconds. Those named decode, propose and plain: of steps without prefill in which no request
    # had switched speculation off. plain_seconds: what plain decoding would have taken for their tokens; decode_tokens:
    # of one request, in the steps for which that is known; doubted: seconds of those whose estimate may be wrong, by
    # reason; waited_seconds: estimated time in which the engine waited for a core. chosen: steps by the budget's
    # choice, if there is a budget. disk: tokens whose KV was written to or read from disk. woken: experts used in steps
    # of a mixture, by the steps' rows (rounded up to a power of two); woke: those steps.
    steps: int
    emitted: int
    preemptions: int
    phases: dict[str, float]
    step_seconds: TokenSeconds
    step_tokens: Lengths
    waited_seconds: float
    chosen: dict[str, int]
    disk: dict[str, int]
    woken: dict[str, float]
    woke: dict[str, int]
    decode_steps: int
    decode_emitted: int
    decode_rows: int
    decode_seconds: float
    propose_seconds: float
    plain_seconds: float
    decode_tokens: float
    doubted: dict[str, float]
    # Of runs (a step of one request that emitted text).
    runs: int
    tokens: int
    discarded: int
    forced: int
    run_lengths: Annotated[counts.Histogram, counts.RUN_BOUNDS]
    drafting: dict[str, DraftCounts]
    places: PositionCounts
    # Of delivery.
    chunk_gaps: TokenSeconds
    token_times: TokenSeconds
    # Of requests.
    prompt_tokens: int
    cached_tokens: int
    finished: dict[str, int]
    failed: dict[str, int]
    time_to_first_token: RequestSeconds
    e2e_request_latency: RequestSeconds
    request_queue_time: RequestSeconds
    request_prefill_time: RequestSeconds
    request_decode_time: RequestSeconds
    request_inference_time: RequestSeconds
    request_time_per_output_token: TokenSeconds
    request_prompt_tokens: Lengths
    request_generation_tokens: Lengths
    request_params_max_tokens: Lengths
    request_params_n: Annotated[counts.Histogram, counts.CHOICE_BOUNDS]
    request_num_preemptions: Annotated[counts.Histogram, counts.CHOICE_BOUNDS]

    def __init__(self, second: int = 0) -> None:
        self.second = second
        self.latest: StepTrace | None = None
        self.news = self.unable = ""
        self.encoded: msgspec.Raw | None = None
        self.new_runs: dict[Run, int] = {}
        for name, nothing in _NOTHING.items():
            setattr(self, name, nothing())

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
        """Speed relative to plain decoding; None if nothing was decoded or it is unknown."""
        return self.plain_seconds / self.decode_seconds if self.plain_seconds and self.decode_seconds else None

    @property
    def spread(self) -> float:
        """How far that may be off, as a share of it, where plain steps were measured too; 0 where it is estimated."""
        return 0.0 if self.latest is None else self.latest.spread

    @property
    def doubt(self) -> str:
        """Why the speed-up is doubtful for more than half of the time; "" if it is not."""
        doubted = self.doubted
        return max(doubted, key=doubted.__getitem__) if 2 * sum(doubted.values()) > self.decode_seconds else ""

    @property
    def unsure(self) -> bool:
        """Whether the speed-up is doubtful."""
        return bool(self.doubt)

    @property
    def crowded(self) -> float:
        """Estimated share of the steps' time in which the engine waited for a core taken by another program."""
        return self.waited_seconds / self.step_seconds.sum if self.waited_seconds else 0.0

    @property
    def answers(self) -> int:
        """Requests that completed, neither cancelled nor failed; each choice counts as one."""
        return sum(count for reason, count in self.finished.items() if reason not in ("cancelled", "error"))

    @property
    def evident(self) -> bool:
        """Whether it holds enough data to say that speculation costs time: one odd text is not enough."""
        return self.decode_steps >= FEWEST_STEPS_AGAINST and sum(self.finished.values()) >= FEWEST_REQUESTS_AGAINST

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted nodes that was accepted."""
        drafted = self.drafted
        return self.accepted / drafted if drafted else None

    def step(self, trace: StepTrace) -> float:
        """Count one step of the engine; returns its seconds."""
        phases, total = self.phases, 0.0
        for phase, seconds in trace.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
            total += seconds
        self.steps += 1
        self.emitted += trace.emitted
        self.latest = trace
        self.waited_seconds += trace.crowded * total
        self.step_seconds.observe(total)
        self.step_tokens.observe(trace.prefill_rows + trace.emitted)
        if trace.preemptions:
            self.preemptions += trace.preemptions
        add(self.disk, trace.disk)
        if trace.woken and not trace.prefill_rows:
            rows = str(1 << (trace.rows - 1).bit_length())
            add(self.woken, {rows: trace.woken})
            add(self.woke, {rows: 1})
        self.unable = trace.unable or self.unable
        if trace.choice:
            self.chosen[trace.choice] = self.chosen.get(trace.choice, 0) + 1
            self.news = trace.news or self.news
        if not trace.prefill_rows and not trace.plain:
            self.decode_steps += 1
            self.decode_seconds += total
            self.decode_emitted += trace.emitted
            self.decode_rows += trace.rows
            self.propose_seconds += trace.seconds.get("propose", 0.0)
            tokens = trace.emitted / trace.sequences
            self.plain_seconds += trace.root_seconds * tokens
            self.decode_tokens += tokens if trace.root_seconds else 0.0
            if trace.doubt:
                self.doubted[trace.doubt] = self.doubted.get(trace.doubt, 0.0) + total
        return total

    def settle(self) -> Self:
        """Count the pending runs. To be called before reading."""
        if self.new_runs:
            runs, self.new_runs = self.new_runs, {}
            for (drafter, shape, last, kept), times in runs.items():
                self._settle(times, kept)
                if shape.drafted:
                    self.drafting.setdefault(drafter, DraftCounts()).count(shape, len(shape.trails[last]), times)
                    self.places.count(shape, last, times)
        return self

    def _settle(self, runs: int, kept: int) -> None:
        self.runs += runs
        self.tokens += kept * runs
        self.run_lengths.observe(kept, runs)

    def add(self, later: Self) -> None:
        """Add the counts of a later window."""
        later.settle()
        self.encoded = None
        self.news, self.unable = later.news or self.news, later.unable or self.unable
        self.latest = later.latest or self.latest
        for name in _NOTHING:
            setattr(self, name, added(getattr(self, name), getattr(later, name)))


#: The empty value of each field of a window.
_NOTHING: dict[str, Callable[[], Any]] = {
    name: partial(counts.Histogram, *hint.__metadata__) if hasattr(hint, "__metadata__") else get_origin(hint) or hint
    for name, hint in get_type_hints(Window, include_extras=True).items()
}


def summed(windows: Sequence[Window]) -> Window:
    """The sum of all windows; begins where the first one does."""
    total = Window(windows[0].second if windows else 0)
    for window in windows:
        total.add(window)
    return total


#: Fewer decoding steps say nothing.
FEWEST_STEPS = 20
#: Fewer decoding steps, or finished requests, may show a loss by chance.
FEWEST_STEPS_AGAINST, FEWEST_REQUESTS_AGAINST = 200, 3
TOO_FEW, FEW = "Too few steps to tell whether speculation pays.", "there are too few steps"
LOW_ACCEPTANCE = 0.3
LARGE_SHARE = 0.4


class Verdict(msgspec.Struct, frozen=True):
    """pays: None if unknown. speed_up: over plain decoding. saved_seconds: negative if it costs time.
    sentence: for people. doubt: why the speed-up says nothing; empty if it does."""

    pays: bool | None
    speed_up: float | None
    saved_seconds: float
    sentence: str
    doubt: str = ""


def judged(window: Window) -> Verdict:
    """The verdict of a window's decoding steps."""
    speed_up = window.speed_up
    saved = 0.0 if speed_up is None else window.plain_seconds - window.decode_seconds
    if not window.drafts:
        return Verdict(None, speed_up, saved, "Nothing was drafted.", window.doubt)
    if window.doubt:
        return Verdict(None, speed_up, saved, f"Cannot tell whether speculation pays: {window.doubt}.", window.doubt)
    if speed_up is None or window.decode_steps < FEWEST_STEPS:
        return Verdict(None, speed_up, saved, TOO_FEW, FEW)
    if abs(speed_up - 1.0) < window.spread * speed_up:
        known = f"{speed_up:.2f} times the speed of plain decoding, ± {window.spread:.0%}"
        return Verdict(True, speed_up, saved, f"Speculation neither pays nor costs, as far as it is measured: {known}.")
    if speed_up >= GAIN:
        how = f" (measured, ± {window.spread:.0%})" if window.spread else ""
        sentence = f"Speculation pays: {speed_up:.2f} times the speed of plain decoding{how}."
        return Verdict(True, speed_up, saved, sentence)
    if speed_up > 1 / GAIN:
        return Verdict(True, speed_up, saved, "Speculation neither pays nor costs: it is as fast as plain decoding.")
    if not window.evident:
        return Verdict(None, speed_up, saved, TOO_FEW, FEW)
    return Verdict(False, speed_up, saved, f"Speculation is not paying: {_figures(window)}; {_cause(window)}")


def _figures(window: Window) -> str:
    step, draft = (1000 * seconds / window.decode_steps for seconds in (window.decode_seconds, window.propose_seconds))
    token, alone = (1000 * seconds / window.decode_emitted for seconds in (window.decode_seconds, window.plain_seconds))
    return (
        f"a token takes {token:.2f} ms, and would take {alone:.2f} ms without drafts "
        f"(a step takes {step:.2f} ms, {draft:.2f} ms of them drafting)"
    )


def _cause(window: Window) -> str:
    """The most likely cause, and which flag changes it."""
    rate = window.acceptance_rate or 0.0
    # With a budget, steps choose how much they draft: --draft-tokens is then only the maximum.
    fewer = "--draft none" if window.chosen else "fewer --draft-tokens"
    if rate < LOW_ACCEPTANCE:
        return f"only {rate:.0%} of the drafts are accepted: try another --draft, or {fewer}"
    if window.propose_seconds > LARGE_SHARE * window.decode_seconds:
        share = window.propose_seconds / window.decode_seconds
        return f"drafting takes {share:.0%} of the time: try a smaller --draft, or {fewer}"
    rows = window.decode_rows / window.decode_steps
    return f"verifying {rows:.1f} rows at once costs too much here: try {fewer}"
