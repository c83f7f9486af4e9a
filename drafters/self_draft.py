"""The target drafts for itself, with its own weights in fewer bits, over the target's own pages.

The text's keys and values are the target's: no prompt to read, no cache, nothing to catch up with. Only drafted nodes
need rows of these weights: scratch in the slots after the committed text, which the verify pass then overwrites::

    slots       0 ...... length - 1    length    length + 1 ..
    drafting    the target's           root      expanded nodes, one pass per level
    verifying   the target's           root      nodes of the tree; those of the accepted path move down

So neither the target nor a later draft ever reads a row of these weights: the target has overwritten all that becomes
text, in pages and window pages alike, and pages shared with other texts end below the committed length. For recurrent
layers it reads the text's state, each level computes the nodes above it again
(:meth:`foresay.drafters.growth.Growth.rows`), and the records of nodes are scratch.

Another drafter may draft for the copy, which verifies its chains as the target does, over the same scratch: a lookup is
called once, a model or a head repeatedly until the chain is long enough. So the chain is the copy's own, token for
token, but computed sooner. A head reads the copy's hidden states of drafted tokens, and the target's once those exist.
The state after what the copy verified is in the text's spare page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foresay.drafters.growth import Growth, layout
from foresay.drafters.levels import TreeDrafter
from foresay.drafters.proposer import Drafts
from foresay.drafters.tree_builder import TreeBuilder, adjusts
from foresay.kvpaging.pool import PADDING_PAGE
from foresay.kvpaging.states import recurrent_state
from foresay.kvpaging.verbs import NONE
from foresay.spec.names import SELF
from foresay.spec.protocols import Drafter, Features, Lookup, Rows, Verified, reader_of
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.graphs.capture import recorded, without_stops
from foresay.verifier.graphs.rows import Nodes, chain_words, rows_of
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.graphs.step import Outcome, SpeculativeStep
from foresay.verifier.model.forward import forward
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.recurrence import replay
from foresay.verifier.ops.trees import known_tokens, text_ends

#: Tokens that a model or a head drafts for each of the copy's passes.
_AHEAD = 3


@dataclass(slots=True)
class _Chain:
    """What the copy verified of another's drafts. tokens: the copy's own samples. sources: the drafter of each. behind:
    how many there were before the last round. page: the state after them, if layers are recurrent."""

    page: int
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    behind: int = 0


class SelfDrafter(TreeDrafter):
    """Drafts with the target's shape. model: the copy, on the target's store, of which it writes only scratch. before,
    lookup: the drafter or the lookup that proposes chains for it, if any. shared: whether other drafters use that one
    too and notify it."""

    staged = True

    def __init__(
        self,
        model: ModelRunner,
        before: TreeDrafter | None = None,
        lookup: Lookup | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(SELF, model.store.device, model.store.pool)
        self.model, self.before, self.lookup, self.windows = model, before, lookup, model.store.windows
        self._informed: Drafter | None = None if shared else before or lookup
        self.recurrent, self.needs = (
            model.store.states is not None,
            None if self._informed is None else self._informed.needs,
        )
        self.beyond = -(-MAX_NODES // self._page_size)
        self._roots: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._rounds: dict[tuple[int, int], Rounds] = {}
        self._chains: dict[str, _Chain] = {}
        self._found: dict[str, DraftTree] = {}
        self.checks = before is None and lookup is None and self.device.type == "cpu"

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, None]:
        """A pass over the roots."""
        if state.size not in self._roots:
            self._roots[state.size] = chain_words(state.size, 1, self.device)
        roots = text_ends(state.recent, state.lengths, 1, 0).tokens
        nodes = Nodes(self._known(roots), *self._roots[state.size])
        return self._logits(rows_of(state, nodes, live=True, store=self.model.store))

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, None]:
        """A pass over the expanded nodes."""
        return self._logits(growth.rows(self.model.store, self._known))

    def _logits(self, rows: StaticRows) -> tuple[Tensor, None]:
        return forward(self.model.decoder, rows, self.model.store)[0], None

    def _known(self, tokens: Tensor) -> Tensor:
        return known_tokens(tokens, self.model.vocab_size)

    # -- in stages ---------------------------------------------------------------------------------------------------

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """One tree per sequence; a chain in stages names the drafter of each node."""
        trees = super().propose(sequences, shapes)
        for index, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            if (chain := self._chains.get(sequence.id)) is not None:
                sources = ["", *chain.sources, *[SELF] * len(tree)]
                passes = max(1, len(tree) - len(chain.tokens)) if self.checks else 0
                trees[index] = replace(tree, sources=tuple(sources[: len(tree)]), passes=passes)
        return trees

    def check(self, sequence: SequenceState, found: DraftTree) -> None:
        """See :class:`foresay.spec.protocols.Checks`."""
        self._found[sequence.id] = found

    def _grow(self, growing: Sequence[TreeBuilder], apart: bool) -> None:
        before, shape = self.before, growing[0].shape
        found = [self._found.pop(grown.sequence.id, None) for grown in growing]
        in_stages = shape.is_chain and 1 < shape.levels < MAX_NODES - _AHEAD
        if in_stages and not any(adjusts(grown.sequence, 0) for grown in growing):
            if self.lookup is not None:
                shapes = [TreeShape.chain(shape.levels - 1)] * len(growing)
                found = self.lookup.find([grown.sequence for grown in growing], shapes)
            if before is not None and all(before.able(grown.sequence) for grown in growing):
                self._run_rounds(growing, before)
            elif any(found):
                self._verify([(grown, tree) for grown, tree in zip(growing, found, strict=True) if tree is not None])
        if not all(grown.over for grown in growing):
            super()._grow(growing, apart)

    def _verify(self, pairs: Sequence[tuple[TreeBuilder, DraftTree]]) -> None:
        """Verify what was found, in one pass."""
        trees = [tree.within(self.model.vocab_size) for _, tree in pairs]
        rows = [
            Rows.of_tree(grown.sequence.table, tree, grown.sequence)
            for (grown, _), tree in zip(pairs, trees, strict=True)
        ]
        self.model.run(rows)
        for index, ((grown, _), tree, verified) in enumerate(
            zip(pairs, trees, self.model.verify([None] * len(pairs)), strict=True)
        ):
            assert verified is not None, "a token is drawn at each node"
            self._lengthen(grown, index, verified, tree.sources or [tree.drafter] * len(tree))

    def _run_rounds(self, growing: Sequence[TreeBuilder], before: TreeDrafter) -> None:
        """Draft and verify short chains until all are long enough; a finished one takes no further part."""
        sequences = [grown.sequence for grown in growing]
        rounds = self._rounds_of(before, sequences)
        state, going = rounds.state, [True] * len(growing)
        for sequence in sequences:
            before.prepare(sequence, _AHEAD)
        state.join([self._joined(sequence, state.recent.shape[1]) for sequence in sequences])
        while any(going):
            state.mark_live(going)
            for index, (grown, verified) in enumerate(zip(growing, rounds.run(), strict=False)):
                if going[index]:
                    self._lengthen(grown, index, verified, [before.name] * (_AHEAD + 1))
                    going[index] = not grown.over
                    if state.states is not None:
                        state.write_states(index, (NONE, self._chains[grown.sequence.id].page))
        for sequence in sequences:
            before.began(sequence)

    def _lengthen(self, grown: TreeBuilder, index: int, verified: Verified, sources: Sequence[str]) -> None:
        """Extend the chain by the copy's samples. index: its index in the last pass. sources: each node's drafter."""
        (sampled, path), sequence, states = verified, grown.sequence, self.model.store.states
        text = recurrent_state(sequence.table)
        chain = self._chains.setdefault(sequence.id, _Chain(NONE if text is None else text.page))
        if states is not None and text is not None:
            fresh = not sequence.table.length and not chain.tokens
            replay(states.layers, chain.page, text.free_pages[0], fresh, index, torch.tensor(path))
            chain.page = text.free_pages[0]
        chain.behind = len(chain.tokens)
        chain.sources += [*(sources[node] for node in path[1:]), SELF]
        grown.fixed = grown.fixed or layout(grown.shape)
        for token in (sampled[node] for node in path):
            chain.tokens.append(token)
            grown.lengthen(token)

    def _rounds_of(self, before: TreeDrafter, sequences: Sequence[SequenceState]) -> Rounds:
        longest = max(len(sequence.table.pages) for sequence in sequences) + self.beyond
        # Padding would need records of states, for which there is no room.
        count = len(sequences) if self.recurrent else 1 << (len(sequences) - 1).bit_length()
        key = count, self._room(longest)
        if key not in self._rounds:
            self._rounds[key] = Rounds(self.model, before, self.state(*key, before.reach(_AHEAD)))
        return self._rounds[key]

    def _joined(self, sequence: SequenceState, reach: int) -> BatchSlot:
        """The slot with its chain so far; a last round may write beyond the reserved pages."""
        slot, chain = super()._joined(sequence, reach), self._chains.get(sequence.id)
        text = recurrent_state(sequence.table)
        page, drafted = (NONE if text is None else text.page, []) if chain is None else (chain.page, chain.tokens)
        return replace(
            slot,
            pages=[*slot.pages, *[PADDING_PAGE] * self.beyond],
            length=slot.length + len(drafted),
            text=[*slot.text, *drafted][-reach:],
            states=(NONE, page),
        )

    # -- what drafts for it --------------------------------------------------------------------------------------------

    def observe(self, sequence: SequenceState, features: Features) -> None:
        """Passed on to a head that reads features."""
        if (reader := reader_of(self._informed)) is not None:
            reader.observe(sequence, features)

    def extend(self, sequence: SequenceState) -> None:
        """Passed to the drafter before it."""
        if self._informed is not None:
            self._informed.extend(sequence)

    def unread(self, sequence: SequenceState) -> int:
        """Tokens that the drafter before it has no rows of, including the root."""
        return 1 if self.before is None else self.before.unread(sequence)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Update the calibration, and notify the drafter before it."""
        super().committed(sequence, path)
        self._found.pop(sequence.id, None)
        chain = self._chains.pop(sequence.id, None)
        if self.before is not None and chain is not None:
            self.before.after_rounds(sequence, chain.behind, path)
        if self._informed is not None:
            self._informed.committed(sequence, [0, *(-1 for _ in path[1:])])

    def finished(self, sequence: SequenceState) -> None:
        """Forget the sequence; passed on."""
        super().finished(sequence)
        for kept in (self._chains, self._found):
            kept.pop(sequence.id, None)
        if self._informed is not None:
            self._informed.finished(sequence)


class Rounds:
    """Steps of the copy over chains of another drafter, each continuing where the last one ended. state: the ends of
    the texts, including drafts."""

    def __init__(self, model: ModelRunner, first: TreeDrafter, state: StepState) -> None:
        self.state = state
        drafts = Drafts(first, TreeShape.chain(_AHEAD), state.size, model.vocab_size)
        self._step = SpeculativeStep(model, drafts, state, commits=False)
        self._replay = (recorded if compiled(state.lengths) else first.capture)(without_stops(self._step))

    def run(self) -> list[Verified]:
        """One round: the sample at each node, and the path, whose last sample only the copy proposed."""
        self._replay()
        outcome = Outcome(self._step.out.cpu().tolist())
        return [outcome.of(index, SELF)[1] for index in range(self.state.size)]
