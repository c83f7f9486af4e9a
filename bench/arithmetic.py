"""What a step should take on a GPU by arithmetic: bytes, launches, trips to memory; for prompts products and attention.

Constants are assumptions, named so that a measurement can correct them. What the code decides is read from its own
constants. A layer of one row::

    kernels   qkv ....... | rotate | partials | merge | o, from the L2 | norm | gate_up, less what is in the L2 ....
    memory    its weight  | keys, values; o's weight  | gate_up's first blocks | the rest of it ...................
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bench.binder import DEVICE, Launches
from bench.shapes import POSITIONS
from foresay.verifier.graphs.buckets import widths
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.ops.kernels import key_blocks, linear, tree_attention
from foresay.verifier.ops.kernels.blocked import BlockedWeight, segments_of

#: Trips to memory, one after the other, of the kernels that read little; those not named take two.
TRIPS = {"scan": 3, "weigh": 3, "settle": 4, "walk_trees": 3}
#: Trips of a program of attention until it knows its keys; for each block, to its pages and then to its keys; of one
#: that finds nothing to do.
LEAD, BLOCK_TRIPS, IDLE_TRIPS = 3, 2, 2
#: Stages of the loop over blocks from which on the next block is loaded while one is multiplied.
OVERLAPPED = 3


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. read: bytes per second of a pass that only reads: 92 % of the data sheet. cached: of the L2, to all
    processors. multiply: bf16 operations per second by instructions of 16 rows, half of the data sheet; attend: of
    attention in tiles of 64 x 64. processors: that run programs, two of attention each."""

    name: str
    read: float
    cached: float = 5.5e12
    multiply: float = 0.5e15
    attend: float = 0.2e15
    processors: int = 132


CARDS = (Card("H100", 0.92 * 3.35e12), Card("H200", 0.92 * 4.8e12))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. gap: from a kernel's end to the first byte that the next one asks for, inside a graph, where the next
    is there already (programmatic dependent launch). alone: the same of a kernel of torch, that is launched after it.
    ramp: until a product whose weight is on its way reads at full speed, and from its last byte to its end; cold: more,
    if nothing was prefetched. trip: to memory and back; near: to the L2. block: attention's arithmetic on one block of
    keys. host: of a launch that is in no graph, by the host."""

    gap: float = 0.4e-6
    alone: float = 1.2e-6
    ramp: float = 0.6e-6
    cold: float = 1.0e-6
    trip: float = 0.8e-6
    near: float = 0.4e-6
    block: float = 0.4e-6
    host: float = 25e-6

    def small(self, name: str) -> float:
        """A kernel that reads little."""
        return self.gap + TRIPS.get(name, 2) * self.trip


COSTS = Costs()


@dataclass(frozen=True, slots=True)
class Product:
    """A weight, [outer, inner], and what it is of its layer."""

    role: str
    outer: int
    inner: int

    def ahead(self, rows: int, blocks: int) -> linear.Prefetch:
        """What is prefetched, if it is so many blocks of each program."""
        weight = torch.empty(self.outer, self.inner, dtype=torch.bfloat16, device=DEVICE)
        return linear.Prefetch.of(
            BlockedWeight.of(weight, gated="silu" if self.role == "gate_up" else ""), rows, blocks
        )


#: The products of a layer in order.
LAYER = ("qkv", "output", "gate_up", "down")


def roles(weights: list[tuple[int, int]]) -> tuple[Product, ...]:
    """Weights, [outer, inner], of whole layers and of the head after them."""
    names = (*LAYER * (len(weights) // 4), "head")
    return tuple(Product(name, *weight) for name, weight in zip(names, weights, strict=True))


@dataclass(frozen=True, slots=True)
class Step:
    """What a step launches and reads. heads: of queries, of keys, and their width. fixed: bytes that are read whatever
    the context. token: for each token of it."""

    name: str
    launches: Launches
    products: tuple[Product, ...]
    rows: int
    context: int
    heads: tuple[int, int, int]
    fixed: float
    token: float

    @property
    def floor(self) -> float:
        """Bytes that have to be read."""
        return self.fixed + self.token * self.context

    @property
    def kept(self) -> int:
        """Bytes of keys and values of one layer."""
        _, groups, width = self.heads
        return 2 * 2 * groups * width * self.context

    def seconds(self, card: Card, costs: Costs = COSTS) -> float:
        """Of one step."""
        total, prefetched = 0.0, 0.0
        for number in range(len(self.products)):
            taken, prefetched = self._product(number, prefetched, card, costs)
            total += taken
        partials, merge = self.attention(card, costs)
        counted = self.launches.kernels
        total += counted["tree_partials"] * (partials + merge)
        ours = (one for one in counted.items() if one[0] not in ("linear_tiles", "tree_partials", "tree_merge"))
        total += sum(n * costs.small(name) for name, n in ours)
        return total + self.launches.torch.total() * (costs.alone + 2 * costs.trip)

    def over_floor(self, card: Card, costs: Costs = COSTS) -> float:
        """Times the bytes that have to be read."""
        return self.seconds(card, costs) * card.read / self.floor

    def _product(self, number: int, earlier: float, card: Card, costs: Costs) -> tuple[float, float]:
        """Seconds of a product, and the bytes of the next one that are prefetched meanwhile. earlier: bytes of this one
        that were, by the product before."""
        own, after_attention = self.products[number], self.products[number].role == "output"
        wanted = own.ahead(self.rows, linear.AHEAD_OF_OUTPUT if after_attention else linear.AHEAD).bytes
        idle = self.idle(own.role, card, costs) * card.read
        prefetched = min(max(wanted, earlier), earlier + idle)
        taken = product_seconds(card, costs, own.outer, own.inner, self.rows, prefetched=prefetched)
        if not after_attention:
            return taken, 0.0
        of_next = self.products[number + 1].ahead(self.rows, linear.AHEAD_OF_NEXT).bytes
        spare = (taken - costs.gap) * card.read - (2 * own.outer * own.inner - prefetched)
        spare += idle - prefetched if wanted + of_next <= linear.L2_ROOM else 0.0
        return taken, min(of_next, max(spare, 0.0))

    def idle(self, role: str, card: Card, costs: Costs) -> float:
        """Seconds before a product, of those in which its programs wait, that memory has nothing else to do."""
        if role == "output":
            attention = sum(self.attention(card, costs)) - self.kept / card.read
            return costs.small("rotate_and_store_rows") + max(attention, 0.0) + costs.gap
        return costs.gap + (0.0 if role == "down" else costs.small("norm_rows"))

    def attention(self, card: Card, costs: Costs) -> tuple[float, float]:
        """Seconds of a layer's two launches; the second takes none where the last program of the first merges."""
        (queries, groups, _), block, split = self.heads, key_blocks.BLOCK, key_blocks.SPLIT
        tiles = -(-self.rows * queries // groups // key_blocks.TILE)
        capacity = next(16 * pages for pages in widths(POSITIONS, 16) if 16 * pages >= self.context + self.rows)
        folded = tiles > 1 or capacity > tree_attention._FINE_POSITIONS
        whole = self.context // (block * split) if folded else 0
        single = self.context // block - whole * split
        parts = capacity // (block * split) + split if folded else capacity // block
        wait = costs.near if tree_attention.BRING else BLOCK_TRIPS * costs.trip
        walk = costs.block + (0.0 if key_blocks.STAGES >= OVERLAPPED else wait)
        first, one = LEAD * costs.trip, costs.block + BLOCK_TRIPS * costs.trip
        longest = one + (split - 1) * walk if whole else one
        # Programs take turns on the processors, and so do those that find nothing to do.
        idle = tiles * (parts - whole - single) + self.rows * (tree_attention.TAILS - 1)
        work = tiles * whole * (first + longest) + (tiles * single + self.rows) * (first + one)
        turns = groups * (work + idle * IDLE_TRIPS * costs.trip) / (2 * card.processors)
        partials = costs.gap + max(first + max(longest, self.kept / card.read), turns)
        loaded = whole + self.context // block + 1 - whole * split
        # Partials have just been written, so they are in the L2. Who merges has counted first, or looks where a row is.
        merged = tree_attention.merged_heads(self.rows * queries // groups)
        reads = costs.near * -(loaded // -(128 // merged if merged else tree_attention.DEPTH))
        return (partials + costs.trip + reads, 0.0) if merged else (partials, costs.gap + costs.trip + reads)


def product_seconds(
    card: Card, costs: Costs, outer: int, inner: int, rows: int, large: bool = True, prefetched: float = 0.0
) -> float:
    """A product: its weight once from memory, and both sides for every tile from the L2. large: whether more than 64
    rows have tiles of their own. prefetched: bytes of the weight that are in the L2 when it starts."""
    weight, tile = 2 * outer * inner, linear.tile_of(rows, large)
    high, wide = tile.grid(rows, outer)
    several = 1 if high * wide >= linear.ENOUGH and large else segments_of(outer, -(-inner // 128), 128)[0]
    cached = high * weight + wide * 2 * rows * inner + 4 * rows * outer * (several - 1)
    programs, places = high * wide * several, card.processors * 8 // tile.warps
    idle = math.ceil(programs / places) * places / programs if high > 1 else 1.0
    operations = 2 * idle * high * tile.rows * outer * inner
    left = (weight - min(prefetched, weight)) / card.read
    start = costs.gap + costs.ramp + (0.0 if prefetched else costs.cold)
    return start + max(left, cached / card.cached, operations / card.multiply)


def prompt_seconds(
    card: Card, step: Step, config: ModelConfig, tokens: int, chunk: int, large: bool = True, costs: Costs = COSTS
) -> float:
    """Of reading a prompt in chunks, of which only the last row has logits. step: a plain one, for its launches."""
    *layers, head = step.products
    queries, groups = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    total = 0.0
    for begin in range(0, tokens, chunk):
        rows = min(chunk, tokens - begin)
        products = sum(product_seconds(card, costs, one.outer, one.inner, rows, large, 1) for one in layers)
        seen = rows * (begin + rows / 2)
        tiles = 2 * 2 * groups * seen * config.num_heads // config.num_kv_heads / 64
        attention = max(4 * queries * seen / card.attend, tiles / card.cached)
        moved = 2 * rows * (8 * config.hidden_size + 4 * queries + 4 * groups)  # by norms, rotation and attention
        small = 5 * costs.gap + 10 * costs.trip + moved / card.cached
        last = product_seconds(card, costs, head.outer, head.inner, 1, prefetched=1)
        total += max(products + config.num_layers * (attention + small) + last, step.launches.total * costs.host)
    return total
