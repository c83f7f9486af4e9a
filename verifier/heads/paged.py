"""Heads with layers, and their own keys and values: EAGLE and DFlash.

In EAGLE a decoder layer (rarely more) continues from the target's hidden state::

    f(t-1)  features of position t - 1 ── fuse ── h        x(t)  the token at t ── embedding ── e
    EAGLE-3   a = [norm e; norm h],  s = h + attention(a),  y = s + mlp(norm s),  logits of x(t+1) = U norm(y)
    EAGLE-1   a = fc [e; h],         s = a + attention(a),  y = s + mlp(norm s),  logits of x(t+1) = U y
    MTP       a = fc [norm e; norm h],  s = a + attention(norm a),  y = norm(s + mlp(norm s)),  logits = U y
              (MiMo's continues from s + mlp(norm s), and reads the target's state before the last norm)

P-EAGLE drafts in parallel: rows after the root's have a mask token and a learnt feature, and each guesses the token
after its own position. Further layers are plain Llama layers over y. An EAGLE-1 head may also have norms: of e, of its
attention's input, and of y, which is then U's input and fed back.

Row t is in slot t of the head's own store and is computed from (feature t - 1, token t), so a page depends only on its
own text; slot 0 is unused. Where there is no feature yet (drafted tokens), y of the row before replaces it.

In DFlash a few layers guess a whole block of tokens in one pass, over masks (arXiv 2602.06036)::

    position   0      1      ..  length - 1 | length   length + 1   length + 2  ..
    keys of    c(0)   c(1)       c(l - 1)   | root     mask         mask             c(t) = norm(fc [features of t])
    guesses                                   -        x(l + 1)     x(l + 2)

The target's features of committed tokens are injected: each layer computes keys and values from c(t), but no query. So
a committed position is processed once, when its features arrive, and shared with its page. A block's rows attend to all
of these and, unless a layer is causal, to each other; their keys are scratch.

Legend: R rows, W rows with logits, H hidden width, F width of all features, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PageTable
from foresay.spec.protocols import Features, Rows
from foresay.spec.sampling import SamplingParams
from foresay.verifier.forward_batch import ForwardBatch, RowGroup, StaticRows
from foresay.verifier.graphs.rows import chain_words
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.heads.config import RAW, HeadConfig
from foresay.verifier.heads.layer import HeadWeights, PagedHead
from foresay.verifier.model.forward import placed
from foresay.verifier.ops.records import AttentionMetadata
from foresay.verifier.ops.rows import embed, norm, pair, take_rows
from foresay.verifier.ops.trees import known_tokens, lay_out


class EagleHead(PagedHead):
    """One head."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, max_positions: int) -> None:
        super().__init__(config, weights, max_positions)
        self.mask = None if weights.mask is None else self._fused_mask(weights.mask)

    def _fused_mask(self, mask: Tensor) -> Tensor:
        """[1, H]: P-EAGLE's replacement for the fused feature of mask rows. Empty for a head without weights."""
        if mask.is_meta:
            return mask.new_empty(1, self.layer.hidden_size)
        return self._mixed(mask[None].chunk(len(self.config.names), dim=1)).clone()

    def run(self, rows: Sequence[Rows], hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """A pass over ragged rows of several sequences (:meth:`paged`). hidden: [R, H], in the order of the rows."""
        return self.paged(ForwardBatch.of(rows, self.device), hidden, store)

    @torch.inference_mode()
    def paged(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """The logits, fp32[W, V'], and the states to continue from, [W, H]; see :meth:`states`."""
        normed, state = self.states(rows, hidden, store)
        if not len(normed):
            return normed.new_empty(0, self.output.out_features, dtype=torch.float32), state
        return self.logits(normed), state

    @torch.inference_mode()
    def states(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """Run static rows, storing their KV (:mod:`foresay.verifier.model.forward`).

        hidden: [R, H], the fused feature (or the state) for each row's token. Returns for the rows with logits the
        output matrix's input and the states to continue from, [W, H] both.
        """
        mixed, x = self._inputs(rows.tokens, hidden)
        normed, x = self._walk(x, mixed, rows, store)
        fed_back = self.config.generation == 1 and RAW not in self.config.flags
        return normed, normed if fed_back or "norm_output" in self.config.flags else x

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The first attention's input, and what its result is added to; invalid token ids are clamped."""
        if self.config.generation == 3:
            weights = self._norms["input_layernorm"].weight, self._norms["hidden_norm"].weight
            normed = "norm_before_residual" in self.config.flags
            return pair(self._embed, tokens, hidden, weights, self.layer.rms_norm_eps, normed)
        assert self._fc is not None
        if (hidden_norm := self._norms.get("hidden_norm")) is not None:
            weights = self._norms["embedding_layernorm"].weight, hidden_norm.weight
            fused = self._fc(pair(self._embed, tokens, hidden, weights, self.layer.rms_norm_eps, False)[0])
            return norm(fused, self._norms["fused_layernorm"]), fused
        embedded = take_rows(self._embed, known_tokens(tokens, self.vocab_size))
        embedded = norm(embedded, self._norms["embedding_layernorm"]) if self._norms else embedded
        fused = self._fc(torch.cat((embedded, hidden), dim=-1))
        return (norm(fused, self._norms["fused_layernorm"]) if self._norms else fused), fused

    def hits(self, features: Features, tokens: Tensor, wanted: Tensor, table: PageTable, store: KVStore) -> Tensor:
        """bool[R - 1]: whether each row, computed from the true feature before it, predicts the target's choice.

        features, tokens: of a text, int64[R]. wanted: int64[R], the target's most likely token after each. table: a
        sequence whose R positions are reserved; nothing in ``store`` is marked as filled.
        """
        store.clear(table.slots(0, 1))
        logits, _ = self.run([Rows(table, tokens[1:], 1)], self.fuse(features)[:-1], store)
        return self.named(logits) == wanted[1:]


class MaskBlock:
    """A root and masks, ``count`` rows for each of S sequences, after their texts.

    anchored: whether the root's row guesses too. The logits of the rows that guess are computed, depth by depth.
    """

    def __init__(self, sequences: int, count: int, config: HeadConfig, device: torch.device) -> None:
        assert config.mask is not None
        self._numbers, self._words, self._depths = chain_words(sequences, count, device)
        self._masks = torch.full((sequences, count - 1), config.mask, dtype=torch.int64, device=device)
        whole = (1 << count) - 1
        self._whole = torch.full((sequences * count,), whole - (whole >> 63 << 64), dtype=torch.int64, device=device)
        self._behind = torch.full((sequences * count,), count - 1, dtype=torch.int32, device=device)
        guessing = torch.arange(0 if config.anchored else 1, count)[:, None] + count * torch.arange(sequences)
        self._wanted = guessing.flatten().to(device)

    def rows(self, state: StepState, roots: Tensor, causal: bool = False) -> StaticRows:
        """The rows, each of which attends to all of its block; causal: only up to itself. roots: int64[S], tokens."""
        size, count = self._numbers.shape
        paged = AttentionMetadata(
            tables=state.tables,
            page_size=state.page_size,
            lengths=state.lengths,
            offsets=state.offsets(count),
            words=self._words.flatten() if causal else self._whole,
            depths=self._depths.flatten() if causal else self._behind,
        )
        indices = lay_out(state.tables, state.page_size, state.lengths, self._depths, self._numbers, state.live)
        tokens = torch.cat((roots[:, None], self._masks), dim=1).flatten()
        return StaticRows(tokens, *indices, (RowGroup(slice(0, size * count), paged),), self._wanted)


class DFlashHead(PagedHead):
    """One head."""

    @torch.inference_mode()
    def inject(self, features: Features, positions: Tensor, slots: Tensor, store: KVStore) -> None:
        """Store keys and values of committed positions, int64[R] like their slots. features: the target's, [R, H']."""
        context, rotation = norm(self.fuse(features), self._norms["hidden_norm"]), self._rope.rows(positions)
        for number, (node, layer) in enumerate(self._layers):
            placed(node.attention, layer, context, rotation, slots, store.layer(number))

    def guess(self, block: MaskBlock, state: StepState, roots: Tensor, store: KVStore) -> Tensor:
        """[W, H]: the states of a block's rows that guess. roots: int64[S], known tokens."""
        causal = block.rows(state, roots, causal=True) if any(self.config.causal) else None
        return self.paged(block.rows(state, roots), store, causal)

    @torch.inference_mode()
    def paged(self, rows: StaticRows, store: KVStore, causal: StaticRows | None = None) -> Tensor:
        """The states after the last norm of a block's rows with logits, [W, H].

        causal: the same rows with causal attention, for the layers that use it.
        """
        x, mixed = embed(self._embed, rows.tokens, self._layers[0][1].before_attention)
        return self._walk(x, mixed, rows, store, causal)[0]

    @torch.inference_mode()
    def hits(self, features: Features, tokens: Tensor, wanted: Tensor, table: PageTable, store: KVStore) -> Tensor:
        """bool[R / 2 - 1]: as for EAGLE heads, for the first guess of blocks at every other position."""
        count = len(tokens)
        slots = table.slots(0, count).to(self.device)
        self.inject(features, torch.arange(count, device=self.device), slots, store)
        block = MaskBlock(1, 1 if self.config.anchored else 2, self.config, self.device)
        state = StepState(1, len(table.pages), table.pool.page_size, 1, self.device)
        guesses, anchors = [], range(1, count - 1, 2)
        for anchor in reversed(anchors):  # a block's rows overwrite what was injected after its root
            state.join([BatchSlot(table.pages, anchor, [int(tokens[anchor])], SamplingParams(temperature=0.0), 0)])
            guesses.append(self.logits(self.guess(block, state, state.roots.contiguous(), store)))
        return self.named(torch.cat(guesses[::-1])) == wanted[torch.tensor(list(anchors))]
