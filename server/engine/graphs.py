"""What is captured for a device: passes and levels, for steps in parts; whole steps, where all are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafters.combined import united
from drafters.levels import TreeDrafter, rooms
from drafters.proposer import Drafts, on_device
from drafters.routed import configured
from server.engine.drafting import Drafting
from spec.protocols import Drafter
from spec.step import PartsRunner, StepRunner
from spec.tree import MAX_NODES, TreeShape
from verifier.graphs.buckets import buckets, passes, sizes, widths
from verifier.graphs.capture import Capture, CudaGraphs, Direct
from verifier.graphs.proposer import Proposer
from verifier.graphs.runner import WholeRunner
from verifier.paged_model import PagedModel


def capture_passes(
    verifier: PagedModel,
    drafters: Sequence[Drafter],
    longest: int,
    max_seqs: int,
    capture: Capture,
    say: Callable[..., None],
) -> None:
    """What steps run in parts: passes of the target over trees of all sizes, and the levels of what is drafted while
    costs are measured. longest: most tokens of a text."""
    needs = united([drafter.needs for drafter in drafters])
    sizes = passes(max_seqs, longest + MAX_NODES, verifier.store.pool.page_size)
    for number, _ in enumerate(verifier.capture(needs, sizes, capture), start=1):
        say("capturing passes", number / len(sizes))
    for captured in filter(None, map(on_device, drafters)):
        captured.capture = capture


def capture_levels(
    verifier: PagedModel, drafting: Drafting, longest: int, max_seqs: int, capture: Capture, say: Callable[..., None]
) -> None:
    """The levels of drafts: whoever asks for some later would hold up all streams until they are captured."""
    needed = rooms(max_seqs, longest, verifier.store.pool.page_size)
    for drafter, shape in drafting.shapes():
        captured = on_device(drafter)
        if captured is not None and shape.levels:
            for number, _ in enumerate(captured.capture_ahead(shape, verifier.vocab_size, needed, capture), start=1):
                say("capturing drafts", number / (len(needed) * (1 + captured.free)))


def runner_of(
    verifier: PagedModel,
    drafting: Drafting,
    longest: int,
    max_seqs: int,
    capture: Capture,
    say: Callable[..., None],
) -> StepRunner:
    """Who runs the steps. Where they are always the same, whole ones are captured too, of up to four sequences, and
    launched one ahead of the host; where a budget chooses, or the host drafts, it comes in between."""
    parts, asked, shape = PartsRunner(verifier, drafting.drafter), configured(drafting.drafter), drafting.shape
    drafter = on_device(asked)
    if drafting.budget is not None or drafter is not asked:
        return parts
    page_size = verifier.store.pool.page_size
    tables, counts = widths(longest + 2 * shape.nodes + 1, page_size), sizes(max_seqs)
    made, total = {}, len(counts) * len(tables)
    captured = buckets(verifier, lambda size: proposer(drafter, shape, size, verifier), capture, (counts, tables))
    for number, (key, bucket) in enumerate(captured, start=1):
        say("capturing steps", number / total)
        made[key] = bucket
    return WholeRunner(parts, made)


def capture_of(graphs: bool) -> Capture:
    """graphs: ``--no-graphs`` runs the same steps without capturing them."""
    return CudaGraphs() if graphs else Direct


def proposer(drafter: TreeDrafter | None, shape: TreeShape, sequences: int, verifier: PagedModel) -> Proposer | None:
    """Who drafts inside a captured step; None if nobody does."""
    if drafter is None or not shape.levels:
        return None
    return Drafts(drafter, shape, sequences, verifier.vocab_size)
