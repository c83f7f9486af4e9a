"""How many weights a decoder has, and numbers its KV cache. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

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


def numbers_per_token(model: ModelConfig) -> int:
    """How many numbers the KV cache keeps of a token."""
    return sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in model.stack.layers)
