"""What the tensors of a GGUF file are called here, and which rows lie in another order there."""

from __future__ import annotations

import re

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: What some families' files call theirs.
_OWN = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
#: By what the rotary embedding's periods are multiplied, one for each pair; and LongRoPE's two lists.
FREQUENCIES = "rope_freqs.weight"
FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
#: Tensors that are part of the configuration.
CONFIGURATION = (FREQUENCIES, *FACTORS.values())


def ours(name: str, architecture: str) -> str:
    """The name here; one that nothing here has stays what it is."""
    layer, known = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name), {**_IN_LAYERS, **_OWN.get(architecture, {})}
    if layer is None or layer[2] not in known:
        return _WHOLE.get(name, name)
    return f"model.layers.{layer[1]}.{known[layer[2]]}.{layer[3]}"


def theirs(name: str, architecture: str) -> str:
    """The name there."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    there = {our: their for their, our in {**_IN_LAYERS, **_OWN.get(architecture, {})}.items()}
    if layer is None or layer[2] not in there:
        return {own: their for their, own in _WHOLE.items()}.get(name, name)
    return f"blk.{layer[1]}.{there[layer[2]]}.{layer[3]}"
