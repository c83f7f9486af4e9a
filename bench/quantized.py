"""What quantised weights gain: ``python -m bench.quantized --target DIR [--rows 1 4 8]``; KV: ``--kv --context 4000``;
rounded activations: ``--activations [int4]``.

The target is loaded as it is, in int8, int4 and fp8; with ``--kv`` its KV cache is kept as it is, in int8 and fp8; with
``--activations`` its quantised weights are multiplied with what the model has and with what is rounded. In turns, for
each number of rows: a bare pass (``run`` of a chain of that many rows behind ``--context`` tokens) of each, so that
noise meets all alike. Beside the times stand the bytes that a pass reads, of weights and of KV: what memory alone would
give is their ratio.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from bench import record
from bench.drive import Options, add_arguments, build, target_of
from bench.floor import CONTEXT, BareForward, timed, weight_bytes
from bench.stats import paired_ratio, spread
from foresay.spec.engine import Engine

KINDS = (None, "int8", "int4", "fp8")
KV_KINDS = ("auto", "int8", "fp8")
_WARM_UP = 3


def measure(engines: dict[str, Engine], rows: int, repeats: int, context: int) -> dict[str, list[float]]:
    """Seconds of each engine's passes, in turns."""
    passes = {name: BareForward(engine, rows, context) for name, engine in engines.items()}
    rounds = [[timed(one) for one in passes.values()] for _ in range(repeats + _WARM_UP)][_WARM_UP:]
    for one in passes.values():
        one.close()
    return dict(zip(passes, map(list, zip(*rounds, strict=True)), strict=True))


def bytes_of(engine: Engine, context: int) -> int:
    """Weights, and the keys and values of so many tokens: what a pass reads."""
    return weight_bytes(target_of(engine).decoder.linears) + context * engine.info.kv_token_bytes


def report(engines: dict[str, Engine], rows: list[int], repeats: int, context: int) -> dict[str, Any]:
    """Measure, print the table, return the record. Times in milliseconds."""
    size = {name: bytes_of(engine, context) for name, engine in engines.items()}
    lines, found = [], {}
    first = next(iter(engines))
    for count in rows:
        times = measure(engines, count, repeats, context)
        for name, each in times.items():
            spent = spread([second * 1e3 for second in each])
            gain = paired_ratio({"": list(zip(times[first], each, strict=True))}).ratio
            lines.append([count, name, spent, gain, size[first] / size[name]])
            found[f"{count} {name}"] = {"ms": spent, "gain": gain}
    record.table(
        f"passes of plain decoding behind {context} tokens",
        ["rows", "kept as", "ms", "times as fast", "times fewer bytes"],
        lines,
    )
    return {"bytes": size, "passes": found}


def engines_of(args: argparse.Namespace) -> dict[str, Engine]:
    """By what weights or KV are kept as. Of KV all have one copy of the weights: two may lie differently in memory."""
    options = replace(Options.of(args), kv_tokens=max(args.context + 512, 4096))
    if args.activations is not None:
        options = replace(options, quantize=args.activations or None)
        return {each: build("none", replace(options, activations=each)) for each in ("model", "int8")}
    if not args.kv:
        return {kind or "as stored": build("none", replace(options, quantize=kind)) for kind in KINDS}
    engines: dict[str, Engine] = {}
    for kind in KV_KINDS:
        engines[kind] = engine = build("none", replace(options, kv_dtype=kind))
        target_of(engine).decoder = target_of(engines["auto"]).decoder
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantized", description="What quantised weights or KV gain.")
    add_arguments(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--kv", action="store_true", help="compare ways to keep the KV cache, not the weights")
    parser.add_argument(
        "--activations", nargs="?", const="", metavar="KIND", help="compare activations, of weights as is or made KIND"
    )
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before the rows of a pass")
    args = parser.parse_args()
    engines = engines_of(args)
    found = report(engines, args.rows, args.repeats, args.context)
    first = engines[next(iter(engines))]
    record.finish("quantized", {**record.models(first, args.target, None), **found}, not args.no_save)


if __name__ == "__main__":
    main()
