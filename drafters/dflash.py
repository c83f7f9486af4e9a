"""A DFlash head proposes: one pass makes the logits of all levels, and a chain or a tree is grown from them.

::

    committed    keys and values of what the target thought of each position, stored as soon as it is known
    begin        a pass over the root and a mask for each level; only its rows' keys are scratch
    next         the logits of the next depth, the same below every node: marginals

Marginals know nothing of what the others chose. The noise of each position, which the target will draw with, tells most
of what is missing: among a position's likely tokens the one that will be drawn stands out, whatever came before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.drafters.fed import FedDrafter
from foresay.drafters.growth import Growth
from foresay.drafters.marginals import of_level
from foresay.kvpaging import KVStore, PagePool
from foresay.spec.names import DFLASH
from foresay.spec.protocols import Features
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.dflash import Block, DFlashHead
from foresay.verifier.model.sizes import kv_shapes
from foresay.verifier.ops.level import known_tokens


class DFlashDrafter(FedDrafter):
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
        self._blocks: dict[tuple[int, int], Block] = {}

    def keep(self, features: Features, positions: Tensor, slots: Tensor) -> None:
        """As keys and values of every layer."""
        self.head.inject(features, positions, slots, self.fed)

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
        return of_level(growth, states)

    def states(self, state: StepState, levels: int) -> Tensor:
        """[levels * S, H]: the rows that guess, level by level."""
        config = self.head.config
        key = state.size, levels + (not config.anchored)
        if key not in self._blocks:
            self._blocks[key] = Block(*key, config, self.device)
        block, roots = self._blocks[key], known_tokens(state.roots.contiguous(), self.head.vocab_size)
        return self.head.guess(block, state, roots, self.fed)
