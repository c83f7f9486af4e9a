"""The target drafts for itself: its own weights in fewer bits, over the target's own pages.

The text's keys and values are the target's, so there is no prompt to read, no cache and nothing to catch up with. Only
drafted nodes need rows of these weights: they are scratch in the slots past the committed text, where the pass that
verifies writes its own next::

    slots       0 ...... length - 1    length    length + 1 ..
    drafting    the target's           root      expanded nodes, a pass for each level
    verifying   the target's           root      nodes of the tree; those of the accepted path move down

So a row of these weights is never read by the target, nor by a later draft: whatever becomes text was written by the
target in between, in pages and window pages alike, and pages that others share end below the committed length.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foresay.drafters.growth import Growth
from foresay.drafters.levels import TreeDrafter
from foresay.kvpaging import KVStore
from foresay.spec.names import SELF
from foresay.verifier.graphs.rows import Nodes, chain_words, rows_of
from foresay.verifier.graphs.state import StepState
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.forward import forward
from foresay.verifier.ops.trees import known_tokens, text_ends


class SelfDrafter(TreeDrafter):
    """Drafts with a decoder of the target's shape. store: the target's, of which it writes scratch alone."""

    def __init__(self, decoder: Decoder, store: KVStore, dynamic: bool = True) -> None:
        super().__init__(SELF, dynamic, store.device, store.pool)
        self.decoder, self.store, self.windows = decoder, store, store.windows
        self._roots: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def reach(self, levels: int) -> int:
        """The root: all before it is there."""
        return 1

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, None]:
        """A pass over the roots."""
        if state.size not in self._roots:
            self._roots[state.size] = chain_words(state.size, 1, self.device)
        return self._logits(state, Nodes(text_ends(state.recent, state.lengths, 1, 0).tokens, *self._roots[state.size]))

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, None]:
        """A pass over the expanded nodes."""
        return self._logits(growth.state, growth.expanded())

    def _logits(self, state: StepState, nodes: Nodes) -> tuple[Tensor, None]:
        nodes = nodes._replace(tokens=known_tokens(nodes.tokens, self.decoder.config.vocab_size))
        rows, _ = rows_of(state, nodes, live=True)
        if state.window_tables is not None:
            rows = replace(rows, windowed=rows_of(state, nodes, live=True, tables=state.window_tables)[0])
        return forward(self.decoder, rows, self.store)[0], None
