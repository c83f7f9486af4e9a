"""Heads that guess all levels at once: DFlash, DSpark and Medusa.

With DFlash one pass computes the logits of all levels, and a chain or a tree is grown from them::

    committed    keys and values from the target's features of each position, stored as soon as they are known
    begin        a pass over the root and a mask for each level; only its rows' keys are scratch
    next         the logits of the next depth, the same below every node: marginals

Marginals do not depend on the tokens chosen at other depths. The noise of each position, which the target will sample
with, adds most of what is missing: among a position's likely tokens the one that will be sampled stands out, whatever
came before.

A DSpark head has a DFlash block, whose logits below each node are biased by the node's own token. The pass is DFlash's;
the bias costs a small product for each level, and trees grow as those of a draft model do.

Each Medusa head guesses the token at one depth from the hidden state of the last committed row. This is one small
product per depth for all sequences, without a pass over the text; the hidden state of each position is stored. Heads do
not depend on each other's choices, so all nodes of a depth have the same candidates below them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.drafters.growth import Growth, below
from foresay.drafters.hidden_states import FeatureDrafter, TextStateDrafter, feature_store, marginal_logits
from foresay.kvpaging import KVStore, PagePool
from foresay.spec.names import DFLASH, DSPARK, MEDUSA
from foresay.spec.protocols import FeatureRequest, Features
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.heads.paged import DFlashHead, MaskBlock
from foresay.verifier.model.config import kv_shapes
from foresay.verifier.ops.trees import known_tokens


class DFlashDrafter(TextStateDrafter):
    """Drafts with a head, as deep as its block. Owns the store of its keys and values. kv: their dtype; None: as
    computed."""

    free = ahead = marginal = True

    def __init__(self, head: DFlashHead, pool: PagePool, name: str = DFLASH, kv: torch.dtype | None = None) -> None:
        layer, device = head.layer, head.device
        store = KVStore(pool, kv_shapes(layer), kv or head.dtype, device)
        super().__init__(name, head.config.needs, store, head.token_ids)
        self.head, self.deepest = head, head.config.guesses
        self._blocks: dict[tuple[int, int], MaskBlock] = {}

    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """Store them as keys and values of every layer."""
        self.head.inject(features, positions, slots, self.hidden_states)

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """The block's pass. Its logits, fp32[levels * S, V'], level by level, are the levels' state."""
        logits = self.head.logits(self.states(state, levels))
        return logits[: state.size], logits

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next level's logits."""
        return marginal_logits(growth, states)

    def states(self, state: StepState, levels: int) -> Tensor:
        """[levels * S, H]: the rows that guess, level by level."""
        config = self.head.config
        key = state.size, levels + (not config.anchored)
        if key not in self._blocks:
            self._blocks[key] = MaskBlock(*key, config, self.device)
        block, roots = self._blocks[key], known_tokens(state.roots.contiguous(), self.head.vocab_size)
        return self.head.draft_states(block, state, roots, self.hidden_states)


class DSparkDrafter(DFlashDrafter):
    """Drafts with a head that has a Markov head."""

    free = marginal = False

    def __init__(self, head: DFlashHead, pool: PagePool, name: str = DSPARK, kv: torch.dtype | None = None) -> None:
        super().__init__(head, pool, name, kv)
        assert head.markov is not None, "it is a DSpark head"
        self._markov = head.markov
        self._block: tuple[Tensor, Tensor]

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """The block's pass; the levels' state is the Markov head's."""
        hidden = self.states(state, levels)
        self._block = hidden, self.head.logits(hidden)
        return self._moved(state.roots[:, None], 0, self._markov.begin(hidden[: state.size]))

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """The next depth's logits, below each expanded node."""
        states = None if states is None else below(states, parent_rows)
        return self._moved(growth.expanded().tokens, len(growth.levels), states)

    def _moved(self, tokens: Tensor, depth: int, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits below nodes of a depth, fp32[S * F, V'], and their states. tokens: int64[S, F]."""
        size, front = tokens.shape
        hidden, logits = (
            part[depth * size : (depth + 1) * size].repeat_interleave(front, dim=0) for part in self._block
        )
        known = known_tokens(tokens.contiguous(), self.head.vocab_size).flatten()
        bias, states = self._markov.bias(known, hidden, states)
        return logits + bias, states


class MedusaDrafter(FeatureDrafter):
    """Drafts with heads, at most as deep as there are heads."""

    free = True

    def __init__(self, heads: MedusaHeads, pool: PagePool, name: str = MEDUSA) -> None:
        features = feature_store(pool, heads.hidden_size, heads.dtype, heads.device)
        super().__init__(name, FeatureRequest(final=True), features, heads.token_map)
        self.heads, self.deepest = heads, len(heads)

    def fuse(self, features: Features) -> Tensor:
        """[R, H]: the input of the target's output head."""
        return features["final"]

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """The first head, run once for all sequences."""
        hidden = self.before(state, levels)
        return self.heads(hidden, 0), hidden

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next head: the same below every node."""
        assert states is not None, "the roots' hidden rows"
        depth = len(growth.levels)
        logits = self.heads(states, depth)
        if growth.plan.apart:
            logits = logits.repeat_interleave(growth.plan.levels[depth].front, dim=0)
        return logits, states
