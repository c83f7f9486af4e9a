"""Whole steps, repeated from the same text on: a proposal, a pass of the target, samples, the accepted path."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from bench.gpu.device import Device
from bench.stats import percentile
from foresay.drafters.proposer import RootOnly
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.buckets import widths
from foresay.verifier.graphs.proposer import DeviceTree, Proposer, chain_columns
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.model_runner import ModelRunner

#: Tokens of the bundled vocabulary; those after are never sampled.
KNOWN_TOKENS = 4096


class RandomChain(RootOnly):
    """Proposes the same random tokens at each step, which has so many rows, one of them accepted."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(1, device)
        self.shape = TreeShape.chain(rows - 1) if rows > 1 else TreeShape()
        self._columns, self._counts = chain_columns(1, rows, device), torch.full((1,), rows, device=device)
        self._drafts = torch.randint(5, KNOWN_TOKENS, (1, rows - 1)).to(device)

    def propose(self, state: StepState) -> DeviceTree:
        """The roots, and a chain below each."""
        tokens = torch.cat((state.roots[:, None], self._drafts), dim=1)
        return DeviceTree(tokens, *self._columns, self._counts, True)


class Ground:
    """One sequence of ``context`` committed tokens in scattered pages, and room for some steps after them. Its page
    table is as wide as that of the captured steps in which a server runs texts of this length."""

    def __init__(
        self, target: ModelRunner, proposer: Proposer, context: int, steps: int = 0, temperature: float = 0.0
    ) -> None:
        pool = target.store.pool
        count = pool.pages_for(context + (steps + 8) * proposer.shape.nodes)
        assert count < pool.num_pages, "the store holds the context and the steps"
        longest = max(target.max_positions + 2 * proposer.shape.nodes + 1, count * pool.page_size)
        wide = next(pages for pages in widths(longest, pool.page_size) if pages >= count)
        store, reach = target.store, max(2, proposer.reach)
        self.state = StepState(1, wide, pool.page_size, reach, store.device, store.windows, store.states is not None)
        pages = (1 + torch.randperm(pool.num_pages - 1)[:count]).tolist()
        text = torch.randint(5, KNOWN_TOKENS, (self.state.recent.shape[1],)).tolist()
        self._joined = BatchSlot(pages, context, text, SamplingParams(temperature=temperature, seed=1), 0, (1, 1))

    def reset(self) -> None:
        """Back to the committed tokens it began with. Recurrent layers leave their states in other pages."""
        self.state.join([self._joined])
        if self.state.states is not None:
            self.state.write_tables([self._joined.pages], [self._joined.length], [(1, 2, 3)])


class Steps:
    """Steps of one kind, captured if possible. block: steps in a row before the text is cut back."""

    def __init__(
        self, device: Device, model: ModelRunner, proposer: Proposer, context: int, block: int, temperature: float = 0.0
    ) -> None:
        self.device, self.block = device, block
        self.ground = Ground(model, proposer, context, block, temperature)
        self.step = SpeculativeStep(model, proposer, self.ground.state)
        self.ground.reset()
        self.step()  # eager: initialises the state of its rows
        self.ground.reset()
        self.call = device.captured(self.step)

    def seconds(self, least: int) -> list[float]:
        """The seconds of at least so many steps. The first of a block does not count: it waits for the host's work."""
        taken: list[float] = []
        while len(taken) < least:
            self.ground.reset()
            self.call()
            taken += self.device.seconds(self.call, self.block - 1)
        return taken

    def timed(self, patience: float, least: int = 3) -> dict[str, Any]:
        """The median step, the 99th percentile over it, what the last one emitted; of at least so many steps, and for
        at least about ``patience`` seconds."""
        self.seconds(2)
        once = max(median(self.seconds(2)), 1e-6)
        taken = self.seconds(max(least, min(1000, int(patience / once))))
        more = {"steps": len(taken), "p99_over_p50": percentile(taken, 99) / median(taken)}
        return {"value": median(taken), "emitted": int(self.step.out[0, 0])} | more


def rows_proposer(rows: int, device: torch.device) -> Proposer:
    """A proposer for steps of so many rows; with one row a plain step as in a server."""
    return RootOnly(1, device) if rows == 1 else RandomChain(rows, device)
