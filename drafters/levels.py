"""Drafters with logits: how the host grows their trees, level by level or all levels in one replay.

::

    prepare  the drafter's own passes over what it has not read yet, if that is more than the text's last few tokens
    begin    logits below the roots, in a pass over the last few tokens
    levels   grown below them (:mod:`foresay.drafters.growth`)
    between  if a request changes logits, or levels have a price, the host checks each level before the next

All but the first is captured, for each shape and number of sequences: in advance, on a CPU also when first needed. The
same is part of the whole steps that a GPU captures (:class:`foresay.drafters.proposer.Drafts`), as is
:meth:`TreeDrafter.follow`.

Legend: S sequences, H hidden width, V' the drafter's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.drafters.calibration import Calibration
from foresay.drafters.growth import Growth, GrowthPlan, Level, Passes, levels
from foresay.drafters.tree_builder import TreeBuilder, adjusts, by_path, learn_chain
from foresay.kvpaging import PagePool, WindowPages
from foresay.spec.constrain import Ahead
from foresay.spec.protocols import FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape
from foresay.verifier.graphs.capture import Capture, Eager, on_host, recorded
from foresay.verifier.graphs.proposer import AcceptedTree
from foresay.verifier.graphs.rows import TextEnds
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.kernels.cpu.launch import alias
from foresay.verifier.ops.trees import ChosenTree

#: There is room for at least this many tokens of a text.
_LEAST_ROOM = 1024
#: How many captures are kept besides those made ahead, the last used: each has its own logits and activations.
_MOST_LEVELS = 24
#: Levels that a device drafts beyond those expected to be worth it, for a tree with a price.
_BEYOND = 1
#: Chains are recorded for a multiple of this many levels: shorter ones are prefixes of them.
_CHAIN = 4


class Levels:
    """Trees of one shape below the roots of some sequences. The host writes their inputs to ``state`` and ``plan``."""

    def __init__(self, plan: GrowthPlan, passes: Passes, state: StepState, capture: Capture) -> None:
        self.plan, self.state, self._passes = plan, state, passes
        self._growth: Growth
        self._seen: list[Tensor]
        self._parts: tuple[Tensor, ...] = ()
        self._each = 2 if plan.device.type == "cpu" else 1  # a device has no stop before a level grows
        self._ended = False
        self._replay = capture(self._work)

    def _work(self) -> Iterator[None]:
        with torch.inference_mode():
            growth = self._growth = Growth(self.plan, self.state, self._passes.token_ids)
            seen = self._seen = []
            parts = levels(growth, self._passes)
        while not self._ended:
            with torch.inference_mode():
                logits = next(parts, None)
            if logits is None:
                break
            seen.append(alias(logits))
            if self._each == 2 or not len(seen) % 2:
                yield
        if not self.plan.shape.is_chain:
            with torch.inference_mode():
                self._parts = growth.tree().more
            yield

    def grow(
        self, levels: int, change: Callable[[Tensor], None] | None, over: Callable[[Level], bool] | None = None
    ) -> int:
        """Grow at most this many of their levels; returns how many. change: is called with the logits of each before it
        grows. over: whether it is the last, asked after each; None: all grow at once."""
        self._ended = False
        if over is None:
            self._replay.run(0, levels * self._each)
            return levels
        for number in range(levels):
            part = 2 * number
            if change is not None:
                self._replay.run(part)
                change(self._seen[part])
                part += 1
            self._replay.run(part, 2 * number + 2)
            if over(self._growth.levels[number]):
                return number + 1
        return levels

    def chains(self, levels: int) -> list[list[int]]:
        """The tokens of each chain, so many levels of which are grown; ``BROKEN`` where it ends."""
        tokens = on_host([level.tokens for level in self._growth.levels[:levels]])
        return torch.cat(tokens, dim=1).tolist()

    def finish(self, levels: int) -> list[NDArray[Any]]:
        """Choose the nodes of the trees, so many levels of which are grown; returns what the host reads of them, as
        :meth:`foresay.drafters.growth.Growth.tree` has it."""
        self.plan.bars.end(levels)
        self._ended = True
        self._replay.run(self.plan.shape.levels * self._each)
        looked, chosen = self._parts[: 3 * levels], self._parts[-len(ChosenTree._fields) :]
        return [part.numpy() for part in on_host([*looked, *chosen])]


#: What captured levels differ by besides their shape: how many sequences and pages they have room for, whether each
#: node has its own logits, whether they may end early, and whether only some of the drafter's tokens have logits.
Kind = tuple[int, int, bool, bool, bool]


class TreeDrafter(Passes):
    """Implements :class:`foresay.spec.protocols.Drafter` for drafters with logits. Its first pass reads the last
    :meth:`reach` tokens of each text.

    free: whether expanding a node costs nothing. ahead: whether the first
    pass has rows for all levels, so that a capture cannot have more levels than are drafted. marginal: see
    :class:`foresay.drafters.growth.Passes`. first: the first position with a row. deepest: the most levels that it can
    draft; None: any number. windows: the window pages, if it reads layers that keep their rows in those.
    recurrent: whether it has recurrent layers. whole: whether captured steps of a device can draft with it; else these
    run in parts. beyond: pages past those of a text that its passes may write to.
    vocabulary: the tokens that it drafts, if those change; narrow: whether it drafts only these now, while levels of
    that kind are made or grown.
    staged: whether a CPU drafts in several calls, with the host in between.
    """

    free: bool = False
    ahead: bool = False
    marginal: bool = False
    first: int = 0
    deepest: int | None = None
    needs: FeatureRequest | None = None
    windows: WindowPages | None = None
    recurrent: bool = False
    whole: bool = True
    beyond: int = 0
    staged: bool = False
    vocabulary: DraftVocabulary | None = None
    narrow: bool = False

    def __init__(self, name: str, device: torch.device, pool: PagePool, token_ids: Tensor | None = None) -> None:
        """pool: its pages hold what the drafter computes or reads. token_ids: see
        :func:`foresay.verifier.ops.sample.sample_rows`."""
        self.name, self.calibration = name, Calibration()
        self.device, self._token_ids = device, None if token_ids is None else token_ids.to(device)
        self._page_size, self._pages = pool.page_size, pool.num_pages
        self._levels: list[tuple[Kind, Levels]] = []
        self._ahead = 0
        self._ends: dict[tuple[int, int], TextEnds] = {}
        self._grown: dict[str, TreeBuilder] = {}
        #: How its levels are captured on a device; on a CPU they are recorded.
        self.capture: Capture = Eager

    @property
    def token_ids(self) -> Tensor | None:
        """See :func:`foresay.verifier.ops.sample.sample_rows`."""
        return self.vocabulary.token_ids if self.narrow and self.vocabulary is not None else self._token_ids

    def follow(self, state: StepState, taken: AcceptedTree, levels: int) -> None:
        """Update the stored state of the text to what a captured step accepted; ``state`` is as it was before that.

        levels: of the drafted trees.
        """

    def reach(self, levels: int) -> int:
        """How many tokens of a text's end the first pass reads for trees of this many levels, including the root."""
        return 1

    def ends(self, state: StepState, levels: int) -> TextEnds:
        """The rows of the first pass."""
        key = state.size, self.reach(levels)
        if key not in self._ends:
            self._ends[key] = TextEnds(*key, self.first, self.device)
        return self._ends[key]

    def state(self, sequences: int, pages: int, reach: int) -> StepState:
        """The input of its levels for this many sequences."""
        return StepState(sequences, pages, self._page_size, reach, self.device, self.windows, self.recurrent)

    def able(self, sequence: SequenceState) -> bool:
        """Whether it can draft for a sequence now."""
        return True

    def prepare(self, sequence: SequenceState, levels: int) -> None:
        """Compute what the first pass does not."""

    def unread(self, sequence: SequenceState) -> int:
        """See :class:`foresay.spec.protocols.CatchesUp`."""
        return 1

    def after_rounds(self, sequence: SequenceState, count: int, path: list[int]) -> None:
        """Another drafter verified this one's chain in rounds and committed this path of it. count: nodes below the
        root before the last round."""

    def began(self, sequence: SequenceState) -> None:
        """The first pass has run."""

    def collected(self, sequence: SequenceState, tree: DraftTree, path: list[int]) -> None:
        """The host knows now what :meth:`follow` did for a sequence: this path of the tree was committed to its
        table."""

    def limited(self, shape: TreeShape) -> TreeShape:
        """The part of a shape that it can draft."""
        return shape if self.deepest is None else shape.limited(self.deepest)

    def columns(self, vocab_size: int) -> int | None:
        """How many of its logits are used: it may have more than the target has tokens. None: all."""
        return vocab_size if self.token_ids is None else None

    def chain_chances(self, sequence: SequenceState, levels: int) -> Sequence[float]:
        """See :class:`foresay.spec.protocols.Chains`."""
        return self.calibration.chain(sequence.sampling.kind, levels)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        """One tree per sequence; those of one shape grow together."""
        together: dict[tuple[TreeShape, bool, bool, bool], list[int]] = {}
        growing = [self._below(*pair) for pair in zip(sequences, shapes, strict=True)]
        for sequence in sequences:
            self._grown.pop(sequence.id, None)  # what was drafted and never committed teaches nothing
        for index, grown in enumerate(growing):
            if grown.shape.levels and self.able(grown.sequence):
                apart = self.free and self._adjusts(grown.sequence) and by_path(grown.sequence)
                kind = grown.shape, grown.shape.price is None, apart, self.narrows(grown.sequence)
                together.setdefault(kind, []).append(index)
        for (_, _, apart, _), members in together.items():
            self._grow([growing[index] for index in members], apart)
        self._grown.update((grown.sequence.id, grown) for grown in growing if grown.depth)
        return [grown.tree(self.name) for grown in growing]

    def narrows(self, sequence: SequenceState) -> bool:
        """Whether only the tokens of its vocabulary are drafted for a sequence."""
        return self.vocabulary is not None and self.vocabulary.covers(sequence.id)

    def _below(self, sequence: SequenceState, shape: TreeShape) -> TreeBuilder:
        """A tree that is only a root."""
        shape = self.limited(shape)
        grammar = None if sequence.constraint is None else Ahead(sequence.constraint)
        return TreeBuilder(sequence, shape, self.calibration, grammar, [sequence.tokens[-1]])

    def _grow(self, growing: Sequence[TreeBuilder], apart: bool) -> None:
        """Grow trees of one shape."""
        sequences, shape, at = [grown.sequence for grown in growing], growing[0].shape, self._levels_of(growing, apart)
        levels = at.plan.shape.levels
        for grown in growing:
            grown.fixed = at.plan.levels
            self.prepare(grown.sequence, levels)
        at.state.join([self._joined(sequence, self.reach(levels)) for sequence in sequences])
        if not shape.is_chain:
            at.plan.write(self.calibration, [grown.shape for grown in growing], [grown.kind for grown in growing])
        adjusting, host = any(map(self._adjusts, sequences)), self.device.type == "cpu"
        change = partial(self._adjust, growing, at.plan.sequences) if adjusting else None
        depth = shape.levels - min(grown.depth for grown in growing)
        if not host:
            depth = max(levels_ahead(grown.shape) for grown in growing)

        def over(level: Level) -> bool:
            for index, grown in enumerate(growing):
                grown.add(level, index)
            return all(grown.over for grown in growing)

        stops = adjusting or (host and shape.price is not None and not shape.is_chain)
        depth = at.grow(depth, change, over if stops else None)
        if not shape.is_chain:
            parts = at.finish(depth)
            for index, grown in enumerate(growing):
                grown.finish(parts, index, self.name)
        elif not stops:
            for grown, tokens in zip(growing, at.chains(depth), strict=False):
                for token in tokens:
                    grown.lengthen(token)
        self.narrow = False
        for sequence in sequences:
            self.began(sequence)

    def _adjusts(self, sequence: SequenceState) -> bool:
        """Whether its logits are changed as a request wants: not on a device, where each level would wait."""
        return self.device.type == "cpu" and adjusts(sequence, 0)

    def _adjust(self, growing: Sequence[TreeBuilder], sequences: int, logits: Tensor) -> None:
        """Apply the requests' changes to the logits of a level. sequences: how many there is room for."""
        for grown, rows in zip(growing, logits.view(sequences, -1, logits.shape[1]), strict=False):
            if not grown.over and adjusts(grown.sequence, grown.depth):
                rows.copy_(grown.adjusted(rows, self.token_ids))

    def _joined(self, sequence: SequenceState, reach: int) -> BatchSlot:
        table, text = sequence.table, sequence.tokens[-reach:]
        return BatchSlot(table.pages, table.length, text, sequence.sampling, sequence.noise.seed)

    def capture_ahead(
        self, shape: TreeShape, vocab_size: int, rooms: Sequence[tuple[int, int]], capture: Capture
    ) -> Iterator[None]:
        """Capture in advance what trees of this shape, or of its first levels, will need; yields after each.

        vocab_size: the target's. rooms: numbers of sequences, and of pages (:func:`rooms`).
        """
        self.capture, shape = capture, self.limited(shape)
        for count, pages in rooms:
            for apart in (False, True)[: 1 + (self.free and self.device.type == "cpu")]:
                kind = count, self._room(pages), apart, shape.price is not None, self.vocabulary is not None
                made = self._made(shape, vocab_size, kind)
                self.narrow = False
                if all(made is not kept for _, kept in self._levels[: self._ahead]):
                    self._levels.insert(self._ahead, self._levels.pop())  # before those of requests that came meanwhile
                    self._ahead += 1
                yield

    def _levels_of(self, growing: Sequence[TreeBuilder], apart: bool) -> Levels:
        """The captured levels for such trees."""
        first = growing[0]
        count = 1 << (len(growing) - 1).bit_length()  # few captures serve all: the rest is padding
        pages = self._room(max(len(grown.sequence.table.pages) for grown in growing) + self.beyond)
        kind = count, pages, apart, first.shape.price is not None, self.narrows(first.sequence)
        return self._made(first.shape, first.sequence.noise.vocab_size, kind)

    def _room(self, pages: int) -> int:
        """Pages of tables that take so many. A CPU reads as many as a text has, however many there is room for."""
        return self._pages + self.beyond if self.device.type == "cpu" else room(pages, self._page_size)

    def _made(self, shape: TreeShape, vocab_size: int, kind: Kind) -> Levels:
        """The captured levels of a shape, or of a deeper one with the same first levels, which then ends early."""
        count, pages, apart, _, self.narrow = kind
        for index, (other, made) in enumerate(self._levels):
            deeper = made.plan.shape
            begins = deeper.limited(shape.levels) == shape and deeper.is_chain == shape.is_chain
            if other == kind and (deeper == shape if self.ahead else begins):
                if index >= self._ahead:
                    self._levels.append(self._levels.pop(index))
                return made
        if shape.is_chain and self.capture is Eager and not self.ahead:
            shape = self.limited(TreeShape.chain(min(-(-shape.levels // _CHAIN) * _CHAIN, MAX_NODES - 1)))
        plan = GrowthPlan(shape, count, self.device, self.free, self.columns(vocab_size), apart)
        state = self.state(count, pages, self.reach(shape.levels))
        made = Levels(plan, self, state, recorded if compiled(state.lengths) else self.capture)
        del self._levels[self._ahead : max(self._ahead, len(self._levels) - _MOST_LEVELS + 1)]
        self._levels.append((kind, made))
        return made

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        """Learn from it."""
        self.learn(sequence, path)

    def drafted(self, tree: TreeBuilder) -> None:
        """What to learn from, once a path of it is committed."""
        self._grown[tree.sequence.id] = tree

    def learn(self, sequence: SequenceState, path: list[int], chain: Sequence[int] = ()) -> None:
        """Update the calibration, and the vocabulary. chain: what a captured step drafted, unless it was a tree."""
        if self.vocabulary is not None:
            self.vocabulary.observe(sequence.id, sequence.tokens, sequence.prompt_length)
        if grown := self._grown.pop(sequence.id, None):
            grown.learn(path)
        elif chain:
            learn_chain(self.calibration, sequence, chain[1:], path)

    def extend(self, sequence: SequenceState) -> None:
        """Update what is computed of committed text."""

    def finished(self, sequence: SequenceState) -> None:
        """Forget what was proposed."""
        self._grown.pop(sequence.id, None)
        if self.vocabulary is not None:
            self.vocabulary.drop_text(sequence.id)


def levels_ahead(shape: TreeShape) -> int:
    """How many levels a device drafts without checking after each whether the next is worth it: one more than is
    likely, unless levels are never worth it."""
    if shape.price is None:
        return shape.levels
    return min(shape.levels, shape.likely_levels + (_BEYOND if math.isfinite(shape.price.level) else 0))


def room(pages: int, page_size: int) -> int:
    """The size of page tables for this many pages: a recording has memory for attention over all of them."""
    found = -(-_LEAST_ROOM // page_size)
    while found < pages:
        found *= 4
    return found


def rooms(max_seqs: int, tokens: int, page_size: int) -> list[tuple[int, int]]:
    """The numbers of sequences and pages of all levels that an engine with these limits may need."""
    pages = [room(1, page_size)]
    while pages[-1] * page_size < tokens:
        pages.append(4 * pages[-1])
    return [(1 << power, each) for power in range((max_seqs - 1).bit_length() + 1) for each in pages]
