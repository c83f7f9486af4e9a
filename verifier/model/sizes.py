"""How many weights a decoder has, and numbers its KV cache, by its shape alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Shape(Protocol):
    """What the numbers depend on: a :class:`~foresay.verifier.model.config.ModelConfig`, or an entry of the catalog."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tie_word_embeddings(self) -> bool: ...


def _matrices(model: Shape) -> tuple[tuple[int, int], ...]:
    """Inner and outer widths of a layer's products: qkv, output, gate_up, down."""
    hidden, inner, queries = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    both = queries + 2 * model.num_kv_heads * model.head_dim
    return (hidden, both), (queries, hidden), (hidden, 2 * inner), (inner, hidden)


def matrices(model: Shape) -> Iterator[tuple[str, int, int]]:
    """Each product's first module, and its inner and outer width; the output head last."""
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    for number in range(model.num_layers):
        for module, widths in zip(modules, _matrices(model), strict=True):
            yield f"model.layers.{number}.{module}", *widths
    yield "lm_head", model.hidden_size, model.vocab_size


def parameters(model: Shape) -> int:
    """The number of weights, near enough to plan with; an output head tied to the embedding is packed beside it."""
    layer = sum(inner * outer for inner, outer in _matrices(model))
    return model.num_layers * layer + 2 * model.vocab_size * model.hidden_size


def stored_parameters(model: Shape) -> int:
    """The number of weights in the files, near enough: a tied output head is not stored."""
    return parameters(model) - model.vocab_size * model.hidden_size * model.tie_word_embeddings


def numbers_per_token(model: Shape) -> int:
    """How many numbers the KV cache keeps of a token."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim
