"""A decoder layer in training: the parameters that its description names, and its computation, row by row.

The description is the one used for serving (:mod:`foresay.verifier.model.nodes`), parameters have the names and values
of the files, and everything is plain torch over whole texts, so that autograd works. The model decides what attention
reads and attends to.

Legend: B texts, T rows, K keys, H width, Q query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.inner import MLP, Activation
from foresay.verifier.model.nodes import SCALAR, SINKS, Attention, Layer
from foresay.verifier.model.products import DOWN, GATE_UP, HEAD_GATE, OUTPUT, QKV, NormKind
from foresay.verifier.model.rope import inverse_frequencies
from foresay.verifier.model.rope_config import RopeConfig

#: Cosines and sines of rows; None without rotary embedding.
Angles = tuple[Tensor, Tensor] | None
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The shape of a head's layers in config.json's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def described(self, architecture: str, layers: int = 1) -> ModelConfig:
        """As ``layers`` layers of an architecture."""
        words = {**asdict(self), "architectures": [architecture], "num_hidden_layers": layers}
        return ModelConfig.of(Fields(words, "the head's shape"))


class NormLayer(nn.Module):
    """A norm of vectors of this size. Its weight is stored as in files."""

    def __init__(self, kind: NormKind, size: int) -> None:
        super().__init__()
        self._kind, self._size = kind, (size,)
        self.weight = nn.Parameter(torch.full((size,), 1.0 - kind.less_one)) if kind.weighted else None
        self.bias = nn.Parameter(torch.zeros(size)) if kind.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """fp32[..., size]: the normalised vectors."""
        kind, weight = self._kind, cast("Tensor | None", self.weight)
        if weight is not None and kind.less_one:
            weight = 1.0 + weight
        if kind.centred:
            return functional.layer_norm(x.float(), self._size, weight, self.bias, kind.eps)
        normed = functional.rms_norm(x.float(), self._size, weight, kind.eps)
        return normed if self.bias is None else normed + self.bias


class Rotary:
    """Rotates heads by the angles of their positions. positions: the most of a text."""

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int) -> None:
        self._frequencies, self._scale = inverse_frequencies(rope, head_dim, positions)
        rotated = rope.rotated(head_dim)
        self._apart, self._parts = not rope.interleaved, [rotated, head_dim - rotated][: 1 + (rotated < head_dim)]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32[T, D / 2], of positions, fp32[T]."""
        angles = torch.outer(positions, self._frequencies.to(positions.device))
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self._scale == 1.0 else (cos * self._scale, sin * self._scale)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[B, N, T, D], each row rotated by its angles."""
        cos, sin = angles[0].to(x.dtype), angles[1].to(x.dtype)
        turning, *still = x.split(self._parts, dim=-1) if len(self._parts) > 1 else (x,)
        a, b = turning.chunk(2, dim=-1) if self._apart else (turning[..., ::2], turning[..., 1::2])
        turned: tuple[Tensor, ...] = a * cos - b * sin, b * cos + a * sin
        if not self._apart:
            turned = (torch.stack(turned, dim=-1).flatten(-2),)
        return torch.cat((*turned, *still), dim=-1)


class TrainedLayer(nn.Module):
    """One layer. positions: see :class:`Rotary`. read: the width of attention's input, if that is not the layer's
    own."""

    def __init__(self, node: Layer, width: int, positions: int, read: int | None = None) -> None:
        super().__init__()
        self.node, attention = node, node.attention
        assert node.experts is None and node.embedding is None, "no head has experts, or embeddings of each layer"
        self._names = {product.name: tuple(product.rows) for product in node.products(width)}
        for product in node.products(width):
            inner = read or width if product.name == QKV else product.inner
            for name, rows in product.rows.items():
                self._put(name, nn.Linear(inner, rows, bias=product.bias))
        for module in node.norms:
            self._put(module, NormLayer(node.kind_of(module), width))
        if attention.norm is not None:
            heads = (attention.heads, attention.kv_heads) if attention.norm.whole else (1, 1)
            for name, count in zip(attention.norm.names, heads, strict=True):
                self._put(name, NormLayer(attention.norm.kind, count * attention.head_dim))
        if node.scaled:
            self._put(SCALAR, nn.Parameter(torch.ones(1)))
        if attention.sinks:
            self._put(SINKS, nn.Parameter(torch.zeros(attention.heads)))
        self._rotary = None if attention.rope is None else Rotary(attention.rope, attention.head_dim, positions)

    def _put(self, name: str, part: nn.Module | nn.Parameter) -> None:
        *path, last = name.split(".")
        inside: nn.Module = self
        for step in path:
            if step not in inside._modules:
                inside.add_module(step, nn.Module())
            inside = inside.get_submodule(step)
        setattr(inside, last, part)

    def _product(self, name: str, x: Tensor, skip: int = 0) -> list[Tensor]:
        """The output of each module of a product for x. skip: omit this many first ones, if they are separate."""
        return [self.get_submodule(module)(x) for module in self._names[name][skip:]]

    def normed(self, name: str | None, x: Tensor) -> Tensor:
        """x, normalised by the module of that name, if there is one."""
        return x if name is None else self.get_submodule(name)(x)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H]: rows of texts, with causal attention."""
        mixed = self.before(x)
        return self.finish(x, mixed, self.attend(*self.heads(mixed)))

    def before(self, x: Tensor) -> Tensor:
        """[B, T, H]: the input of attention."""
        return self.normed(self.node.norms.before_attention, x)

    def heads(self, mixed: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows from position ``first`` on, [B, Q, T, D] each."""
        node, parts = self.node.attention, self._product(QKV, mixed)
        if node.fused is not None:
            sizes = node.heads * node.head_dim, *[node.kv_heads * node.head_dim] * 2
            parts = list(parts[0].split(sizes, dim=-1))
        positions, angles = self._angles(mixed, first)
        query, how = self._turned(parts[0], 0, angles), node.query_scaling
        if how is not None:
            query = query * (1 + how.beta * (1 + (positions / how.original_positions).floor()).log())[:, None]
        return query, *self._keys(parts[1:], angles)

    def keys(self, mixed: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Only keys and values."""
        assert self.node.attention.fused is None
        return self._keys(self._product(QKV, mixed, skip=1), self._angles(mixed, first)[1])

    def _angles(self, mixed: Tensor, first: int) -> tuple[Tensor, Angles]:
        """Positions of rows, fp32[T], and their rotary angles."""
        positions = torch.arange(first, first + mixed.shape[1], device=mixed.device, dtype=torch.float32)
        return positions, None if self._rotary is None else self._rotary.angles(positions)

    def _keys(self, parts: list[Tensor], angles: Angles) -> tuple[Tensor, Tensor]:
        group = self.node.attention.heads // self.node.attention.kv_heads
        both = self._turned(parts[0], 1, angles), self._split(parts[1])
        key, value = (part.repeat_interleave(group, dim=1) for part in both)
        return key, value

    def _split(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (-1, self.node.attention.head_dim)).transpose(1, 2)
        return split

    def _turned(self, x: Tensor, which: int, angles: Angles) -> Tensor:
        """Heads, normalised and rotated. which: 0, queries; 1, keys."""
        how = self.node.attention.norm
        name = None if how is None else how.names[which]
        if how is not None and how.whole:
            x, name = self.normed(name, x), None
        split = self._split(x)
        if how is not None and not how.after:
            split, name = self.normed(name, split), None
        return self.normed(name, split if self._rotary is None or angles is None else self._rotary(split, angles))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """[B, T, Q D]. key, value: [B, Q, K, D]. seen: bool[T, K], the attention mask; None: causal."""
        node, window = self.node.attention, self.node.attention.window
        if seen is None and (window is not None or node.softcap is not None or node.sinks):
            positions = torch.arange(query.shape[2], device=query.device)
            back = positions[:, None] - positions
            seen = (back >= 0) & (back < (window or len(positions)))
        query, key = query.to(value.dtype), key.to(value.dtype)
        if node.softcap is None and not node.sinks:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, is_causal=seen is None, scale=node.scale
            )
        else:
            assert seen is not None
            mixed = self._chances(node, query @ key.mT, seen).to(value.dtype) @ value
        return mixed.transpose(1, 2).flatten(2)

    def _chances(self, node: Attention, products: Tensor, seen: Tensor) -> Tensor:
        """fp32[B, Q, T, K]: the attention weights."""
        scores = products.float() * node.scale
        if node.softcap is not None:
            scores = node.softcap * (scores / node.softcap).tanh()
        scores = scores.masked_fill(~seen, -torch.inf)
        if not node.sinks:
            return scores.softmax(dim=-1)
        sinks = self.get_parameter(SINKS)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]

    def finish(self, x: Tensor, mixed: Tensor, seen: Tensor) -> Tensor:
        """The rest of the layer, [B, T, H]. mixed: attention's input. seen: its output."""
        norms = self.node.norms
        if self.node.attention.gated:
            seen = seen * self._product(HEAD_GATE, mixed)[0].sigmoid()
        x = self._added(x, OUTPUT, seen, norms.after_attention)
        gated = self._gated(mixed if self.node.parallel else self.normed(norms.before_mlp, x))
        x = self._added(x, DOWN, gated, norms.after_mlp)
        return x * self.get_parameter(SCALAR) if self.node.scaled else x

    def _gated(self, x: Tensor) -> Tensor:
        inner = self.node.mlp
        assert isinstance(inner, MLP), "no head has experts"
        activation, parts = _ACTIVATIONS[inner.activation], self._product(GATE_UP, x)
        if inner.fused is not None:
            parts = list(parts[0].chunk(2, dim=-1))
        return activation(parts[0]) if len(parts) == 1 else activation(parts[0]) * parts[1]

    def _added(self, x: Tensor, product: str, y: Tensor, norm: str | None) -> Tensor:
        branch = self.normed(norm, self._product(product, y)[0])
        return x + branch if self.node.share == 1.0 else x + self.node.share * branch
