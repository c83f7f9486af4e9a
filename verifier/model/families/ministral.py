"""Ministral 3 and Devstral 2: queries grow with their position."""

from __future__ import annotations

from foresay.verifier.model.families.family import Family, attention, layer_count, mlp, rms_norm, uniform_window
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import Layer, Stack
from foresay.verifier.model.rope_config import QueryScaling, read_rope


def ministral3(fields: Fields) -> Stack:
    """Mistral's layers, whose queries are multiplied by what ``llama_4_scaling_beta`` makes of their positions."""
    norm, rope = rms_norm(fields), fields.section("rope_parameters")
    beta = None if rope is None else rope.optional_number("llama_4_scaling_beta")
    scale = None
    if rope is not None and beta is not None:
        scale = QueryScaling(beta, rope.integer("original_max_position_embeddings"))
    own = attention(fields, read_rope(fields), window=uniform_window(fields, absent=None), query_scaling=scale)
    return Stack((Layer(own, mlp(fields), norm),) * layer_count(fields), norm)


_ABSENT = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}

FAMILIES = {"Ministral3ForCausalLM": Family("Ministral 3, Devstral 2", ministral3, _ABSENT)}
