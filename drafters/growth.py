"""How a tree grows, for every drafter with logits: level by level, its candidates and which of them are kept.

::

    chance of a candidate   softmax of the draft's logits with the position's noise, calibrated
    chance of a node        the product along its path

A shape gives a tree its depth and size: every level expands the best few candidates of the one before, and in the end
the best of all candidates are kept. A child is never likelier than its parent, so the best ones form a tree. A chain
takes the likeliest token of each level.

All shapes are known beforehand, so growing is ops on static tensors: recorded on a CPU, part of a captured step on a
GPU. Candidates are numbered as they are found; the root is number 0. Those that are expanded get a row each::

    candidates  0  1  2  3  4  5  6 ..      all that might be kept
    rows        0  1     2                  slots past the committed text, where a drafter with its own KV runs them

Legend: S sequences, F expanded nodes of a level, k children considered below each, W candidates that a level keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foresay.drafters.calibration import ALWAYS, NEVER, Calibration, Curves, WrittenBars
from foresay.kvpaging import KVStore
from foresay.spec.price import Bar
from foresay.spec.tree import MAX_NODES, TreeShape
from foresay.verifier.forward_batch import StaticRows
from foresay.verifier.graphs.proposer import DeviceTree, chain_columns
from foresay.verifier.graphs.rows import Nodes, rows_of
from foresay.verifier.graphs.state import StepState
from foresay.verifier.ops.records import Above, Kept
from foresay.verifier.ops.rows import join_columns
from foresay.verifier.ops.sample import best_children, keep_children, sample_rows, worth_another
from foresay.verifier.ops.trees import choose_tree, known_tokens

#: More tokens than any vocabulary has.
_ANY = 1 << 31
#: A tree considers at least this many children of a node, if it has as many nodes. This costs little.
_LEAST_LOOKED = 8


class LevelLayout(NamedTuple):
    """The part of a level that is fixed before it grows.

    front: nodes expanded for it. looked: k. kept: W. expanded: how many of the kept ones are expanded next, the first.
    """

    front: int
    looked: int
    kept: int
    expanded: int


@lru_cache(maxsize=256)
def layout(shape: TreeShape, free: bool = False, priced: bool = False) -> tuple[LevelLayout, ...]:
    """The layout of each level.

    free: expanding a node costs nothing, so all are expanded; else the expanded ones fit in the shape. priced: whether
    the shape has a price, by which a tree ends early: its first levels are then the widest.
    """
    most, front = shape.nodes - 1, 1
    levels: list[LevelLayout] = []
    breadth = most if free else max(1, most // max(1, shape.levels - 1))
    for width in shape.widths:
        looked = 1 if shape.is_chain else min(most, max(breadth, _LEAST_LOOKED))
        kept = min(most, front * looked)
        expanded = 0 if len(levels) == shape.levels - 1 else min(kept, width if priced else breadth)
        levels.append(LevelLayout(front, looked, kept, expanded))
        front = expanded
    return tuple(levels)


class GrowthPlan:
    """What the trees of a shape have in common, on the device; and what the host writes before they grow: how far each
    may, and the calibration's curves.

    free: see :func:`layout`. columns: how many columns of a drafter's logits are used. apart: whether each node has its
    own row of logits even where all of a level would have the same, since a request changes them per node.
    """

    def __init__(
        self,
        shape: TreeShape,
        sequences: int,
        device: torch.device,
        free: bool = False,
        columns: int | None = None,
        apart: bool = False,
    ) -> None:
        self.shape, self.sequences, self.device, self.free = shape, sequences, device, free
        self.columns, self.apart = columns, apart
        self.levels = layout(shape, free, shape.price is not None)
        self.root_words = torch.ones(sequences, 1, dtype=torch.int64).to(device)
        self.root_scores = torch.zeros(sequences, 1).to(device)
        chain = [torch.full((sequences, 1), _signed((2 << depth) - 1)) for depth in range(MAX_NODES)]
        self.chain_words = [word.to(device) for word in chain[: shape.levels + 1]]
        self._columns: dict[tuple[int, ...], Tensor] = {}
        self._depths: dict[tuple[int, int], Tensor] = {}
        self.every_depth = self.of_each(range(shape.levels)).int().contiguous()
        self.chain = chain_columns(sequences, shape.levels + 1, device) if shape.is_chain else None
        self.curves = Curves(sequences, device)
        self.bars, self._fixed = WrittenBars(sequences, shape.levels, device, shape.nodes), list[int]()

    def write(self, calibration: Calibration, shapes: Sequence[TreeShape], kinds: Sequence[int]) -> None:
        """Write what the next trees read: the current calibration, and how far each may grow: no further than its
        shape, which this one begins with, and as its price says. Without one, each node is worth its row."""
        self.curves.write(calibration, kinds)
        fixed = [shape.levels for shape in shapes if shape.price is None]
        if len(fixed) == len(shapes) and fixed == self._fixed:
            return
        self._fixed = fixed if len(fixed) == len(shapes) else []
        self.bars.write(
            [self._bars(shape, kind, calibration) for shape, kind in zip(shapes, kinds, strict=True)],
            [self.shape.limited(shape.levels).nodes for shape in shapes],
            [[-float(node) for node in range(s.nodes)] if s.price is None else s.price.rows for s in shapes],
        )

    def _bars(self, shape: TreeShape, kind: int, calibration: Calibration) -> list[Bar]:
        """The thresholds that the nodes of a tree must reach for each further level."""
        levels, price = self.shape.levels, shape.price
        known = range(1, min(shape.levels, levels))
        bars = [ALWAYS if price is None else price.bar(calibration.first(kind, depth)) for depth in known]
        return bars + [NEVER] * (levels - 1 - len(known))

    def column(self, values: Sequence[int]) -> Tensor:
        """These numbers as an int64 tensor."""
        key = tuple(values)
        if key not in self._columns:
            self._columns[key] = torch.tensor(key, dtype=torch.int64).to(self.device)
        return self._columns[key]

    def of_each(self, values: Sequence[int]) -> Tensor:
        """int64[S, N]: the same numbers for every sequence."""
        return self.column(values).expand(self.sequences, -1)

    @property
    def candidates(self) -> tuple[list[int], list[int]]:
        """The depth of each candidate, and its row if it gets one, else -1."""
        depths, rows, row = list[int](), list[int](), 1
        for depth, fixed in enumerate(self.levels, start=1):
            depths += [depth] * fixed.kept
            rows += [*range(row, row + fixed.expanded), *[-1] * (fixed.kept - fixed.expanded)]
            row += fixed.expanded
        return depths, rows

    def marks(self, level: int, first: int) -> Tensor:
        """int64[W]: the ancestor-word bits of a level's kept candidates; those that get a row count from ``first``."""
        fixed = self.levels[level]
        count = 0 if self.free else fixed.expanded
        return self.column([*(_signed(1 << first + index) for index in range(count)), *[0] * (fixed.kept - count)])

    def depths(self, depth: int, count: int) -> Tensor:
        """int32[S, count], filled with ``depth``."""
        key = (depth, count)
        if key not in self._depths:
            self._depths[key] = torch.full((self.sequences, count), depth, dtype=torch.int32).to(self.device)
        return self._depths[key]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


class Level(NamedTuple):
    """The candidates below the nodes of a level.

    tokens: int64[S, W], of the kept candidates; ``BROKEN`` where a chain ends. A chain has only these. parents:
    int64[S, W], the candidates above them. scores: fp32[S, W], log chances along the path, minus infinity where there
    is none. children, chances: [S, F, k] (or [S, 1, k], the same below all), what was considered, uncalibrated. front:
    fp32[S, F'], scores of the nodes that are expanded next, minus infinity where the next level is not worth its price.
    """

    tokens: Tensor
    parents: Tensor | None = None
    scores: Tensor | None = None
    children: Tensor | None = None
    chances: Tensor | None = None
    front: Tensor | None = None


@dataclass(slots=True)
class _Front:
    """The nodes that are expanded next. numbers, rows: of each, the same in all trees. tokens, words, scores: [S,
    F]."""

    numbers: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: Tensor
    words: Tensor
    scores: Tensor


class Growth:
    """Trees below the roots of some sequences while they grow; created in each step, or once for a recording.

    token_ids: see :func:`foresay.verifier.ops.sample.sample_rows`.
    """

    def __init__(self, plan: GrowthPlan, state: StepState, token_ids: Tensor | None = None) -> None:
        self.plan, self.levels = plan, list[Level]()
        self.state, self._token_ids = state, token_ids
        self._front = _Front((0,), (0,), state.roots[:, None], plan.root_words, plan.root_scores)
        self._drawn: Tensor | None = None
        self._walk = [(state.roots[:, None], plan.root_words)]
        self._candidates = self._rows = 1

    def expanded(self) -> Nodes:
        """The parents of the next level: the rows of the drafter's next pass. A token may be ``BROKEN``."""
        front = self._front
        numbers = self.plan.of_each(front.rows).contiguous()
        depths = self.plan.depths(len(self.levels), len(front.rows))
        return Nodes(front.tokens, numbers, front.words, depths)

    def rows(self, store: KVStore, known: Callable[[Tensor], Tensor]) -> StaticRows:
        """The same as rows for a model with this store; ``known`` maps the target's token ids to the model's. A model
        with recurrent layers reads all nodes that have rows again, since the states of the level above are not
        stored."""
        if store.states is None:
            nodes = self.expanded()
            return rows_of(self.state, nodes._replace(tokens=known(nodes.tokens)), live=True, store=store)
        tokens, words = (torch.cat(parts, dim=1) for parts in zip(*self._walk, strict=True))
        depths = [self.plan.depths(depth, part.shape[1]) for depth, (part, _) in enumerate(self._walk)]
        count, fresh, state = tokens.shape[1], self._front.rows, self.state
        nodes = Nodes(known(tokens), self.plan.of_each(range(count)).contiguous(), words, torch.cat(depths, dim=1))
        wanted = self.plan.column([count * index + row for index in range(state.size) for row in fresh])
        return replace(rows_of(state, nodes, None, wanted, True, store), logits_count=state.live_rows(len(fresh)))

    def looked_at(self, logits: Tensor) -> Tensor:
        """The columns of a drafter's logits that are used."""
        columns = self.plan.columns
        return logits if columns is None or columns >= logits.shape[1] else logits[:, :columns].contiguous()

    def draw(self, logits: Tensor) -> None:
        """Draw the tokens of all levels in one launch where a device grows a chain below one text: those that
        :meth:`grow` would draw from the logits of each, fp32[levels, V'], if these do not depend on them."""
        plan = self.plan
        if plan.shape.is_chain and plan.sequences == 1 and plan.device.type != "cpu":
            sampling = self.state.sampling(plan.every_depth)
            self._drawn = sample_rows(self.looked_at(logits), sampling, self._token_ids)[None]

    def grow(self, logits: Tensor) -> Tensor | None:
        """Add the next level below the expanded nodes.

        logits: fp32[S * F, V'], a row for each expanded node, or [S, V'], one for all of a sequence's. Returns int64[S,
        F'], for each node that is expanded next, the index of its parent among the nodes expanded before; None for
        chains.
        """
        plan, depth = self.plan, len(self.levels)
        if self._drawn is not None:
            self._lengthen(self._drawn[:, depth : depth + 1])
            return None
        rows = len(logits) // plan.sequences
        sampling = self.state.sampling(plan.depths(depth, rows))
        if plan.shape.is_chain:
            self._lengthen(sample_rows(logits, sampling, self._token_ids)[:, None])
            return None
        found = best_children(logits, sampling, plan.levels[depth].looked, self._token_ids)
        return self._hang(*(part.view(plan.sequences, rows, -1) for part in found))

    def _lengthen(self, sampled: Tensor) -> None:
        self.levels.append(Level(sampled))
        depth = (len(self.levels),)
        self._front = _Front(depth, depth, sampled, self.plan.chain_words[depth[0]], self.plan.root_scores)
        self._walk.append((sampled, self._front.words))

    def _hang(self, children: Tensor, chances: Tensor) -> Tensor:
        """Keep the best of these."""
        plan, front, depth = self.plan, self._front, len(self.levels)
        fixed = plan.levels[depth]
        kept = keep_children(
            children,
            chances,
            Above(front.scores, front.words, plan.column(front.numbers)),
            plan.marks(depth, self._rows),
            plan.curves.pieces,
        )
        parent_rows = self._go_on(fixed.expanded, kept)
        self._walk.append((self._front.tokens, self._front.words))
        self.levels.append(Level(kept.tokens, kept.parents, kept.scores, children, chances, self._front.scores))
        return parent_rows

    def _go_on(self, count: int, kept: Kept) -> Tensor:
        """Number the new candidates, and expand the first ``count`` of them next, if that is worth its price; returns
        the parents of those."""
        numbers = tuple(range(self._candidates, self._candidates + count))
        rows = tuple(range(self._rows, self._rows + count))
        self._candidates += kept.tokens.shape[1]
        self._rows += count
        tokens, parent_rows, words, scores = (
            each if count == each.shape[1] else each[:, :count].contiguous()
            for each in (kept.tokens, kept.indices, kept.words, kept.scores)
        )
        if count:
            scores = worth_another(scores, self.plan.bars.below(len(self.levels) + 1))
        self._front = _Front(numbers, rows, tokens, words, scores)
        return parent_rows

    def tree(self) -> DeviceTree:
        """The finished trees, on the device."""
        plan, state = self.plan, self.state
        if plan.chain is not None:
            tokens = join_columns(state.roots[:, None].contiguous(), *(level.tokens for level in self.levels))
            return DeviceTree(known_tokens(tokens, _ANY), *plan.chain, plan.bars.counts, True)
        columns = [join_columns(*(level[part] for level in self.levels)) for part in range(3)]  # type: ignore[arg-type]
        fixed = (plan.column(each[: columns[0].shape[1]]) for each in plan.candidates)
        limits = plan.bars.levels, plan.bars.rows, plan.bars.counts
        made = choose_tree((state.roots.contiguous(), *columns, *fixed), *limits)
        looked = [part for level in self.levels for part in (level.children, level.chances, level.front)]
        return DeviceTree(*made[:5], chain=False, rows=made.rows, more=(*looked, *made))  # type: ignore[arg-type]


class Passes(Protocol):
    """What a drafter with logits computes for a level. marginal: whether the state of its levels is all their logits,
    level by level, which do not depend on the tokens drawn."""

    marginal: bool

    @property
    def token_ids(self) -> Tensor | None:
        """See :func:`foresay.verifier.ops.sample.sample_rows`."""
        ...

    def begin(self, state: StepState, levels: int) -> tuple[Tensor, Tensor | None]:
        """Logits below the roots, fp32[S, V'], and the state that the first of ``levels`` levels starts from."""
        ...

    def next(self, growth: Growth, states: Tensor | None, parent_rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits below the expanded nodes, as :meth:`Growth.grow` takes them, and the state for the next level.

        states: of the level above. parent_rows: int64[S, F], the row in it of each node's parent; None: the only one.
        """
        ...


def levels(growth: Growth, passes: Passes) -> Iterator[Tensor]:
    """Grow trees below the ends of the texts.

    Stops before and after each level grows: yields the logits, which the host may change before it continues.
    """
    count = growth.plan.shape.levels
    logits, states = passes.begin(growth.state, count)
    if passes.marginal and states is not None:
        growth.draw(states)
    for level in range(count):
        logits = growth.looked_at(logits)
        yield logits
        parent_rows = growth.grow(logits)
        yield logits
        if level + 1 < count:
            logits, states = passes.next(growth, states, parent_rows)


def below(states: Tensor, parent_rows: Tensor | None) -> Tensor:
    """[S * F, H]: the states of the parents of expanded nodes. states: [S * F', H]. parent_rows: see
    :meth:`Passes.next`."""
    if parent_rows is None:
        return states
    by_sequence = states.view(len(parent_rows), -1, states.shape[1])
    return by_sequence.gather(1, parent_rows[:, :, None].expand(-1, -1, states.shape[1])).flatten(0, 1)
