"""LFM2 and LFM2.5 (dense): most layers are short convolutions."""

from __future__ import annotations

from typing import Any

from foresay.verifier.model.families.family import Family, Gguf, attention, layer_count, mlp
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.nodes import Attention, HeadNorm, Layer, Stack
from foresay.verifier.model.products import NormKind
from foresay.verifier.model.recurrences import ShortConv
from foresay.verifier.model.rope_config import read_rope

#: How many numbers kernels process at once.
_LANES = 16


def lfm2(fields: Fields) -> Stack:
    """Heads are normalised before they are rotated; convolutions have no biases."""
    fields.refuse("conv_bias")
    norm, hidden = NormKind(fields.number("norm_eps", 1e-5)), fields.integer("hidden_size")
    if hidden % _LANES:
        raise fields.error(f"hidden_size {hidden} must be a multiple of {_LANES}")
    full = attention(fields, read_rope(fields), norm=HeadNorm(norm))
    short = ShortConv(hidden, fields.integer("conv_L_cache", 3, minimum=2, most=64))
    kinds: dict[str, Attention | ShortConv] = {"full_attention": full, "conv": short}
    inner = mlp(Fields({**fields.values, "intermediate_size": _inner(fields)}, fields.where))
    stack = Stack(tuple(Layer(kinds[name], inner, norm) for name in _layer_types(fields)), norm)
    if not stack.attentions:
        raise fields.error("layer_types must list a layer of full_attention")
    return stack


def _layer_types(fields: Fields) -> list[str]:
    layers, full = layer_count(fields), fields.get("full_attn_idxs")
    absent = ["full_attention" if full is None or layer in full else "conv" for layer in range(layers)]
    names = absent if fields.get("layer_types") is None else fields.get("layer_types")
    if not isinstance(names, list) or len(names) != layers or not set(names) <= {"conv", "full_attention"}:
        raise fields.error(f"layer_types must list conv or full_attention for {layers} layers: {names!r}")
    return names


def _inner(fields: Fields) -> int:
    """The inner width: two thirds of the given one, times a number, rounded up to a multiple of another, unless it is
    final."""
    inner = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    multiple = fields.integer("block_multiple_of", 256)
    return -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3)) // multiple) * multiple


def _of_gguf(fields: Fields, head_dim: int) -> dict[str, Any]:
    heads = fields.get("attention.head_count_kv")
    kinds = [("conv", "full_attention")[bool(each)] for each in heads] if isinstance(heads, list) else None
    return {
        "layer_types": kinds,
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


_NAMES = {
    "token_embd_norm.weight": "model.norm.weight",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
#: transformers omits ``tie_word_embeddings`` if it is true.
_DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 1e6}
FAMILIES = {"Lfm2ForCausalLM": Family("LFM2, LFM2.5 (dense)", lfm2, _DEFAULTS, Gguf("lfm2", _NAMES, values=_of_gguf))}
