"""A smaller model proposes, level by level, a chain or a tree (:mod:`drafters.growth`).

It adds the *same* position-keyed noise to its logits as the target's draw will (at the request's temperature), so the
likeliest child of a node is the draft's own shared-noise draw, and the next ones are the runners-up of that draw:
the coupling of :mod:`spec.accept`.

Its KV lives in a store of its own, on the sequences' pages: committed text is caught up in one pass, expanded nodes are
scratch rows past the committed length, and those of an accepted path are kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from drafters.growth import Growth
from drafters.levels import TreeDrafter
from spec.names import DRAFT_MODEL
from spec.protocols import FeatureRequest, Rows
from spec.sequence import Sequence
from verifier.graphs.rows import rows_of
from verifier.model.paged_pass import paged_pass
from verifier.ops.level import known_tokens
from verifier.paged_model import PagedModel
from verifier.paged_rows import StaticRows

#: Committed text is caught up in pieces of at most this many rows, to bound the pass's memory.
_CATCH_UP_ROWS = 256


class DraftModelDrafter(TreeDrafter):
    """Drafts with a :class:`~verifier.paged_model.PagedModel`.

    In another vocabulary than the target's, read: int64[V], the model's id for each of the target's, and token_ids:
    int64[V'], the target's id of each of its logits; None where they are the same.
    """

    needs: FeatureRequest | None = None

    def __init__(
        self,
        model: PagedModel,
        dynamic: bool = True,
        name: str = DRAFT_MODEL,
        read: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        device = model.store.keys.device
        super().__init__(name, dynamic, device, model.store.pool)
        self.model = model
        self._read, self._known = read, model.vocab_size if read is None else len(read)
        self._read_there, self.token_ids = (None if ids is None else ids.to(device) for ids in (read, token_ids))

    def first(self, sequences: Many[Sequence]) -> tuple[Tensor, None]:
        """One pass over what was not read yet, the roots last."""
        return self.model.run([self._catch_up(sequence) for sequence in sequences]).logits, None

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, None]:
        """A pass over the expanded nodes."""
        nodes = growth.expanded()
        return self.logits(rows_of(growth.state, nodes._replace(tokens=self.known(nodes.tokens)))[0]), None

    def logits(self, rows: StaticRows) -> Tensor:
        """fp32[W, V'], of static rows."""
        return paged_pass(self.model.decoder, rows, self.model.store)[0]

    def known(self, tokens: Tensor) -> Tensor:
        """The tokens as this model's."""
        return known_tokens(tokens, self._known, self._read_there)

    def _catch_up(self, sequence: Sequence) -> Rows:
        """The rows from the first committed token without KV to the root; long stretches run beforehand."""
        while len(sequence.tokens) - self._filled(sequence) > _CATCH_UP_ROWS:
            self.extend(sequence)
        filled = self._filled(sequence)
        return Rows(sequence.table, self._text(sequence.tokens[filled:]), filled, wanted="last")

    def _text(self, tokens: list[int]) -> Tensor:
        """int64[R], on the host."""
        ids = torch.tensor(tokens)
        return ids.clamp_(max=self.model.vocab_size - 1) if self._read is None else self._read[ids]

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
            self.model.run([Rows(table, self._text(sequence.tokens[filled:stop]), filled, wanted="none")])
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
