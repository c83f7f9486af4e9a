"""ForwardBatch: which row goes where and what it sees, written out by hand."""

from __future__ import annotations

import pytest
import torch

from kvpaging import PagePool, PageTable
from spec.protocols import Rows
from spec.tree import DraftTree
from tests.verifier.reading import scattered
from verifier.batch import ForwardBatch, Segment

SIZE = 4


def table_of(length: int, extra: int, pool: PagePool | None = None) -> PageTable:
    """A table with ``length`` committed tokens and room for more; pages of four."""
    table = PageTable(pool or PagePool(33, SIZE))
    table.reserve(length + extra)
    table.commit(length)
    return table


def chain(table: PageTable, count: int, wanted="all") -> Rows:
    return Rows(table, torch.arange(100, 100 + count), table.length, wanted=wanted)


#: Two branches below the root: 0 - 1 - 3 and 0 - 2 - 4 - 5.
TREE = DraftTree.build([50, 51, 52, 53, 54, 55], [-1, 0, 0, 1, 2, 4])


def segment_of(rows: Rows, group: int = 1, window: int | None = None) -> Segment:
    (segment,) = ForwardBatch.build([rows], group, window).segments
    return segment


def visible(hidden: torch.Tensor, rows: int) -> list[list[int]]:
    return [(~row).nonzero().flatten().tolist() for row in hidden[:rows]]


def test_the_rows_of_several_sequences_lie_behind_each_other() -> None:
    pool = PagePool(33, SIZE)
    prefill, tree, root = table_of(0, 5, pool), table_of(6, 6, pool), table_of(9, 1, pool)
    batch = ForwardBatch.build(
        [chain(prefill, 5, wanted="last"), Rows.of_tree(tree, TREE), chain(root, 1, wanted="none")], 2, None
    )
    assert batch.tokens.tolist() == [100, 101, 102, 103, 104, 50, 51, 52, 53, 54, 55, 100]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 6, 7, 7, 8, 8, 9, 9]
    slots = [*prefill.slots(0, 5).tolist(), *tree.slots(6, 12).tolist(), *root.slots(9, 10).tolist()]
    assert batch.slots.tolist() == slots
    assert batch.live == 12
    assert batch.wanted.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert batch.starts == [0, 1, 7, 7]
    assert [s.rows for s in batch.segments] == [slice(0, 5), slice(5, 11), slice(11, 12)]


def test_a_single_row_gets_company() -> None:
    batch = ForwardBatch.build([chain(table_of(6, 1), 1)], 1, None)
    assert (batch.live, len(batch.tokens), len(batch.positions)) == (1, 2, 2)
    assert (len(batch.slots), batch.wanted.tolist()) == (1, [0])
    assert len(ForwardBatch.build([chain(table_of(6, 2), 2)], 1, None).tokens) == 2


def test_rows_are_padded_to_what_products_take() -> None:
    batch = ForwardBatch.build([chain(table_of(6, 7), 7)], 1, None, lambda rows: rows + 3)
    assert (batch.live, len(batch.tokens), len(batch.positions), len(batch.slots)) == (7, 10, 10, 7)


def test_a_chain_sees_what_lies_before_it() -> None:
    segment = segment_of(chain(table_of(6, 3), 3))
    assert (segment.full, segment.blocks, segment.used, segment.resident) == (1, 3, 9, 12)
    assert segment.path_columns is None
    # The tail begins at position 4; the rows are positions 6, 7 and 8.
    assert visible(segment.tail_mask, 3) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_a_tree_row_reads_committed_positions_and_then_its_path() -> None:
    segment = segment_of(Rows.of_tree(table_of(6, 6), TREE))
    # Positions up to 9 in blocks of four; slots up to 11.
    assert (segment.full, segment.blocks, segment.used, segment.resident) == (1, 3, 12, 12)
    assert segment.path_columns is not None
    # The tail's slots begin at position 4: column c is slot c + 4, of node c - 2.
    paths = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5], [0, 1, 2, 4, 6], [0, 1, 2, 4, 6, 7]]
    assert visible(segment.tail_mask, 6) == paths
    for row, path in enumerate(paths):
        columns = segment.path_columns[row].tolist()
        assert columns[: len(path)] == path, "a path is gapless whatever slots it has"
        assert segment.tail_mask[row, columns[len(path) :]].all(), "nothing is seen behind it"


def test_each_span_of_a_tail_holds_the_slots_of_its_positions(monkeypatch) -> None:
    monkeypatch.setattr("verifier.batch.SPAN", 8)
    segment = segment_of(Rows.of_tree(table_of(6, 6), TREE))
    assert segment.tail_spans is not None
    # Positions 0 to 7 are committed ones, the root and the second level; what lies deeper is in the next span.
    seen = segment.tail_spans[:, :6, 4:].bool() & ~segment.tail_mask[:6]
    assert visible(~seen[0], 6) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4]]
    assert visible(~seen[1], 6) == [[], [], [], [5], [6], [6, 7]]
    assert segment.tail_spans[0, :6, :4].all()
    assert (segment.span, segment.begin) == (8, 0)
    assert segment_of(Rows.of_tree(table_of(8, 6), TREE)).tail_spans is None


def test_blocks_are_counted_by_position_and_residents_by_slot() -> None:
    """Seven siblings take slots up to 15 but reach position 8 only."""
    bush = DraftTree.build(range(8), [-1] + [0] * 7)
    segment = segment_of(Rows.of_tree(table_of(7, 8), bush))
    assert (segment.blocks, segment.used, segment.resident) == (3, 15, 16)


def test_each_row_stands_once_per_query_head_of_its_group_and_eight_times_at_least() -> None:
    segment = segment_of(chain(table_of(6, 3), 3), group=2)
    rows = visible(segment.tail_mask, 8)
    assert rows[0::2][:3] == rows[1::2][:3] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert rows[6:] == [[0, 1, 2, 3, 4]] * 2
    assert len(segment_of(chain(table_of(6, 9), 9), group=3).tail_mask) == 27


def test_a_window_hides_by_position() -> None:
    segment = segment_of(Rows.of_tree(table_of(6, 6), TREE), window=4)
    assert segment.window_mask is not None
    # Columns are slots 0 .. 11, of nodes from 6 on; depths 0, 1, 1, 2, 2, 3 sit at positions 6 .. 9.
    assert visible(segment.window_mask, 6) == [
        [3, 4, 5, 6],
        [4, 5, 6, 7],
        [4, 5, 6, 8],
        [5, 6, 7, 9],
        [5, 6, 8, 10],
        [6, 8, 10, 11],
    ]


@pytest.mark.parametrize(("window", "masked"), [(9, True), (10, False), (None, False)])
def test_a_window_that_hides_nothing_needs_no_mask(window, masked) -> None:
    """The deepest row sits at position 9: a window of ten still shows it position 0."""
    segment = segment_of(Rows.of_tree(table_of(6, 6), TREE), window=window)
    assert (segment.window_mask is not None) == masked


def test_pages_side_by_side_are_read_in_place_and_others_by_slot() -> None:
    together, apart = table_of(6, 6), table_of(6, 6, scattered(PagePool(33, SIZE)))
    assert together.run is not None
    assert (segment_of(chain(together, 6)).first_slot, segment_of(chain(together, 6)).slots) == (together.run, None)
    assert apart.run is None
    slots = segment_of(chain(apart, 6)).slots
    assert slots is not None
    assert slots.tolist() == apart.slots(0, 12).tolist()
