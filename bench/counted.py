"""The budget with simulated times: ``python -m bench counted --target MIXTURE --draft DIR --traces DIR``.

Texts, drafters and routing are real, and so is how many experts each pass activates; the seconds of its phases are
those of a cost model, per row and per expert (``--row``, ``--expert``, in ms), which the budget gets as measured. So
its choices on a mixture are comparable with the best fixed way on a machine that does other things too. ``--blind``
hides experts from it: it then chooses by rows only. Make the mixture first (``inflate`` and ``cut``).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import record
from bench.budget import requests_of
from bench.drive import Options, add_arguments, build_all, engine_config, mode_of
from bench.texts import workloads
from foresay.server.engine.build import build_engine
from foresay.server.engine.costs import Costs
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.budget.cost import DraftCost, of_draft
from foresay.spec.engine import Engine
from foresay.spec.names import DRAFT_MODEL
from foresay.spec.request import Request
from foresay.spec.step import ScheduledSequence, VerifyResult
from foresay.spec.trace import Stopwatch

FIXED = ("suffix:4", "suffix:16", "draft_model:1", "draft_model:2", "draft_model:4", "draft_model:2,1")
#: Seconds of a step without rows and experts, of a choice, and of drafts.
STEP, CHOICE, DRAFT = 0.008, 0.00015, DraftCost(0.00015, 0.00025, 0.00003)
WORKLOADS = ("fresh", "edits", "dialogue", "repeated")
ROWS = (1, 2, 3, 5, 6, 8, 9, 12, 16, 32, 64)


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.set_defaults(draft=str(BUNDLED / "draft"))
    parser.add_argument("--traces", type=Path, help="directory of recorded texts")
    parser.add_argument("--fixed", nargs="+", type=mode_of, default=FIXED, help=f"default: {' '.join(FIXED)}")
    parser.add_argument("--row", type=float, default=0.2, help="ms of each row of a pass (0.2)")
    parser.add_argument("--expert", type=float, default=1.0, help="ms of each expert that a pass wakes (1)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--blind", action="store_true", help="the budget does not see experts")


def main(args: Namespace) -> None:
    settings = replace(Options.of(args), prefix_cache=True)
    engines = build_all(["none", *args.fixed], settings)
    engines["auto"] = auto(settings, args)
    for engine in engines.values():
        Clock(engine, args)
    info, speeds = engines["none"].info, defaultdict[str, dict[str, list[float]]](dict)
    known = workloads(args.traces, settings.tokenizer, args.tokens, args.seed, info.vocab_size, info.max_model_len)
    for turn in range(args.rounds):
        for name in args.workloads:
            given = next(known[name])
            for mode, engine in engines.items():
                drawn = requests_of(given, args.tokens, f"{name}/{turn}", turn)
                speeds[name].setdefault(mode, []).append(rate(engine, drawn))
        print(turn, *(f"{name} {in_words(speeds[name])}" for name in args.workloads), sep="\n  ", flush=True)
    record.finish(
        "counted", {"speeds": speeds, "row": args.row, "expert": args.expert, "blind": args.blind}, not args.no_save
    )


def in_words(rates: Mapping[str, Sequence[float]]) -> str:
    """Medians over rounds, of the budget over no drafts and over the best fixed way."""
    best = max((mode for mode in rates if mode != "auto"), key=lambda mode: median(rates[mode]))
    pairs = ((mode, zip(rates["auto"], rates[mode], strict=True)) for mode in ("none", best))
    return ", ".join(f"auto / {mode} {median(ours / theirs for ours, theirs in each):.3f}" for mode, each in pairs)


def auto(settings: Options, args: Namespace) -> Engine:
    """The budget's engine, whose costs are the model's; the experts that a text activates are measured."""
    config, costs = engine_config("auto", settings), Costs()
    experts = build_engine(config, costs=costs).scheduler.cost.experts
    assert experts is not None, "a mixture has some"
    steps = [(rows, seconds(args, rows, float(experts.chain(rows, 1)[-1]))) for rows in ROWS]
    seen = {} if args.blind else {"woken": costs.woken, "expert": args.expert / 1000}
    given = Costs(steps=steps, drafts={DRAFT_MODEL: DRAFT}, root=steps[0][1], **seen)
    return build_engine(config, costs=given)


def seconds(args: Namespace, rows: int, woken: float) -> float:
    """The seconds of a pass."""
    of_row, of_expert = float(args.row), float(args.expert)
    return STEP + (of_row * rows + of_expert * woken) / 1000


class Clock:
    """Runs an engine's steps, and sets their times to the model's."""

    def __init__(self, engine: Engine, args: Namespace) -> None:
        self._run, self._args, self._runner = engine.runner.run, args, engine.runner
        self._budget = engine.scheduler.budget
        engine.runner.run = self  # type: ignore[method-assign]

    def __call__(self, batch: list[ScheduledSequence], watch: Stopwatch) -> list[VerifyResult]:
        results = self._run(batch, watch)
        rows = sum(len(one.tree) for one in results if one.tree is not None) + sum(one.prefill for one in batch)
        chosen = self._budget is not None and self._budget.looks
        watch.seconds = {"plan": CHOICE * chosen, "forward": seconds(self._args, rows, self._runner.woken)}
        trees = [part for one in results if one.tree is not None for part in one.tree.parts or (one.tree,)]
        for tree in (tree for tree in trees if tree.drafter == DRAFT_MODEL and tree.levels):
            draft = of_draft(tree.levels, max(0, len(tree) - 1 - tree.levels))
            watch.seconds["propose"] = DRAFT.seconds(tree.levels, float(draft[2]))
        return results


def rate(engine: Engine, requests: Sequence[Request]) -> float:
    """Tokens a second after the first ones."""
    tokens = spent = 0.0
    for one in requests:
        engine.add(one)
        begun: Any = None
        while engine.has_work:
            deltas = engine.step()
            engine.notify()
            if engine.trace is not None and begun:
                spent += sum(engine.trace.seconds.values())
                tokens += engine.trace.emitted
            begun = begun or any(delta.tokens for delta in deltas)
    return tokens / spent
