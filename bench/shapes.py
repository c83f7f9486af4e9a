"""The shapes that are measured, and the bytes that a step of each reads: over the probed bandwidth these are its floor.

Counted: every matrix once, the output head among them, and the keys and values of the context once. Not counted: norms,
the embedding rows looked up, activations, the rows written (below a thousandth of the sum at 8B).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from bench.inflate import SHAPES, Shape
from foresay.verifier.model.config import ModelConfig, numbers_per_token
from foresay.verifier.model.layers import Attention, QKNorm, Stack
from foresay.verifier.model.products import NormKind

#: The longest context measured, with room for a tree.
POSITIONS = 33_000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes. untied: its head has its own matrix. qk_norm: queries and keys are normalised by head."""

    name: str
    sizes: Shape
    head_dim: int
    vocab: int
    untied: bool = True
    qk_norm: bool = False

    def config(self, source: ModelConfig, positions: int = POSITIONS) -> ModelConfig:
        """A decoder of this shape that can carry the function of ``source``: its rotation and its norm's eps."""
        sizes, scale = self.sizes, self.head_dim**-0.5
        norm = NormKind(source.rms_norm_eps * source.hidden_size / sizes.hidden)
        heads = QKNorm(norm) if self.qk_norm else None
        attention = Attention(sizes.heads, sizes.kv_heads, self.head_dim, scale, source.rope, norm=heads)
        return ModelConfig(
            architecture="Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM",
            vocab_size=self.vocab,
            hidden_size=sizes.hidden,
            stack=Stack.uniform(sizes.layers, attention, sizes.inner, norm),
            tie_word_embeddings=not self.untied,
            max_positions=positions,
            dtype="bfloat16",
            eos_token_ids=source.eos_token_ids,
        )


LLAMA_1B = ModelShape("Llama-3.2-1B", SHAPES["1b"], 64, 128_256, untied=False)
LLAMA_8B = ModelShape("Llama-3.1-8B", Shape(32, 4096, 32, 8, 14336), 128, 128_256)
QWEN_8B = ModelShape("Qwen3-8B", Shape(36, 4096, 32, 8, 12288), 128, 151_936, qk_norm=True)
#: A draft model for the 1B: SmolLM2-135M's sizes, the 1B's vocabulary.
SMALL = ModelShape("135M", SHAPES["135m"], 64, 128_256, untied=False)
#: For a rehearsal on a CPU: as small as the bundled pair fits in, with every oddity of the large ones.
TINY_TIED = ModelShape("tiny-tied", Shape(9, 288, 8, 2, 800), 64, 4500, untied=False)
TINY = ModelShape("tiny", Shape(9, 288, 4, 2, 800), 128, 4500)
TINY_QK = ModelShape("tiny-qk", Shape(8, 320, 8, 2, 800), 128, 4500, qk_norm=True)
TINY_DRAFT = ModelShape("tiny-draft", Shape(3, 160, 2, 1, 400), 64, 4500, untied=False)


@dataclass(frozen=True, slots=True)
class EagleShape:
    """An EAGLE-3 head: one layer of the target's width that reads token and state, features of three layers mixed by
    one matrix a step, and a head over a draft vocabulary."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    draft_vocab: int
    features: int = 3

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outer and inner width of each matrix by its name: ``fc`` mixes the features."""
        hidden, heads, groups = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "fc": (hidden, self.features * hidden),
            "midlayer.self_attn.q_proj": (heads, 2 * hidden),
            "midlayer.self_attn.k_proj": (groups, 2 * hidden),
            "midlayer.self_attn.v_proj": (groups, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, heads),
            "midlayer.mlp.gate_proj": (self.inner, hidden),
            "midlayer.mlp.up_proj": (self.inner, hidden),
            "midlayer.mlp.down_proj": (hidden, self.inner),
            "lm_head": (self.draft_vocab, hidden),
        }

    @property
    def pass_weights(self) -> int:
        """Numbers read by each draft pass."""
        return sum(prod(widths) for name, widths in self.matrices.items() if name != "fc")

    @property
    def step_weights(self) -> int:
        """Numbers read once a step."""
        return prod(self.matrices["fc"])


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """A DFlash head: layers of the target's widths, which read as many of its layers and guess blocks of ``block``
    rows."""

    layers: int
    inner: int
    block: int


#: z-lab's for Qwen3-8B; and one for a rehearsal.
DFLASH_8B, TINY_DFLASH = DFlashShape(5, 12288, 16), DFlashShape(2, 400, 4)


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of one layer."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    output = config.num_heads * config.head_dim
    return config.hidden_size * (heads + output + 3 * config.intermediate_size)


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of weights that one step reads, whatever the number of rows."""
    return itemsize * (config.num_layers * layer_weights(config) + config.hidden_size * config.vocab_size)


def kv_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of keys and values that one token of context adds to a step."""
    return itemsize * numbers_per_token(config)


def step_bytes(config: ModelConfig, context: float, itemsize: int = 2) -> float:
    """Bytes that a step of one sequence reads at this context."""
    return weight_bytes(config, itemsize) + context * kv_bytes_per_token(config, itemsize)
