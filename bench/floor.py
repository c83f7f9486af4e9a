"""What a step costs at the least on this machine: ``python -m bench.floor --target DIR [--rows 1 2 5 8 16]``.

Decoding reads every weight once a step, so bytes over bandwidth is the floor of a step that does nothing else, and the
model's matrix products alone, through the linears the verifier uses, are the floor of this arithmetic library. Both
hold on any machine where a bare millisecond does not. In turns, per row count: the linears alone and the bare forward
(``run`` of the target on a chain of that many rows, tokens to logits), so that noise meets both alike.

``--rows`` counts rows of one sequence. ``--prompts 512 4000`` measures prompts of so many tokens, too, through the
whole engine: tokens over the time until the first one comes back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.drive import Options, add_arguments, build, request, run, target_of, torchs_threads
from bench.stats import Spread, paired_ratio, spread
from kvpaging import PageTable
from spec.engine import Engine
from spec.protocols import Rows
from spec.sampling import SamplingParams
from verifier.model.linear import Linear
from verifier.ops.kernels.cpu import threads

PROBE_BYTES = 1 << 29
CONTEXT = 128  # committed tokens below the measured rows


def bandwidth(size: int = PROBE_BYTES, repeats: int = 8) -> float:
    """Bytes per second of the fastest read-only pass over a buffer of ``size`` bytes, best of the repeats.

    The buffer is written first: pages never written to are all one page of zeros, which reads from the cache.
    """
    buffer = torch.empty(size // 4, dtype=torch.float32).uniform_()
    matrix, vector = buffer.view(-1, 4096), torch.ones(4096)
    reads: list[Callable[[], Tensor]] = [buffer.sum, buffer.max, lambda: matrix @ vector]
    return size / min(timed(read) for _ in range(repeats) for read in reads)


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
    """The target's forward over a chain of some rows past ``CONTEXT`` committed tokens. Commits nothing, so that every
    call is the same; ``close`` gives the pages back.
    """

    def __init__(self, engine: Engine, rows: int) -> None:
        self.verifier = target_of(engine)
        self.table = PageTable(engine.pool)
        self.table.reserve(CONTEXT + rows)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(5, min(4096, self.verifier.vocab_size), (CONTEXT + rows,), generator=generator)
        self.verifier.run([Rows(self.table, tokens[:CONTEXT], 0, wanted="none")])
        self.table.commit(CONTEXT)
        self.verifier.committed(self.table, None)
        self.rows = [Rows(self.table, tokens[CONTEXT:], CONTEXT)]

    def __call__(self) -> None:
        """One pass."""
        self.verifier.run(self.rows)

    def close(self) -> None:
        """Release the pages."""
        self.table.release()


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of a step at one row count, and the paired ratio of the bare forward to its linears."""

    rows: int
    linears: Spread
    forward: Spread
    ratio: float


def measure(engine: Engine, rows: int, repeats: int = 30) -> Floor:
    """Linears alone and the bare forward in turns, after three of each that do not count."""
    decoder = target_of(engine).decoder
    linears, forward = LinearsAlone(decoder.linears, rows, decoder.dtype), BareForward(engine, rows)
    pairs = [(timed(linears), timed(forward)) for _ in range(repeats + 3)][3:]
    forward.close()
    alone, whole = zip(*pairs, strict=True)
    ratio = paired_ratio({"": [(b, a) for a, b in pairs]}).ratio
    return Floor(rows, spread(alone), spread(whole), ratio)


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
    dtype = decoder.dtype
    with torchs_threads(threads.wanted()):
        size, read = weight_bytes(decoder.linears), bandwidth()
    floors = [measure(engine, count, repeats) for count in rows]
    lines = [
        [f"{f.rows}", scaled(f.linears), scaled(f.forward), f.ratio, f.forward.median / (size / read)] for f in floors
    ]
    title = f"floors, {dtype}: {size / 1e6:.1f} MB a step at {read / 1e9:.1f} GB/s is {1e3 * size / read:.2f} ms"
    record.table(title, ["rows", "linears alone, ms", "bare forward, ms", "forward/linears", "step multiple"], lines)
    keys = ["linears_ms", "forward_ms", "forward_over_linears", "step_multiple"]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "bandwidth_gb_s": read / 1e9,
        "bytes_per_step": size,
        "floor_ms": 1e3 * size / read,
        "rows": {str(f.rows): dict(zip(keys, line[1:], strict=True)) for f, line in zip(floors, lines, strict=True)},
    }


def scaled(seconds: Spread) -> Spread:
    """Seconds as milliseconds."""
    return Spread(seconds.q1 * 1e3, seconds.median * 1e3, seconds.q3 * 1e3, seconds.size)


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
