"""Real launchers through Triton's own binder, on tensors of shapes alone: what is launched, what is compiled."""

from __future__ import annotations

import json
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

from bench import shapes
from bench.arithmetic import CARDS, Step
from bench.binder import DEVICE, bound
from bench.gpu import kernels, model, report
from bench.gpu.drafting import Ground, RandomChain
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.ops.kernels import chain, key_blocks, linear
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
def counted() -> dict[str, list[Step]]:
    """By size, a plain step and one with a chain of an EAGLE-3 head."""
    return model.counted()


def step(target: PagedModel, rows: int, context: int, temperature: float = 0.0) -> None:
    """One step of so many rows, as it is timed."""
    proposer = RandomChain(rows, DEVICE)
    ground = Ground(target, proposer, context, temperature=temperature)
    made = SpeculativeStep(target, proposer, ground.state)
    ground.reset()
    made()


def test_launches_of_a_step_of_an_8b(counted) -> None:
    """What bench/MEASUREMENTS.md says of them."""
    plain, drafting = counted["8B"]
    for step in (plain, drafting):
        print(
            f"{step.name}: {step.launches.total} launches, {dict(step.launches.kernels)}, {dict(step.launches.torch)}"
        )
    layers = 32
    assert plain.launches.kernels["linear_tiles"] == 4 * layers + 1 and "add_segments" not in plain.launches.kernels
    assert plain.launches.total <= 267 and drafting.launches.total <= 374


def test_what_a_run_is_held_against_is_what_is_predicted(counted) -> None:
    assert report.predicted(counted) == json.loads(report.TABLE.read_text()), (
        "python -m bench.gpu.report writes it anew"
    )


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_what_is_expected_follows_the_constants_of_the_code(counted, card, monkeypatch) -> None:
    """So the same arithmetic says what each of them is worth."""
    made = counted["8B"]
    plain, longer = made[0], replace(made[0], context=8192)
    with bound():
        now = model.predicted("8B", made, card)
        assert all(value > 1 for value in now.values())
        with model.as_before():
            before = model.predicted("8B", made, card)
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
                step(target, rows, 1000 + rows, temperature)
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
            step(target, rows, 1024)
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


def test_the_switch_decides_whether_kernels_overlap(monkeypatch) -> None:
    """Read at each launch: what was compiled to overlap is not what is launched after it."""
    x, weight = (torch.empty(size, 4096, device=DEVICE, dtype=torch.bfloat16) for size in (1, 4096))
    for able in (True, False):
        monkeypatch.setattr(chain, "PDL", able)
        with bound(compiling=True) as launches:
            linear.linear(x, weight)
        assert {made.metadata.launch_pdl for made in launches.binaries.values()} == {able}
        assert {"griddepcontrol" in made.asm["ptx"] for made in launches.binaries.values()} == {able}
    with bound() as launches:
        for able in (True, False, True):
            monkeypatch.setattr(chain, "PDL", able)
            linear.linear(x, weight)
    assert launches.variants["linear_tiles"] == 2 and launches.kernels["linear_tiles"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_that_are_tried_fit_on_a_gpu(rows: int, monkeypatch) -> None:
    x, weight = (torch.empty(size, 4096, device=DEVICE, dtype=torch.bfloat16) for size in (rows, 4096))
    for tile in kernels.tiles(linear.tile_of(rows, large=True))[-2:]:  # the deepest and the widest
        monkeypatch.setattr(linear, "tile_of", lambda *_, tile=tile, **__: tile)
        with bound(compiling=True) as launches:
            linear.linear(x, weight)
        (made,) = [one for name, one in launches.binaries.items() if name.startswith("linear_tiles")]
        assert made.metadata.shared <= 227 << 10, tile
