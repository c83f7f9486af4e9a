"""Products with whole numbers and scales: right values, and rows with the same bits at any number of rows."""

from __future__ import annotations

from dataclasses import replace

import llvmlite.binding as llvm
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.model.linear import Linear
from foresay.verifier.model.quantization import Format, Scheme
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.kernels.cpu import rounded
from foresay.verifier.ops.kernels.cpu.integer_product import IntegerShape
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import recording
from foresay.verifier.ops.quantized import QuantizedMatrix, packed, unpacked
from tests.combinations import alternating, pairwise
from tests.simulated.device import DEVICE, simulated
from tests.verifier.conftest import EMULATED, PROCESSORS, by_pairs, by_processor
from tests.verifier.quantized_weights import E2M1, KINDS, STEPPED, matrix_of
from tests.verifier.test_linear import COUNTS, DTYPES, STEPS, differing, rows_of

#: in, out: one group and several, outputs that fill no block, the widths of a tiny model, of many terms.
SHAPES = [(128, 33), (192, 100), (3072, 64)]
CASES = pytest.mark.parametrize(
    ("processor", "dtype", "kind", "shape"),
    pairwise(PROCESSORS, DTYPES, [*KINDS, *STEPPED, *E2M1], SHAPES),
    ids=str,
    indirect=["processor"],
)


def bias_of(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape[1], generator=torch.Generator().manual_seed(2))


@CASES
def test_it_multiplies(processor, shape, dtype, kind) -> None:
    matrix, offset = matrix_of(shape, kind), bias_of(shape).to(dtype) if shape[0] < 1000 else None
    x = rows_of(shape, dtype, 21)
    expected = functional.linear(x.double(), matrix.plain().double(), None if offset is None else offset.double())
    linear = Linear(matrix, offset, dtype)
    eps = torch.finfo(dtype).eps
    assert linear(x).dtype == dtype
    assert torch.allclose(linear(x).double(), expected, atol=max(4e-5, 8 * eps), rtol=2 * eps)
    assert torch.allclose(linear.wide(x).double(), expected, atol=4e-5, rtol=1e-5)
    with references():
        assert torch.allclose(linear(x).double(), expected, atol=max(4e-5, 8 * eps), rtol=2 * eps)


@CASES
def test_a_row_has_the_same_bits_at_any_count(processor, shape, dtype, kind) -> None:
    twice = (shape[0], 2 * shape[1])
    linear = Linear(matrix_of(twice, kind), bias_of(twice), dtype, gated="silu" if shape[1] == 100 else "")
    assert differing(linear, rows_of(shape, dtype), COUNTS) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", E2M1)
def test_floats_of_four_bits_have_the_bits_of_the_weight_written_out(processor, kind, dtype) -> None:
    """With every scale that there is; those that make no number, or none of bf16, spoil the same outputs."""
    shape = (1024, 100)
    matrix, offset = matrix_of(shape, kind), bias_of(shape)
    every = torch.arange(256, dtype=torch.uint8)
    scales = (every if kind == "mxfp4" else every[:127]).repeat(50)[: matrix.scales[:80].numel()]
    matrix.scales[:80] = scales.view(80, -1).view(matrix.scales.dtype)
    written = matrix.plain().bfloat16()
    assert torch.equal(written.float().nan_to_num(7.0), matrix.plain().nan_to_num(7.0))
    x = rows_of(shape, dtype)
    for gated in ("", "silu"):
        found, wanted = (Linear(each, offset, dtype, gated).wide(x[:9].clone()) for each in (matrix, written))
        assert found.isfinite().any() and torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


#: What can be multiplied with rounded activations. Bits follow from whole numbers, so processors have the same.
WHOLE = [kind for kind in (*KINDS, *STEPPED, *E2M1) if not kind.startswith("fp8")]
ROUNDED = [
    *by_processor(DTYPES[:2], WHOLE),
    *(("narrow", torch.float32, kind) for kind in ("int4", "q5_k", "mxfp4", "nvfp4")),
    *(
        (name, torch.float32, kind)
        for name in EMULATED
        for kind in ("int4", "int4 zeros", "int8", "q5_k", "q6_k", "mxfp4")
    ),
]


@pytest.mark.parametrize(("processor", "dtype", "kind"), ROUNDED, ids=str, indirect=["processor"])
def test_rounded_activations_have_the_bits_of_the_contract(processor, dtype, kind) -> None:
    for shape in SHAPES[:2]:
        matrix, offset = matrix_of(shape, kind), bias_of(shape)
        linear, x = Linear(matrix, offset, dtype, rounds=True), rows_of(shape, dtype)
        found = linear.wide(x)
        with references():
            assert torch.equal(linear.wide(x), found)
        for count in (1, 2, 3, 5, 7, 8, 9, 64):
            part = slice(33, 33 + count)
            assert torch.equal(linear.wide(x[part].clone()), found[part])
        exact = functional.linear(x.double(), matrix.plain().double(), offset.double())
        assert (found - exact).norm() < 0.01 * (exact - offset).norm()
        assert torch.equal(linear._packed.plain(), matrix.plain())


@pytest.mark.parametrize("processor", ["here", "without AVX-512", "skylake-avx512"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("q4_k", (0, 15)), ("int4", (-8, 7)), ("q6_k", (-32, 31)), ("int8 groups", (-128, 127)), ("nvfp4", (7, 15))],
)
def test_the_largest_sums_have_room(processor, kind, numbers) -> None:
    """All numbers and all inputs are as large as they can be, of either sign."""
    x = torch.tensor([3.0, -3.0]).repeat_interleave(64).view(2, 64)
    for number in numbers:
        matrix = matrix_of((64, 33), kind)
        matrix.put(torch.full((33, 64), number, dtype=torch.int8))
        linear = Linear(matrix, rounds=True)
        with references():
            whole = linear.wide(x)
        assert torch.equal(linear.wide(x), whole)
        assert torch.allclose(whole, x @ matrix.plain().T, rtol=1e-5)


@pytest.mark.parametrize(("least", "most", "bits"), [(-32, 31, 6), (-33, 31, 8), (-32, 32, 8), (0, 0, 6)])
def test_numbers_that_fit_in_six_bits_take_six(least, most, bits) -> None:
    matrix = matrix_of((64, 33), "q6_k")
    matrix.put(torch.tensor([least, most], dtype=torch.int8).repeat(33, 32))
    assert Linear(matrix, rounds=True).nbytes == 33 * (64 * bits // 8 + 64 // 16 + 2)
    assert Linear(matrix).nbytes == 33 * (64 + 64 // 16 + 2)


@pytest.mark.parametrize("gated", ["silu", "relu2"])
def test_rounded_activations_of_gates(processor, gated) -> None:
    shape = (192, 100)
    linear, x = (
        Linear(matrix_of(shape, "int4 zeros"), None, torch.bfloat16, gated, rounds=True),
        rows_of(shape, torch.bfloat16),
    )
    found = linear.gated(x)
    with references():
        torch.testing.assert_close(found, linear.gated(x), rtol=2e-2, atol=1e-6)
    assert all(torch.equal(linear.gated(x[:count].clone()), found[:count]) for count in (1, 3, 8, 17))


def emitted(processor: Processor, monkeypatch, bits: int, minimums: bool = False) -> str:
    """Assembly of a rounded product for a processor, which need not be this one."""
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: processor))
    shape = IntegerShape(
        16, torch.int8, torch.float32, "", False, bits, torch.float16, False, False, minimums, piece=32
    )
    machine, module = processor.machine(), llvm.parse_assembly(rounded.kernel_of.write(shape).text())
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


@pytest.mark.parametrize("bits", [4, 8])
def test_avx_vnni_has_its_instruction(monkeypatch, bits) -> None:
    """Which need not be there to run: what it does is what the narrow kind above does."""
    text = emitted(Processor("alderlake", "+avx2,+fma,+f16c,+avxvnni,-avx512f"), monkeypatch, bits)
    assert "{vex}\tvpdpbusd" in text and "zmm" not in text and "vpmaddubsw" not in text


@pytest.mark.skipif(not Processor.here().is_x86, reason="other processors have no such instructions")
@pytest.mark.parametrize("minimums", [False, True])
def test_sums_of_four_rows_stay_in_registers_on_avx2(monkeypatch, minimums) -> None:
    """The eight sums of whole numbers, that is; those over all pieces, of floats, are on the stack."""
    text = emitted(Processor("znver3", "+avx2,+fma,+f16c"), monkeypatch, 4, minimums)
    loops = [part for part in text.split("\n.LBB") if part.count("vpmaddubsw") == 4 * 2 * 8]
    stored = [line for loop in loops for line in loop.splitlines() if "vmov" in line and line.endswith("(%rsp)")]
    assert len(loops) == 1 and len(stored) < 16, stored


def test_rows_that_cannot_be_rounded(processor) -> None:
    """Groups of zeros and of what is almost zero are zeros; what is not finite spoils its row, and no other."""
    x = rows_of((64, 33), torch.float32, 6)
    x[0, :32], x[1, 32:], x[2, 40], x[3, 3], x[4] = 0.0, 1e-40, torch.nan, -torch.inf, 1e30
    linear = Linear(matrix_of((64, 33), "int4"), None, torch.float32, rounds=True)
    found = linear(x)
    with references():
        assert torch.equal(found.nan_to_num(7.0), linear(x).nan_to_num(7.0))
    assert found.isfinite().all(1).tolist() == [True, True, False, False, True, True]
    assert found[2].isnan().all() and found[3].isnan().all()
    assert torch.equal(linear(x[5:].clone()), found[5:])


@pytest.mark.parametrize("kind", ["fp8", "odd"])
def test_what_is_not_of_whole_numbers_is_multiplied_as_it_is(kind) -> None:
    shape = (192, 34) if kind == "fp8" else (200, 34)
    matrix, x = matrix_of(shape, kind if kind == "fp8" else "int8"), rows_of(shape, torch.float32)
    assert torch.equal(Linear(matrix, rounds=True)(x), Linear(matrix)(x))


@by_pairs("kind, gated", [*KINDS, *STEPPED], ["silu", "relu2"])
def test_the_gate_rounds_as_a_step_of_its_own(processor, kind, gated) -> None:
    shape = (192, 100)
    matrix, x = matrix_of(shape, kind), rows_of(shape, torch.bfloat16, 9)
    wanted = STEPS[gated](Linear(matrix, None, torch.bfloat16)(x))
    found = Linear(matrix, None, torch.bfloat16, gated).gated(x)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize(("processor", "kind"), alternating(PROCESSORS, list(KINDS)), indirect=["processor"])
def test_a_recording_multiplies_what_there_is_when_it_runs(processor, kind) -> None:
    linear, x = Linear(matrix_of((128, 33), kind), None, torch.bfloat16), rows_of((128, 33), torch.bfloat16, 8)
    later, expected = torch.full_like(x, torch.nan), linear(x)
    with recording() as replay:
        result = linear(later)
    later.copy_(x)
    replay()
    assert torch.equal(result, expected)


@by_pairs("kind, compute, gated", [*KINDS, *STEPPED], DTYPES, ["", "silu"])
def test_a_weight_is_packed_as_it_is(processor, kind, compute, gated) -> None:
    for shape in ((64, 64), (192, 34), (128, 200)):
        matrix, offset = matrix_of(shape, kind), bias_of(shape)
        kept = Linear(matrix, offset, compute, gated)._packed
        assert torch.equal(kept.plain(), matrix.plain())
        bias = kept.plain_bias()
        assert bias is not None and torch.equal(bias, offset)


@pytest.mark.parametrize(
    ("kind", "each"), [("int8", 1 + 2 / 256), ("int4", 0.5 + 2 / 32), ("int4 zeros", 0.5 + 3 / 64)]
)
def test_what_a_product_reads(kind, each) -> None:
    assert Linear(matrix_of((256, 96), kind)).nbytes == 256 * 96 * each


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_nearest(kind) -> None:
    """Half a step away at most; zero is zero, extremes too; rows of zeros bring no NaN."""
    bits, group, symmetric, scales = KINDS[kind]
    floats = kind.startswith("fp8")
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
    weight[3] = 0
    weight[:, ::7] = 0
    matrix = QuantizedMatrix.empty(40, 128, bits, group or 128, symmetric, scales, torch.device("cpu"), floats)
    matrix.fill(weight)
    step = matrix.scales.float().repeat_interleave(matrix.group, dim=1)
    if floats:  # a step is an eighth of the power of two below, or of the least that is normal
        step = step * (weight / step).abs().clamp_min(2.0**-6).log2().floor().exp2() / 8
    assert ((matrix.plain() - weight).abs() <= step * (0.51 if symmetric else 1.02)).all()
    assert not matrix.plain()[3].any() and not matrix.plain()[:, ::7].any()


def test_four_bits_lie_in_halves_of_a_byte() -> None:
    values = torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)
    assert packed(values).tolist() == [[0x78, 0xF0]]
    assert torch.equal(unpacked(packed(values)), values)


def test_rows_are_parts_of_a_matrix() -> None:
    """As fused products are assembled, and as a draft model keeps the tokens that its target knows."""
    matrix = matrix_of((64, 10), "int4 zeros")
    first, second = matrix.split_with_sizes([4, 6])
    assert torch.equal(torch.cat([first.plain(), second.plain()]), matrix.plain())
    weight = torch.randn(6, 64)
    second.fill(weight)
    assert torch.equal(matrix.plain()[4:], second.plain())
    rows = torch.tensor([7, 0])
    assert torch.equal(matrix[rows].plain(), matrix.plain()[rows])


@by_pairs("kind, dtype", ["int4", "int4 zeros", "int8 groups"], DTYPES)
def test_groups_may_be_of_numbers_in_any_order(processor, kind, dtype) -> None:
    """As act-order leaves them: numbers that belong to a group are brought together, inputs with them."""
    side_by_side, x = matrix_of((192, 34), kind), rows_of((192, 34), dtype, 21)
    was = torch.randperm(192, generator=torch.Generator().manual_seed(7))
    order = (torch.arange(192) // side_by_side.group).int()[was]
    values = side_by_side.numbers()[:, was]
    matrix = replace(side_by_side, values=values if matrix_bits(kind) == 8 else packed(values), order=order)
    assert torch.equal(matrix.plain(), side_by_side.plain()[:, was])
    first, second = matrix.split_with_sizes([16, 18])
    assert torch.equal(torch.cat([first.plain(), second.plain()]), matrix.plain())
    linear = Linear(matrix, None, dtype)
    expected = functional.linear(x.double(), matrix.plain().double())
    assert torch.allclose(linear.wide(x).double(), expected, atol=4e-5, rtol=1e-5)
    with references():
        torch.testing.assert_close(linear(x).double(), expected, atol=0.1, rtol=0.1)
    assert differing(linear, rows_of((192, 34), dtype), COUNTS) == []
    with simulated():
        there = Linear(matrix.to(DEVICE), None, torch.float32)(x.float().to(DEVICE)).cpu()
    torch.testing.assert_close(there.double(), expected, atol=1e-4, rtol=1e-4)


def matrix_bits(kind: str) -> int:
    return KINDS[kind][0]


@pytest.mark.parametrize("kind", [*KINDS, *STEPPED, "mxfp4"])
def test_off_the_cpu_it_is_laid_out_for_a_gpu(kind) -> None:
    matrix, x = matrix_of((192, 96), kind), rows_of((192, 96), torch.float32, 9)
    with simulated():
        there = Linear(matrix.to(DEVICE), None, torch.float32)
        product = there(x.to(DEVICE)).cpu()
        assert there.nbytes == Linear(matrix).nbytes or kind == "q4_1"  # a CPU leaves multiples out that are all one
    torch.testing.assert_close(product, Linear(matrix)(x))


@pytest.mark.parametrize(("kind", "group", "each"), [("mxfp4", 32, 0.5 + 1 / 32), ("nvfp4", 16, 1 + 4 / 16)])
def test_what_floats_of_four_bits_take_on_a_gpu(kind, group, each) -> None:
    """MXFP4 what it takes in its file; NVFP4's numbers are whole ones of 8 bits there."""
    scheme = Scheme(4, group, True, Format.MADE, floats=True)
    assert BlockedWeight.pack(matrix_of((256, 96), kind)).nbytes == scheme.nbytes(96, 256) == 256 * 96 * each


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", [*KINDS, *STEPPED, "mxfp4", "nvfp4"])
def test_a_weight_is_laid_out_as_it_is(kind, gated) -> None:
    """For a GPU: blocks that groups do not fill among them."""
    for shape in ((64, 64), (192, 34), (1216, 20)):
        matrix, offset = matrix_of(shape, kind), bias_of(shape)
        kept = BlockedWeight.pack(matrix, offset, gated)
        assert torch.equal(kept.plain(), matrix.plain())
