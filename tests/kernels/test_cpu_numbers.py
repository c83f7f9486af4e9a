"""Numbers as kernels of a CPU convert and compute them, on processors that lack the instructions too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.spec.sample import gumbel_row, noise_bits
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.topk import PositionNoise
from foresay.verifier.ops.kernels.cpu.values import F32, I32, I64, LANES, OF_TORCH, vector


@pytest.mark.parametrize("of", [F32, vector(F32), I64, vector(I32, 4)], ids=str)
def test_equal_constants_are_written_once_and_others_apart(of) -> None:
    first, second = Kernel("first"), Kernel("second")
    assert first.constant(1, of).raw is second.constant(1, of).raw
    assert str(first.constant(0.0, F32).raw) != str(first.constant(-0.0, F32).raw), "equal numbers of other bits"
    assert str(first.constant(1, I32).raw) != str(first.constant(1, of).raw)


@Compiled
def _converting(lanes: int, source: torch.dtype, result: torch.dtype) -> Kernel:
    k = Kernel("convert")
    with k.share(k.counted(2)) as block:
        k.write(
            k.read(k.pointer(0), OF_TORCH[source], block * lanes, lanes), k.pointer(1), OF_TORCH[result], block * lanes
        )
    return k


@Compiled
def _turning() -> Kernel:
    k = Kernel("turn")
    rows = [k.load(k.pointer(0), vector(F32), row * LANES) for row in range(LANES)]
    for number, column in enumerate(k.turned(rows)):
        k.store(column, k.pointer(1), number * LANES)
    return k


def test_sixteen_vectors_become_columns(any_processor) -> None:
    x = torch.arange(LANES * LANES, dtype=torch.float32).view(LANES, LANES)
    columns = torch.empty_like(x)
    _turning()(x, columns)
    assert torch.equal(columns, x.T)


def converted(x: Tensor, to: torch.dtype, lanes: int) -> Tensor:
    result = torch.empty_like(x, dtype=to)
    _converting(lanes, x.dtype, to)(x, result, torch.tensor([len(x) // lanes]))
    return result


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_16_bits_becomes_fp32_and_comes_back(any_processor, dtype, lanes) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = converted(x, torch.float32, lanes)
    torch.testing.assert_close(wide, x.float(), rtol=0, atol=0, equal_nan=True)
    if dtype is torch.bfloat16 and any_processor.multiplies_bf16:
        wide = torch.where(wide.abs() < 2.0**-126, 0.0 * wide, wide)  # its own instruction knows no denormals
    back = converted(wide, dtype, lanes)
    torch.testing.assert_close(back.float(), wide, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(back.signbit()[~back.isnan()], x.signbit()[~x.isnan()])


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_is_rounded_to_the_nearest(any_processor, dtype, lanes) -> None:
    """At random, at ties between neighbours, and their neighbours."""
    kept = torch.arange(0, 1 << 15, dtype=torch.int16).view(dtype).float()
    kept = kept[kept.isfinite() & (kept >= 2.0**-126)][: (1 << 14) + 4000]
    ties = (kept[1:] + kept[:-1]) / 2
    neighbours = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (0.0, torch.inf)]
    ends = torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 3.4e38, 2.0**-25, 2.0**-26, 0.0])
    x = torch.cat([ties, *neighbours, ends, torch.randn(4096) * 10.0 ** torch.randint(-9, 9, (4096,))])
    x = torch.cat([x, -x])
    x = x[: len(x) // 16 * 16]
    torch.testing.assert_close(converted(x, dtype, lanes), x.to(dtype), rtol=0, atol=0)


def test_exp_is_within_two_ulps(any_processor) -> None:
    @Compiled
    def exp() -> Kernel:
        k = Kernel("exp")
        with k.share(k.counted(2)) as block:
            k.store(k.exp(k.load(k.pointer(0), vector(F32), block * 16)), k.pointer(1), block * 16)
        return k

    x = torch.cat([torch.linspace(-100, 100, 40_000), torch.randn(9_984), torch.tensor([0.0, -0.0] * 8)])
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 88.7, -87.0, 1e30, -1e30, 1e-30] * 2)
    x = torch.cat([x, ends])
    result = torch.empty_like(x)
    exp()(x, result, torch.tensor([len(x) // 16]))
    exact = x.double().exp()
    inside = (x > -86.9) & (x < 88.6)
    assert ((result - exact).abs() / exact)[inside].max() < 2 * 2.0**-23
    assert torch.equal(result[x == 0], torch.ones(16 + 0))
    assert result[-16:-13].isfinite().tolist() == [False, True, False] and result[-15] == 0
    assert (result[x > 89] == torch.inf).all() and (result[x < -87.01] == 0).all()


@pytest.mark.parametrize("lanes", [1, LANES])
def test_tanh_is_within_two_ulps(any_processor, lanes) -> None:
    @Compiled
    def tanh() -> Kernel:
        k = Kernel("tanh")
        with k.share(k.counted(2)) as block:
            k.write(k.tanh(k.read(k.pointer(0), F32, block * lanes, lanes)), k.pointer(1), F32, block * lanes)
        return k

    x = torch.cat([torch.linspace(-12, 12, 40_000), torch.logspace(-30, 3, 9_984), torch.tensor([0.0, -0.0] * 8)])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan, 88.7, -88.7, 1e30, -1e30, 1e-38] * 2)])
    result = torch.empty_like(x)
    tanh()(x, result, torch.tensor([len(x) // lanes]))
    exact = x.double().tanh()
    assert ((result - exact).abs() / exact.abs())[(x != 0) & ~x.isnan()].max() < 2 * 2.0**-23
    assert not result[x == 0].any() and result[x.isnan()].isnan().all()


@Compiled
def _noise(lanes: int) -> Kernel:
    """Arguments: seed and position, bits, noise, what the noise is at most, and again, closer, how many vectors."""
    k = Kernel("noise")
    noise = PositionNoise(k, k.load(k.pointer(0), I64), k.load(k.pointer(0), I64, 1))
    with k.share(k.counted(5)) as block:
        first = k.integer(block * lanes, I32)
        ids = first if lanes == 1 else first + k.lane_numbers(range(LANES))
        uniform = noise.uniform(ids)
        k.store(noise.bits(ids), k.pointer(1), block * lanes)
        k.store(noise.gumbel(uniform), k.pointer(2), block * lanes)
        k.store(noise.at_most(uniform), k.pointer(3), block * lanes)
        k.store(noise.at_most(noise.exponential(uniform)), k.pointer(4), block * lanes)
    return k


@pytest.mark.parametrize("lanes", [1, LANES])
@pytest.mark.parametrize(
    ("seed", "position"),
    # The last two hold a token of the smallest uniform numbers, where 1 - u is 1, and one of the largest.
    [(0, 0), (1, 5), (-1, 77), (2**63 - 1, 2**40), (-(2**63), 131_071), (0x9E3779B97F4A7C1, 3), (86, 9), (271, 9)],
)
def test_the_noise_of_a_position(any_processor, lanes, seed, position) -> None:
    size = 70_000
    bits = torch.empty(size, dtype=torch.int32)
    noise, most, closer = (torch.empty(size) for _ in range(3))
    _noise(lanes)(torch.tensor([seed, position]), bits, noise, most, closer, torch.tensor([size // lanes]))
    assert torch.equal(bits, noise_bits(seed, position, size))
    torch.testing.assert_close(noise, gumbel_row(seed, position, size), rtol=3e-7, atol=3e-7)
    assert (most >= noise).all() and (most < noise + 1.1)[noise > 0.36].all()
    assert (closer >= noise).all() and (closer < noise + 0.7).all()
