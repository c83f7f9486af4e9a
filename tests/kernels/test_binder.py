"""Real launchers through Triton's own binder, on tensors of shapes alone: what is launched, what is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from bench.arithmetic import CARDS, Step
from bench.gpu import gaps, model, shapes
from bench.gpu.binder import DEVICE, bound
from bench.gpu.verify import VerifyStep
from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.kernels import key_blocks, linear
from foresay.verifier.ops.kernels.chain import capability
from foresay.verifier.paged_model import PagedModel
from tests.kernels.compiling import resource_usage


@pytest.fixture(scope="module", autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target() -> PagedModel:
    return model.target_of(shapes.LLAMA_8B)


@pytest.fixture(scope="module")
def counted() -> list[Step]:
    """A plain step of an 8B, and one with a chain of an EAGLE-3 head."""
    return model.steps(*model.SIZES["8B"], levels=5, context=1024)


def test_launches_of_a_step_of_an_8b(counted) -> None:
    """What docs/latency.md says of them."""
    plain, drafting = counted
    for step in (plain, drafting):
        print(
            f"{step.name}: {step.launches.total} launches, {dict(step.launches.kernels)}, {dict(step.launches.torch)}"
        )
    layers = 32
    assert plain.launches.kernels["linear_tiles"] == 4 * layers + 1 and "add_segments" not in plain.launches.kernels
    assert plain.launches.total <= 267 and drafting.launches.total <= 374


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_what_is_expected_follows_the_constants_of_the_code(counted, card, monkeypatch) -> None:
    """So the same arithmetic says what each of them is worth."""
    plain, longer = counted[0], replace(counted[0], context=8192)
    with bound():
        now = model.predicted("8B", counted, card)
        assert all(value > 1 for value in now.values())
        with model.as_before():
            before = model.predicted("8B", counted, card)
        assert all(before[name] >= now[name] for name in now if "over" in name) and before != now
        taken, serial = plain.seconds(card), longer.seconds(card)
        with monkeypatch.context() as patched:
            for name in ("AHEAD", "AHEAD_OF_OUTPUT", "AHEAD_OF_NEXT"):
                patched.setattr(linear, name, 0)
                assert plain.seconds(card) > taken
        monkeypatch.setattr(key_blocks, "SPLIT", 4 * key_blocks.SPLIT)
        assert longer.seconds(card) > serial, "blocks one after the other"


def test_a_kernel_is_compiled_once_for_any_number_of_rows(target) -> None:
    """But a product for 16, 32 and 64 of them, and attention for few of them, of two kinds, that need no merge. And for
    any context and temperature."""
    one_shape = {"linear_tiles": 3 * 5, "norm_rows": 1, "embedded_rows": 1, "both_rows": 1, "rotate_and_store_rows": 1}
    sampled = {"tree_partials": 3, "tree_merge": 1, "scan": 1, "weigh": 1, "settle": 1}
    laid_out = {"lay_out_rows": 1, "walk_trees": 1}
    with bound() as launches:
        for rows in (1, 2, 3, 8, 16, 20, 33, 64):
            for temperature in (0.0, 1.0):
                VerifyStep(target, rows, 1000 + rows, SamplingParams(temperature=temperature))()
    print(launches.variants)
    assert {name: launches.variants[name] for name in one_shape | sampled | laid_out} == one_shape | sampled | laid_out


@triton.jit
def _specialised(x, rows, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), rows)


def test_what_is_compiled_again_is_seen() -> None:
    """A number that is 1, or divisible by 16, makes another kernel where a launcher does not forbid it."""
    with bound() as launches:
        for rows in (1, 2, 16, 3):
            _specialised[(1,)](torch.empty(8, device=DEVICE, dtype=torch.int32), rows, 8)
    assert launches.variants == {"_specialised": 3} and launches.kernels.total() == 4


def test_the_driver_is_asked_once_for_a_device() -> None:
    """Each launch needs to know what the GPU can do, and the driver takes microseconds to say so."""
    for known in (80, 90, 80):
        with bound(known):
            stand_in = driver.active
            with patch.object(stand_in, "get_current_target", wraps=stand_in.get_current_target) as asked:
                assert {capability() for _ in range(5)} == {known}
            assert asked.call_count == 1


def test_what_was_compiled_for_another_gpu_is_not_taken() -> None:
    """Triton keeps what it found out of a device for as long as the kernel lives; a stand-in lives shorter."""
    for known in (80, 90) * 20:
        with bound(known, counting=False) as launches:
            _specialised[(1,)](torch.empty(8, device=DEVICE, dtype=torch.int32), 3, 8)
        *_, (_, _, target, *_) = _specialised.device_caches.values()
        assert target.arch == known and launches.variants == {"_specialised": 1}


@pytest.mark.slow
def test_kernels_of_a_step_spill_nothing(target, tmp_path: Path) -> None:
    with bound(compiling=True) as launches:
        for rows in (1, 32, 64):
            VerifyStep(target, rows, 1024)()
    assert len(launches.binaries) >= 24
    for name, made in launches.binaries.items():
        binary = tmp_path / f"{name}.cubin".replace(" ", ".")
        binary.write_bytes(made.asm["cubin"])
        used = resource_usage(binary)
        print(f"{name}: {used['REG']} registers, {made.metadata.shared} B shared")
        assert used["STACK"] + used["LOCAL"] == 0, f"{name} spills registers"
        before, wait, _ = made.asm["ptx"].partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in before, f"{name} begins like all of a chain"
        assert not re.search(r"\b(ld|st|cp\.async(?!\.bulk\.prefetch))\.\S*global", before), (
            f"{name} reads before it may"
        )


@pytest.mark.slow
def test_what_tells_of_gaps_and_tiles_compiles_as_it_is_meant() -> None:
    """The dependent chain waits for the one before it, and every way of a product multiplies with wgmma."""
    device = model.OnShapes()
    with bound(compiling=True) as launches:
        for options in ({}, {"launch_pdl": True}):
            data = torch.empty(1, dtype=torch.int32, device=DEVICE)
            gaps.empty_step[(1,)](data, bool(options), num_warps=1, **options)
        gaps.compile_ways(device)
    wide = [*gaps.WAYS, *(way for way in gaps.CHUNK_WAYS if not way.served)]
    assert launches.variants == {"empty_step": 2, "swept_tiles": len(wide), "linear_tiles": 1}
    codes = {name: made.asm["ptx"] for name, made in launches.binaries.items()}
    assert "griddepcontrol.wait" in codes["empty_step 2"] and "griddepcontrol" not in codes["empty_step 1"]
    for number, way in enumerate(wide, start=1):
        assert f"wgmma.mma_async.sync.aligned.m64n{way.rows}k16" in codes[f"swept_tiles {number}"], way
        assert launches.binaries[f"swept_tiles {number}"].metadata.shared <= gaps.SHARED
