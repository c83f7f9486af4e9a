"""SmolLM3: some layers have no positions."""

from __future__ import annotations

from foresay.verifier.model.families.family import Family, Gguf, attention, biases, layer_count, mlp, rms_norm
from foresay.verifier.model.families.llama import window_by_layer
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import OUTPUT, QKV, Layer, Stack
from foresay.verifier.model.rope_config import read_rope


def _rotated(fields: Fields) -> list[bool]:
    """``no_rope_layers`` has a 1 for each layer that has positions; absent, every fourth has none."""
    marks, layers = fields.get("no_rope_layers"), layer_count(fields)
    if marks is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(marks, list) or len(marks) != layers or not set(marks) <= {0, 1}:
        raise fields.error(f"no_rope_layers must list 0 or 1 for each of {layers} layers, got {marks!r}")
    return list(map(bool, marks))


def smollm3(fields: Fields) -> Stack:
    """SmolLM3."""
    norm, rope, inner = rms_norm(fields), read_rope(fields), mlp(fields, bias=fields.flag("mlp_bias", False))
    has = biases(fields, **{QKV: "attention_bias", OUTPUT: "attention_bias"})
    own = (
        attention(fields, rope if rotated else None, window=seen, biases=has)
        for rotated, seen in zip(_rotated(fields), window_by_layer(fields), strict=True)
    )
    return Stack(tuple(Layer(each, inner, norm) for each in own), norm)


FAMILIES = {
    "SmolLM3ForCausalLM": Family("SmolLM3", smollm3, {"num_key_value_heads": 4}, Gguf("smollm3", in_pairs=True))
}
