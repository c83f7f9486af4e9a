"""A GGUF file's metadata as the keys of config.json; and the names of its tensors here.

Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from foresay.verifier.model import families
from foresay.verifier.model.errors import UnsupportedArchitecture
from foresay.verifier.model.families.family import Gguf
from foresay.verifier.model.families.layer_extras import IN_BLOCKS
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.gguf.file import BF16, F16, F32, SCHEMES, GgufFile, GgufTensor, Type
from foresay.verifier.model.layers import Stack
from foresay.verifier.model.per_layer import PROJECTION

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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
#: GGUF's names of architectures, and their names in config.json. Llama's is also used for Mistral.
ARCHITECTURES = {
    architecture: name
    for name, family in reversed(families.FAMILIES.items())
    if family.gguf is not None
    for architecture in (family.gguf.mixture, family.gguf.architecture)
    if architecture
}
#: The factors of the rotary embedding's periods, one for each pair; and LongRoPE's two lists.
FREQUENCIES = "rope_freqs.weight"
FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
#: Layers that predict further tokens (MTP), for a drafter: the keys of their number in config.json and in files, their
#: names here, and their names there, except for the tensors of every layer.
PREDICTED, _BEHIND = "mtp_num_hidden_layers", "nextn_predict_layers"
PREDICTS = "mtp."
_FURTHER = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head",
}
#: Suffixes of the names of convolutions.
CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
#: The suffix of tensors with two dimensions in files and one here.
_FLAT = (".mamba.A_log", ".mamba.D", ".mamba.norm.weight")
#: Tensors that are part of the configuration.
CONFIGURATION = (FREQUENCIES, *FACTORS.values())


def gguf_of(architecture: str) -> Gguf:
    """The description of an architecture's files."""
    found = families.FAMILIES[ARCHITECTURES[architecture]].gguf
    assert found is not None, "it is one of those that have files"
    return found


def _in_layers(architecture: str) -> dict[str, str]:
    own = gguf_of(architecture).names if architecture in ARCHITECTURES else {}
    return {**_IN_LAYERS, **own}


def layer_count(file: GgufFile) -> int:
    """The number of the model's layers, without MTP layers after them."""
    fields, keys = Fields(file.metadata, str(file.path)), ("block_count", _BEHIND)
    count, more = (fields.integer(f"{file.architecture}.{key}", 0, minimum=0) for key in keys)
    return count - more


def ours(name: str, file: GgufFile) -> str:
    """The name here; an unknown one is unchanged."""
    layer, known = re.fullmatch(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias)?", name), _in_layers(file.architecture)
    if layer is None:
        return {**_WHOLE, **known}.get(name, name)
    number, kind = int(layer[1]) - layer_count(file), layer[3] or ""
    if number >= 0 and layer[2] in _FURTHER:
        return f"{PREDICTS}{_FURTHER[layer[2]]}{kind}"
    within = known.get(layer[2] + kind) or (f"{known[layer[2]]}{kind}" if layer[2] in known else None)
    begun = f"{PREDICTS}layers.{number}" if number >= 0 else f"model.layers.{layer[1]}"
    return name if within is None else f"{begun}.{within}"


def theirs(name: str, file: GgufFile) -> str:
    """The name there."""
    layer = re.fullmatch(r"(model|mtp)\.layers\.(\d+)\.([\w.]+?)(\.weight|\.bias)?", name)
    behind, there = layer_count(file), _theirs({**_WHOLE, **_in_layers(file.architecture)})
    if layer is None:
        module, _, kind = name.removeprefix(PREDICTS).rpartition(".")
        if name.startswith(PREDICTS) and module in _FURTHER.values():
            return f"blk.{behind}.{_theirs(_FURTHER)[module]}.{kind}"
        return there.get(name, name)
    kind = layer[4] or ""
    within = there.get(layer[3] + kind) or (f"{there[layer[3]]}{kind}" if layer[3] in there else None)
    number = int(layer[2]) + behind * (layer[1] == "mtp")
    return name if within is None else f"blk.{number}.{within}"


def _theirs(names: Mapping[str, str]) -> dict[str, str]:
    return {our: their for their, our in names.items()}


def shape_of(name: str, tensor: GgufTensor) -> tuple[int, ...]:
    """The shape here: a convolution of each channel by itself has a dimension more, and a gate of one row."""
    if name.endswith(_FLAT):
        return (math.prod(tensor.shape),)
    outer, *inner = tensor.shape
    if name.endswith(".shared_expert_gate.weight"):
        return 1, outer, *inner
    return (outer, 1, *inner) if name.endswith(CONVOLUTIONS) else tensor.shape


EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_DTYPES = {F16: "float16", BF16: "bfloat16"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """The values of config.json. Raises ConfigError for unsupported models."""
    fields = _own_fields(file)
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = _head_dim(fields, hidden // heads)
    tied, own = HEAD not in file.tensors, gguf_of(file.architecture).values(fields, head_dim)
    values = {
        "architectures": [_architecture(file, fields)],
        "vocab_size": _vocab_size(file, fields),
        "hidden_size": hidden,
        "intermediate_size": None if "intermediate_size" in own else _inner(fields),
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.get("expert_shared_feed_forward_length"),
        "num_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "num_hidden_layers": layer_count(file),
        PREDICTED: fields.get(_BEHIND),
        "num_attention_heads": heads,
        "num_key_value_heads": None if "num_key_value_heads" in own else _one(fields, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _rms_epsilon(fields),
        "max_position_embeddings": fields.integer("context_length"),
        "tie_word_embeddings": tied,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors or "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "linear_rates_apart": "blk.0.attn_gate.weight" in file.tensors,
        "attention_k_eq_v": any(
            name.replace("_k.", "_v.") not in file.tensors for name in file.tensors if ".attn_k." in name
        ),
        "vocab_size_per_layer_input": (table := file.tensors.get("per_layer_token_embd.weight")) and table.shape[0],
        IN_BLOCKS: table is not None and table.type.numbers > 1,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": fields.get("attention.sliding_window"),
        "layer_types": _kinds(fields),
        "dtype": _dtype(file),
        "rope_parameters": {
            "rope_theta": fields.number("rope.freq_base", 10_000.0),
            **_scaling(file, fields, head_dim),
            **_rotated(fields, head_dim),
        },
    }
    for key, value in own.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    values["rope_parameters"] = _by_kind(fields, values)
    types = {ours(name, file).removesuffix(".weight"): tensor.type for name, tensor in file.tensors.items()}
    family = families.FAMILIES[values["architectures"][0]]
    stack = family.stack(Fields({**family.defaults, **values}, fields.where))
    head = "lm_head" if not tied else ours(EMBEDDING, file)
    rules = list(_rules(stack, hidden, types, head))
    if rules:
        values["quantization_config"] = {"quant_method": "gguf", "modules": rules}
    return values


def _kinds(fields: Fields) -> list[str] | None:
    """config.json's ``layer_types``, if a file states for each layer whether it has a sliding window."""
    slides = fields.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        return None
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _by_kind(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding; in some families sliding-window layers have their own."""
    rope: dict[str, Any] = values["rope_parameters"]
    local = values.pop("rope_local_base_freq", None)
    if local is not None:
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    if fields.get("rope.freq_base_swa") not in (None, rope["rope_theta"]):
        raise fields.error("rope.freq_base_swa is not supported for this architecture")
    return rope


def _own_fields(file: GgufFile) -> Fields:
    """The keys of the architecture, without its name."""
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedArchitecture(architecture, ARCHITECTURES, str(file.path))
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): each for key, each in file.metadata.items() if key.startswith(prefix)}
    fields = Fields(own, f"{file.path}, {architecture}")
    shared = () if gguf_of(architecture).shared else ("expert_shared_count", "expert_shared_feed_forward_length")
    fields.refuse(*shared)
    if fields.integer("expert_group_count", 1, minimum=0) > 1 and "exp_probs_b.bias" not in gguf_of(architecture).names:
        raise fields.error("expert_group_count: groups of experts are not supported for this architecture")
    return fields


def _architecture(file: GgufFile, fields: Fields) -> str:
    """Files named Llama may be Mistral's, and those named OLMo 2 OLMo 3's, if they have a window; or Mixtral's."""
    windowed, mixture = bool(fields.get("attention.sliding_window")), bool(fields.get("expert_count"))
    of = [(name, own.gguf) for name, own in families.FAMILIES.items()]
    alike = [(name, own) for name, own in of if own and file.architecture in (own.architecture, own.mixture)]
    if not any(own.experts in (mixture, None) for _, own in alike):
        what = "mixtures of experts are not" if mixture else "models without experts are not"
        raise fields.error(f"expert_count: {what} supported for this architecture")
    found = [name for name, own in alike if own.experts in (mixture, None) and (own.windowed or not windowed)]
    if not found:
        raise fields.error("attention.sliding_window is not supported for this architecture")
    return found[-1] if windowed else found[0]


def _head_dim(fields: Fields, absent: int) -> int:
    if fields.get("attention.kv_lora_rank") is not None:
        return fields.integer("rope.dimension_count")  # of a latent, and the numbers next to it that are rotated
    found = fields.integer("attention.key_length", absent)
    if fields.integer("attention.value_length", found) != found:
        raise fields.error(f"attention.value_length that differs from the keys' length {found} is not supported")
    return found


def _inner(fields: Fields) -> Any:
    """The inner width of an MLP; None if a mixture has none."""
    key = "feed_forward_length"
    return fields.get(key) if fields.get("expert_count") else _one(fields, key, None)


def _one(fields: Fields, key: str, absent: int | None) -> int:
    """A number that may be listed by layer, if all are the same except for 0, in layers without it."""
    found = fields.get(key)
    if isinstance(found, list) and len(kinds := set(found) - {0}) == 1:
        (found,) = kinds
    return Fields({key: found}, fields.where).integer(key, absent)


def _rms_epsilon(fields: Fields) -> float | None:
    """The epsilon of RMS norms; None for families with another kind of norm."""
    key = "attention.layer_norm_rms_epsilon"
    return None if fields.get("attention.layer_norm_epsilon") is not None else fields.number(key)


def _vocab_size(file: GgufFile, fields: Fields) -> int:
    """The vocabulary size, from the embedding's shape."""
    if EMBEDDING not in file.tensors:
        raise fields.error(f"{EMBEDDING} is missing from the file")
    return file.tensors[EMBEDDING].shape[0]


def _dtype(file: GgufFile) -> str:
    """The dtype of all matrices, if it is one 16-bit type."""
    matrices = ((ours(name, file), tensor) for name, tensor in file.tensors.items() if ".ffn_gate_inp" not in name)
    found = {tensor.type for name, tensor in matrices if len(shape_of(name, tensor)) > 1}  # routers stay fp32
    return _DTYPES.get(found.pop(), "float32") if len(found) == 1 else "float32"


def _rotated(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The share of a head that is rotated."""
    rotated = fields.integer("rope.dimension_count", head_dim)
    return {"partial_rotary_factor": rotated / head_dim} if rotated != head_dim else {}


def _long(file: GgufFile, fields: Fields) -> dict[str, Any]:
    """LongRoPE's two lists of factors."""
    original, scale = fields.integer("rope.scaling.original_context_length"), "rope.scaling.attn_factor"
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "attention_factor": fields.optional_number(scale),
        **{key: file.floats(name) for key, name in FACTORS.items()},
    }


def _scaling(file: GgufFile, fields: Fields, head_dim: int) -> dict[str, Any]:
    """How the rotary embedding is scaled. Llama 3's scaling is a tensor of factors."""
    if FACTORS["long_factor"] in file.tensors:
        return _long(file, fields)
    if FREQUENCIES in file.tensors:
        factors = file.floats(FREQUENCIES)
        if len(factors) != head_dim // 2:
            raise fields.error(f"{FREQUENCIES} has {len(factors)} numbers, expected {head_dim // 2}")
        turning = factors.count(1.0)
        if 0 < turning < len(factors) and min(factors[turning:]) >= _STILL:
            return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
        return {"rope_type": "factors", "factors": factors}
    kind = fields.get("rope.scaling.type") or "none"
    factor = fields.optional_number("rope.scaling.factor") or fields.optional_number("rope.scale_linear") or 1.0
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    more = [key for key in _YARN_BEYOND if fields.get(f"rope.scaling.{key}") not in (None, 0.0, 1.0)]
    if more:
        raise fields.error(f"rope.scaling.{more[0]} is not supported")
    if kind != "yarn":
        raise fields.error(f"rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    values = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if (found := fields.optional_number(f"rope.scaling.yarn_{key}")) is not None:
            values[key] = found
    if (share := fields.get("rope.scaling.yarn_log_multiplier")) not in (None, 0.0):
        values |= {"mscale": 1.0, "mscale_all_dim": share}
    return values


#: A factor with which a pair does not turn: Gemma 4's files have 1e30 for those that have no frequency.
_STILL = 1e29
#: llama.cpp's extensions of YaRN.
_YARN_BEYOND = ("yarn_ext_factor", "yarn_attn_factor", "attn_factor")


def _rules(stack: Stack, hidden: int, types: Mapping[str, Type], head: str) -> Iterator[list[Any]]:
    """Patterns of module names with the types of the matrices fused there; none if all are floats."""
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for number, layer in enumerate(stack.layers):
        for product in layer.products(hidden):
            stacks = (one.name.removesuffix(".weight") for one in product.stacked if one.holds == "weight")
            there = [each for each in stacks if f"model.layers.{number}.{each}" in types] or list(product.rows)
            kinds = {types.get(f"model.layers.{number}.{module}", F32).name for module in there}
            found.setdefault((tuple(product.rows), tuple(sorted(kinds))), []).append(str(number))
    for (modules, together), where in found.items():
        if SCHEMES.keys() >= set(together):
            pattern = "|".join(dict.fromkeys(_EXPERT.sub(r"\\.\\d+\\.", re.escape(module)) for module in modules))
            yield [rf"re:model\.layers\.(?:{'|'.join(where)})\.(?:{pattern})$", list(together)]
    for module, called in ((PROJECTION, PROJECTION), (head.removesuffix(".weight"), "lm_head")):
        kind = types.get(module, F32).name
        if kind in SCHEMES:
            yield [called, [kind]]


#: An expert's number in an escaped name of a module.
_EXPERT = re.compile(r"\\\.\d+\\\.")


def end_tokens(file: GgufFile) -> list[int]:
    """The end tokens: those in the metadata, and control tokens with known names of end tokens."""
    tokens, types = tokens_of(file), tokens_of(file, "token_type")
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = [each for each in named if type(each) is int]
    ends, typed = {_CONTROL: _ENDS, _USER: _SHOWN_ENDS}, zip(tokens, types, strict=False)
    found = {token: index for index, (token, kind) in enumerate(typed) if token in ends.get(kind, ())}
    if found.keys() >= _OF_MESSAGES:
        del found["<|end|>"]
    ids += found.values()
    return list(dict.fromkeys(ids))


_CONTROL, _USER = 3, 4
#: Ends that llama.cpp's converter makes ordinary tokens, since its parsers read them.
_SHOWN_ENDS = {"<|tool_response>"}
#: If all of these exist, the last one ends a message, not the text (gpt-oss).
_OF_MESSAGES = {"<|return|>", "<|call|>", "<|end|>"}
#: The same list as llama.cpp's.
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "</s>",
    "<EOT>", "_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>",
    "<turn|>", *_SHOWN_ENDS,
}  # fmt: skip


def tokens_of(file: GgufFile, what: str = "tokens") -> list[Any]:
    """All tokens, or their types, by their ids."""
    found = file.metadata.get(f"tokenizer.ggml.{what}")
    return found if isinstance(found, list) else []
