"""The parts of heads over paged KV: an embedding, decoder layers with optional biases and norms, and an output
matrix."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.protocols import Features
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.heads.config import HeadConfig, MarkovConfig
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.model.decoder import PackedLayer
from foresay.verifier.model.forward import attention, experts
from foresay.verifier.model.linear import Linear, Matrix
from foresay.verifier.model.nodes import Layer
from foresay.verifier.model.rope import RopeTable
from foresay.verifier.ops.records import Norm
from foresay.verifier.ops.rows import add_norm, finish_logits, join_columns, norm, take_rows

#: The factor and the cap of logits.
Finish = tuple[float, float | None]


class MarkovHead:
    """What DSpark adds to a block's marginals: a low-rank bias that depends on the token before each, and on the depth.

    ::

        vanilla   logits(x) = U h + W2 W1[before]
        gated     logits(x) = U h + W2 (g W1[before]),        g = sigmoid(G [h; W1[before]] + b)
        rnn       logits(x) = U h + W2 tanh(o),               (g, c, o) = J [s; W1[before]; h] + b
                                                              s' = g s + (1 - g) tanh(c), with the sigmoid of g

    Legend: N nodes, r rank. Owns its weights. before: [V, r].
    """

    def __init__(self, config: MarkovConfig, before: Tensor, after: Linear, joint: Linear | None) -> None:
        self.config, self._before, self._after, self._joint = config, before, after, joint

    def begin(self, hidden: Tensor) -> Tensor | None:
        """[N, r]: the state at the roots. hidden: [N, H]."""
        return hidden.new_zeros(len(hidden), self.config.rank) if self.config.kind == "rnn" else None

    def bias(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """fp32[N, V'], the bias below nodes with these tokens, int64[N], and the states there. hidden: [N, H], of the
        rows that guess."""
        before = take_rows(self._before, tokens)
        if self._joint is None:
            return self._after.wide(before), None
        if state is None:
            return self._after.wide(self._joint(torch.cat((hidden, before), dim=-1)).sigmoid() * before), None
        gate, candidate, out = self._joint(torch.cat((state, before, hidden), dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self._after.wide(out.tanh()), gate * state + (1 - gate) * candidate.tanh()


@dataclass(slots=True)
class HeadWeights:
    """All weights of a head, in the target's dtype.

    embed: [V, H]. fc: [H, F], None if one feature of the right width is read as it is. head: H to V'. norms: those
    outside the layers, by name. token_ids: int64[V'], the target's id of each draft id; None if they are the same.
    mask: [F], of P-EAGLE, the replacement for features. finish: the target's, if the output matrix is.
    """

    embed: Tensor
    fc: Matrix | None
    fc_bias: Tensor | None
    layers: tuple[tuple[Layer, PackedLayer], ...]
    head: Linear
    norms: dict[str, Norm]
    token_ids: Tensor | None
    mask: Tensor | None = None
    markov: MarkovHead | None = None
    finish: Finish = (1.0, None)


class PagedHead:
    """One head over paged KV. Owns its weights, except those shared with the target; the caller owns the store.

    vocab_size: how many tokens it can read, the target's. dtype: of weights and activations. output: its output matrix.
    """

    def __init__(self, config: HeadConfig, weights: HeadWeights, max_positions: int) -> None:
        self.config, self.layer = config, config.layer
        self.vocab_size, self.dtype, self.device = len(weights.embed), weights.embed.dtype, weights.embed.device
        self.token_ids, self.markov, self._finish = weights.token_ids, weights.markov, weights.finish
        self._embed, self._norms, self._layers, self.output = weights.embed, weights.norms, weights.layers, weights.head
        self._fc = None if weights.fc is None else Linear(weights.fc, weights.fc_bias, weights.embed.dtype)
        self._last = self._norms.get("norm", self._norms.get("pre_lm_head_layernorm"))
        self._rope = RopeTable(self.layer.rope, self.layer.attention.turning, max_positions, self.device, self.dtype)

    def drafting(self, vocabulary: DraftVocabulary) -> Self:
        """The same head, with logits of only these tokens."""
        other = copy.copy(self)
        other.token_ids, other.output = vocabulary.token_ids, vocabulary.head
        return other

    def reading(self, layers: Sequence[int]) -> Self:
        """The same head, reading other layers of the target; all weights are shared."""
        other = copy.copy(self)
        other.config = self.config.reading(layers)
        return other

    @torch.inference_mode()
    def fuse(self, features: Features) -> Tensor:
        """[R, H]: the head's input of each position, from the target's features, each [R, H']."""
        return self._mixed([features[name] for name in self.config.names])

    def _mixed(self, parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        if "fc_norm" in self.config.flags:
            parts = [norm(part, self._norms[f"fc_norm.{index}"]) for index, part in enumerate(parts)]
        fused = join_columns(*(part.contiguous() for part in parts))
        if "norm_before_fc" in self.config.flags:
            fused = norm(fused, self._norms["input_norm"])
        return fused if self.config.generation == 1 or self._fc is None else self._fc(fused)

    def named(self, logits: Tensor) -> Tensor:
        """The target's ids of the tokens with the largest logits, on the host."""
        ids = logits.argmax(dim=-1).cpu()
        return ids if self.token_ids is None else self.token_ids.cpu()[ids]

    def logits(self, normed: Tensor) -> Tensor:
        """fp32[W, V'], from the last norm's output."""
        return finish_logits(self.output.wide(normed), *self._finish)

    def _walk(
        self, x: Tensor, mixed: Tensor, rows: StaticRows, store: KVStore, causal: StaticRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """The last norm's output of the rows with logits, and their residual stream, [W, H] both.

        x: the stream. mixed: the first attention's input. causal: the same rows with causal attention, for the layers
        that use it.
        """
        rotation, slots = self._rope.rows(rows.positions), rows.slots
        norms = [*(layer.before_attention for _, layer in self._layers[1:]), self._last]
        for number, ((node, layer), above) in enumerate(zip(self._layers, norms, strict=True)):
            own = causal if causal is not None and self.config.causal[number] else rows
            seen = attention(node.attention, layer, mixed, rotation, own, store.layer(number), self.config.first)
            if number == len(norms) - 1 and rows.logits_indices is not None:
                if not len(rows.logits_indices):
                    return x[:0], x[:0]
                x, seen = take_rows(x, rows.logits_indices), take_rows(seen, rows.logits_indices)
                slots = slots if layer.experts is None else take_rows(slots, rows.logits_indices)
            inner = add_norm(x, layer.output.unfinished(seen), layer.before_mlp)
            if layer.experts is not None:
                mixed = add_norm(x, experts(layer, layer.experts, inner, None, slots), above)
            else:
                into, back = layer.inner
                mixed = add_norm(x, back.unfinished(into.gated(inner)), above)
        return mixed, x
