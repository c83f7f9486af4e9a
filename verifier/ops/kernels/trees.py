"""The kernels of a step for trees and texts: where rows go, the accepted path of each tree, moving its rows down and
advancing its text. Every kernel is for GPU and CPU (:mod:`foresay.verifier.ops.launch`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.verifier.ops.kernels.candidates import NO_TOKEN, NOTHING, entry_of, parts_of
from foresay.verifier.ops.kernels.pdl import gdc_wait
from foresay.verifier.ops.kernels.rows import kept, updated


@triton.jit(do_not_specialize=["rows", "pages", "width", "depth_stride"])
def lay_out_rows(tables, lengths, depths, nodes, live, positions, slots, rows, pages, width, depth_stride,
                 PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """ROWS rows. depth_stride: from one sequence's depths to the next's, 0 if all have the same.

    Of the sizes only the page's is compiled in: trees and tables have many.
    """
    gdc_wait(USE_GDC)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, sequence = row < rows, row // width
    real = inside & (tl.load(live + sequence, inside, 0) != 0)
    length = tl.load(lengths + sequence, real, 0).to(tl.int64)
    depth = tl.load(depths + sequence * depth_stride + row % width, real, 0)
    index = length + tl.load(nodes + row, real, 0)
    page = tl.load(tables + sequence.to(tl.int64) * pages + index // PAGE_SIZE, real, 0).to(tl.int64)
    tl.store(positions + row, tl.where(real, length + depth, 0), inside)
    tl.store(slots + row, tl.where(real, page * PAGE_SIZE + index % PAGE_SIZE, 0), inside)


@triton.jit(do_not_specialize=["width"])
def walk_trees(tokens, parents, ancestors, sampled, counts, slots, lengths, paths, emitted, sources, live, width,
               PADDED: tl.constexpr, WORD: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """The accept rule of spec/accept.py: bit i of ``match`` is set if token i is the sample at its parent."""
    gdc_wait(USE_GDC)
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
    index = sequence * width + tl.cumsum(on_path.to(tl.int32), axis=0) - 1
    tl.store(paths + index, node.to(tl.int64), on_path)
    tl.store(emitted + index, tl.load(sampled + at, on_path, 0), on_path)
    tl.store(sources + index, tl.load(slots + at, on_path, 0), on_path)
    behind = (node >= length) & (node < width)
    tl.store(paths + at, tl.full((WORD,), -1, tl.int64), behind)
    tl.store(emitted + at, tl.full((WORD,), -1, tl.int64), behind)
    tl.store(sources + at, tl.full((WORD,), -1, tl.int64), behind)
    tl.store(lengths + sequence, length.to(tl.int64))


@triton.jit(do_not_specialize=["width"])
def report_rows(lengths, paths, tokens, parents, counts, sampled, out, width, NONE: tl.constexpr, WORD: tl.constexpr,
                USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (B,): one sequence's outcome for the host."""
    gdc_wait(USE_GDC)
    sequence, node = tl.program_id(0), tl.arange(0, WORD)
    inside, at, to = node < width, sequence * width + node, out + sequence * (1 + 4 * width)
    tl.store(to, tl.load(lengths + sequence))
    parent = tl.where(node < tl.load(counts + sequence), tl.load(parents + at, inside, 0), NONE)
    tl.store(to + 1 + node, tl.load(paths + at, inside, 0), inside)
    tl.store(to + 1 + width + node, tl.load(tokens + at, inside, 0), inside)
    tl.store(to + 1 + 2 * width + node, parent, inside)
    tl.store(to + 1 + 3 * width + node, tl.load(sampled + at, inside, 0), inside)


@triton.jit(do_not_specialize=["total", "width", "count"])
def path_rows(paths, slots, lengths, rows, positions, own, width, count, total, ROWS: tl.constexpr,
              USE_GDC: tl.constexpr):  # fmt: skip
    """ROWS of the first ``count`` nodes of each path."""
    gdc_wait(USE_GDC)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, sequence = number < total, number // count
    at = sequence * width + number % count
    node = tl.load(paths + at, inside, 0)
    tl.store(rows + number, tl.where(node < 0, 0, node) + sequence * width, inside)
    length = tl.load(lengths + sequence, inside, 0).to(tl.int64)
    tl.store(positions + number, length + number % count, inside)
    tl.store(own + number, tl.load(slots + at, inside, 0), inside)


@triton.jit(do_not_specialize=["slots", "path_width"])
def move_columns(keys, values, sources, destinations, lengths, slots, path_width, KEY_WIDTH: tl.constexpr,
                 VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (S, pieces, L): COLUMNS words of all ROWS of a sequence, in one layer; the last pieces are the values'.

    No other program reads or writes what this one does, so they may run in any order. All rows are read, then all
    threads synchronise, then rows are written: any destination may be any source.
    """
    gdc_wait(USE_GDC)
    KEY_PIECES: tl.constexpr = (KEY_WIDTH + COLUMNS - 1) // COLUMNS
    sequence, piece, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.arange(0, ROWS)
    real = rows < tl.load(lengths + sequence)
    source = tl.load(sources + sequence * path_width + rows, real, 0)
    destination = tl.load(destinations + sequence * path_width + rows, real, 0)
    moving = (real & (source != destination))[:, None]
    of_keys = piece < KEY_PIECES
    base, width = tl.where(of_keys, keys, values), tl.where(of_keys, KEY_WIDTH, VALUE_WIDTH)
    columns = (tl.where(of_keys, piece, piece - KEY_PIECES) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = moving & (columns < width)
    start = base + layer.to(tl.int64) * slots * width + columns
    held = tl.load(start + source[:, None] * width, inside)
    tl.debug_barrier()
    tl.store(start + destination[:, None] * width, held, inside)


@triton.jit(do_not_specialize=["width", "nodes"])
def advance_rows(recent, lengths, ends, emitted, taken, width, nodes, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):
    """Token j becomes token ``j + taken`` of the recent ones followed by the emitted ones."""
    gdc_wait(USE_GDC)
    sequence, lane = tl.program_id(0), tl.arange(0, BLOCK)
    inside, more = lane < width, tl.load(taken + sequence)
    index = lane + more
    old = tl.load(recent + sequence * width + index, inside & (index < width), 0)
    new = tl.load(emitted + sequence * nodes + index - width, inside & (index >= width), 0)
    length, end = tl.load(lengths + sequence) + more, tl.load(ends + sequence) + more
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(recent + sequence * width + lane, tl.maximum(tl.where(index < width, old, new), 0), inside)
    tl.store(lengths + sequence, length.to(tl.int32))
    tl.store(ends + sequence, end)


@triton.jit(do_not_specialize=["width", "count", "first"])
def end_rows(recent, lengths, tokens, begins, roots, width, count, first, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):
    """The last ``count`` tokens of one text, as in :func:`foresay.verifier.ops.trees.text_ends`."""
    gdc_wait(USE_GDC)
    sequence, lane = tl.program_id(0), tl.arange(0, BLOCK)
    length = tl.load(lengths + sequence)
    begin = tl.maximum(length - count + 1, first)
    root = tl.maximum(length - begin, 0)
    index = tl.minimum(lane + width - 1 - root, width - 1)
    tl.store(tokens + sequence * count + lane, tl.load(recent + sequence * width + index), lane < count)
    tl.store(begins + sequence, begin)
    tl.store(roots + sequence, (root + count * sequence).to(tl.int64))


@triton.jit(do_not_specialize=["width", "rows"])
def below_rows(ends, depths, out, width, rows, ROWS: tl.constexpr, USE_GDC: tl.constexpr):
    """ROWS positions, of sequences of ``width``."""
    gdc_wait(USE_GDC)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    depth = tl.load(depths + row, inside, 0)
    tl.store(out + row, tl.load(ends + row // width, inside, 0) + depth, inside)


@triton.jit(do_not_specialize=["last", "rows"])
def known_rows(tokens, read, out, last, rows, TRANSLATED: tl.constexpr, ROWS: tl.constexpr, USE_GDC: tl.constexpr):
    """ROWS tokens, clamped to ``last``, and mapped by ``read`` if TRANSLATED."""
    gdc_wait(USE_GDC)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = tl.minimum(tl.maximum(tl.load(tokens + row, inside, 0), 0), last)
    if TRANSLATED:
        token = tl.load(read + token, inside, 0)
    tl.store(out + row, token, inside)


@triton.jit(do_not_specialize=["rows", "front", "looked", "count"])
def rank_children(children, chances, scores, words, numbers, marks, knots, slopes, shifts, kept_tokens, indices,
                  parents, kept_scores, kept_words, room, rows, front, looked, count, LEAST: tl.constexpr,
                  GROUPS: tl.constexpr, PIECES: tl.constexpr, KNOTS: tl.constexpr, EACH: tl.constexpr,
                  BLOCK: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (S,): a level of one tree. The scores of all children are written, then the best are listed one by one."""
    gdc_wait(USE_GDC)
    tree, rank, index, knot = tl.program_id(0), tl.arange(0, EACH), tl.arange(0, BLOCK), tl.arange(0, KNOTS)
    own, inside = room + tree * front * looked, index < front * looked
    tl.store(own + index, tl.full((BLOCK,), float("-inf"), tl.float32), inside)
    tl.debug_barrier()
    for node in tl.range(front):
        row = (tree * rows + tl.where(rows > 1, node, 0)) * looked
        chance = kept(tl.load(chances + row + rank, rank < looked, float("-inf")))
        sound, live = tl.maximum(chance, LEAST), (rank < looked) & (chance > float("-inf"))
        piece = tl.sum((tl.load(knots + knot)[None, :] < sound[:, None]).to(tl.int32), axis=1)
        at = (tree * GROUPS + tl.minimum(rank, GROUPS - 1)) * PIECES + piece
        hit = tl.minimum(tl.load(slopes + at, live, 0.0) * sound + tl.load(shifts + at, live, 0.0), 0.0)
        tl.store(own + node * looked + rank, hit + tl.load(scores + tree * front + node), live)
    tl.debug_barrier()
    score = tl.load(own + index, inside, float("-inf"))
    entries = kept(tl.where(score > float("-inf"), entry_of(score, index.to(tl.int32)), NOTHING))
    for turn in tl.range(count):
        largest = tl.max(entries, axis=0)
        entries = updated(entries, tl.where(entries == largest, NOTHING, entries))
        value, at = parts_of(largest)
        at, to = tl.where(value > float("-inf"), at, 0), tree * count + turn
        node = at // looked
        row = (tree * rows + tl.where(rows > 1, node, 0)) * looked
        tl.store(kept_tokens + to, tl.load(children + row + at % looked))
        tl.store(indices + to, node.to(tl.int64))
        tl.store(parents + to, tl.load(numbers + node))
        tl.store(kept_scores + to, value)
        tl.store(kept_words + to, tl.load(words + tree * front + node) | tl.load(marks + turn))


@triton.jit(do_not_specialize=["width"])
def weigh_level(front, bars, out, width, SHARES: tl.constexpr, WORD: tl.constexpr, USE_GDC: tl.constexpr):
    """Grid (S,): whether the children of one tree's nodes are worth their level."""
    gdc_wait(USE_GDC)
    tree, node = tl.program_id(0), tl.arange(0, WORD)
    inside, own = node < width, bars + tree * (SHARES + 2)
    score = tl.load(front + tree * width + node, inside, float("-inf"))
    chance, beyond = kept(tl.exp(score)), 0.0
    for share in tl.static_range(SHARES):
        more = tl.maximum(chance * tl.load(own + share) - tl.load(own + SHARES), 0.0)
        beyond += tl.sum(tl.where(inside, more, 0.0), axis=0)
    goes = beyond >= tl.load(own + SHARES + 1)
    tl.store(out + tree * width + node, tl.where(goes, score, float("-inf")), inside)


@triton.jit(do_not_specialize=["size", "most", "width"])
def choose_nodes(roots, tokens, parents, scores, depths, rows, levels, prices, limits, chosen_tokens, chosen_parents,
                 ancestors, chosen_depths, counts, chosen_rows, numbers, chosen_scores, size, most, width,
                 BLOCK: tl.constexpr, WORD: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (S,): one tree. The likeliest candidates are listed one after the other, then those that are worth their
    rows are written in their order. A candidate's number is one more than its index: the root has none."""
    gdc_wait(USE_GDC)
    tree, index, node = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, WORD)
    known, first, to = tl.load(levels + tree), tree * size, tree * width
    depth = tl.load(depths + index, index < size, NO_TOKEN)
    score = tl.load(scores + first + index, index < size, float("-inf"))
    there = (depth <= known) & (score > float("-inf"))
    entries = kept(tl.where(there, entry_of(score, index.to(tl.int32)), NOTHING))
    best, total = kept(tl.full((WORD,), NO_TOKEN, tl.int32)), kept(tl.zeros((WORD,), tl.float32))
    for turn in tl.range(most):
        largest = tl.max(entries, axis=0)
        entries = updated(entries, tl.where(entries == largest, NOTHING, entries))
        value, at = parts_of(largest)
        best = updated(best, tl.where(node == turn, at, best))
        total = updated(total, tl.where(node > turn, total + tl.exp(value), total))
    gain = kept(total - tl.load(prices + to + node, node < width, float("inf")))
    worth = tl.min(tl.where(gain == tl.max(gain, axis=0), node, WORD).to(tl.int32), axis=0)
    worth = tl.minimum(tl.maximum(worth, 1), tl.load(limits + tree).to(tl.int32) - 1)
    left = kept(tl.where(node < worth, best, NO_TOKEN))
    count = tl.sum((left < NO_TOKEN).to(tl.int32), axis=0)
    tl.store(counts + tree, (count + 1).to(tl.int64))
    bits = tl.full((WORD,), 1, tl.int64) << node.to(tl.int64)
    word, number = kept(bits | 1), kept(tl.where(node == 0, node, NO_TOKEN).to(tl.int32))
    root = (node == 0).to(tl.int64)
    rest = (node < width) & ((node == 0) | (node > count))
    tl.store(chosen_tokens + to + node, tl.load(roots + tree) * root, rest)
    tl.store(chosen_parents + to + node, -root, rest)
    tl.store(chosen_depths + to + node, tl.zeros((WORD,), tl.int32), rest)
    tl.store(chosen_rows + to + node, root - 1, rest)
    tl.store(chosen_scores + to + node, tl.zeros((WORD,), tl.float32), rest)
    for slot in tl.range(count):
        at = tl.min(left, axis=0)
        left = updated(left, tl.where(left == at, NO_TOKEN, left))
        number = updated(number, tl.where(node == slot + 1, at + 1, number))
        above = tl.sum((number <= tl.load(parents + first + at)).to(tl.int32), axis=0) - 1
        path = tl.sum(tl.where(node == above, word, 0), axis=0)
        word = updated(word, tl.where(node == slot + 1, bits | path, word))
        deep = tl.load(depths + at)
        tl.store(chosen_tokens + to + slot + 1, tl.maximum(tl.load(tokens + first + at), 0))
        tl.store(chosen_parents + to + slot + 1, above.to(tl.int64))
        tl.store(chosen_depths + to + slot + 1, deep.to(tl.int32))
        tl.store(chosen_rows + to + slot + 1, tl.where(deep < known, tl.load(rows + at), -1))
        tl.store(chosen_scores + to + slot + 1, tl.load(scores + first + at))
    tl.store(ancestors + to + node, word, node < width)
    tl.store(numbers + to + node, tl.where(number < NO_TOKEN, number, -1).to(tl.int64), node < width)
