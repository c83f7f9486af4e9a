"""Random lives of sequences against a plain model.

Each sequence remembers its tokens; the row of a position is a number made from all the tokens up to there, so a row
that belongs to another text, to a tree branch not taken or to nobody is recognised. After every operation the ledger is
checked, everything nobody may read is set to NaN, and every sequence reads its whole text back through its slots.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from foresay.kvpaging import KVStore, OutOfPages, PagePool, PageTable, PrefixIndex, WindowPages, store_rows
from foresay.verifier.model.config import KVShape
from tests.poison import poison_store

SALTS = ("", "another tenant")
SCRATCH = -1.0


@dataclass(eq=False)
class Text:
    """A sequence as the model sees it; the drafter has rows for at least `drafted` tokens."""

    table: PageTable
    tokens: list[int]
    salt: str
    drafted: int = 0


def _rows(tokens: list[int]) -> list[float]:
    """The content of each position: a hash of all tokens so far, exact in float32."""
    rows, state = [], 1
    for token in tokens:
        state = (state * 31 + token + 7) % 65521
        rows.append(float(state))
    return rows


class World:
    """A pool with a target's and a drafter's store, a prefix index, and sequences that live in it.

    windows: window pages, and how many positions the target's last layer sees; None: it sees all.
    """

    def __init__(self, seed: int, num_pages: int, page_size: int, windows: tuple[int, int] | None = None) -> None:
        self.rng = random.Random(seed)
        self.pool = PagePool(num_pages, page_size)
        self.windows = None if windows is None else self.pool.attach(WindowPages(*windows, num_pages, page_size))
        last = KVShape(1, 2, 2, None if windows is None else windows[1])
        self.target = KVStore(self.pool, [KVShape(1, 2, 2), KVShape(2, 1, 3), last], torch.float32)
        self.drafter = KVStore(self.pool, [KVShape(2, 1, 1)], torch.float32)
        self.index = PrefixIndex(self.pool)
        self.texts: list[Text] = []
        self.history: list[list[int]] = [[1]]
        self.published: dict[str, set[tuple[int, ...]]] = {salt: set() for salt in SALTS}
        self.seen: Counter[str] = Counter()

    def operate(self) -> None:
        operations: list[tuple[Callable[[], None], int]] = [
            (self.start, 3),
            (self.step, 12),
            (self.catch_up, 4),
            (self.fork, 1),
            (self.truncate, 2),
            (self.finish, 1),
            (self.preempt, 1),
            (self.evict, 1),
        ]
        choices, weights = zip(*operations, strict=True)
        (operation,) = self.rng.choices(choices, weights)
        operation()
        self.verify()

    def start(self) -> None:
        known = self.rng.choice([*self.history, *(text.tokens for text in self.texts)])
        tokens = known[: self.rng.randint(0, len(known))] + self._some_tokens(1, 12)
        self._admit(tokens, self.rng.choice(SALTS))

    def step(self) -> None:
        """A tree of drafted tokens is written behind the text, one path of it is accepted and moved down."""
        text = self._pick()
        if text is None:
            return
        parents = [-1] + [self.rng.randrange(node) for node in range(1, self.rng.randint(1, 7))]
        tokens = self._some_tokens(len(parents), len(parents))
        if not self._reserve(text, len(parents)):
            return
        table, start = text.table, text.table.length
        scratch = table.slots(start, start + len(parents))
        paths = [self._path(parents, node) for node in range(len(parents))]
        rows = [_rows(text.tokens + [tokens[step] for step in path])[-1] for path in paths]
        self._write(self.target, scratch, rows)
        self._write(self.drafter, scratch, [SCRATCH] * len(parents))
        accepted = self.rng.choice(paths)
        self.target.move(scratch[accepted], scratch[: len(accepted)])
        table.commit(len(accepted))
        self.target.mark(table, table.length)
        table.trim()
        text.tokens += [tokens[node] for node in accepted]
        self.seen["moved"] += accepted != list(range(len(accepted)))
        self._publish(text)

    def catch_up(self) -> None:
        text = self._pick()
        if text is None:
            return
        start = self.drafter.filled(text.table)
        stop = self.rng.randint(start, len(text.tokens))
        shared = [page for page in text.table.pages if self.pool.references(page) > 1]
        self.seen["caught up in shared pages"] += bool(shared) and stop > start
        self._write(self.drafter, text.table.slots(start, stop), _rows(text.tokens)[start:stop])
        self.drafter.mark(text.table, stop)
        text.drafted = max(text.drafted, stop)

    def fork(self) -> None:
        text = self._pick()
        if text is not None and len(self.texts) < 6:
            self.texts.append(Text(text.table.fork(), list(text.tokens), text.salt, text.drafted))

    def truncate(self) -> None:
        text = self._pick()
        if text is not None:
            length = self.rng.randint(0, len(text.tokens))
            text.table.truncate(length)
            self.seen["cut shorter"] += text.table.length < length
            assert text.table.length == length or self.windows is not None
            del text.tokens[text.table.length :]
            text.drafted = min(text.drafted, text.table.length)

    def finish(self) -> None:
        text = self._pick()
        if text is not None:
            self._leave(text)
            self.history = [*self.history[-8:], text.tokens]

    def preempt(self) -> None:
        """The pages go, the tokens are kept and computed again."""
        text = self._pick()
        if text is not None:
            self._leave(text)
            self._admit(text.tokens, text.salt)

    def evict(self) -> None:
        wanted, before = self.rng.randint(0, 3), len(self.index)
        assert self.index.pool.evict(wanted) == before - len(self.index) <= wanted

    def verify(self) -> None:
        self.pool.check([text.table for text in self.texts], at_rest=True)
        poison_store(self.target)
        poison_store(self.drafter)
        for text in self.texts:
            assert text.table.length == len(text.tokens)
            assert self.target.filled(text.table) == len(text.tokens)
            drafted = self.drafter.filled(text.table)
            assert drafted >= text.drafted
            rows = _rows(text.tokens)
            self._read(self.target, text.table, rows)
            self._read(self.drafter, text.table, rows[:drafted])
            self.seen["scattered"] += bool((text.table.slots(0, len(rows)).diff() != 1).any())

    def _admit(self, tokens: list[int], salt: str) -> None:
        pages = self.index.match(tokens, salt)
        found = len(pages) * self.pool.page_size
        assert found < max(len(tokens), 1)
        assert not found or tuple(tokens[:found]) in self.published[salt]
        self.seen["prefix hits"] += found > 0
        text = Text(PageTable(self.pool), tokens[:found], salt)
        text.table.adopt(pages, found)
        self.texts.append(text)
        while len(text.tokens) < len(tokens):
            start = len(text.tokens)
            stop = min(start + self.rng.randint(1, 9), len(tokens))
            if not self._reserve(text, stop - start):
                return
            self._write(self.target, text.table.slots(start, stop), _rows(tokens[:stop])[start:])
            text.table.commit(stop - start)
            self.target.mark(text.table, stop)
            text.tokens += tokens[start:stop]
            self._publish(text)

    def _reserve(self, text: Text, extra: int) -> bool:
        """Reserve, sending away the youngest others while pages are lacking, in the end the text itself."""
        while True:
            before = (list(text.table.pages), text.table.length, self._available)
            shared = bool(before[0]) and self.pool.references(before[0][-1]) > 1
            cached = len(self.index)
            try:
                text.table.reserve(extra)
            except OutOfPages:
                self.seen["out of pages"] += 1
                assert before == (text.table.pages, text.table.length, self._available)
                youngest = next((other for other in reversed(self.texts) if other is not text), text)
                self._leave(youngest)
                if youngest is text:
                    return False
            else:
                self.seen["copied on write"] += shared and text.table.pages[: len(before[0])] != before[0]
                self.seen["evicted"] += len(self.index) < cached
                return True

    @property
    def _available(self) -> tuple[int, int]:
        return self.pool.available, 0 if self.windows is None else self.windows.available

    def _publish(self, text: Text) -> None:
        if self.rng.random() < 0.7:
            self.index.publish(text.table, text.tokens, text.salt)
            size = self.pool.page_size
            ends = range(size, len(text.tokens) + 1, size)
            self.published[text.salt] |= {tuple(text.tokens[:end]) for end in ends}

    def _leave(self, text: Text) -> None:
        text.table.release()
        self.texts.remove(text)

    def _pick(self) -> Text | None:
        return self.rng.choice(self.texts) if self.texts else None

    def _some_tokens(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randint(low, high))]

    @staticmethod
    def _path(parents: list[int], node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    @staticmethod
    def _write(store: KVStore, slots: torch.Tensor, rows: list[float]) -> None:
        for layer, shape in enumerate(store.layers):
            keys, values, _ = store.layer(layer)
            own = store.pages(layer).slots(slots)
            row = (torch.tensor(rows) + layer)[:, None, None]
            k, v = (row.expand(-1, shape.heads, width) for width in (shape.key_dim, shape.value_dim))
            store_rows(keys, values, own, k, -v)

    @staticmethod
    def _read(store: KVStore, table: PageTable, rows: list[float]) -> None:
        for layer, shape in enumerate(store.layers):
            keys, values, _ = store.layer(layer)
            seen = 0 if shape.window is None else max(0, table.length - shape.window + 1)  # by the next row
            slots = store.pages(layer).slots(table.slots(seen, max(len(rows), seen)))
            expected = (torch.tensor(rows[seen:]) + layer)[:, None, None]
            assert torch.equal(keys[slots], expected.expand_as(keys[slots]))
            assert torch.equal(values[slots], -expected.expand_as(values[slots]))


def _lives(num_pages: int, page_size: int, windows: tuple[int, int] | None = None) -> Counter[str]:
    """What happened in some worlds."""
    seen: Counter[str] = Counter()
    for seed in range(6 if windows is None else 3):
        world = World(seed, num_pages, page_size, windows)
        for _ in range(120):
            world.operate()
        while world.texts:
            world.finish()
            world.verify()
        world.index.pool.evict(num_pages)
        assert world._available == (num_pages - 1, windows[0] - 1 if windows else 0)
        seen += world.seen
    return seen


@pytest.mark.parametrize(("num_pages", "page_size"), [(14, 4), (60, 1), (26, 3), (10, 8)])
def test_every_sequence_reads_its_own_text(num_pages: int, page_size: int) -> None:
    seen = _lives(num_pages, page_size)
    expected = {"moved", "caught up in shared pages", "out of pages", "evicted", "scattered", "prefix hits"}
    expected |= {"copied on write"} if page_size > 1 else set()
    assert {what for what in expected if seen[what] >= 10} == expected, f"hardly exercised: {seen}"


@pytest.mark.parametrize(
    ("num_pages", "page_size", "windows"),
    [(40, 4, (9, 6)), (140, 1, (24, 7)), (50, 3, (12, 1)), (25, 8, (6, 13)), (40, 4, (40, 9))],
)
def test_windows_keep_what_the_next_row_sees(num_pages: int, page_size: int, windows: tuple[int, int]) -> None:
    """With many window pages, nothing is lost; with few, texts share and roll back to where they can go on."""
    seen = _lives(num_pages, page_size, windows)
    expected = {"moved", "out of pages", "prefix hits"} if windows[0] < num_pages else {"moved", "prefix hits"}
    assert {what for what in expected if seen[what] >= 5} == expected, f"hardly exercised: {seen}"
    assert windows[0] < num_pages or not seen["cut shorter"]
