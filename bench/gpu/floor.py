"""Bytes that a step has to read, counted from shapes: what is divided by the probed bandwidth to be its floor.

Counted: every matrix once, the output head among them, and the keys and values of the context once. Not counted: norms,
the embedding rows looked up, activations, the rows written (below a thousandth of the sum at 8B).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from verifier.model.config import ModelConfig


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
    def products(self) -> list[tuple[int, int]]:
        """Outer and inner width of each matrix that a draft pass reads."""
        heads = self.heads * self.head_dim
        attention = [(heads + 2 * self.kv_heads * self.head_dim, 2 * self.hidden), (self.hidden, heads)]
        return [*attention, (2 * self.inner, self.hidden), (self.hidden, self.inner), (self.draft_vocab, self.hidden)]

    @property
    def mixing(self) -> tuple[int, int]:
        """The matrix that mixes the features, read once a step."""
        return self.hidden, self.features * self.hidden

    @property
    def pass_weights(self) -> int:
        """Numbers read by each draft pass."""
        return sum(outer * inner for outer, inner in self.products)

    @property
    def step_weights(self) -> int:
        """Numbers read once a step."""
        return prod(self.mixing)


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
    return 2 * itemsize * config.num_layers * config.num_kv_heads * config.head_dim


def step_bytes(config: ModelConfig, context: float, itemsize: int = 2) -> float:
    """Bytes that a step of one sequence reads at this context."""
    return weight_bytes(config, itemsize) + context * kv_bytes_per_token(config, itemsize)


def draft_model_bytes(config: ModelConfig, passes: int, context: float, itemsize: int = 2) -> float:
    """Bytes that a draft loop of so many passes reads."""
    return passes * step_bytes(config, context, itemsize)


def eagle_bytes(shape: EagleShape, passes: int, context: float, itemsize: int = 2) -> float:
    """Bytes that a draft loop of so many passes of an EAGLE-3 head reads, keys and values of its one layer included."""
    kept = 2 * shape.kv_heads * shape.head_dim * context
    return itemsize * (shape.step_weights + passes * (shape.pass_weights + kept))
