"""Ministral 3 and Devstral 2: queries grow with their position."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, attention, layer_count, mlp, rms_norm, uniform_window
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import Layer, Stack
from foresay.verifier.model.rope_config import QueryScaling, read_rope


def ministral3(fields: Fields) -> Stack:
    """Mistral's layers, whose queries are multiplied by what ``llama_4_scaling_beta`` makes of their positions."""
    norm, rope = rms_norm(fields), fields.section("rope_parameters") or fields
    beta = rope.optional_number("llama_4_scaling_beta")
    scale = None if beta is None else QueryScaling(beta, rope.integer("original_max_position_embeddings"))
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=None), query_scaling=scale)
    return Stack((Layer(own, mlp(fields), norm),) * layer_count(fields), norm)


def _gguf_values(fields: Fields, head_dim: int) -> dict[str, Any]:
    return {"rope_parameters": {"llama_4_scaling_beta": fields.optional_number("attention.temperature_scale")}}


_ABSENT = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}

_GGUF = Gguf("mistral3", in_pairs=True, values=_gguf_values)

FAMILIES = {"Ministral3ForCausalLM": Family("Ministral 3, Devstral 2", ministral3, _ABSENT, _GGUF)}
