"""State pages without a model: page size 4, and texts that are read as the engine reads them."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest

from foresay.kvpaging import OutOfPages, PagePool, PageTable, PrefixIndex, StatePages, WindowPages
from foresay.kvpaging.prefix import digests
from foresay.kvpaging.states import recurrent_state


class Case:
    """A pool with an index, and so many state pages."""

    def __init__(self, states: int) -> None:
        self.pool = PagePool(200, page_size=4)
        self.states = self.pool.attach(StatePages(4, 1 + states, 4))
        self.index, self.tables = PrefixIndex(self.pool), list[PageTable]()

    def read(self, tokens: list[int]) -> tuple[PageTable, int]:
        """A text that is read up to its end, from what is known of it; and how much that was."""
        table, pages = PageTable(self.pool), self.index.match(tokens)
        self.tables.append(table)
        table.adopt(pages, found := 4 * len(pages), self.index.known)
        while rows := table.align_chunk(len(tokens) - table.length):
            self.write(table, rows)
        self.index.publish(table, tokens)
        return table, found

    def write(self, table: PageTable, rows: int) -> None:
        state = recurrent_state(table)
        assert state is not None
        table.reserve(rows)
        table.commit(rows)
        state.commit_rows(rows)
        self.pool.check(self.tables)

    def cached(self, tokens: list[int]) -> int:
        """How much of a text was known, which is gone on with."""
        table, found = self.read(tokens)
        for _ in range(3):
            self.write(table, 2)
        self.leave(table)
        return found

    def leave(self, table: PageTable) -> None:
        table.release()
        self.tables.remove(table)
        self.pool.check(self.tables)


def test_a_beginning_that_each_request_uses_is_kept() -> None:
    """However many texts leave checkpoints of their own."""
    case, system = Case(states=4 + 6), [1, 2, 3, 4, 5, 6, 7, 8]
    found = [case.cached([*system, *[number] * 6]) for number in range(40)]
    assert found == [0, 0, *[8] * 38]  # where texts part is known once the second has been read
    assert len(case.states.checkpoints) > 4, "full, so that others went"


@pytest.mark.parametrize(("cut", "left"), [(14, 12), (13, 12), (11, 8), (9, 8)])
def test_a_text_cut_before_its_last_boundary_goes_back_to_the_one_before(cut: int, left: int) -> None:
    case = Case(states=8)
    table, _ = case.read([1] * 9)
    for _ in range(3):
        case.write(table, 2)
    table.truncate(cut)
    assert table.length == left
    case.index.publish(table, [1] * 15)
    case.leave(table)
    assert case.cached([*[1] * left, 2]) == left


def test_the_boundary_before_the_last_makes_room_for_texts_that_run() -> None:
    """Three texts in the state pages that two would hold."""
    case = Case(states=9)
    for number in range(3):
        case.read([number] * 9)
    for table in case.tables * 20:
        case.write(table, 2)
    assert len(case.states.previous) < 3


@pytest.mark.parametrize("seed", range(2))
def test_a_prefix_ends_at_the_largest_checkpoint_that_windows_and_states_have(seed: int) -> None:
    """With few pages of both, so that each loses other ends of texts."""
    rng, case, found = random.Random(seed), Case(states=14), [0, 0]
    windows, history = case.pool.attach(WindowPages(12, 6, 200, 4)), [[1] * 9]
    for _ in range(120):
        known = rng.choice(history)
        tokens = [*known[: rng.randint(0, len(known))], *[rng.randint(0, 1) for _ in range(rng.randint(1, 14))]]
        pages = case.index.match([*tokens, 0])
        for page in reversed(pages):
            case.pool.release(page)
        every = _indexed(case, tokens)
        ends = [end for end in range(1, len(every) + 1) if case.states.local_page(every[end - 1])]
        seen = [[windows.local_page(page) for page in every[windows.first_page(4 * end) : end]] for end in ends]
        assert len(pages) == max((end for end, own in zip(ends, seen, strict=True) if all(own)), default=0)
        found[bool(ends) and len(pages) < ends[-1]] += bool(pages)
        try:
            case.cached(tokens)
        except OutOfPages:
            case.leave(case.tables[-1])
        if case.tables and rng.random() < 0.3:
            case.leave(rng.choice(case.tables))
        history = [*history[-6:], tokens]
    assert min(found) > 2, found


def _indexed(case: Case, tokens: list[int]) -> list[int]:
    """The pages that the index knows of a text."""
    chain = digests(tokens, 4)
    return list(takewhile(bool, (case.index.page_of(digest) or 0 for digest in chain)))
