"""What the calls of ``bench.gpu`` measure with: floors, models made on the device, drafters, steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import made, shapes
from bench.drive import request, together
from bench.engines import PUBLISHED, PUBLISHED_DFLASH, PUBLISHED_INT8, Bench, texts
from bench.gpu import kernels, profile, settings, smoke
from bench.gpu.device import Device
from bench.gpu.drafting import Ground, Steps, rows_proposer
from bench.gpu.worker import Lines, Task
from bench.hybrids import STACKS, hybrid_of
from bench.made import BUNDLED, inflated, paged
from bench.shapes import EagleShape, ModelShape, kv_bytes_per_token, step_bytes, weight_bytes
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.protocols import Rows
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.buckets import widths
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.weights import load
from foresay.verifier.ops.kernels import pdl
from tests.kernels.compiling import CAPABILITIES, compile_kernel

SOURCE = BUNDLED / "target"
TINY = settings.tiny()


@pytest.fixture(scope="module")
def device() -> Device:
    torch.set_grad_enabled(False)
    return Device("cpu")


@pytest.fixture(scope="module")
def bench(device: Device) -> Bench:
    return Bench(device, TINY.pairs["8B"], 512)


def config_of(shape: ModelShape) -> ModelConfig:
    return shape.config(ModelConfig.from_directory(SOURCE))


def test_floors_by_hand() -> None:
    """Llama-3.1-8B: a layer reads 4096 x (6144 + 4096 + 3 * 14336) numbers, the head 4096 x 128256."""
    large = config_of(shapes.LLAMA_8B)
    assert weight_bytes(large) == 2 * (32 * 4096 * (6144 + 4096 + 43_008) + 4096 * 128_256) == 15_009_316_864
    assert kv_bytes_per_token(large) == 128 * 1024
    assert step_bytes(large, 32_768) == 15_009_316_864 + (4 << 30)
    assert weight_bytes(config_of(shapes.LLAMA_1B)) == pytest.approx(2.47e9, rel=1e-3)
    assert weight_bytes(config_of(shapes.QWEN_8B)) == pytest.approx(15.14e9, rel=1e-3)
    head = settings.full().pairs["8B"].eagle
    assert 2 * head.pass_weights == pytest.approx(0.749e9, rel=1e-3)
    assert 2 * head.step_weights == pytest.approx(0.1007e9, rel=1e-3)


def test_what_a_step_reads_is_counted_where_it_is_read(bench: Bench) -> None:
    """The target, and a head five times: bf16 is fp32 here, int8 has a scale of 16 bits for each 32 numbers, of which
    rows of 400 are not made."""
    plain, head = step_bytes(bench.target.decoder.config, 100, 4), TINY.pairs["8B"].eagle
    assert bench.read_by_step("none", 0, 100) == plain
    own, kept = head.step_weights + 5 * head.pass_weights, 5 * 100 * 2 * 2 * 64
    assert bench.read_by_step(PUBLISHED, 5, 100) == plain + 4 * (own + kept)
    whole = 5 * 288 * 400
    assert bench.read_by_step(PUBLISHED_INT8, 5, 100) == plain + (own - whole) * (1 + 2 / 32) + 4 * (whole + kept)


def test_what_a_block_reads(device: Device) -> None:
    """z-lab's layout: features of as many layers as it has, mixed once, and the target's output matrix."""
    bench, shape, rows = Bench(device, TINY.pairs["Qwen3-8B"], 512, True), shapes.TINY_DFLASH, 100
    hidden, heads, groups, vocab = 320, 8 * 128, 2 * 128, 4500
    layer = hidden * (2 * heads + 2 * groups + 3 * shape.inner)
    read = shape.layers * (hidden * hidden + layer + rows * 2 * groups) + hidden * vocab
    drafted, plain = bench.read_by_step(PUBLISHED_DFLASH, 3, rows, 4), bench.read_by_step("none", 0, rows, 4)
    assert drafted == plain + 4 * read
    proposer = bench.proposer(PUBLISHED_DFLASH, TreeShape.chain(3))
    assert proposer is not None and proposer.shape.nodes == shape.block


def test_a_mixture_reads_the_experts_that_rows_wake(device: Device) -> None:
    """Of 8, two for each row, in four layers; MXFP4 takes 4.25 bits a number."""
    fields = STACKS["gpt-oss"] | TINY.narrowed | {"num_experts_per_tok": 2}
    made = hybrid_of(Task("", Lines(Path(), ""), 0.0, device, TINY), fields)
    experts = 4 * 8 * 3 * 256 * 64 * 17 / 32
    one, all_of_them = (made.read_by_step("none", 0, 0, rows) for rows in (1, 1000))
    assert all_of_them - one == pytest.approx(0.75 * experts)


def test_shapes_are_the_published_ones() -> None:
    """Parameters, the embedding once where it is the head too."""
    counted = {
        shape.name: weight_bytes(config_of(shape)) // 2 + shape.untied * shape.vocab * shape.sizes.hidden
        for shape in (shapes.LLAMA_1B, shapes.LLAMA_8B, shapes.QWEN_8B)
    }
    assert counted["Llama-3.2-1B"] == pytest.approx(1.236e9, rel=2e-3)
    assert counted["Llama-3.1-8B"] == pytest.approx(8.030e9, rel=2e-3)
    assert counted["Qwen3-8B"] == pytest.approx(8.191e9, rel=2e-3)


def logits(decoder: Decoder, device: Device, tokens: Tensor) -> Tensor:
    pool = PagePool(8, 16)
    table = PageTable(pool)
    table.reserve(len(tokens))
    return paged(pool, decoder, device).run([Rows(table, tokens, 0)]).logits


@pytest.mark.parametrize("shape", [shapes.TINY, shapes.TINY_TIED, shapes.TINY_QK], ids=lambda shape: shape.name)
def test_a_model_made_on_the_device_says_what_the_bundled_one_says(shape, device) -> None:
    config = ModelConfig.from_directory(SOURCE)
    tokens = torch.randint(5, config.vocab_size, (60,), generator=torch.Generator().manual_seed(3))
    small = Decoder(config, load(SOURCE, config, torch.float32), 1024)
    _, large = inflated(device, shape, SOURCE, 1024)
    wanted, found = logits(small, device, tokens), logits(large, device, tokens)
    assert found.shape == (60, shape.vocab) and wanted.std() > 1.0
    assert (found[:, : config.vocab_size] - wanted).abs().max() < 1e-3
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert found.softmax(-1)[:, config.vocab_size :].sum(-1).max() < 1e-6


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_embedded_drafters_still_guess(name, bench) -> None:
    text = texts(1)[0]
    [plain] = together(bench.engine("none", "", False, 200), [request(text, 24)])
    [drafted] = together(bench.engine(name, "1,1,1,1", True, 200), [request(text, 24)])
    assert drafted.tokens == plain.tokens and drafted.tokens_per_step > 1.5


def test_a_head_of_a_published_shape_has_its_bytes(device, bench) -> None:
    shape = EagleShape(288, 4, 2, 64, 400, 500)
    head = made.random_eagle(device, bench.target.decoder, shape)
    config, weights = head.config, head.layer
    assert (config.draft_vocab, weights.hidden_size, weights.intermediate_size) == (500, 288, 400)
    assert shape.pass_weights == 288 * 2 * (4 + 4) * 64 + 256 * 288 + 3 * 288 * 400 + 288 * 500


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("longest", "context"), [(33_000, 1024), (33_000, 8192), (33_000, 32_000), (900, 300)])
def test_page_tables_are_as_wide_as_those_that_are_served(longest: int, context: int) -> None:
    """A text of 1k that grows is served by the tables for 4k: narrower ones would hide what is read of them."""
    pool, rows = PagePool(4000, 16), rows_proposer(1, torch.device("cpu"))
    store = SimpleNamespace(pool=pool, device=torch.device("cpu"), windows=None, states=None)
    target: Any = SimpleNamespace(store=store, max_positions=longest)
    served = widths(longest + 2 + 1, 16)
    width = Ground(target, rows, context, 50).state.tables.shape[1]
    assert width in served and width == min(wide for wide in served if wide * 16 >= context + 58)
    assert width == 256 or context != 1024


@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_of_many_rows_begins_at_the_same_text_again(rows: int, bench: Bench, device: Device) -> None:
    steps = Steps(device, bench.target, rows_proposer(rows, device.torch), 40, block=4)
    assert len(steps.seconds(5)) == 6, "whole blocks, without the first step of each"
    assert int(steps.ground.state.lengths) in range(44, 41 + 4 * rows), "the text grew over one block alone"
    found = steps.timed(0.0, least=5)
    assert found["steps"] == 6 and found["emitted"] >= 1


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_a_product_and_the_librarys_are_compared_with_nothing_prefetched(monkeypatch, tmp_path: Path) -> None:
    """Ours is timed once more as it is served; that is another number."""
    overlap: list[bool] = []

    def each(task: Task, calls: Any) -> float:
        overlap.append(pdl.PDL)
        return 1e-3

    monkeypatch.setattr(pdl, "PDL", True)
    monkeypatch.setattr(kernels, "each", each)
    lines = Lines(tmp_path / "lines.jsonl", "B", "a card")
    lines.write("bandwidth", "bandwidth", 1e9)
    task = Task("kernels", lines, 0.0, Device("cpu"), TINY)
    found = kernels.product(task, [Linear(torch.randn(8, 16))], torch.randn(1, 16))
    assert overlap == [False, True, True] and pdl.PDL
    assert found["over_library"] == 1.0 and found["share"] == pytest.approx(8 * 16 * 4 / 1e6)


def test_where_the_time_of_a_step_goes(monkeypatch) -> None:
    """Two kernels a step, 3 and 5 us, 1 us between them and 10 from step to step."""
    monkeypatch.setattr(profile, "STEPS", 2)
    one = [("first", 0.0, 3.0), ("second", 4.0, 9.0)]
    events = [*one, *((name, begun + 19, end + 19) for name, begun, end in one)]
    assert profile.waits(events) == (16.0, 12.0, 10.0)
    assert profile.in_place(events) == [["first", 3.0, 10.0], ["second", 5.0, 1.0]]
    assert profile.in_place(events[:3]) == [["2 x first", 6.0, 0.0], ["1 x second", 5.0, 0.0]]
    assert profile.in_place([]) == [] and profile.waits([]) == (0.0, 0.0, 0.0)
    overlapping = [("long", 0.0, 10.0), ("short", 2.0, 3.0), ("late", 12.0, 13.0)]
    assert profile.waits(overlapping) == (11.0, 2.0, 2.0)


# -- the smoke ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["nothing", "memcpy", "memset"])
def test_a_kernel_that_reads_too_early_is_seen(between: str, device: Device, tmp_path: Path, monkeypatch) -> None:
    task = Task("smoke", Lines(tmp_path / "lines.jsonl", "A"), 0.0, device, TINY)
    assert smoke.Chain(task, between, True).holds(captured=False)

    def too_early(self: smoke.Chain, source: Tensor, target: Tensor) -> None:
        torch.add(source, 1, out=target)
        target[-5:] -= 1  # a program that was there before the numbers were

    monkeypatch.setattr(smoke.Chain, "_kernel", too_early)
    assert not smoke.Chain(task, between, True).holds(captured=False)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_probe_compiles(capability, tmp_path) -> None:
    types = {"data": "*i32", "sums": "*i32", "count": "i32"}
    compiled = compile_kernel(smoke.read_stream, types, {"BLOCK": smoke.BLOCK}, tmp_path, capability, warps=8)
    assert compiled.stack == 0 and "ld.global.v4" in compiled.ptx, "loads of 16 bytes, nothing spilled"


@pytest.mark.parametrize("overlapping", [True, False])
def test_the_kernel_of_the_smoke_begins_as_ours_do(overlapping: bool, tmp_path) -> None:
    constants = {"BLOCK": smoke.BLOCK, "USE_GDC": overlapping}
    types = {"source": "*i32", "target": "*i32"}
    compiled = compile_kernel(smoke.next_of, types, constants, tmp_path, 90, launch_pdl=overlapping)
    assert ("griddepcontrol.wait" in compiled.ptx) is overlapping
