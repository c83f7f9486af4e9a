"""Every op of ``verifier/ops`` at a model's shapes: fresh inputs, the call, what it has to give, the bytes it moves.

Legend: R rows, H hidden width, Q query heads, G kv heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bench.gpu import dense
from bench.gpu.case import Case, random_words, unsigned
from bench.gpu.token_cases import TokenCases
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.rope import RopeTable
from foresay.verifier.ops import linear, norm, rope, tree_attention
from foresay.verifier.ops.tree_attention import PagedRows

PAGE = 16
EPS = 1e-5


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
        tokens = TokenCases(self.config, self.device, self.dtype, self._generator)
        yield from tokens.all(sorted({rows[0], rows[-1]}))

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers of the dtype measured in."""
        made = torch.randn(shape, generator=self._generator, device=self.device) * scale
        return made.to(self.dtype)

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    def of_rows(self, rows: int) -> Iterator[Case]:
        """Norms, and rotation with the store."""
        hidden = self.config.hidden_size
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
        yield self.rotation(rows)

    def rotation(self, rows: int) -> Case:
        """From the qkv product to rotated queries and the store, with the norms where the model has them."""
        c = self.config
        heads, groups, dim = c.num_heads, c.num_kv_heads, c.head_dim
        table = RopeTable(c, 4096, self.device, self.dtype)
        normed = (torch.ones(2, dim, device=self.device).to(self.dtype),) if c.qk_norm else ()

        def make() -> list[Tensor]:
            positions = torch.randint(4096, (rows,), generator=self._generator, device=self.device)
            store = torch.zeros(2, (rows + 1) * PAGE, groups, dim, dtype=self.dtype, device=self.device)
            slots = PAGE + torch.randperm(rows * PAGE, generator=self._generator, device=self.device)[:rows]
            return [self.random(rows, (heads + 2 * groups) * dim), *table.rows(positions), store, slots]

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
            words = random_words(rows) if tree else torch.zeros(0, dtype=torch.int64)
            depths = torch.tensor([word.bit_count() - 1 for word in unsigned(words)], dtype=torch.int32)
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


def _added(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    total = x + y
    return torch.stack((dense.rms_norm(total, weight, EPS), total.double()))
