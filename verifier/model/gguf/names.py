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
_THERE = {ours: theirs for theirs, ours in _IN_LAYERS.items()}
#: By what the rotary embedding's periods are multiplied, one for each pair.
FREQUENCIES = "rope_freqs.weight"


def ours(name: str) -> str:
    """The name here; one that nothing here has stays what it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is None or layer[2] not in _IN_LAYERS:
        return _WHOLE.get(name, name)
    return f"model.layers.{layer[1]}.{_IN_LAYERS[layer[2]]}.{layer[3]}"


def theirs(name: str) -> str:
    """The name there."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    if layer is None or layer[2] not in _THERE:
        return {there: here for here, there in _WHOLE.items()}.get(name, name)
    return f"blk.{layer[1]}.{_THERE[layer[2]]}.{layer[3]}"
