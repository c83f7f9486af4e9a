"""A stack in training: the parameters that its description names, walked by the forward that serves it.

Ops are computed by their references, which have derivatives, over whole texts: what is served stores keys and values in
pages, here they stay what they are, and the model decides what each row attends to.

Legend: B texts, T rows of each, K keys, H width, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresay.drafters.heads.training_batch import DepthMetrics, TrainingBatch, evaluate, scatter_logits, vocabulary
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.paged import PagedHead
from foresay.verifier.heads.reader import HeadWeights, pack
from foresay.verifier.model.config import FINAL_NORM, ModelConfig
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.layers import Attention, ExtraParameters
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.mtp_layout import MIXES
from foresay.verifier.model.products import Product, Vector
from foresay.verifier.model.weights import EMBEDDING as TOKENS
from foresay.verifier.model.weights import LM_HEAD, LayerWeights, ModelWeights, allocate, destinations
from foresay.verifier.ops.eager import references

#: The standard deviation of an embedding's initial entries.
_EMBEDDED = 0.02
Served = TypeVar("Served", bound=PagedHead)


class TrainedStack(nn.Module):
    """The parameters of a stack, under their names in files."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.described = model
        for name, like in destinations(model, allocate(model, torch.float32, "meta")):
            *path, last = name.split(".")
            inside: nn.Module = self
            for step in path:
                if step not in inside._modules:
                    inside.add_module(step, nn.Module())
                inside = inside.get_submodule(step)
            inside.register_parameter(last, nn.Parameter(self._begun(name, tuple(like.shape))))

    def _begun(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """What a parameter is at first: of matrices as those of torch's layers, of a norm's weight one."""
        if name in (TOKENS, LM_HEAD):
            return _EMBEDDED * torch.randn(shape)
        if len(shape) == 2:
            return torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5)
        if len(shape) > 2:
            return torch.randn(shape)
        return torch.full(shape, float(name.endswith((".weight", "_scalar")) - (name in self.described.less_one)))

    @torch.enable_grad()
    def weights(self) -> ModelWeights:
        """All of them, as what serves them has them."""
        stack, hidden = self.described.stack, self.described.hidden_size
        norms, more = stack.norm.vectors(FINAL_NORM, hidden) if stack.whole else (), stack.parameters(hidden)
        own: dict[str, Tensor] = dict(self.named_parameters())
        embed = own.get(TOKENS, torch.empty(0))
        return ModelWeights(
            embed,
            [
                _part(own, each.products(hidden), each.vectors(hidden), f"model.layers.{number}.")
                for number, each in enumerate(stack.layers)
            ],
            _part(own, (), norms).vectors,
            own.get(LM_HEAD, embed),
            _part(own, more.products, more.vectors),
        )


def _part(
    own: dict[str, Tensor], products: Iterable[Product], vectors: Iterable[Vector], prefix: str = ""
) -> LayerWeights:
    """A layer's, or those outside."""
    found = LayerWeights({}, {}, {})
    for product in products:
        found.matrices[product.name] = torch.cat([own[f"{prefix}{module}.weight"] for module in product.rows])
        if product.bias:
            found.biases[product.name] = torch.cat([own[f"{prefix}{module}.bias"] for module in product.rows])
    for vector in vectors:
        found.vectors[vector.name] = own[f"{prefix}{vector.name}"] + float(vector.less_one)
    return found


class Texts:
    """Rows of texts, in place of a store: their keys and values, and attention to them, which is causal.

    texts: B. slots: the most rows of a pass. kept: by layer, keys and values of each pass so far, [slots, G, D].
    number: of the layer whose were asked for last.
    """

    windows = states = None

    def __init__(self, model: ModelConfig, texts: int, slots: int, device: torch.device) -> None:
        self.texts, self._slots, self._device, self._nodes = texts, slots, device, model.stack.attentions
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._nodes]
        self.number = 0

    def pages(self, index: int) -> object:
        """They are in none."""
        return self

    def layer(self, index: int) -> tuple[Tensor, Tensor, None]:
        """Room for the keys and values of another pass."""
        node, self.number = self._nodes[index], index
        keys, values = (torch.zeros(self._slots, node.kv_heads, node.head_dim, device=self._device) for _ in range(2))
        self.kept[index].append((keys, values))
        return keys, values, None

    def rows(self, tokens: Tensor, first: int = 0) -> StaticRows:
        """The rows of a pass. tokens: int64[B, T], at positions from ``first`` on."""
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device).repeat(self.texts)
        slots = torch.arange(len(positions), device=tokens.device)
        return StaticRows(tokens.flatten(), positions, slots, (), dense=self.attention)

    def heads(self, x: Tensor, node: Attention) -> Tensor:
        """[B, Q, K, D]: queries, keys or values, [B K, .., D], of each query head."""
        each: Tensor = x.unflatten(0, (self.texts, -1)).transpose(1, 2)
        return each.repeat_interleave(node.heads // each.shape[1], dim=1)

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, node: Attention, sinks: Tensor | None) -> Tensor:
        """[B T, Q D]. query: [B T, Q, D]. keys, values: [B T, G, D]."""
        window, seen = node.window, None
        if window is not None or node.softcap is not None or sinks is not None:
            positions = torch.arange(len(query) // self.texts, device=query.device)
            back = positions[:, None] - positions
            seen = (back >= 0) & (back < (window or len(positions)))
        return self.attend(query, (self.heads(keys, node), self.heads(values, node)), node, sinks, seen)

    def attend(
        self, query: Tensor, kept: tuple[Tensor, Tensor], node: Attention, sinks: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        """[B T, Q D]. kept: keys and values, [B, Q, K, D]. seen: bool[T, K], the attention mask; None: causal."""
        own, (keys, values) = self.heads(query, node), kept
        if node.softcap is None and sinks is None:
            mixed = functional.scaled_dot_product_attention(
                own, keys, values, attn_mask=seen, is_causal=seen is None, scale=node.scale
            )
        else:
            assert seen is not None
            mixed = _chances(node, own @ keys.mT, seen, sinks).to(values.dtype) @ values
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def _chances(node: Attention, products: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """fp32[B, Q, T, K]: the attention weights."""
    scores = products.float() * node.scale
    if node.softcap is not None:
        scores = node.softcap * (scores / node.softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1)
    more = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, more), dim=-1).softmax(dim=-1)[..., :-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The shape of a head, in config.json's names. layers: the target's layers whose inputs it reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    draft_vocab_size: int
    layers: tuple[int, ...]

    def described(self, architecture: str, layers: int = 1) -> ModelConfig:
        """As ``layers`` layers of an architecture."""
        words = {**asdict(self), "architectures": [architecture], "num_hidden_layers": layers}
        return ModelConfig.read(Fields(words, "the head's shape"))


class HeadModel(TrainedStack, Generic[Served]):
    """A head. embed: [V, H], the target's, not trained. lm_head: the output matrix. token_ids: int64[V'], the target's
    id of each draft id."""

    embed: Tensor
    token_ids: Tensor
    serves: type[Served]

    def __init__(self, config: HeadConfig, embed: Tensor, token_ids: Tensor, lm_head: Tensor) -> None:
        width, vocab = config.layer.hidden_size, len(embed)
        mixes = Product(MIXES, {MIXES: width}, width * len(config.names))
        stack = replace(config.layer.stack, extra=ExtraParameters((mixes,), tuple(config.vectors(width))), whole=False)
        super().__init__(replace(config.layer, stack=stack))
        self.head_config, self.needs, self.truncated = config, config.names, config.draft_vocab < vocab
        self.lm_head = nn.Linear(width, config.draft_vocab, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head[token_ids])
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("token_ids", token_ids)

    def served(self, positions: int) -> Served:
        """What serves it, with these parameters. positions: of the longest text."""
        weights, model = self.weights(), self.described
        head = Linear(weights.outside.matrices[MIXES])  # not used: logits are lm_head's
        with references():
            made = HeadWeights(model, pack(model, weights, self.embed, head), weights.outside, None)
            return self.serves(self.head_config, made, positions)

    def logits(self, batch: TrainingBatch, states: Tensor) -> Tensor:
        """[N, V'], of states [N, H]."""
        found: Tensor = self.lm_head(states)
        return found

    def guesses(self, batch: TrainingBatch) -> Iterator[tuple[Tensor, slice]]:
        """The states of the guesses of each depth, [B, R, H], and the target's rows they are compared with."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, batch: TrainingBatch, generator: torch.Generator) -> list[DepthMetrics]:
        """The quality of each depth."""
        found = []
        for states, rows in self.guesses(batch):
            wanted, guessed = batch.target_logits(rows), self.logits(batch, batch.select(states, rows))
            found.append(evaluate(scatter_logits(wanted, self.token_ids, guessed), wanted, generator))
        return found

    def published(self) -> dict[str, Tensor]:
        """The tensors under the authors' names."""
        tensors = {name.removeprefix("model."): own.detach() for name, own in self.named_parameters()}
        return tensors | (vocabulary(self.token_ids, len(self.embed)) if self.truncated else {})
