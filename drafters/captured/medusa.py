"""Medusa heads inside a captured step: one small product for each depth, no cache, one hidden row of each text.

That row stays on the device from step to step. The host looks for it again when sequences change places, go on in a
bucket of another size or step by step; and a step may have run ahead of what the host has collected. So the rows of the
last two steps are kept, each with the length of the text that it ends, and the one that fits is taken.

Legend: S sequences, H hidden width, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from drafters.captured.learning import learn
from drafters.growth import Growth, Plan, levels
from drafters.medusa import MedusaDrafter
from spec.protocols import FeatureRequest
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.graphs.proposer import DeviceTree, Taken
from verifier.graphs.state import StepState

#: Rows that are kept of each place: the newest, and the one before.
_KEPT = 2


class CapturedMedusa:
    """Implements :class:`verifier.graphs.proposer.Proposer`. Owns the hidden rows. drafter: the eager one."""

    needs: FeatureRequest | None = MedusaDrafter.needs
    reach: int = 1
    host: bool = False

    def __init__(self, drafter: MedusaDrafter, shape: TreeShape, sequences: int) -> None:
        """Lets the drafter find rows here (:attr:`MedusaDrafter.elsewhere`)."""
        self.drafter, self.name, self._heads = drafter, drafter.name, drafter.heads
        self.shape = shape.limited(len(drafter.heads))
        device = drafter.heads.device
        self._plan = Plan(self.shape, sequences, device)
        self._order = torch.arange(sequences, device=device)
        self._hidden = torch.zeros(
            _KEPT, sequences, drafter.heads.hidden_size, dtype=drafter.heads.dtype, device=device
        )
        self._lengths = torch.full((_KEPT, sequences), -1, dtype=torch.int32, device=device)
        self._seated: list[Sequence] = []
        drafter.elsewhere.append(self._find)

    def propose(self, state: StepState) -> DeviceTree:
        """A tree below every root."""
        growth = Growth(self._plan, state, self._heads.token_map)
        for _ in levels(growth, self.drafter, self._heads(self._hidden[0], 0), self._hidden[0]):
            pass
        return growth.tree()

    def committed(self, state: StepState, taken: Taken) -> None:
        """The hidden row of the last accepted node is the newest now."""
        lengths = taken.paths.lengths
        last = taken.paths.paths.gather(1, (lengths - 1).clamp(min=0)[:, None]).flatten().clamp(min=0)
        self._hidden[1].copy_(self._hidden[0])
        self._lengths[1].copy_(self._lengths[0])
        self._hidden[0].copy_(taken.features["final"].index_select(0, last + self._order * taken.slots.shape[1]))
        self._lengths[0].copy_(state.lengths + lengths)

    @torch.inference_mode()
    def prepare(self, sequences: Many[Sequence]) -> bool:
        """Seat the sequences in this order, with their hidden rows. False if one is nowhere."""
        lengths = [sequence.table.length for sequence in sequences]
        if self._seated == list(sequences) and self._lengths[0, : len(lengths)].tolist() == lengths:
            return True
        found = [self.drafter.hidden(sequence) for sequence in sequences]
        self._seated = list(sequences)
        self._lengths.fill_(-1)  # what else is kept belongs to whoever sat there before
        for place, row in enumerate(found):
            if row is not None:
                self._hidden[0, place].copy_(row)
                self._lengths[0, place] = lengths[place]
        return all(row is not None for row in found)

    def _find(self, sequence: Sequence) -> Tensor | None:
        """[H]: the row that ends the sequence's text, if captured steps left it here. Waits for the device."""
        if sequence not in self._seated:
            return None
        place = self._seated.index(sequence)
        lengths = self._lengths[:, place].tolist()
        length = sequence.table.length
        return self._hidden[lengths.index(length), place].clone() if length in lengths else None

    def collected(self, sequence: Sequence, tree: DraftTree, path: list[int]) -> None:
        """The calibration learns; the hidden row stays where it is."""
        learn(self.drafter.calibration, sequence, tree, path)
