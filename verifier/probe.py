"""The exactness probe: does this model on this machine give a row the same bits in any batch?

The real weights run one random text twice: in one pass; and in chunks of many sizes, including single rows, as a tree
with wrong siblings of which the true path is compacted, and then row by row, on scattered pages and together with
another text. Every logit, key and value must be equal, bit by bit. This is a test, not a proof: it only covers what it
tried. The guarantee comes from kernels whose sums run in an order that depends only on the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.kvpaging import PagePool, PageTable
from foresay.spec.protocols import Rows
from foresay.spec.tree import DraftTree
from foresay.verifier.model_runner import ModelRunner

#: All chunks but those of one row run together with as many rows of another text: so products have tiles of 16, 32, 64
#: and more rows. The text is longer than what attention sums at once (64 positions).
_CHUNKS = (40, 2, 1, 5, 3, 9, 1, 24)
#: The most tokens more to come near a page's end.
_FILLER = 64
_TREE_PARENTS = (-1, 0, 0, 1, 2, 2, 1, 5, 5, 7)
_TRUE_PATH = (0, 2, 5, 7)
_AFTER = 4
EQUAL = "rows are bit-equal in any batch"


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether equal tokens are promised, and why (or why not), as text for the banner."""

    exact: bool
    reason: str


def probe(model: ModelRunner, pool: PagePool, seed: int = 0) -> Exactness:
    """Run the text in all these ways, and compare."""
    try:
        failed = _first_difference(model, pool, seed)
    finally:
        model.drop_recordings()  # of passes with the logits of more rows than in steps
    if failed is not None:
        return Exactness(False, f"rows differ {failed}: text may depend on the batch in rare ties")
    # Long texts, which GPU kernels cut into parts, are not tested.
    how = ", in short texts" if model.decoder.device.type == "cuda" else ""
    return Exactness(True, f"{EQUAL} (probed{how})")


def _first_difference(model: ModelRunner, pool: PagePool, seed: int) -> str | None:
    """The way of running the text in which its bits differ; None if in none."""
    chunks = _chunks(model, pool.page_size)
    start, generator = sum(chunks), torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (start + len(_TRUE_PATH) + _AFTER,), generator=generator)
    with _reading(model, pool) as whole:
        wanted = [whole.chain(tokens), *whole.kept()]
    with _reading(model, pool) as pieces, _reading(model, pool) as other:
        logits = []
        for part in tokens[:start].split(chunks):
            logits.append(pieces.chain(part, other if len(part) > 1 else None))
        logits.append(pieces.tree(tokens[start : start + len(_TRUE_PATH)]))
        for token in tokens[start + len(_TRUE_PATH) :].split(1):
            logits.append(pieces.chain(token, other))
        found = [torch.cat(logits), *pieces.kept()]
    parts = (  # how many rows have run by then, and how many of their keys and values lie where they stay
        ("between chunk sizes", start, start),
        ("inside a tree", start + len(_TRUE_PATH), start),
        ("after compaction", len(tokens), len(tokens)),
    )
    for where, rows, kept in parts:
        ends = (rows, *(kept for _ in model.store.tensors))
        if not all(_same_bits(a[:end], b[:end]) for a, b, end in zip(found, wanted, ends, strict=True)):
            return where
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """A NaN also counts as equal to itself: some models have tokens that produce one."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _chunks(model: ModelRunner, page_size: int) -> list[int]:
    """The sizes to read the text in; if pages are small, they end where the tree's path crosses the end of one."""
    room = model.decoder.max_positions - len(_TREE_PARENTS) - _AFTER
    chunks = [*_CHUNKS] if sum(_CHUNKS) <= room else [*_CHUNKS[1:]]
    filler = (-sum(chunks) - 3) % page_size
    return [*chunks, filler] if filler and filler <= min(_FILLER, room - sum(chunks)) else chunks


@contextmanager
def _reading(model: ModelRunner, pool: PagePool) -> Iterator[_Reader]:
    reader = _Reader(model, pool)
    try:
        yield reader
    finally:
        reader.table.release()


class _Reader:
    """One text being read into the model's store."""

    def __init__(self, model: ModelRunner, pool: PagePool) -> None:
        self.model, self.table = model, PageTable(pool)

    def chain(self, tokens: Tensor, other: _Reader | None = None) -> Tensor:
        """fp32[R, V]: run committed tokens in one pass. other: reads another text in the same pass, and allocates
        pages alternately."""
        readers = [self] if other is None else [self, other]
        rows = [reader._rows(tokens if reader is self else tokens.flip(0)) for reader in readers]
        logits = self.model.run(rows).of(0).clone()
        for reader in readers:
            reader.table.commit(len(tokens))
            self.model.committed(reader.table)
        return logits

    def _rows(self, tokens: Tensor) -> Rows:
        self.table.reserve(len(tokens))
        return Rows(self.table, tokens, self.table.length)

    def tree(self, path: Tensor) -> Tensor:
        """fp32[R, V]: run a tree whose path ``_TRUE_PATH`` carries these tokens, then commit that path."""
        drafted = [int(path[0])] + [
            (int(path[0]) + 7 * node) % self.model.vocab_size for node in range(1, len(_TREE_PARENTS))
        ]
        for node, token in zip(_TRUE_PATH, path.tolist(), strict=True):
            drafted[node] = token
        tree = DraftTree.build(drafted, _TREE_PARENTS)
        self.table.reserve(len(tree))
        logits = self.model.run([Rows.of_tree(self.table, tree)]).logits[list(_TRUE_PATH)]
        slots = self.table.slots(self.table.length, self.table.length + len(tree))
        self.table.commit(len(path))
        self.model.store.move(slots[list(_TRUE_PATH)], slots[: len(path)])
        self.model.committed(self.table, _TRUE_PATH)
        return logits

    def kept(self) -> list[Tensor]:
        """[T, L, ..] each: what the store has of the committed tokens, by position."""
        return self.model.store.rows(self.table)
