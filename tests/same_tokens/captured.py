"""Engines whose steps are captured, on a CPU: they are recorded, under the rules of a graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.levels import TreeDrafter
from foresay.drafters.proposer import by_plan
from foresay.kvpaging import PagePool, PrefixIndex
from foresay.spec.budget import CostModel
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Drafter
from foresay.spec.scheduler import Scheduler
from foresay.spec.step import StepRunner
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.buckets import buckets, sizes, widths
from foresay.verifier.graphs.capture import Capture, recorded
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.same_tokens.models import MAX_SEQS, Pair, info_of, paged, windowed
from tests.same_tokens.witness import Job, Text, stepped

#: Makes a drafter whose KV lies in the pages of a pool; None: nobody drafts.
MakeDrafter = Callable[[PagePool], Drafter | None]


def draft_model(pair: Pair) -> MakeDrafter:
    """The pair's draft model."""
    return lambda pool: DraftModelDrafter(paged(pair.draft, pool))


def copy(pair: Pair) -> MakeDrafter:
    """The same weights on the target's pages."""
    return lambda pool: pair.copy(pool)


def captured_engine(
    pair: Pair,
    drafter: MakeDrafter,
    shape: TreeShape,
    *,
    graphs: bool = True,
    run_ahead: bool = True,
    capture: Capture = recorded,
    max_seqs: int = MAX_SEQS,
    tokens: int = 1024,
    page_size: int = 16,
    prefix: bool = False,
    windows: int = 0,
    wrap: Callable[[Proposer], Proposer] = lambda proposer: proposer,
) -> EngineCore:
    """graphs: False runs the same passes without captured steps. wrap: put around every proposer that has a model."""
    pool = PagePool(1 + tokens // page_size, page_size)
    verifier, proposing = windowed(pair.target, pool, pair.kv, windows), drafter(pool)
    index = PrefixIndex(pool) if prefix else None
    info = info_of(pair.target, pool, max_seqs, shape)

    models = [(proposing, shape.levels)] if shape.levels and isinstance(proposing, TreeDrafter) else []
    make, longest = by_plan(models, False, verifier, shape), info.max_model_len + 2 * shape.nodes + 1

    def wrapped(size: int) -> list[Proposer]:
        plain, *others = make(size)
        return [plain, *map(wrap, others)]

    made = buckets(verifier, wrapped, capture, (sizes(max_seqs), widths(longest, page_size)))
    return EngineCore(
        info=info,
        pool=pool,
        prefix=index,
        verifier=verifier,
        drafter=proposing,
        scheduler=Scheduler(pool, index, shape, CostModel([1], [1.0]), max_seqs, 256),
        runner=GraphStepRunner(verifier, proposing, dict(made), run_ahead)
        if graphs
        else StepRunner(verifier, proposing),
    )


def run_freely(engine: EngineCore, jobs: Iterable[Job], careful: bool = False) -> dict[str, Text]:
    """Run jobs to their end, letting steps run ahead. careful: see :func:`~tests.same_tokens.witness.stepped`."""
    texts = {job.id: Text() for job in jobs}
    for deltas in stepped(engine, jobs, careful):
        for delta in deltas:
            texts[delta.id].add(delta)
    engine.check()
    return texts
