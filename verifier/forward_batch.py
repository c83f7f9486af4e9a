"""The rows of a pass as static tensors, with the inputs of sampling and accepting: filled on the device by a captured
step, and by the host for other passes.

Lengths and tables are tensors, so that the same pass can be captured or recorded once and replayed. A GPU runs trees
and texts in groups, each with its own kernel; a CPU runs all rows in the given order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.kvpaging import StatePages, WindowPages
from foresay.kvpaging.states import TextState, recurrent_state
from foresay.spec.protocols import LogitRows, Rows
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import MAX_NODES, DraftTree
from foresay.verifier.graphs.staging import Column, PageTables, Staged
from foresay.verifier.ops.attention import plan_attention
from foresay.verifier.ops.records import SAMPLING, AttentionMetadata, RowSampling, SamplingColumns, StateRows


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows for the same attention kernel: all nodes of trees (or short chains), or all long chunks of text."""

    rows: slice
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class StaticRows:
    """R rows, perhaps padding at the end, at position 0 of the padding page.

    tokens, positions, slots: int64[R]. groups: of all rows, in order; padding belongs to the last. logits_indices:
    int64[W], the rows whose logits are needed; None for all. count, logits_count: int64[1], the number of actual rows,
    and of actual rows with logits, if that is only known when the pass runs; None: all are. windowed: the same rows for
    sliding-window layers; None if those use the pool's pages too. states: for recurrent layers, if there are any.
    sampled: the rows with logits alone, for layers after the last one that stores anything; None: all go through them.
    block: the same rows, each seeing all of its block, for layers that are not causal. dense: attention, in training.
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
    sampled: StaticRows | None = None
    block: StaticRows | None = None
    dense: Callable[[Any, Tensor, Tensor, Any, Tensor | None], Tensor] | None = None

    def for_layer(self, windowed: bool, causal: bool = True) -> StaticRows:
        """The rows for a layer. windowed: whether it keeps them in window pages."""
        assert not windowed or self.windowed is not None, "it is known where window pages are"
        own = self.windowed if windowed else None if causal else self.block
        return self if own is None else own


def _layout(part: Rows) -> tuple[int, LogitRows, bool, int]:
    """Everything that determines the layout of a batch."""
    return len(part.tokens), part.logits, part.words is None, 0 if part.tree is None else len(part.tree)


def is_text(part: Rows) -> bool:
    """Whether a part has more rows than an ancestor word has bits."""
    return part.nodes is None and len(part.tokens) > MAX_NODES


class Sizes(NamedTuple):
    """Capacity: rows, sequences, pages of a table and rows with logits; on a device, how many sequences are texts, and
    their rows, which are the last."""

    rows: int
    sequences: int
    pages: int
    logits: int
    texts: int = 0
    text_rows: int = 0

    @classmethod
    def from_rows(cls, rows: Sequence[Rows]) -> Sizes:
        """Exactly what these rows need."""
        count = pages = logits = texts = text_rows = 0
        for part in rows:
            own = len(part.tokens)
            count, pages = count + own, max(pages, len(part.table.pages))
            logits += own if part.logits == "all" else part.logits == "last"
            if is_text(part):
                texts, text_rows = texts + 1, text_rows + own
        return cls(count, len(rows), pages, logits, texts, text_rows)

    def fits(self, rows: Sequence[Rows]) -> bool:
        """Whether a captured pass of this size can run these rows: texts as many as it has, with little padding."""
        own = Sizes.from_rows(rows)
        of_trees = zip(self.tree_capacity, own.tree_capacity, strict=True)
        fits = self.covers(own) and all(room >= need for room, need in of_trees)
        return fits and self.texts == own.texts and 0 <= self.text_rows - own.text_rows < MAX_NODES

    @property
    def tree_capacity(self) -> tuple[int, int]:
        """Rows and sequences of trees: those of texts come after them."""
        return self.rows - self.text_rows, self.sequences - self.texts

    def covers(self, need: Sizes) -> bool:
        """Whether this much fits, wherever texts are."""
        return all(map(operator.ge, self[:4], need))

    def enlarged(self, other: Sizes) -> Sizes:
        """Capacity for both and some more: powers of two."""
        pairs = zip(self[:4], other, strict=False)
        return Sizes(*(1 << (max(pair) - 1).bit_length() if max(pair) else 0 for pair in pairs))


class ForwardBatch:
    """What the host writes before a step's pass: rows of all kinds in the given order, their trees, and how tokens are
    sampled; in one buffer, which is sent in one copy.

    A CPU's kernels compute positions and slots themselves, and read the number of rows. On a device the host writes
    each row's position; long chunks of text come last, since they have an attention kernel of their own. After the rows
    of trees, and after those of texts, comes padding; a batch for a pass that runs op by op has none.

    windows: the window pages, if sliding-window layers keep their rows in those. states: the state pages, if there are
    recurrent layers. narrow: whether rows with logits alone are laid out too (on a CPU). drafted: whether any tree is
    more than its root: roots need no accept walk. starts: where the rows with logits of each sequence begin, and their
    number. tensors: what is read. Of R rows, W of them with logits, and B trees of up to N nodes::

        tokens, words    int64[R]       of each row; ancestor words of tree nodes
        counts           int64[3]       rows, rows with logits, sequences
        nodes            int64[B]       nodes of each tree; 0 for only a root, and without a tree
        parents, indices int64[B, N]    of each node, its parent, and its index among the rows with logits
    """

    def __init__(
        self,
        sizes: Sizes,
        page_size: int,
        device: torch.device,
        windows: WindowPages | None = None,
        states: StatePages | None = None,
        narrow: bool = False,
    ) -> None:
        self.sizes, self._size, self._is_planned, self._windows = sizes, page_size, device.type == "cpu", windows
        self._narrow = narrow and self._is_planned
        self.drafted, self.starts = False, [0]
        rows, sequences, trees = (sizes.rows,), (sizes.sequences,), (sizes.sequences, MAX_NODES)
        columns: dict[str, Column] = {
            "tokens": (rows, torch.int64), "words": (rows, torch.int64),
            "logits_indices": ((sizes.logits,), torch.int64), "counts": ((3,), torch.int64),
            "lengths": (sequences, torch.int32), "is_prefill": (sequences, torch.int32),
            "offsets": ((sizes.sequences + 1,), torch.int32), "tables": ((sizes.sequences, sizes.pages), torch.int32),
        }  # fmt: skip
        if sizes.logits:
            columns |= {_SAMPLE + name: ((sizes.logits,), dtype) for name, dtype in SAMPLING.items()}
            columns |= {
                "parents": (trees, torch.int64),
                "indices": (trees, torch.int64),
                "nodes": (sequences, torch.int64),
            }
        if self._narrow:
            columns |= {_NARROW + name: columns[name] for name in ("lengths", "offsets")}
            columns[_NARROW + "words"] = columns["logits_indices"]
        self._prefixes = [""] if windows is None else ["", _WINDOW]
        columns |= {prefix + "tables": columns["tables"] for prefix in self._prefixes}
        if states is not None:
            columns |= {
                "states": ((sizes.sequences, 3), torch.int32),
                "stops": ((sizes.sequences, 2), torch.int32),
                "first_nodes": (sequences, torch.int32),
            }
        if not self._is_planned:
            columns |= {"depths": (rows, torch.int32), "positions": (rows, torch.int64)}
            columns |= {prefix + "slots": (rows, torch.int64) for prefix in self._prefixes}
            columns |= {"text_offsets": ((sizes.texts + 1,), torch.int32)}
        self._staged = Staged(device, columns)
        self.tensors = self._staged.tensors
        if sizes.logits:
            self._columns = SamplingColumns(*(self._staged.arrays[_SAMPLE + name] for name in SAMPLING))
        self._tables, self._slots = PageTables(self._staged, windows), [each + "slots" for each in self._prefixes]
        self._layout: list[tuple[int, LogitRows, bool, int]] = []
        self._at: list[tuple[int, int]] = []
        self._sampled: list[tuple[SamplingParams, int] | None] = []

    @classmethod
    def of(cls, rows: Sequence[Rows], device: torch.device, windows: WindowPages | None = None) -> StaticRows:
        """The static rows for a pass that is run once, op by op. windows: of the store, if it has such pages."""
        written = cls(Sizes.from_rows(rows), rows[0].table.pool.page_size, device, windows)
        written.write(rows)
        return written.static_rows()

    def static_rows(self) -> StaticRows:
        """The static rows that a pass reads."""
        rows = self._with_windows(self._laid_out)
        return replace(rows, sampled=self._with_windows(self._narrowed)) if self._narrow else rows

    def _with_windows(self, laid_out: Callable[[str], StaticRows]) -> StaticRows:
        rows, *windowed = map(laid_out, self._prefixes)
        return replace(rows, windowed=windowed[0]) if windowed else rows

    @property
    def sampled(self) -> Tensor | None:
        """int64[W]: the rows with logits of the last pass, if others did not go through all layers."""
        count = self.starts[-1]
        whole = not self._narrow or count == self._staged.arrays["counts"][0]
        return None if whole else self.tensors["logits_indices"][:count]

    @property
    def sampling(self) -> RowSampling:
        """How a token is sampled from each of the rows with logits."""
        return RowSampling(*(self.tensors[_SAMPLE + name] for name in SAMPLING))

    def _laid_out(self, pages: str) -> StaticRows:
        """pages: prefix of the columns of pages; "": the pool's."""
        there = self.tensors
        rows, logits, sequences = there["counts"].split(1)
        paged = AttentionMetadata(
            there[pages + "tables"], self._size, there["lengths"], there["offsets"], there["words"]
        )
        paged.is_prefill, paged.sequences = there["is_prefill"], sequences
        states = None
        if "states" in there:
            states = StateRows(paged, there["states"], there["stops"], there["first_nodes"], rows)
        if not self._is_planned:
            slots, groups = there[pages + "slots"], self._groups(pages + "tables")
            given = there["tokens"], there["positions"], slots, groups, there["logits_indices"]
            return StaticRows(*given, states=states)
        plan = plan_attention(paged, self.sizes.rows, rows)
        groups = (RowGroup(slice(0, self.sizes.rows), paged),)
        return StaticRows(
            there["tokens"], plan.positions, plan.row_slots, groups, there["logits_indices"], rows, logits, None, states
        )

    def _narrowed(self, pages: str) -> StaticRows:
        """The rows with logits alone; their tokens are not read any more. pages: see :meth:`_laid_out`."""
        there, count = self.tensors, self.tensors["counts"][1:2]
        lengths, offsets, words = (there[_NARROW + name] for name in ("lengths", "offsets", "words"))
        paged = AttentionMetadata(there[pages + "tables"], self._size, lengths, offsets, words)
        paged.is_prefill, paged.sequences = there["is_prefill"], there["counts"][2:]
        plan = plan_attention(paged, self.sizes.logits, count)
        groups = (RowGroup(slice(0, self.sizes.logits), paged),)
        return StaticRows(there["tokens"], plan.positions, plan.row_slots, groups, count=count)

    def _groups(self, tables: str) -> tuple[RowGroup, ...]:
        """On a device: trees, then texts. tables: the column."""
        there, (row, number) = self.tensors, self.sizes.tree_capacity
        trees, texts = slice(0, row), slice(row, self.sizes.rows)
        of_trees, of_texts = (
            AttentionMetadata(there[tables][part], self._size, there["lengths"][part], offsets)
            for part, offsets in (
                (slice(0, number), there["offsets"][: number + 1]),
                (slice(number, None), there["text_offsets"]),
            )
        )
        of_trees.words, of_trees.depths = there["words"][trees], there["depths"][trees]
        groups = RowGroup(trees, of_trees), RowGroup(texts, of_texts)
        return tuple(group for group, count in zip(groups, (number, self.sizes.texts), strict=True) if count)

    def write(self, rows: Sequence[Rows]) -> None:
        """Write the inputs of a pass, and of sampling after it. Most steps have the same layout as the one before."""
        to = self._staged.writable()
        layout = [_layout(part) for part in rows]
        if layout != self._layout:
            self._layout = layout
            self._lay_out(rows)
        for index, (part, (number, row)) in enumerate(zip(rows, self._at, strict=True)):
            end = row + len(part.tokens)
            to["tokens"][row:end] = part.tokens
            to["lengths"][number] = part.base
            if self._narrow:
                self._write_narrow(index, number, part)
            if not self._is_planned:
                self._write_positions(slice(row, end), part)
            elif part.words is not None:
                to["words"][row:end] = signed(part.words)
            self._tables.write(number, part.table.pages, part.base)
            if (state := part.state or recurrent_state(part.table)) is not None:
                self._write_states(index, part, state)
            if part.tree is not None:
                self._write_tree(index, part, part.tree, end)
        self._staged.send()

    def without_padding(self, rows: Tensor) -> Tensor:
        """[R, ..]: of all rows of the last pass those that were written."""
        written = [slice(row, row + part[0]) for (_, row), part in zip(self._at, self._layout, strict=True)]
        if all(one.stop == other.start for one, other in pairwise(written)):
            return rows[written[0].start : written[-1].stop]
        return torch.cat([rows[part] for part in written])

    def _lay_out(self, rows: Sequence[Rows]) -> None:
        """Write where the rows of each sequence are, which have logits, and which of those are its tree's."""
        to, trees = self._staged.arrays, [part.tree for part in rows]
        self.drafted = any(tree is not None and len(tree) > 1 for tree in trees)
        self._sampled, self._at, self.starts, number, row = [None] * len(rows), [], [0], 0, 0
        for name in () if self._is_planned else ("offsets", "tokens", "positions", *self._slots, "logits_indices"):
            to[name][:] = 0  # padding, where nothing is written
        for part in rows:
            text = not self._is_planned and (is_text(part) or not self.sizes.tree_capacity[1])
            row, number = max((row, number), self.sizes.tree_capacity) if text else (row, number)
            end = row + len(part.tokens)
            self._write_offset(part, number, end, text)
            first = {"all": row, "last": end - 1, "none": end}[part.logits]
            self.starts.append(self.starts[-1] + end - first)
            to["logits_indices"][self.starts[-2] : self.starts[-1]] = range(first, end)
            if self._narrow:
                to[_NARROW + "offsets"][number + 1 :] = self.starts[-1]
            self._at.append((number, row))
            number, row = number + 1, end
        to["counts"][:] = row, self.starts[-1], len(rows)
        if self.sizes.logits:
            self._lay_out_trees(trees)

    def _write_offset(self, part: Rows, number: int, end: int, text: bool) -> None:
        """Write where the rows of a sequence end, and so those after it, which are padding until they are written."""
        to, (first_row, first) = self._staged.arrays, self.sizes.tree_capacity
        assert self._is_planned or text or number < first, "texts come last"
        to["offsets"][number + 1 :], to["is_prefill"][number] = end, part.words is None
        if text:
            to["text_offsets"][number - first + 1 :] = end - first_row

    def _lay_out_trees(self, trees: Sequence[DraftTree | None]) -> None:
        """Write which of the rows with logits are nodes; a tree with only a root is left out of the walk."""
        to = self._staged.arrays
        to["nodes"][:] = 0
        for index, (tree, last) in enumerate(zip(trees, self.starts[1:], strict=True)):
            if tree is not None:
                to["nodes"][index] = len(tree) if len(tree) > 1 else 0
                to["indices"][index, : len(tree)] = range(last - len(tree), last)

    def _write_narrow(self, index: int, number: int, part: Rows) -> None:
        """Write where the rows with logits of a sequence are: all, or the last one of a text."""
        to = self._staged.arrays
        to[_NARROW + "lengths"][number] = part.base + (len(part.tokens) - 1 if part.logits == "last" else 0)
        if part.words is not None:
            assert part.logits == "all", "a tree, which is verified whole"
            to[_NARROW + "words"][self.starts[index] : self.starts[index + 1]] = signed(part.words)

    def _write_states(self, index: int, part: Rows, state: TextState) -> None:
        """Write the state that a sequence continues from, and where the next states of its text are saved."""
        if "states" in self._staged.arrays:  # else no layer of this model is recurrent
            assert index < state.pages.sequences or part.certain == len(part.tokens), "there is room for its records"
            assert part.nodes is None or list(part.nodes) == list(range(len(part.tokens))), "a whole tree, in order"
            to, (inside, end) = self._staged.arrays, state.save_points(part.certain)
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

    def _write_positions(self, at: slice, part: Rows) -> None:
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


def signed(words: Sequence[int]) -> NDArray[np.int64]:
    """64-bit words as signed integers for a tensor."""
    return np.array(words, dtype=np.uint64).view(np.int64)


#: Prefix of the columns for sampling.
_SAMPLE = "sample_"
#: Prefix of the columns for rows with logits alone.
_NARROW = "narrow_"
#: Prefix of the columns for window pages.
_WINDOW = "window_"
