"""Every op of ``verifier/ops`` at a model's shapes: fresh inputs, the call, what it has to give, the bytes it moves.

Legend: R rows, H hidden width, Q query heads, G kv heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu import dense
from spec.sampling import SamplingParams
from spec.tree import DraftTree
from verifier.model.config import ModelConfig
from verifier.model.rope import RopeTable
from verifier.ops import accept, activation, linear, move, norm, rope, tree_attention
from verifier.ops.draw import RowSampling, draw_rows
from verifier.ops.tree_attention import PagedRows

PAGE = 16
EPS = 1e-5
DRAWS = {
    "T=0": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0),
    "T=0.8 top-k 40 top-p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    make: fresh random inputs. run: the op on them, which is what is timed. wanted: the result in higher precision, from
    the same inputs before ``run`` saw them. bytes: the least it moves. limit: the largest error allowed, where it is
    not the dtype's. written: all that ``run`` wrote in one tensor, from its result and the inputs; None: its result.
    """

    name: str
    make: Callable[[], Sequence[Tensor]]
    run: Callable[..., Any]
    wanted: Callable[..., Tensor]
    bytes: int
    limit: float | None = None
    written: Callable[..., Tensor] | None = None

    def outcome(self) -> tuple[Tensor, Tensor]:
        """What was written and what should have been, on inputs never used before."""
        inputs = self.make()
        wanted = self.wanted(*(tensor.clone() for tensor in inputs))
        result = self.run(*inputs)
        return result if self.written is None else self.written(result, *inputs), wanted


@dataclass(slots=True)
class Cases:
    """Makes the cases of one model's shape. contexts: committed tokens of the attention cases."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(device=self.device).manual_seed(self.seed)

    def all(self, rows: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
        """Every op; small ones at the first and the last row count, products at all of them."""
        for count in sorted({rows[0], rows[-1]}):
            yield from self.of_rows(count)
            for context in contexts:
                yield self.attention(count, context)
        yield self.chunk(min(256, contexts[0]), contexts[0])
        for name, outer, inner in self.products():
            for count in rows:
                yield self.product(name, outer, inner, count)
        for count in (rows[0], rows[-1]):
            yield self.gated(count)
            yield from self.draws(count)
        yield self.accept()
        yield self.move()

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers of the dtype measured in."""
        made = torch.randn(shape, generator=self._generator, device=self.device) * scale
        return made.to(self.dtype)

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    def of_rows(self, rows: int) -> Iterator[Case]:
        """Norms, rotation with the store, the activation."""
        c = self.config
        hidden, inner = c.hidden_size, c.intermediate_size
        yield Case(
            f"rms_norm {rows} x {hidden}",
            lambda: (self.random(rows, hidden), self.random(hidden)),
            lambda x, w: norm.rms_norm(x, w, EPS),
            lambda x, w: dense.rms_norm(x, w, EPS),
            2 * rows * hidden * self.item,
        )
        yield Case(
            f"add_rms_norm {rows} x {hidden}",
            lambda: (self.random(rows, hidden), self.random(rows, hidden), self.random(hidden)),
            lambda x, y, w: norm.add_rms_norm(x, y, w, EPS),
            _added,
            4 * rows * hidden * self.item,
            written=lambda normed, x, y, w: torch.stack((normed, x)),
        )
        yield Case(
            f"silu_mul {rows} x {inner}",
            lambda: (self.random(rows, 2 * inner),),
            activation.silu_mul,
            dense.silu_mul,
            3 * rows * inner * self.item,
        )
        yield self.rotation(rows)

    def rotation(self, rows: int) -> Case:
        """From the qkv product to rotated queries and the store, with the norms where the model has them."""
        c = self.config
        heads, groups, dim = c.num_heads, c.num_kv_heads, c.head_dim
        table = RopeTable(c, 4096, self.device)
        normed = (torch.ones(2, dim, device=self.device).to(self.dtype),) if c.qk_norm else ()

        def make() -> list[Tensor]:
            positions = torch.randint(4096, (rows,), generator=self._generator, device=self.device)
            store = torch.zeros(2, (rows + 1) * PAGE, groups, dim, dtype=self.dtype, device=self.device)
            slots = PAGE + torch.randperm(rows * PAGE, generator=self._generator, device=self.device)[:rows]
            return [self.random(rows, (heads + 2 * groups) * dim), *table.rows(positions, self.dtype), store, slots]

        def run(qkv: Tensor, cos: Tensor, sin: Tensor, store: Tensor, slots: Tensor) -> Tensor:
            norms = (*normed[0], EPS) if normed else ()
            return rope.rotate_and_store(qkv, cos, sin, store[0], store[1], slots, *norms)

        def written(query: Tensor, *inputs: Tensor) -> Tensor:
            store, slots = inputs[3:]
            return torch.cat((query, store[0][slots], store[1][slots]), dim=1)

        def wanted(qkv: Tensor, cos: Tensor, sin: Tensor, store: Tensor, slots: Tensor) -> Tensor:
            parts = qkv.view(rows, -1, dim)
            turning = parts[:, :-groups]
            if normed:
                turning = dense.rms_norm(turning, normed[0][0], EPS)
            return torch.cat((dense.rotate(turning, cos, sin), parts[:, -groups:].double()), dim=1)

        moved = rows * dim * (2 * (heads + 2 * groups) + 2) * self.item
        return Case(f"rotate_and_store {rows} x {heads}+2*{groups} x {dim}", make, run, wanted, moved, written=written)

    def attention(self, rows: int, context: int) -> Case:
        """A random tree of ``rows`` nodes below ``context`` committed tokens in scattered pages."""
        return self._attention(f"tree_attention {rows} rows at {context}", rows, context, tree=True)

    def chunk(self, rows: int, context: int) -> Case:
        """A chunk of a prompt."""
        return self._attention(f"chunk_attention {rows} rows at {context}", rows, context, tree=False)

    def _attention(self, name: str, rows: int, context: int, tree: bool) -> Case:
        c = self.config
        scale, pages = c.head_dim**-0.5, -(-(context + rows) // PAGE)

        def make() -> list[Tensor]:
            store = self.random(2, (pages + 1) * PAGE, c.num_kv_heads, c.head_dim)
            table = 1 + torch.randperm(pages, generator=self._generator, device=self.device)
            words = _random_words(rows) if tree else torch.zeros(0, dtype=torch.int64)
            depths = torch.tensor([word.bit_count() - 1 for word in _unsigned(words)], dtype=torch.int32)
            query = self.random(rows, c.num_heads, c.head_dim)
            return [query, store, table.int()[None], words.to(self.device), depths.to(self.device)]

        lengths = torch.tensor([context], dtype=torch.int32, device=self.device)
        offsets = torch.tensor([0, rows], dtype=torch.int32, device=self.device)

        def over(op: Callable[..., Tensor], query: Tensor, store: Tensor, *where: Tensor) -> Tensor:
            table, words, depths = where
            paged = PagedRows(table, PAGE, lengths, offsets, words if tree else None, depths if tree else None)
            return op(query, store[0], store[1], paged, scale)

        read = 2 * (context + rows) * c.num_kv_heads * c.head_dim * self.item
        moved = read + 2 * rows * c.num_heads * c.head_dim * self.item
        return Case(name, make, partial(over, tree_attention.tree_attention), partial(over, dense.attention), moved)

    def products(self) -> Iterator[tuple[str, int, int]]:
        """Name, outputs and inner width of the model's products that have no epilogue of their own."""
        c = self.config
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        yield "qkv", heads, c.hidden_size
        yield "o", c.hidden_size, c.num_heads * c.head_dim
        yield "down", c.hidden_size, c.intermediate_size
        yield "head", c.vocab_size, c.hidden_size

    def product(self, name: str, outer: int, inner: int, rows: int) -> Case:
        """The skinny linear."""
        return Case(
            f"linear {name} {rows} x {outer} x {inner}",
            lambda: (self.random(rows, inner), self.random(outer, inner, scale=0.02)),
            linear.linear,
            dense.linear,
            (outer * inner + rows * (inner + outer)) * self.item,
        )

    def gated(self, rows: int) -> Case:
        """The skinny linear with the gate behind it."""
        outer, inner = 2 * self.config.intermediate_size, self.config.hidden_size
        return Case(
            f"gated_linear {rows} x {outer} x {inner}",
            lambda: (self.random(rows, inner), self.random(outer, inner, scale=0.02)),
            linear.gated_linear,
            lambda x, w: dense.silu_mul(dense.linear(x, w)),
            (outer * inner + rows * (inner + outer // 2)) * self.item,
        )

    def draws(self, rows: int) -> Iterator[Case]:
        """The draw at every row: greedy, at temperature 1, and with filters. A reference's logarithms are rounded
        otherwise, so one token in fifty may be its neighbour's."""
        vocab = self.config.vocab_size
        for kind, sampling in DRAWS.items():

            def make(sampling: SamplingParams = sampling) -> list[Tensor]:
                logits = 4 * torch.randn(rows, vocab, generator=self._generator, device=self.device)
                seeds = torch.randint(1 << 62, (rows,)).tolist()
                asked = RowSampling.of([sampling] * rows, seeds, list(range(rows)), self.device)
                return [logits, *(getattr(asked, name) for name in RowSampling.__dataclass_fields__)]

            on_cpu: Callable[..., Tensor] = lambda *given: _drawn(*(part.cpu() for part in given))  # noqa: E731
            yield Case(f"draw_rows {kind} {rows} x {vocab}", make, _drawn, on_cpu, rows * vocab * 4, limit=0.02)

    def accept(self, sequences: int = 4, nodes: int = 64) -> Case:
        """Accepted paths of random trees of 64 nodes whose draws step into a child two times in three."""

        def make() -> list[Tensor]:
            words = [_random_words(nodes) for _ in range(sequences)]
            trees = [_tree(word) for word in words]
            columns = [torch.stack([getattr(tree, name) for tree in trees]) for name in ("tokens", "parents")]
            slots = torch.randperm(sequences * nodes).view(sequences, nodes)
            drawn = torch.stack([_draws(tree) for tree in trees])
            counts = torch.full((sequences,), nodes)
            return [part.to(self.device) for part in (*columns, torch.stack(words), drawn, counts, slots)]

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
            store = self.random(2, c.num_layers, 16 * nodes, c.num_kv_heads, c.head_dim)
            sources = torch.sort(torch.randperm(8 * nodes)[:nodes]).values[None] + nodes
            return [store, sources.to(self.device), torch.arange(nodes, 2 * nodes, device=self.device)[None]]

        lengths = torch.tensor([nodes], device=self.device)

        def run(store: Tensor, sources: Tensor, destinations: Tensor) -> None:
            move.move_paths(store[0], store[1], sources, destinations, lengths)

        def written(_: None, store: Tensor, __: Tensor, destinations: Tensor) -> Tensor:
            return store[:, :, destinations[0]]

        moved = 2 * 2 * c.num_layers * nodes * c.num_kv_heads * c.head_dim * self.item
        taken: Callable[..., Tensor] = lambda store, sources, _: store[:, :, sources[0]].clone()  # noqa: E731
        return Case(
            f"move_paths {nodes} rows x {c.num_layers} layers", make, run, taken, moved, limit=0.0, written=written
        )


def _drawn(logits: Tensor, *columns: Tensor) -> Tensor:
    return draw_rows(logits, RowSampling(*columns))


def _added(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    total = x + y
    return torch.stack((dense.rms_norm(total, weight, EPS), total.double()))


def _unsigned(words: Tensor) -> list[int]:
    return [word & (1 << 64) - 1 for word in words.tolist()]


def _random_words(nodes: int) -> Tensor:
    """int64[N]: ancestor words of a tree whose nodes hang on one of the four before them."""
    words: list[int] = []
    for node in range(nodes):
        parent = max(0, node - 1 - int(torch.randint(4, (1,))))
        words.append((words[parent] if node else 0) | 1 << node)
    return torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])


def _tree(words: Tensor) -> DraftTree:
    """The tree of these ancestor words, with tokens that tell siblings apart."""
    unsigned = _unsigned(words)
    parents = [(word & ~(1 << node)).bit_length() - 1 for node, word in enumerate(unsigned)]
    depths = torch.tensor([word.bit_count() - 1 for word in unsigned])
    return DraftTree(torch.arange(len(words)), torch.tensor(parents), depths, words)


def _draws(tree: DraftTree) -> Tensor:
    """int64[N]: at two nodes of three a child's token, else one that nobody has."""
    parents = tree.parents.tolist()
    drawn = torch.full((len(parents),), len(parents))
    for node in range(len(parents)):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if children and torch.rand(()) < 2 / 3:
            drawn[node] = children[int(torch.randint(len(children), (1,)))]
    return drawn
