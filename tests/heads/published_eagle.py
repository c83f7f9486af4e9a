"""Random EAGLE heads for a target, written as each of the published layouts has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from foresay.verifier.model.decoder import Decoder
from tests.heads.plain import PlainEagle, Weights
from tests.heads.writing import noise, output_matrix, write_config, write_weights
from tests.verifier.families import LLAMA3


@dataclass(frozen=True)
class Layout:
    """How one kind of checkpoint differs.

    first: how the first layer's tensors begin. config: where the layer's own keys stand. vocab: the whole one or half.
    head: where the output matrix is. norms: EAGLE-1's three further ones. keys: of the layer's configuration; unsaid:
    keys that the file leaves out. stated: what config.json says besides. renamed: tensor names after all else.
    """

    first: str = "midlayer."
    config: Literal["flat", "eagle_config", "nested"] = "flat"
    generation: int = 3
    file: str = "model.safetensors"
    vocab: Literal["half", "whole"] = "half"
    embed: Literal["target", "own"] = "target"
    head: Literal["own", "tied", "target"] = "own"
    layers: int = 1
    biases: bool = False
    qk_norm: bool = False
    norms: bool = False
    aux: bool = True
    prefix: str = ""
    flags: dict[str, bool] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()
    stated: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


def _eagle1(**changes: Any) -> Layout:
    return Layout(**{"first": "layers.0.", "generation": 1, "vocab": "whole", "head": "target", **changes})


_SPECULATORS1 = {
    "first": "transformer.",
    "config": "nested",
    "renamed": {
        "fc.weight": "fusion_fc.weight",
        "fc.bias": "fusion_fc.bias",
        "fused_layernorm.weight": "transformer.input_layernorm.weight",
    },
}
_SPECULATORS_FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
LAYOUTS = {
    "safeailab": Layout(),
    # The authors' head for Vicuna 13B: one layer, and a configuration that claims 40.
    "miscounted": Layout(file="pytorch_model.bin", stated={"num_hidden_layers": 40}),
    "rope_scaled": Layout(keys={"rope_scaling": LLAMA3}),
    "rope_linear": Layout(keys={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "specforge": Layout(config="eagle_config", flags={"fc_norm": True}),
    "biased": Layout(config="eagle_config", biases=True, prefix="model.", file="sharded"),
    "final_state": Layout(config="eagle_config", aux=False),
    "wide_vocab": Layout(vocab="whole"),
    "tied": Layout(vocab="whole", embed="own", head="tied", keys={"tie_word_embeddings": True}),
    "target_output": Layout(vocab="whole", head="target", stated={"draft_vocab_size": None}),
    "speculators": Layout("layers.0.", "nested"),
    "speculators_norms": Layout("layers.0.", "nested", embed="own", flags=_SPECULATORS_FLAGS),
    "speculators_qwen3": Layout(
        "layers.0.", "nested", qk_norm=True, keys={"model_type": "qwen3", "head_dim": 128}, unsaid=("head_dim",)
    ),
    "two_layers": Layout("layers.0.", "nested", layers=2, qk_norm=True),
    "peagle": Layout("layers.0.", "nested", layers=2, stated={"speculators_model_type": "peagle", "mask_token_id": 7}),
    "eagle1": _eagle1(),
    "eagle1_pickle": _eagle1(file="pytorch_model.bin"),
    "hass": _eagle1(file="pytorch_model.bin", embed="own", stated={"bias": True}),
    "speculators_eagle1": _eagle1(**_SPECULATORS1, stated={"fusion_bias": True}),
    "speculators_eagle1_norms": _eagle1(**_SPECULATORS1, norms=True, stated={"layernorms": True}),
    "ttt": _eagle1(
        norms=True,
        renamed={
            "embedding_layernorm.weight": "embed_layernorm.weight",
            "fused_layernorm.weight": "hidden_layernorm.weight",
            "pre_lm_head_layernorm.weight": "lm_head_layernorm.weight",
        },
    ),
}
EAGLE = list(LAYOUTS)
_OUTSIDE = ("fc", "norm.", "lm_head", "d2t", "t2d", "embed", "input_norm", "fused", "pre_lm", "layers.", "mask_hidden")


def make_eagle(directory: Path, target: Decoder, layout: str, layers: list[int] | None = None) -> PlainEagle:
    """Write the head; returns the same in plain torch. layers: target layers whose inputs it reads."""
    form, generator = LAYOUTS[layout], torch.Generator().manual_seed(11)
    vocab, width = target.config.vocab_size, target.config.hidden_size
    layer = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "intermediate_size": 2 * width,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, **form.keys,
    }  # fmt: skip
    features = (len(layers or []) or 3) if form.aux else 1
    weights = _weights(generator, form, layer, features)
    draft = vocab // 2 if form.vocab == "half" and form.generation == 3 else vocab
    embed, stored = target.embedding, dict(weights)
    if form.embed == "own":
        embed = stored["embed_tokens.weight"] = noise(generator, vocab, width, scale=2.5)
    lm_head = {"tied": embed, "target": output_matrix(target)}.get(form.head)
    if lm_head is None:
        lm_head = stored["lm_head.weight"] = noise(generator, draft, width, scale=2.5)
    if draft < vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft].sort().values
        stored["d2t"] = ids - torch.arange(draft)
        stored["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    write_config(directory, _config(form, layer, draft, layers))
    write_weights(directory, {_name(form, name): tensor for name, tensor in stored.items()}, form.file)
    return PlainEagle(layer, weights, embed, lm_head, form.generation, form.layers, form.flags)


def draft_ids(directory: Path) -> Tensor | None:
    """The target's ids of the draft vocabulary, read from the file."""
    from foresay.verifier.heads.layouts import HeadTensors

    stored = HeadTensors.read(directory).tensors
    d2t = stored.get("d2t", stored.get("model.d2t"))
    return None if d2t is None else torch.arange(len(d2t)) + d2t


def _name(form: Layout, name: str) -> str:
    placed = name if name.startswith(_OUTSIDE) else form.first + name
    return form.prefix + form.renamed.get(placed, placed)


def _weights(generator: torch.Generator, form: Layout, layer: dict[str, Any], features: int) -> Weights:
    """The first layer's by bare names, those above it behind ``layers.1.``, everything random."""
    width = layer["hidden_size"]
    weights: Weights = {}
    if form.generation == 1 or form.aux:
        weights["fc.weight"] = noise(generator, width, features * width if form.generation == 3 else 2 * width)
        weights["fc.weight"] *= 1.5
    if "mask_token_id" in form.stated:
        weights["mask_hidden"] = torch.randn(1, 1, features * width, generator=generator)
    if form.biases or (form.generation == 1 and not form.norms):
        weights["fc.bias"] = 0.3 * noise(generator, width)
    norms = {}
    if form.generation == 3:
        norms = dict.fromkeys(("input_layernorm", "hidden_norm", "norm"), width)
    elif form.norms:
        norms = dict.fromkeys(("embedding_layernorm", "fused_layernorm", "pre_lm_head_layernorm"), width)
    if form.flags.get("norm_before_fc"):
        norms["input_norm"] = features * width
    if form.flags.get("fc_norm"):
        norms |= {f"fc_norm.{index}": width for index in range(features)}
    for number in range(form.layers):
        name = f"layers.{number}." if number else ""
        weights |= {name + key: tensor for key, tensor in _layer(generator, form, layer, number).items()}
        norms |= {f"{name}post_attention_layernorm": width} | ({f"{name}input_layernorm": width} if number else {})
        if form.qk_norm:
            norms |= dict.fromkeys((f"{name}self_attn.q_norm", f"{name}self_attn.k_norm"), layer["head_dim"])
    for key, size in norms.items():
        weights[f"{key}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    return weights


def _layer(generator: torch.Generator, form: Layout, layer: dict[str, Any], number: int) -> Weights:
    width, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    read = 2 * width if form.generation == 3 and not number else width
    shapes = {
        "self_attn.q_proj": (4 * dim, read), "self_attn.k_proj": (2 * dim, read), "self_attn.v_proj": (2 * dim, read),
        "self_attn.o_proj": (width, 4 * dim), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    weights = {f"{name}.weight": noise(generator, *shape, scale=1.5) for name, shape in shapes.items()}
    if form.biases:
        attention = [name for name in shapes if name.startswith("self_attn")]
        weights |= {f"{name}.bias": noise(generator, shapes[name][0], scale=2.0) for name in attention}
    return weights


def _config(form: Layout, layer: dict[str, Any], draft: int, layers: list[int] | None) -> dict[str, Any]:
    declared = {key: value for key, value in layer.items() if key not in form.unsaid}
    chosen = {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
    if form.config == "nested":
        kind, name = ("eagle3", "Eagle3Speculator") if form.generation == 3 else ("eagle", "EagleSpeculator")
        nested = {"speculators_model_type": kind, "architectures": [name], "transformer_layer_config": declared}
        drafts = {"draft_vocab_size": draft, **form.flags, **chosen} if form.generation == 3 else {}
        return {**nested, **drafts, **form.stated}
    declared["num_hidden_layers"] = 1
    if form.generation == 1:
        return {**declared, "architectures": ["LlamaForCausalLM"], **form.stated}
    config = {**declared, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft, **form.flags}
    if form.config == "eagle_config":
        return {**config, "eagle_config": {"use_aux_hidden_state": form.aux, **chosen}, **form.stated}
    return {**config, **chosen, **form.stated}
