"""The profile run: a few steps before the first request, which measure plain steps and drafting, and warm everything
up.

They leave nothing behind: all pages are freed and none is in the prefix index. An engine that replaces one of the same
kind gets its measurements and takes none of these steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from operator import truediv
from statistics import median

from foresay.drafters.combined import RoutedDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.kvpaging import PagePool
from foresay.server.engine.costs import Costs
from foresay.spec.budget import CostModel
from foresay.spec.budget.cost import DraftCost
from foresay.spec.engine import EngineCore
from foresay.spec.price import Price
from foresay.spec.protocols import Chains, Drafter, FeatureRequest, Verifier
from foresay.spec.request import EngineInfo, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.sequence import SequenceState
from foresay.spec.shape import MAX_CHUNK, WHOLE_CHAIN
from foresay.spec.step import StepRunner
from foresay.spec.tree import MAX_NODES, ROOT_ONLY, DraftTree, TreeShape

#: Most rounds of steps; and after the third, no further round once they have taken this many seconds.
_TURNS, _LEAST_TURNS, _ENOUGH_SECONDS = 6, 3, 1.5
#: After a step that takes longer than this (seconds), none with more rows is tried.
_LONG = 0.4
#: Except up to this many nodes: one row alone does not show what a second one costs.
_ANYWAY = 5
#: Rows of the steps that are timed (some products work in groups of 6, others of 8), and a drafted tree.
_ROWS = (1, 2, 3, 5, 6, 8, 9, 12, 16, 32, 64)
DRAFTED = TreeShape((4, 4, 3, 3))
#: Trees for which kernels are compiled if a budget chooses shapes: attention over few, more and many rows.
COMPILED = (DRAFTED, TreeShape((8, 8)), TreeShape((20, 20)))
#: Steps taken for compilation, plus one per prompt.
_COMPILED_STEPS = 6
_TARGET_PHASES = ("forward", "draw", "commit")
#: Seconds by phase.
Spent = dict[str, float]


class ProfileRun:
    """Runs steps of one sequence at temperature 1 in an engine of their own, eagerly unless a runner is given.

    costs: known costs, updated with what is measured. report: called with what is being measured. text: token ids of a
    text, for a mixture of experts, of which other tokens wake more.
    """

    def __init__(
        self,
        info: EngineInfo,
        verifier: Verifier,
        pool: PagePool,
        costs: Costs | None = None,
        report: Callable[[str], None] = lambda phase: None,
        text: Sequence[int] = (),
    ) -> None:
        self._info, self._verifier, self._pool = info, verifier, pool
        self._costs, self._report = Costs() if costs is None else costs, report
        self._text = text

    def turns(
        self,
        drafter: Drafter | None,
        shapes: Sequence[TreeShape],
        long: float = math.inf,
        runner: StepRunner | None = None,
    ) -> dict[TreeShape, list[Spent]]:
        """Seconds by phase of steps that verify as many rows as each shape has. Shapes take turns, so that other load
        on the machine affects all alike. Shapes for which there is no room are left out.

        long: after a step that takes longer (seconds), shapes with more rows are dropped.
        """
        room = self._info.max_model_len - 1
        times: dict[TreeShape, list[Spent]] = {}
        engine = self._engine(drafter, runner=runner)
        left = [shape for shape in shapes if 1 + shape.nodes < room]
        begun = time.perf_counter()
        for turn in range(1 + _TURNS):
            if turn > _LEAST_TURNS and time.perf_counter() > begun + _ENOUGH_SECONDS:
                break
            engine.cancel("rehearsal")  # a short text takes few pages
            for shape in [shape for shape in shapes if shape in left]:
                if runner is not None and shape.is_chain:  # a whole step is cheaper after one of its kind
                    self._step(engine, shape, room)
                spent = self._step(engine, shape, room) if shape in left else None
                if spent is not None and turn:  # the first one warms up
                    times.setdefault(shape, []).append(spent)
                elif spent is not None and sum(spent.values()) > long:
                    left = [other for other in left if other.nodes <= max(shape.nodes, _ANYWAY)]
                elif spent is None and turn and shape in left and shape not in times:
                    left.remove(shape)  # does not fit the cache
        engine.cancel("rehearsal")
        engine.runner.rest()
        return times

    def compile(self, drafter: Drafter | None, shape: TreeShape, most: int, chunk: int) -> None:
        """Compile a GPU's kernels for anything requests may need, since compiling later would stall all streams: for
        prompts of all sizes up to a chunk, which drafters read in the step after them, and for captured and eager
        steps, of one sequence up to ``most``; kernels are specialised by powers of two.
        """
        walled = None if drafter is None else RoutedDrafter(PredictionDrafter(), drafter, shape)
        engine = self._engine(walled, shape, most, chunk)
        whole = max(2, min(chunk, self._info.max_model_len - MAX_NODES))
        for length in sorted({min(whole, 3 << power) for power in range(whole.bit_length())}):
            engine.add(Request(id="profile", prompt=[0] * length, params=SamplingParams(seed=0, ignore_eos=True)))
            for _ in range(2):
                engine.step()
            engine.cancel("profile")
        long = min(MAX_NODES + 1, self._info.max_model_len // 2)
        for count in sorted({min(most, 1 << power) for power in range(most.bit_length() + 1)}):
            for penalty in (0.0, 0.5):
                params = SamplingParams(seed=0, ignore_eos=True, frequency_penalty=penalty)
                names = [f"profile {number}" for number in range(count)]
                for number, name in enumerate(names):
                    engine.add(Request(id=name, prompt=[0] * (long if number % 2 else 2), params=params))
                for _ in range(_COMPILED_STEPS + count):
                    engine.step()
                for name in names:
                    engine.cancel(name)
        engine.runner.rest()

    def _engine(
        self,
        drafter: Drafter | None,
        shape: TreeShape = ROOT_ONLY,
        most: int = 1,
        chunk: int = MAX_CHUNK,
        runner: StepRunner | None = None,
    ) -> EngineCore:
        scheduler = Scheduler(self._pool, None, shape, CostModel([1], [1.0]), most, chunk)
        return EngineCore(
            info=self._info,
            pool=self._pool,
            prefix=None,
            verifier=self._verifier,
            drafter=drafter,
            scheduler=scheduler,
            runner=runner,
        )

    def _step(self, engine: EngineCore, shape: TreeShape, room: int) -> Spent | None:
        """One step with a tree of this shape; None if its size differed. The text is restarted when it has no room."""
        there = [*engine.scheduler.running, *engine.scheduler.waiting]
        if there and len(there[0].tokens) + shape.nodes > room:
            engine.cancel(there.pop().id)
        if not there:
            self._begin(engine, room)
        engine.scheduler.shape = shape
        engine.step()
        trace = engine.trace
        return trace.seconds if trace is not None and (trace.rows == shape.nodes or shape.price) else None

    @staticmethod
    def _begin(engine: EngineCore, room: int) -> None:
        """Start a text of two tokens: a head cannot draft before it has the target's hidden state of the first."""
        params = SamplingParams(max_tokens=room, seed=0, ignore_eos=True)
        engine.add(Request(id="rehearsal", prompt=[0], params=params, speculate=engine.drafter is not None))
        engine.scheduler.shape = ROOT_ONLY
        engine.step()

    def root_seconds(self, runner: StepRunner | None = None) -> float:
        """Seconds of a step without drafts; 0 for a context too short to decode in."""
        if self._costs.root is None:
            self._report("timing plain steps")
            times = self.turns(None, [ROOT_ONLY], runner=runner).get(ROOT_ONLY)
            self._costs.root = median(sum(spent.values()) for spent in times) if times else 0.0
        return self._costs.root

    def curve(self) -> CostModel:
        """Seconds of a whole step without drafting, by its rows.

        Each one's share of its round is steadier than its time: a machine is slower or faster for seconds at a time.
        """
        if not self._costs.steps:
            self._report("measuring the step cost")
            shapes = [TreeShape.chain(rows - 1) for rows in _ROWS]
            timed = self.turns(_Filler(self._text), shapes, _LONG)
            times = {
                shape.nodes: [sum(map(step.__getitem__, _TARGET_PHASES)) for step in timed[shape]] for shape in timed
            }
            most = max(map(len, times.values()), default=0)
            times = {rows: each for rows, each in times.items() if len(each) == most}
            turns = list(map(sum, zip(*times.values(), strict=True)))
            self._costs.steps = [
                (rows, median(turns) * median(map(truediv, each, turns))) for rows, each in sorted(times.items())
            ] or [(1, 1.0)]
        rows, seconds = zip(*self._costs.steps, strict=True)
        return CostModel(rows, seconds)

    def draft_cost(
        self, drafter: Drafter, most: int, whole: Callable[[], StepRunner | None] = lambda: None
    ) -> DraftCost:
        """What a draft of this drafter costs: the first level, each further level of a chain or of a tree, and each
        further row.

        most: greatest depth that it can draft. whole: of steps that draft up to ``WHOLE_CHAIN`` tokens of a chain and
        are recorded whole, if there are such.
        """
        drafts = self._costs.drafts
        if drafter.name not in drafts:
            self._report("measuring what drafting costs")
            drafts[drafter.name] = self._draft_cost(drafter, most, whole())
        return drafts[drafter.name]

    def _draft_cost(self, drafter: Drafter, most: int, runner: StepRunner | None) -> DraftCost:
        drafted = DRAFTED.limited(most)
        tree = replace(drafted, price=Price(0.0, (0.0,) * drafted.nodes))  # every level is worth it
        one, chain = TreeShape.chain(1), TreeShape.chain(min(most, WHOLE_CHAIN))
        times = self.turns(drafter, list(dict.fromkeys((one, tree, chain))), runner=runner)
        took = {shape: median(spent["propose"] for spent in each) for shape, each in times.items()}
        if one not in took:  # no room to draft anything
            return DraftCost()
        # A pass of more rows costs more, as the target's own passes show.
        points = self.curve().points
        (_, less), (rows, more) = points[0], points[-1]
        row = max(0.0, more - less) / (less * max(rows - 1, 1))

        def each(shape: TreeShape, further: float) -> float:
            return max(0.0, took[shape] - took[one]) / further if shape.levels > 1 and shape in took else took[one]

        grown = each(tree, tree.levels - 1 + row * (tree.nodes - 1 - tree.levels))
        level = min(grown, each(chain, chain.levels - 1)) if isinstance(drafter, Chains) else grown
        return DraftCost(max(0.0, took[one] - level), level, row * level, grown - level)


class _Filler:
    """Drafts tokens that are hardly ever accepted, at no cost: those of a text, repeated, if there is one."""

    name = "filler"
    needs: FeatureRequest | None = None

    def __init__(self, text: Sequence[int] = ()) -> None:
        self._text = cycle(text)

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """Trees of the shapes, with arbitrary tokens."""
        return [
            filled(sequence.tokens[-1], shape, self.name, list(islice(self._text, shape.nodes - 1)))
            for sequence, shape in zip(sequences, shapes, strict=True)
        ]

    def extend(self, sequence: SequenceState) -> None:
        """Nothing."""

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Nothing."""

    def finished(self, sequence: SequenceState) -> None:
        """Nothing."""


def filled(root: int, shape: TreeShape, drafter: str, text: Sequence[int] = ()) -> DraftTree:
    """A tree with the shape's nodes per level, all children of the first node of the previous level. text: their
    tokens."""
    tokens, parents, below = [root], [-1], 0
    for width in shape.widths:
        first = len(tokens)
        tokens += range(1, width + 1)
        parents += [below] * width
        below = first
    return DraftTree.build([root, *text] if text else tokens, parents, drafter)
