"""Part d and the whole step: what drafting takes by itself, and a speculative step from the draft to the commit.

Both over the floor of what they read: each draft pass its weights and its context, the target once. Acceptance in whole
steps is replayed (:mod:`bench.gpu.replay`), so a step's tokens are synthetic and its work is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import torch

from bench import record
from bench.gpu.device import Device
from bench.gpu.replay import Replayed, trace
from bench.gpu.verify import GREEDY, KNOWN_TOKENS
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.state import Joined, StepState
from foresay.verifier.graphs.step import SpeculativeStep, sampled_ids
from foresay.verifier.paged_model import PagedModel

#: Makes a proposer of chains with so many levels, for one sequence.
MakeProposer = Callable[[int], Proposer]
#: Bytes over bandwidth, in seconds, at a context.
Floor = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Looped:
    """Seconds of a draft loop, as a graph and op by op, and its floor."""

    drafter: str
    levels: int
    graph: float
    eager: float
    floor: float


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole step, its acceptance replayed if there are drafts. tau: tokens per step, as counted. seconds: of one."""

    drafter: str
    levels: int
    tau: float
    seconds: float
    floor: float

    @property
    def tokens_per_second(self) -> float:
        """Synthetic: the trace's tokens over the step's real time."""
        return self.tau / self.seconds


class Ground:
    """One sequence of ``context`` committed tokens in scattered pages, and room for some steps behind them."""

    def __init__(self, target: PagedModel, proposer: Proposer, context: int, steps: int = 0) -> None:
        pool = target.store.pool
        count = pool.pages_for(context + (steps + 8) * proposer.shape.nodes)
        assert count < pool.num_pages, "the store holds the context and the steps"
        self.state = StepState(1, count, pool.page_size, max(2, proposer.reach), target.store.keys.device)
        pages = (1 + torch.randperm(pool.num_pages - 1)[:count]).tolist()
        text = torch.randint(5, KNOWN_TOKENS, (self.state.recent.shape[1],)).tolist()
        self._joined = Joined(pages, context, text, GREEDY, 0)

    def reset(self) -> None:
        """Back to the committed tokens it began with."""
        self.state.join([self._joined])


def loop(device: Device, target: PagedModel, proposer: Proposer, context: int, floor: Floor, patience: float) -> Looped:
    """The draft loop alone, again and again below the same text."""
    ground = Ground(target, proposer, context)
    with torch.inference_mode():
        proposer.propose(ground.state)  # makes what the state holds for its rows
        ground.reset()

        def call() -> None:
            proposer.propose(ground.state)

        eager = median(device.sample(call, patience))
        graph = median(device.sample(device.captured(call), patience))
    return Looped(proposer.name, proposer.shape.levels, graph, eager, floor(context))


def whole_step(
    device: Device,
    target: PagedModel,
    proposer: Proposer,
    context: int,
    tau: float | None,
    floor: Floor,
    patience: float,
    block: int,
) -> Whole:
    """Blocks of whole steps, plain ones too, each from the same text on, with acceptance replayed.

    tau: tokens per step of the acceptance, for chains; None: tokens are drawn as ever. block: steps that are timed
    before the text is cut back to where it began; the floor is that of the mean context.
    """
    ground = Ground(target, proposer, context, block)
    replayed = Replayed(trace(tau or 1.0, proposer.shape.levels, block), ground.state.device)
    step = SpeculativeStep(target, proposer, ground.state, sampled_ids if tau is None else replayed)
    step()
    ground.reset()
    call = device.captured(step)
    taken: list[float] = []
    while sum(taken) < patience:
        ground.reset()
        replayed.rewind()
        taken += device.seconds(call, block)
    ground.reset()
    replayed.rewind()
    counted = [_emitted(call, step) for _ in range(block)]
    reached = context + block * mean(counted) / 2
    name = f"{proposer.name or 'plain'}{'' if proposer.shape.is_chain else ', a tree'}"
    return Whole(name, proposer.shape.levels, mean(counted), median(taken), floor(reached))


def _emitted(call: Callable[[], object], step: SpeculativeStep) -> int:
    """Run one step; the tokens it emitted."""
    call()
    return int(step.out[0, 0])


def show(looped: list[Looped], whole: list[Whole]) -> None:
    """Two tables."""
    rows = [
        [f"{x.drafter}, {x.levels}", 1e3 * x.floor, 1e3 * x.graph, x.graph / x.floor, 1e3 * x.eager] for x in looped
    ]
    record.table("draft loops", ["drafter, levels", "floor ms", "graph ms", "over floor", "eager ms"], rows)
    columns = ["drafter, levels", "tau", "floor ms", "step ms", "over floor", "tokens/s"]
    steps = [
        [f"{w.drafter}, {w.levels}", w.tau, 1e3 * w.floor, 1e3 * w.seconds, w.seconds / w.floor, w.tokens_per_second]
        for w in whole
    ]
    record.table("whole steps, SYNTHETIC acceptance replayed", columns, steps)


def as_json(looped: list[Looped], whole: list[Whole]) -> dict[str, Any]:
    """For the record; seconds."""
    return {
        "draft_loops": [{**asdict(x), "over_floor": x.graph / x.floor} for x in looped],
        "whole_steps_synthetic_acceptance": [
            {**asdict(w), "over_floor": w.seconds / w.floor, "tokens_per_second": w.tokens_per_second} for w in whole
        ],
    }
