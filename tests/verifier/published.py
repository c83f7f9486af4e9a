"""Configurations of published hybrids."""

from __future__ import annotations

from typing import Any

#: As published, with weights in millions by their cards.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Falcon-H1-0.5B-Instruct": (
        521.4,
        {
            "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048, "key_multiplier": 0.39062499999999994,
            "lm_head_multiplier": 0.0390625, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
            "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
            "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False, "mlp_bias": False,
            "max_position_embeddings": 16384, "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": False,
            "rms_norm_eps": 1e-5, "rope_theta": 1e11, "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
            "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "vocab_size": 32784,
        },
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        31577.9,
        {
            "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "conv_kernel": 4, "expand": 2,
            "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "layer_norm_epsilon": 1e-5,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_head_dim": 64,
            "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "mlp_bias": False,
            "max_position_embeddings": 262144, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
            "num_hidden_layers": 52, "num_key_value_heads": 2, "rope_theta": 10000, "routed_scaling_factor": 2.5,
            "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "topk_group": 1,
            "torch_dtype": "bfloat16", "use_bias": False, "use_conv_bias": True, "vocab_size": 131072,
        },
    ),
}  # fmt: skip
