"""Nemotron-4 and Arcee: an MLP without gates, which squares what is positive."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, attention, biases, layer_count, mlp, rms_norm
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import OUTPUT, QKV, Layer, NormKind, Stack
from foresay.verifier.model.rope_config import read_rope


def nemotron(fields: Fields) -> Stack:
    """Nemotron-4, Minitron: norms by the standard deviation, with biases; half of a head is rotated."""
    norm = NormKind(fields.number("norm_eps", 1e-5), centred=True, bias=True, wide=True, less_one=True)
    return _stack(fields, norm, partial=True)


def arcee(fields: Fields) -> Stack:
    """Arcee (AFM)."""
    return _stack(fields, rms_norm(fields), partial=False)


def _stack(fields: Fields, norm: NormKind, partial: bool) -> Stack:
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = attention(fields, read_rope(fields, partial=partial), biases=has)
    inner = mlp(fields, "relu2", bias=fields.flag("mlp_bias", False))
    return Stack((Layer(own, inner, norm),) * layer_count(fields), norm)


def _gguf_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {"norm_eps": fields.number("attention.layer_norm_epsilon")}


FAMILIES = {
    "NemotronForCausalLM": Family(
        "Nemotron-4, Minitron", nemotron, {"partial_rotary_factor": 0.5}, Gguf("nemotron", values=_gguf_values)
    ),
    "ArceeForCausalLM": Family("Arcee AFM", arcee, {"rms_norm_eps": 1e-5}, Gguf("arcee", in_pairs=True)),
}
