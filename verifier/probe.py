"""The exactness probe: does this model on this machine give a row the same bits in any company?

At start-up the real weights run one random text four ways: in one pass; in chunks of many sizes, single rows among
them; as a tree with wrong siblings, of which the true path is then compacted; and after that row by row again. Every
logit must be equal, bit by bit. If not, matrix products are run in blocks of one fixed row count and asked again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpaging import PagePool, PageTable
from spec.protocols import Rows
from spec.tree import DraftTree
from verifier.paged_model import PagedModel

#: Rows per product where products of different sizes disagree: as many as cost little more than two. In bf16 that are
#: the rows of an AMX tile, which is where they disagree (bench/LOG.md).
FIXED_ROWS = 8
FIXED_ROWS_BF16 = 16
_CHUNKS = (2, 1, 5, 3, 8, 1, 13)
_TREE_PARENTS = (-1, 0, 0, 1, 2, 2, 1, 5, 5, 7)
_TRUE_PATH = (0, 2, 5, 7)
_AFTER = 4


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether equal tokens are promised, and why (or why not), in words for a banner."""

    exact: bool
    reason: str


def probe(model: PagedModel, pool: PagePool, seed: int = 0) -> Exactness:
    """Compare; on a difference switch the model's products to fixed blocks and compare once more."""
    failed = _first_difference(model, pool, seed)
    if failed is None:
        return Exactness(True, f"rows are bit-equal in any batch (probed{_up_to(model)})")
    block = FIXED_ROWS_BF16 if model.decoder.dtype is torch.bfloat16 else FIXED_ROWS
    for linear in model.decoder.linears:
        linear.block = block
    failed = _first_difference(model, pool, seed)
    if failed is None:
        return Exactness(True, f"rows are bit-equal in blocks of {block} rows (probed)")
    for linear in model.decoder.linears:
        linear.block = None
    return Exactness(False, f"rows differ {failed}: text may depend on the batch in rare ties")


def _up_to(model: PagedModel) -> str:
    """What the probe does not reach on a GPU, whose kernels cut longer prompts and contexts into parts."""
    return ", op by op, in short texts" if model.static else ""


def _first_difference(model: PagedModel, pool: PagePool, seed: int) -> str | None:
    """In which of the ways of running the text its logits differ; None if in none."""
    chunks = _chunks(model, pool.page_size)
    length = sum(chunks) + len(_TRUE_PATH) + _AFTER
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (length,), generator=generator)
    whole = _Reader(model, pool)
    pieces = _Reader(model, pool)
    try:
        expected = whole.chain(tokens)
        start = sum(chunks)
        in_chunks = torch.cat([pieces.chain(part) for part in tokens[:start].split(chunks)])
        in_tree = pieces.tree(tokens[start : start + len(_TRUE_PATH)])
        after = torch.cat([pieces.chain(token) for token in tokens[start + len(_TRUE_PATH) :].split(1)])
    finally:
        whole.table.release()
        pieces.table.release()
    parts = (("between chunk sizes", in_chunks), ("inside a tree", in_tree), ("after compaction", after))
    for (name, part), wanted in zip(parts, expected.split([len(part) for _, part in parts]), strict=True):
        if not torch.equal(part, wanted):
            return name
    return None


def _chunks(model: PagedModel, page_size: int) -> list[int]:
    """The sizes to read the text in; they end so near to a page's end that the tree's path crosses it."""
    filler = (-sum(_CHUNKS) - 3) % page_size
    fits = sum(_CHUNKS) + filler + len(_TREE_PARENTS) + _AFTER <= model.max_positions
    return [*_CHUNKS, filler] if filler and fits else list(_CHUNKS)


class _Reader:
    """One text being read into the model's store."""

    def __init__(self, model: PagedModel, pool: PagePool) -> None:
        self.model, self.table = model, PageTable(pool)

    def chain(self, tokens: Tensor) -> Tensor:
        """fp32[R, V]: run committed tokens in one pass."""
        self.table.reserve(len(tokens))
        logits = self.model.run([Rows(self.table, tokens, self.table.length)]).logits
        self.table.commit(len(tokens))
        self.model.committed(self.table, None)
        return logits

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
        self.model.committed(self.table, (slots[list(_TRUE_PATH)], slots[: len(path)]))
        return logits
