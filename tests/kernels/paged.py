"""Sequences in scattered pages with trees behind them, as the kernels' tests build them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresay.kvpaging.store import quantized
from foresay.verifier.ops.records import AttentionMetadata
from tests.verifier.reading import random_parents


@dataclass
class Sequence:
    """One sequence of one layer: committed rows, and nodes of a tree in the slots behind (node 0 is the root).

    keys, values: [length + nodes, G, D], by position. query: [nodes, H, D].
    """

    length: int
    parents: list[int]
    keys: Tensor
    values: Tensor
    query: Tensor

    def path(self, node: int) -> list[int]:
        """The node and those above it, the root first."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def word(self, node: int) -> int:
        word = sum(1 << ancestor for ancestor in self.path(node))
        return word - (1 << 64) if word >> 63 else word

    def compacted(self, node: int, roots: int = 1) -> Sequence:
        """The text of a node's path, its last ``roots`` rows a chain behind what is committed."""
        path = self.path(node)
        positions = [*range(self.length), *(self.length + ancestor for ancestor in path)]
        chain = [-1, *range(roots - 1)]
        query = self.query[path][-roots:]
        return Sequence(len(positions) - roots, chain, self.keys[positions], self.values[positions], query)


#: query, keys, values and where everything is; and the scales of keys and values that are quantised.
Layout = tuple[Tensor, Tensor, Tensor, AttentionMetadata, Tensor | None]


def kept(keys: Tensor, values: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values, [slots, G, D], as a store of this dtype keeps them, and their scales; None: as they are.

    Quantised on the CPU: on CUDA torch divides by a number by multiplying with its reciprocal, so that some of what a
    kernel reads would be a step from what its reference reads."""
    if dtype is None:
        return keys, values, None
    (one, of_keys), (other, of_values) = (quantized(part.cpu(), dtype) for part in (keys, values))
    return one.to(keys.device), other.to(keys.device), torch.stack((of_keys, of_values), dim=1).to(keys.device)


@dataclass
class Bench:
    """Makes sequences and lays them out. G kv heads with ``group`` query heads each, D wide."""

    groups: int = 2
    group: int = 2
    width: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def sequence(self, length: int, nodes: int, reach: int = 4) -> Sequence:
        """A random tree; ``reach`` 1 is a chain."""
        parents = [-1, *random_parents(self.rng, nodes, reach)[1:]]
        shape = (length + nodes, self.groups, self.width)
        query = self.random(nodes, self.groups * self.group, self.width)
        return Sequence(length, parents, self.random(*shape), self.random(*shape), query)

    def lay_out(
        self, sequences: list[Sequence], padding: int = 0, spare_pages: int = 0, chain: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """query, keys, values and where everything is; NaN wherever no row may read, and in the padding rows."""
        size = self.page_size
        needed = [-(-len(s.keys) // size) for s in sequences]
        ids = list(range(1, 2 + sum(needed)))
        self.rng.shuffle(ids)
        tables = torch.full((len(sequences), max(needed) + spare_pages), 2**30, dtype=torch.int32)
        keys = torch.full(((len(ids) + 1) * size, self.groups, self.width), torch.nan).to(self.device, self.dtype)
        values = keys.clone()
        for row, sequence in enumerate(sequences):
            pages = torch.tensor([ids.pop() for _ in range(needed[row])])
            tables[row, : len(pages)] = pages
            slots = (pages[:, None] * size + torch.arange(size)).flatten()[: len(sequence.keys)].to(self.device)
            keys[slots], values[slots] = sequence.keys, sequence.values
        counts = [len(s.query) for s in sequences]
        nodes = [] if chain else [(s, node) for s in sequences for node in range(len(s.query))]
        words = [s.word(node) for s, node in nodes]
        depths = [len(s.path(node)) - 1 for s, node in nodes]
        blank = torch.full((padding, *sequences[0].query.shape[1:]), torch.nan).to(self.device, self.dtype)
        rows = AttentionMetadata(
            tables=tables.to(self.device),
            page_size=size,
            lengths=self.integers([s.length for s in sequences]),
            offsets=self.integers([0, *torch.tensor(counts).cumsum(0).tolist()]),
            words=None if chain else self.integers(words + [0] * padding, torch.int64),
            depths=None if chain else self.integers(depths + [0] * padding),
        )
        return torch.cat([*(s.query for s in sequences), blank]), keys, values, rows

    def integers(self, numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)
