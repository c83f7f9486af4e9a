"""Part h: what a launch inside a graph costs, and which tiles of a product come nearest to the memory's speed.

These say what to change: a gap that dependent launches shrink, a tile, a depth of the pipeline, a layout of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from itertools import product
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from bench import record
from bench.gpu.device import Device
from bench.gpu.kernels import error
from bench.gpu.session import Clock
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.ops.kernels import linear
from foresay.verifier.ops.kernels.blocked import segments_of

#: Launches of the chain of empty kernels.
CHAIN = 400
#: Bytes of shared memory that a program may have on an H100 or H200.
SHARED = 227 << 10


@triton.jit
def empty_step(data, DEPENDENT: tl.constexpr):
    """One program that adds 1 to a number. DEPENDENT: it is there before the one before has ended, and waits for it."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(data, tl.load(data) + 1)


def gaps(device: Device, patience: float) -> dict[str, float]:
    """Microseconds of each launch in a graph of many, with and without programmatic dependent launch."""
    found, data = {}, torch.zeros(1, dtype=torch.int32, device=device.torch)
    for name, options in (("plain", {}), ("dependent", {"launch_pdl": True})):

        def chain(options: dict[str, bool] = options) -> None:
            for _ in range(CHAIN):
                if device.cuda:
                    empty_step[(1,)](data, bool(options), num_warps=1, **options)
                else:
                    data.add_(1)

        call = device.captured(chain)
        data.zero_()
        call()
        device.synchronize()
        if int(data) != CHAIN:
            raise RuntimeError(f"a chain of {CHAIN} launches, {name}, counted to {int(data)}")
        found[name] = 1e6 * median(device.sample(call, patience)) / CHAIN
    record.table("a launch inside a graph", ["", "us"], [[name, value] for name, value in found.items()])
    return found


@triton.jit(do_not_specialize=("R",))
def swept_tiles(x, weight, out, R, OUTER, K, SEGMENT, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TILED: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """As foresay.verifier.ops.kernels.linear.linear_tiles, of whole widths alone. Grid (R / ROWS, O / TILE, segments).

    TILED: the weight lies as [O / TILE, K / BLOCK_K, TILE, BLOCK_K]. out: fp32[segments, R, O].
    """
    row, column, part = tl.program_id(0) * ROWS, tl.program_id(1) * TILE, tl.program_id(2)
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, TILE)
    total = tl.full([TILE, ROWS], 0.0, tl.float32)
    begin = part * SEGMENT
    for start in tl.range(begin, tl.minimum(begin + SEGMENT, K), BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        if TILED:
            block = (column // TILE).to(tl.int64) * (TILE * K) + start * TILE
            where = block + tl.arange(0, TILE)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        else:
            where = columns.to(tl.int64)[:, None] * K + inner[None, :]
        left = tl.load(weight + where)
        right = tl.load(x + rows[:, None] * K + inner[None, :], mask=(rows < R)[:, None], other=0.0)
        total = tl.dot(left, tl.trans(right), total)
    where = rows.to(tl.int64)[None, :] * OUTER + columns[:, None]
    tl.store(out + part.to(tl.int64) * R * OUTER + where, total, mask=(rows < R)[None, :])


def widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The five weights of a model, [outer, inner]."""
    heads, inner, hidden = config.num_heads * config.head_dim, config.intermediate_size, config.hidden_size
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    head = config.vocab_size // 128 * 128
    pairs = ((qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner), (head, hidden))
    return dict(zip(("qkv", "output", "gate_up", "down", "head"), pairs, strict=True))


def cut(outer: int, inner: int) -> tuple[int, int]:
    """How many segments a weight of floats is cut into as it is served, and the inner width of each."""
    return segments_of(outer, -(-inner // Way().block), Way().block)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of a product: tile of rows, stages of the pipeline, inner positions of one step, weight in tiles. served:
    by the kernel that is served, whose instruction has 16 rows; the others' has all of a tile."""

    rows: int = 64
    stages: int = 3
    block: int = 128
    tiled: bool = False
    served: bool = False

    @property
    def outputs(self) -> int:
        """Of a tile; as many warps as there are 16 of them."""
        return max(64, self.rows)

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return 2 * self.stages * self.block * (self.outputs + self.rows)

    def product(self, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        """fp32[segments, R, O] by this way, the weight laid out as it wants it; [R, O] as served."""
        if self.served:
            return partial(linear.linear, x, weight)
        outer, inner = weight.shape
        segment = -(-cut(outer, inner)[1] // self.block) * self.block
        if self.tiled:
            weight = weight.view(outer // 64, 64, inner // self.block, self.block).transpose(1, 2).contiguous()
        out = x.new_empty(-(-inner // segment), len(x), outer, dtype=torch.float32)
        grid = (triton.cdiv(len(x), self.rows), outer // self.outputs, len(out))

        def launch() -> Tensor:
            swept_tiles[grid](
                x, weight, out, len(x), outer, inner, segment, self.rows, self.block, self.tiled, self.outputs,
                num_warps=self.outputs // 16, num_stages=self.stages,
            )  # fmt: skip
            return out

        return launch


#: The way that is served first.
WAYS = (
    Way(),
    *(
        way
        for way in (Way(*each) for each in product((64, 16), (3, 4, 5), (128, 256), (False, True)))
        if way.shared <= SHARED and way != Way()
    ),
)
#: Of more than 64 rows: as served, and by one instruction for all rows of a tile.
CHUNK_WAYS = (Way(128, served=True), *(Way(128, *each) for each in ((3, 128), (3, 64), (4, 64))))


def sweep(
    device: Device, config: ModelConfig, counts: Sequence[int], read: float, clock: Clock, patience: float
) -> Iterator[dict[str, Any]]:
    """Every weight, number of rows and way: its share of the probed bandwidth, its error, and whether its bits are
    those of the way that is served. Weights that the L2 would hold take turns."""
    for (name, (outer, inner)), count in product(widths(config).items(), counts):
        if not clock.fits(f"sweep of {name}, {count} rows", 20 * patience):
            continue
        copies = max(1, -(-3 * device.cache_bytes // (2 * outer * inner)))
        weights = [torch.randn(outer, inner, device=device.torch).to(device.dtype) for _ in range(copies)]
        x = torch.randn(count, inner, device=device.torch).to(device.dtype)
        wanted, served = x.double() @ weights[0].double().T, None
        ways = CHUNK_WAYS if count > 64 else WAYS
        for way in ways if device.cuda else WAYS[:1]:
            if inner % way.block:
                continue
            calls = [_call(device, way, x, weight) for weight in weights]
            result = calls[0]().clone()
            served = result if served is None else served
            if result.dim() > served.dim():
                result = _added(result).to(served.dtype)
            seconds = median(device.sample(device.captured(partial(_all, calls)), patience)) / copies
            share = device.dtype.itemsize * outer * inner / seconds / read
            same = served.shape == result.shape and torch.equal(served, result)
            found = {"us": 1e6 * seconds, "share": share, "error": error(_added(result), wanted), "same_bits": same}
            yield {"weight": name, "of_rows": count, **asdict(way), **found}
            device.free()


def _call(device: Device, way: Way, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """A CPU has no such kernels: the library's product stands there in a rehearsal."""
    return way.product(x, weight) if device.cuda else lambda: functional.linear(x, weight)[None]


def _added(sums: Tensor) -> Tensor:
    """[R, O]: segments in order, if there are several."""
    return reduce(torch.add, sums) if sums.dim() == 3 else sums


def _all(calls: Sequence[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()


def compile_ways(device: Device) -> int:
    """Compile every way, on a small weight; how many there are."""
    x, weight = (torch.zeros(n, 512, device=device.torch).to(device.dtype) for n in (128, 128))
    for way in (*WAYS, *CHUNK_WAYS):
        _call(device, way, x, weight)()
    return len(WAYS) + len(CHUNK_WAYS)


def show(found: Sequence[dict[str, Any]]) -> None:
    """For each weight and number of rows the way that is served, and the best."""
    rows = []
    for name, count in dict.fromkeys((one["weight"], one["of_rows"]) for one in found):
        mine = [one for one in found if (one["weight"], one["of_rows"]) == (name, count)]
        best = max(mine, key=lambda one: one["share"])
        how = (
            "as served"
            if best is mine[0]
            else f"{best['rows']} rows, {best['stages']} stages, {best['block']} deep{', tiled' * best['tiled']}"
        )
        same = all(one["same_bits"] for one in mine)
        rows.append([f"{name}, {count} rows", mine[0]["share"], best["share"], how, same])
    columns = ["weight", "as served", "best", "how", "all have the same bits"]
    record.table("products by their tiles, of the probed bandwidth", columns, rows)
