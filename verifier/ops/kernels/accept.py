"""The accepted path of each sequence's tree in one launch: one program per sequence, one lane per node."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.records import AcceptedPaths

#: One ancestor word holds this many nodes.
_WORD = 64


@triton.jit(do_not_specialize=["width"])
def walk_trees(
    tokens,
    parents,
    ancestors,
    sampled,
    counts,
    slots,
    lengths,
    paths,
    emitted,
    sources,
    live,
    width,
    PADDED: tl.constexpr,
    WORD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The words of spec/accept.py: bit i of ``match`` says that token i is the sample at its parent."""
    wait_turn(CHAINED)
    sequence = tl.program_id(0)
    node = tl.arange(0, WORD)
    count = tl.load(counts + sequence)
    if PADDED:
        count *= tl.load(live + sequence)
    real = node < count
    at = sequence * width + node
    parent = tl.load(parents + at, real & (node > 0), 0)
    at_parent = tl.load(sampled + sequence * width + parent, real, -1)
    match = (node == 0) | (tl.load(tokens + at, real, -1) == at_parent)
    bits = tl.full((WORD,), 1, tl.int64) << node.to(tl.int64)
    matched = tl.sum(tl.where(real & match, bits, 0), axis=0)
    word = tl.load(ancestors + at, real, -1)
    # Siblings differ, so the accepted nodes are one path, and the deepest of them has the highest number.
    deepest = tl.max(tl.where(real & ((word & ~matched) == 0), node, -1), axis=0)
    path_word = tl.sum(tl.where(node == deepest, word, 0), axis=0)
    on_path = (path_word & bits) != 0
    length = tl.sum(on_path.to(tl.int32), axis=0)
    place = sequence * width + tl.cumsum(on_path.to(tl.int32), axis=0) - 1
    tl.store(paths + place, node.to(tl.int64), on_path)
    tl.store(emitted + place, tl.load(sampled + at, on_path, 0), on_path)
    tl.store(sources + place, tl.load(slots + at, on_path, 0), on_path)
    behind = (node >= length) & (node < width)
    tl.store(paths + at, tl.full((WORD,), -1, tl.int64), behind)
    tl.store(emitted + at, tl.full((WORD,), -1, tl.int64), behind)
    tl.store(sources + at, tl.full((WORD,), -1, tl.int64), behind)
    tl.store(lengths + sequence, length.to(tl.int64))


def accept_paths(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    sampled: Tensor,
    nodes: Tensor,
    slots: Tensor,
    live: Tensor | None = None,
) -> AcceptedPaths:
    """As :func:`foresay.verifier.ops.accept.accept_paths`."""
    sequences, width = tokens.shape
    assert width <= _WORD, "a tree holds at most 64 nodes"
    whole = (tokens, parents, ancestors, sampled, nodes, slots)
    assert all(tensor.is_contiguous() for tensor in whole), "sequences lie one behind the other"
    found = AcceptedPaths(tokens.new_empty(sequences), *(tokens.new_empty(sequences, width) for _ in range(3)))
    if sequences:
        results = (found.lengths, found.paths, found.emitted, found.sources)
        padded = live is not None
        walk_trees[(sequences,)](
            *whole, *results, live if padded else nodes, width, padded, _WORD, num_warps=2, **chained()
        )
    return found


@triton.jit(do_not_specialize=["width"])
def report_rows(lengths, paths, tokens, parents, counts, sampled, out, width, NONE: tl.constexpr, WORD: tl.constexpr,
                CHAINED: tl.constexpr):  # fmt: skip
    """Grid (B,): what the host reads of one sequence."""
    wait_turn(CHAINED)
    sequence, node = tl.program_id(0), tl.arange(0, WORD)
    inside, at, to = node < width, sequence * width + node, out + sequence * (1 + 4 * width)
    tl.store(to, tl.load(lengths + sequence))
    parent = tl.where(node < tl.load(counts + sequence), tl.load(parents + at, inside, 0), NONE)
    tl.store(to + 1 + node, tl.load(paths + at, inside, 0), inside)
    tl.store(to + 1 + width + node, tl.load(tokens + at, inside, 0), inside)
    tl.store(to + 1 + 2 * width + node, parent, inside)
    tl.store(to + 1 + 3 * width + node, tl.load(sampled + at, inside, 0), inside)


def report(
    found: AcceptedPaths, tokens: Tensor, parents: Tensor, nodes: Tensor, sampled: Tensor, out: Tensor, no_parent: int
) -> None:
    """As :func:`foresay.verifier.ops.accept.report`."""
    sequences, width = tokens.shape
    whole = (found.lengths, found.paths, tokens, parents, nodes, sampled, out)
    assert all(tensor.is_contiguous() for tensor in whole), "sequences lie one behind the other"
    if sequences:
        report_rows[(sequences,)](*whole, width, no_parent, _WORD, num_warps=2, **chained())
