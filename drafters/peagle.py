"""A P-EAGLE head proposes: EAGLE's rows, and behind the root's a mask for each further level, run together.

::

    position   length - K .. length - 1   length    length + 1   length + 2
    rows       true features              root      mask         mask           scratch, from the root on
    guesses                               x(l + 1)  x(l + 2)     x(l + 3)

No level waits for the one before, so below every node of a depth the candidates are the same, as DFlash's are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.growth import Growth
from foresay.drafters.marginals import of_level
from foresay.kvpaging import PagePool
from foresay.spec.names import PEAGLE
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.rows import Nodes, chain_words, rows_of
from foresay.verifier.graphs.state import StepState
from foresay.verifier.heads.eagle import EagleHead


class PEagleDrafter(EagleDrafter):
    """Drafts with a head that guesses several tokens at once."""

    free = ahead = True

    def __init__(
        self, head: EagleHead, pool: PagePool, dynamic: bool = True, name: str = PEAGLE, kv: torch.dtype | None = None
    ) -> None:
        super().__init__(head, pool, dynamic, name, kv)
        self._masks: dict[tuple[int, int], tuple[Nodes, Tensor]] = {}

    def limited(self, shape: TreeShape) -> TreeShape:
        """Not deeper than it was trained to guess."""
        return shape.limited(self.head.config.guesses)

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor]:
        """The last rows of the text and the masks. The levels start from the logits of all of them, level by level."""
        logits = self.head.logits(self.guesses(state, levels))
        return logits[: state.size], logits

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next level's."""
        return of_level(growth, states)

    def guesses(self, state: StepState, levels: int) -> Tensor:
        """[levels * S, H]: what the output matrix reads of each level."""
        ends = self.ends(state, levels).rows(state)
        first, _ = self.head.states(ends, self.before(state, levels), self.store)
        if levels == 1:
            return first
        nodes, wanted = self._of_masks(state.size, levels - 1)
        assert self.head.mask is not None, "it drafts in parallel"
        masks = self.head.mask.expand(len(wanted), -1).contiguous()
        behind, _ = self.head.states(rows_of(state, nodes, wanted=wanted)[0], masks, self.store)
        return torch.cat((first, behind))

    def _of_masks(self, sequences: int, count: int) -> tuple[Nodes, Tensor]:
        """The rows of masks, and their numbers level by level."""
        key = sequences, count
        if key not in self._masks:
            columns = (column[:, 1:].contiguous() for column in chain_words(sequences, count + 1, self.device))
            mask = self.head.config.mask
            tokens = torch.full((sequences, count), 0 if mask is None else mask, dtype=torch.int64, device=self.device)
            wanted = torch.arange(count)[:, None] + count * torch.arange(sequences)
            self._masks[key] = Nodes(tokens, *columns), wanted.flatten().to(self.device)
        return self._masks[key]
