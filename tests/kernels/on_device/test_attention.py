"""Paged attention: the kernels against the reference, and the bits of a row in every company it may meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops import attention as op
from foresay.verifier.ops.attention import rotate_and_store
from foresay.verifier.ops.kernels import tree_attention as kernels
from foresay.verifier.ops.kernels.chunk_attention import chunk_attention
from foresay.verifier.ops.kernels.tree_attention import tree_attention
from foresay.verifier.ops.records import AttentionMetadata, FusedRope, Rotation, SplitKSums
from tests.combinations import alternating
from tests.kernels.on_device.conftest import EXACT, INTERPRETED
from tests.kernels.paged import Bench, Sequence, kept

pytestmark = pytest.mark.gpu
SCALE = 0.2
#: The dtype of a served model; Triton's interpreter cannot multiply in bf16.
SERVED = torch.float16 if INTERPRETED else torch.bfloat16
STORED = [torch.int8, torch.float8_e4m3fn]
#: Partials that a merge loads at once, as served.
DEPTH = kernels.DEPTH
#: What Gemma 2 and gpt-oss do with scores, and a first position that some rows do not reach.
CAPPED = {"softcap": 1.5, "sinks": True, "window": 300, "first": 1}


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which loads nothing in parallel: it would load and add up what is after the last partial."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "DEPTH", 2)


def sinks_of(query: Tensor) -> Tensor:
    """One for each query head."""
    return torch.linspace(3.0, -2.0, query.shape[1]).to(query.device)


def attend(query: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, **options: Any) -> Tensor:
    """stored: what keys and values are quantised to. sinks: whether heads have some."""
    options["sinks"] = sinks_of(query) if options.get("sinks") else None
    launch = chunk_attention if rows.words is None else tree_attention
    keys, values, scales = kept(keys, values, options.pop("stored", None))
    return launch(query, keys, values, rows, SCALE, scales=scales, **options)


def reference(query: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, **options: Any) -> Tensor:
    keys, values, scales = kept(keys.cpu(), values.cpu(), options.pop("stored", None))
    options["sinks"] = sinks_of(query).cpu() if options.get("sinks") else None
    return op.tree_attention(query.cpu(), keys, values, moved(rows), SCALE, scales=scales, **options)


def moved(rows: AttentionMetadata) -> AttentionMetadata:
    """The same on the CPU."""
    there: dict[str, Any] = {n: x.cpu() for n in rows.__slots__ if isinstance(x := getattr(rows, n), Tensor)}
    return AttentionMetadata(**there, page_size=rows.page_size)


def check(bench: Bench, sequences: list[Sequence], *, chain: bool = False, padding: int = 0, **options: Any) -> None:
    """The kernels give what the reference gives, and zeros in padding rows."""
    query, keys, values, rows = bench.lay_out(sequences, padding=padding, chain=chain)
    result = attend(query, keys, values, rows, **options).cpu()
    options.pop("whole_splits", None)
    wanted = reference(query, keys, values, rows, **options)
    error = ((result.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1.0)).max()
    assert error < {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[bench.dtype], float(error)
    assert not result[len(query) - padding :].any(), "padding rows are zeros"


def run(bench: Bench, sequences: list[Sequence], **options: Any) -> Tensor:
    layout = {name: options.pop(name) for name in ("padding", "spare_pages", "chain") if name in options}
    return attend(*bench.lay_out(sequences, **layout), **options)


#: Groups, heads of each, their width, and a page's; the last are compiled for a GPU in other kernels.
HEADS = [(1, 2, 96, 32), (3, 3, 80, 24), (1, 2, 512, 16), (1, 4, 128, 64), (1, 8, 64, 128), (1, 1, 256, 256)]


@pytest.mark.parametrize(("groups", "group", "width", "page_size"), HEADS[: 3 if INTERPRETED else None])
def test_heads_widths_and_pages(groups, group, width, page_size, device) -> None:
    bench = Bench(groups, group, width, page_size, SERVED, device)
    sequences = [bench.sequence(0, 1), bench.sequence(100, 4), bench.sequence(63, 2, reach=1)]
    check(bench, sequences, padding=2)
    check(bench, sequences, chain=True, padding=2)


#: Query heads, numbers of a latent and of its rotary part: in one part of value columns, in two, with padding; and more
#: heads than a tile has rows.
LATENTS = [(3, 48, 16), (2, 512, 64), (66, 24, 8)]


@pytest.mark.parametrize(("heads", "latent", "rotary"), LATENTS)
def test_latents(heads, latent, rotary, device) -> None:
    """Values are the keys' first numbers; those of the store are not read."""
    bench = Bench(1, heads, latent + rotary, 16, SERVED, device)
    sequences = [bench.sequence(0, 1), bench.sequence(20 if heads > 64 else 70, 2)]
    check(bench, sequences, padding=1, shared=latent)
    check(bench, sequences, chain=True, padding=1, shared=latent)


@pytest.mark.parametrize(
    ("heads", "latent", "rotary", "length"), [(2, 272, 16, 530), pytest.param(66, 16, 8, 20, marks=pytest.mark.soak)]
)
def test_a_row_of_latents_has_the_same_bits_in_any_company(heads, latent, rotary, length, device) -> None:
    """In a tree behind another, block by block and split by split, alone, and in a chunk."""
    bench, options = Bench(1, heads, latent + rotary, 16, EXACT, device), {"shared": latent}
    tree = bench.sequence(length, 4)
    in_tree = run(bench, [bench.sequence(9, 1), tree], whole_splits=True, padding=1, **options)[1:5]
    path = tree.compacted(3, roots=len(tree.path(3)))
    assert torch.equal(run(bench, [tree.compacted(3)], whole_splits=False, **options)[0], in_tree[3])
    assert torch.equal(run(bench, [path], chain=True, **options), in_tree[tree.path(3)])


@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chunks"])
def test_capped_scores_and_sinks(chain, device) -> None:
    """Rows that see nothing but their sink give zeros."""
    bench = Bench(2, 3, 64, 16, SERVED, device)
    sequences = [bench.sequence(70, 5), bench.sequence(0, 1), bench.sequence(560, 2)]
    check(bench, sequences, chain=chain, padding=2, **CAPPED)


@pytest.mark.parametrize("whole_splits", [False, True])
def test_a_row_with_a_sink_has_the_same_bits_in_any_company(whole_splits, device) -> None:
    """In a chunk, and after another sequence: the sink counts once."""
    bench = Bench(1, 3, 64, 16, EXACT, device)
    tree = bench.sequence(1060, 6)
    in_tree = run(bench, [bench.sequence(30, 2), tree], whole_splits=whole_splits, padding=1, **CAPPED)[2:8]
    path = tree.compacted(5, roots=len(tree.path(5)))
    assert torch.equal(run(bench, [path], chain=True, **CAPPED), in_tree[tree.path(5)])
    assert torch.equal(run(bench, [tree], whole_splits=whole_splits, **CAPPED), in_tree)


@pytest.mark.parametrize(("stored", "chain"), alternating(STORED, [False, True]), ids=str)
def test_keys_and_values_of_8_bits(stored, chain, device) -> None:
    bench = Bench(2, 3, 96, 16, SERVED, device)
    sequences = [bench.sequence(length, 2, 1 if chain else 4) for length in (1100, 70)]
    check(bench, sequences, chain=chain, padding=2, stored=stored)
    check(bench, sequences, chain=chain, stored=stored, window=70, first=1)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_row_has_the_same_bits_over_keys_of_8_bits(stored, device) -> None:
    """In a tree alongside another, alone, and in a chunk."""
    bench = Bench(1, 2, 64, 16, EXACT, device)
    tree = bench.sequence(1020, 8)
    in_tree = run(bench, [bench.sequence(30, 3), tree], stored=stored, padding=1)[3:11]
    path = tree.compacted(7, roots=len(tree.path(7)))
    assert torch.equal(run(bench, [tree.compacted(7)], stored=stored)[0], in_tree[7])
    assert torch.equal(run(bench, [path], chain=True, stored=stored), in_tree[tree.path(7)])


def test_borders_of_pages_and_blocks(device) -> None:
    bench = Bench(1, 1, 64, 16, EXACT, device)
    sequences = [bench.sequence(length, 2) for length in (0, 1, 15, 16, 63, 64, 65, 127, 128)]
    without_rows = bench.sequence(30, 0)
    check(bench, [*sequences[:4], without_rows, *sequences[4:]])


def test_the_largest_tree(device) -> None:
    bench = Bench(1, 1, 64, 16, SERVED, device)
    check(bench, [bench.sequence(40, 64, reach=1)])


@pytest.mark.parametrize(("length", "whole_splits"), [(1020, False), (1020, True), (2060, True)])
def test_more_than_one_split(length, whole_splits, device) -> None:
    bench = Bench(1, 2, 64, 16, SERVED, device)
    check(bench, [bench.sequence(length, 5)], whole_splits=whole_splits)


def test_rows_of_several_tiles_have_the_same_bits_block_by_block(device, monkeypatch) -> None:
    bench = Bench(1, 3, 64, 16, EXACT, device)
    tree = bench.sequence(580, 24)
    by_splits = run(bench, [tree])
    monkeypatch.setattr(kernels, "FINE_TILED", 1024)
    assert kernels.most_partials(24, 3, 1, 640) == 24 * 3 * (10 + kernels.TAILS)
    assert torch.equal(run(bench, [tree]), by_splits)


@pytest.mark.parametrize("window", [None, 40])
def test_slots_that_are_looked_up_once_give_the_same_bits(window, device) -> None:
    """Of trees that begin anywhere in a block, and of padding."""
    bench = Bench(1, 2, 64, 16, EXACT, device)
    sequences = [bench.sequence(length, nodes) for length, nodes in ((0, 3), (126, 5), (30, 0), (573, 9))]
    query, keys, values, rows = bench.lay_out(sequences, padding=2)
    found = attend(query, keys, values, rows, window=window)
    rows.tails = kernels.tail_slots(rows)
    assert torch.equal(rows.tails.cpu(), op.tail_slots(moved(rows))) and (rows.tails[-2:] == 0).all()
    rows.words = torch.ones(len(query), dtype=torch.int64, device=device)  # they are not read any more
    assert torch.equal(attend(query, keys, values, rows, window=window), found)


def turning(bench: Bench, rows: int, segments: int) -> tuple[Tensor | SplitKSums, Rotation]:
    """The product of queries, keys and values, and where rows are turned to."""
    width = (bench.group + 2) * bench.groups * bench.width
    rotation = Rotation(bench.random(rows, 1, bench.width), bench.random(rows, 1, bench.width))
    if not segments:
        return bench.random(rows, width), rotation
    return SplitKSums(bench.random(segments, rows, width).float(), bench.random(width)), rotation


#: Committed positions and nodes of texts whose trees go past a block's end, one also past a split's; with few nodes,
#: since a program of the merge has one head.
TREES, SMALL_TREES = [(0, 1), (61, 7), (20, 0), (573, 6)], [(0, 1), (63, 2), (20, 0)]


#: Groups and heads of each, their width, segments of the product, texts, and options.
ROTATED: list[tuple[int, int, int, int, list[tuple[int, int]], dict[str, Any]]] = [
    (1, 2, 64, 0, [(110, 30)], {}),
    (1, 3, 128, 2, TREES, {"whole_splits": True}),
    (2, 1, 64, 3, TREES, {"window": 50, "softcap": 1.5, "sinks": True}),
    (1, 66, 32, 4, SMALL_TREES, {"whole_splits": False}),
    (2, 2, 16, 2, TREES, {"first": 0}),
]


@pytest.mark.parametrize(("case", "once"), alternating(ROTATED, [False, True]))
def test_partials_that_rotate_give_the_same_bits(case, once, device) -> None:
    """And leave the same keys and values; of trees in which paths cross a block's end, and a chain."""
    groups, group, width, segments, texts, options = case
    bench = Bench(groups, group, width, 16, EXACT, device)
    trees = [bench.sequence(length, nodes, reach=1 if nodes == 30 else 4) for length, nodes in texts]
    query, keys, values, rows = bench.lay_out(trees)
    assert any(tree.length // 64 < (tree.length + len(tree.path(len(tree.query) - 1)) - 1) // 64 for tree in trees[:2])
    product, rotation = turning(bench, len(query), segments)
    numbers = torch.cat([torch.arange(len(tree.query)) for tree in trees])
    starts = torch.repeat_interleave(rows.lengths, rows.offsets.diff()).long()
    own = torch.repeat_interleave(torch.arange(len(rows.lengths), device=device), rows.offsets.diff())
    indices = starts + numbers.to(device)
    slots = rows.tables[own, indices // 16].long() * 16 + indices % 16
    apart, within = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    turned = rotate_and_store.launch(product, rotation, (*apart, None), slots)
    wanted = attend(turned, *apart, rows, **options)
    options = options | {"sinks": sinks_of(turned) if options.get("sinks") else None}
    rows.tails = kernels.tail_slots(rows) if once else None
    found = tree_attention(FusedRope(product, rotation, slots), *within, rows, SCALE, **options)
    assert torch.equal(found, wanted) and found.isfinite().all()
    for mine, theirs in zip(within, apart, strict=True):
        assert torch.equal(mine[slots], theirs[slots]) and mine[slots].isfinite().all()
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), "nothing else is written"


@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chunks"])
def test_a_sliding_window(window, chain, device) -> None:
    bench = Bench(1, 2, 64, 16, EXACT, device)
    check(bench, [bench.sequence(150, 5), bench.sequence(30, 2)], window=window, chain=chain)


@pytest.mark.parametrize("first", [1, 80])
@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chunks"])
def test_positions_before_the_first_are_not_seen(first, chain, device) -> None:
    bench = Bench(1, 2, 64, 16, EXACT, device)
    check(bench, [bench.sequence(150, 5), bench.sequence(0, 1)], first=first, chain=chain)
    check(bench, [bench.sequence(20, 70 if chain else 20, reach=1)], first=first, window=50, chain=chain)


def test_a_window_over_whole_splits(device) -> None:
    bench = Bench(1, 1, 64, 32, EXACT, device)
    check(bench, [bench.sequence(2100, 3)], window=1100, whole_splits=True)


def test_a_chunk_of_several_tiles(device) -> None:
    bench = Bench(1, 3, 64, 16, SERVED, device)
    check(bench, [bench.sequence(10, 60, reach=1), bench.sequence(1000, 40, reach=1)], chain=True)


#: Kv heads, heads of each, their width and a length, as an 8B serves them; the interpreter has time for one kv head.
SERVED_SHAPES = [(1, 4, 128, 1090)] if INTERPRETED else [(8, 4, 128, 1090), (8, 4, 128, 8300)]


@pytest.mark.parametrize(("groups", "group", "width", "length"), [(1, 3, 64, 60), (1, 1, 64, 1020), *SERVED_SHAPES])
def test_a_row_has_the_same_bits_in_a_tree_alone_and_in_a_chunk(groups, group, width, length, device) -> None:
    bench = Bench(groups, group, width, 16, EXACT, device, seed=length)
    tree = bench.sequence(length, 8)
    in_tree = run(bench, [tree])
    depths = [len(tree.path(node)) for node in range(8)]
    for node in {depths.index(max(depths)), 7}:
        depth = depths[node]
        assert torch.equal(run(bench, [tree.compacted(node)])[0], in_tree[node]), "alone, its path compacted"
        path = tree.compacted(node, roots=depth)
        assert torch.equal(run(bench, [path]), in_tree[tree.path(node)]), "a chain"
        assert torch.equal(run(bench, [path], chain=True), in_tree[tree.path(node)]), "a chunk"


def test_a_row_has_the_same_bits_in_any_company(device) -> None:
    bench = Bench(1, 1, 64, 32, EXACT, device)
    own, others = bench.sequence(1090, 2), [bench.sequence(200, 6), bench.sequence(0, 1), bench.sequence(64, 2)]
    alone = run(bench, [own], whole_splits=False)
    after = run(bench, [*others, own], padding=3, whole_splits=True)
    assert torch.equal(after[9:11], alone), "behind other sequences, split by split"
    before = run(bench, [own, *others], spare_pages=20, whole_splits=False)
    assert torch.equal(before[:2], alone), "before other sequences, in a wider table"
    smaller = Bench(1, 1, 64, 16, EXACT, device)
    assert torch.equal(run(smaller, [own]), alone), "in smaller pages"


def test_partials_are_merged_alike_however_many_are_loaded_at_once(device, monkeypatch) -> None:
    bench = Bench(1, 2, 64, 16, EXACT, device)
    sequences = [bench.sequence(700, 2), bench.sequence(30, 0), bench.sequence(125, 3)]
    found = []
    for depth in (1, 3, DEPTH):
        monkeypatch.setattr(kernels, "DEPTH", depth)
        found.append(run(bench, sequences, padding=1))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


def test_a_row_has_the_same_bits_in_chunks_of_any_size(device) -> None:
    bench = Bench(1, 2, 64, 16, EXACT, device)
    text = bench.sequence(930, 150, reach=1)

    def chunk(begin: int, end: int) -> Sequence:
        stop = 930 + end
        return Sequence(930 + begin, [-1] * (end - begin), text.keys[:stop], text.values[:stop], text.query[begin:end])

    whole = run(bench, [text], chain=True)
    for begin, end in ((0, 1), (33, 100), (90, 150)):
        assert torch.equal(run(bench, [chunk(begin, end)], chain=True), whole[begin:end])
    assert torch.equal(run(bench, [chunk(149, 150)]), whole[-1:]), "the last row as a step of its own"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(("chain", "whole_splits"), [(False, False), (False, True), (True, None)])
def test_what_no_window_shows_is_not_read(chain, whole_splits, device) -> None:
    """Other texts' rows are there by now, whatever they hold."""
    bench, window = Bench(1, 2, 64, 16, EXACT, device), 70
    options: dict[str, Any] = {"chain": chain, "window": window} | ({} if chain else {"whole_splits": whole_splits})
    sequences = [bench.sequence(1090, 6, 1 if chain else 4), bench.sequence(100, 3, 1 if chain else 4)]
    bench.rng.seed(1)
    sound = run(bench, sequences, **options)
    for sequence in sequences:
        sequence.keys[: sequence.length - window + 1] = torch.nan
        sequence.values[: sequence.length - window + 1] = torch.nan
    bench.rng.seed(1)
    assert torch.equal(run(bench, sequences, **options), sound)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    ("chain", "window", "broken"),
    [(False, None, torch.inf), (False, 20, torch.nan), (True, None, torch.nan), (True, 20, -torch.inf)],
)
def test_a_row_does_not_notice_values_it_does_not_see(chain, window, broken, device) -> None:
    bench = Bench(1, 1, 64, 16, EXACT, device)
    rows, reach = ((40, 30), 1) if chain else ((16, 13), 4)
    sequences = [bench.sequence(length, nodes, reach) for length, nodes in zip((70, 5), rows, strict=True)]
    bench.rng.seed(1)
    sound = run(bench, sequences, chain=chain, window=window)
    node = 11
    for sequence in sequences:
        sequence.keys[sequence.length + node] = broken
        sequence.values[sequence.length + node, :, 3:] = broken
    bench.rng.seed(1)
    result = run(bench, sequences, chain=chain, window=window)
    for sequence, begin in zip(sequences, (0, rows[0]), strict=True):
        for row in range(len(sequence.query)):
            path = sequence.path(row)
            sees = node in path[-window if window else None :]
            found = result[begin + row]
            assert not found.isfinite().all() if sees else torch.equal(found, sound[begin + row]), (begin, row)
