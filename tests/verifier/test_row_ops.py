"""Norm and rotation: what they compute, and that no row's bits depend on its neighbours or on threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foresay.kvpaging.store import as_bytes, quantized
from foresay.verifier.ops.attention import rotate_and_store, rotate_queries
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels.cpu.launch import recording
from foresay.verifier.ops.records import HeadNorms, Norm, Rotation, SplitKSums
from foresay.verifier.ops.rows import add_norm, embed, finish_logits, gate_heads, gate_inputs, layer_inputs, norm
from tests.verifier.conftest import by_pairs
from tests.verifier.reading import threads

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 70


#: What keys and values can be quantised to.
STORED = [torch.int8, torch.float8_e4m3fn]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rows_are_independent(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    alone = torch.cat([op(row) for row in x.split(1)])
    for count in (2, 3, 11, 16, 17, 33, 45, 65, 70):
        assert torch.equal(op(x[:count].clone()), alone[:count]), f"among {count} rows"


@by_pairs("wide, width, dtype, count", [False, True], [16, 100, 576, 4096], DTYPES, [1, 3])
def test_norm(processor, wide, width, dtype, count) -> None:
    x, weight = noise(ROWS, width, dtype=dtype), noise(width, dtype=torch.float32 if wide else dtype)
    with threads(count):
        exact = x.double()
        wanted = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        how = Norm(weight, 1e-5)
        result = norm(x, how)
        # One rounding, or one more before the weight.
        assert torch.allclose(
            result.double(), wanted, rtol=(0.51 if wide else 4) * torch.finfo(dtype).eps + 1e-6, atol=1e-6
        )
        assert_rows_are_independent(lambda part: norm(part, how), x)
        added, stream = noise(ROWS, width, dtype=dtype).flip(0).contiguous(), x.clone()
        normed = add_norm(stream, added, how)
        assert torch.equal(stream, x + added) and torch.equal(normed, norm(x + added, how))


def in_torch_s_words(x: Tensor, how: Norm) -> Tensor:
    """What torch's own function gives, in fp64."""
    shape, weight = x.shape[-1:], how.weight.double()
    if how.centred:
        return functional.layer_norm(
            x.double(), shape, weight, None if how.bias is None else how.bias.double(), how.eps
        )
    normed = functional.rms_norm(x.double(), shape, weight, how.eps)
    return normed if how.bias is None else normed + how.bias.double()


#: Biased or not, centred or not; the plain norm is above.
WAYS = [(True, False), (False, True), (True, True)]


def way(width: int, biased: bool, centred: bool, dtype: torch.dtype) -> Norm:
    return Norm(noise(width, dtype=dtype), 1e-5, noise(2, width, dtype=dtype)[1] if biased else None, centred)


@pytest.mark.parametrize("wide", [False, True], ids=["weight", "weight of fp32"])
@pytest.mark.parametrize(("biased", "centred"), WAYS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_the_reference_norms_as_torch_does(dtype, biased, centred, wide) -> None:
    x = noise(ROWS, 100, dtype=dtype) + 3.0
    how = way(100, biased, centred, torch.float32 if wide else dtype)
    with references():
        result, before = norm(x, how), x.clone()
        assert result.dtype is dtype and torch.equal(x, before)
    # One rounding, or another of a number of up to 4 before it is multiplied.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        result.double(),
        in_torch_s_words(x, how),
        rtol=(0.51 if wide else 1.1) * eps + 1e-6,
        atol=4e-6 + (0 if wide else 8 * eps),
    )


@by_pairs("width, dtype, kind, wide", [100, 4096], [*DTYPES, torch.float16], WAYS, [False, True])
def test_kernels_norm_as_the_reference_does(processor, width, dtype, kind, wide) -> None:
    """Up to a rounding that falls the other way; and each row as if it were alone."""
    x, (biased, centred) = noise(ROWS, width, dtype=dtype) + 3.0, kind
    how = way(width, biased, centred, torch.float32 if wide else dtype)
    with threads(3):
        result = norm(x, how)
        with references():
            wanted = norm(x, how)
        torch.testing.assert_close(result, wanted, rtol=torch.finfo(dtype).eps, atol=1e-5 if wide else 0.02)
        assert (result != wanted).float().mean() < (1.0 if dtype is torch.float32 else 0.02)
        assert_rows_are_independent(lambda part: norm(part, how), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_far_from_zero_takes_no_digits(dtype) -> None:
    """The squares of what is left when it is gone are added, not those of all."""
    x = 4096.0 + 32 * noise(ROWS, 576, dtype=dtype)
    how = Norm(torch.ones(576), 1e-5, centred=True)
    rounded = 0.51 * torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(norm(x, how).double(), in_torch_s_words(x, how), rtol=rounded, atol=1e-4)


@by_pairs("width, dtype, how", [16, 100], [*DTYPES, torch.float16], ["none", "rms", "layer"])
def test_a_share_of_a_branch_is_added(processor, width, dtype, how) -> None:
    """Rounded before that, as transformers does it; then the norm of the sum, if any, as of any row."""
    x, y = noise(ROWS, width, dtype=dtype), noise(2, ROWS, width, dtype=dtype)[1]
    normed = {"none": None, "rms": Norm(noise(width, dtype=dtype), 1e-5)}.get(
        how, way(width, True, True, torch.float32)
    )
    for share in (1.0, 0.22):
        stream, plain = x.clone(), x.clone()
        result = add_norm(stream, y, normed, share=share)
        assert torch.equal(stream, x + share * y)
        assert result is stream if normed is None else torch.equal(result, norm(stream, normed))
        with references():
            wanted = add_norm(plain, y, normed, share=share)
        assert torch.equal(plain, stream) and (wanted is plain) == (normed is None)


@pytest.mark.parametrize("how", [None, Norm(noise(100), 1e-5), Norm(noise(100), 1e-5, noise(100), centred=True)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_a_sum_is_scaled(processor, dtype, how) -> None:
    """By a number of the layer's, after it was rounded; then it is normed as any row."""
    x, y, scalar = noise(ROWS, 100, dtype=dtype), noise(2, ROWS, 100, dtype=dtype)[1], torch.tensor([0.3]).to(dtype)
    for share in (1.0, 0.22):
        stream, plain = x.clone(), x.clone()
        result = add_norm(stream, y, how, share=share, scalar=scalar)
        assert torch.equal(stream, (x + share * y) * scalar)
        assert result is stream if how is None else torch.equal(result, norm(stream, how))
        with references():
            add_norm(plain, y, how, share=share, scalar=scalar)
        assert torch.equal(plain, stream)


#: Layers and numbers of each: of one vector of a CPU's, and of others.
INPUTS = [(3, 16), (2, 24), (5, 256)]


def of_layers(layers: int, width: int, dtype: torch.dtype, stored: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Norm]:
    """A product of rows, a table, the tokens of rows and a norm, whose weight is of fp32."""
    product, table = (
        noise(ROWS, layers * width, dtype=dtype),
        noise(2, 50, layers * width, dtype=stored)[1].contiguous(),
    )
    return product, table, torch.arange(ROWS) * 7 % 50, Norm(1 + 0.3 * noise(width), 1e-6)


@by_pairs(
    "shape, dtypes", INPUTS, [(each, each) for each in (*DTYPES, torch.float16)] + [tuple(DTYPES), tuple(DTYPES[::-1])]
)
def test_what_layers_read_of_a_token_and_its_embedding(processor, shape, dtypes) -> None:
    """In the words of transformers; the table's numbers are rounded to what is computed in. Each row as if alone."""
    (layers, width), (dtype, stored) = shape, dtypes
    factors = 64**-0.5, float(torch.tensor(width**0.5).to(dtype))
    product, table, tokens, how = of_layers(layers, width, dtype, stored)
    result = layer_inputs(product, dtype, table, tokens, how, factors)
    scaled = (product * factors[0]).view(ROWS, layers, width).float()
    normed = scaled * torch.pow(scaled.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5) * how.weight
    read = functional.embedding(tokens, table.to(dtype)) * torch.tensor(width**0.5).to(dtype)
    wanted = (normed.to(dtype) + read.view(ROWS, layers, width)) * 2.0**-0.5
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, wanted.flatten(1), rtol=2 * eps, atol=4 * eps)
    with references():
        torch.testing.assert_close(
            layer_inputs(product, dtype, table, tokens, how, factors), result, rtol=2 * eps, atol=4 * eps
        )
    for row in range(0, ROWS, 9):
        one = slice(row, row + 1)
        assert torch.equal(
            layer_inputs(product[one].clone(), dtype, table, tokens[one].clone(), how, factors)[0], result[row]
        )


@by_pairs("shape, dtype", INPUTS, [*DTYPES, torch.float16])
def test_gates_of_what_a_layer_reads(processor, shape, dtype) -> None:
    """Of this layer and no other; each row as if it were alone."""
    layers, width = shape
    inputs, gate = noise(ROWS, layers * width, dtype=dtype), noise(2, ROWS, width, dtype=dtype)[1].contiguous()
    for number in range(layers):
        result = gate_inputs(gate, inputs, number)
        own = inputs.view(ROWS, layers, width)[:, number]
        wanted = functional.gelu(gate, approximate="tanh") * own
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(result, wanted, rtol=2 * eps, atol=4 * eps)
        with references():
            assert torch.equal(gate_inputs(gate, inputs, number), wanted)
        for row in range(0, ROWS, 9):
            alone = gate_inputs(gate[row : row + 1].clone(), inputs[row : row + 1].clone(), number)
            assert torch.equal(alone[0], result[row])


def test_a_pass_begins_without_a_norm_where_there_is_none() -> None:
    """What is normed is the stream itself: a product of it reads it before anything is added to it."""
    table, tokens = noise(9, 32), torch.tensor([3, 8, 0])
    x, normed = embed(table, tokens, None)
    assert torch.equal(x, table[tokens]) and normed is x


def test_an_addition_is_recorded_as_norms_are() -> None:
    """And reads how many rows there are when it runs."""
    x, y, count = noise(6, 32), noise(7, 6, 32)[1], torch.tensor([4])
    begun, how = x.clone(), Norm(noise(32), 1e-5, noise(2, 32)[1], centred=True)
    with recording() as made:
        add_norm(x, y, None, count, share=0.5)
        normed = add_norm(x, y, how, count)
    assert torch.equal(x, begun), "recorded, not run"
    made()
    assert torch.equal(x[:4], (begun + 0.5 * y + y)[:4]) and torch.equal(x[4:], begun[4:])
    assert torch.equal(normed[:4], norm(x, how)[:4])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(6, 64), (32, 128)], ids=str)
def test_norm_of_the_heads_of_each_row(heads, dtype, count) -> None:
    """Query and key norms: all heads of a row are normed alike, and lie among others in memory."""
    x, weight = noise(ROWS, heads[0] + 2, heads[1], dtype=dtype), noise(heads[1], dtype=dtype)
    with threads(count):
        how = Norm(weight, 1e-5)
        one_by_one = torch.stack([norm(head.contiguous(), how) for head in x[:, :-2].unbind(1)], dim=1)
        assert torch.equal(norm(x[:, :-2], how), one_by_one)
        assert_rows_are_independent(lambda part: norm(part[:, :-2], how), x)


@by_pairs("width, dtype, count", [7, 256, 1000], [*DTYPES, torch.float16], [1, 3])
def test_heads_are_gated(processor, width, dtype, count) -> None:
    """As attention's output times the sigmoid of a product, step by step; far gates are open or shut."""
    both = torch.cat((noise(ROWS, width, dtype=dtype), 4 * noise(ROWS, width, dtype=dtype).flip(0)), dim=1)
    both[0, width], both[1, width], both[2, width] = 200.0, -200.0, torch.nan

    def gated(rows: Tensor) -> Tensor:
        x, gate = (part.clone() for part in rows.chunk(2, dim=1))
        assert gate_heads(x, gate) is x
        return x

    with threads(count):
        found = gated(both)
        with references():
            wanted = gated(both)
        close = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, wanted, rtol=close, atol=close, equal_nan=True)
        assert found[:3, 0].tolist()[:2] == [both[0, 0], 0.0] and found[2, 0].isnan()
        assert_rows_are_independent(gated, both[3:].repeat(2, 1))
    partials = SplitKSums(torch.stack((both[3:, width:].float(), torch.ones(ROWS - 3, width))), None)
    wanted = gate_heads(both[3:, :width].contiguous(), partials.finished(dtype))
    assert torch.equal(gate_heads(both[3:, :width].contiguous(), partials), wanted)


#: Q, G, D; the dtype; norms of heads, with weights of that dtype or of fp32; and whether queries have a factor.
ROTATIONS = [
    *product(
        [(4, 2, 64), (9, 3, 16), (32, 8, 128), (3, 1, 24)], [*DTYPES, torch.float16], ["", "each", "each, wide"], [""]
    ),
    *product([(9, 3, 16), (3, 1, 24)], DTYPES, ["whole", "whole, wide", "after", "after, wide"], [""]),
    *product([(9, 3, 16)], [*DTYPES, torch.float16], ["", "each", "whole", "after"], ["factor"]),
]


def rotation_of(rows: int, dim: int, dtype: torch.dtype, factor: bool = False) -> Rotation:
    angle = noise(rows, 1, dim // 2)
    cos, sin = torch.cat((angle, angle), dim=-1).cos(), torch.cat((-angle, angle), dim=-1).sin()
    return Rotation(cos.to(dtype), sin.to(dtype), (1 + noise(rows).abs()).to(dtype) if factor else None)


def norms_of(kind: str, heads: tuple[int, int, int], dtype: torch.dtype) -> HeadNorms | None:
    """kind, heads: see :data:`ROTATIONS`."""
    (queries, groups, dim), whole = heads, kind.startswith("whole")
    dtype = torch.float32 if kind.endswith("wide") else dtype
    query, key = noise(queries * dim if whole else dim, dtype=dtype), noise(groups * dim + 1, dtype=dtype)[1:]
    key = key.clone() if whole else key[:dim].clone()
    return HeadNorms(query, key, 1e-5, whole, kind.startswith("after")) if kind else None


def parts_of(rotation: Rotation, part: slice) -> Rotation:
    cos, sin, factor = rotation
    return Rotation(cos[part], sin[part], None if factor is None else factor[part])


@by_pairs("case, count", ROTATIONS, [1, 3])
def test_rotation(processor, case, count) -> None:
    """As the reference has it; keys and values in their slots, and each row as if it were alone."""
    heads, dtype, kind, factor = case
    queries, groups, dim = heads
    qkv, rotation = noise(ROWS, (queries + 2 * groups) * dim, dtype=dtype), rotation_of(ROWS, dim, dtype, bool(factor))
    norms, slots = norms_of(kind, heads, dtype), torch.randperm(2 * ROWS)[:ROWS]
    close = (16 if factor or kind.startswith(("whole", "after")) else 4) * torch.finfo(dtype).eps

    def turned(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (torch.zeros(2 * ROWS, groups, dim, dtype=dtype) for _ in range(2))
        query = rotate_and_store(qkv[part], parts_of(rotation, part), (keys, values, None), slots[part], norms)
        return query, keys[slots[part]], values[slots[part]]

    with threads(count):
        found = turned(slice(None))
        with references():
            wanted = turned(slice(None))
        for mine, its in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, its, rtol=close, atol=close)
        for row in range(0, ROWS, 9):
            assert all(torch.equal(a[0], b[row]) for a, b in zip(turned(slice(row, row + 1)), found, strict=True))


@by_pairs("heads, dtype, stored", [(4, 2, 64), (9, 3, 16), (3, 1, 24)], [*DTYPES, torch.float16], STORED)
def test_keys_and_values_are_quantised_as_the_reference_says(processor, heads, dtype, stored) -> None:
    """Bit by bit: zeros, tiny, huge and wide heads, and such that hold no numbers, too; and each row as if alone."""
    queries, groups, dim = heads
    qkv, rotation = noise(ROWS, (queries + 2 * groups) * dim, dtype=dtype), rotation_of(ROWS, dim, dtype)
    qkv[1] = 0.0
    qkv[2] *= 1e-6
    qkv[3] *= 1e3
    qkv[4] *= (4 * noise(qkv.shape[1])).exp().to(dtype)
    qkv[5, -1], qkv[6, queries * dim] = torch.nan, torch.inf
    slots = torch.randperm(2 * ROWS)[:ROWS]

    def kept(part: slice) -> list[Tensor]:
        keys, values = (torch.zeros(2 * ROWS, groups, dim, dtype=stored) for _ in range(2))
        scales = torch.zeros(2 * ROWS, 2, groups)
        rotate_and_store(qkv[part], parts_of(rotation, part), (keys, values, scales), slots[part])
        sizes = scales.view(torch.int32) & 0x7FFFFFFF  # NaN has a sign
        return [each[slots[part]] for each in (as_bytes(keys), as_bytes(values), sizes)]

    found = kept(slice(None))
    with references():
        assert all(torch.equal(mine, its) for mine, its in zip(found, kept(slice(None)), strict=True))
    for row in range(8):
        assert all(torch.equal(a[0], b[row]) for a, b in zip(kept(slice(row, row + 1)), found, strict=True))


@by_pairs(
    "heads, dtype, alike, stored",
    [(4, 2, 64), (8, 1, 512), (3, 1, 24)],
    [*DTYPES, torch.float16],
    [False, True],
    [None, *STORED],
)
def test_values_are_normalised_and_may_be_the_product_of_keys(processor, heads, dtype, alike, stored) -> None:
    """Keys twice in the product have the same bits; values are those of a norm without weight; and of rows of queries
    alone these are the same."""
    queries, groups, dim = heads
    made, rotation = noise(ROWS, (queries + 2 * groups) * dim, dtype=dtype), rotation_of(ROWS, dim, dtype)
    turning, own = made[:, : (queries + groups) * dim], made[:, (queries + groups) * dim :]
    own = turning[:, queries * dim :] if alike else own
    found_norms = norms_of("each, wide", heads, dtype)
    assert found_norms is not None
    norms = replace(found_norms, values=True)
    slots = torch.randperm(2 * ROWS)[:ROWS]

    def kept(product: Tensor, alike: bool, norms: HeadNorms = norms) -> tuple[Tensor, ...]:
        keys, values = (torch.zeros(2 * ROWS, groups, dim, dtype=stored or dtype) for _ in range(2))
        scales = torch.zeros(2 * ROWS, 2, groups) if stored else None
        query = rotate_and_store(product.contiguous(), rotation, (keys, values, scales), slots, norms, None, alike)
        return query, as_bytes(keys)[slots], as_bytes(values)[slots], *(() if scales is None else (scales[slots],))

    found, twice = kept(turning if alike else made, alike), kept(torch.cat((turning, own), dim=1), alike=False)
    assert all(map(torch.equal, found, twice))
    plain = norm(own.contiguous().view(-1, dim), Norm(torch.ones(dim, dtype=dtype), norms.eps)).view(ROWS, groups, dim)
    if stored is None:
        close = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[2], plain, rtol=close, atol=close)
        assert not torch.equal(found[2], kept(turning if alike else made, alike, replace(norms, values=False))[2])
        with references():
            for mine, its in zip(found, kept(turning if alike else made, alike), strict=True):
                torch.testing.assert_close(mine, its, rtol=close, atol=close)
    alone = rotate_queries(turning[:, : queries * dim].contiguous(), rotation, norms)
    assert torch.equal(alone, found[0])
    with references():
        again = rotate_queries(turning[:, : queries * dim].contiguous(), rotation, norms)
    torch.testing.assert_close(again, alone, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


FINISHED = [(0.25, None), (1.0, 30.0), (6.0, 5.0)]


@by_pairs("case, width, count", FINISHED, [7, 5003], [1, 3])
def test_logits_are_scaled_and_then_capped(processor, case, width, count) -> None:
    x, (scale, cap) = noise(ROWS, width), case
    wanted = x.double() * scale
    wanted = wanted if cap is None else cap * (wanted / cap).tanh()
    with references():
        torch.testing.assert_close(finish_logits(x.clone(), scale, cap).double(), wanted, rtol=1e-6, atol=1e-7)
    with threads(count):
        found = x.clone()
        assert finish_logits(found, scale, cap) is found
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)
        assert_rows_are_independent(lambda part: finish_logits(part.clone(), scale, cap), x)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("kind", "factor"), [("each", ""), ("whole", ""), ("after", ""), ("", "factor")])
def test_what_is_quantised_is_what_would_be_stored(processor, kind, factor, stored) -> None:
    """However heads are normed; the factor of queries is not in keys."""
    (queries, groups, dim), dtype = (9, 3, 24), torch.bfloat16
    qkv, norms = noise(ROWS, (queries + 2 * groups) * dim, dtype=dtype), norms_of(kind, (queries, groups, dim), dtype)
    plain, narrow = ([torch.zeros(ROWS, groups, dim, dtype=each) for _ in range(2)] for each in (dtype, stored))
    scales, slots = torch.zeros(ROWS, 2, groups), torch.randperm(ROWS)
    rotation = rotation_of(ROWS, dim, dtype, bool(factor))
    found = rotate_and_store(qkv, rotation, (narrow[0], narrow[1], scales), slots, norms)
    wanted = rotate_and_store(qkv, rotation_of(ROWS, dim, dtype), (plain[0], plain[1], None), slots, norms)
    assert torch.equal(found, wanted) != bool(factor)
    for number, (mine, its) in enumerate(zip(narrow, plain, strict=True)):
        numbers, own = quantized(its, stored)
        assert torch.equal(as_bytes(mine), as_bytes(numbers)) and torch.equal(scales[:, number], own)


def recorded_rotation(kind: str) -> Callable[[Tensor, Tensor | None], Sequence[Tensor]]:
    heads, rotation, slots = (9, 3, 16), rotation_of(8, 16, torch.float32, factor=True), torch.arange(8)
    norms, keys, values = norms_of(kind, heads, torch.float32), torch.zeros(8, 3, 16), torch.zeros(8, 3, 16)
    return lambda x, count: (
        rotate_and_store(x, rotation, (keys, values, None), slots, norms, count), keys, values,
    )  # fmt: skip


GATE = noise(8, 241)[:, 1:].contiguous()
#: Each gives what it writes. All take a row of 240 numbers; logits twice.
RECORDED: dict[str, Callable[[Tensor, Tensor | None], Sequence[Tensor]]] = {
    "gates": lambda x, count: [gate_heads(x, GATE, count)],
    "logits": lambda x, count: [finish_logits(finish_logits(x, 1.0, None, count), 2.0, 30.0, count)],
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
