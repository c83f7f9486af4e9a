"""Texts read by a model through its pages: in one pass, in pieces, as trees, alone and together.

Every pass runs on a store poisoned with NaN wherever no row may read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PagePool, PageTable, StatePages, WindowPages
from foresay.kvpaging.states import recurrent_state
from foresay.server.engine.parameters import quantized
from foresay.spec.protocols import LogitRows, Rows
from foresay.spec.tree import MAX_NODES, DraftTree
from foresay.verifier.model.config import ModelConfig, window_shapes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import load
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu.threads import num_threads, set_num_threads
from foresay.verifier.probe import probe
from tests.poison import poison_store


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch's ops and kernels with so many threads."""
    before, kernels = torch.get_num_threads(), num_threads()
    torch.set_num_threads(count)
    set_num_threads(count)
    yield
    torch.set_num_threads(before)
    set_num_threads(kernels)


def load_decoder(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    probed: bool = True,
    quantize: str | None = None,
    rounds: bool = False,
) -> Decoder:
    """The decoder of a checkpoint, its products as the probe leaves them on this machine: rows must be bit-equal.
    rounds: whether activations are rounded, as ``--activations int8`` wants it."""
    config = quantized(ModelConfig.from_directory(directory), quantize, "--quantize")
    weights = load(directory, config, dtype, device)
    decoder = Decoder(config, weights, config.max_positions + MAX_NODES, rounds)
    if probed and decoder.device.type == "cpu":
        reader = Reader(decoder)
        exactness = probe(reader.model, reader.pool)
        assert exactness.exact, exactness.reason
    return decoder


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def random_parents(rng: random.Random, nodes: int, reach: int = 64) -> list[int]:
    """Parents of a random tree; a small ``reach`` gives deep trees, a large one bushy trees."""
    return [-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, nodes))]


def random_tree(rng: random.Random, root: int, nodes: int, vocab_size: int) -> DraftTree:
    """A tree of random tokens and random form, from almost a chain to a bush."""
    tokens = [root, *random_tokens(rng, nodes - 1, vocab_size)]
    return DraftTree.build(tokens, random_parents(rng, nodes, rng.choice((1, 2, 5, 64))))


def paths(tree: DraftTree) -> list[list[int]]:
    """The node ids from the root to every leaf."""
    parents = tree.parents
    found = []
    for leaf in sorted(set(range(len(tree))) - set(parents)):
        path = [leaf]
        while path[-1]:
            path.append(parents[path[-1]])
        found.append(path[::-1])
    return found


def scattered(pool: PagePool) -> PagePool:
    """Take every other page of a pool out of use, so that no sequence finds two pages side by side."""
    for page in pool.allocate(pool.num_pages - 1):
        if page % 2:
            pool.release(page)
    return pool


class Reader:
    """A decoder with a pool and a store of its own. windows: pages of the layers that see a window; 0: the pool's."""

    def __init__(
        self, decoder: Decoder, page_size: int = 16, pages: int = 64, scatter: bool = False, windows: int = 0
    ) -> None:
        config = decoder.config
        self.pool = PagePool(1 + pages, page_size)
        if windows:
            assert config.sliding_window is not None
            self.pool.attach(WindowPages(1 + windows, config.sliding_window, self.pool.num_pages, self.pool.page_size))
        if config.stack.recurrence is not None:
            self.pool.attach(StatePages(16, 65, self.pool.page_size))
        store = KVStore(self.pool, window_shapes(config), decoder.dtype)
        self.model = ModelRunner(decoder, store, config.max_positions)
        self.vocab_size = config.vocab_size
        if scatter:
            scattered(self.pool)

    def open(self, committed: Sequence[int] = ()) -> PageTable:
        """A new sequence, its first tokens read in one pass."""
        table = PageTable(self.pool)
        if committed:
            self.read(table, committed)
        return table

    def run(self, *rows: Rows) -> list[Tensor]:
        """The logits of each sequence's rows, from one pass over all of them."""
        poison_store(self.model.store)
        forward = self.model.run(rows)
        return [forward.of(index).clone() for index in range(len(rows))]

    def read(self, table: PageTable, tokens: Sequence[int]) -> Tensor:
        """Run the next tokens of a text in one pass and commit them."""
        logits = self.run(self.rows(table, tokens))[0]
        table.commit(len(tokens))
        self.model.committed(table)
        return logits

    def read_in_pieces(self, table: PageTable, tokens: Sequence[int], sizes: Callable[[], int]) -> Tensor:
        """Run the next tokens of a text in pieces of the given sizes."""
        logits, rest = [], list(tokens)
        while rest:
            count = sizes()
            logits.append(self.read(table, rest[:count]))
            del rest[:count]
        return torch.cat(logits)

    def rows(self, table: PageTable, tokens: Sequence[int], logits: LogitRows = "all") -> Rows:
        """Rows of text at the end of a table; their pages are reserved."""
        table.reserve(len(tokens))
        return Rows(table, torch.tensor(list(tokens)), table.length, logits=logits)

    def tree_rows(self, table: PageTable, tree: DraftTree) -> Rows:
        """Rows of a tree at the end of a table; their pages are reserved."""
        table.reserve(len(tree))
        rows = Rows.of_tree(table, tree)
        # A chain is rows of a text, of which nothing would be known to be a draft.
        return rows if recurrent_state(table) is None else replace(rows, nodes=range(len(tree)), words=tree.ancestors)

    def keep(self, table: PageTable, path: list[int]) -> None:
        """Commit a path of the tree that was run last: its rows move down to be contiguous."""
        base = table.length
        slots = table.slots(base, base + path[-1] + 1)
        table.commit(len(path))
        self.model.store.move(slots[torch.tensor(path)], slots[: len(path)])
        self.model.committed(table, path)
        table.trim()

    def alone(self, tokens: Sequence[int]) -> Tensor:
        """fp32[R, V]: a whole text in one pass, as a sequence that is then forgotten."""
        table = PageTable(self.pool)
        logits = self.read(table, tokens)
        table.release()
        return logits
