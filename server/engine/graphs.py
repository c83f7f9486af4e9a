"""From a drafter to captured steps: who proposes inside a graph, and which buckets are captured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drafters.proposer import proposer_of
from drafters.routed import configured
from kvpaging import OutOfPages, PagePool, PageTable
from server.engine.drafters.entry import Pass
from server.engine.drafters.registry import entry_of
from spec.protocols import Drafter, Rows
from spec.step import EagerRunner
from spec.tree import MAX_NODES, TreeShape
from verifier.graphs.buckets import buckets, sizes, widths
from verifier.graphs.capture import Capture, CudaGraphs, direct
from verifier.graphs.proposer import Proposer
from verifier.graphs.runner import GraphRunner
from verifier.paged_model import PagedModel

#: More than are read like the nodes of a tree.
_PROMPT_ROWS = MAX_NODES + 1


def graph_runner(
    verifier: PagedModel,
    drafter: Drafter | None,
    shape: TreeShape,
    pool: PagePool,
    longest: int,
    max_seqs: int,
    capture: Capture,
    say: Callable[..., None],
) -> GraphRunner:
    """Capture the steps of up to four sequences. longest: most tokens of a text. say: told what is
    done now, and how much of it."""
    say("compiling kernels for prompts")
    for run in _passes(verifier, drafter):
        _warm(run, pool, max_seqs)
    tables = widths(longest + 2 * shape.nodes + 1, pool.page_size)
    counts = sizes(max_seqs)
    made = {}
    total = len(counts) * len(tables)
    for number, (key, bucket) in enumerate(
        buckets(verifier, lambda size: proposer(drafter, shape, size, verifier), capture, (counts, tables)), start=1
    ):
        say("capturing steps", number / total)
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
    return proposer_of(drafter, shape, sequences, verifier.vocab_size, verifier.decoder.device)


def _passes(verifier: PagedModel, drafter: Drafter | None) -> list[Pass]:
    """An eager pass of each model there is."""
    drafter = configured(drafter)
    return [verifier.run, *entry_of(drafter).passes(drafter)]


def _warm(run: Pass, pool: PagePool, most: int) -> None:
    """Let kernels be compiled that only prompts need, by how many there are at once: later all streams would wait."""
    tables: list[PageTable] = []
    try:
        for count in range(1, most + 1):
            tables.append(PageTable(pool))
            tables[-1].reserve(_PROMPT_ROWS)
            if count & count - 1 == 0:  # kernels tell powers of two apart
                run([Rows(table, torch.zeros(_PROMPT_ROWS, dtype=torch.int64), 0, wanted="last") for table in tables])
    except OutOfPages:
        pass  # so many prompts never meet here
    finally:
        for table in tables:
            table.release()
