"""Does the budget ever lose? ``python -m bench.budget --target INFLATED --traces DIR``.

Make the target first: ``python -m bench.inflate server/bundled/target INFLATED --shape 135m``. Every workload
(:mod:`bench.texts`) goes through engines that decode plainly, with one fixed choice each, and with the budget
(``auto``), in turns, step by step (:mod:`bench.turns`). What has to hold::

    fresh     nothing can be gained, by forced draws              auto / none   at least 0.98, its 95 % bound 0.95
    edits     a given text with changes, by forced draws          auto / none   at least 2.2
    dialogue  turns of dialogues (DIR/*.json), by forced draws    auto / none   at least 1.5
    repeated  answers that come again (DIR/*.jsonl), likewise     auto / none   at least 1.5
    all these the best fixed choice of every other round, scored on the rest: auto / best at least 0.97
    drawn     prompts continued at temperature 1, if asked for    auto / best   at least 1.05
    again     the same, each asked twice with one seed, likewise  auto / best   at least 1.05

Ratios are medians over rounds, of tokens per second behind the first token. A round of the dialogues writes three turns
of one; of the repeated answers, several. Each round begins with no earlier text to look things up in; costs and how
often drafts are right stay known, as in a server. Ids of another vocabulary are renamed, alike everywhere. The run ends
after ``--minutes`` even if not all rounds are through, with exit status 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench import record
from bench.drive import Options, add_arguments, build_all, mode_of, request, warm_up
from bench.forced import FIRST_TEXT_ID
from bench.texts import Asked, Workload, workloads
from bench.turns import in_turns
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.engine import Engine
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams

FIXED = ("ngram:8", "suffix:4", "suffix:8", "suffix:16", "draft_model:2", "draft_model:4")


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked of a workload. none, low: auto / none, and its 95 % bound; best: auto / best fixed choice."""

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
DRAWN = ("drawn", "again")
FORCED = [name for name in GOALS if name not in DRAWN]


class Rounds(NamedTuple):
    """Tokens per second of one workload, by mode, a number for each round."""

    rates: dict[str, list[float]]

    def ratios(self, over: str, under: str, which: slice = slice(None)) -> list[float]:
        """One mode over another, round by round."""
        return [a / b for a, b in zip(self.rates[over][which], self.rates[under][which], strict=True)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A ratio, its 95 % interval and whether it holds."""

    what: str
    ratio: float
    low: float
    high: float
    holds: bool


def requests_of(asked: Sequence[Asked], length: int, salt: str, seed: int) -> list[Request]:
    """What one engine is asked in a round. length: tokens of an answer that is not given."""
    made = []
    for prompt, output in asked:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=len(output) or length, ignore_eos=True)
        made.append(request(prompt, params, output or None, salt=salt))
    return made


def measured(
    engines: Mapping[str, Engine], texts: Mapping[str, Workload], args: argparse.Namespace
) -> dict[str, Rounds]:
    """Rounds until they are through or the time is up."""
    begun = time.perf_counter()
    found = {name: Rounds({mode: [] for mode in engines}) for name in texts}
    for turn in range(args.rounds):
        for name, workload in texts.items():
            (asked,) = islice(workload, 1)
            seed, salt = args.seed + turn, f"{name}/{turn}"
            requests = {mode: requests_of(asked, args.tokens, salt, seed) for mode in engines}
            for mode, lane in in_turns(engines, requests, seed).items():
                found[name].rates[mode].append(lane.tokens / lane.seconds)
        spent = time.perf_counter() - begun
        told = ", ".join(f"{name} {median(rounds.ratios('auto', 'none')):.2f}" for name, rounds in found.items())
        print(f"round {turn + 1}/{args.rounds}, {spent:.0f} s: auto / none so far {told}", flush=True)
        if spent + spent / (turn + 1) > 60 * args.minutes:
            print(f"the {args.minutes:g} minutes are up", flush=True)
            break
    return found


def judged(name: str, rounds: Rounds) -> list[Verdict]:
    """What has to hold of one workload."""
    goal = GOALS[name]
    verdict = _verdict("auto / none", rounds.ratios("auto", "none"), goal.none)
    verdicts = [replace(verdict, holds=verdict.holds and verdict.low >= goal.low)] if goal.none else []
    fixed = [mode for mode in rounds.rates if mode != "auto"]
    half, rest = slice(0, None, 2), slice(1, None, 2)
    if len(rounds.rates["auto"]) > 1:
        best = max(fixed, key=lambda mode: median(rounds.ratios(mode, "none", half)))
        verdicts.append(_verdict(f"auto / {best}", rounds.ratios("auto", best, rest), goal.best))
    return verdicts


def _verdict(what: str, ratios: Sequence[float], goal: float) -> Verdict:
    """The median, its interval by bootstrap over rounds, and whether it is as large as asked for."""
    picks = np.random.default_rng(0).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(np.array(ratios)[picks], axis=1), (2.5, 97.5))
    return Verdict(what, median(ratios), float(low), float(high), median(ratios) >= goal)


def show(name: str, rounds: Rounds, verdicts: Sequence[Verdict]) -> None:
    """The tables of one workload."""
    rows = [
        [mode, f"{median(rates):.1f}", f"{median(rounds.ratios(mode, 'none')):.3f}"]
        for mode, rates in rounds.rates.items()
    ]
    record.table(f"{name}, {len(rounds.rates['none'])} rounds", ["decoding", "tok/s", "vs none"], rows)
    for verdict in verdicts:
        interval = f"{verdict.ratio:.3f} [{verdict.low:.3f}, {verdict.high:.3f}]"
        print(f"{'holds' if verdict.holds else 'FAILS'}  {name}: {verdict.what} {interval}")


def choices(engine: Engine) -> dict[str, Any]:
    """What the budget measured, for the record."""
    budget = engine.scheduler.budget
    assert budget is not None, "auto has one"
    return {
        "step_ms": [(rows, 1000 * seconds) for rows, seconds in budget.cost.points],
        "token_of_context_us": [(rows, 1e6 * seconds) for rows, seconds in budget.cost.context],
        "draft_ms": {
            name: {part: 1000 * getattr(m.cost, part) for part in ("start", "level", "token")}
            for name, m in budget.members.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.budget", description="Does the budget ever lose?")
    add_arguments(parser)
    parser.set_defaults(draft=str(BUNDLED / "draft"))
    parser.add_argument("--traces", type=Path, help="directory of recorded texts")
    parser.add_argument("--fixed", nargs="+", type=mode_of, default=FIXED, help=f"default: {' '.join(FIXED)}")
    parser.add_argument("--workloads", nargs="+", choices=sorted(GOALS), default=FORCED)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer; of edits, three times as many")
    parser.add_argument("--minutes", type=float, default=10.0, help="no round is begun that would end later")
    args = parser.parse_args()
    engines = build_all(["none", *args.fixed, "auto"], replace(Options.of(args), prefix_cache=True))
    first = next(iter(engines.values()))
    info, tokenizer = first.info, Options.of(args).tokenizer
    known = workloads(args.traces, tokenizer, args.tokens, args.seed, info.vocab_size, info.max_model_len)
    texts = {name: found for name, found in known.items() if name in args.workloads}
    for name in sorted(set(args.workloads) - set(texts)):
        print(f"{name}: left out, no such texts in --traces", flush=True)
    warm_up(engines.values(), list(range(FIRST_TEXT_ID, FIRST_TEXT_ID + 32)))
    gc.freeze()  # as the server does
    read = choices(engines["auto"])  # before steps correct it
    result, failed = {}, False
    for name, rounds in measured(engines, texts, args).items():
        verdicts = judged(name, rounds)
        show(name, rounds, verdicts)
        failed = failed or len(rounds.rates["auto"]) < 2 or not all(verdict.holds for verdict in verdicts)
        told = [{part: getattr(v, part) for part in ("what", "ratio", "low", "high", "holds")} for v in verdicts]
        result[name] = {"tokens_per_second": rounds.rates, "verdicts": told}
    model = record.models(first, args.target, args.draft)
    record.finish(
        "budget",
        {**model, "tokens": args.tokens, "measured": read, "workloads": result},
        not args.no_save,
    )
    sys.exit(failed)


if __name__ == "__main__":
    main()
