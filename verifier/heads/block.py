"""The rows of a pass that guesses a block of tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.graphs.rows import chain_words
from foresay.verifier.graphs.state import StepState
from foresay.verifier.ops.lay_out import lay_out
from foresay.verifier.ops.records import PagedRows
from foresay.verifier.paged_rows import Group, StaticRows


class Block:
    """A root and masks, ``count`` rows for each of S sequences, at the ends of their texts.

    anchored: whether the root's row guesses too. The rows that guess are wanted, depth by depth.
    """

    def __init__(self, sequences: int, count: int, mask: int, anchored: bool, device: torch.device) -> None:
        self._numbers, self._words, self._depths = chain_words(sequences, count, device)
        self._masks = torch.full((sequences, count - 1), mask, dtype=torch.int64, device=device)
        whole = (1 << count) - 1
        self._whole = torch.full((sequences * count,), whole - (whole >> 63 << 64), dtype=torch.int64, device=device)
        self._behind = torch.full((sequences * count,), count - 1, dtype=torch.int32, device=device)
        guessing = torch.arange(0 if anchored else 1, count)[:, None] + count * torch.arange(sequences)
        self._wanted = guessing.flatten().to(device)

    def rows(self, state: StepState, roots: Tensor, causal: bool = False) -> StaticRows:
        """Each sees all of its block; causal: none of what is behind it. roots: int64[S], tokens."""
        size, count = self._numbers.shape
        paged = PagedRows(
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
