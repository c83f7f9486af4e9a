"""The ops around the sample, and those that keep a captured step's books: tokens, paths, places.

Legend: N rows, V vocabulary, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.case import Case, lucky_draws, random_words, tree_of
from foresay.spec.sampling import SamplingParams
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.ops import accept, children, lay_out, move, recent
from foresay.verifier.ops.sample import RowSampling, sample_rows

DRAWS = {
    "T=0": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0),
    "T=0.8 top-k 40 top-p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
}
#: Children looked at below a node.
CHILDREN = 8


@dataclass(frozen=True, slots=True)
class TokenCases:
    """Makes the cases of one model's vocabulary and layers."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def all(self, rows: Sequence[int]) -> Iterator[Case]:
        """Every op; samples and children at each of the row counts."""
        for count in rows:
            yield from self.samples(count)
            yield self.children(count)
        yield self.accept()
        yield self.move()
        yield self.places()
        yield self.recent()

    def samples(self, rows: int) -> Iterator[Case]:
        """The sample at every row: greedy, at temperature 1, and with filters. A reference's logarithms are rounded
        otherwise, so one token in fifty may be its neighbour's."""
        vocab = self.config.vocab_size
        for kind, sampling in DRAWS.items():

            def make(sampling: SamplingParams = sampling) -> list[Tensor]:
                return self._asked(rows, sampling)

            on_cpu: Callable[..., Tensor] = lambda *given: _sampled(*(part.cpu() for part in given))  # noqa: E731
            yield Case(f"sample_rows {kind} {rows} x {vocab}", make, _sampled, on_cpu, rows * vocab * 4, limit=0.02)

    def _asked(self, rows: int, sampling: SamplingParams) -> list[Tensor]:
        """Logits, and the columns of how their rows are sampled."""
        vocab = self.config.vocab_size
        logits = 4 * torch.randn(rows, vocab, generator=self.generator, device=self.device)
        seeds = torch.randint(1 << 62, (rows,)).tolist()
        asked = RowSampling.of([sampling] * rows, seeds, list(range(rows)), self.device)
        return [logits, *(getattr(asked, name) for name in RowSampling.__dataclass_fields__)]

    def children(self, rows: int) -> Case:
        """The likeliest children of each node, with the noise of temperature 1."""
        vocab = self.config.vocab_size

        def run(logits: Tensor, *columns: Tensor) -> tuple[Tensor, Tensor]:
            return children.best_children(logits, RowSampling(*columns), CHILDREN)

        return Case(
            f"best_children {CHILDREN} of {rows} x {vocab}",
            lambda: self._asked(rows, DRAWS["T=1"]),
            run,
            lambda *given: run(*(part.cpu() for part in given))[0],
            rows * vocab * 4,
            limit=0.02,
            written=lambda found, *_: found[0],
        )

    def accept(self, sequences: int = 4, nodes: int = 64) -> Case:
        """Accepted paths of random trees of 64 nodes whose samples step into a child two times in three."""

        def make() -> list[Tensor]:
            words = [random_words(nodes) for _ in range(sequences)]
            trees = [tree_of(word) for word in words]
            columns = [torch.stack([getattr(tree, name) for tree in trees]) for name in ("tokens", "parents")]
            slots = torch.randperm(sequences * nodes).view(sequences, nodes)
            sampled = torch.stack([lucky_draws(tree) for tree in trees])
            counts = torch.full((sequences,), nodes)
            return [part.to(self.device) for part in (*columns, torch.stack(words), sampled, counts, slots)]

        def written(found: accept.AcceptedPaths, *_: Tensor) -> Tensor:
            return torch.cat((found.paths, found.emitted, found.sources, found.lengths[:, None]), dim=1)

        def on_cpu(*given: Tensor) -> Tensor:
            return written(accept.accept_paths(*(part.cpu() for part in given)))

        name, moved = f"accept_paths {sequences} x {nodes}", sequences * nodes * 9 * 8
        return Case(name, make, accept.accept_paths, on_cpu, moved, limit=0.0, written=written)

    def move(self, nodes: int = 8) -> Case:
        """Rows of an accepted path, in all layers."""
        c = self.config

        def make() -> list[Tensor]:
            shape = (2, c.num_layers, 16 * nodes, c.num_kv_heads, c.head_dim)
            store = torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)
            sources = torch.sort(torch.randperm(8 * nodes)[:nodes]).values[None] + nodes
            return [store, sources.to(self.device), torch.arange(nodes, 2 * nodes, device=self.device)[None]]

        lengths = torch.tensor([nodes], device=self.device)

        def run(store: Tensor, sources: Tensor, destinations: Tensor) -> None:
            move.move_paths((store[0], store[1]), sources, destinations, lengths)

        def written(_: None, store: Tensor, __: Tensor, destinations: Tensor) -> Tensor:
            return store[:, :, destinations[0]]

        moved = 2 * 2 * c.num_layers * nodes * c.num_kv_heads * c.head_dim * self.dtype.itemsize
        taken: Callable[..., Tensor] = lambda store, sources, _: store[:, :, sources[0]].clone()  # noqa: E731
        return Case(
            f"move_paths {nodes} rows x {c.num_layers} layers", make, run, taken, moved, limit=0.0, written=written
        )

    def places(self, sequences: int = 4, nodes: int = 64, page_size: int = 16) -> Case:
        """Positions and slots of rows, one of the sequences being padding."""

        def make() -> list[Tensor]:
            tables = torch.randperm(sequences * 1024).view(sequences, -1).int()
            lengths = torch.randint(1, 15_000, (sequences,)).int()
            depths, numbers = torch.randint(nodes, (sequences, nodes)).int(), torch.arange(nodes).repeat(sequences, 1)
            live = (torch.arange(sequences) > 0).int()
            return [part.to(self.device) for part in (tables, lengths, depths, numbers, live)]

        def run(tables: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            return lay_out.lay_out(tables, page_size, *rest)

        def wanted(tables: Tensor, lengths: Tensor, depths: Tensor, numbers: Tensor, live: Tensor) -> Tensor:
            there = lengths.long()[:, None] + numbers
            pages = torch.stack([table[row // page_size] for table, row in zip(tables, there, strict=True)]).long()
            places = torch.stack((lengths.long()[:, None] + depths, pages * page_size + there % page_size))
            return (places * live[:, None]).flatten(1)

        name, moved = f"lay_out {sequences} x {nodes}", sequences * nodes * 5 * 8
        return Case(name, make, run, wanted, moved, limit=0.0, written=lambda found, *_: torch.stack(found))

    def recent(self, sequences: int = 4, kept: int = 64, nodes: int = 64) -> Case:
        """The ends of texts, moved on by what was emitted."""

        def make() -> list[Tensor]:
            tokens = torch.randint(1 << 17, (sequences, kept + nodes))
            lengths, ends = torch.zeros(sequences, dtype=torch.int32), torch.ones(sequences, 1, dtype=torch.int64)
            parts = (tokens[:, :kept].contiguous(), lengths, ends, tokens[:, kept:].contiguous())
            return [part.to(self.device) for part in (*parts, torch.randint(nodes + 1, (sequences,)))]

        def wanted(kept_: Tensor, _: Tensor, __: Tensor, emitted: Tensor, taken: Tensor) -> Tensor:
            ends = zip(kept_, emitted, taken.tolist(), strict=True)
            return torch.stack([torch.cat((text, run[:count]))[-kept:] for text, run, count in ends])

        name, moved = f"advance {sequences} x {kept}", sequences * (2 * kept + nodes) * 8
        return Case(name, make, recent.advance, wanted, moved, limit=0.0, written=lambda _, kept_, *__: kept_)


def _sampled(logits: Tensor, *columns: Tensor) -> Tensor:
    return sample_rows(logits, RowSampling(*columns))
