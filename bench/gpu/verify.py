"""Part c: the time of a verifying step over its floor, by rows and context, as a graph and op by op.

A step here is the whole pass over the rows, the sample at every one of them and the accepted path, over keys and values
that are random numbers in scattered pages. It commits nothing, so that each is the same: the context stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from bench import record
from bench.gpu.device import Device
from bench.gpu.session import Clock
from bench.gpu.shapes import step_bytes
from bench.stats import percentile
from foresay.kvpaging import PageTable
from foresay.spec.protocols import Rows
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.proposer import chain_columns
from foresay.verifier.graphs.rows import Nodes, chain_words, rows_of
from foresay.verifier.graphs.state import Joined, StepState
from foresay.verifier.model.paged_pass import paged_pass
from foresay.verifier.ops.accept import AcceptedPaths, accept_paths
from foresay.verifier.ops.sample import sample_rows
from foresay.verifier.paged_model import PagedModel

GREEDY = SamplingParams(temperature=0.0)
#: Tokens of the bundled vocabulary; those behind are never sampled.
KNOWN_TOKENS = 4096


class VerifyStep:
    """A chain of ``rows`` nodes below ``context`` committed tokens of one sequence, verified again and again."""

    def __init__(self, target: PagedModel, rows: int, context: int, sampling: SamplingParams = GREEDY) -> None:
        pool, device = target.store.pool, target.store.keys.device
        count = pool.pages_for(context + rows)
        assert count < pool.num_pages, "the store holds the context and the rows"
        self.target, self.rows, self.context = target, rows, context
        self.state = StepState(1, count, pool.page_size, 1, device)
        self._parents, self._ancestors, _ = chain_columns(1, rows, device)
        numbers, words, depths = chain_words(1, rows, device)
        tokens = torch.randint(5, KNOWN_TOKENS, (1, rows))
        self._nodes = Nodes(tokens.to(device), numbers, words, depths)
        self._count = torch.tensor([rows], device=device)
        self.state.sampling(depths)
        pages = (1 + torch.randperm(pool.num_pages - 1)[:count]).tolist()
        self.state.join([Joined(pages, context, tokens[0, :1].tolist(), sampling, 0)])

    @torch.inference_mode()
    def __call__(self) -> AcceptedPaths:
        """One step."""
        nodes, state = self._nodes, self.state
        rows, slots = rows_of(state, nodes)
        logits, _ = paged_pass(self.target.decoder, rows, self.target.store)
        sampled = sample_rows(logits, state.sampling(nodes.depths)).view(1, -1)
        return accept_paths(nodes.tokens, self._parents, self._ancestors, sampled, self._count, slots)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a step, and times its floor."""

    rows: int
    context: int
    graph: float
    eager: float
    floor: float

    @property
    def multiple(self) -> float:
        """Step over floor, as a graph."""
        return self.graph / self.floor


def measure(
    device: Device,
    target: PagedModel,
    rows: Sequence[int],
    contexts: Sequence[int],
    read: float,
    clock: Clock,
    patience: float,
) -> list[Timed]:
    """Every context and row count that fits into the clock."""
    config, timed = target.decoder.config, []
    for context in contexts:
        floor = step_bytes(config, context, device.dtype.itemsize) / read
        for count in rows:
            if clock.fits(f"step of {count} rows at {context}", 3 * patience):
                step = VerifyStep(target, count, context)
                eager = median(device.sample(step, patience))
                graph = median(device.sample(device.captured(step), patience))
                timed.append(Timed(count, context, graph, eager, floor))
                device.free()
    return timed


def show(name: str, timed: Sequence[Timed]) -> None:
    """The table of one model."""
    rows = [[f"{t.rows}", t.context, 1e3 * t.floor, 1e3 * t.graph, t.multiple, 1e3 * t.eager] for t in timed]
    record.table(
        f"verifying steps, {name}", ["rows", "context", "floor ms", "graph ms", "over floor", "eager ms"], rows
    )


def as_json(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """For the record; seconds."""
    return [{**asdict(t), "over_floor": t.multiple} for t in timed]


def nanoseconds_per_token(timed: Sequence[Timed]) -> float | None:
    """What a token of context adds to a step of one row, from the shortest to the longest context; None for one."""
    single = {t.context: t.graph for t in timed if t.rows == 1}
    if len(single) < 2:
        return None
    low, high = min(single), max(single)
    return 1e9 * (single[high] - single[low]) / (high - low)


def row_factor(timed: Sequence[Timed], rows: int) -> float | None:
    """A step of so many rows over a step of one, at the shortest context; None where one of them is missing."""
    found = {(t.context, t.rows): t.graph for t in timed}
    shortest = min((t.context for t in timed), default=0)
    one, many = found.get((shortest, 1)), found.get((shortest, rows))
    return many / one if one and many else None


def prefill(device: Device, target: PagedModel, tokens: int, chunk: int, patience: float) -> dict[str, float]:
    """Seconds of reading a prompt in chunks, op by op as it is served, and tokens a second."""
    table = PageTable(target.store.pool)
    table.reserve(tokens)
    text = torch.randint(5, KNOWN_TOKENS, (tokens,))

    def read() -> None:
        for begin in range(0, tokens, chunk):
            target.run([Rows(table, text[begin : begin + chunk], begin, wanted="last")])

    took = median(device.sample(read, patience))
    table.release()
    return {"tokens": tokens, "seconds": took, "tokens_per_second": tokens / took}


def steadiness(device: Device, target: PagedModel, context: int, steps: int, clock: Clock) -> dict[str, float]:
    """Percentiles of the time of a one-row step, over as many steps as a third of the time left allows."""
    call = device.captured(VerifyStep(target, 1, context))
    once = median(device.sample(call, 0.05))
    count = max(10, min(steps, int(clock.left / 3 / once)))
    taken = device.seconds(call, count)
    p50, p99 = percentile(taken, 50), percentile(taken, 99)
    return {"steps": count, "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "p99_over_p50": p99 / p50}


def temperature(device: Device, target: PagedModel, context: int, patience: float) -> dict[str, float]:
    """A one-row step at temperature 1 over one at 0, timed in turns."""
    calls = [device.captured(VerifyStep(target, 1, context, SamplingParams(temperature=t, seed=1))) for t in (0.0, 1.0)]
    rounds = [[median(device.sample(call, patience / 4)) for call in calls] for _ in range(4)]
    cold, warm = (median(taken) for taken in zip(*rounds, strict=True))
    return {"t0_ms": 1e3 * cold, "t1_ms": 1e3 * warm, "ratio": median(after / before for before, after in rounds)}
