"""Ops on rows on a CPU: what they compute, and that no row's bits depend on its neighbours, threads or recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.store import as_bytes, quantized
from foresay.verifier.ops.attention import rotate_and_store
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels.cpu.launch import recording
from foresay.verifier.ops.records import Norm, Rotation
from foresay.verifier.ops.rows import add_norm, finish_logits, gate_heads, norm
from tests.kernels.row_cases import CASES, Case, Noise, close, in_torch_s_words, norms_of, parted
from tests.verifier.conftest import by_pairs
from tests.verifier.reading import threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, CPU = 70, torch.device("cpu")
#: What keys and values can be quantised to.
STORED = [torch.int8, torch.float8_e4m3fn]
PARTS = [slice(0, count) for count in (2, 3, 11, 16, 17, 33, 45, 65)] + [slice(n, n + 1) for n in range(0, ROWS, 9)]


def here(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return op


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return Noise(CPU, dtype, ROWS)(*shape)


@by_pairs("name, dtype, count", [*CASES], DTYPES, [1, 3])
def test_what_an_op_computes(processor, name, dtype, count) -> None:
    """What is exact, up to roundings; what references compute; and of some rows what all rows have."""
    draw = Noise(CPU, dtype, ROWS)
    case = CASES[name](draw)
    with threads(count):
        found = case.run(here, case.of(slice(None)))
        with references():
            their = case.run(here, case.of(slice(None)))
        agree(found, case, their)
        if name.startswith("norm") and dtype is not torch.float32:
            assert (found[0] != their[0]).float().mean() < 0.02, "roundings that fall the other way"
        for mine, its in case.equal(here, found):
            assert torch.equal(mine, its)
        for part in PARTS:
            some = case.run(here, case.of(part))
            assert all(same(a, b[part]) for a, b in zip(some, found, strict=True)), part
    if case.product:
        sums = parted(case.rows[case.product], draw)
        whole = case.run(here, case.of(slice(None)) | {case.product: sums.reduce(dtype)})
        if name.startswith("gated heads"):
            assert all(map(same, case.run(here, case.of(slice(None)) | {case.product: sums}), whole))


def agree(found: Sequence[Tensor], case: Case, their: Sequence[Tensor]) -> None:
    for number, (mine, its) in enumerate(zip(found, their, strict=True)):
        assert same(mine, its) if number in case.exact else close(mine, its, case.ulps, mine.dtype)
        assert case.wanted is None or close(mine, case.wanted[number], case.ulps, mine.dtype)
        assert case.wanted is None or close(its, case.wanted[number], case.ulps, mine.dtype)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, but for the sign of NaN."""
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_mean_far_from_zero_takes_no_digits(dtype) -> None:
    """The squares of what is left when it is gone are added, not those of all."""
    x = 4096.0 + 32 * noise(ROWS, 576, dtype=dtype)
    how = Norm(torch.ones(576), 1e-5, centred=True)
    rounded = 0.51 * torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(norm(x, how).double(), in_torch_s_words(x, how), rtol=rounded, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_norm_of_the_heads_of_each_row(count) -> None:
    """Query and key norms: all heads of a row are normed alike, and lie among others in memory."""
    for heads, width in ((6, 64), (32, 128)):
        x, how = noise(ROWS, heads + 2, width), Norm(noise(width), 1e-5)
        with threads(count):
            one_by_one = torch.stack([norm(head.contiguous(), how) for head in x[:, :-2].unbind(1)], dim=1)
            assert torch.equal(norm(x[:, :-2], how), one_by_one)


@by_pairs("heads, dtype, stored", [(4, 2, 64), (9, 3, 16), (3, 1, 24)], DTYPES, STORED)
def test_keys_and_values_are_quantised_as_the_reference_says(processor, heads, dtype, stored) -> None:
    """Bit by bit: zeros, tiny, huge and wide heads, and such that hold no numbers, too; and each row as if alone."""
    (queries, groups, dim), draw = heads, Noise(CPU, dtype, ROWS)
    qkv, slots = draw(ROWS, (queries + 2 * groups) * dim), draw.integers(2 * ROWS)
    cos, sin = draw(ROWS, 1, dim), draw(ROWS, 1, dim)
    qkv[1] = 0.0
    qkv[2] *= 1e-6
    qkv[3] *= 1e3
    qkv[4] *= (4 * noise(qkv.shape[1])).exp().to(dtype)
    qkv[5, -1], qkv[6, queries * dim] = torch.nan, torch.inf

    def kept(part: slice) -> list[Tensor]:
        keys, values = (torch.zeros(2 * ROWS, groups, dim, dtype=stored) for _ in range(2))
        scales = torch.zeros(2 * ROWS, 2, groups)
        rotate_and_store(qkv[part], Rotation(cos[part], sin[part]), (keys, values, scales), slots[part])
        sizes = scales.view(torch.int32) & 0x7FFFFFFF  # NaN has a sign
        return [each[slots[part]] for each in (as_bytes(keys), as_bytes(values), sizes)]

    found = kept(slice(None))
    with references():
        assert all(torch.equal(mine, its) for mine, its in zip(found, kept(slice(None)), strict=True))
    for row in range(8):
        assert all(torch.equal(a[0], b[row]) for a, b in zip(kept(slice(row, row + 1)), found, strict=True))


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("kind", "factor"), [("each", False), ("whole", False), ("after", False), ("", True)])
def test_what_is_quantised_is_what_would_be_stored(processor, kind, factor, stored) -> None:
    """However heads are normed; the factor of queries is not in keys."""
    heads, draw = (9, 3, 24), Noise(CPU, torch.bfloat16, ROWS)
    qkv, cos, sin = draw(ROWS, 15 * 24), draw(ROWS, 1, 24), draw(ROWS, 1, 24)
    plain, narrow = ([torch.zeros(ROWS, 3, 24, dtype=each) for _ in range(2)] for each in (torch.bfloat16, stored))
    scales, slots, norms = torch.zeros(ROWS, 2, 3), torch.randperm(ROWS), norms_of(draw, kind, heads)
    turn = Rotation(cos, sin, 1 + draw(ROWS).abs() if factor else None)
    found = rotate_and_store(qkv, turn, (narrow[0], narrow[1], scales), slots, norms)
    wanted = rotate_and_store(qkv, Rotation(cos, sin), (plain[0], plain[1], None), slots, norms)
    assert torch.equal(found, wanted) != factor
    for number, (mine, its) in enumerate(zip(narrow, plain, strict=True)):
        numbers, own = quantized(its, stored)
        assert torch.equal(as_bytes(mine), as_bytes(numbers)) and torch.equal(scales[:, number], own)


# -- recordings --------------------------------------------------------------------------------------------------------


def recorded_rotation(kind: str) -> Callable[[Tensor, Tensor | None], Sequence[Tensor]]:
    draw = Noise(CPU, torch.float32, 8)
    turn, slots = Rotation(draw(8, 1, 16), draw(8, 1, 16), 1 + draw(8).abs()), torch.arange(8)
    norms, keys, values = norms_of(draw, kind, (9, 3, 16)), torch.zeros(8, 3, 16), torch.zeros(8, 3, 16)
    return lambda x, count: (rotate_and_store(x, turn, (keys, values, None), slots, norms, count), keys, values)


GATE, LAYER = noise(8, 241)[:, 1:].contiguous(), Norm(noise(240), 1e-5, noise(1, 240)[0], centred=True)
#: Each gives what it writes. All take a row of 240 numbers; logits twice.
RECORDED: dict[str, Callable[[Tensor, Tensor | None], Sequence[Tensor]]] = {
    "gates": lambda x, count: [gate_heads(x, GATE, count)],
    "logits": lambda x, count: [finish_logits(finish_logits(x, 1.0, None, count), 2.0, 30.0, count)],
    "additions": lambda x, count: [add_norm(x, GATE, None, count, share=0.5), add_norm(x, GATE, LAYER, count), x],
    **{f"rotation, norms {kind}": recorded_rotation(kind) for kind in ("each", "whole", "after")},
}


@pytest.mark.parametrize("op", RECORDED.values(), ids=RECORDED)
def test_what_is_recorded_works_on_the_rows_there_are_when_it_runs(op) -> None:
    x, given, count = noise(8, 240), torch.empty(8, 240), torch.zeros(1, dtype=torch.int64)
    begun = op(x.clone(), None)
    expected = [each.clone() for each in begun]
    for each in begun:  # some are where the next ones will be
        each.zero_()
    with recording() as replay:
        found = op(given, count)
    for rows in (5, 0, 8):
        given.copy_(x)
        before = [each.clone() for each in found]
        count.fill_(rows)
        replay()
        for mine, its, old in zip(found, expected, before, strict=True):
            assert torch.equal(mine[:rows], its[:rows]) and torch.equal(mine[rows:], old[rows:])
