"""The accepted tokens of each drafter: ``python -m bench drafters [--medusa DIR] [--eagle3 DIR] [--dflash DIR]``.

Every drafter drafts for the same target, prompts and seeds, with at most ``--nodes`` nodes (including the root), and
all must emit the same tokens, or nothing is reported. At temperatures above 0 each drafter that adds the shared noise
to its logits runs once more without it, with the same tree, in an engine of its own. Nothing is timed here: for tokens
per second see :mod:`bench.decode`.

Steps are all passes that emitted a token, including the prompt's last one. Intervals are bootstraps over prompts.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench import record
from bench.decode import add_prompts, cases, encoded, summary, writer
from bench.drive import FROM_DIRECTORY, BadMode, Options, add_arguments, build, build_all, engine_config, target_of
from bench.experiment import Experiment, Groups, Record, Taken, ratio
from foresay.drafters.combined import configured
from foresay.server.engine.build import draft_shape
from foresay.server.settings.resolved import BUNDLED, Resolved
from foresay.spec.engine import Engine

MODES = (
    "none", "ngram:4", "draft_model:6,6,5,5,5,4", "medusa:8,9,8,6", "eagle3:6,6,6,5,4,4", "dflash:7",
    "dflash:6,6,5,5,4,3,2",
)  # fmt: skip
APART = " (noise not shared)"


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    add_prompts(parser, MODES)
    parser.add_argument("--nodes", type=int, default=32, help="nodes of a tree at most, the root included")
    parser.add_argument("--seeds", type=int, default=2, help="texts per prompt at temperatures above 0")


def with_bundled(options: Options) -> Options:
    """The bundled draft model and heads if the target is the bundled one and no others are given."""
    if options.target != "bundled":
        return options
    flags = [flag for flag in FROM_DIRECTORY.values() if (BUNDLED / flag).is_dir()]
    found: dict[str, Any] = {flag: getattr(options, flag) or str(BUNDLED / flag) for flag in flags}
    return replace(options, **found)


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


def main(args: Namespace) -> None:
    options = with_bundled(Options.of(args))
    modes = [mode for mode in args.modes if options.has(mode)]
    check_nodes(modes, options, args.nodes)
    engines = build_all(modes, options)
    apart = twins(engines, options) if any(args.temperatures) else {}
    prompt_ids, groups = encoded(options, args), Groups()
    for temperature in args.temperatures:  # 0 has one outcome, so one seed is enough, and no noise
        every = engines | (apart if temperature else {})
        experiment = Experiment(
            variants=[writer(name, engine, args) for name, engine in every.items()],
            cases=cases(prompt_ids, [temperature]),
            figure="tokens_per_step",
            rounds=args.seeds if temperature else 1,
            seed=args.seed,
            more=summary,
        )
        taken = experiment.measure()
        groups |= with_gains(taken, experiment.compare(taken).groups)
    Record(groups).show()
    print(f"token ids identical over {', '.join([*engines, *apart])}")
    shape = {"prompts": len(prompt_ids), "seeds": args.seeds, "max_tokens": args.max_tokens, "nodes": args.nodes}
    model = record.models(engines[modes[0]], **options.directories)
    record.finish("drafters", {**model, **shape, "identical": True, "groups": groups}, not args.no_save)


def with_gains(taken: Sequence[Taken], groups: Groups) -> Groups:
    """Next to each drafter with shared noise its tokens per step over those without, paired."""
    for rows in groups.values():
        for name in rows:
            own, other = ([one for one in taken if one.variant == variant] for variant in (name, name + APART))
            if other:
                rows[name]["gain"] = ratio(own, other, "tokens_per_step")
    return groups
