"""Does the budget ever lose? ``python -m bench budget --target INFLATED --traces DIR``.

Make the target first: ``python -m bench inflate server/bundled/target INFLATED --shape 135m``. Every workload
(:mod:`bench.texts`) goes through engines that decode plainly, with one fixed choice each, and with the budget
(``auto``), in turns, step by step. The goals::

    fresh     no gain possible, by forced draws                   auto / none   at least 0.98, its 95 % bound 0.95
    edits     a given text with changes, by forced draws          auto / none   at least 2.2
    dialogue  turns of dialogues (DIR/*.json), by forced draws    auto / none   at least 1.5
    repeated  repeated answers (DIR/*.jsonl), likewise            auto / none   at least 1.5
    all these the best fixed choice of every other round, scored on the rest: auto / best at least 0.97
    drawn     prompts continued at temperature 1, on request      auto / best   at least 1.05
    again     the same, each sent twice with one seed, likewise   auto / best   at least 1.05

Ratios are medians over rounds, of tokens per second after the first token. A round of the dialogues writes three turns
of one; of the repeated answers, several. Each round begins with no earlier text for lookups; costs and acceptance rates
are kept, as in a server. Ids of another vocabulary are renamed, the same everywhere. The exit status is 1 if any goal
was missed.
"""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import record
from bench.drive import Options, add_arguments, build_all, ended, mode_of, request, stepped, warm_up
from bench.experiment import Case, Experiment, Sample, Variant
from bench.texts import FIRST_TEXT_ID, Exchange, workloads
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request

FIXED = ("ngram:8", "suffix:4", "suffix:8", "suffix:16", "draft_model:2", "draft_model:4")


@dataclass(frozen=True, slots=True)
class Goal:
    """A workload's goals. none, low: auto / none, and its 95 % bound; best: auto / best fixed choice."""

    none: float = 0.0
    low: float = 0.0
    best: float = 0.97


GOALS = {
    "fresh": Goal(0.98, 0.95),
    "edits": Goal(2.2),
    "dialogue": Goal(1.5),
    "repeated": Goal(1.5),
    "drawn": Goal(best=1.05),
    "again": Goal(best=1.05),
}
#: By mode, tokens per second of one workload, a number for each round.
Rates = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A ratio, its 95 % interval and whether it reaches its goal."""

    what: str
    ratio: float
    low: float
    high: float
    holds: bool

    def __str__(self) -> str:
        return f"{self.what} {self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.set_defaults(draft=str(BUNDLED / "draft"))
    forced = [name for name in GOALS if name not in ("drawn", "again")]
    parser.add_argument("--traces", type=Path, help="directory of recorded texts")
    parser.add_argument("--fixed", nargs="+", type=mode_of, default=FIXED, help=f"default: {' '.join(FIXED)}")
    parser.add_argument("--workloads", nargs="+", choices=sorted(GOALS), default=forced)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer; of edits, three times as many")
    parser.add_argument("--minutes", type=float, default=10.0, help="no round is begun that would end later")


def main(args: Namespace) -> dict[str, Any]:
    engines = build_all(["none", *args.fixed, "auto"], replace(Options.of(args), prefix_cache=True))
    info, tokenizer = engines["none"].info, Options.of(args).tokenizer
    known = workloads(args.traces, tokenizer, args.tokens, args.seed, info.vocab_size, info.max_model_len)
    texts = {name: found for name, found in known.items() if name in args.workloads}
    for name in sorted(set(args.workloads) - set(texts)):
        print(f"{name}: left out, no such texts in --traces", flush=True)
    warm_up(engines.values(), list(range(FIRST_TEXT_ID, FIRST_TEXT_ID + 32)))
    gc.freeze()  # like the server
    costs = measured_costs(engines["auto"])  # before steps correct them
    taken, groups = Experiment(
        variants=[writer(mode, engine, args) for mode, engine in engines.items()],
        cases=lambda turn: [Case(name, "", next(workload)) for name, workload in texts.items()],
        figure="tokens_per_second",
        bases=["none"],
        rounds=args.rounds,
        seed=args.seed,
        minutes=args.minutes,
    ).run()
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in taken:
        rates[one.case.group][one.variant].append(one.sample.figures["tokens_per_second"])
    verdicts = {name: judged(name, of) for name, of in rates.items()}
    for name, each in verdicts.items():
        print(*(f"{'holds' if v.holds else 'FAILS'}  {name}: {v}" for v in each), sep="\n")
    by_name = {
        name: {"tokens_per_second": rates[name], "verdicts": list(map(asdict, verdicts[name]))} for name in rates
    }
    enough = all(len(of["auto"]) > 1 for of in rates.values())
    holds = enough and all(verdict.holds for each in verdicts.values() for verdict in each)
    model = record.models(engines["none"], **Options.of(args).directories) | {"tokens": args.tokens, "measured": costs}
    return {**model, "holds": holds, "workloads": by_name, "groups": groups}


def writer(name: str, engine: EngineCore, args: Namespace) -> Variant:
    """An engine that generates the requests of a round, step by step."""

    def measure(case: Case, turn: int) -> Generator[float, None, Sample]:
        samples = requests_of(case.input, args.tokens, f"{case.group}/{turn}", args.seed + turn)
        runs = yield from stepped(engine, *samples)
        speed = sum(run.decoded for run in runs) / sum(run.decoding for run in runs)
        return Sample({"tokens_per_second": speed}, [token for run in runs for token in run.tokens])

    def at_once(case: Case, turn: int) -> Sample:
        return ended(measure(case, turn))

    # Step by step, a pass of a mixture finds the experts of its token in the cache, if another engine was there before.
    return Variant(name, at_once if engine.runner.woken else measure)


def requests_of(samples: Sequence[Exchange], length: int, salt: str, seed: int) -> list[Request]:
    """The requests to one engine in a round. length: tokens of an answer that is not given."""
    return [request(prompt, len(output) or length, 1.0, seed, output or None, salt) for prompt, output in samples]


def judged(name: str, rates: Rates) -> list[Verdict]:
    """The goals of one workload."""
    goal = GOALS[name]

    def ratios(over: str, under: str, which: slice = slice(None)) -> list[float]:
        return [a / b for a, b in zip(rates[over][which], rates[under][which], strict=True)]

    verdicts = []
    if goal.none:
        verdict = _verdict("auto / none", ratios("auto", "none"), goal.none)
        verdicts.append(replace(verdict, holds=verdict.holds and verdict.low >= goal.low))
    if len(rates["auto"]) > 1:
        half, rest = slice(0, None, 2), slice(1, None, 2)
        best = max((mode for mode in rates if mode != "auto"), key=lambda mode: median(ratios(mode, "none", half)))
        verdicts.append(_verdict(f"auto / {best}", ratios("auto", best, rest), goal.best))
    return verdicts


def _verdict(what: str, ratios: Sequence[float], goal: float) -> Verdict:
    """The median, its interval by bootstrap over rounds, and whether it reaches the goal."""
    picks = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(np.array(ratios)[picks], axis=1), (2.5, 97.5))
    return Verdict(what, median(ratios), float(low), float(high), median(ratios) >= goal)


def measured_costs(engine: EngineCore) -> dict[str, Any]:
    """What the budget measured, for the record."""
    budget = engine.scheduler.budget
    assert budget is not None, "auto has one"
    return {
        "step_ms": [(rows, 1000 * seconds) for rows, seconds in budget.cost.points],
        "draft_ms": {
            name: {part: 1000 * getattr(m.cost, part) for part in ("start", "level", "token")}
            for name, m in budget.members.items()
        },
    }
