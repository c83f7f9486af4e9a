"""Where an engine runs, and in which dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foresay.server.cli.pair import check
from foresay.server.engine.device import find_device
from foresay.server.engine.parameters import Device, bits_of, choose_dtype, with_kv
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED, CannotRun
from foresay.verifier.model.config import ModelConfig, parameters
from foresay.verifier.model.layers import Stack

GIB = 1 << 30
HOPPER = Device("cuda:0", 139 * GIB, 138 * GIB, "NVIDIA H200", (9, 0))

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model() -> ModelConfig:
    return ModelConfig.from_directory(Path(BUNDLED) / "target")


def test_the_cpu_on_request() -> None:
    device = find_device(EngineConfig(device="cpu"))
    assert (device.name, str(device), device.is_gpu) == ("cpu", "cpu", False)
    assert device.total > GIB // 4


@no_gpu
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert find_device(EngineConfig()).name == "cpu"
    with pytest.raises(
        CannotRun, match="--device cuda: this machine has no CUDA device that PyTorch can use: --device cpu"
    ):
        find_device(EngineConfig(device="cuda"))
    with pytest.raises(CannotRun, match=r"--gpu-memory-utilization 0\.5: the engine runs on the CPU"):
        find_device(EngineConfig(gpu_memory_utilization=0.5))


@no_gpu
@pytest.mark.parametrize(("system", "machine"), [("Linux", "riscv64"), ("Darwin", "arm64")])
def test_a_processor_without_kernels_is_refused(monkeypatch, system, machine) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(
        CannotRun, match=f"--device auto: kernels .* Linux on x86-64 and aarch64, .* {system} on {machine}"
    ):
        find_device(EngineConfig())


@gpu
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_the_first_gpu(asked) -> None:
    device = find_device(EngineConfig(device=asked, gpu_memory_utilization=0.5))
    assert device.name == "cuda:0"
    assert device.model
    assert device.free is not None
    assert GIB < device.free <= device.total


def test_a_share_of_a_gpu_is_refused_on_the_cpu() -> None:
    with pytest.raises(CannotRun, match="leave the flag out; --kv-tokens sizes the KV cache there"):
        find_device(EngineConfig(device="cpu", gpu_memory_utilization=0.9))


def test_a_gpu_is_named_for_people() -> None:
    assert str(HOPPER) == "cuda:0 (NVIDIA H200)"


@pytest.mark.parametrize(
    ("capability", "dtype"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float16"), ((7, 0), "float16")]
)
def test_bf16_from_ampere_on_and_fp16_before(capability, dtype) -> None:
    choice = choose_dtype(EngineConfig(), model(), replace(HOPPER, capability=capability))
    assert choice.value == dtype
    assert "GPU" in choice.reason


def test_a_requested_dtype_is_taken() -> None:
    assert choose_dtype(EngineConfig(dtype="float16"), model(), HOPPER).value == "float16"
    assert choose_dtype(EngineConfig(dtype="float32"), model(), Device("cpu", 8 * GIB)).value == "float32"


def test_fp32_is_not_for_a_gpu() -> None:
    with pytest.raises(CannotRun, match="made for 16-bit weights: leave --dtype out"):
        choose_dtype(EngineConfig(dtype="float32"), model(), HOPPER)


def test_a_processor_without_bf16_takes_fp32_if_it_fits(monkeypatch) -> None:
    monkeypatch.setattr("foresay.server.engine.parameters.multiplies_bf16", lambda: False)
    assert choose_dtype(EngineConfig(), model(), Device("cpu", 8 * GIB)).value == "float32"
    assert choose_dtype(EngineConfig(), model(), Device("cpu", GIB >> 6)).value == "bfloat16"


def test_portable_bits_are_of_fp32_and_taken_where_they_are_the_fastest(monkeypatch) -> None:
    for config, has_bf16, dtype in (
        (EngineConfig(), True, "bfloat16"),
        (EngineConfig(), False, "float32"),
        (EngineConfig(bits="fast"), True, "bfloat16"),
        (EngineConfig(bits="portable"), True, "float32"),
        (EngineConfig(bits="portable", dtype="float32"), True, "float32"),
    ):
        monkeypatch.setattr("foresay.server.engine.parameters.multiplies_bf16", lambda has=has_bf16: has)
        assert choose_dtype(config, model(), Device("cpu", 8 * GIB)).value == dtype
    classes = [bits_of("float32", False), bits_of("bfloat16", False), bits_of("bfloat16", True)]
    assert classes == ["portable 1", "fast", "gpu"]


@pytest.mark.parametrize(
    ("stored", "asked", "kept"),
    [
        ("bfloat16", {}, "bfloat16"),
        ("float32", {}, "auto"),
        ("bfloat16", {"dtype": "float32"}, "auto"),
        ("bfloat16", {"kv_dtype": "int8"}, "int8"),
    ],
)
def test_keys_and_values_have_no_more_bits_than_weights(stored, asked, kept) -> None:
    """Unless fp32 was asked for."""
    narrow = replace(model(), dtype=stored)
    assert with_kv(EngineConfig(**asked), narrow, "float32").kv_dtype == kept
    assert with_kv(EngineConfig(**asked), narrow, "bfloat16").kv_dtype == asked.get("kv_dtype", "auto")


def test_bf16_beside_fp16_is_refused() -> None:
    with pytest.raises(CannotRun, match="--kv-dtype bfloat16: the engine computes in float16"):
        with_kv(EngineConfig(kv_dtype="bfloat16"), model(), "float16")


@pytest.mark.parametrize(
    ("config", "device", "said"),
    [
        (EngineConfig(bits="portable"), HOPPER, "--bits portable: a GPU's bits are a class of their own"),
        (EngineConfig(bits="portable", dtype="bfloat16"), Device("cpu", 8 * GIB), "portable bits are of float32"),
    ],
)
def test_portable_bits_are_of_fp32_on_a_cpu(config, device, said) -> None:
    with pytest.raises(CannotRun, match=said):
        choose_dtype(config, model(), device)


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_a_model_kept_in_16_bits_fits_where_twice_of_it_would_not(monkeypatch, stored) -> None:
    monkeypatch.setattr("foresay.server.engine.parameters.multiplies_bf16", lambda: False)
    narrow = model()
    attention = replace(narrow.first.attention, heads=16, head_dim=128)
    stack = Stack.uniform(narrow.num_layers, attention, 4096, narrow.stack.norm)
    wide = replace(narrow, dtype=stored, hidden_size=2048, stack=stack)
    choice = choose_dtype(EngineConfig(), wide, Device("cpu", 2 * 3 * parameters(wide)))
    assert choice.value == ("float32" if stored == "bfloat16" else "bfloat16")
    assert ("kept in 16 bits" in choice.reason) == (stored == "bfloat16")


@no_gpu
def test_a_check_says_what_is_wrong_with_the_device() -> None:
    fault = check(EngineConfig(device="cuda")).fault
    assert "no CUDA device" in fault and fault.endswith("--device cpu runs here")
