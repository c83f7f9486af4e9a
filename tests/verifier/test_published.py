"""Published mixtures by their config.json and the names and shapes of their tensors, made by transformers of the whole
width and a few layers: headers over nothing, for ``foresay check`` reads no more of weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from foresay.verifier.model.checkpoint import Checkpoint, header_names
from foresay.verifier.model.config import ModelConfig, stored_parameters, unused_parameters
from foresay.verifier.model.mtp_layout import mtp_layout
from foresay.verifier.model.weights import check
from tests.heads.test_mtp_layouts import of_each

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
AIR = {
    "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True, "vocab_size": 151552,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
LITE = {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
    "vocab_size": 102400, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V2 = {
    **LITE, "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "q_lora_rank": 1536, "n_group": 8, "topk_group": 3,
    "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
}  # fmt: skip
K2 = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840,
    "rope_parameters": {**YARN, "rope_theta": 5e4, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0,
                        "mscale_all_dim": 1.0},
}  # fmt: skip


class Published(NamedTuple):
    """config, model: transformers'; values: that are not their defaults. billions: of weights, and of those that a row
    meets. layer: which is like that which predicts tokens, called ``sibling``; more: what that has by itself. stacked:
    whether files have a tensor of all experts. wrapped: in a model of texts and images."""

    config: Any
    model: Any
    values: dict[str, Any]
    billions: tuple[float, float]
    layer: int = -1
    sibling: str = ""
    more: tuple[str, ...] = ()
    stacked: bool = False
    wrapped: str = ""


MTP = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
BEHIND = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")
PUBLISHED = {
    "Qwen/Qwen3.6-35B-A3B": Published(
        Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {"rope_parameters": ROPE}, (34.7, 3.4), 3, "mtp.layers.0.", MTP,
        True, "Qwen3_5MoeForConditionalGeneration",
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Published(
        Qwen3NextConfig, Qwen3NextForCausalLM, {"rope_parameters": ROPE}, (79.7, 3.9), 3, "mtp.layers.0.", MTP
    ),
    "zai-org/GLM-4.5-Air": Published(
        Glm4MoeConfig, Glm4MoeForCausalLM, AIR, (106.9, 13.3), 3, "model.layers.4.", BEHIND
    ),
    "zai-org/GLM-4.7-Flash": Published(
        Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, {}, (29.9, 3.9), 3, "model.layers.4.", BEHIND
    ),
    "deepseek-ai/DeepSeek-V2-Lite": Published(DeepseekV2Config, DeepseekV2ForCausalLM, LITE, (15.7, 2.7)),
    "deepseek-ai/DeepSeek-V2": Published(DeepseekV2Config, DeepseekV2ForCausalLM, V2, (235.7, 21.4)),
    "deepseek-ai/DeepSeek-V3": Published(
        DeepseekV3Config, DeepseekV3ForCausalLM, {}, (671.0, 37.5), 3, "model.layers.4.", BEHIND
    ),
    "moonshotai/Kimi-K2-Instruct": Published(DeepseekV3Config, DeepseekV3ForCausalLM, K2, (1026.0, 32.9)),
}  # fmt: skip


def shapes(how: Published, config: Any) -> Iterator[tuple[str, list[int]]]:
    """The tensors, by their names in files."""
    with torch.device("meta"):
        made = how.model(config).state_dict()
    for whole, stack in made.items():
        for name, part in [(whole, stack)] if how.stacked else of_each(whole, stack):
            yield name.replace("model.", "model.language_model.", 1) if how.wrapped else name, list(part.shape)
            if (own := name.removeprefix(f"model.layers.{how.layer}.")) != name:
                yield f"{how.sibling}{own}", list(part.shape)
    prefix, width = how.sibling.removesuffix("layers.0."), config.hidden_size
    for name in how.more:
        norm = "norm" in name
        yield f"{prefix}{name}.weight", [width] if norm else [width, 2 * width]
    if how.wrapped:
        yield "model.visual.patch_embed.proj.weight", [1]


def publish(directory: Path, how: Published) -> dict[str, Any]:
    """A directory of four layers, with fewer of several hundred experts; the values of config.json of all."""
    whole = how.config(**how.values).to_dict()
    values = {**whole, "num_hidden_layers": 4, "layer_types": whole.get("layer_types", [])[:4] or None}
    if whole.get("n_routed_experts", 0) > 128:  # more than a mapping of this machine's memory may hold
        values["n_routed_experts"] = 64
    values["mlp_layer_types"] = whole.get("mlp_layer_types", [])[:4] or None
    at, header = 0, dict[str, Any]()
    for name, shape in shapes(how, how.config(**values)):
        end = at + 2 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (directory / "config.json").write_text(json.dumps(config_of(how, values)))
    return config_of(how, whole)


def config_of(how: Published, values: dict[str, Any]) -> dict[str, Any]:
    if how.wrapped:
        return {"architectures": [how.wrapped], "text_config": values, "eos_token_id": 0}
    return {**values, "architectures": [how.model.__name__]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_fit(tmp_path, name) -> None:
    """And what is next to the target's layers is known to predict further tokens, or left out."""
    how = PUBLISHED[name]
    whole = publish(tmp_path, how)
    config = ModelConfig.from_directory(tmp_path)
    check(Checkpoint.open(tmp_path), config)
    assert (mtp_layout(header_names(tmp_path), config) is not None) == bool(how.more)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_directory(tmp_path)
    stored = stored_parameters(config)
    assert (stored / 1e9, (stored - unused_parameters(config)) / 1e9) == pytest.approx(how.billions, rel=0.02)


LFM2: dict[str, Any] = {
    "num_hidden_layers": 24,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
}

#: As it is published, beside what transformers declares.
MINIMAX: dict[str, Any] = {"rotary_dim": 64}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(Lfm2MoeConfig(**LFM2), (8.3, 1.55)), (MiniMaxM2Config(**MINIMAX), (229.0, 11.0))],
    ids=["LiquidAI/LFM2-8B-A1B", "MiniMaxAI/MiniMax-M2"],
)
def test_sizes_are_those_of_the_cards(tmp_path, config, billions) -> None:
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = ModelConfig.from_directory(tmp_path)
    stored = stored_parameters(found)
    assert (stored / 1e9, (stored - unused_parameters(found)) / 1e9) == pytest.approx(billions, rel=0.03)
