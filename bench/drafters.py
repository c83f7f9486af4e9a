"""What each drafter guesses right: ``python -m bench.drafters [--medusa DIR] [--eagle3 DIR] [--dflash DIR]``.

Every drafter drafts for the same target, prompts and seeds, with at most ``--nodes`` nodes (the root included), and all
must write the same tokens, or nothing is reported. At temperatures above 0 each drafter that adds the shared noise to
its guesses runs once more without it, with the same tree, in an engine of its own. Nothing is timed here: for tokens
per second there is :mod:`bench.decode`.

Steps are all passes that emitted a token, the prompt's last one among them. Intervals are bootstraps over prompts.
Below stands how far each drafter's distribution is from the target's (:mod:`bench.judged`), on the texts just written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import judged, prompts, record
from bench.decode import progress
from bench.drive import (
    FROM_DIRECTORY,
    BadMode,
    Options,
    Run,
    add_arguments,
    build,
    build_all,
    engine_config,
    mode_of,
    request,
    run,
    target_of,
)
from bench.stats import Ratio, pooled_ratio
from bench.summary import Sample, accepted_by_depth, check_same, ratio
from foresay.drafters.routed import configured
from foresay.server.engine.build import draft_shape
from foresay.server.settings.resolved import BUNDLED, Resolved
from foresay.spec.acceptance import by_place
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams

MODES = (
    "none",
    "ngram:4",
    "draft_model:6,6,5,5,5,4",
    "medusa:8,9,8,6",
    "eagle3:6,6,6,5,4,4",
    "dflash:7",
    "dflash:6,6,5,5,4,3,2",
)
APART = " (noise not shared)"


def with_bundled(options: Options) -> Options:
    """The bundled draft model and heads where the target is the bundled one and no others are given."""
    if options.target != "bundled":
        return options

    def there(name: str) -> str | None:
        return str(BUNDLED / name) if (BUNDLED / name).is_dir() else None

    return replace(
        options,
        draft=options.draft or there("draft"),
        medusa=options.medusa or there("medusa"),
        eagle3=options.eagle3 or there("eagle3"),
        dflash=options.dflash or there("dflash"),
    )


def check_nodes(modes: Sequence[str], options: Options, most: int) -> None:
    """Raise BadMode for a tree of more than ``most`` nodes."""
    for mode in modes:
        config = engine_config(mode, options)
        nodes = draft_shape(config, Resolved(config.draft, "")).nodes
        if nodes > most:
            raise BadMode(f"{mode!r} has {nodes} nodes with its root, more than --nodes {most}")


def twins(engines: Mapping[str, Engine], options: Options) -> dict[str, Engine]:
    """For each drafter that adds the shared noise, an engine whose drafter leaves it out."""
    decoder, made = target_of(next(iter(engines.values()))).decoder, {}
    for mode, engine in engines.items():
        if hasattr(configured(engine.drafter), "shared_noise"):
            made[mode + APART] = twin = build(mode, options)
            target_of(twin).decoder = decoder
            drafter: Any = configured(twin.drafter)
            drafter.shared_noise = False
    return made


def sampled(
    engines: Mapping[str, Engine], asked: Mapping[str, list[int]], temperature: float, args: argparse.Namespace
) -> Iterator[Sample]:
    """All runs of one temperature; temperature 0 has one outcome, so one seed is enough."""
    begun = time.perf_counter()
    for seed in range(args.seed, args.seed + (args.seeds if temperature else 1)):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=args.max_tokens, ignore_eos=True)
        for name, prompt in asked.items():
            for mode, engine in engines.items():
                yield Sample(mode, temperature, name, seed, run(engine, request(prompt, params)))
        progress(f"temperature {temperature:g}, seed {seed}, {len(asked)} prompts", begun)


def figures(samples: Sequence[Sample], mode: str) -> dict[str, Any]:
    """One drafter at one temperature.

    accepted_given_parent: by depth, conditional (:mod:`foresay.spec.acceptance`). drafted_nodes_per_step
    is over the steps after the prompt's. gain: tokens per step over those without shared noise, paired.
    """
    own = [s for s in samples if s.mode == mode]
    runs = [s.run for s in own]
    result = {
        "tokens_per_step": tokens_per_step(own),
        "drafted_tokens": sum(r.statistics.drafted for r in runs),
        "drafted_nodes_per_step": sum(r.statistics.drafted for r in runs) / sum(r.statistics.steps - 1 for r in runs),
        "accepted_given_parent": accepted_by_depth(runs).conditional,
        "drafted_per_depth": by_place(r.statistics.drafted_per_depth for r in runs),
        "accepted_per_depth": by_place(r.statistics.accepted_per_depth for r in runs),
    }
    apart = [s for s in samples if s.mode == mode + APART]
    if apart:
        both = [*own, *(replace(s, mode=APART) for s in apart)]
        result["not_shared"] = tokens_per_step(apart)
        result["gain"] = ratio(both, mode, APART, lambda r: r.tokens_per_step)
    return result


def tokens_per_step(samples: Sequence[Sample]) -> Ratio:
    """All tokens over all steps, with its interval over prompts."""
    runs: dict[str, list[Run]] = {}
    for sample in samples:
        runs.setdefault(sample.prompt, []).append(sample.run)
    sums = {name: (sum(len(r.tokens) for r in own), sum(r.statistics.steps for r in own)) for name, own in runs.items()}
    return pooled_ratio(sums)


def show(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """One table: all drafters at all temperatures."""
    rows = [
        [
            mode, temperature, f["tokens_per_step"], f"{f['drafted_nodes_per_step']:.1f}", f["drafted_tokens"],
            " ".join(f"{share:.2f}" for share in f["accepted_given_parent"]),
            f.get("not_shared", ""), f.get("gain", ""),
        ]
        for temperature, modes in found.items()
        for mode, f in modes.items()
    ]  # fmt: skip
    columns = ["drafter", "T", "tokens/step", "nodes/step", "drafted", "accepted by depth, conditional"]
    record.table("drafters", [*columns, "tokens/step, noise not shared", "gain"], rows)


def levels(modes: Sequence[str], kind: str, options: Options) -> int:
    """The deepest tree asked of a kind of drafter; 0 if none is."""
    configs = [engine_config(mode, options) for mode in modes if mode.partition(":")[0] == kind]
    return max((draft_shape(config, Resolved(config.draft, "")).levels for config in configs), default=0)


def judge(modes: Sequence[str], options: Options, samples: Sequence[Sample], asked: Mapping[str, list[int]]) -> Any:
    """Print and return how each drafter judges the texts that were just written at the highest temperature."""
    highest = max(s.temperature for s in samples)
    chosen = {s.prompt: s for s in samples if s.temperature == highest and s.round == samples[0].round}
    texts = [asked[name] + sample.run.tokens for name, sample in chosen.items()]
    depths = {kind: levels(modes, kind, options) for kind in FROM_DIRECTORY}
    return judged.report(options, {kind: depth for kind, depth in depths.items() if depth}, texts, highest)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.drafters", description="What each drafter guesses right.")
    add_arguments(parser)
    parser.add_argument("--modes", nargs="+", type=mode_of, default=MODES, help=f"default: {' '.join(MODES)}")
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument("--nodes", type=int, default=32, help="nodes of a tree at most, the root included")
    parser.add_argument("--seeds", type=int, default=2, help="texts per prompt at temperatures above 0")
    parser.add_argument("--prompts", type=Path, help="jsonl: own format, MT-bench, GSM8K or HumanEval")
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    options = with_bundled(Options.of(args))
    modes = [mode for mode in args.modes if options.has(mode)]
    check_nodes(modes, options, args.nodes)
    engines = build_all(modes, options)
    noiseless = twins(engines, options) if any(args.temperatures) else {}
    encode = prompts.Encoder(options.tokenizer)
    asked = {prompt.name: encode(prompt) for prompt in prompts.load(args.prompts, args.limit)}
    samples: list[Sample] = []
    for temperature in args.temperatures:
        samples += sampled({**engines, **(noiseless if temperature else {})}, asked, temperature, args)
    check_same(samples)
    found = {
        f"{temperature:g}": {
            mode: figures([s for s in samples if s.temperature == temperature], mode) for mode in modes
        }
        for temperature in args.temperatures
    }
    show(found)
    print(f"token ids identical over {', '.join([*engines, *noiseless])}: {len(samples)} runs")
    texts = judge(modes, options, samples, asked)
    shape = {"prompts": len(asked), "seeds": args.seeds, "max_tokens": args.max_tokens, "nodes": args.nodes}
    model = record.models(engines[modes[0]], args.target, options.draft) | {"heads": options.heads}
    result = {**model, **shape, "identical": True, "temperature": found, "judged": texts}
    record.finish("drafters", result, not args.no_save)


if __name__ == "__main__":
    main()
