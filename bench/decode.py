"""Speculation on and off, side by side: ``python -m bench.decode --target DIR --draft DIR``.

Heads take part with ``--medusa DIR`` and ``--eagle3 DIR``. Every way of decoding gets an engine of its own in this
process; all of them share one copy of the target's weights. Prompt by prompt each writes the same tokens in turns, in a
fresh random order, so that whatever else the machine does meets them alike; ratios are paired by prompt and round. The
token ids must agree over all ways, or nothing is reported.

Toy models repeat themselves at temperature 0, where n-gram lookup alone then looks brilliant: the share of distinct
trigrams stands beside those figures.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import floor, prompts, record
from bench.drive import Options, add_arguments, build_all, mode_of, request, run, warm_up
from bench.summary import PHASES, Sample, check_same, ratio, summarise
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams

MODES = (
    "none",
    "ngram",
    "draft_model:2",
    "draft_model:4",
    "draft_model:6",
    "draft_model:3,2,1",
    "medusa:6,6,3",
    "eagle3:4,6,5,3",
)
BASES = ("none", "ngram")


def interleave(
    engines: Mapping[str, Engine],
    asked: Mapping[str, list[int]],
    temperatures: Sequence[float],
    args: argparse.Namespace,
) -> list[Sample]:
    """All samples, in random order within each prompt and temperature."""
    order, samples, begun = random.Random(args.seed), [], time.perf_counter()
    for turn in range(args.rounds):
        for number, (name, prompt) in enumerate(asked.items(), 1):
            for temperature in temperatures:
                params = SamplingParams(
                    temperature=temperature, seed=args.seed + turn, max_tokens=args.max_tokens, ignore_eos=True
                )
                for mode in order.sample(sorted(engines), len(engines)):
                    done = run(engines[mode], request(prompt, params))
                    samples.append(Sample(mode, temperature, name, turn, done))
            progress(f"round {turn + 1}/{args.rounds}, prompt {number}/{len(asked)}", begun)
    return samples


def progress(text: str, begun: float) -> None:
    """One line for whoever waits."""
    print(f"{text}, {time.perf_counter() - begun:.0f} s", flush=True)


def compare(samples: Sequence[Sample], modes: Sequence[str]) -> dict[str, Any]:
    """Summary per mode, with its ratios to the plain and the n-gram run."""
    result = {}
    for mode in modes:
        summary = summarise([s for s in samples if s.mode == mode])
        for base in BASES:
            if base in modes and base != mode:
                summary[f"vs_{base}"] = ratio(samples, mode, base, lambda r: r.tokens_per_second)
        result[mode] = summary
    return result


def show(temperature: float, compared: Mapping[str, Mapping[str, Any]]) -> None:
    """The tables of one temperature."""
    trigrams = next(iter(compared.values()))["distinct_trigrams"]
    record.table(
        f"temperature {temperature:g}, distinct trigrams {trigrams:.2f}",
        [
            *("decoding", "tok/s", "vs none", "vs ngram", "tokens/step", "ms/step", "draft share"),
            "accepted by depth, cumulative",
        ],
        [
            [
                mode, s["tokens_per_second"], s.get("vs_none", ""), s.get("vs_ngram", ""), s["tokens_per_step"],
                s["ms_per_step"], f"{s['draft_share']:.1%}", " ".join(f"{x:.2f}" for x in s["reached_per_depth"]),
            ]
            for mode, s in compared.items()
        ],
    )  # fmt: skip
    rows = [[mode, *(s["phases_ms"][phase] for phase in PHASES)] for mode, s in compared.items()]
    record.table("where a step's time goes, ms", ["decoding", *PHASES], rows)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description="Speculation on and off, side by side.")
    add_arguments(parser)
    parser.add_argument("--modes", nargs="+", type=mode_of, default=MODES, help=f"default: {' '.join(MODES)}")
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=Path, help="jsonl: own format, MT-bench, GSM8K or HumanEval")
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--floor-rows", nargs="*", type=int, default=(1, 5, 8), help="row counts of the floors; none: skip"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    options = Options.of(args)
    engines = build_all(args.modes, options)
    first = next(iter(engines.values()))
    encode = prompts.Encoder(options.tokenizer)
    asked = {prompt.name: encode(prompt) for prompt in prompts.load(args.prompts, args.limit)}
    warm_up(engines.values(), next(iter(asked.values())))
    floors = floor.report(first, args.floor_rows) if args.floor_rows else None
    samples = interleave(engines, asked, args.temperatures, args)
    check_same(samples)
    result = {}
    for temperature in args.temperatures:
        compared = compare([s for s in samples if s.temperature == temperature], list(engines))
        show(temperature, compared)
        result[f"{temperature:g}"] = compared
    print(f"token ids identical over {', '.join(engines)}: {len(samples)} runs")
    shape = {"prompts": len(asked), "rounds": args.rounds, "max_tokens": args.max_tokens}
    model = record.models(first, args.target, args.draft) | {"heads": options.heads}
    record.finish(
        "decode", {**model, **shape, "identical": True, "floor": floors, "temperature": result}, not args.no_save
    )


if __name__ == "__main__":
    main()
