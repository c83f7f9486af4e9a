"""Heads that guess all levels at once: DFlash, DSpark and Medusa.

Of DFlash one pass makes the logits of all levels, and a chain or a tree is grown from them::

    committed    keys and values of what the target thought of each position, stored as soon as it is known
    begin        a pass over the root and a mask for each level; only its rows' keys are scratch
    next         the logits of the next depth, the same below every node: marginals

Marginals know nothing of what the others chose. The noise of each position, which the target will draw with, tells most
of what is missing: among a position's likely tokens the one that will be drawn stands out, whatever came before.

A DSpark head has a DFlash block, whose logits below each node are moved by the node's own token. The pass is DFlash's;
what follows below a token costs a small product for each level, so that trees grow as those of a draft model do.

Of Medusa's heads each guesses a token further on from the hidden state of the last committed row. One small product per
depth for all sequences, no pass over the text; what is stored is the hidden state of each position. Heads do not see
what the others chose, so below every node of a depth the candidates are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.drafters.growth import Growth
from foresay.drafters.hidden_states import FeatureDrafter, HiddenStateDrafter, marginal_logits
from foresay.kvpaging import KVStore, PagePool
from foresay.spec.names import DFLASH, DSPARK, MEDUSA
from foresay.spec.protocols import FeatureRequest, Features
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.heads.paged import DFlashHead, MaskBlock
from foresay.verifier.model.config import kv_shapes
from foresay.verifier.ops.trees import known_tokens


class DFlashDrafter(HiddenStateDrafter):
    """Drafts with a head, as deep as its block. Owns the store of its keys and values. kv: what they are kept in; None:
    as computed."""

    free = ahead = True

    def __init__(
        self, head: DFlashHead, pool: PagePool, dynamic: bool = True, name: str = DFLASH, kv: torch.dtype | None = None
    ) -> None:
        layer, device = head.layer, head.device
        store = KVStore(pool, kv_shapes(layer), kv or head.dtype, device)
        super().__init__(name, dynamic, pool, head.config.needs, store, device, head.token_ids)
        self.head = head
        self._blocks: dict[tuple[int, int], MaskBlock] = {}

    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """As keys and values of every layer."""
        self.head.inject(features, positions, slots, self.hidden_states)

    def limited(self, shape: TreeShape) -> TreeShape:
        """Not deeper than a block guesses."""
        return shape.limited(self.head.config.guesses)

    def reach(self, levels: int) -> int:
        """The root."""
        return 1

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """The block's pass. The levels start from the logits of all of them, fp32[levels * S, V'], level by level."""
        logits = self.head.logits(self.states(state, levels))
        return logits[: state.size], logits

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next level's."""
        return marginal_logits(growth, states)

    def states(self, state: StepState, levels: int) -> Tensor:
        """[levels * S, H]: the rows that guess, level by level."""
        config = self.head.config
        key = state.size, levels + (not config.anchored)
        if key not in self._blocks:
            self._blocks[key] = MaskBlock(*key, config, self.device)
        block, roots = self._blocks[key], known_tokens(state.roots.contiguous(), self.head.vocab_size)
        return self.head.guess(block, state, roots, self.hidden_states)


class DSparkDrafter(DFlashDrafter):
    """Drafts with a head that has a Markov head."""

    free = False

    def __init__(
        self, head: DFlashHead, pool: PagePool, dynamic: bool = True, name: str = DSPARK, kv: torch.dtype | None = None
    ) -> None:
        super().__init__(head, pool, dynamic, name, kv)
        assert head.markov is not None, "it is a DSpark head"
        self._markov = head.markov
        self._block: tuple[Tensor, Tensor]

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """The block's pass; the levels start from the Markov head's states."""
        hidden = self.states(state, levels)
        self._block = hidden, self.head.logits(hidden)
        return self._moved(state.roots[:, None], 0, self._markov.begin(hidden[: state.size]))

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Those of the next depth, below each expanded node."""
        if states is not None and places is not None:
            above = states.view(len(places), -1, states.shape[1])
            states = above.gather(1, places[:, :, None].expand(-1, -1, states.shape[1])).flatten(0, 1)
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
    """Drafts with heads, as deep as there are heads."""

    free = True

    def __init__(self, heads: MedusaHeads, pool: PagePool, dynamic: bool = True, name: str = MEDUSA) -> None:
        needs, width = FeatureRequest(final=True), heads.hidden_size
        super().__init__(name, dynamic, pool, needs, width, heads.dtype, heads.device, heads.token_map)
        self.heads = heads

    def fuse(self, features: Features) -> Tensor:
        """[R, H]: the state that the target's output head multiplies."""
        return features["final"]

    def limited(self, shape: TreeShape) -> TreeShape:
        """Not deeper than there are heads."""
        return shape.limited(len(self.heads))

    def reach(self, levels: int) -> int:
        """The root, for the state it was sampled from."""
        return 1

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """The first head, run once for all sequences."""
        hidden = self.before(state, levels)
        return self.heads(hidden, 0), hidden

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next head: the same below every node."""
        assert states is not None, "the roots' hidden rows"
        depth = len(growth.levels)
        logits = self.heads(states, depth)
        if growth.plan.apart:
            logits = logits.repeat_interleave(growth.plan.levels[depth].front, dim=0)
        return logits, states
