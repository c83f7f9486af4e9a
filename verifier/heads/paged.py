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

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.protocols import Features, Rows
from foresay.verifier.forward_batch import ForwardBatch, RowGroup, StaticRows
from foresay.verifier.graphs.rows import chain_words
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.config import FIRST_NORMS, MASK, RAW, HeadConfig
from foresay.verifier.heads.markov import MarkovHead
from foresay.verifier.heads.reader import HeadWeights
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.forward import Embedded, logits_of, project_and_store, run_layers
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.mtp_layout import EMBEDDING, HIDDEN, MIXES
from foresay.verifier.ops.records import AttentionMetadata, Norm
from foresay.verifier.ops.rows import join_columns, norm, pair, take_rows
from foresay.verifier.ops.trees import known_tokens, lay_out


class PagedHead:
    """One head over paged KV. Owns its weights, except those shared with the target; the caller owns the store.

    decoder: its layers, last norm, embedding and output matrix. vocab_size: how many tokens it can read, the target's.
    dtype: of weights and activations.
    """

    def __init__(self, config: HeadConfig, weights: HeadWeights, max_positions: int) -> None:
        self.config, self.layer, self.token_ids = config, weights.model, weights.token_ids
        self.decoder, outside = Decoder(weights.model, weights.packed, max_positions), weights.outside
        self.vocab_size, self.dtype, self.device = len(self.decoder.embedding), self.decoder.dtype, self.decoder.device
        self.markov = None if config.markov is None else MarkovHead(config.markov, outside)
        mixes = outside.matrices.get(MIXES)
        self._fc = None if mixes is None else Linear(mixes, outside.biases.get(MIXES), self.dtype)
        eps, vectors = self.layer.rms_norm_eps, outside.vectors.items()
        self._norms = {name.removesuffix(".weight"): Norm(one, eps) for name, one in vectors if name != MASK}
        mask = outside.vectors.get(MASK)
        self.mask = None if mask is None else self._fused_mask(mask.flatten())

    def _fused_mask(self, mask: Tensor) -> Tensor:
        """[1, H]: P-EAGLE's replacement for the fused feature of mask rows. Empty for a head without weights."""
        if mask.is_meta:
            return mask.new_empty(1, self.layer.hidden_size)
        return self._mixed(mask[None].chunk(len(self.config.names), dim=1)).clone()

    def with_vocabulary(self, vocabulary: DraftVocabulary) -> Self:
        """The same head, with logits of only these tokens."""
        other = copy.copy(self)
        other.token_ids, other.decoder = vocabulary.token_ids, vocabulary.restrict(self.decoder)
        return other

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

    def logits(self, normed: Tensor) -> Tensor:
        """fp32[W, V'], from the last norm's output."""
        return logits_of(self.decoder, normed)

    def run_rows(self, rows: StaticRows, store: KVStore, embedded: Embedded = None) -> tuple[Tensor, Tensor]:
        """The last norm's output of the rows with logits, and their residual stream, [W, H] both. embedded: the stream,
        and the first attention's input if that is not its norm."""
        return run_layers(self.decoder, rows, store, embedded, narrow=True)[:2]


class EagleHead(PagedHead):
    """One head."""

    def run(self, rows: Sequence[Rows], hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """A pass over ragged rows of several sequences (:meth:`paged`). hidden: [R, H], in the order of the rows."""
        return self.paged(ForwardBatch.of(rows, self.device), hidden, store)

    def paged(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """The logits, fp32[W, V'], and the states to continue from, [W, H]; see :meth:`states`."""
        normed, state = self.states(rows, hidden, store)
        return self.logits(normed), state

    def states(self, rows: StaticRows, hidden: Tensor, store: KVStore) -> tuple[Tensor, Tensor]:
        """Run static rows, storing their KV (:mod:`foresay.verifier.model.forward`).

        hidden: [R, H], the fused feature (or the state) for each row's token. Returns for the rows with logits the
        output matrix's input and the states to continue from, [W, H] both.
        """
        normed, x = self.run_rows(rows, store, self._inputs(rows.tokens, hidden))
        fed_back = self.config.generation == 1 and RAW not in self.config.flags
        return normed, normed if fed_back or "norm_output" in self.config.flags else x

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Embedded:
        """The stream, and the first attention's input if that is not its norm; invalid token ids are clamped."""
        table, eps = self.decoder.embedding, self.layer.rms_norm_eps
        if self.config.generation == 3:
            weights = self._norms[FIRST_NORMS[0]].weight, self._norms[FIRST_NORMS[1]].weight
            read, x = pair(table, tokens, hidden, weights, eps, "norm_before_residual" in self.config.flags)
            return x, read
        assert self._fc is not None
        if (own := self._norms.get(HIDDEN)) is not None:
            both = pair(table, tokens, hidden, (self._norms[EMBEDDING].weight, own.weight), eps, False)[0]
        else:
            embedded = take_rows(table, known_tokens(tokens, self.vocab_size))
            embedded = norm(embedded, self._norms[EMBEDDING]) if self._norms else embedded
            both = torch.cat((embedded, hidden), dim=-1)
        return self._fc(both)


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

    def inject(self, features: Features, positions: Tensor, slots: Tensor, store: KVStore) -> None:
        """Store keys and values of committed positions, int64[R] like their slots. features: the target's, [R, H']."""
        context, nodes = norm(self.fuse(features), self._norms[HIDDEN]), self.layer.stack.attentions
        rotations = self.decoder.rotations(positions, None)
        for number, (node, layer) in enumerate(zip(nodes, self.decoder.layers, strict=True)):
            project_and_store(node, layer, context, rotations[number], slots, store.layer(number))

    def draft_states(self, block: MaskBlock, state: StepState, roots: Tensor, store: KVStore) -> Tensor:
        """[W, H]: the states of a block's rows that guess. roots: int64[S], known tokens."""
        rows = block.rows(state, roots)
        if any(node.causal for node in self.layer.stack.attentions):
            rows = replace(block.rows(state, roots, causal=True), block=rows)
        return self.run_rows(rows, store)[0]
