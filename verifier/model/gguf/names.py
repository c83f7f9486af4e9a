"""What the tensors of a GGUF file are called here, and which rows lie in another order there."""

from __future__ import annotations

import re

from foresay.verifier.model import families
from foresay.verifier.model.families.family import Gguf

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
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
#: Its names of families' files, and what each family is called in config.json. Llama's is Mistral's too.
ARCHITECTURES = {
    family.gguf.architecture: name for name, family in reversed(families.FAMILIES.items()) if family.gguf is not None
}
#: By what the rotary embedding's periods are multiplied, one for each pair; and LongRoPE's two lists.
FREQUENCIES = "rope_freqs.weight"
FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
#: Tensors that are part of the configuration.
CONFIGURATION = (FREQUENCIES, *FACTORS.values())


def gguf_of(architecture: str) -> Gguf:
    """What is known of its files."""
    found = families.FAMILIES[ARCHITECTURES[architecture]].gguf
    assert found is not None, "it is one of those that have files"
    return found


def _in_layers(architecture: str) -> dict[str, str]:
    own = gguf_of(architecture).names if architecture in ARCHITECTURES else {}
    return {**_IN_LAYERS, **own}


def ours(name: str, architecture: str) -> str:
    """The name here; one that nothing here has stays what it is."""
    layer, known = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name), _in_layers(architecture)
    if layer is None or layer[2] not in known:
        return _WHOLE.get(name, name)
    return f"model.layers.{layer[1]}.{known[layer[2]]}.{layer[3]}"


def theirs(name: str, architecture: str) -> str:
    """The name there."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", name)
    there = {our: their for their, our in _in_layers(architecture).items()}
    if layer is None or layer[2] not in there:
        return {own: their for their, own in _WHOLE.items()}.get(name, name)
    return f"blk.{layer[1]}.{there[layer[2]]}.{layer[3]}"
