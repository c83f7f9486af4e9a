"""The shapes that are measured: what a step of each of these models costs, without their weights."""

from __future__ import annotations

from dataclasses import dataclass

from bench.inflate import Shape
from verifier.model.config import ModelConfig
from verifier.model.rope_config import RopeConfig

#: The longest context measured, with room for a tree.
POSITIONS = 33_000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes. untied: its head is a matrix of its own. qk_norm: queries and keys are normed by head."""

    name: str
    sizes: Shape
    head_dim: int
    vocab: int
    untied: bool = True
    qk_norm: bool = False

    def config(self, source: ModelConfig, positions: int = POSITIONS) -> ModelConfig:
        """A decoder of this shape that can carry the function of ``source``: its rotation and its norm's eps."""
        sizes = self.sizes
        return ModelConfig(
            architecture="Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM",
            vocab_size=self.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            num_layers=sizes.layers,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=source.rms_norm_eps * source.hidden_size / sizes.hidden,
            tie_word_embeddings=not self.untied,
            attention_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=self.qk_norm,
            sliding_window=None,
            sliding_layers=(False,) * sizes.layers,
            max_positions=positions,
            rope=RopeConfig(source.rope.theta, source.rope.parameters),
            dtype="bfloat16",
            eos_token_ids=source.eos_token_ids,
        )


LLAMA_1B = ModelShape("Llama-3.2-1B", Shape(16, 2048, 32, 8, 8192), 64, 128_256, untied=False)
LLAMA_8B = ModelShape("Llama-3.1-8B", Shape(32, 4096, 32, 8, 14336), 128, 128_256)
QWEN_8B = ModelShape("Qwen3-8B", Shape(36, 4096, 32, 8, 12288), 128, 151_936, qk_norm=True)
#: For a rehearsal on a CPU: as small as the bundled pair fits in, and every oddity of the large ones among them.
TINY_TIED = ModelShape("tiny-tied", Shape(9, 288, 8, 2, 800), 64, 4500, untied=False)
TINY = ModelShape("tiny", Shape(9, 288, 4, 2, 800), 128, 4500)
TINY_QK = ModelShape("tiny-qk", Shape(8, 320, 8, 2, 800), 128, 4500, qk_norm=True)
TINY_DRAFT = ModelShape("tiny-draft", Shape(3, 160, 2, 1, 400), 64, 4500, untied=False)
