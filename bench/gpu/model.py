"""What a step should take on a GPU, over its floor, before any was measured: ``python -m bench.gpu.model``.

The launches are those that the code makes, counted without a GPU (:mod:`bench.binder`); what each takes is
arithmetic: bytes, launches, trips to memory; for prompts products and attention, too. Constants are assumptions, named
so that a measurement can correct them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import torch

from bench import made as heads
from bench import record, shapes
from bench.binder import DEVICE, Launches, bound
from bench.gpu import settings
from bench.gpu.device import Device
from bench.gpu.drafting import Ground
from bench.made import BUNDLED, paged
from bench.shapes import EagleShape, cut, eagle_bytes, kv_bytes_per_token, step_bytes
from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.proposer import Drafts
from foresay.kvpaging import PagePool
from foresay.server.engine.device import GPU_CHUNK
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.plain import RootOnly
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import allocate
from foresay.verifier.ops.kernels.linear import ENOUGH, tile_of
from foresay.verifier.paged_model import PagedModel

#: Trips to memory, one behind the other, of the kernels that read little; those not named take two.
TRIPS = {"tree_partials": 5, "tree_merge": 4, "scan": 3, "weigh": 3, "settle": 4, "walk_trees": 3}


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. read: bytes per second of a pass that only reads: 92 % of the data sheet. cached: of the L2, to all
    processors. multiply: bf16 operations per second by instructions of 16 rows, half of the data sheet; attend: of
    attention in tiles of 64 x 64. processors: that run programs."""

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
    is there already (programmatic dependent launch). alone: the same of a kernel of torch, that is launched behind it.
    ramp: until a product whose weight is on its way reads at full speed, and from its last byte to its end. trip: to
    memory and back. host: of a launch that is in no graph, by the host."""

    gap: float = 0.4e-6
    alone: float = 1.2e-6
    ramp: float = 0.6e-6
    trip: float = 0.8e-6
    host: float = 25e-6


COSTS = Costs()


@dataclass(frozen=True, slots=True)
class Step:
    """What a step launches and reads. weights: [outer, inner] of each product. kept: bytes of keys and values."""

    name: str
    launches: Launches
    weights: tuple[tuple[int, int], ...]
    rows: int
    kept: float
    floor: float

    def seconds(self, card: Card, costs: Costs = COSTS) -> float:
        """Of one step."""
        products = sum(product_seconds(card, costs, *weight, self.rows) for weight in self.weights)
        ours = (one for one in self.launches.kernels.items() if one[0] != "linear_tiles")
        small = sum(n * (costs.gap + TRIPS.get(name, 2) * costs.trip) for name, n in ours)
        alone = self.launches.torch.total() * (costs.alone + 2 * costs.trip)
        return products + small + alone + self.kept / card.read

    def over_floor(self, card: Card, costs: Costs = COSTS) -> float:
        """Times the bytes that have to be read."""
        return self.seconds(card, costs) * card.read / self.floor


def product_seconds(card: Card, costs: Costs, outer: int, inner: int, rows: int, large: bool = True) -> float:
    """A product: its weight once from memory, and both sides for every tile from the L2. large: whether more than 64
    rows have tiles of their own."""
    weight, tile = 2 * outer * inner, tile_of(rows, large)
    high, wide = tile.grid(rows, outer)
    several = 1 if high * wide >= ENOUGH and large else cut(outer, inner)[0]
    cached = high * weight + wide * 2 * rows * inner + 4 * rows * outer * (several - 1)
    programs, places = high * wide * several, card.processors * 8 // tile.warps
    idle = math.ceil(programs / places) * places / programs if high > 1 else 1.0
    operations = 2 * idle * high * tile.rows * outer * inner
    return costs.gap + costs.ramp + max(weight / card.read, cached / card.cached, operations / card.multiply)


def prompt_seconds(
    card: Card, step: Step, config: ModelConfig, tokens: int, chunk: int, large: bool = True, costs: Costs = COSTS
) -> float:
    """Of reading a prompt in chunks, of which only the last row has logits. step: a plain one, for its launches."""
    *layers, head = step.weights
    heads, groups = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    total = 0.0
    for begin in range(0, tokens, chunk):
        rows = min(chunk, tokens - begin)
        products = sum(product_seconds(card, costs, *weight, rows, large) for weight in layers)
        seen = rows * (begin + rows / 2)
        tiles = 2 * 2 * groups * seen * config.num_heads // config.num_kv_heads / 64
        attention = max(4 * heads * seen / card.attend, tiles / card.cached)
        moved = 2 * rows * (8 * config.hidden_size + 4 * heads + 4 * groups)  # by norms, rotation and attention
        small = 5 * costs.gap + 10 * costs.trip + moved / card.cached
        whole = products + config.num_layers * (attention + small) + product_seconds(card, costs, *head, 1)
        total += max(whole, step.launches.total * costs.host)
    return total


def target_of(shape: shapes.ModelShape) -> PagedModel:
    """A model of shapes alone, with a store for 32k tokens."""
    config = shape.config(ModelConfig.from_directory(BUNDLED / "target"))
    decoder = Decoder(config, allocate(config, torch.bfloat16, DEVICE), shapes.POSITIONS)
    return paged(PagePool(2 + shapes.POSITIONS // 16, 16), decoder, OnShapes())


class OnShapes(Device):
    """A device of shapes alone, that computes as a GPU does."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.torch, self.cuda = DEVICE, True

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


def steps(shape: shapes.ModelShape, eagle: EagleShape, levels: int, context: int) -> list[Step]:
    """A plain step, and one with a chain of an EAGLE-3 head of so many levels."""
    target = target_of(shape)
    config = target.decoder.config
    kept = kv_bytes_per_token(config) * context
    floor = step_bytes(config, context)
    weights = tuple((m.out_features, m.in_features) for m in target.decoder.linears)
    plain = Step("plain", launches_of(target, RootOnly(1, DEVICE), context), weights, 1, kept, floor)
    with bound():
        head = heads.random_eagle(OnShapes(), target.decoder, eagle)
        drafter = EagleDrafter(head, target.store.pool, dynamic=False, name="eagle3")
    chain = Drafts(drafter, TreeShape.chain(levels), 1, target.vocab_size)
    own = [eagle.mixing, *eagle.products * levels]
    more = eagle_bytes(eagle, levels, context)
    drafting = Step(
        f"EAGLE-3, chain of {levels}",
        launches_of(target, chain, context),
        (*weights, *own),
        levels + 1,
        kept + more - eagle_bytes(eagle, levels, 0),
        floor + more,
    )
    return [plain, drafting]


def launches_of(target: PagedModel, proposer: Proposer, context: int) -> Launches:
    """Of one whole step; what is made once is made before."""
    with bound() as launches:
        ground = Ground(target, proposer, context)
        step = SpeculativeStep(target, proposer, ground.state)
        step()
        ground.reset()
        launches.kernels.clear()
        launches.torch.clear()
        step()
    return launches


def main() -> int:
    """Print the table."""
    torch.set_grad_enabled(False)
    chosen = settings.full()
    rows, prompts, made = [], [], steps(chosen.bar, chosen.eagle, 5, 1024)
    for step in (*made, *(replace(made[0], name=f"plain, {count} rows", rows=count) for count in (8, 32, 64))):
        rows.append([step.name, step.launches.total, *(step.over_floor(card) for card in CARDS)])
    record.table("expected, over the floor", [chosen.bar.name, "launches", *(card.name for card in CARDS)], rows)
    config = chosen.bar.config(ModelConfig.from_directory(BUNDLED / "target"))
    for name, chunk, large in (("64 x 64, chunks of 256", 256, False), (f"128 x 128, of {GPU_CHUNK}", GPU_CHUNK, True)):
        for tokens in chosen.prompts_read:
            taken = [1e3 * prompt_seconds(card, made[0], config, tokens, chunk, large) for card in CARDS]
            prompts.append([f"{tokens} tokens in tiles of {name}", *taken])
    record.table("expected, ms", ["reading a prompt", *(card.name for card in CARDS)], prompts)
    print("Arithmetic, nothing was measured.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
