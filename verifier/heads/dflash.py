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

import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PageTable
from foresay.spec.protocols import Features
from foresay.spec.sampling import SamplingParams
from foresay.verifier.forward_batch import Group, StaticRows
from foresay.verifier.graphs.rows import chain_words
from foresay.verifier.graphs.state import Joined, StepState
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.layer import PagedHead
from foresay.verifier.model.forward import placed
from foresay.verifier.ops.records import AttentionMetadata
from foresay.verifier.ops.rows import embed, norm
from foresay.verifier.ops.trees import lay_out


class Block:
    """A root and masks, ``count`` rows for each of S sequences, at the ends of their texts.

    anchored: whether the root's row guesses too. The rows that guess are wanted, depth by depth.
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
        """Each sees all of its block; causal: none of what is behind it. roots: int64[S], tokens."""
        size, count = self._numbers.shape
        paged = AttentionMetadata(
            tables=state.tables,
            page_size=state.page_size,
            lengths=state.lengths,
            offsets=state.offsets(count),
            words=self._words.flatten() if causal else self._whole,
            depths=self._depths.flatten() if causal else self._behind,
        )
        places = lay_out(state.tables, state.page_size, state.lengths, self._depths, self._numbers, state.live)
        tokens = torch.cat((roots[:, None], self._masks), dim=1).flatten()
        return StaticRows(tokens, *places, (Group(slice(0, size * count), paged),), self._wanted)


class DFlashHead(PagedHead):
    """One head."""

    @torch.inference_mode()
    def inject(self, features: Features, positions: Tensor, slots: Tensor, store: KVStore) -> None:
        """Store keys and values of committed positions, int64[R] as their slots. features: the target's, [R, H']."""
        context, rotation = norm(self.fuse(features), self._norms["hidden_norm"]), self._rope.rows(positions)
        for number, (_, layer) in enumerate(self._layers):
            placed(layer, context, rotation, slots, store.layer(number))

    def guess(self, block: Block, state: StepState, roots: Tensor, store: KVStore) -> Tensor:
        """[W, H]: of the rows of a block that guess. roots: int64[S], known tokens."""
        causal = block.rows(state, roots, causal=True) if any(self.config.causal) else None
        return self.paged(block.rows(state, roots), store, causal)

    @torch.inference_mode()
    def paged(self, rows: StaticRows, store: KVStore, causal: StaticRows | None = None) -> Tensor:
        """The states behind the last norm of a block's wanted rows, [W, H].

        causal: the same rows, none of which sees what is behind it; for layers that are so.
        """
        x, mixed = embed(self._embed, rows.tokens, self._layers[0][1].before_attention)
        return self._walk(x, mixed, rows, store, causal)[0]

    @torch.inference_mode()
    def hits(self, features: Features, tokens: Tensor, wanted: Tensor, table: PageTable, store: KVStore) -> Tensor:
        """bool[R / 2 - 1]: as of EAGLE heads, for the first guess of blocks at every other position."""
        count = len(tokens)
        slots = table.slots(0, count).to(self.device)
        self.inject(features, torch.arange(count, device=self.device), slots, store)
        block = Block(1, 1 if self.config.anchored else 2, self.config, self.device)
        state = StepState(1, len(table.pages), table.pool.page_size, 1, self.device)
        guesses, anchors = [], range(1, count - 1, 2)
        for anchor in reversed(anchors):  # a block's rows take the place of what was injected behind its root
            state.join([Joined(table.pages, anchor, [int(tokens[anchor])], SamplingParams(temperature=0.0), 0)])
            guesses.append(self.logits(self.guess(block, state, state.roots.contiguous(), store)))
        return self.named(torch.cat(guesses[::-1])) == wanted[torch.tensor(list(anchors))]
