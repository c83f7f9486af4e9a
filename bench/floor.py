"""The least cost of a step on this machine: ``python -m bench floor --target DIR [--rows 1 2 5 8 16]``.

Decoding reads every weight once a step, so bytes over bandwidth is the floor of a step that does nothing else
(``reading``), and the model's matrix products alone, through the linears the verifier uses, are the floor of this
arithmetic library (``linears``). ``step`` is the bare forward: ``run`` of the target on a chain of so many rows after
``--context`` tokens, tokens to logits. Floors hold on any machine, where a bare millisecond does not.

``--also quantize=int8 kv_dtype=fp8 quantize=int4,activations=int8`` adds steps of targets with these formats of
weights, KV or products; what memory alone would gain is the ratio of ``MB``, the weights and KV that a step reads.
``--prompts 512 4000`` measures prompts of so many tokens through the whole engine: tokens over the time until the first
one is emitted.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import BadOption, record
from bench.drive import Options, add_arguments, build, request, run, target_of, torchs_threads
from bench.experiment import Case, Experiment, Groups, Sample, Variant
from foresay.kvpaging import PageTable
from foresay.kvpaging.store import store_rows
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Rows
from foresay.spec.shape import MAX_CHUNK
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.kernels.cpu import threads

PROBE_BYTES = 1 << 29
CONTEXT = 128  # committed tokens below the measured rows
#: Seconds after which torch's threads no longer poll for work, which takes time from the kernels' threads.
_REST = 0.01
#: Rounds that do not count.
_WARM = 3
READING, LINEARS, STEP = "reading", "linears", "step"
KEPT = ("quantize", "kv_dtype", "activations")


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=(2, 3, 5, 8, 16, 32), help="of one sequence")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"tokens before the rows of a step ({CONTEXT})")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--also", nargs="+", default=(), metavar="OPTION=VALUE", help="also of targets kept so")
    parser.add_argument("--prompts", nargs="*", type=int, default=(), help="prompts of so many tokens, too")
    parser.add_argument("--prompt-repeats", type=int, default=5)


def main(args: Namespace) -> dict[str, Any]:
    options = replace(Options.of(args), kv_tokens=max(len(args.rows) * (args.context + 128), 4096))
    engine = build("none", options)
    others = {f"{STEP}, {way}": build("none", replace(options, **kept(way))) for way in args.also}
    for way, other in zip(args.also, others.values(), strict=True):
        if kept(way).keys() == {"kv_dtype"}:  # of two copies in memory one may be faster
            target_of(other).decoder = target_of(engine).decoder
    results = record.models(engine, target=args.target)
    results |= {"floor": report(engine, args.rows, args.repeats, args.context, others)}
    if args.prompts:
        results["prompts"] = prompt_rates(engine, args.prompts, args.prompt_repeats)
    return results


def kept(way: str) -> dict[str, Any]:
    """``quantize=int4,activations=int8``, as fields of :class:`~bench.drive.Options`."""
    pairs = [part.partition("=") for part in way.split(",")]
    if any(name not in KEPT or not value for name, _, value in pairs):
        raise BadOption(f"--also {way}: give {', '.join(KEPT)} as name=value, such as quantize=int8")
    return {name: value for name, _, value in pairs}


class Reads:
    """Passes over a buffer that only read. It is written first: pages never written to are all one page of zeros, which
    is read from the cache.
    """

    def __init__(self) -> None:
        buffer = torch.empty(PROBE_BYTES // 4, dtype=torch.float32).uniform_()
        matrix, vector = buffer.view(-1, 4096), torch.ones(4096)
        self._reads: list[Callable[[], Tensor]] = [buffer.sum, buffer.max, lambda: matrix @ vector]

    def __call__(self) -> float:
        """Bytes per second of the fastest of them, by as many threads as the kernels have."""
        with torchs_threads(threads.num_threads()):
            fastest = min(timed(read) for read in self._reads)
        time.sleep(_REST)
        return PROBE_BYTES / fastest


def timed(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def bytes_of(engine: EngineCore, context: int) -> int:
    """Weights, and the keys and values of so many tokens: what a step reads. The embedding row that it looks up is
    negligible."""
    return sum(linear.nbytes for linear in target_of(engine).decoder.linears) + context * engine.info.kv_token_bytes


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
    """The target's forward over a chain of some rows after so many committed tokens, whose keys and values are random:
    a prompt of thousands would take minutes. Commits nothing, so that every call is the same; ``close`` releases the
    pages."""

    def __init__(self, engine: EngineCore, rows: int, context: int = CONTEXT) -> None:
        self.verifier = target_of(engine)
        self.table = PageTable(engine.pool)
        while left := context - self.table.length:  # in pieces: layers with a window keep only the end
            self.table.reserve(min(left, MAX_CHUNK))
            self.table.commit(min(left, MAX_CHUNK))
        self.table.reserve(rows)
        self._fill(self.table.slots(0, context))
        self.verifier.committed(self.table)
        self.rows = [Rows(self.table, torch.arange(5, 5 + rows), context)]

    def _fill(self, slots: Tensor) -> None:
        for arrays in self.verifier.store.arrays:  # recurrent layers have none
            own = arrays.pages.slots(slots)
            for index in range(len(arrays.keys)):
                keys, values, scales = arrays.layer(index)
                rows = torch.randn(2, len(slots), *keys.shape[1:]).to(self.verifier.decoder.dtype)
                store_rows(keys, values, own, rows[0], rows[1], scales)

    def __call__(self) -> None:
        """One pass."""
        self.verifier.run(self.rows)

    def close(self) -> None:
        """Release the pages."""
        self.table.release()


def report(
    engine: EngineCore,
    rows: Sequence[int],
    repeats: int = 30,
    context: int = CONTEXT,
    others: Mapping[str, EngineCore] | None = None,
) -> dict[str, Any]:
    """Measure, print the tables, return the record. others: engines whose steps are measured too, by name."""
    decoder, steps = target_of(engine).decoder, {STEP: engine, **(others or {})}
    linears = {n: LinearsAlone(decoder.linears, n, decoder.dtype) for n in rows}
    passes = {(name, n): BareForward(one, n, context) for name, one in steps.items() for n in rows}
    reads, weights = Reads(), sum(linear.nbytes for linear in decoder.linears)

    def read(case: Case, turn: int) -> Sample:
        speed = reads()
        return Sample({"ms": 1e3 * weights / speed, "GB/s": speed / 1e9})

    def variant(name: str, call: Callable[[int], object]) -> Variant:
        return Variant(name, lambda case, turn: Sample({"ms": 1e3 * timed(lambda: call(case.input))}))

    bare = [variant(name, lambda n, name=name: passes[name, n]()) for name in steps]  # type: ignore[misc]
    experiment = Experiment(
        variants=[Variant(READING, read), variant(LINEARS, lambda n: linears[n]()), *bare],
        cases=[Case(f"{n} rows", "", n) for n in rows],
        figure="ms",
        bases=(READING, LINEARS, STEP),
        rounds=repeats,
        warm=_WARM,
        more=lambda taken: (
            {"MB": bytes_of(steps[taken[0].variant], context) / 1e6} if taken[0].variant in steps else {}
        ),
    )
    _, groups = experiment.run()
    for one in passes.values():
        one.close()
    first = groups[f"{rows[0]} rows"][STEP]["ms"].median
    over = {group: of[STEP]["ms"].median / first for group, of in groups.items()}
    print("a step over the first:", ", ".join(f"{group} {times:.2f}" for group, times in over.items()))
    dtype = str(decoder.dtype).removeprefix("torch.")
    return {"dtype": dtype, "bytes_per_step": weights, "groups": groups, "over_first": over}


def prompt_rates(engine: EngineCore, lengths: Sequence[int], repeats: int) -> Groups:
    """Tokens per second of prompts never sent before, by length; the first of each does not count."""
    generator = torch.Generator().manual_seed(0)

    def measure(case: Case, turn: int) -> Sample:
        prompt = torch.randint(5, engine.info.vocab_size, (case.input,), generator=generator).tolist()
        done = run(engine, request(prompt, 1))
        return Sample({"tokens_per_second": case.input / done.seconds})

    experiment = Experiment(
        variants=[Variant("prompt", measure)],
        cases=[Case(f"{length} tokens", "", length) for length in lengths],
        figure="tokens_per_second",
        rounds=repeats,
        warm=1,
    )
    return experiment.run()[1]
