"""What a step costs at the least on this machine: ``python -m bench.floor --target DIR [--rows 1 2 5 8 16]``.

Decoding reads every weight once a step, so bytes over bandwidth is the floor of a step that does nothing else, and the
model's matrix products alone, through the linears the verifier uses, are the floor of this arithmetic library. Both
hold on any machine where a bare millisecond does not. In turns: a pass over memory that only reads, and for each row
count the linears alone and the bare forward (``run`` of the target on a chain of that many rows, tokens to logits), so
that noise meets all alike.

``--rows`` counts rows of one sequence. ``--prompts 512 4000`` measures prompts of so many tokens, too, through the
whole engine: tokens over the time until the first one comes back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.drive import Options, add_arguments, build, request, run, target_of, torchs_threads
from bench.stats import Spread, paired_ratio, spread
from foresay.kvpaging import PageTable
from foresay.kvpaging.ops import store_rows
from foresay.spec.engine import Engine
from foresay.spec.protocols import Rows
from foresay.spec.sampling import SamplingParams
from foresay.spec.shape import MAX_CHUNK
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.kernels.cpu import threads

PROBE_BYTES = 1 << 29
CONTEXT = 128  # committed tokens below the measured rows
#: Seconds after which torch's threads no longer look for work, which takes the time of the kernels' threads.
_REST = 0.01
#: Rounds that do not count.
_WARM = 3


class Reads:
    """Passes over a buffer that only read. It is written first: pages never written to are all one page of zeros, which
    reads from the cache.
    """

    def __init__(self) -> None:
        buffer = torch.empty(PROBE_BYTES // 4, dtype=torch.float32).uniform_()
        matrix, vector = buffer.view(-1, 4096), torch.ones(4096)
        self._reads: list[Callable[[], Tensor]] = [buffer.sum, buffer.max, lambda: matrix @ vector]

    def __call__(self) -> float:
        """Bytes per second of the fastest of them, by as many threads as the kernels have."""
        with torchs_threads(threads.wanted()):
            fastest = min(timed(read) for read in self._reads)
        time.sleep(_REST)
        return PROBE_BYTES / fastest


def timed(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def weight_bytes(linears: Sequence[Linear]) -> int:
    """Bytes of weights that one step reads; the embedding row it looks up is not worth counting."""
    return sum(linear.nbytes for linear in linears)


class LinearsAlone:
    """The target's matrix products of one step in their order, on inputs that are ready, with nothing in between."""

    def __init__(self, linears: Sequence[Linear], rows: int, dtype: torch.dtype) -> None:
        widths = {linear.in_features for linear in linears}
        inputs = {width: torch.randn(rows, width).to(dtype) for width in widths}
        self.work = [(linear, inputs[linear.in_features]) for linear in linears]

    @torch.inference_mode()
    def __call__(self) -> None:
        """One step's worth."""
        for linear, x in self.work:
            linear(x)


class BareForward:
    """The target's forward over a chain of some rows past so many committed tokens, whose keys and values are random:
    a prompt of thousands would take minutes. Commits nothing, so that every call is the same; ``close`` gives the pages
    back.
    """

    def __init__(self, engine: Engine, rows: int, context: int = CONTEXT) -> None:
        self.verifier = target_of(engine)
        self.table = PageTable(engine.pool)
        while left := context - self.table.length:  # in pieces: layers with a window keep the end alone
            self.table.reserve(min(left, MAX_CHUNK))
            self.table.commit(min(left, MAX_CHUNK))
        self.table.reserve(rows)
        self._fill(self.table.slots(0, context))
        self.verifier.committed(self.table)
        self.rows = [Rows(self.table, torch.arange(5, 5 + rows), context)]

    def _fill(self, slots: Tensor) -> None:
        store = self.verifier.store
        for index in range(len(store.layers)):
            keys, values, scales = store.layer(index)
            rows = torch.randn(2, len(slots), *keys.shape[1:]).to(self.verifier.decoder.dtype)
            store_rows(keys, values, store.own(index, slots), rows[0], rows[1], scales)

    def __call__(self) -> None:
        """One pass."""
        self.verifier.run(self.rows)

    def close(self) -> None:
        """Release the pages."""
        self.table.release()


@dataclass(slots=True)
class Floor:
    """What steps of one row count took, in seconds: the linears alone, and the bare forward."""

    linears: LinearsAlone
    forward: BareForward
    alone: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Both once more."""
        self.alone.append(timed(self.linears))
        self.whole.append(timed(self.forward))

    def over(self, others: Sequence[float]) -> float:
        """The bare forward over what stood beside it, in pairs."""
        return paired_ratio({"": list(zip(self.whole[_WARM:], others[_WARM:], strict=True))}).ratio


def measure(engine: Engine, rows: Sequence[int], repeats: int) -> tuple[dict[int, Floor], list[float]]:
    """All row counts in turns, and the bytes per second that were read before each turn: memory's speed may change."""
    decoder = target_of(engine).decoder
    floors = {n: Floor(LinearsAlone(decoder.linears, n, decoder.dtype), BareForward(engine, n)) for n in rows}
    reads, read = Reads(), []
    for _ in range(repeats + _WARM):
        read.append(reads())
        for floor in floors.values():
            floor.measure()
    for floor in floors.values():
        floor.forward.close()
    return floors, read


def prompt_rates(engine: Engine, lengths: Sequence[int], repeats: int) -> dict[str, Spread]:
    """Tokens per second of prompts never sent before, by length, in turns; the first of each does not count."""
    generator = torch.Generator().manual_seed(0)
    rates: dict[str, list[float]] = {str(length): [] for length in lengths}
    for _ in range(repeats + 1):
        for length in lengths:
            prompt = torch.randint(5, engine.info.vocab_size, (length,), generator=generator).tolist()
            done = run(engine, request(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
            rates[str(length)].append(length / done.seconds)
    return {length: spread(each[1:]) for length, each in rates.items()}


def report(engine: Engine, rows: Sequence[int], repeats: int = 30) -> dict[str, Any]:
    """Probe and measure, print the table, return the record. Times in milliseconds, bandwidth in GB/s."""
    decoder = target_of(engine).decoder
    dtype, size = decoder.dtype, weight_bytes(decoder.linears)
    floors, read = measure(engine, rows, repeats)
    least, speed = [size / each for each in read], spread(read[_WARM:])
    one = next(iter(floors.values())).whole
    lines = [
        [f"{n}", scaled(f.alone), scaled(f.whole), f.over(f.alone), f.over(least), f.over(one)]
        for n, f in floors.items()
    ]
    title = f"floors, {dtype}: {size / 1e6:.1f} MB a step at {speed.median / 1e9:.1f} GB/s"
    heads = ["linears alone, ms", "bare forward, ms", "forward/linears", "step multiple", "over the first"]
    record.table(f"{title} is {scaled(least).median:.2f} ms", ["rows", *heads], lines)
    keys = ["linears_ms", "forward_ms", "forward_over_linears", "step_multiple", "over_first"]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "bandwidth_gb_s": speed.median / 1e9,
        "bandwidth_quartiles_gb_s": [speed.q1 / 1e9, speed.q3 / 1e9],
        "bytes_per_step": size,
        "floor_ms": scaled(least).median,
        "rows": {str(n): dict(zip(keys, line[1:], strict=True)) for n, line in zip(floors, lines, strict=True)},
    }


def scaled(seconds: Sequence[float]) -> Spread:
    """Seconds that count, as milliseconds."""
    return spread([each * 1e3 for each in seconds[_WARM:]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.floor", description="Floors of a step on this machine.")
    add_arguments(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=(2, 3, 5, 8, 16, 32))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--prompts", nargs="*", type=int, default=(), help="prompts of so many tokens, too")
    parser.add_argument("--prompt-repeats", type=int, default=5)
    args = parser.parse_args()
    engine = build("none", Options.of(args))
    results = {**record.models(engine, args.target, None), "floor": report(engine, args.rows, args.repeats)}
    if args.prompts:
        results["prompts"] = prompts = prompt_rates(engine, args.prompts, args.prompt_repeats)
        record.table("prompts", ["tokens", "tokens per second"], list(prompts.items()))
    record.finish("floor", results, not args.no_save)


if __name__ == "__main__":
    main()
