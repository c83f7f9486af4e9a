"""How many weights a decoder has, and numbers its KV cache, by its shape alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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


#: Products of a layer: queries, keys and values; what attention puts out; gates and what they are for; back from there.
QKV, OUTPUT, GATE_UP, DOWN = "qkv", "output", "gate_up", "down"
#: The modules that each is made of, one below the other, as Llama's checkpoints name them.
MODULES = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    OUTPUT: ("self_attn.o_proj",),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    DOWN: ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class Product:
    """What is multiplied as one in a layer. name: see above. rows: of each of its modules. inner: width of its input.
    modules: what they are called."""

    name: str
    rows: tuple[int, ...]
    inner: int

    @property
    def modules(self) -> tuple[str, ...]:
        return MODULES[self.name]

    @property
    def outer(self) -> int:
        """Width of its output."""
        return sum(self.rows)


def products(model: Shape) -> tuple[Product, ...]:
    """Those of a layer, in the order in which they are computed."""
    hidden, inner, queries = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    return (
        Product(QKV, (queries, keys, keys), hidden),
        Product(OUTPUT, (hidden,), queries),
        Product(GATE_UP, (inner, inner), hidden),
        Product(DOWN, (hidden,), inner),
    )


class Stored(Shape, Protocol):
    """A shape that also says what its files call things."""

    def stored(self, product: Product) -> dict[str, int]:
        """The modules that they have of a product, and the rows of each."""
        ...


def matrices(model: Stored) -> Iterator[tuple[str, int, int]]:
    """Each product's first module, and its inner and outer width; the output head last."""
    for number in range(model.num_layers):
        for product in products(model):
            yield f"model.layers.{number}.{next(iter(model.stored(product)))}", product.inner, product.outer
    yield "lm_head", model.hidden_size, model.vocab_size


def parameters(model: Shape) -> int:
    """The number of weights, near enough to plan with; an output head tied to the embedding is packed beside it."""
    layer = sum(product.inner * product.outer for product in products(model))
    return model.num_layers * layer + 2 * model.vocab_size * model.hidden_size


def stored_parameters(model: Shape) -> int:
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


def kv_shapes(model: Shape) -> tuple[KVShape, ...]:
    """What each layer of a model keeps, of whole texts."""
    return (KVShape(model.num_kv_heads, model.head_dim, model.head_dim),) * model.num_layers


class Sliding(Shape, Protocol):
    """A shape that also says which layers see a window, and of how many positions."""

    @property
    def sliding_window(self) -> int | None: ...

    @property
    def sliding_layers(self) -> tuple[bool, ...]: ...


def window_shapes(model: Sliding) -> tuple[KVShape, ...]:
    """What each layer of a model keeps, and sees."""
    windows = (model.sliding_window if slides else None for slides in model.sliding_layers)
    return tuple(replace(shape, window=window) for shape, window in zip(kv_shapes(model), windows, strict=True))


def numbers_per_token(model: Shape) -> int:
    """How many numbers the KV cache keeps of a token."""
    return sum(shape.numbers for shape in kv_shapes(model))
