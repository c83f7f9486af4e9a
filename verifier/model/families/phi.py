"""Phi-3 and Phi-4: fused matrices, a part of a head rotated, LongRoPE."""

from __future__ import annotations

from foresay.verifier.model.families.family import (
    FUSED_GATE_UP,
    FUSED_QKV,
    Family,
    Gguf,
    attention,
    layer_count,
    mlp,
    rms_norm,
    uniform_window,
)
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import Layer, Stack
from foresay.verifier.model.rope_config import read_rope


def phi3(fields: Fields) -> Stack:
    """Phi-3 and Phi-4."""
    norm, rope = rms_norm(fields), read_rope(fields, partial=True)
    own = attention(fields, rope, window=uniform_window(fields, absent=None), fused=FUSED_QKV)
    return Stack((Layer(own, mlp(fields, fused=True), norm),) * layer_count(fields), norm)


_GGUF = Gguf("phi3", {"attn_qkv": FUSED_QKV, "ffn_up": FUSED_GATE_UP}, windowed=True)

FAMILIES = {"Phi3ForCausalLM": Family("Phi-3, Phi-4", phi3, gguf=_GGUF)}
