"""EAGLE heads: a decoder layer (seldom more) that guesses on from the target's own hidden state.

::

    f(t-1)  features of position t - 1 ── fuse ── h        x(t)  the token at t ── embedding ── e
    EAGLE-3   a = [norm e; norm h],  s = h + attention(a),  y = s + mlp(norm s),  logits of x(t+1) = U norm(y)
    EAGLE-1   a = fc [e; h],         s = a + attention(a),  y = s + mlp(norm s),  logits of x(t+1) = U y

P-EAGLE drafts in parallel: rows behind the root's are made of a mask token and a learnt feature, each of which guesses
the token behind its own place. Further layers are plain Llama layers over y. An EAGLE-1 head may have norms besides: of
e, of what its attention reads, and of y, which is then what U reads and what is fed back.

Row t stands in slot t of the head's own store and is made of (feature t - 1, token t), so a page depends on its own
text alone; slot 0 holds nothing. Where there is no feature yet (drafted tokens), the row before's own y stands in.
Legend: R rows, H hidden width, F width of all features, V' draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.features import Features
from foresay.spec.protocols import Rows
from foresay.verifier.heads.eagle_config import EagleConfig
from foresay.verifier.heads.eagle_weights import EagleWeights
from foresay.verifier.heads.layer import PagedHead
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.rope import RopeTable
from foresay.verifier.ops.level import known_tokens
from foresay.verifier.ops.norm import norm, pair
from foresay.verifier.ops.records import Norm
from foresay.verifier.ops.take import take_rows
from foresay.verifier.paged_rows import StaticRows, WrittenRows


class EagleHead(PagedHead):
    """One head over paged KV. Owns its weights, but for what it shares with the target; the store is the caller's."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, max_positions: int) -> None:
        self.config = config
        self.layer = config.layer
        self.group = self.layer.num_heads // self.layer.num_kv_heads
        self.token_ids = weights.token_ids
        self._embed = weights.embed
        self._norms = weights.norms
        self._fc = None if weights.fc is None else Linear(weights.fc, weights.fc_bias, weights.embed.dtype)
        self._layers = weights.layers
        self._head = weights.head
        self._rope = RopeTable(self.layer.rope, self.layer.head_dim, max_positions, self.device, self.dtype)
        self.mask = None if weights.mask is None else self._fused_mask(weights.mask)

    def reading(self, layers: tuple[int, ...]) -> EagleHead:
        """The same head, reading other layers of the target; all weights are shared."""
        other = copy.copy(self)
        other.config = replace(self.config, aux=layers)
        return other

    @torch.inference_mode()
    def fuse(self, features: Features) -> Tensor:
        """[R, H]: what the head reads of each position, of the target's features, each [R, H']."""
        return self._mixed([features[name] for name in self.config.names])

    def _mixed(self, parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        if self.config.fc_normed:
            parts = [self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)]
        fused = torch.cat(parts, dim=-1)
        if self.config.fc_input_normed:
            fused = self._norm("input_norm", fused)
        return fused if self.config.generation == 1 or self._fc is None else self._fc(fused)

    def _fused_mask(self, mask: Tensor) -> Tensor:
        """[1, H]: of P-EAGLE, what stands in for the fused feature of rows that have none. Nothing of an outline."""
        if mask.is_meta:
            return mask.new_empty(1, self.layer.hidden_size)
        return self._mixed(mask[None].chunk(len(self.config.names), dim=1)).clone()

    def run(self, rows: Sequence[Rows], hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """A pass over ragged rows of several sequences (:meth:`paged`). hidden: [R, H], as the rows are given."""
        return self.paged(WrittenRows.of(rows, self.device), hidden, store)

    @torch.inference_mode()
    def paged(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """fp32[W, V'] logits of the wanted rows and the states to go on from, [W, H]; as :meth:`states`."""
        normed, state = self.states(rows, hidden, store)
        if not len(normed):
            return normed.new_empty(0, self._head.out_features, dtype=torch.float32), state
        return self.logits(normed), state

    def logits(self, normed: Tensor) -> Tensor:
        """fp32[W, V']."""
        return self._head.wide(normed)

    @torch.inference_mode()
    def states(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """Run static rows, storing their KV (:mod:`foresay.verifier.model.paged_pass`).

        hidden: [R, H], the fused feature (or the state) behind each row's token. Returns of the wanted rows what the
        output matrix reads and the states to go on from, [W, H] both.
        """
        rotation = self._rope.rows(rows.positions)
        mixed, x = self._inputs(rows.tokens, hidden)
        *below, last = self._layers
        for layer, above in zip(below, self._layers[1:], strict=True):
            mixed = layer.finish(x, layer.seen(mixed, rows, rotation, store), above.before)
        seen = last.seen(mixed, rows, rotation, store)
        if rows.wanted is not None:
            if not len(rows.wanted):
                return x[:0], x[:0]
            x, seen = take_rows(x, rows.wanted), take_rows(seen, rows.wanted)
        normed = last.finish(x, seen, self._last_norm)
        return normed, normed if self.config.generation == 1 or self.config.output_normed else x

    @property
    def _last_norm(self) -> Norm | None:
        """The norm behind the last layer."""
        return self._norms.get("pre_lm_head_layernorm" if self.config.generation == 1 else "norm")

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first attention reads, and what its result is added to; a token that is none counts as one."""
        if self.config.generation == 3:
            weights = self._norms["input_layernorm"].weight, self._norms["hidden_norm"].weight
            return pair(self._embed, tokens, hidden, weights, self.layer.rms_norm_eps, self.config.residual_normed)
        assert self._fc is not None
        embedded = take_rows(self._embed, known_tokens(tokens, self.vocab_size))
        fused = self._fc(torch.cat((self._norm_if_any("embedding_layernorm", embedded), hidden), dim=-1))
        return self._norm_if_any("fused_layernorm", fused), fused

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return norm(x, self._norms[name])

    def _norm_if_any(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x) if name in self._norms else x
