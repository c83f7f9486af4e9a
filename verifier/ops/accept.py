"""The accept rule for several sequences at once, without a number on the host.

What :func:`foresay.spec.accept.accept` says of one tree, for trees padded to one size: so that it can be part of a
captured graph. Stop ids and length limits stay with the host, which cuts the emitted run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.spec.accept import accept
from foresay.spec.tree import DraftTree
from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import launch, new
from foresay.verifier.ops.records import AcceptedPaths

#: One ancestor word holds this many nodes.
_WORD = 64


@op()
def accept_paths(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    nodes: Tensor,
    slots: Tensor,
    live: Tensor | None = None,
) -> AcceptedPaths:
    """The path that the samples take through each tree.

    tokens, parents, ancestors: int64[B, N], the trees as :class:`~foresay.spec.tree.DraftTree` has them, N at most 64.
    sampled: int64[B, N], the target's sample at every node. slots: int64[B, N], where the nodes' keys are. nodes:
    int64[B], how many nodes each tree has; what is behind them is not looked at, and 0 is a sequence that is only
    padding. live: int32[B], 0 for padding too; None: none of them is.
    """
    nodes = nodes if live is None else nodes * live
    found = AcceptedPaths.empty(tokens)
    for row, count in enumerate(nodes.tolist()):
        if count:
            part, depths = slice(count), tokens.new_empty(0)  # the rule does not read depths
            tree = DraftTree(tokens[row, part], parents[row, part], depths, ancestors[row, part])
            taken = accept(tree, sampled[row])
            _write(found, row, taken.path, taken.emitted, slots[row])
    return found


def _write(found: AcceptedPaths, row: int, path: list[int], emitted: list[int], slots: Tensor) -> None:
    length = len(path)
    found.lengths[row] = length
    found.paths[row, :length] = torch.tensor(path)
    found.emitted[row, :length] = torch.tensor(emitted)
    found.sources[row, :length] = slots[path]


@accept_paths.kernel
def _accept_paths(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    nodes: Tensor,
    slots: Tensor,
    live: Tensor | None = None,
) -> AcceptedPaths:
    sequences, width = tokens.shape
    assert width <= _WORD, "a tree holds at most 64 nodes"
    found = AcceptedPaths(new((sequences,), tokens), *(new(tokens.shape, tokens) for _ in range(3)))
    results = (found.lengths, found.paths, found.emitted, found.sources)
    arguments = (tokens, parents, ancestors, sampled, nodes, slots, *results, nodes if live is None else live, width)
    launch("trees.walk_trees", (sequences,), arguments, {"PADDED": live is not None, "WORD": _WORD}, num_warps=2)
    return found


@op()
def report(
    found: AcceptedPaths, tokens: Tensor, parents: Tensor, nodes: Tensor, sampled: Tensor, out: Tensor, no_parent: int
) -> None:
    """Write side by side what the host reads of a step: path lengths, paths, tokens, parents, samples.

    out: int64[B, 1 + 4 N]. no_parent: what stands for the parent where there is no node. The rest as above.
    """
    marked = real_parents(parents, nodes, no_parent)
    out.copy_(torch.cat((found.lengths[:, None], found.paths, tokens, marked, sampled), dim=1))


@report.kernel
def _report(
    found: AcceptedPaths, tokens: Tensor, parents: Tensor, nodes: Tensor, sampled: Tensor, out: Tensor, no_parent: int
) -> None:
    sequences, width = tokens.shape
    launch(
        "trees.report_rows", (sequences,), (found.lengths, found.paths, tokens, parents, nodes, sampled, out, width),
        {"NONE": no_parent, "WORD": _WORD}, num_warps=2,
    )  # fmt: skip


def real_parents(parents: Tensor, nodes: Tensor, no_parent: int) -> Tensor:
    """int64[B, N]: parents, marked where there is no node."""
    return parents.where(torch.arange(parents.shape[1], device=nodes.device) < nodes[:, None], no_parent)
