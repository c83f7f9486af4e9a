"""A DSpark head proposes: a DFlash block, whose logits below each node are moved by the node's own token.

The pass is DFlash's; what follows below a token costs a small product for each level, so that trees grow as those of a
draft model do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.drafters.dflash import DFlashDrafter
from foresay.drafters.growth import Growth
from foresay.kvpaging import PagePool
from foresay.spec.names import DSPARK
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.dflash import DFlashHead
from foresay.verifier.ops.level import known_tokens


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
