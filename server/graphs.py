"""From a drafter to captured steps: who proposes inside a graph, and which buckets are captured."""

from __future__ import annotations

from collections.abc import Callable

from drafters.captured.choice import captured
from drafters.routed import configured
from kvpaging import PagePool
from spec.protocols import Drafter
from spec.step import EagerRunner
from spec.tree import TreeShape
from verifier.graphs.buckets import buckets, sizes, widths
from verifier.graphs.capture import Capture, CudaGraphs, direct
from verifier.graphs.plain import FromHost
from verifier.graphs.proposer import Proposer
from verifier.graphs.runner import GraphRunner
from verifier.paged_model import PagedModel


def graph_runner(
    verifier: PagedModel,
    drafter: Drafter | None,
    shape: TreeShape,
    pool: PagePool,
    longest: int,
    max_seqs: int,
    capture: Capture,
    say: Callable[[str], None],
) -> GraphRunner:
    """Capture the steps of up to four sequences. longest: most tokens of a text. say: told how far it is."""
    tables = widths(longest + 2 * shape.nodes + 1, pool.page_size)
    counts = sizes(max_seqs)
    made = {}
    total = len(counts) * len(tables)
    for number, (key, bucket) in enumerate(
        buckets(verifier, lambda size: proposer(drafter, shape, size, verifier), capture, (counts, tables)), start=1
    ):
        say(f"capturing steps, {number} of {total} sizes")
        made[key] = bucket
    return GraphRunner(EagerRunner(verifier, drafter), made)


def capture_of(graphs: bool) -> Capture:
    """graphs: ``--no-graphs`` runs the same steps without capturing them."""
    return CudaGraphs() if graphs else direct


def proposer(drafter: Drafter | None, shape: TreeShape, sequences: int, verifier: PagedModel) -> Proposer | None:
    """Who drafts inside a captured step; None if nobody does."""
    drafter = configured(drafter)
    if drafter is None or not shape.levels:
        return None
    found = captured(drafter, shape, sequences, verifier.vocab_size)
    return FromHost(drafter.name, shape, sequences, verifier.decoder.device) if found is None else found
