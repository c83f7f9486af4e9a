"""The target drafts for itself: its own weights in fewer bits, over the target's own pages.

The text's keys and values are the target's, so there is no prompt to read, no cache and nothing to catch up with. Only
drafted nodes need rows of these weights: they are scratch in the slots past the committed text, where the pass that
verifies writes its own next::

    slots       0 ...... length - 1    length    length + 1 ..
    drafting    the target's           root      expanded nodes, a pass for each level
    verifying   the target's           root      nodes of the tree; those of the accepted path move down

So a row of these weights is never read by the target, nor by a later draft: whatever becomes text was written by the
target in between, in pages and window pages alike, and pages that others share end below the committed length.

A smaller model may draft for the copy: its chains are verified as the target verifies, by a step over the same scratch,
again and again until the chain is long enough. So the chain is the copy's own, token for token, and sooner there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.growth import Growth, layout
from foresay.drafters.levels import TreeDrafter, room
from foresay.drafters.proposer import Drafts
from foresay.drafters.tree_builder import TreeBuilder, adjusts
from foresay.kvpaging.pool import PADDING_PAGE
from foresay.spec.names import SELF
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape
from foresay.verifier.graphs.capture import recorded, without_stops
from foresay.verifier.graphs.rows import Nodes, chain_words, rows_of
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.graphs.step import Outcome, SpeculativeStep
from foresay.verifier.model.forward import forward
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.trees import known_tokens, text_ends

#: Tokens that a smaller model drafts for each of the copy's passes.
_AHEAD = 3


class SelfDrafter(TreeDrafter):
    """Drafts with the target's shape. model: the copy, on the target's store, of which it writes scratch alone.
    before: who drafts chains for it, if there is one."""

    def __init__(self, model: ModelRunner, dynamic: bool = True, before: DraftModelDrafter | None = None) -> None:
        super().__init__(SELF, dynamic, model.store.device, model.store.pool)
        self.model, self.before, self.windows = model, before, model.store.windows
        self._roots: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._rounds: dict[tuple[int, int], Rounds] = {}
        #: Of each sequence's chain: who proposed each node, and how many of them the last round began behind.
        self._stages: dict[str, tuple[list[str], int]] = {}

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
        nodes = nodes._replace(tokens=known_tokens(nodes.tokens, self.model.vocab_size))
        rows, _ = rows_of(state, nodes, live=True)
        if state.window_tables is not None:
            rows = replace(rows, windowed=rows_of(state, nodes, live=True, tables=state.window_tables)[0])
        return forward(self.model.decoder, rows, self.model.store)[0], None

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """One tree per sequence; of a chain in stages it is said who proposed each node."""
        trees = super().propose(sequences, shapes)
        for place, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            if (stages := self._stages.get(sequence.id)) is not None:
                trees[place] = replace(tree, sources=tuple(["", *stages[0]][: len(tree)]))
        return trees

    def _grow(self, growing: Sequence[TreeBuilder], apart: bool) -> None:
        shape, sequences = growing[0].shape, [grown.sequence for grown in growing]
        alone = self.before is None or not shape.is_chain or not 1 < shape.levels < MAX_NODES - _AHEAD
        if self.before is None or alone or any(adjusts(sequence, 0) for sequence in sequences):
            return super()._grow(growing, apart)
        rounds = self._rounds_of(self.before, sequences)
        for grown in growing:
            grown.fixed = layout(shape, dynamic=False)
            self.before.prepare(grown.sequence, _AHEAD)
            self._stages[grown.sequence.id] = [], 0
        rounds.state.join([self._joined(sequence, rounds.state.recent.shape[1]) for sequence in sequences])
        while not all(grown.over for grown in growing):
            for grown, tokens in zip(growing, rounds.run(), strict=False):
                stages, drafted = self._stages[grown.sequence.id][0], len(grown.tokens) - 1
                if not grown.over:
                    self._stages[grown.sequence.id] = [*stages, *[self.before.name] * (len(tokens) - 1), SELF], drafted
                for token in tokens:
                    grown.lengthen(token)
        for sequence in sequences:
            self.before.began(sequence)

    def _rounds_of(self, first: DraftModelDrafter, sequences: Sequence[SequenceState]) -> Rounds:
        longest = max(len(sequence.table.pages) for sequence in sequences) + self._beyond
        key = 1 << (len(sequences) - 1).bit_length(), room(longest, self._page_size)
        if key not in self._rounds:
            state = StepState(*key, self._page_size, first.reach(_AHEAD), self.device, self.windows)
            self._rounds[key] = Rounds(self.model, first, state)
        return self._rounds[key]

    @property
    def _beyond(self) -> int:
        """Pages past those that are reserved which a last round may write to."""
        return -(-(_AHEAD + 1) // self._page_size)

    def _joined(self, sequence: SequenceState, reach: int) -> BatchSlot:
        slot = super()._joined(sequence, reach)
        return slot if self.before is None else replace(slot, pages=slot.pages + [PADDING_PAGE] * self._beyond)

    def extend(self, sequence: SequenceState) -> None:
        """What drafts for it reads the text."""
        if self.before is not None:
            self.before.extend(sequence)

    def unread(self, sequence: SequenceState) -> int:
        """Tokens that what drafts for it has no rows of, the root among them."""
        return 1 if self.before is None else self.before.unread(sequence)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """The calibration learns; what drafts for it has rows of the nodes before its last round."""
        super().committed(sequence, path)
        stages = self._stages.pop(sequence.id, None)
        if self.before is not None and stages is not None:
            self.before.collected(sequence, DraftTree.chain([0] * (stages[1] + 2)), path)

    def finished(self, sequence: SequenceState) -> None:
        """Both forget it."""
        super().finished(sequence)
        self._stages.pop(sequence.id, None)
        if self.before is not None:
            self.before.finished(sequence)


class Rounds:
    """Steps of the copy over chains of another drafter, each going on where the last one ended. state: where the texts
    end, drafts among them."""

    def __init__(self, model: ModelRunner, first: DraftModelDrafter, state: StepState) -> None:
        self.state = state
        drafts = Drafts(first, TreeShape.chain(_AHEAD), state.size, model.vocab_size)
        self._step = SpeculativeStep(model, drafts, state)
        self._replay = (recorded if compiled(state.lengths) else first.capture)(without_stops(self._step))

    def run(self) -> list[list[int]]:
        """One round: what each text is longer by, the copy's own token last."""
        self._replay()
        outcome = Outcome(self._step.out.cpu())
        verified = [outcome.of(place, SELF)[1] for place in range(self.state.size)]
        return [[sampled[node] for node in path] for sampled, path in verified]
