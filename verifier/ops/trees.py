"""The ops of a step for trees and texts, without reading numbers on the host.

Where rows go, the accepted path of each tree, moving its rows down and advancing its text. Kernels are in the file of
the same name (:mod:`foresay.verifier.ops.kernels.trees`).

:func:`accept_paths` is :func:`foresay.spec.accept.accept` for several trees padded to one size, so that it can be part
of a captured graph. Stop ids and length limits are handled by the host, which cuts the emitted tokens.

``move_rows`` of :mod:`foresay.kvpaging.store` moves as many rows as its index tensors have. In a captured graph tensors
have a fixed size, and only the device knows how many rows count. So :func:`move_paths` is here and not in kvpaging,
which only uses torch and numpy.

Legend: S or B sequences, T tokens that are known of each text's end, F of them that a pass runs, N nodes of a tree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foresay.kvpaging.store import move_rows
from foresay.spec.accept import accept
from foresay.spec.tree import DraftTree
from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import empty, launch, on_triton, padded
from foresay.verifier.ops.records import AcceptedPaths, TextEnd


@op()
def lay_out(
    tables: Tensor, page_size: int, lengths: Tensor, depths: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """The position and the slot of each of the S * N rows of S sequences.

    tables: int32[S, P], the page ids of each sequence. lengths: int32[S], the committed tokens. depths: int32[S, N], or
    [N] for all sequences, the depth of each row. nodes: int64[S, N], the row's index after the committed ones. live:
    int32[S], 0 for a sequence that is only padding: its rows are at position 0, in slot 0 of page 0.
    The pages of a live sequence reach as far as its rows. Returns positions and slots, int64[S * N].
    """
    real = (live != 0)[:, None]
    start = lengths.long()[:, None]
    positions = (start + nodes).where(real, 0)
    slots = tables.long().gather(1, positions // page_size) * page_size + positions % page_size
    return (start + depths).where(real, 0).flatten(), slots.where(real, 0).flatten()


@lay_out.kernel
def _lay_out(
    tables: Tensor, page_size: int, lengths: Tensor, depths: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    rows, width, together = nodes.numel(), nodes.shape[1], 128 if on_triton(nodes) else 1
    positions, slots = empty((rows,), nodes), empty((rows,), nodes)
    launch(
        "trees.lay_out_rows", (-(-rows // together),),
        (tables, lengths, depths, nodes, live, positions, slots,
         rows, tables.shape[1], width, width if depths.dim() == 2 else 0),
        {"PAGE_SIZE": page_size, "ROWS": together},
    )  # fmt: skip
    return positions, slots


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
    int64[B], how many nodes each tree has; entries after them are ignored, and 0 is a sequence that is only padding.
    live: int32[B], also 0 for padding; None: none is padding.
    """
    nodes = nodes if live is None else nodes * live
    found = AcceptedPaths.empty(tokens)
    for row, count in enumerate(nodes.tolist()):
        if count:
            own, above, words = (each[row, :count].tolist() for each in (tokens, parents, ancestors))
            tree = DraftTree(own, above, [], [word & (1 << _WORD) - 1 for word in words])  # the rule reads no depths
            _write(found, row, accept(tree, sampled[row].tolist()), sampled[row], slots[row])
    return found


def _write(found: AcceptedPaths, row: int, path: list[int], sampled: Tensor, slots: Tensor) -> None:
    length = len(path)
    found.lengths[row] = length
    found.paths[row, :length] = torch.tensor(path)
    found.emitted[row, :length] = sampled[path]
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
    found = AcceptedPaths(empty((sequences,), tokens), *(empty(tokens.shape, tokens) for _ in range(3)))
    results = (found.lengths, found.paths, found.emitted, found.sources)
    arguments = (tokens, parents, ancestors, sampled, nodes, slots, *results, nodes if live is None else live, width)
    launch("trees.walk_trees", (sequences,), arguments, {"PADDED": live is not None, "WORD": _WORD}, num_warps=2)
    return found


@op()
def report(
    found: AcceptedPaths, tokens: Tensor, parents: Tensor, nodes: Tensor, sampled: Tensor, out: Tensor, no_parent: int
) -> None:
    """Write a step's outcome for the host into one tensor: path lengths, paths, tokens, parents, samples.

    out: int64[B, 1 + 4 N]. no_parent: the parent of entries that are not nodes. The rest as above.
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
    """int64[B, N]: parents, ``no_parent`` where there is no node."""
    return parents.where(torch.arange(parents.shape[1], device=nodes.device) < nodes[:, None], no_parent)


@op()
def rows_of_paths(paths: Tensor, slots: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For the first ``count`` entries of each path: the row of the node, or of the root after the path's end; the
    position in the text; and the slot that the row was moved to.

    paths, slots: int64[B, N], of a pass with N rows for each sequence. lengths: int32[B], of the texts before. Returns
    int64[B * count] each.
    """
    order = torch.arange(len(paths), device=paths.device)[:, None]
    positions = lengths.long()[:, None] + torch.arange(count, device=paths.device)
    rows = paths[:, :count].clamp(min=0) + order * paths.shape[1]
    return rows.flatten(), positions.flatten(), slots[:, :count].flatten()


@rows_of_paths.kernel
def _rows_of_paths(paths: Tensor, slots: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    total = len(paths) * count
    rows, positions, own = (empty((total,), paths) for _ in range(3))
    together = 128 if on_triton(paths) else 1
    arguments = (paths, slots, lengths, rows, positions, own, paths.shape[1], count, total)
    launch("trees.path_rows", (-(-total // together),), arguments, {"ROWS": together})
    return rows, positions, own


class ChosenTree(NamedTuple):
    """tokens, parents, ancestors, depths, counts: as in :class:`foresay.verifier.graphs.proposer.DeviceTree`. rows:
    int64[S, N], of each node, -1 for none. numbers: int64[S, N], of its candidate, -1 after the last node. scores:
    fp32[S, N]."""

    tokens: Tensor
    parents: Tensor
    ancestors: Tensor
    depths: Tensor
    counts: Tensor
    rows: Tensor
    numbers: Tensor
    scores: Tensor


@op()
def choose_tree(found: tuple[Tensor, ...], levels: Tensor, prices: Tensor, limits: Tensor) -> ChosenTree:
    """The nodes of grown trees: of each the likeliest candidates, as many as are worth their rows, at least one if
    there is any, in the order in which they were found. What is behind them hangs below the root.

    found: roots, int64[S]; tokens and parents, int64[S, C], of candidates, level by level; parents are numbers: the
    root's is 0, the first candidate's 1; scores, fp32[S, C], log chances, minus infinity where there is none, none
    larger than its parent's; depths and rows, int64[C], the same in all trees; rows: of a drafter's own pass, -1 for
    none. levels: int64[S], how many are grown: what is deeper is not there, and the last ones have no rows. prices:
    fp32[S, N], of the first 0, 1, .. N - 1 nodes below the root together. limits: int64[S], how many nodes each tree
    may have.
    """
    roots, tokens, parents, scores, depths, rows = found
    count, nodes = scores.shape[1], prices.shape[1]
    most, none, order = min(nodes - 1, count), count + 1, torch.arange(nodes, device=scores.device)
    best = scores.masked_fill(depths > levels[:, None], -math.inf).sort(dim=1, descending=True, stable=True)
    values, numbers = best.values[:, :most], 1 + best.indices[:, :most]  # of equal ones the earlier: parents are kept
    gains = pad(values.exp().cumsum(dim=1), (1, 0)) - prices[:, : 1 + most]
    worth = torch.minimum(gains.argmax(dim=1).clamp(min=1), limits - 1)
    numbers = numbers.where((values > -math.inf) & (order[:most] < worth[:, None]), none).sort(dim=1).values
    numbers = pad(pad(numbers, (1, 0)), (0, nodes - 1 - most), value=none)
    root, real, at = order == 0, numbers < none, (numbers - 1).clamp(0, count - 1)
    above = torch.searchsorted(numbers, parents.gather(1, at)).where(real & ~root, 0)
    words, ancestor = torch.ones_like(numbers) << order, above
    for _ in range(6):  # each doubles the levels that they cover
        words, ancestor = words | words.gather(1, ancestor), ancestor.gather(1, ancestor)
    return ChosenTree(
        tokens.gather(1, at).clamp(min=0).where(real, 0).where(~root, roots[:, None]),
        above.masked_fill(root, -1),
        words,
        depths[at].where(real & ~root, 0).int(),
        real.sum(dim=1),
        rows[at].where(depths[at] < levels[:, None], -1).masked_fill(root, 0),
        numbers.where(real, -1),
        scores.gather(1, at).masked_fill(root, 0.0),
    )


@choose_tree.kernel
def _choose_tree(found: tuple[Tensor, ...], levels: Tensor, prices: Tensor, limits: Tensor) -> ChosenTree:
    (size, count), roots, nodes = found[1].shape, found[0], prices.shape[1]
    tokens, parents, words, rows, numbers = (empty((size, nodes), roots) for _ in range(5))
    depths, scores = (empty((size, nodes), roots, of) for of in (torch.int32, torch.float32))
    made = ChosenTree(tokens, parents, words, depths, empty((size,), roots), rows, numbers, scores)
    launch(
        "trees.choose_nodes", (size,), (*found, levels, prices, limits, *made, count, min(count, nodes - 1), nodes),
        {"BLOCK": padded(count), "WORD": _WORD}, rows=True, num_warps=1 if count <= 512 else 4,
    )  # fmt: skip
    return made


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@op()
def move_paths(parts: tuple[Tensor, ...], sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """Move the first ``lengths[b]`` rows of each sequence, in every layer, in place: all are read, then written.

    parts: of a store, [L, slots, ..] each, contiguous, possibly of width 0. sources, destinations: int64[B, N], slots,
    N at most 64; entries after a sequence's length are ignored. lengths: int64[B]. A sequence's destinations are
    distinct and may be its sources; no two sequences share a slot.
    """
    for row, length in enumerate(lengths.tolist()):
        move_rows(parts, sources[row, :length], destinations[row, :length])


@move_paths.kernel
def _move_paths(parts: tuple[Tensor, ...], sources: Tensor, destinations: Tensor, lengths: Tensor) -> None:
    """A launch for keys and values, one for their scales if there are any."""
    sequences, width = sources.shape
    assert width <= 64, "a path holds at most 64 nodes"
    # Words per row moved by a program: 64 rows of this many words take 32 registers in each of 128 threads.
    columns, rows = (64, padded(width)) if on_triton(sources) else (256, 64)
    for pair in (parts[first : first + 2] for first in range(0, len(parts), 2)):
        keys, *values = _as_words([each for each in pair if each.numel()] or list(pair[:1]))
        widths = [math.prod(each.shape[2:]) for each in (keys, *values)]
        grid = sequences, sum(-(-each // columns) for each in widths), len(keys)
        launch(
            "trees.move_columns", grid,
            (keys, values[0] if values else keys, sources, destinations, lengths, keys.shape[1], width),
            {"KEY_WIDTH": widths[0], "VALUE_WIDTH": sum(widths[1:]), "ROWS": rows, "COLUMNS": columns}, rows=True,
        )  # fmt: skip


def _as_words(pair: list[Tensor]) -> list[Tensor]:
    """The same memory as the widest integers that divide both kinds of head: moving does not interpret numbers."""
    kind = _WORDS[math.gcd(4, *(each.shape[-1] * each.element_size() for each in pair))]
    return [each.view(kind) for each in pair]


@op()
def advance(recent: Tensor, lengths: Tensor, ends: Tensor, emitted: Tensor, taken: Tensor) -> None:
    """Append the first ``taken[s]`` of the emitted tokens to the text of each sequence, in place.

    recent: int64[S, T], the last tokens of each. lengths: int32[S], ends: int64[S, 1], their counts. emitted:
    int64[S, N]; entries after a sequence's number are ignored. taken: int64[S], 0 to N. All contiguous. ``BROKEN``,
    which is no token and must not be looked up, becomes 0.
    """
    positions = torch.arange(recent.shape[1], device=recent.device) + taken[:, None]
    recent.copy_(torch.cat([recent, emitted], dim=1).gather(1, positions).clamp_(min=0))
    lengths.add_(taken)
    ends.add_(taken[:, None])


@advance.kernel
def _advance(recent: Tensor, lengths: Tensor, ends: Tensor, emitted: Tensor, taken: Tensor) -> None:
    sequences, width = recent.shape
    launch(
        "trees.advance_rows", (sequences,), (recent, lengths, ends, emitted, taken, width, emitted.shape[1]),
        {"BLOCK": padded(width)},
    )  # fmt: skip


@op()
def text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    """The last ``count`` tokens of each text, the root last; or, for one with fewer from position ``first`` on, those,
    followed by the root again.

    recent: int64[S, T], the root last, T at least ``count``. lengths: int32[S], the roots' positions.
    """
    begins = (lengths - (count - 1)).clamp(min=first)
    roots = (lengths - begins).long().clamp(min=0)
    order = torch.arange(count, device=recent.device)
    tokens = recent.gather(1, (order + (recent.shape[1] - 1) - roots[:, None]).clamp(max=recent.shape[1] - 1))
    return TextEnd(tokens, begins, roots + count * torch.arange(len(roots), device=recent.device))


@text_ends.kernel
def _text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    sequences, width = recent.shape
    made = TextEnd(empty((sequences, count), recent), empty((sequences,), lengths), empty((sequences,), recent))
    launch(
        "trees.end_rows", (sequences,), (recent, lengths, *made, width, count, first), {"BLOCK": padded(count)},
    )  # fmt: skip
    return made


@op()
def positions_below(ends: Tensor, depths: Tensor) -> Tensor:
    """int64[S * N]: the positions of tokens below nodes. ends: int64[S, 1], after the roots. depths: int32[S, N]."""
    return (ends + depths).flatten()


@positions_below.kernel
def _positions_below(ends: Tensor, depths: Tensor) -> Tensor:
    out = empty((depths.numel(),), ends)
    _one_by_one("trees.below_rows", (ends, depths, out), out, depths.shape[1], {})
    return out


@op()
def known_tokens(tokens: Tensor, vocab_size: int, read: Tensor | None = None) -> Tensor:
    """The tokens as another model's: ids past its vocabulary become its last one, negative ones its first.

    tokens: int64, contiguous. read: int64[V], its id for each; None if they are the same.
    """
    known = tokens.clamp(0, vocab_size - 1)
    return known if read is None else read[known]


@known_tokens.kernel
def _known_tokens(tokens: Tensor, vocab_size: int, read: Tensor | None = None) -> Tensor:
    out = empty(tokens.shape, tokens)
    translated = read is not None
    arguments = (tokens, tokens if read is None else read, out)
    _one_by_one("trees.known_rows", arguments, out, vocab_size - 1, {"TRANSLATED": translated})
    return out


def _one_by_one(
    kernel: str, arguments: tuple[Tensor, ...], out: Tensor, number: int, constants: dict[str, bool]
) -> None:
    together = 128 if on_triton(out) else 1
    grid = (-(-out.numel() // together),)
    launch(kernel, grid, (*arguments, number, out.numel()), constants | {"ROWS": together})
