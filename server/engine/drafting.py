"""From drafters to the budget that chooses among them, and the graphs captured for a device.

::

    a model, a lookup, a user-defined one       each a member, with its measured cost (server/engine/calibrate.py)
    Budget                                      chooses at every step, unless one drafter has one shape (--draft-tokens)
    CombinedDrafter                             all of them as one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from foresay.drafters.combined import CombinedDrafter, RoutedDrafter, configured, members_of, united
from foresay.drafters.levels import TreeDrafter, rooms
from foresay.drafters.prediction import PredictionDrafter
from foresay.drafters.proposer import by_plan, on_cpu, on_device
from foresay.server.engine.calibrate import ProfileRun
from foresay.server.engine.drafters.registry import entry_of
from foresay.server.engine.parameters import pinned
from foresay.server.settings.config import EngineConfig
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.members import MODEL_LEVELS, OPEN, Member
from foresay.spec.price import Price
from foresay.spec.protocols import Drafter
from foresay.spec.scheduler import PREDICTED_LEVELS
from foresay.spec.step import StepRunner
from foresay.spec.tree import MAX_NODES, TreeShape
from foresay.verifier.graphs.buckets import MakeProposers, buckets, chunks, mixed, passes, recorded_steps, sizes, widths
from foresay.verifier.graphs.capture import Capture, CudaGraphs, Eager
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.runner import GraphStepRunner
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.eager import compiled

#: Draft length if the shape is fixed and no length is given.
DEFAULT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Drafting:
    """All drafters combined into one, and the budget that chooses; no budget if one drafter has a fixed shape. shape:
    the largest. cost: of a step, by its rows.

    A request's predicted output is always drafted.
    """

    drafter: Drafter
    budget: Budget | None
    shape: TreeShape
    cost: CostModel

    @classmethod
    def of(
        cls, config: EngineConfig, drafters: Sequence[Drafter], profile_run: ProfileRun, verifier: ModelRunner
    ) -> Drafting:
        """Combine the drafters, with the measured cost of steps and, if there is a choice, of each drafter."""
        shape = pinned(config)
        if not drafters or (shape is not None and not shape.levels):
            drafters, shape = (), TreeShape()
        cost = profile_run.curve()
        if shape is not None and len(drafters) < 2:
            drafter = RoutedDrafter(PredictionDrafter(cost), drafters[0] if drafters else None, shape)
            return cls(drafter, None, shape, cost)
        members = [_member(drafter, profile_run, verifier) for drafter in drafters]
        # First: a token that several propose is attributed to the request's prediction.
        budget = Budget([Member.looking(PredictionDrafter(), PREDICTED_LEVELS), *members], cost, shape)
        return cls(CombinedDrafter(budget), budget, budget.shape, cost)

    def shapes(self) -> list[tuple[Drafter, TreeShape]]:
        """Each drafter, and the largest trees and chains requested of it."""
        if self.budget is None:
            return [(drafter, self.shape) for drafter in members_of(self.drafter).values()]
        opened = replace(OPEN, price=Price(0.0, (0.0,)))
        shapes = [opened, TreeShape.chain(MODEL_LEVELS)] if self.budget.pinned is None else [self.budget.pinned]
        members = [one for one in self.budget.members.values() if not one.looks]
        return [(one.drafter, shape.limited(one.levels)) for one in members for shape in shapes]


def _member(drafter: Drafter, profile_run: ProfileRun, verifier: ModelRunner) -> Member:
    entry = entry_of(drafter)
    if entry.looks:
        return Member.looking(drafter)
    levels = entry.levels(drafter)

    def whole() -> StepRunner | None:
        model = on_device(drafter)
        proposers = [] if model is None or not model.whole else on_cpu([(model, levels)], verifier.vocab_size)
        runner, recording = recorded(verifier, drafter, [*proposers[:1], *proposers[1:][-1:]])
        return runner if sum(1 for _ in recording) else None

    return Member.model(drafter, profile_run.draft_cost(drafter, levels, whole), levels)


def capture_passes(
    verifier: ModelRunner,
    drafters: Sequence[Drafter],
    longest: int,
    max_seqs: int,
    chunk: int,
    capture: Capture,
    report: Callable[..., None],
) -> None:
    """Capture the parts of split steps: target passes over trees of all sizes and over prefill chunks, and enable
    capture of the drafters for the profile run. longest: most tokens of a text. chunk: most prefill rows."""
    needs = united([drafter.needs for drafter in drafters])
    room = longest + MAX_NODES, verifier.store.pool.page_size
    wide = max_seqs if verifier.store.states is None else 1  # recurrent layers read rows without gaps between them
    sizes = [*passes(max_seqs, *room), *chunks(wide, min(chunk, longest), *room)]
    for number, _ in enumerate(verifier.capture(needs, sizes, capture), start=1):
        report("capturing passes", number / len(sizes))
    for captured in filter(None, map(on_device, drafters)):
        captured.capture = capture


def capture_levels(
    verifier: ModelRunner, drafting: Drafting, longest: int, max_seqs: int, capture: Capture
) -> Iterator[float]:
    """Capture the levels of drafts: made on demand, they would delay all streams. Yields after each the fraction of its
    drafter's that is done."""
    needed = rooms(max_seqs, longest, verifier.store.pool.page_size)
    for drafter, shape in drafting.shapes():
        captured = on_device(drafter)
        if captured is not None and shape.levels:
            for number, _ in enumerate(captured.capture_ahead(shape, verifier.vocab_size, needed, capture), start=1):
                yield number / len(needed)


def runner_of(
    verifier: ModelRunner,
    drafting: Drafting,
    longest: int,
    max_seqs: int,
    chunk: int,
    capture: Capture,
    report: Callable[..., None],
) -> StepRunner:
    """The step runner. Whole steps are captured, those with rows of a prompt too, and launched one ahead of the host if
    the plan is unlikely to change; with user-defined drafters all steps are split. chunk: most prefill rows."""
    make = _proposers(verifier, drafting)
    if make is None:
        return StepRunner(verifier, drafting.drafter)
    page_size, shape = verifier.store.pool.page_size, drafting.shape if drafting.budget is None else OPEN
    tables, counts = widths(longest + 2 * shape.nodes + 1, page_size), sizes(max_seqs)
    prompts = mixed(max_seqs if verifier.store.states is None else 1, min(chunk, longest))
    made, total = {}, len(counts) * len(tables)
    for number, (key, bucket) in enumerate(buckets(verifier, make, capture, (counts, tables), prompts), start=1):
        report("capturing steps", number / total)
        made[key] = bucket
        for step in bucket:
            step.drafting = _part(drafting.budget, step)
    return GraphStepRunner(verifier, drafting.drafter, made)


def _proposers(verifier: ModelRunner, drafting: Drafting) -> MakeProposers | None:
    """The drafters in captured steps; None if the host is needed in between."""
    budget, known = drafting.budget, _models(drafting)
    if known is None:
        return None
    if budget is None:
        return by_plan(known, False, verifier, drafting.shape)
    return by_plan(known, len(known) < len(budget.members), verifier, budget.pinned)


def _models(drafting: Drafting) -> list[tuple[TreeDrafter, int]] | None:
    """The drafters with logits, and the most levels of each; None if one of the drafters that are no lookups is not
    part of captured steps."""
    budget, given = drafting.budget, configured(drafting.drafter)
    if budget is None:
        drafters = [] if given is None else [(given, drafting.shape.levels)]
    else:
        drafters = [(one.drafter, one.levels) for one in budget.members.values() if not one.looks]
    found = [(on_device(drafter), levels) for drafter, levels in drafters]
    known = [(model, levels) for model, levels in found if model is not None and model.whole]
    return known if len(known) == len(found) else None


def record_steps(verifier: ModelRunner, drafting: Drafting) -> tuple[StepRunner, Iterator[None]]:
    """The step runner of a CPU, and what records its whole steps (:func:`recorded`)."""
    budget, vocab_size = drafting.budget, verifier.vocab_size
    proposers = on_cpu(_models(drafting) or [], vocab_size, drafting.shape if budget is None else budget.pinned)
    return recorded(verifier, drafting.drafter, proposers)


def recorded(
    verifier: ModelRunner, drafter: Drafter, proposers: Sequence[Proposer]
) -> tuple[StepRunner, Iterator[None]]:
    """The runner, and what records its steps, one after the other, each in a tenth of a second. Other steps, and those
    not yet recorded, run in parts; so do all if there are no compiled kernels, or the target has recurrent layers,
    whose paths a CPU replays between steps."""
    steps: list[SpeculativeStep] = []
    store = verifier.store
    if not proposers or store.states is not None or not compiled(store.tensors[0]):
        return StepRunner(verifier, drafter), iter(())

    def record() -> Iterator[None]:
        for step in recorded_steps(verifier, proposers):
            steps.append(step)
            yield

    key = 1, store.pool.num_pages
    return GraphStepRunner(verifier, drafter, {key: steps}, run_ahead=False), record()


def _part(budget: Budget | None, step: SpeculativeStep) -> float:
    """Drafting's share of a step's time, as measured; 0 without a budget."""
    shape = step.proposer.shape
    member = None if budget is None else budget.members.get(step.proposer.name)
    if budget is None or member is None:
        return 0.0
    drafting = member.cost.seconds(shape.levels, shape.nodes - 1 - shape.levels, grown=not shape.is_chain)
    return drafting / (drafting + budget.cost.seconds(shape.nodes + step.prompt_rows[-1]))


def capture_of(graphs: bool) -> Capture:
    """graphs: ``--no-graphs`` runs the same steps without capturing them."""
    return CudaGraphs() if graphs else Eager
