"""The rows of a pass as static tensors, with the inputs of sampling and accepting: filled on the device by a captured
step, and by the host for other passes.

Lengths and tables are tensors, so that the same pass can be captured or recorded once and replayed. A GPU runs trees
and texts in groups, each with its own kernel; a CPU runs all rows in the given order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.kvpaging import StatePages, WindowPages
from foresay.kvpaging.states import TextState
from foresay.spec.protocols import Rows, Wanted
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import MAX_NODES, DraftTree
from foresay.verifier.graphs.capture import Column, Staged
from foresay.verifier.ops.attention import find_places
from foresay.verifier.ops.records import SAMPLING, AttentionMetadata, RowSampling, SamplingColumns, StateRows


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows for the same attention kernel: all nodes of trees (or short chains), or all long chunks of text."""

    rows: slice
    paged: AttentionMetadata


@dataclass(frozen=True, slots=True)
class StaticRows:
    """R rows, perhaps padding at the end, at position 0 of the padding page.

    tokens, positions, slots: int64[R]. groups: of all rows, in order; padding belongs to the last. logits_indices:
    int64[W], the rows whose logits are needed; None for all. count, logits_count: int64[1], the number of actual rows,
    and of actual wanted rows, if that is only known when the pass runs; None: all are. windowed: the same rows for
    sliding-window layers; None if those use the pool's pages too. states: for recurrent layers, if there are any.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    groups: tuple[RowGroup, ...]
    logits_indices: Tensor | None = None
    count: Tensor | None = None
    logits_count: Tensor | None = None
    windowed: StaticRows | None = None
    states: StateRows | None = None

    def of_layer(self, windowed: bool) -> StaticRows:
        """The rows for a layer. windowed: whether it keeps them in window pages."""
        assert not windowed or self.windowed is not None, "it is known where window pages are"
        return self.windowed if windowed and self.windowed is not None else self


def _layout(part: Rows) -> tuple[int, Wanted, bool, int]:
    """Everything that determines the layout of a batch."""
    return len(part.tokens), part.wanted, part.words is None, 0 if part.tree is None else len(part.tree)


def is_text(part: Rows) -> bool:
    """Whether a part has more rows than an ancestor word has bits."""
    return part.nodes is None and len(part.tokens) > MAX_NODES


class Sizes(NamedTuple):
    """Capacity: rows, sequences, pages of a table and wanted rows."""

    rows: int
    sequences: int
    pages: int
    wanted: int

    @classmethod
    def of(cls, rows: Sequence[Rows]) -> Sizes:
        """Exactly what these rows need."""
        return cls(*needed(rows))

    @property
    def is_text(self) -> bool:
        """Whether a captured pass of this size is over one chunk of text: one over trees has fewer rows of a
        sequence."""
        return self.sequences == 1 and self.rows > MAX_NODES

    def takes(self, rows: Sequence[Rows]) -> bool:
        """Whether a captured pass of this size can run these rows: a chunk of text only alone, and with little
        padding."""
        need = needed(rows)
        if self.is_text != any(map(is_text, rows)) or not self.holds(need):
            return False
        return not self.is_text or self.rows - need[0] < MAX_NODES

    def holds(self, need: Needed) -> bool:
        """Whether this much fits."""
        return all(map(operator.ge, self, need))

    def grown(self, other: Needed) -> Sizes:
        """Capacity for both and some more: powers of two."""
        return Sizes(*(1 << (max(pair) - 1).bit_length() if max(pair) else 0 for pair in zip(self, other, strict=True)))


#: Rows, sequences, pages of a table and wanted rows.
Needed = tuple[int, int, int, int]


def needed(rows: Sequence[Rows]) -> Needed:
    """The capacity that these rows need."""
    count = wanted = pages = 0
    for part in rows:
        own = len(part.tokens)
        count, pages = count + own, max(pages, len(part.table.pages))
        wanted += own if part.wanted == "all" else part.wanted == "last"
    return count, len(rows), pages, wanted


class ForwardBatch:
    """What the host writes before a step's pass: rows of all kinds in the given order, their trees, and how tokens are
    sampled; in one buffer, which is sent in one copy.

    A CPU's kernels compute positions and slots themselves, and read the number of rows. On a device the host writes the
    place of each row; after the last comes padding. A captured pass there is over trees, or over one longer chunk; one
    that runs op by op is laid out when it is written, with exactly the rows that it has room for.

    windows: the window pages, if sliding-window layers keep their rows in those. states: the state pages, if there are
    recurrent layers. drafted: whether any tree is more than its root: roots need no accept walk. starts: where the
    wanted rows of each sequence begin, and their number. tensors: what is read. Of R rows, W of them wanted, and B
    trees of up to N nodes::

        tokens, words    int64[R]       of each row; ancestor words of tree nodes
        counts           int64[3]       rows, wanted rows, sequences
        nodes            int64[B]       nodes of each tree; 0 for only a root, and without a tree
        parents, places  int64[B, N]    of each node, its parent, and its index among the wanted rows
    """

    def __init__(
        self,
        sizes: Sizes,
        page_size: int,
        device: torch.device,
        windows: WindowPages | None = None,
        states: StatePages | None = None,
    ) -> None:
        self.sizes, self._size, self._finds, self._windows = sizes, page_size, device.type == "cpu", windows
        self.drafted, self.starts = False, [0]
        rows, sequences, trees = (sizes.rows,), (sizes.sequences,), (sizes.sequences, MAX_NODES)
        columns: dict[str, Column] = {
            "tokens": (rows, torch.int64), "words": (rows, torch.int64),
            "logits_indices": ((sizes.wanted,), torch.int64),
            "counts": ((3,), torch.int64), "lengths": (sequences, torch.int32), "is_prefill": (sequences, torch.int32),
            "offsets": ((sizes.sequences + 1,), torch.int32), "tables": ((sizes.sequences, sizes.pages), torch.int32),
        }  # fmt: skip
        if sizes.wanted:
            columns |= {_SAMPLE + name: ((sizes.wanted,), dtype) for name, dtype in SAMPLING.items()}
            columns |= {
                "parents": (trees, torch.int64),
                "places": (trees, torch.int64),
                "nodes": (sequences, torch.int64),
            }
        if windows is not None:
            columns[_WINDOW + "tables"] = columns["tables"]
        if states is not None:
            columns |= {
                "states": ((sizes.sequences, 3), torch.int32),
                "stops": ((sizes.sequences, 2), torch.int32),
                "first_nodes": (sequences, torch.int32),
            }
        if not self._finds:
            columns |= {"depths": (rows, torch.int32), "positions": (rows, torch.int64), "slots": (rows, torch.int64)}
            columns["texts"] = (sequences, torch.int32)
            columns |= {} if windows is None else {_WINDOW + "slots": (rows, torch.int64)}
        self._staged = Staged(device, columns)
        self.tensors = self._staged.tensors
        self._staged.arrays["is_prefill"][:] = sizes.is_text and not self._finds
        if sizes.wanted:
            self._columns = SamplingColumns(*(self._staged.arrays[_SAMPLE + name] for name in SAMPLING))
        self._pages = [list[int]() for _ in range(sizes.sequences)]
        self._layout: list[tuple[int, Wanted, bool, int]] = []
        self._sampled: list[tuple[SamplingParams, int] | None] = []

    @classmethod
    def of(cls, rows: Sequence[Rows], device: torch.device) -> StaticRows:
        """The static rows for a pass that is run once, op by op."""
        written = cls(Sizes.of(rows), rows[0].table.pool.page_size, device)
        written.write(rows)
        return written.laid_out()

    def laid_out(self) -> StaticRows:
        """The static rows that a pass reads."""
        rows = self._laid_out("")
        return rows if self._windows is None else replace(rows, windowed=self._laid_out(_WINDOW))

    @property
    def sampling(self) -> RowSampling:
        """How a token is sampled from each of the wanted rows."""
        return RowSampling(*(self.tensors[_SAMPLE + name] for name in SAMPLING))

    def _laid_out(self, pages: str) -> StaticRows:
        """pages: prefix of the columns of pages; "": the pool's."""
        there = self.tensors
        rows, wanted, sequences = there["counts"].split(1)
        paged = AttentionMetadata(
            there[pages + "tables"], self._size, there["lengths"], there["offsets"], there["words"]
        )
        paged.is_prefill, paged.sequences = there["is_prefill" if self._finds else "texts"], sequences
        states = None
        if "states" in there:
            states = StateRows(paged, there["states"], there["stops"], there["first_nodes"], rows)
        if not self._finds:
            slots, groups = there[pages + "slots"], self._groups(pages + "tables")
            given = there["tokens"], there["positions"], slots, groups, there["logits_indices"]
            return StaticRows(*given, states=states)
        places = find_places(paged, self.sizes.rows, rows)
        groups = (RowGroup(slice(0, self.sizes.rows), paged),)
        return StaticRows(
            there["tokens"], places.positions, places.own, groups, there["logits_indices"], rows, wanted, None, states
        )

    def _groups(self, tables: str) -> tuple[RowGroup, ...]:
        """On a device: alternating groups of trees and texts. tables: the column."""
        there, groups = self.tensors, list[RowGroup]()
        texts = self._staged.arrays["is_prefill"].tolist()
        offsets = [*self._staged.arrays["offsets"][:-1].tolist(), self.sizes.rows]
        for text, alike in groupby(range(len(texts)), texts.__getitem__):
            first, *more = alike
            behind = first + len(more) + 1
            rows, begin = slice(offsets[first], offsets[behind]), offsets[first]
            paged = AttentionMetadata(
                there[tables][first:behind],
                self._size,
                there["lengths"][first:behind],
                there["offsets"][first : behind + 1] - begin if begin else there["offsets"][: behind + 1],
                None if text else there["words"][rows],
                None if text else there["depths"][rows],
            )
            groups.append(RowGroup(rows, paged))
        return tuple(groups)

    def write(self, rows: Sequence[Rows]) -> None:
        """Write the inputs of a pass, and of sampling after it. Most steps have the same layout as the one before."""
        to = self._staged.writable()
        layout = [_layout(part) for part in rows]
        if layout != self._layout:
            self._layout = layout
            self._lay_out(rows)
        row = 0
        for index, part in enumerate(rows):
            end = row + len(part.tokens)
            to["tokens"][row:end] = part.tokens
            to["lengths"][index] = part.base
            if not self._finds:
                self._write_places(slice(row, end), part)
            elif part.words is not None:
                to["words"][row:end] = signed(part.words)
            self._write_pages(index, part)
            if (state := part.state or part.table.state) is not None:
                self._write_states(index, part, state)
            if part.tree is not None:
                self._write_tree(index, part, part.tree, end)
            row = end
        self._staged.send()

    def _lay_out(self, rows: Sequence[Rows]) -> None:
        """Write where the rows of each sequence are, which are wanted, and which of those are its tree's."""
        to, row, self.starts = self._staged.arrays, 0, [0]
        trees = [part.tree for part in rows]
        self.drafted = any(tree is not None and len(tree) > 1 for tree in trees)
        self._sampled = [None] * len(rows)
        for index, part in enumerate(rows):
            end = row + len(part.tokens)
            to["offsets"][index + 1] = end
            to["is_prefill"][index] = part.words is None if self._finds else is_text(part)
            if not self._finds:  # short texts are read like trees, except by recurrent layers
                to["texts"][index] = part.words is None
            first = {"all": row, "last": end - 1, "none": end}[part.wanted]
            self.starts.append(self.starts[-1] + end - first)
            to["logits_indices"][self.starts[-2] : self.starts[-1]] = range(first, end)
            row = end
        to["counts"][:] = row, self.starts[-1], len(rows)
        for index, (tree, last) in enumerate(zip(trees, self.starts[1:], strict=True)):
            nodes = 0 if tree is None else len(tree)
            if self.drafted:  # a tree with only a root is left out of the walk
                to["nodes"][index] = nodes if nodes > 1 else 0
                to["places"][index, :nodes] = range(last - nodes, last)
        if self.drafted:
            to["nodes"][len(rows) :] = 0
        if not self._finds:
            self._pad(row, len(rows), self.starts[-1])

    def _write_states(self, index: int, part: Rows, state: TextState) -> None:
        """Write the state that a sequence continues from, and where the next states of its text are saved."""
        if "states" in self._staged.arrays:  # else no layer of this model is recurrent
            assert index < state.pages.sequences or part.certain == len(part.tokens), "there is room for its records"
            assert part.nodes is None or list(part.nodes) == list(range(len(part.tokens))), "a whole tree, in order"
            to, (inside, end) = self._staged.arrays, state.stops(part.certain)
            to["states"][index] = state.page, inside.page, end.page
            to["stops"][index] = inside.rows, end.rows
            to["first_nodes"][index] = part.certain

    def _write_tree(self, index: int, part: Rows, tree: DraftTree, end: int) -> None:
        """Write what is sampled for a sequence, whose rows end at ``end``."""
        to, count, last = self._staged.arrays, len(tree), self.starts[index + 1]
        assert part.sampling is not None and part.noise is not None, "it is known how"
        at, how, columns = slice(last - count, last), (part.sampling, part.noise.seed), self._columns
        if self._sampled[index] == how:
            columns.positions[at] = part.positions
        else:
            self._sampled[index] = how
            columns.write(at, *how, part.positions)
        if count > 1:
            to["parents"][index, :count] = tree.parents
            to["words"][end - count : end] = signed(tree.ancestors)

    def _write_places(self, at: slice, part: Rows) -> None:
        """Write where the rows are. A short chunk is read like a tree: as a chain."""
        to = self._staged.arrays
        if part.words is None or part.nodes is None:
            nodes = depths = np.arange(len(part.tokens))
            words: Sequence[int] = [(2 << row) - 1 for row in range(min(len(part.tokens), MAX_NODES))]
        else:
            words, nodes = part.words, np.array(part.nodes)
            depths = np.array([word.bit_count() - 1 for word in words])
        if not is_text(part):
            to["words"][at] = signed(words)
        to["depths"][at], to["positions"][at] = depths, part.base + depths
        slots = part.table.slots(part.base, part.base + int(nodes.max()) + 1)
        to["slots"][at] = slots.numpy()[nodes]
        if self._windows is not None:
            to[_WINDOW + "slots"][at] = self._windows.slots(slots).numpy()[nodes]

    def _pad(self, rows: int, sequences: int, wanted: int) -> None:
        """Write padding after the last of each."""
        to = self._staged.arrays
        to["offsets"][sequences + 1 :] = rows
        to["is_prefill"][sequences:] = to["is_prefill"][sequences - 1]
        for name, first in {"tokens": rows, "positions": rows, "slots": rows, "logits_indices": wanted}.items():
            to[name][first:] = 0
        if self._windows is not None:
            to[_WINDOW + "slots"][rows:] = 0

    def _write_pages(self, index: int, part: Rows) -> None:
        pages, to = part.table.pages, self._staged.arrays
        if self._pages[index] != pages:
            self._pages[index] = list(pages)
            to["tables"][index, : len(pages)] = pages
        if self._windows is not None:
            first = self._windows.first(part.base)
            to[_WINDOW + "tables"][index, first : len(pages)] = self._windows.of[pages[first:]]


def signed(words: Sequence[int]) -> NDArray[np.int64]:
    """64-bit words as signed integers for a tensor."""
    return np.array(words, dtype=np.uint64).view(np.int64)


#: Prefix of the columns for sampling.
_SAMPLE = "sample_"
#: Prefix of the columns for window pages.
_WINDOW = "window_"
