"""What quantised weights gain: ``python -m bench.quantized --target DIR [--rows 1 2 4 8]``.

The target is loaded as it is, in int8, int4 and fp8. In turns, for each number of rows: a bare pass (``run`` of a chain
of that many rows behind 128 tokens) of each, so that noise meets all alike. Beside the times stand the bytes of weights
that a pass reads: what memory alone would give is their ratio.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench import record
from bench.drive import Options, add_arguments, build, target_of
from bench.floor import BareForward, timed, weight_bytes
from bench.stats import paired_ratio, spread
from spec.engine import Engine

KINDS = (None, "int8", "int4", "fp8")
_WARM_UP = 3


def measure(engines: dict[str, Engine], rows: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each engine's passes, in turns."""
    passes = {name: BareForward(engine, rows) for name, engine in engines.items()}
    rounds = [[timed(one) for one in passes.values()] for _ in range(repeats + _WARM_UP)][_WARM_UP:]
    for one in passes.values():
        one.close()
    return dict(zip(passes, map(list, zip(*rounds, strict=True)), strict=True))


def report(engines: dict[str, Engine], rows: list[int], repeats: int) -> dict[str, Any]:
    """Measure, print the table, return the record. Times in milliseconds."""
    size = {name: weight_bytes(target_of(engine).decoder.linears) for name, engine in engines.items()}
    lines, found = [], {}
    first = next(iter(engines))
    for count in rows:
        times = measure(engines, count, repeats)
        for name, each in times.items():
            gain = paired_ratio({"": list(zip(times[first], each, strict=True))}).ratio
            ms = spread([1e3 * one for one in each])
            lines.append([count, name, ms, gain, size[first] / size[name]])
            found[f"{count} {name}"] = {"ms": ms, "gain": gain}
    record.table("passes of plain decoding", ["rows", "weights", "ms", "times as fast", "times fewer bytes"], lines)
    return {"bytes": size, "passes": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantized", description="What quantised weights gain.")
    add_arguments(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    engines = {kind or "as stored": build("none", Options.of(args, quantize=kind)) for kind in KINDS}
    found = report(engines, args.rows, args.repeats)
    record.finish("quantized", {**record.models(engines["as stored"], args.target, None), **found}, not args.no_save)


if __name__ == "__main__":
    main()
