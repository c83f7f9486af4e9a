"""A draft model inside a captured step.

::

    text        ... p-1  root          before it drafts: one pass over the last committed token and the root
    slots      length-1  length        (the former's row is there already unless it was the tree's last leaf)
    levels      length + node          a pass for each further level, over its expanded nodes

After the step the rows of accepted nodes move down as the target's do: they lie in the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from drafters.captured.learning import learn
from drafters.draft_model import DraftModelDrafter
from drafters.growth import Growth, Plan, levels
from spec.protocols import FeatureRequest
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.graphs.proposer import DeviceTree, Taken
from verifier.graphs.rows import Nodes, chain_words, rows_of
from verifier.graphs.state import StepState
from verifier.ops.move import move_paths

#: The last committed token and the root.
_REACH = 2


class CapturedDraftModel:
    """Implements :class:`verifier.graphs.proposer.Proposer`. drafter: the eager one; both use one model and store.

    vocab_size: the target's; what the model has beyond it is not drafted. None: it has nothing beyond.
    """

    needs: FeatureRequest | None = None
    reach: int = _REACH
    host: bool = False

    def __init__(
        self, drafter: DraftModelDrafter, shape: TreeShape, sequences: int, vocab_size: int | None = None
    ) -> None:
        self.drafter, self.shape, self.name = drafter, shape, drafter.name
        model = drafter.model
        device = model.store.keys.device
        self._columns = vocab_size if drafter.token_ids is None else None
        self._model, self._plan = model, Plan(shape, sequences, device, columns=self._columns)
        self._text = chain_words(sequences, _REACH, device)
        self._roots = torch.arange(_REACH - 1, sequences * _REACH, _REACH).to(device)

    def propose(self, state: StepState) -> DeviceTree:
        """A tree below every root: a pass for each level."""
        growth = Growth(self._plan, state, self.drafter.token_ids)
        numbers, words, depths = self._text
        end = Nodes(self.drafter.known(state.recent[:, -_REACH:]), numbers, words, depths)
        logits = self.drafter.logits(rows_of(state, end, back=_REACH - 1, wanted=self._roots)[0])
        for _ in levels(growth, self.drafter, logits[:, : self._columns].contiguous()):
            pass
        return growth.tree()

    def committed(self, state: StepState, taken: Taken) -> None:
        """Rows of accepted nodes move down. A leaf has none; the next step computes it before it drafts."""
        if not taken.tree.chain:
            store = self._model.store
            move_paths(store.keys, store.values, taken.paths.sources, taken.slots, taken.paths.lengths)

    def prepare(self, sequences: Many[Sequence]) -> bool:
        """Catch up until all but the last committed token are there; a text of one token has none."""
        for sequence in sequences:
            while self._model.missing(sequence.table) > _REACH - 1:
                self.drafter.extend(sequence)
        return all(sequence.table.length >= _REACH - 1 for sequence in sequences)

    def collected(self, sequence: Sequence, tree: DraftTree, path: list[int]) -> None:
        """Mark the rows that are there: of the path's nodes all but a leaf."""
        table = sequence.table
        inner = set(tree.parents.tolist())
        rows = sum(node in inner for node in path) if len(tree) > 1 else 0
        self._model.store.mark(table, table.length - len(path) + rows)
        learn(self.drafter.calibration, sequence, tree, path)
