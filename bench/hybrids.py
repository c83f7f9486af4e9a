"""Models with recurrent layers, latents or experts: the same tokens with drafts or without, in any company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.engines import Bench
from bench.gpu import steps
from bench.gpu.worker import Task
from bench.made import paged
from bench.shapes import ModelShape
from foresay.drafters.self_draft import SelfDrafter
from foresay.kvpaging import PagePool
from foresay.server.engine.parameters import state_pages
from foresay.server.settings.config import EngineConfig
from foresay.spec.names import NGRAM, NONE, SELF
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.recurrences import DECAYS
from foresay.verifier.model.weights import allocate, destinations
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
#: The drafter, the tree, captured or not, requests at once. The copy is the target itself, so all its drafts are right.
WAYS = (
    (NONE, "", True, 1),
    (NONE, "", True, 3),
    (SELF, "1,1,1,1", True, 1),
    (SELF, "3,2,1", True, 3),
    (NGRAM, "1,1,1,1", True, 1),
)


@dataclass(slots=True)
class Hybrid(Bench):
    """One of :data:`MODELS`, random. fields: its configuration."""

    fields: dict[str, Any] | None = None

    def _model(self, pool: PagePool, shape: ModelShape, name: str) -> ModelRunner:
        config = ModelConfig.of(Fields(self.fields or {}, "made"))
        weights = allocate(config, self.device.dtype, self.device.torch)
        for part, into in destinations(config, weights):
            assert isinstance(into, Tensor), "nothing is quantised"
            if into.dim() == 1:
                into.uniform_(0.5, 1.5).mul_(-1 if part.endswith(DECAYS) else 1)
            else:
                into.normal_(std=into.shape[-1] ** -0.5)
        if config.stack.recurrence is not None:
            pool.attach_states(*state_pages(EngineConfig(max_seqs=4), True))
        return paged(pool, Decoder(config, weights, self.positions), self.device)

    def _made(self, name: str) -> Any:
        if name != SELF:
            return Bench._made(self, name)
        copy = ModelRunner(self.target.decoder, self.target.store, self.target.max_positions)
        return SelfDrafter(copy, dynamic=False)


def same(task: Task) -> None:
    """The tokens of plain decoding, op by op, in every way."""
    pair = next(iter(task.settings.pairs.values()))  # only the heads of Llama's shapes read it
    for model, fields in MODELS.items():
        steps.same(task, Hybrid(task.device, pair, 2048, fields=fields), WAYS, model=model)
