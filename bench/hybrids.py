"""Models with recurrent layers, latents or experts: the same tokens with drafts or without, in any company; and steps
of published ones' layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.engines import Bench
from bench.gpu import steps
from bench.gpu.worker import Task
from bench.made import paged, random_decoder
from bench.shapes import ModelShape
from foresay.drafters.self_draft import SelfDrafter
from foresay.kvpaging import PagePool, StatePages
from foresay.server.engine.parameters import state_pages
from foresay.server.settings.config import EngineConfig
from foresay.spec.names import NGRAM, NONE, SELF
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.quantization_config import read_quantization
from foresay.verifier.model_runner import ModelRunner

#: Few layers whose heads are as wide as published ones; the vocabulary of the bundled models.
_ALL = {"vocab_size": 4096, "hidden_size": 512, "max_position_embeddings": 1024, "tie_word_embeddings": False}
_ALL |= {"num_hidden_layers": 4, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Gated DeltaNet": _ALL
    | {"architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "Mamba-2": _ALL
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
        "num_local_experts": 0, "shared_intermediate_size": 1024, "mamba_d_conv": 4,
    },
    "experts": _ALL
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 256, "norm_topk_prob": True,
    },
    "latents": _ALL
    | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 20, "kv_lora_rank": 512, "q_lora_rank": 256,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "first_k_dense_replace": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 256,
    },
}  # fmt: skip
_MIXTURE = {"norm_topk_prob": True, "tie_word_embeddings": False, "max_position_embeddings": 4096}
#: Some layers of published models, by their configurations.
STACKS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _MIXTURE
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "gpt-oss": _MIXTURE
    | {
        "architectures": ["GptOssForCausalLM"], "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    },
    "GLM-4.7-Flash": _MIXTURE
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 154_880, "hidden_size": 2048,
        "intermediate_size": 10_240, "num_hidden_layers": 4, "num_attention_heads": 20, "num_key_value_heads": 20,
        "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
    },
    "Qwen3.5-9B": {
        "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248_320, "hidden_size": 4096, "num_hidden_layers": 4,
        "intermediate_size": 12_288, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
#: As :data:`bench.gpu.steps.WAYS`. The copy is the target itself, so all its drafts are right.
WAYS: tuple[steps.Way, ...] = (
    (NONE, "", True, (0,), 0),
    (NONE, "", True, (0, 3, 1), 5),
    (SELF, "1,1,1,1", True, (0,), 0),
    (SELF, "3,2,1", True, (0, 1, 2), 0),
    (NGRAM, "1,1,1,1", True, (0,), 0),
)


@dataclass(slots=True)
class Hybrid(Bench):
    """One of :data:`MODELS` or :data:`STACKS`, random. fields: its configuration."""

    fields: dict[str, Any] | None = None

    def _model(self, pool: PagePool, shape: ModelShape, name: str) -> ModelRunner:
        fields = Fields(self.fields or {}, "made")
        config = replace(ModelConfig.read(fields), quantization=read_quantization(fields))
        decoder = random_decoder(self.device, config, self.positions)
        if config.stack.recurrence is not None:
            pool.attach(StatePages(*state_pages(EngineConfig(max_seqs=4), True), pool.page_size))
        return paged(pool, decoder, self.device)

    def _made(self, name: str) -> Any:
        if name != SELF:
            return Bench._made(self, name)
        copy = ModelRunner(self.target.decoder, self.target.store, self.target.max_positions)
        return SelfDrafter(copy)


def hybrid_of(task: Task, fields: dict[str, Any]) -> Hybrid:
    """A model by its configuration."""
    pair = next(iter(task.settings.pairs.values()))  # only the heads of Llama's shapes read it
    return Hybrid(task.device, pair, 2048, fields=fields)


def same(task: Task) -> None:
    """The tokens of plain decoding, op by op, in every way, of the model in the step's name."""
    model = task.name.removeprefix("hybrid ")
    steps.same(task, hybrid_of(task, MODELS[model]), WAYS, model=model)


def stack(task: Task) -> None:
    """Steps of a few rows of some layers of a published model, the one in the step's name."""
    fields = STACKS[task.name.removeprefix("stack ")]
    narrower = {name: size for name, size in task.settings.narrowed.items() if name in fields}
    steps.passes(task, hybrid_of(task, fields | narrower))
