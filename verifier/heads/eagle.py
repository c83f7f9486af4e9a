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

from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PageTable
from foresay.spec.protocols import Features, Rows
from foresay.verifier.forward_batch import ForwardBatch, StaticRows
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.layer import HeadWeights, PagedHead
from foresay.verifier.ops.level import known_tokens
from foresay.verifier.ops.rows import norm, pair, take_rows


class EagleHead(PagedHead):
    """One head."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, max_positions: int) -> None:
        super().__init__(config, weights, max_positions)
        self.mask = None if weights.mask is None else self._fused_mask(weights.mask)

    def _fused_mask(self, mask: Tensor) -> Tensor:
        """[1, H]: of P-EAGLE, what stands in for the fused feature of rows that have none. Nothing of an outline."""
        if mask.is_meta:
            return mask.new_empty(1, self.layer.hidden_size)
        return self._mixed(mask[None].chunk(len(self.config.names), dim=1)).clone()

    def run(self, rows: Sequence[Rows], hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """A pass over ragged rows of several sequences (:meth:`paged`). hidden: [R, H], as the rows are given."""
        return self.paged(ForwardBatch.of(rows, self.device), hidden, store)

    @torch.inference_mode()
    def paged(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """fp32[W, V'] logits of the wanted rows and the states to go on from, [W, H]; as :meth:`states`."""
        normed, state = self.states(rows, hidden, store)
        if not len(normed):
            return normed.new_empty(0, self._head.out_features, dtype=torch.float32), state
        return self.logits(normed), state

    @torch.inference_mode()
    def states(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """Run static rows, storing their KV (:mod:`foresay.verifier.model.forward`).

        hidden: [R, H], the fused feature (or the state) behind each row's token. Returns of the wanted rows what the
        output matrix reads and the states to go on from, [W, H] both.
        """
        mixed, x = self._inputs(rows.tokens, hidden)
        normed, x = self._walk(x, mixed, rows, store)
        return normed, normed if self.config.generation == 1 or "norm_output" in self.config.flags else x

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first attention reads, and what its result is added to; a token that is none counts as one."""
        if self.config.generation == 3:
            weights = self._norms["input_layernorm"].weight, self._norms["hidden_norm"].weight
            normed = "norm_before_residual" in self.config.flags
            return pair(self._embed, tokens, hidden, weights, self.layer.rms_norm_eps, normed)
        assert self._fc is not None
        embedded = take_rows(self._embed, known_tokens(tokens, self.vocab_size))
        embedded = norm(embedded, self._norms["embedding_layernorm"]) if self._norms else embedded
        fused = self._fc(torch.cat((embedded, hidden), dim=-1))
        return (norm(fused, self._norms["fused_layernorm"]) if self._norms else fused), fused

    def hits(self, features: Features, tokens: Tensor, wanted: Tensor, table: PageTable, store: KVStore) -> Tensor:
        """bool[R - 1]: whether each row, made of the true feature before it, names the target's choice.

        features, tokens: of a text, int64[R]. wanted: int64[R], the target's most likely token after each. table: a
        sequence whose R pages are reserved; nothing in ``store`` counts as filled by this.
        """
        store.clear(table.slots(0, 1))
        logits, _ = self.run([Rows(table, tokens[1:], 1)], self.fuse(features)[:-1], store)
        return self.named(logits) == wanted[1:]
