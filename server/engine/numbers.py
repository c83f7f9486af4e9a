"""The types of an engine's numbers, and the class of its bits. Does not import torch.

What a CPU computes in fp32 is *portable*: every sum and function is our own, in an order that no processor changes, so
a seed gives the same text on every CPU (docs/same-tokens.md#portable-bits). In bf16, processors with dot products of it
add in pairs, and the others do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from foresay.server.engine.parameters import kept_in_16_bits, kv_kind, packed_bytes
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun, Resolved
from foresay.verifier.model.config import ModelConfig, matrices
from foresay.verifier.model.mla import Latent
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.quant_groups import GROUP

if TYPE_CHECKING:
    from foresay.server.engine.device import Device

#: Classes of bits. The portable one has a version: one more when a change of ours changes a token of it.
PORTABLE, FAST, OF_A_GPU = "portable 1", "fast", "gpu"


def bits_of(dtype: str, on_gpu: bool) -> str:
    """The class of the bits of an engine that computes in this dtype."""
    if on_gpu:
        return OF_A_GPU
    return PORTABLE if dtype == "float32" else FAST


def choose_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> Resolved:
    """``auto``: bf16 if the device multiplies it natively; else fp16 on a GPU, and fp32 on a CPU if it fits. With
    portable bits fp32."""
    if config.bits == "portable":
        return _portable(config, device)
    if config.dtype == "float32" and device.name.startswith("cuda"):
        raise CannotRun("--dtype float32: the kernels for a GPU are made for 16-bit weights", "leave --dtype out")
    if config.dtype != "auto":
        return Resolved(config.dtype, "asked for")
    if not device.is_gpu:
        return cpu_dtype(model, device.has_bf16, device.total)
    if device.has_bf16:
        return Resolved("bfloat16", "the GPU multiplies bf16")
    return Resolved("float16", "the GPU has no bf16 instructions")


def _portable(config: EngineConfig, device: Device) -> Resolved:
    if device.is_gpu:
        raise CannotRun("--bits portable: a GPU's bits are a class of their own", "--device cpu has portable ones")
    if config.dtype not in ("auto", "float32"):
        raise CannotRun(f"--bits portable --dtype {config.dtype}: portable bits are of float32", "leave --dtype out")
    return Resolved("float32", "portable bits were asked for")


def cpu_dtype(model: ModelConfig, has_bf16: bool, machine: int) -> Resolved:
    """The dtype that a CPU computes in. has_bf16: whether it multiplies bf16 natively. machine: bytes of its memory."""
    if has_bf16:
        return Resolved("bfloat16", "the processor multiplies bf16")
    if packed_bytes(model, "float32") >= machine / 2:
        return Resolved("bfloat16", "fp32 would take more than half of the memory")
    kept = ", with weights kept in 16 bits" if kept_in_16_bits(model, "float32") else ""
    return Resolved("float32", f"the processor has no bf16 instructions, fp32 is faster{kept}")


def with_kv(config: EngineConfig, model: ModelConfig, dtype: str) -> EngineConfig:
    """The settings, with the type of the KV cache that ``auto`` stands for where fp32 was chosen, not asked for: 16
    bits, if the weights have no more. Raises CannotRun for a type that fits no kernel."""
    if config.kv_dtype == "bfloat16" and dtype == "float16":
        raise CannotRun("--kv-dtype bfloat16: the engine computes in float16", "leave --kv-dtype out")
    files = model.quantization is not None and not model.quantization.is_made
    chosen = dtype == "float32" and config.dtype == "auto" and (files or kept_in_16_bits(model, dtype))
    latent = any(isinstance(one, Latent) for one in model.stack.attentions)
    if not chosen or latent or config.kv_dtype != "auto" or kv_kind(model, "auto") != "auto":
        return config
    return replace(config, kv_dtype="bfloat16")


def choose_activations(config: EngineConfig, model: ModelConfig, device: Device) -> Resolved:
    """``auto``: int8 if the weights have 4 bits and there are kernels for it (docs/quantization.md has costs and
    gains)."""
    bits = _rounded_bits(model)
    against = _against_rounding(bits, device)
    if config.activations == "int8" and against:
        raise CannotRun(f"--activations int8: {against}", "leave --activations out")
    if config.activations != "auto":
        return Resolved(config.activations, "asked for")
    if against or 4 not in bits:
        return Resolved("model", against or "rounding them would cost more accuracy than 8-bit weights do")
    return Resolved("int8", "weights of 4 bits are multiplied as whole numbers")


def _rounded_bits(model: ModelConfig) -> set[int]:
    """Bit widths of the weights that have int8 kernels: integers, in whole groups of activations."""
    if (found := model.quantization) is None:
        return set()
    schemes = (found.scheme(module, inner) for module, inner, _ in matrices(model) if inner % GROUP == 0)
    return {each.bits for each in schemes if each is not None and (each.e2m1 or not each.floats)}


def _against_rounding(bits: set[int], device: Device) -> str:
    """Why activations cannot be rounded; "" if they can."""
    if device.is_gpu:
        return "there are kernels for rounded activations for a CPU alone"
    if not Processor.here().multiplies_bytes:
        return "the processor has none of the instructions that multiply bytes (AVX2, AVX-VNNI, AVX512-VNNI)"
    if not bits:
        return "no weights are whole numbers (int8, int4, GGUF's types) in rows of a multiple of 32"
    return ""
