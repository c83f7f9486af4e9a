"""Batched attention as it is compiled against its reference, and both against the definition; its rows have the bits
that they have alone, over the ends of blocks and of spans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.attention import tree_attention
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels.cpu import threads
from foresay.verifier.ops.records import AttentionMetadata
from tests.combinations import pairwise
from tests.kernels.paged import Bench, Sequence, kept
from tests.verifier.conftest import PROCESSORS

SCALE = 0.3
#: kv heads, query heads of each, head dim, page size, dtype: whole vectors and not, pairs of bf16 and not.
SHAPES = [
    (3, 3, 64, 16, torch.bfloat16), (2, 1, 32, 4, torch.bfloat16), (1, 7, 128, 32, torch.bfloat16),
    (2, 4, 48, 16, torch.bfloat16), (2, 2, 64, 1, torch.float32), (1, 5, 20, 16, torch.float32),
    (2, 2, 64, 16, torch.float16),
]  # fmt: skip
#: What keys and values are quantised to.
STORED = [None, torch.int8, torch.float8_e4m3fn]
#: A window that ends in a span, positions that are not seen, what Gemma 2 and gpt-oss do with scores, and values that
#: are a part of the keys.
CAPPED = {"window": 270, "first": 1, "softcap": 3.0, "sinks": True}
OPTIONS: list[dict[str, Any]] = [{}, {"first": 1}, {"window": 37}, {"window": 270, "first": 1}, CAPPED,
                                  {"shared": 16}, {"shared": 11, "window": 270}]  # fmt: skip
everywhere = pytest.mark.parametrize(
    ("processor", "shape", "stored", "options"),
    pairwise(PROCESSORS, SHAPES, STORED, OPTIONS),
    ids=str,
    indirect=["processor"],
)
#: Committed tokens and nodes: short; over the ends of blocks and of spans; more rows than are put together.
SIZES = [(0, 3), (5, 1), (250, 9), (511, 2), (600, 16), (300, 64), (1010, 4)]


def bench(shape: tuple[int, int, int, int, torch.dtype]) -> Bench:
    return Bench(*shape)


def attended(
    laid_out: tuple[Tensor, Tensor, Tensor, AttentionMetadata],
    stored: torch.dtype | None = None,
    *,
    sinks: bool = False,
    **options: Any,
) -> Tensor:
    """stored: what keys and values are quantised to. sinks: whether heads have some, each its own."""
    query, keys, values, rows = laid_out
    keys, values, options["scales"] = kept(keys, values, stored)
    options["sinks"] = torch.linspace(4.0, -3.0, query.shape[1]) if sinks else None
    return tree_attention(query, keys, values, replace(rows, plan=None), SCALE, **options)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@everywhere
def test_it_is_what_the_reference_says(processor, shape, stored, options) -> None:
    """Of chunks, and of trees and chunks in a pass: a tree's rows have the bits of chunks (below). NaN stands wherever
    no row may read."""
    made = bench(shape)
    sequences = [made.sequence(*size) for size in SIZES]
    chunks, both = (made.lay_out(sequences, padding=3, chain=chain) for chain in (True, False))
    both[3].is_prefill = torch.tensor([0, 1, 0, 1, 0, 1, 0], dtype=torch.int32)
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2 if stored else 1.6e-2}[shape[-1]]
    for laid_out in (chunks, both):
        result = attended(laid_out, stored, **options)
        with references():
            wanted = attended(laid_out, stored, **options)
        torch.testing.assert_close(result, wanted, atol=close, rtol=close)
        assert not result[-3:].any()


def definition(sequence: Sequence, node: int, group: int, window: int | None) -> Tensor:
    """float64[H, D]: softmax attention of a node over what is committed and its path, in order of position."""
    path = [*range(sequence.length), *(sequence.length + each for each in sequence.path(node))][-(window or 1 << 30) :]
    keys, values = (each[path].double().repeat_interleave(group, dim=1) for each in (sequence.keys, sequence.values))
    weights = torch.einsum("hd,phd->hp", sequence.query[node].double() * SCALE, keys).softmax(dim=-1)
    return torch.einsum("hp,phd->hd", weights, values)


@pytest.mark.parametrize("computed", [nullcontext, references], ids=["compiled", "reference"])
@pytest.mark.parametrize("window", [None, 5, 37])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_softmax_attention_over_a_rows_path(shape, window, computed) -> None:
    made = bench(shape)
    sequences = [made.sequence(*size) for size in ((0, 1), (0, 20), (3, 9), (16, 30), (37, 64), (100, 5))]
    with computed():
        found = attended(made.lay_out(sequences), window=window)
    wanted = [definition(each, node, shape[1], window) for each in sequences for node in range(len(each.query))]
    assert (found.double() - torch.stack(wanted)).abs().max() < (1e-5 if shape[-1] is torch.float32 else 0.02)


@everywhere
def test_a_row_has_the_bits_it_has_alone(processor, shape, stored, options) -> None:
    """In a tree next to other sequences' trees, among some rows of a chain, and as the only row behind its path."""
    made = bench(shape)
    sequences = [made.sequence(*size) for size in SIZES]
    result = attended(made.lay_out(sequences, padding=1), stored, **options)
    begin = 0
    for sequence in sequences:
        nodes = len(sequence.query)
        for node in {0, nodes // 2, nodes - 1}:
            depth = len(sequence.path(node))
            for rows in {1, depth // 2 or 1, depth}:
                chain = [sequence.compacted(node, rows)]
                for is_text in (True, False):
                    alone = attended(made.lay_out(chain, chain=is_text), stored, **options)
                    assert same(alone[-1], result[begin + node])
        begin += nodes


@pytest.mark.parametrize("count", [1, 2, 3])
def test_bits_do_not_depend_on_threads_or_on_how_much_is_shared_among_them(monkeypatch, count) -> None:
    """A prompt's chunk, of which the spans are not divided, and its last rows by themselves, of which they are."""
    made = bench(SHAPES[0])
    whole = made.sequence(700, 80, reach=1)
    few = Sequence(700 + 77, [-1, 0, 1], whole.keys, whole.values, whole.query[-3:])
    middle = Sequence(720, [-1, *range(40)], whole.keys[:761], whole.values[:761], whole.query[20:61])
    monkeypatch.setattr(threads.ThreadPool, "num_threads", lambda self: count)
    results = [attended(made.lay_out([each], chain=True), sinks=True) for each in (whole, few, middle)]
    monkeypatch.setattr(threads.ThreadPool, "num_threads", lambda self: 1)
    again = attended(made.lay_out([whole], chain=True), sinks=True)
    assert same(results[0], again) and same(results[1], again[-3:]) and same(results[2], again[20:61])


def test_it_is_the_same_each_time() -> None:
    """What units tell each other is as it was before."""
    made = bench(SHAPES[0])
    laid_out = made.lay_out([made.sequence(900, 16), made.sequence(300, 1)])
    results = [attended(laid_out) for _ in range(20)]
    assert all(same(each, results[0]) for each in results)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_what_one_row_sees_and_is_no_number_is_nothing_to_another(stored) -> None:
    """A child of the root that is NaN next to one that is not, in one pair of positions; and infinite values."""
    made = bench(SHAPES[0])
    sequence = made.sequence(33, 3)
    sequence.parents = [-1, 0, 0]
    clean = attended(made.lay_out([sequence]), stored=stored)
    sequence.keys[34] = torch.nan
    sequence.values[34] = torch.inf
    result = attended(made.lay_out([sequence]), stored=stored)
    assert same(result[[0, 2]], clean[[0, 2]]) and result[1].isnan().all()
    sequence.values[33] = torch.inf
    result = attended(made.lay_out([sequence]), stored=stored)[0]
    assert (result == torch.inf).all() if stored is None else not result.isfinite().any()


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 20, "first": 2}], ids=str)
@pytest.mark.parametrize(("length", "rows"), [(0, 33), (15, 32), (250, 40)])
def test_a_text_s_rows_share_its_end_and_notice_nothing_behind_their_own(length, rows, options) -> None:
    """Also where a window is shorter than the rows that are put together; what only the last row sees is infinite."""
    made = bench(SHAPES[4])
    sequence = made.sequence(length, rows)
    sequence.parents = [-1, *range(rows - 1)]
    sequence.values[length + rows - 1] = torch.inf
    together = attended(made.lay_out([sequence.compacted(rows - 1, rows)], chain=True), **options)
    for row in range(rows):
        alone = attended(made.lay_out([sequence.compacted(row)], chain=True), **options)
        assert same(alone[0], together[row])
    assert together[:-1].isfinite().all() and not together[-1].isfinite().any()


@pytest.mark.parametrize("computed", [nullcontext, references], ids=["compiled", "reference"])
def test_scores_are_capped_and_a_sink_takes_its_share(computed: Callable[[], AbstractContextManager[None]]) -> None:
    """Two heads over three keys, every number written out; a row that sees no key gives zeros."""
    width = 16
    page, offsets = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    rows = AttentionMetadata(page[None], 4, page, offsets)
    query = torch.tensor([[[9.0], [-9.0]]] * 3).repeat_interleave(width, dim=2)
    keys, values = (
        torch.tensor([*numbers, torch.nan])[:, None, None].repeat(1, 1, width)
        for numbers in ((1.0, 0.5, -1.0), (1.0, 10.0, 100.0))
    )
    sinks = torch.tensor([1.5, -2.0])
    scores = 2.0 * (torch.tensor([[6.0, 3.0, -6.0], [-6.0, -3.0, 6.0]]) / 2.0).tanh()
    weights = torch.cat([scores, sinks[:, None]], dim=1).exp()
    wanted = (weights[:, :3] * torch.tensor([1.0, 10.0, 100.0])).sum(dim=1) / weights.sum(dim=1)
    scale = 6.0 / 9.0 / width
    with computed():
        found = tree_attention(query, keys, values, rows, scale, softcap=2.0, sinks=sinks)
        rows.plan = None
        late = tree_attention(query, keys, values, rows, scale, first=2, softcap=2.0, sinks=sinks)
    torch.testing.assert_close(found[2], wanted[:, None].expand(-1, width), rtol=1e-6, atol=0)
    assert late[2].all() and not late[:2].any()
