"""Speculation on and off, side by side: ``python -m bench decode --target DIR --draft DIR``.

Heads take part with ``--medusa DIR``, ``--eagle3 DIR`` and ``--dflash DIR``. Every way of decoding has its own engine
in this process; all of them share one copy of the target's weights. Ratios are paired by prompt and round. The token
ids must agree, or nothing is reported.

Toy models repeat themselves at temperature 0, where n-gram lookup alone then looks excellent: hence the share of
distinct trigrams.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import floor, prompts, record
from bench.drive import Options, Run, add_arguments, build_all, mode_of, request, run, warm_up
from bench.experiment import Case, Experiment, Sample, Taken, Variant
from bench.stats import distinct_trigrams, pooled_ratio, spread
from foresay.spec.accept import ByDepth, summed
from foresay.spec.engine import EngineCore

MODES = (
    "none", "ngram", "draft_model:2", "draft_model:4", "draft_model:6", "draft_model:3,2,1", "medusa:6,6,3",
    "eagle3:4,6,5,3",
)  # fmt: skip
BASES = ("none", "ngram")
PHASES = ("plan", "propose", "forward", "draw", "commit")  # of a step; queue and prefill are not part of one


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--modes", nargs="+", type=mode_of, default=MODES, help=f"default: {' '.join(MODES)}")
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument("--prompts", type=Path, help="jsonl: own format, MT-bench, GSM8K or HumanEval")
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor-rows", nargs="*", type=int, default=(1, 5, 8), help="rows of the floors; none: skip")


def cases(prompt_ids: Mapping[str, list[int]], temperatures: Iterable[float]) -> list[Case]:
    """Each prompt at each temperature."""
    return [Case(f"temperature {t:g}", name, (ids, t)) for name, ids in prompt_ids.items() for t in temperatures]


def writer(name: str, engine: EngineCore, args: Namespace) -> Variant:
    """An engine that continues the prompt of each case, with the round's seed."""

    def measure(case: Case, turn: int) -> Sample:
        prompt, temperature = case.input
        done = run(engine, request(prompt, args.max_tokens, temperature, args.seed + turn))
        figures = {
            "tokens_per_second": done.statistics.decode_tokens_per_second,
            "ms_per_step": 1e3 * done.statistics.decode_seconds / max(1, done.statistics.steps - 1),
            "tokens_per_step": done.tokens_per_step,
        }
        return Sample(figures, done.tokens, done)

    return Variant(name, measure)


def main(args: Namespace) -> dict[str, Any]:
    options = Options.of(args).with_bundled()
    engines = build_all(args.modes, options)
    first = next(iter(engines.values()))
    prompt_ids = prompts.encoded(options.tokenizer, args.prompts, args.limit)
    warm_up(engines.values(), next(iter(prompt_ids.values())))
    floors = floor.report(first, args.floor_rows) if args.floor_rows else None
    taken, groups = Experiment(
        variants=[writer(mode, engine, args) for mode, engine in engines.items()],
        cases=cases(prompt_ids, args.temperatures),
        figure="tokens_per_second",
        bases=BASES,
        rounds=args.rounds,
        seed=args.seed,
        more=summary,
    ).run()
    print(f"token ids identical over {', '.join(engines)}: {len(taken)} runs")
    shape = {"prompts": len(prompt_ids), "rounds": args.rounds, "max_tokens": args.max_tokens, "identical": True}
    return {**record.models(first, **options.directories), **shape, "floor": floors, "groups": groups}


def summary(taken: Sequence[Taken]) -> dict[str, Any]:
    """The sums of one way's runs at one temperature. Acceptance lists start at depth 1 (:mod:`foresay.spec.accept`).

    Decode figures exclude the prompt and the first token, and nodes per step the prompt's step; tokens per step and
    figures of whole texts include both.
    """
    by_prompt: dict[str, list[Run]] = defaultdict(list)
    for one in taken:
        by_prompt[one.case.name].append(one.sample.detail)
    runs = [run for own in by_prompt.values() for run in own]
    sums = {
        name: (sum(len(r.tokens) for r in own), sum(r.statistics.steps for r in own)) for name, own in by_prompt.items()
    }
    drafted, steps = summed(r.statistics.drafted_per_depth for r in runs), sum(r.statistics.steps - 1 for r in runs)
    accepted = summed(r.statistics.accepted_per_depth for r in runs)
    by_depth = ByDepth.of(accepted, sum(r.statistics.drafts for r in runs))
    phases = {p: 1e3 * sum(r.statistics.seconds.get(p, 0.0) for r in runs) / max(1, steps) for p in PHASES}
    return {
        "tokens_per_step": pooled_ratio(sums),
        "nodes_per_step": sum(r.statistics.drafted for r in runs) / max(1, steps),
        "draft_share": phases["propose"] / (sum(phases.values()) or 1.0),
        "accepted_cumulative": by_depth.cumulative,
        "accepted_given_parent": by_depth.conditional,
        "ms of a step": phases,
        "counts by depth": {"drafted": drafted, "accepted": accepted},
        "whole texts": {
            "tokens_per_second": spread([len(r.tokens) / r.seconds for r in runs]),
            "distinct_trigrams": float(np.mean([distinct_trigrams(r.tokens) for r in runs])),
        },
    }
