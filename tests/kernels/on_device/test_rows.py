"""Norm, activation and rotation with the KV store: the kernels against the references, and each row by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.store import as_bytes, dequantized
from foresay.verifier.ops.attention import join_latents, rotate_and_store, rotate_queries
from foresay.verifier.ops.kernels import linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.records import HeadNorms, Norm, Rotation, SplitKSums
from foresay.verifier.ops.rows import (
    add_norm,
    embed,
    finish_logits,
    gate_heads,
    gate_inputs,
    layer_inputs,
    norm,
    pair,
    take_both,
)
from tests.combinations import pairwise
from tests.kernels.on_device.conftest import DTYPES, INTERPRETED, noise

# In the interpreter exp() is numpy's, which warns where it gives infinity, as it is meant to far below zero.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")]
ROWS = 5


def close(result: Tensor, wanted: Tensor, ulps: float = 2.0) -> bool:
    """Within a few units in the last place of the dtype; a reduction's order may move a rounding."""
    eps = torch.finfo(wanted.dtype).eps
    return torch.allclose(result.cpu().double(), wanted.cpu().double(), rtol=ulps * eps, atol=ulps * eps)


def on_cpu(how: Norm) -> Norm:
    return replace(how, weight=how.weight.cpu(), bias=None if how.bias is None else how.bias.cpu())


@pytest.mark.parametrize(
    ("width", "wide", "dtype"), pairwise([1, 96, 128, 576, 1000, 4096], [False, True], DTYPES), ids=str
)
def test_norm(width, wide, dtype, device) -> None:
    x, weight = noise(device, ROWS, width, dtype=dtype), noise(device, width, dtype=torch.float32 if wide else dtype)
    how = Norm(weight, 1e-5)
    result = norm.launch(x, how)
    assert close(result, norm(x.cpu(), on_cpu(how)), ulps=4.0)
    for row in range(ROWS):
        assert torch.equal(norm.launch(x[row : row + 1].clone(), how), result[row : row + 1])


@pytest.mark.parametrize("width", [96, 1000])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["weight", "weight of fp32"])
def test_a_layer_norm(wide, biased, width, dtype, device) -> None:
    """Alone, after an addition, and of what a pass begins with."""
    weight, bias = noise(device, 2, width, dtype=torch.float32 if wide else dtype)
    how = Norm(weight, 1e-5, bias if biased else None, centred=True)
    x = noise(device, ROWS, width, dtype=dtype) + 3.0
    result = norm.launch(x, how)
    assert close(result, norm(x.cpu(), on_cpu(how)), ulps=16.0)
    for row in range(ROWS):
        assert torch.equal(norm.launch(x[row : row + 1].clone(), how), result[row : row + 1])
    assert torch.equal(add_norm.launch(x.clone(), torch.zeros_like(x), how), result)
    assert torch.equal(embed.launch(x, torch.arange(ROWS, device=device), how)[1], result)


@pytest.mark.parametrize("width", [96, 1000])
def test_norm_behind_a_residual_addition(width, dtype, device) -> None:
    x, y = noise(device, ROWS, width, dtype=dtype), noise(device, ROWS, width, dtype=dtype).flip(0)
    weight = noise(device, width, dtype=dtype)
    stream, plain, how = x.clone(), x.cpu(), Norm(weight, 1e-6)
    result = add_norm.launch(stream, y, how)
    wanted = add_norm(plain, y.cpu(), on_cpu(how))
    assert torch.equal(stream.cpu(), plain), "the stream carries the rounded sum"
    assert close(result, wanted, ulps=4.0)
    assert torch.equal(norm.launch(stream, how), result), "one launch, the same bits as two"


@pytest.mark.parametrize("width", [96, 1000])
def test_a_share_of_a_branch_is_added(width, dtype, device) -> None:
    """Then the sum is normed or not; segments are added up before."""
    x, y = noise(device, ROWS, width, dtype=dtype), noise(device, ROWS, width, dtype=dtype).flip(0)
    partials, how = SplitKSums(noise(device, 3, ROWS, width, dtype=torch.float32), y[0]), Norm(y[1], 1e-6)
    for added, whole in ((y, y), (partials, linear.finish(partials, dtype))):
        streams, plain = [x.clone() for _ in range(4)], x.cpu().clone()
        add_norm(plain, whole.cpu(), None, share=0.22)
        assert add_norm.launch(streams[0], added, None, share=0.22) is streams[0] and close(streams[0], plain, 1.0)
        assert torch.equal(add_norm.launch(streams[1], added, how, share=0.22), norm.launch(streams[0], how))
        add_norm.launch(streams[2], added, None)
        add_norm.launch(streams[3], added, how)
        assert torch.equal(streams[0], streams[1]) and torch.equal(streams[2], streams[3])
        assert torch.equal(streams[2], x + whole), "all of it, where no share is named"


@pytest.mark.parametrize("width", [96, 1000])
def test_a_sum_is_scaled(width, dtype, device) -> None:
    """By a number of the layer's, after it was rounded; segments are added up before."""
    x, y = noise(device, ROWS, width, dtype=dtype), noise(device, ROWS, width, dtype=dtype).flip(0)
    partials, how = SplitKSums(noise(device, 3, ROWS, width, dtype=torch.float32), y[0]), Norm(y[1], 1e-6)
    scalar = torch.tensor([0.3], device=device).to(dtype)
    for added, whole in ((y, y), (partials, linear.finish(partials, dtype))):
        stream, other = x.clone(), x.clone()
        assert add_norm.launch(stream, added, None, scalar=scalar) is stream
        assert torch.equal(stream, (x + whole) * scalar)
        assert torch.equal(add_norm.launch(other, added, how, scalar=scalar), norm.launch(stream, how))
        assert torch.equal(other, stream)


@pytest.mark.parametrize(("layers", "width"), [(3, 16), (2, 24), (2, 256)])
def test_what_layers_read_of_a_token_and_its_embedding(layers, width, dtype, device) -> None:
    sums = noise(device, 3, ROWS, layers * width, dtype=torch.float32)
    partials = SplitKSums(sums, noise(device, layers * width, dtype=dtype))
    product, table = partials.finished(dtype), noise(device, 9, layers * width, dtype=dtype)
    tokens, how = torch.tensor([3, 8, 0, 3, 5], device=device), Norm(noise(device, width, dtype=torch.float32), 1e-6)
    factors = 0.125, width**0.5
    found = layer_inputs.launch(product, dtype, table, tokens, how, factors)
    wanted = layer_inputs(product.cpu(), dtype, table.cpu(), tokens.cpu(), on_cpu(how), factors)
    assert close(found, wanted, 4.0)
    unfinished = layer_inputs.launch(partials, dtype, table, tokens, how, factors)
    assert torch.equal(unfinished, found), "segments are added as the product itself adds them"
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = layer_inputs.launch(product[one].clone(), dtype, table, tokens[one].clone(), how, factors)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize(("layers", "width"), [(3, 16), (2, 24), (2, 256)])
def test_gates_of_what_a_layer_reads(layers, width, dtype, device) -> None:
    sums = noise(device, 3, ROWS, width, dtype=torch.float32)
    partials = SplitKSums(sums, noise(device, width, dtype=dtype))
    gate, inputs = partials.finished(dtype), noise(device, ROWS, layers * width, dtype=dtype)
    for number in range(layers):
        found = gate_inputs.launch(gate, inputs, number)
        # The reference's form of GELU, x * (1 + tanh(y)) / 2, loses digits where tanh(y) is close to -1.
        assert close(found, gate_inputs(gate.cpu(), inputs.cpu(), number), 16.0)
        assert torch.equal(gate_inputs.launch(partials, inputs, number), found)
        alone = gate_inputs.launch(gate[2:3].clone(), inputs[2:3].clone(), number)
        assert torch.equal(alone[0], found[2])


def test_norm_of_heads_that_lie_among_others(dtype, device) -> None:
    x, weight = noise(device, ROWS, 6, 64, dtype=dtype), noise(device, 64, dtype=dtype)
    how = Norm(weight, 1e-5)
    assert close(norm.launch(x[:, 1:5], how), norm(x.cpu()[:, 1:5], on_cpu(how)), 4.0)


@pytest.mark.parametrize("width", [7, 1024, 1500])
def test_heads_are_gated(width, dtype, device) -> None:
    x, sums = noise(device, ROWS, width, dtype=dtype), 4 * noise(device, 3, ROWS, width, dtype=torch.float32)
    sums[0, 0, 0], sums[0, 1, 0] = 200.0, -200.0
    partials = SplitKSums(sums, noise(device, width, dtype=dtype))
    product, found = partials.finished(dtype), x.clone()
    gate_heads.launch(found, product)
    assert close(found, gate_heads(x.cpu().clone(), product.cpu()))
    assert found[0, 0] == x[0, 0] and found[1, 0] == 0.0
    for row in range(ROWS):
        alone = x[row : row + 1].clone()
        gate_heads.launch(alone, product[row : row + 1].clone())
        assert torch.equal(alone[0], found[row])
    gate_heads.launch(x, partials)
    assert torch.equal(x, found), "segments are added as the product itself adds them"
    gate_heads.launch(x[:0], product[:0])


class _Attention:
    """Rows of a qkv product whose slots cross pages of 4; the last two are padding and go to page 0."""

    def __init__(self, device: torch.device, dtype: torch.dtype, queries: int, groups: int, dim: int) -> None:
        heads = queries + 2 * groups
        self.qkv = noise(device, ROWS + 2, heads * dim, dtype=dtype)
        angle = noise(device, ROWS + 2, 1, dim // 2, dtype=torch.float32) * 3
        self.cos = torch.cat((angle, angle), dim=-1).cos().to(dtype)
        self.sin = torch.cat((-angle, angle), dim=-1).sin().to(dtype)
        self.slots = torch.tensor([11, 4, 7, 8, 19, 0, 1], device=device)
        self.keys = torch.full((24, groups, dim), 7.0, dtype=dtype, device=device)
        self.values = self.keys.clone()
        self.factor = (1 + noise(device, ROWS + 2, dtype=torch.float32).abs()).to(dtype)

    def inputs(
        self, device: torch.device | None = None, part: slice = slice(None), factor: bool = False
    ) -> tuple[Tensor, Rotation, tuple[Tensor, Tensor, None], Tensor]:
        """qkv, rotation, keys and values, slots: copies of some rows."""
        keys, values = (t.to(device, copy=True) for t in (self.keys, self.values))
        those = (self.qkv, self.cos, self.sin, self.factor, self.slots)
        qkv, cos, sin, factors, slots = (each[part].to(device, copy=True) for each in those)
        return qkv, Rotation(cos, sin, factors if factor else None), (keys, values, None), slots


def norms_of(kind: str, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> HeadNorms | None:
    """heads: Q, G, D."""
    (queries, groups, dim), whole = heads, kind.startswith("whole")
    widths = (queries * dim, groups * dim) if whole else (dim, dim)
    dtype = torch.float32 if kind.endswith("wide") else dtype
    query, key = (noise(device, 2, width, dtype=dtype)[n] for n, width in enumerate(widths))
    return HeadNorms(query, key, 1e-6, whole, kind.startswith("after")) if kind else None


def moved(norms: HeadNorms | None, device: torch.device) -> HeadNorms | None:
    return None if norms is None else replace(norms, query=norms.query.to(device), key=norms.key.to(device))


KINDS = ["", "each", "each, wide", "whole", "whole, wide", "after", "after, wide", "factor", "each, factor"]


@pytest.mark.parametrize(
    ("heads", "kind", "dtype"), pairwise([(4, 2, 64), (9, 3, 96), (6, 1, 16), (8, 8, 128)], KINDS, DTYPES), ids=str
)
def test_rotation_and_store(heads, kind, dtype, device) -> None:
    case, factor = _Attention(device, dtype, *heads), kind.endswith("factor")
    kind = kind.removesuffix("factor").removesuffix(", ")
    norms, cpu = norms_of(kind, heads, dtype, device), torch.device("cpu")
    ours, plain = case.inputs(factor=factor), case.inputs(cpu, factor=factor)
    result = rotate_and_store.launch(*ours, norms)
    wanted = rotate_and_store(*plain, moved(norms, cpu))
    # Next to a rounding border the norm's last bit moves the product by one unit of a factor of size 4.
    loose = (16.0 if kind else 6.0) * (2 if factor else 1)
    assert result.shape == wanted.shape and close(result, wanted, loose)
    assert close(ours[2][0], plain[2][0], loose)
    assert torch.equal(ours[2][1].cpu(), plain[2][1]), "values are copied"
    untouched = [slot for slot in range(24) if slot not in case.slots.tolist()]
    assert (ours[2][0][untouched] == 7.0).all() and (ours[2][1][untouched] == 7.0).all()


@pytest.mark.parametrize(
    ("heads", "alike", "dtype"), pairwise([(4, 2, 64), (8, 1, 512), (9, 3, 96)], [False, True], DTYPES), ids=str
)
def test_values_are_normalised_and_may_be_the_product_of_keys(heads, alike, dtype, device) -> None:
    """And of rows that have only queries, these are the same."""
    case, (queries, groups, dim), cpu = _Attention(device, dtype, *heads), heads, torch.device("cpu")
    norms = replace(norms_of("each, wide", heads, dtype, device), values=True)  # type: ignore[type-var]
    ours, plain = case.inputs(), case.inputs(cpu)
    width = (queries + (1 if alike else 2) * groups) * dim
    product = ours[0][:, :width].contiguous()
    result = rotate_and_store.launch(product, *ours[1:], norms, None, alike)
    wanted = rotate_and_store(product.cpu(), *plain[1:], moved(norms, cpu), None, alike)
    assert close(result, wanted, 16.0)
    assert all(close(mine, its, 16.0) for mine, its in zip(ours[2][:2], plain[2][:2], strict=True))
    turned = rotate_queries.launch(product[:, : queries * dim].contiguous(), ours[1], norms)
    assert torch.equal(turned, result)
    for row in range(ROWS):
        alone = case.inputs(part=slice(row, row + 1))
        one = rotate_and_store.launch(product[row : row + 1].clone(), *alone[1:], norms, None, alike)
        assert torch.equal(one[0], result[row])
        assert all(
            torch.equal(a[case.slots[row]], b[case.slots[row]]) for a, b in zip(alone[2][:2], ours[2][:2], strict=True)
        )


@pytest.mark.parametrize(
    ("heads", "stored", "dtype"),
    pairwise([(4, 2, 64), (9, 3, 96), (8, 8, 128)], [torch.int8, torch.float8_e4m3fn], DTYPES),
    ids=str,
)
def test_rows_are_quantised_on_the_way(heads, stored, dtype, device) -> None:
    """Zeros, heads that are tiny, huge or no numbers among them; and no row notices another."""
    case, (_, groups, dim) = _Attention(device, dtype, *heads), heads
    case.qkv[1] = 0.0
    case.qkv[2] *= 3e-4
    powers = torch.tensor(2.0).pow(torch.arange(-12, 4).repeat(dim)[:dim]).repeat(sum(heads[:2]) + groups)
    case.qkv[3] *= powers.to(device)
    case.qkv[4, -1] = torch.nan

    def run(kernel, part: slice, where: torch.device) -> tuple[Tensor, ...]:
        kept = [torch.full((24, groups, dim), 7.0, device=where).to(stored) for _ in range(2)]
        scales = torch.full((24, 2, groups), 7.0, device=where)
        qkv, rotation, _, slots = case.inputs(where, part)
        query = kernel(qkv, rotation, (*kept, scales), slots)
        return query.cpu(), *(as_bytes(each).cpu() for each in kept), scales.cpu()

    ours = run(rotate_and_store.launch, slice(None), device)
    wanted = run(rotate_and_store, slice(None), torch.device("cpu"))
    assert torch.equal(ours[2], wanted[2]) and torch.equal(ours[3][:, 1].nan_to_num(), wanted[3][:, 1].nan_to_num())
    assert (ours[3][case.slots[4].cpu(), 1, -1]).isnan() and not ours[3][case.slots[3].cpu()].isnan().any()
    wide = [dequantized(part[1].view(stored), part[3][:, 0]) for part in (ours, wanted)]
    assert torch.allclose(wide[0], wide[1], rtol=0.13, atol=0.05), "next to a rounding border a number is the next one"
    for row in range(ROWS):
        alone, slot = run(rotate_and_store.launch, slice(row, row + 1), device), case.slots[row].cpu()
        assert all(
            torch.equal(a[slot].nan_to_num(), b[slot].nan_to_num()) for a, b in zip(alone[1:], ours[1:], strict=True)
        )


@pytest.mark.parametrize("kind", ["each", "whole", "after"])
def test_a_row_is_rotated_and_stored_alike_alone_and_in_company(kind, dtype, device) -> None:
    case = _Attention(device, dtype, 9, 3, 64)
    together, norms = case.inputs(factor=True), norms_of(kind, (9, 3, 64), dtype, device)
    result = rotate_and_store.launch(*together, norms)
    for row in range(ROWS):
        alone = case.inputs(part=slice(row, row + 1), factor=True)
        query, slot = rotate_and_store.launch(*alone, norms), case.slots[row]
        assert torch.equal(query[0], result[row])
        stored = zip(alone[2][:2], together[2][:2], strict=True)
        assert all(torch.equal(mine[slot], its[slot]) for mine, its in stored)


@pytest.mark.parametrize("kind", ["each", "whole"])
@pytest.mark.parametrize("biased", [False, True])
def test_segments_are_added_as_the_product_itself_adds_them(biased, kind, dtype, device) -> None:
    """Read by the rotation or by a launch of their own: the same bits."""
    case = _Attention(device, dtype, 9, 3, 64)
    sums = noise(device, 3, *case.qkv.shape, dtype=torch.float32)
    partials = SplitKSums(sums, noise(device, case.qkv.shape[1], dtype=dtype) if biased else None)
    whole, norms = linear.finish(partials, dtype), norms_of(kind, (9, 3, 64), dtype, device)
    assert torch.equal(whole, partials.finished(dtype))

    def run(qkv: Tensor | SplitKSums) -> tuple[Tensor, ...]:
        _, rotation, layer, slots = case.inputs()
        return rotate_and_store.launch(qkv, rotation, layer, slots, norms), *layer[:2]

    assert all(torch.equal(a, b) for a, b in zip(run(partials), run(whole), strict=True))


#: Inner width of products, outer width of one, and heads of another: an 8B's; and what is cut like them.
PRODUCTS = (640, 64, 2, 1, 16) if INTERPRETED else (4096, 4096, 32, 8, 128)


def test_a_row_is_normed_and_rotated_alike_in_a_prompt_of_any_length(dtype, device, monkeypatch) -> None:
    """From some number of rows on one program adds up the segments that readers add up below."""
    if INTERPRETED:
        monkeypatch.setattr(linear, "ENOUGH", 3)
    inner, outer, queries, groups, dim = PRODUCTS
    shapes = (outer, inner), ((queries + 2 * groups) * dim, inner)
    output, qkv = (BlockedWeight.of(noise(device, *shape, dtype=dtype) * inner**-0.5) for shape in shapes)
    x, stream, weight = (noise(device, *shape, dtype=dtype) for shape in ((512, inner), (512, outer), (outer,)))
    cos, sin = noise(device, 2, 512, 1, dim, dtype=dtype)
    parts = [len(part.sums) for n in (256, 512) if isinstance(part := linear.product(x[:n], output, dtype), SplitKSums)]
    assert parts[0] > parts[1] == 1, "the longest are added up"

    def read(rows: int) -> tuple[Tensor, ...]:
        keys, values = torch.zeros(2, 512, groups, dim, dtype=dtype, device=device)
        summed, read = stream[:rows].clone(), x[:rows].clone()
        normed = add_norm.launch(summed, linear.product(read, output, dtype), Norm(weight, 1e-5))
        turn, slots = Rotation(cos[:rows].clone(), sin[:rows].clone()), torch.arange(rows, device=device)
        query = rotate_and_store.launch(linear.product(read, qkv, dtype), turn, (keys, values, None), slots)
        return summed, normed, query, keys[:rows], values[:rows]

    whole = read(512)
    for rows in (1, 257) if INTERPRETED else (1, 64, 257, 385):
        assert all(torch.equal(mine, its[:rows]) for mine, its in zip(read(rows), whole, strict=True)), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_latents_are_joined(dtype, device) -> None:
    """Of one head into slots, and of several in the order of rows."""
    case = _Attention(device, dtype, 1, 1, 16)
    rotation = Rotation(case.cos, case.sin)
    for heads, slots in ((1, case.slots), (3, None)):
        plain, turning = (noise(device, ROWS + 2, heads * width, dtype=dtype) for width in (40, 16))
        out = torch.zeros(24 if heads == 1 else ROWS + 2, heads, 56, dtype=dtype, device=device)
        there = Rotation(case.cos.cpu(), case.sin.cpu()), out.cpu(), None if slots is None else slots.cpu()
        wanted = join_latents(plain.cpu(), turning.cpu(), *there)
        assert close(join_latents.launch(plain, turning, rotation, out, slots), wanted)


@pytest.mark.parametrize(("keep_normed", "width", "dtype"), pairwise([False, True], [64, 96, 1600], DTYPES), ids=str)
def test_what_a_pass_begins_with(keep_normed, width, dtype, device) -> None:
    """The bits of the kernels that do it in several launches."""
    table, hidden, weights = (noise(device, n, width, dtype=dtype) for n in (9, ROWS, 2))
    tokens, indices = torch.tensor([3, 8, 0, 12, -1], device=device), torch.tensor([8, 0, 0, 5, 1], device=device)
    cos, sin = take_both.launch(table, -table, indices)
    assert torch.equal(cos, table[indices]) and torch.equal(sin, -table[indices])
    of = [Norm(weight, 1e-5) for weight in weights]
    x, normed = embed.launch(table, indices, of[0])
    assert torch.equal(x, table[indices]) and torch.equal(normed, norm.launch(x, of[0]))
    x, normed = embed.launch(table, indices, None)
    assert torch.equal(x, table[indices]) and normed is x
    both, stream = pair.launch(table, tokens, hidden, (weights[0], weights[1]), 1e-5, keep_normed)
    of_hidden = norm.launch(hidden, of[1])
    of_tokens = norm.launch(table[tokens.clamp(0, 8)], of[0])
    assert torch.equal(both, torch.cat((of_tokens, of_hidden), dim=1))
    assert torch.equal(stream, of_hidden if keep_normed else hidden)
    plain = [each.cpu() for each in (table, tokens, hidden, *weights)]
    wanted = pair(plain[0], plain[1], plain[2], (plain[3], plain[4]), 1e-5, keep_normed)
    assert close(both, wanted[0]) and close(stream, wanted[1])


def test_no_rows_is_no_launch(device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert norm.launch(empty, Norm(torch.ones(64, device=device), 1e-5)).shape == (0, 64)


@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 30.0), (6.0, 5.0)])
def test_finished_logits(scale, cap, device) -> None:
    x = noise(device, ROWS, 1500, dtype=torch.float32)
    wanted, found = finish_logits(x.cpu().clone(), scale, cap), x.clone()
    finish_logits.launch(found, scale, cap)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6 * (cap or 0.0))
    for row in range(ROWS):
        alone = x[row : row + 1].clone()
        finish_logits.launch(alone, scale, cap)
        assert torch.equal(alone[0], found[row])
    finish_logits.launch(x[:0], scale, cap)
