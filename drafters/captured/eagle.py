"""An EAGLE head inside a captured step.

::

    position      length - K .. length - 1   length    ..
    first pass    row           row          root          K + 1 rows of true features; the root's is gone on from
    levels                                        node     a pass for each further level, over its expanded nodes, made
                                                           of the states of their parents
    committed     the features of what was accepted go to the drafter's store, for the next first pass

A step accepts between 1 and K + 1 tokens, and only the device knows how many. The first pass need not know: it runs the
last K + 1 rows of the text, whichever of them are new. One that was right already is written as it was, for it is a
function of the text alone; so it may be, also in a page that others share. What was drafted is never kept.

Legend: S sequences, K levels, F expanded nodes of a level, H hidden width, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor
from torch.nn import functional

from drafters.captured.learning import learn
from drafters.eagle import EagleDrafter
from drafters.growth import Growth, Plan, levels
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.graphs.proposer import DeviceTree, Taken
from verifier.graphs.rows import Nodes, chain_words, rows_of
from verifier.graphs.state import StepState
from verifier.ops.lay_out import lay_out


class CapturedEagle:
    """Implements :class:`verifier.graphs.proposer.Proposer`. drafter: whose head and stores it shares."""

    host: bool = False

    def __init__(self, drafter: EagleDrafter, shape: TreeShape, sequences: int) -> None:
        self.drafter, self.shape = drafter, shape
        self.name, self.needs, self.reach = drafter.name, drafter.needs, shape.levels + 1
        self._head, device = drafter.head, drafter.head.device
        self._plan = Plan(shape, sequences, device)
        self._numbers, self._words, self._depths = chain_words(sequences, self.reach, device)
        self._roots = torch.arange(self.reach - 1, sequences * self.reach, self.reach).to(device)
        self._order = torch.arange(sequences, device=device)[:, None]

    def propose(self, state: StepState) -> DeviceTree:
        """A tree below every root: a pass for each level."""
        growth = Growth(self._plan, state, self._head.token_ids)
        for _ in levels(growth, self.drafter, *self._from_text(state)):
            pass
        return growth.tree()

    def _from_text(self, state: StepState) -> tuple[Tensor, Tensor]:
        """Logits fp32[S, V'] below the roots, and their states [S, H]."""
        end = Nodes(state.recent[:, -self.reach :], self._numbers, self._words, self._depths)
        rows, _ = rows_of(state, end, back=self.reach - 1, wanted=self._roots)
        before = state.lengths - self.reach
        _, slots = lay_out(state.tables, state.page_size, before, self._depths, self._numbers, state.live)
        return self.drafter.run(rows, self._features.index_select(0, slots))

    @property
    def _features(self) -> Tensor:
        """[slots, H]: the fused features of all pages."""
        return self.drafter.features.keys[0, :, 0]

    def committed(self, state: StepState, taken: Taken) -> None:
        """Fuse and store the features of the accepted path. What is stored behind it is scratch, as its slots are."""
        path = taken.paths.paths[:, : self.reach]
        rows = (path.clamp(min=0) + self._order * taken.slots.shape[1]).flatten()
        read = {name: _filled(taken.features[name].index_select(0, rows), 2) for name in self._head.config.names}
        slots = taken.slots[:, : self.reach].flatten()
        self._features.index_copy_(0, slots, self._head.fuse(read)[: len(slots)])

    def prepare(self, sequences: Many[Sequence]) -> bool:
        """Run the rows below the first pass. False for a text that is too short for it, or without features."""
        return all(self._ready(sequence) for sequence in sequences)

    def _ready(self, sequence: Sequence) -> bool:
        base = sequence.table.length - self.shape.levels
        if base < 1 or not self.drafter.knows(sequence):
            return False
        while self.drafter.store.filled(sequence.table) < base:
            self.drafter.extend(sequence)
        return True

    def collected(self, sequence: Sequence, tree: DraftTree, path: list[int]) -> None:
        """The text's features are there, and its rows up to what was the root; the calibration learns."""
        self.drafter.stored(sequence.table, len(path), ran=len(tree) > 1)
        learn(self.drafter.calibration, sequence, tree, path)


def _filled(rows: Tensor, count: int) -> Tensor:
    """``count`` rows at least, zeros behind what there is: a product needs two."""
    return functional.pad(rows, (0, 0, 0, count - len(rows))) if len(rows) < count else rows
