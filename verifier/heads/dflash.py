"""DFlash heads: a few layers that guess a whole block of tokens in one pass, over masks (arXiv 2602.06036).

::

    position   0      1      ..  length - 1 | length   length + 1   length + 2  ..
    keys of    c(0)   c(1)       c(l - 1)   | root     mask         mask             c(t) = norm(fc [features of t])
    guesses                                   -        x(l + 1)     x(l + 2)

What the target thought of a committed token is injected: each layer makes keys and values of c(t), and never a query.
So a committed position is read once, when its features come, and whoever shares its page finds it. A block's rows see
all of it and, unless a layer is causal, each other; their keys are scratch.

Legend: R rows, W rows whose logits are wanted, H hidden width, V' draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.features import Features
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.block import Block
from foresay.verifier.heads.dflash_config import DFlashConfig
from foresay.verifier.heads.dflash_weights import DFlashWeights
from foresay.verifier.heads.layer import PagedHead
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.rope import RopeTable
from foresay.verifier.ops.norm import embed, norm
from foresay.verifier.ops.take import take_rows
from foresay.verifier.paged_rows import StaticRows


class DFlashHead(PagedHead):
    """One head over paged KV. Owns its weights, but for what it shares with the target; the store is the caller's."""

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, max_positions: int) -> None:
        self.config, self.layer = config, config.layer
        self.token_ids, self.markov = weights.token_ids, weights.markov
        self._embed, self._norms, self._head = weights.embed, weights.norms, weights.head
        self._fc = Linear(weights.fc, None, weights.embed.dtype)
        self._layers = weights.layers
        self._rope = RopeTable(self.layer.rope, self.layer.head_dim, max_positions, self.device, self.dtype)

    def reading(self, layers: Sequence[int]) -> DFlashHead:
        """The same head, reading other layers of the target; all weights are shared."""
        other = copy.copy(self)
        other.config = self.config.reading(layers)
        return other

    @torch.inference_mode()
    def inject(self, features: Features, positions: Tensor, slots: Tensor, store: KVStore) -> None:
        """Store keys and values of committed positions, int64[R] as their slots. features: the target's, [R, H']."""
        fused = self._fc(torch.cat([features[name] for name in self.config.names], dim=-1))
        context, rotation = norm(fused, self._norms["hidden_norm"]), self._rope.rows(positions)
        for layer in self._layers:
            layer.placed(context, slots, rotation, store)

    def guess(self, block: Block, state: StepState, roots: Tensor, store: KVStore) -> Tensor:
        """[W, H]: of the rows of a block that guess. roots: int64[S], known tokens."""
        causal = block.rows(state, roots, causal=True) if any(self.config.causal) else None
        return self.paged(block.rows(state, roots), store, causal)

    @torch.inference_mode()
    def paged(self, rows: StaticRows, store: KVStore, causal: StaticRows | None = None) -> Tensor:
        """The states behind the last norm of a block's wanted rows, [W, H].

        causal: the same rows, none of which sees what is behind it; for layers that are so.
        """
        rotation = self._rope.rows(rows.positions)
        first, *norms = [*(layer.before for layer in self._layers), self._norms["norm"]]
        x, mixed = embed(self._embed, rows.tokens, first)
        for number, (layer, above) in enumerate(zip(self._layers, norms, strict=True)):
            seen = layer.seen(
                mixed, causal if causal is not None and self.config.causal[number] else rows, rotation, store
            )
            if number == len(self._layers) - 1 and rows.wanted is not None:
                x, seen = take_rows(x, rows.wanted), take_rows(seen, rows.wanted)
            mixed = layer.finish(x, seen, above)
        return mixed

    def logits(self, states: Tensor) -> Tensor:
        """fp32[W, V']."""
        return self._head.wide(states)
