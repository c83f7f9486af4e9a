"""Real launchers through Triton's own binder, on tensors of shapes alone: what is launched, what is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

import foresay.drafters.calibration
from bench import shapes
from bench.gpu import settings
from bench.gpu.device import Device
from bench.gpu.drafting import Ground, RandomChain
from bench.made import BUNDLED, paged, random_dflash, random_eagle
from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.parallel import DFlashDrafter
from foresay.drafters.proposer import Drafts, RootOnly
from foresay.kvpaging import PagePool
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.staging import Column, Staged
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import allocate
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops import attention
from foresay.verifier.ops.attention import rotate_and_store
from foresay.verifier.ops.kernels import linear, pdl
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.kernels.pdl import capability
from foresay.verifier.ops.records import Norm, Rotation
from foresay.verifier.ops.rows import add_norm
from tests.heads.writing import write_config
from tests.kernels.binder import DEVICE, Launches, bound
from tests.kernels.compiling import resource_usage


@pytest.fixture(scope="module", autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target() -> ModelRunner:
    """A model of shapes alone, with a store for the longest text that a run of bench.gpu reads."""
    config = shapes.LLAMA_8B.config(ModelConfig.from_directory(BUNDLED / "target"))
    decoder = Decoder(config, allocate(config, torch.bfloat16, DEVICE), shapes.POSITIONS)
    return paged(PagePool(2 + shapes.POSITIONS // 16, 16), decoder, OnShapes())


class OnShapes(Device):
    """A device of shapes alone, that computes as a GPU does."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.torch, self.cuda = DEVICE, True

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


def launches_of(target: ModelRunner, proposer: Proposer) -> Launches:
    """Of one whole step; what is made once is made before."""
    with bound() as launches:
        ground = Ground(target, proposer, 1024)
        step = SpeculativeStep(target, proposer, ground.state)
        step()
        ground.reset()
        launches.kernels.clear()
        launches.torch.clear()
        step()
    return launches


def step(target: ModelRunner, rows: int, context: int, temperature: float = 0.0) -> None:
    """One step of so many rows, as it is timed."""
    proposer = RandomChain(rows, DEVICE)
    ground = Ground(target, proposer, context, temperature=temperature)
    made = SpeculativeStep(target, proposer, ground.state)
    ground.reset()
    made()


class Blank(Staged):
    """What the host writes, where no GPU reads it: without memory that a GPU copies from."""

    def __init__(self, device: torch.device, columns: Mapping[str, Column]) -> None:
        super().__init__(torch.device("cpu"), columns)
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}


def test_launches_of_a_step_of_an_8b(target, monkeypatch) -> None:
    """Plain, and with a chain of an EAGLE-3 head."""
    monkeypatch.setattr(foresay.drafters.calibration, "Staged", Blank)
    chosen = settings.full()
    with bound():
        head = random_eagle(OnShapes(), target.decoder, chosen.pairs["8B"].eagle)
        drafter = EagleDrafter(head, target.store.pool, name="eagle3")
    chained = Drafts(drafter, TreeShape.chain(chosen.levels[0]), 1, target.vocab_size)
    plain, drafting = (launches_of(target, each) for each in (RootOnly(1, DEVICE), chained))
    for each in (plain, drafting):
        print(f"{each.total} launches, {dict(each.kernels)}, {dict(each.torch)}")
    assert plain.kernels["linear_tiles"] == 4 * 32 + 1 and "add_segments" not in plain.kernels
    assert plain.total <= 298 and drafting.total <= 397


@pytest.mark.parametrize(("switch", "more"), [("ROTATED_WITHIN", -32), ("SLOTS_ONCE", 1)])
def test_what_switches_launch(switch, more, target, monkeypatch) -> None:
    """Attention that rotates takes a launch from each layer; slots that are looked up once, one for all."""
    default = launches_of(target, RandomChain(6, DEVICE))
    monkeypatch.setattr(attention, switch, True)
    other = launches_of(target, RandomChain(6, DEVICE))
    assert other.total == default.total + more
    assert other.kernels["rotate_and_store_rows"] == (0 if more < 0 else 32) and other.kernels["tail_rows"] == (
        more > 0
    )


@pytest.fixture(scope="module")
def qwen() -> ModelRunner:
    """As :func:`target`, of Qwen3-8B's shape."""
    config = shapes.QWEN_8B.config(ModelConfig.from_directory(BUNDLED / "target"))
    decoder = Decoder(config, allocate(config, torch.bfloat16, DEVICE), shapes.POSITIONS)
    return paged(PagePool(2 + shapes.POSITIONS // 16, 16), decoder, OnShapes())


def test_the_dflash_head_that_is_timed_is_the_published_one(qwen, tmp_path: Path) -> None:
    """As the config.json of z-lab/Qwen3-8B-DFlash-b16 has it: what it reads, guesses, and is made of."""
    own = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128, "vocab_size": 151936}
    counts = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 5, "num_target_layers": 36}
    kind = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "dflash_config": own}
    more = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "max_position_embeddings": 40960, "attention_bias": False}
    write_config(tmp_path, kind | sizes | counts | more)
    read = HeadConfig.read(tmp_path, qwen.decoder.config)
    with bound():
        made = random_dflash(OnShapes(), qwen.decoder, shapes.DFLASH_8B).config
    for name in ("names", "guesses", "generation", "draft_vocab"):
        assert getattr(made, name) == getattr(read, name), name
    assert not any(one.causal for each in (made, read) for one in each.layer.stack.attentions)
    mine, its = ([node.products(4096) for node in each.layer.stack.layers] for each in (made, read))
    assert mine == its * 5 and len(its) == 1, "of each layer; how many there are, its file says"


def test_launches_of_a_step_of_a_dflash_head_of_the_published_shape(qwen, monkeypatch) -> None:
    """Five layers and a block of 16, beside Qwen3-8B: one pass drafts, and all of it is drawn in one launch."""
    monkeypatch.setattr(foresay.drafters.calibration, "Staged", Blank)
    with bound():
        head = random_dflash(OnShapes(), qwen.decoder, shapes.DFLASH_8B)
        drafter = DFlashDrafter(head, qwen.store.pool, name="dflash")
    drafts = Drafts(drafter, TreeShape.chain(15), 1, qwen.vocab_size)
    plain, drafting = (launches_of(qwen, each) for each in (RandomChain(16, DEVICE), drafts))
    for each in (plain, drafting):
        print(f"{each.total} launches, {dict(each.kernels)}, {dict(each.torch)}")
    assert plain.total <= 335 and drafting.total <= 418
    assert drafting.kernels["scan"] == drafting.kernels["decide"] == 2


def test_a_kernel_is_compiled_once_for_any_number_of_rows(target) -> None:
    """But a product for 16, 32 and 64 of them, and attention by blocks and by splits. And for any context and
    temperature."""
    one_shape = {"linear_tiles": 3 * 5, "norm_rows": 1, "embedded_rows": 1, "both_rows": 1, "rotate_and_store_rows": 1}
    sampled = {"tree_partials": 2, "tree_merge": 1, "scan": 1, "decide": 1}
    laid_out = {"lay_out_rows": 1, "walk_trees": 1}
    with bound() as launches:
        for rows in (1, 2, 3, 16, 20, 33, 64):
            step(target, rows, 1000 + rows, rows % 2)
        step(target, 1, 1024)
    print(launches.variants)
    assert {name: launches.variants[name] for name in one_shape | sampled | laid_out} == one_shape | sampled | laid_out


def test_norms_and_rotation_are_compiled_once_for_long_prompts_too() -> None:
    """From 257 and 385 rows on one program adds up the segments of an 8B's products."""

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    output, qkv = (BlockedWeight.pack(of(width, 4096)) for width in (4096, 6144))
    with bound() as launches:
        for rows in (1, 64, 257, 385, 512):
            x, rotation = of(rows, 4096), Rotation(of(rows, 1, 128), of(rows, 1, 128))
            add_norm.launch(x, linear.product(x, output, x.dtype), Norm(of(4096), 1e-5))
            layer = of(1024, 8, 128), of(1024, 8, 128), None
            rotate_and_store.launch(linear.product(x, qkv, x.dtype), rotation, layer, of(rows, dtype=torch.int64))
    assert launches.kernels["norm_rows"] == launches.kernels["rotate_and_store_rows"] == 5
    assert launches.variants["norm_rows"] == launches.variants["rotate_and_store_rows"] == 1


@triton.jit
def _specialised(x, rows, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), rows)


def test_what_is_compiled_again_is_seen() -> None:
    """A number that is 1, or divisible by 16, makes another kernel where a launcher does not forbid it."""
    with bound() as launches:
        for rows in (1, 2, 16, 3):
            _specialised[(1,)](torch.empty(8, device=DEVICE, dtype=torch.int32), rows, 8)
    assert launches.variants == {"_specialised": 3} and launches.kernels.total() == 4


def test_the_driver_is_called_once_for_a_device() -> None:
    """Each launch needs to know what the GPU can do, and the driver takes microseconds to say so."""
    for known in (80, 90, 80):
        with bound(known):
            stand_in = driver.active
            with patch.object(stand_in, "get_current_target", wraps=stand_in.get_current_target) as requested:
                assert {capability() for _ in range(5)} == {known}
            assert requested.call_count == 1


def test_what_was_compiled_for_another_gpu_is_not_taken() -> None:
    """Triton keeps what it found out of a device for as long as the kernel lives; a stand-in lives shorter."""
    for known in (80, 90) * 20:
        with bound(known, counting=False) as launches:
            _specialised[(1,)](torch.empty(8, device=DEVICE, dtype=torch.int32), 3, 8)
        *_, (_, _, target, *_) = _specialised.device_caches.values()
        assert target.arch == known and launches.variants == {"_specialised": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "least"), [((1, 64), 19), pytest.param((1, 32, 64), 24, marks=pytest.mark.soak)], ids=str
)
def test_kernels_of_a_step_spill_nothing(rows, least, target, tmp_path: Path) -> None:
    with bound(compiling=True) as launches:
        for each in rows:
            step(target, each, 1024)
    assert len(launches.binaries) >= least
    for name, made in launches.binaries.items():
        binary = tmp_path / f"{name}.cubin".replace(" ", ".")
        binary.write_bytes(made.asm["cubin"])
        used = resource_usage(binary)
        print(f"{name}: {used['REG']} registers, {made.metadata.shared} B shared")
        assert used["STACK"] + used["LOCAL"] == 0, f"{name} spills registers"
        before, wait, _ = made.asm["ptx"].partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in before, f"{name} begins like all of a chain"
        read = re.findall(r"\b(?:ld|st|cp\.async)\.\S*global", before)
        assert not read or (name.split()[0] in ("norm_rows", "embedded_rows") and set(read) == {"ld.global"}), (
            f"{name} reads what is no weight before it may"
        )


def test_the_switch_decides_whether_kernels_overlap(monkeypatch) -> None:
    """Read at each launch: what was compiled to overlap is not what is launched after it."""
    x, weight = (torch.empty(size, 4096, device=DEVICE, dtype=torch.bfloat16) for size in (1, 4096))
    for able in (True, False):
        monkeypatch.setattr(pdl, "PDL", able)
        with bound(compiling=True) as launches:
            linear.linear(x, weight)
        assert {made.metadata.launch_pdl for made in launches.binaries.values()} == {able}
        assert {"griddepcontrol" in made.asm["ptx"] for made in launches.binaries.values()} == {able}
    with bound() as launches:
        for able in (True, False, True):
            monkeypatch.setattr(pdl, "PDL", able)
            linear.linear(x, weight)
    assert launches.variants["linear_tiles"] == 2 and launches.kernels["linear_tiles"] == 3
