"""How many weights a decoder has, and numbers its KV cache. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.nodes import Product


def products(model: ModelConfig) -> Iterator[tuple[int, Product]]:
    """Those of all layers, each with the number of its layer."""
    for number, layer in enumerate(model.stack.layers):
        for product in layer.products(model.hidden_size):
            yield number, product


def matrices(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Each product's first module, and its inner and outer width; the output head last."""
    for number, product in products(model):
        yield f"model.layers.{number}.{next(iter(product.rows))}", product.inner, product.outer
    yield "lm_head", model.hidden_size, model.vocab_size


def parameters(model: ModelConfig) -> int:
    """The number of weights, near enough to plan with; an output head tied to the embedding is packed beside it."""
    inside = sum(product.inner * product.outer for _, product in products(model))
    return inside + 2 * model.vocab_size * model.hidden_size


def stored_parameters(model: ModelConfig) -> int:
    """The number of weights in the files, near enough: a tied output head is not stored."""
    return parameters(model) - model.vocab_size * model.hidden_size * model.tie_word_embeddings


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer keeps of a token: so many heads, each a key and a value of these widths. window: how many positions
    a row sees, its own included; None: all before it."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers that is."""
        return self.heads * (self.key_dim + self.value_dim)


def window_shapes(model: ModelConfig) -> tuple[KVShape, ...]:
    """What each layer of a model keeps, and sees."""
    every = (layer.attention for layer in model.stack.layers)
    return tuple(KVShape(one.kv_heads, one.head_dim, one.head_dim, one.window) for one in every)


def kv_shapes(model: ModelConfig) -> tuple[KVShape, ...]:
    """The same, of whole texts."""
    return tuple(replace(shape, window=None) for shape in window_shapes(model))


def numbers_per_token(model: ModelConfig) -> int:
    """How many numbers the KV cache keeps of a token."""
    return sum(shape.numbers for shape in kv_shapes(model))
