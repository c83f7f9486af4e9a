"""A smaller model proposes, level by level, a chain or a tree (:mod:`drafters.growth`).

It adds the *same* position-keyed noise to its logits as the target's draw will (at the request's temperature), so the
likeliest child of a node is the draft's own shared-noise draw, and the next ones are the runners-up of that draw:
the coupling of :mod:`spec.accept`.

Its KV lives in a store of its own, on the sequences' pages: committed text is caught up in one pass, expanded nodes are
scratch rows past the committed length, and those of an accepted path are kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from drafters.calibration import Calibration
from drafters.growth import Growing, lengthened
from spec.names import DRAFT_MODEL
from spec.protocols import FeatureRequest, Rows
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.paged_model import PagedModel

#: Committed text is caught up in pieces of at most this many rows, to bound the pass's memory.
_CATCH_UP_ROWS = 256


class DraftModelDrafter:
    """Implements :class:`spec.protocols.Drafter` with a :class:`~verifier.paged_model.PagedModel`.

    dynamic: see :mod:`drafters.growth`. shared_noise: whether drafts are sampled with the target's own noise; False is
    for comparison. In another vocabulary than the target's, read: int64[V], the model's id for each of the target's,
    and token_ids: int64[V'], the target's id of each of its logits; None where they are the same.
    """

    shared_noise: bool = True
    needs: FeatureRequest | None = None

    def __init__(
        self,
        model: PagedModel,
        dynamic: bool = True,
        name: str = DRAFT_MODEL,
        read: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        self.name, self.dynamic, self.read, self.token_ids = name, dynamic, read, token_ids
        self.model, self.calibration = model, Calibration()
        self._grown: dict[str, Growing] = {}

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, all sequences' frontiers in one pass per level."""
        growing = [
            Growing.below(s, shape, self.dynamic, self.calibration) for s, shape in zip(sequences, shapes, strict=True)
        ]
        while active := [g for g in growing if not g.done]:
            rows = [self._frontier(g) if g.depth else self._catch_up(g.sequence) for g in active]
            forward = self.model.run(rows)
            logits = [forward.of(index) for index in range(len(active))]
            lengthened(active, logits, self.model, self.shared_noise, self.token_ids)
        self._grown.update((g.sequence.id, g) for g in growing if g.depth)
        return [g.tree(self.name) for g in growing]

    def _frontier(self, growing: Growing) -> Rows:
        rows = growing.frontier_rows()
        return rows if self.read is None else replace(rows, tokens=self.read[rows.tokens])

    def _catch_up(self, sequence: Sequence) -> Rows:
        """The rows from the first committed token without KV to the root; long stretches run beforehand."""
        while len(sequence.tokens) - self._filled(sequence) > _CATCH_UP_ROWS:
            self.extend(sequence)
        filled = self._filled(sequence)
        return Rows(sequence.table, self._known(sequence.tokens[filled:]), filled, wanted="last")

    def _known(self, tokens: list[int]) -> Tensor:
        """int64[R]: the tokens as this model's; those past its vocabulary (the target's padding) as its last one."""
        ids = torch.tensor(tokens)
        return ids.clamp_(max=self.model.vocab_size - 1) if self.read is None else self.read[ids]

    def _filled(self, sequence: Sequence) -> int:
        return sequence.table.length - self.model.missing(sequence.table)

    def unread(self, sequence: Sequence) -> int:
        """Tokens without KV here, the root among them."""
        return len(sequence.tokens) - self._filled(sequence)

    def extend(self, sequence: Sequence) -> None:
        """Compute KV for committed tokens that have none, at most ``_CATCH_UP_ROWS`` of them."""
        table, filled = sequence.table, self._filled(sequence)
        stop = min(table.length, filled + _CATCH_UP_ROWS)
        if stop > filled:
            self.model.run([Rows(table, self._known(sequence.tokens[filled:stop]), filled, wanted="none")])
            self.model.store.mark(table, stop)

    def committed(self, sequence: Sequence, path: list[int]) -> None:
        """Keep the rows of the accepted nodes that were expanded; the calibration learns."""
        g = self._grown.pop(sequence.id, None)
        if g is None:
            return
        g.learn(path)
        table, rows = sequence.table, g.rows_of(path)
        base = table.length - len(path)
        jumped = [(row, depth) for depth, row in enumerate(rows) if row != depth]
        if jumped:
            slots = table.slots(base, base + max(rows) + 1)
            sources, destinations = zip(*jumped, strict=True)
            self.model.store.move(slots[torch.tensor(sources)], slots[torch.tensor(destinations)])
        self.model.store.mark(table, base + len(rows))

    def finished(self, sequence: Sequence) -> None:
        """Nothing outlives the sequence: its rows are in its pages."""
        self._grown.pop(sequence.id, None)
