"""What one model's engine did and its clients got, counted since the start; what of it was counted in a span of time is
the difference of two states (ring.py).

A path through a draft tree is identified by its last node: a step of one request is its drafter, its tree's shape, that
node, and the number of tokens in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from foresay.server.metrics.fields import (
    CHOICE_BOUNDS,
    LENGTH_BOUNDS,
    REQUEST_BOUNDS,
    RUN_BOUNDS,
    TOKEN_BOUNDS,
    Histogram,
    count,
    counter,
    histogram,
)
from foresay.server.schemas.errors import EngineFailed
from foresay.spec.accept import ByDepth
from foresay.spec.names import NONE
from foresay.spec.trace import StepTrace

Counts = dict[str, int]
ByPosition = dict[tuple[str, str], int]
#: Fewer decoding steps, or finished requests, may show a loss by chance.
FEWEST_STEPS_AGAINST, FEWEST_REQUESTS_AGAINST = 200, 3
#: vLLM's names of finish reasons. Its tools count ``stop`` and ``length``.
FINISHED = {"cancelled": "abort", "tool_calls": "stop"}

# -- shapes of draft trees ---------------------------------------------------------------------------------------------

#: A tree has at most 64 nodes, so ranks and depths fit in 6 bits each.
BITS = 6
_DEPTHS = [str(depth) for depth in range(1 << BITS)]
MASK = (1 << BITS) - 1


def link(depth: int, rank: int, parent: int) -> int:
    """A position in a tree as one number: depth, rank among the nodes of its depth, and its parent's rank."""
    return (depth << BITS | rank) << BITS | parent


def unlink(number: int) -> tuple[int, int, int]:
    """Depth, rank and the parent's rank of a position."""
    return number >> 2 * BITS, number >> BITS & MASK, number & MASK


class Shape:
    """A tree's shape, given by the parents of its nodes as in :class:`~foresay.spec.request.Origin`.

    drafted: its nodes below the root. per_depth[d]: those of depth d + 1. links[n]: the position of node n + 1.
    trails[n]: the positions on the path from the root to node n, inclusive.
    """

    __slots__ = ("drafted", "links", "per_depth", "trails")

    def __init__(self, parents: Sequence[int]) -> None:
        self.drafted = len(parents) - 1
        self.per_depth: list[int] = []
        self.links: list[int] = []
        self.trails: list[tuple[int, ...]] = [()]
        ranks = [0]
        for parent in parents[1:]:
            depth = len(self.trails[parent]) + 1
            self.per_depth.extend([0] * (depth - len(self.per_depth)))
            ranks.append(self.per_depth[depth - 1])
            self.per_depth[depth - 1] += 1
            self.links.append(link(depth, ranks[-1], ranks[parent]))
            self.trails.append((*self.trails[parent], self.links[-1]))


#: The shape of a tree by its parents. Dynamic trees keep having new ones.
shape_of = lru_cache(maxsize=1024)(Shape)

# -- the counters ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counters:
    """All that is counted. What is no metric: ``nodes`` and ``taken``, trees with a node at a position, and with an
    accepted one; of steps without prefill in which no request had switched speculation off, those named ``decode`` and
    ``propose``; ``decode_tokens``: of one request, in the steps for which plain decoding's time is known;
    ``unsure_seconds``: of those in which that is unsure. latest: the last step, for its gauges; news, unable: the last
    that said such a thing.
    """

    # Of drafts.
    spec_decode_num_drafts: Counts = counter(
        "Trees with at least one drafted token that were verified.", ["drafter"], vllm=True
    )
    spec_decode_num_draft_tokens: Counts = counter("Drafted tokens that were verified.", ["drafter"], vllm=True)
    spec_decode_num_accepted_tokens: Counts = counter(
        "Drafted tokens that were accepted and are in a text.", ["drafter"], vllm=True
    )
    spec_decode_num_draft_tokens_per_pos: ByPosition = counter(
        "Drafted tokens that were verified, by depth in the tree (0: right after the text).", ["drafter", "position"]
    )
    spec_decode_num_accepted_tokens_per_pos: ByPosition = counter(
        "Drafted tokens that were accepted and are in a text, by depth in the tree (0: right after the text).",
        ["drafter", "position"],
        vllm=True,
        keep=[1],
    )
    spec_decode_num_forced_tokens: int = counter("Drafted tokens that a grammar forced.")
    spec_decode_num_discarded_tokens: int = counter("Tokens generated past the end of a text.")
    spec_decode_num_choices: Counts = counter(
        "Steps by the drafter that the budget chose for them (none: no drafter).", ["choice"], known=[NONE]
    )
    spec_decode_tokens_per_step: Histogram = histogram("Tokens that a step added to one request's text.", RUN_BOUNDS)
    decode_seconds: float = counter(
        "Time in steps that read no prompt and in which no request had switched speculation off."
    )
    spec_decode_plain_seconds: float = counter(
        "Estimate of the time that plain decoding would have taken for the same tokens as those steps."
    )
    nodes: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    decode_steps: int = 0
    decode_emitted: int = 0
    decode_rows: int = 0
    decode_tokens: float = 0.0
    propose_seconds: float = 0.0
    unsure_seconds: float = 0.0
    # Of steps, and of delivery.
    engine_steps: int = counter("Steps of the engine.")
    step_phase_seconds: dict[str, float] = counter("Time in steps by phase; deliver: in the server.", ["phase"])
    step_wait_seconds: float = counter(
        "Estimated time in steps that the engine waited for a core taken by another program."
    )
    step_seconds: Histogram = histogram("A whole step of the engine.", TOKEN_BOUNDS)
    iteration_tokens: Histogram = histogram(
        "Tokens of a step: read from prompts, and written.", LENGTH_BOUNDS, vllm="iteration_tokens_total"
    )
    inter_chunk_latency_seconds: Histogram = histogram(
        "Time between two chunks of one text, however many tokens they hold.",
        TOKEN_BOUNDS,
        vllm="inter_token_latency_seconds",
    )
    time_per_output_token_seconds: Histogram = histogram(
        "Each token's share of the gap before its chunk: one observation for every token but those of first chunks.",
        TOKEN_BOUNDS,
    )
    experts_woken: dict[str, float] = counter(
        "Experts of a layer that steps without prompts woke, by rows (1, 2, 4, ..).", ["rows"], known=["1"]
    )
    experts_woken_steps: Counts = counter("Those steps.", ["rows"], known=["1"])
    num_preemptions: int = counter("Requests that had to give up their KV.", vllm=True)
    latest: StepTrace | None = None
    news: StepTrace | None = None
    unable: StepTrace | None = None
    # Of requests.
    prompt_tokens: int = counter("Tokens of prompts.", vllm=True)
    prompt_tokens_cached: int = counter("Tokens of prompts whose KV was cached already.", vllm=True)
    prefix_cache_queries: int = counter("Tokens of prompts that were looked up in the prefix cache.", vllm=True)
    prefix_cache_hits: int = counter("Tokens of prompts whose KV was cached already.", vllm=True)
    generation_tokens: int = counter("Tokens of texts.", vllm=True)
    request_success: Counts = counter(
        "Finished requests, by how they ended; abort: the client left or cancelled.",
        ["finished_reason"],
        known=["stop", "length", "abort", "error"],
        vllm=True,
        keep=[0],
    )
    request_errors: Counts = counter(
        "Requests that were admitted and failed, by the error's code.", ["code"], known=[EngineFailed.code or ""]
    )
    time_to_first_token_seconds: Histogram = histogram(
        "From admitting a request to handing on its first tokens.", REQUEST_BOUNDS, vllm=True
    )
    e2e_request_latency_seconds: Histogram = histogram(
        "From admitting a request to its end.", REQUEST_BOUNDS, vllm=True
    )
    request_queue_time_seconds: Histogram = histogram(
        "How long a request waited in the engine for its turn.", REQUEST_BOUNDS, vllm=True
    )
    request_prefill_time_seconds: Histogram = histogram(
        "From a request's turn to its first token.", REQUEST_BOUNDS, vllm=True
    )
    request_decode_time_seconds: Histogram = histogram(
        "From a request's first token to its last.", REQUEST_BOUNDS, vllm=True
    )
    request_inference_time_seconds: Histogram = histogram(
        "From a request's turn to its last token.", REQUEST_BOUNDS, vllm=True
    )
    request_time_per_output_token_seconds: Histogram = histogram(
        "A request's mean time per token after the first one.", TOKEN_BOUNDS, vllm=True
    )
    request_prompt_tokens: Histogram = histogram("Tokens of a request's prompt.", LENGTH_BOUNDS, vllm=True)
    request_generation_tokens: Histogram = histogram("Tokens of a request's text.", LENGTH_BOUNDS, vllm=True)
    request_params_max_tokens: Histogram = histogram(
        "The most output tokens that a request asked for.", LENGTH_BOUNDS, vllm=True
    )
    request_params_n: Histogram = histogram("Choices asked for per prompt.", CHOICE_BOUNDS, vllm=True)
    request_num_preemptions: Histogram = histogram(
        "Times that a request had to give up its KV.", CHOICE_BOUNDS, vllm=True
    )
    kv_disk_tokens: Counts = counter(
        "Tokens of the KV on disk: read, written, damaged (and computed again), slow (computing them took less).",
        ["outcome"],
        known=["read", "written", "damaged", "slow"],
    )

    # -- counting ------------------------------------------------------------------------------------------------

    def step(self, trace: StepTrace) -> float:
        """Count one step of the engine; returns its seconds."""
        total, phases = 0.0, self.step_phase_seconds
        for phase, seconds in trace.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
            total += seconds
        self.engine_steps += 1
        self.latest = trace
        self.step_wait_seconds += trace.crowded * total
        self.step_seconds.observe(total)
        self.iteration_tokens.observe(trace.prefill_rows + trace.emitted)
        self.num_preemptions += trace.preemptions
        for outcome, tokens in trace.disk.items():
            count(self.kv_disk_tokens, outcome, tokens)
        if trace.unable:
            self.unable = trace
        if trace.choice:
            count(self.spec_decode_num_choices, trace.choice, 1)
            self.news = trace if trace.news else self.news
        if not trace.prefill_rows:
            self._decoded(trace, total)
        return total

    def _decoded(self, trace: StepTrace, total: float) -> None:
        """Count one step without prefill."""
        if trace.woken:
            rows = str(1 << (trace.rows - 1).bit_length())
            count(self.experts_woken, rows, trace.woken)
            count(self.experts_woken_steps, rows, 1)
        if trace.plain:
            return
        self.decode_steps += 1
        self.decode_seconds += total
        self.decode_emitted += trace.emitted
        self.decode_rows += trace.rows
        self.propose_seconds += trace.seconds.get("propose", 0.0)
        self.unsure_seconds += total * trace.unsure
        tokens = trace.emitted / trace.sequences
        self.spec_decode_plain_seconds += trace.root_seconds * tokens
        self.decode_tokens += tokens if trace.root_seconds else 0.0

    def run(self, drafter: str, shape: Shape, last: int, kept: int) -> None:
        """Count a step of one request. last: the last accepted node that is in the text (0: the root); kept: tokens in
        the text."""
        self.generation_tokens += kept
        self.spec_decode_tokens_per_step.observe(kept)
        if not shape.drafted:
            return
        trail, nodes, taken = shape.trails[last], self.nodes, self.taken
        count(self.spec_decode_num_drafts, drafter, 1)
        count(self.spec_decode_num_draft_tokens, drafter, shape.drafted)
        count(self.spec_decode_num_accepted_tokens, drafter, len(trail))
        drafted, accepted = self.spec_decode_num_draft_tokens_per_pos, self.spec_decode_num_accepted_tokens_per_pos
        for depth, times in enumerate(shape.per_depth):
            position = drafter, _DEPTHS[min(depth, MASK)]  # no deeper than a tree is
            drafted[position] = drafted.get(position, 0) + times  # a call for each would double what a run costs
            accepted[position] = accepted.get(position, 0) + (depth < len(trail))
        for node in shape.links:
            nodes[node] = nodes.get(node, 0) + 1
        for node in trail:
            taken[node] = taken.get(node, 0) + 1

    def ended(self, reason: str) -> None:
        """Count a request's end."""
        count(self.request_success, FINISHED.get(reason, reason), 1)

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def drafted(self) -> int:
        """Drafted nodes, of all drafters."""
        return sum(self.spec_decode_num_draft_tokens.values())

    @property
    def accepted(self) -> int:
        """Accepted nodes, of all drafters."""
        return sum(self.spec_decode_num_accepted_tokens.values())

    @property
    def drafts(self) -> int:
        """Trees with at least one drafted node, of all drafters."""
        return sum(self.spec_decode_num_drafts.values())

    @property
    def runs(self) -> int:
        """Steps of single requests that emitted text."""
        return self.spec_decode_tokens_per_step.count

    @property
    def by_depth(self) -> ByDepth:
        """How deep drafts were accepted, of all drafters."""
        accepted: dict[int, int] = {}
        for (_, position), times in self.spec_decode_num_accepted_tokens_per_pos.items():
            count(accepted, int(position), times)
        depths = 1 + max((int(position) for _, position in self.spec_decode_num_draft_tokens_per_pos), default=-1)
        return ByDepth.of([accepted.get(depth, 0) for depth in range(depths)], self.drafts)

    @property
    def speed_up(self) -> float | None:
        """Speed relative to plain decoding; None if nothing was decoded or it is unknown."""
        return (
            self.spec_decode_plain_seconds / self.decode_seconds
            if self.spec_decode_plain_seconds and self.decode_seconds
            else None
        )

    @property
    def spread(self) -> float:
        """How far that may be off, as a share of it, where plain steps were measured too; 0 where it is estimated."""
        return 0.0 if self.latest is None else self.latest.spread

    @property
    def crowded(self) -> float:
        """Estimated share of the steps' time in which the engine waited for a core taken by another program."""
        return self.step_wait_seconds / self.step_seconds.sum if self.step_wait_seconds else 0.0

    @property
    def evident(self) -> bool:
        """Whether it holds enough data to say that speculation costs time: one odd text is not enough."""
        return (
            self.decode_steps >= FEWEST_STEPS_AGAINST and sum(self.request_success.values()) >= FEWEST_REQUESTS_AGAINST
        )

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted nodes that was accepted."""
        drafted = self.drafted
        return self.accepted / drafted if drafted else None
