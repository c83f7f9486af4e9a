"""Tiny random checkpoints of every supported family, written by transformers, the oracle of the tests.

Their weights are scaled for lively logits: the softmax is neither flat nor one-hot, at every position, so that a wrong
mask, rotation or residual shows in the logits and sampled text does not repeat itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    MuseGlimmerTextConfig,
    MuseGlimmerVisionConfig,
    NemotronConfig,
    NemotronForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
SMOLLM = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "tie_word_embeddings": True}

GEMMA3 = {
    "head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {**LINEAR, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
#: Full layers have wider heads, fewer of keys, whose product is the values; two layers read the keys of others.
GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "eos_token_id": [2, 5],
}
#: Layers have embeddings of their own, of which some tokens are of no text; and experts beside their MLPs, of other
#: widths than these.
GEMMA4_EMBEDDED = {
    **GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320,
}  # fmt: skip
GEMMA4_MOE = {
    **GEMMA4, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "enable_moe_block": True, "num_experts": 8,
    "top_k_experts": 3, "moe_intermediate_size": 96,
}  # fmt: skip
#: All layers have keys and values of their own, and the kind of head that MLPs of one width follow.
GEMMA4_UNIFIED = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}

GEMMA2 = {
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 0.7,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
OLMO3 = {
    "sliding_window": 24,
    "layer_types": MIXED,
    "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
}
MINISTRAL = {
    "head_dim": 32,
    "rope_parameters": {
        **YARN,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GLM4 = {
    "head_dim": 32,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
HUNYUAN = {
    "head_dim": 32,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0},
}
NEMOTRON = {
    "attention_bias": True,
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
#: Recurrent layers with two heads to a key; a quarter of each head is rotated.
QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SHARING = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}
LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "block_multiple_of": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
LFM2_MOE = {
    "layer_types": LFM2["layer_types"], "conv_L_cache": 3, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 96, "num_dense_layers": 1, "routed_scaling_factor": 1.3,
}  # fmt: skip
#: Mamba-2 layers with two heads to a key, without positions; with experts next to the MLP, and without.
GRANITE_HYBRID = {
    **GRANITE,
    "attention_bias": False,
    "mlp_bias": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "position_embedding_type": None,
}
#: Layers of one thing each.
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "num_hidden_layers": 5,
    "head_dim": 32,
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
}
NEMOTRON_H_MOE = {
    **NEMOTRON_H,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 128,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
}
#: Every factor is another one; heads' output is not normalised.
FALCON_H1 = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_norm_before_gate": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.55,
    "mlp_multipliers": [0.7, 0.6],
    "ssm_multipliers": [0.9, 0.5, 0.75, 1.1, 0.65],
}
#: Mixtures: experts are narrower than the model is wide, and one layer has none.
QWEN3_MOE = {
    "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "norm_topk_prob": True,
    "mlp_only_layers": [1],
}  # fmt: skip
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}
GLM4_MOE = {
    **GLM4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.8, "use_qk_norm": True,
}  # fmt: skip
#: Latents: all widths differ, and queries of one family are narrowed first.
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
IN_GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
MSCALE = {**YARN, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.8}
GPT_OSS = {
    **LOCAL,
    "head_dim": 32,
    "sliding_window": 24,
    "layer_types": MIXED,
    "rope_parameters": {**YARN, "original_max_position_embeddings": 16, "truncate": False},
}


def muse_config(**values: Any) -> MuseGlimmerConfig:
    """A model of texts and images: its texts' part is of these values."""
    kept = {key: values.pop(key) for key in ("architectures", "dtype") if key in values}
    inside = MuseGlimmerTextConfig(**values)
    images = MuseGlimmerVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, pos_emb_height=4,
        pos_emb_width=4,
    )  # fmt: skip
    return MuseGlimmerConfig(
        text_config=inside, vision_config=images, out_hidden_size=64, projector_hidden_size=32, **kept
    )


# Configuration class, model class, what differs from SHAPE.
FAMILIES: dict[str, tuple[Callable[..., Any], type[Any], dict[str, Any]]] = {
    "llama2": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama_yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama_bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "smollm": (LlamaConfig, LlamaForCausalLM, SMOLLM),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24, "head_dim": 32}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 24}),
    "phi4_mini": (Phi3Config, Phi3ForCausalLM, {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layers": [1, 0, 1]}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA3),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM, GEMMA4),
    "gemma4_embedded": (Gemma4TextConfig, Gemma4ForCausalLM, GEMMA4_EMBEDDED),
    "gemma4_moe": (Gemma4TextConfig, Gemma4ForCausalLM, GEMMA4_MOE),
    "gemma4_unified": (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM, GEMMA4_UNIFIED),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, GEMMA2),
    "granite": (GraniteConfig, GraniteForCausalLM, GRANITE),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM, OLMO3),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM, {"sliding_window": 24, "layer_types": MIXED}),
    "exaone4_whole": (
        Exaone4Config,
        Exaone4ForCausalLM,
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "glm4": (Glm4Config, Glm4ForCausalLM, GLM4),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, {"sliding_window": 24, "layer_types": MIXED, "logit_scale": 0.6}),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM, MINISTRAL),
    "hunyuan": (HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, HUNYUAN),
    "nemotron": (NemotronConfig, NemotronForCausalLM, NEMOTRON),
    "arcee": (ArceeConfig, ArceeForCausalLM, {"mlp_bias": True}),
    "granite_swa": (
        GraniteSWAConfig,
        GraniteSWAForCausalLM,
        {**GRANITE, "sliding_window": 24, "layer_types": MIXED, "layer_rope_theta": [10_000.0, 0, 1e6]},
    ),
    "muse_glimmer": (
        muse_config,
        MuseGlimmerForConditionalGeneration,
        {"head_dim": 32, "sliding_window": 24, "layer_types": MIXED, "layer_rope_theta": [10_000.0, 0, 10_000.0]},
    ),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, QWEN3_5),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**QWEN3_5, **SHARING}),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {**QWEN3_5, **SHARING, "mlp_only_layers": [1], "tie_word_embeddings": False},
    ),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, LFM2),
    "lfm2_moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM, LFM2_MOE),
    "granite_hybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, GRANITE_HYBRID),
    "granite_hybrid_moe": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {**GRANITE_HYBRID, "num_local_experts": 8, "intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM, NEMOTRON_H),
    "nemotron_h_moe": (NemotronHConfig, NemotronHForCausalLM, NEMOTRON_H_MOE),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, FALCON_H1),
    "falcon_h1_norm": (FalconH1Config, FalconH1ForCausalLM, {**FALCON_H1, "mamba_rms_norm": True}),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM, {"head_dim": 32}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {**SHARING, "mlp_only_layers": [1]}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN3_MOE),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {**LOCAL, "head_dim": 32}),
    "granite_moe": (GraniteMoeConfig, GraniteMoeForCausalLM, {**GRANITE, **LOCAL, "mlp_bias": False}),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, GLM4_MOE),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, GPT_OSS),
    "minimax_m2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {
            **LOCAL,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, {**LATENT, **IN_GROUPS, "q_lora_rank": None}),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": MSCALE},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, {**LATENT, "kv_lora_rank": 32, "v_head_dim": 64}),
}


def less_one(model: PreTrainedModel) -> bool:
    """Whether its norms' weights are kept less one."""
    kind = model.config.model_type
    plain = kind == "nemotron_h" or kind.startswith("gemma4")
    return kind.startswith(("gemma", "nemotron", "muse", "qwen3_5", "qwen3_next")) and not plain


def of_heads(tensors: Mapping[str, Tensor], plain: int, value: int) -> dict[str, Tensor]:
    """The same, with the matrices of latent attention's heads apart, [heads, .., ..], those for keys transposed."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith("kv_b_proj.weight")}
    for name in [each for each in tensors if each not in found]:
        keys, values = tensors[name].unflatten(0, (-1, plain + value)).split_with_sizes([plain, value], dim=1)
        found[name.replace("kv_b", "k_b")], found[name.replace("kv_b", "v_b")] = keys.transpose(1, 2), values
    return found


#: Families whose weights are of bf16, as in most published checkpoints: in fp32 a CPU multiplies them as fp16.
OF_BF16 = {"smollm", "qwen3"}


def config_of(family: str, **overrides: Any) -> Any:
    """Its configuration, as transformers has it."""
    config_class, _, differences = FAMILIES[family]
    values = {**SHAPE, **differences, **overrides}
    for by_layer in ("layer_types", "no_rope_layers", "layer_rope_theta"):
        if by_layer in values:
            values[by_layer] = values[by_layer][: values["num_hidden_layers"]]
    if shared := values.get("num_kv_shared_layers"):  # a layer of each kind keeps its own
        values["num_kv_shared_layers"] = min(shared, max(values["num_hidden_layers"] - 2, 0))
    if values.get("rope_parameters") == LONG:
        pairs = values["hidden_size"] // values["num_attention_heads"] * 3 // 8
        values["rope_parameters"] = {
            **LONG,
            "short_factor": [1.0] * pairs,
            "long_factor": [1 + n / 2 for n in range(pairs)],
        }
    return config_class(**values)


def make(family: str, directory: str | Path, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any) -> Any:
    """Save a random checkpoint of ``family``, stored in float32; returns the transformers model, in eval mode.

    overrides: configuration keys, such as ``hidden_size`` or ``sliding_window``.
    """
    model: PreTrainedModel = FAMILIES[family][1](config_of(family, **overrides)).eval()
    randomise(model, seed)
    if family in OF_BF16:
        round_to_bf16(model)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if family == "gemma4":
        model.config.output_hidden_states = True  # transformers expects embeddings of layers where some share keys
    return model


@torch.no_grad()
def round_to_bf16(model: PreTrainedModel) -> None:
    """Leave of every weight what bf16 holds; all stay in float32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter random values of the size at which activations keep theirs from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 4 - 3)
        elif name.endswith("dt_bias"):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 4 - 4)
        elif name.endswith(("linear_attn.norm.weight", "mamba.norm.weight", "mixer.norm.weight")):
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            parameter.copy_(0.5 * noise)
        elif name.endswith(("norm.weight", "norm_f.weight", "_layernorm.weight", "_layernorm_1.weight",
                            "_layernorm_2.weight", "router.scale", "router.per_expert_scale")):  # fmt: skip
            parameter.copy_((0 if less_one(model) else 1) + 0.2 * noise)
        elif name.endswith("bias") or parameter.dim() == 1:
            parameter.copy_(0.3 * noise)
        elif name.endswith(
            ("embed_tokens.weight", "embed_tokens_per_layer.weight", "embeddings.weight", "lm_head.weight")
        ):
            parameter.copy_(2.5 * noise / parameter.shape[1] ** 0.5)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.copy_(0.7 + 0.4 * torch.rand(buffer.shape, generator=generator))
