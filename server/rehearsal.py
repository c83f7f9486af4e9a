"""A few steps before the first request: what drafting will be compared with, what it costs, and everything is warm.

They leave nothing behind: all pages come back and none is findable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from functools import cached_property
from statistics import median

import torch

from kvpaging import PagePool, PageTable
from spec.budget import StepCost
from spec.budget.cost import DraftCost
from spec.engine import Engine
from spec.protocols import Drafter, FeatureRequest, Rows, Verifier
from spec.request import EngineInfo, Request
from spec.sampling import SamplingParams
from spec.scheduler import Scheduler
from spec.sequence import Sequence
from spec.step import StepRunner
from spec.tree import MAX_NODES, ROOT_ONLY, DraftTree, TreeShape

#: At most so many steps of a kind, and no further one when they have taken so many seconds.
_STEPS = 6
_PATIENCE = 0.4
#: Rows of the steps whose time is measured, levels of the longer of two drafted chains, and a tree.
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_DEEP, _TREE = 4, TreeShape((4, 4, 3, 3))
#: A longer text, for what context adds; a pass of few and one of more rows behind it.
_CONTEXT, _FEW, _MORE = 1024, 2, 16
_TARGET_PHASES = ("forward", "draw", "commit")


class Rehearsal:
    """Steps of one sequence at temperature 1, through an engine of their own. runner: who runs them; None: op by op."""

    def __init__(self, info: EngineInfo, verifier: Verifier, pool: PagePool, runner: StepRunner | None = None) -> None:
        self._info, self._verifier, self._pool, self._runner = info, verifier, pool, runner

    def steps(self, drafter: Drafter | None, shape: TreeShape) -> list[dict[str, float]]:
        """Seconds by phase of a few steps that verify as many rows as the shape has; none if there is no room."""
        room = self._info.max_model_len - 1
        if room < 1 + shape.nodes:
            return []
        cost = StepCost([1], [1.0])
        engine = Engine(
            info=self._info,
            pool=self._pool,
            prefix=None,
            verifier=self._verifier,
            drafter=drafter,
            scheduler=Scheduler(self._pool, None, shape, cost, max_seqs=1, plain_every=0),
            runner=self._runner,
        )
        tokens = min(_STEPS * (1 + shape.levels), room)
        params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True)
        engine.add(Request(id="rehearsal", prompt=[0], params=params, speculate=drafter is not None))
        times: list[dict[str, float]] = []
        begun = time.perf_counter()
        while (
            engine.has_work and len(times) < _STEPS + 1 and (len(times) < 3 or time.perf_counter() < begun + _PATIENCE)
        ):
            engine.step()
            trace = engine.trace
            if trace is None:  # so many rows do not fit the cache
                break
            if trace.rows == shape.nodes:
                times.append(trace.seconds)
        engine.cancel("rehearsal")
        engine.runner.rest()
        return times[1:] or times  # the first one warms up

    def root_seconds(self) -> float:
        """Seconds of a step without drafts; 0 for a context too short to decode in."""
        times = self.steps(None, ROOT_ONLY)
        return median(sum(seconds.values()) for seconds in times) if times else 0.0

    @cached_property
    def _points(self) -> list[tuple[int, float]]:
        """Rows and seconds. In turns, up and down, so that whatever else the machine does meets all alike."""
        times: dict[int, list[float]] = {}
        for rows in _ROWS:
            if not self._time_rows(times, TreeShape.chain(rows - 1)) or median(times[rows]) > _PATIENCE:
                break
        for rows in sorted(times, reverse=True):
            if median(times[rows]) <= _PATIENCE:
                self._time_rows(times, TreeShape.chain(rows - 1))
        return [(rows, median(seconds)) for rows, seconds in times.items()]

    def _time_rows(self, times: dict[int, list[float]], shape: TreeShape) -> bool:
        spent = [sum(step.get(phase, 0.0) for phase in _TARGET_PHASES) for step in self.steps(_Filler(), shape)]
        if spent:
            times.setdefault(shape.nodes, []).extend(spent)
        return bool(spent)

    def curve(self) -> StepCost:
        """Seconds of a whole step by its rows, drafting left out, and what context adds, and trees."""
        points = self._points or [(1, 1.0)]
        per_token, per_row_token = self._context()
        rows, seconds = [rows for rows, _ in points], [seconds for _, seconds in points]
        return StepCost(rows, seconds, per_token, per_row_token, self._branching())

    def _branching(self) -> float:
        """Seconds that a tree adds to a step, beside a chain of as many nodes."""
        tree: dict[int, list[float]] = {}
        chain: dict[int, list[float]] = {}
        slow = not self._points or self._points[0][1] > _PATIENCE / _STEPS
        for _ in range(1 if slow else 3):
            self._time_rows(tree, _TREE)
            self._time_rows(chain, TreeShape.chain(_TREE.nodes - 1))
        return max(0.0, median(tree[_TREE.nodes]) - median(chain[_TREE.nodes])) if tree and chain else 0.0

    def _context(self) -> tuple[float, float]:
        """Seconds that each token of context adds to a pass, and to each of its rows."""
        length = min(_CONTEXT, self._info.max_model_len, (self._pool.num_pages - 1) * self._pool.page_size) - MAX_NODES
        if length <= 0:
            return 0.0, 0.0
        table = PageTable(self._pool)
        table.reserve(length + _MORE)
        table.commit(length)
        try:
            # Short and long in turns, so that whatever else the machine does meets them alike.
            times = [
                [self._pass(table, base, rows) for base in (0, length) for rows in (_FEW, _MORE)] for _ in range(5)
            ]
        finally:
            table.release()
        fastest = [min(column) for column in zip(*times, strict=True)]
        few, more = (max(0.0, fastest[2 + i] - fastest[i]) / length for i in range(2))
        per_row = max(0.0, more - few) / (_MORE - _FEW)
        return max(0.0, few - _FEW * per_row), per_row

    def _pass(self, table: PageTable, base: int, rows: int) -> float:
        """Seconds of a pass of the target behind so many tokens."""
        begun = time.perf_counter()
        self._verifier.run([Rows(table, torch.zeros(rows, dtype=torch.int64), base)])
        return time.perf_counter() - begun

    def draft_cost(self, drafter: Drafter, most: int) -> DraftCost:
        """What a chain and a tree of this drafter take, and what each token it has to catch up with adds to that.

        most: levels that it can draft.
        """
        deep, tree = min(_DEEP, most), _TREE.limited(most)
        one_level, deepest, branching = (
            self._proposing(drafter, shape) for shape in (TreeShape.chain(1), TreeShape.chain(deep), tree)
        )
        level = max(0.0, deepest - one_level) / max(1, deep - 1)
        start = max(0.0, one_level - level)
        # A pass over what was written meanwhile costs more rows, as the target's own passes show.
        (_, one), (rows, all) = (
            self._points[0] if self._points else (1, 1.0),
            self._points[-1] if self._points else (2, 1.0),
        )
        token = level * max(0.0, all - one) / (one * max(rows - 1, 1))
        more = token * (tree.nodes - 1 - tree.levels)
        return DraftCost(start, level, token, max(level, (branching - start - more) / tree.levels))

    def _proposing(self, drafter: Drafter, shape: TreeShape) -> float:
        """Seconds of a draft of this shape; 0 if there was no room for one."""
        return median(spent["propose"] for spent in self.steps(drafter, shape) or [{"propose": 0.0}])


class _Filler:
    """Drafts what hardly ever comes, for nothing."""

    name = "filler"
    needs: FeatureRequest | None = None

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        """Trees of one token a level and its siblings."""
        return [
            filled(sequence.tokens[-1], shape, self.name) for sequence, shape in zip(sequences, shapes, strict=True)
        ]

    def extend(self, sequence: Sequence) -> None:
        """Nothing."""

    def committed(self, sequence: Sequence, path: list[int]) -> None:
        """Nothing."""

    def finished(self, sequence: Sequence) -> None:
        """Nothing."""


def filled(root: int, shape: TreeShape, drafter: str) -> DraftTree:
    """A tree of as many nodes a level as the shape has, all below the first of the one before."""
    tokens, parents, below = [root], [-1], 0
    for width in shape.widths:
        first = len(tokens)
        tokens += range(1, width + 1)
        parents += [below] * width
        below = first
    return DraftTree.chain(tokens, drafter) if shape.is_chain else DraftTree.build(tokens, parents, drafter)
