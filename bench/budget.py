"""Does the budget ever lose? Forced draws, rounds in turns: ``python -m bench.budget --target INFLATED --traces DIR``.

Make the target first: ``python -m bench.inflate server/bundled/target INFLATED --shape 135m``. Every workload goes
through engines that decode plainly, with one fixed choice each, and with the budget (``auto``), in a fresh random order
each round. What has to hold::

    fresh     no token comes twice, so nothing can be gained      auto / none   at least 0.98, its 95 % bound 0.95
    edits     a given text with one token in ten replaced         auto / none   at least 2.2
    dialogue  turns of tool-calling dialogues (DIR/*.json)        auto / none   at least 1.5
    repeated  answers to one question again (DIR/*.jsonl)         auto / none   at least 1.5
    all       the best fixed choice of every other round, scored on the rest: auto / best at least 0.97

Ratios are medians over rounds, of tokens per second behind the first token. A round of the dialogues writes three turns
of one; of the repeated answers, several. Each round begins with nothing remembered of earlier ones; ids of another
vocabulary are renamed, alike everywhere. The run ends after ``--minutes`` even if not all rounds are through, with exit
status 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench import record
from bench.drive import Options, RequestFailed, add_arguments, build_all, request, run, warm_up
from bench.forced import FIRST_TEXT_ID, Recorded, copy_heavy, fresh
from bench.lookups import requests
from server.build import BUNDLED
from spec.engine import Engine
from spec.sampling import SamplingParams

FIXED = ("ngram:8", "suffix:4", "suffix:8", "suffix:16", "draft:2", "draft:4")
#: auto / none of each workload, and its lower bound where one is asked for; auto / best fixed of all.
GOALS = {"fresh": (0.98, 0.95), "edits": (2.2, 0.0), "dialogue": (1.5, 0.0), "repeated": (1.5, 0.0)}
BEST_GOAL = 0.97
#: Of a repeated answer: the end of its prompt that is kept. Of dialogues: the most that stands before the first turn
#: that is written, the shortest turn that counts, how many of one are written, and the longest text.
PROMPT, BEFORE, SHORTEST, TURNS, LONGEST = 256, 1024, 24, 3, 3500
#: Answers that a round of the repeated ones writes, and where in them they begin: past what is always the same.
REPEATED, BEGIN = 3, 512

Asked = tuple[list[int], list[int]]
#: For each round the requests of each mode, one after the other.
Workload = Iterator[list[Asked]]


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


def workloads(args: argparse.Namespace, vocab: int, room: int) -> dict[str, Workload]:
    """Those whose texts are there, without end. room: tokens that the target holds."""
    rng, most = random.Random(args.seed), min(vocab, 4096)
    length: int = args.tokens
    made: dict[str, Workload] = {
        "fresh": _made(fresh, most, rng, length),
        "edits": _made(copy_heavy, most, rng, length),
    }
    for file in sorted(args.traces.glob("*.json*")) if args.traces else ():
        if file.suffix == ".json":
            made["dialogue"] = cycle(dialogues(list(requests(file, 100, length)), min(LONGEST, room - length)))
        else:
            made["repeated"] = _repeated(renamed(list(requests(file, 8, BEGIN + length)), vocab), rng, length)
    return made


def dialogues(asked: Sequence[Asked], longest: int = LONGEST) -> list[list[Asked]]:
    """Some turns in a row of each dialogue, from its middle, of those that fit."""
    whole: list[list[Asked]] = []
    for prompt, output in asked:
        if not whole or len(prompt) < len(whole[-1][-1][0]):
            whole.append([])
        whole[-1].append((prompt, output))
    found = []
    for turns in whole:
        kept = [turn for turn in turns if len(turn[1]) >= SHORTEST]
        window = kept[max(0, (len(kept) - TURNS) // 2) :][:TURNS]
        begin = max(0, len(window[0][0]) - min(BEFORE, longest * 2 // 3)) if window else 0
        if len(window) == TURNS and len(window[-1][0]) - begin < longest:
            found.append([(prompt[begin:], output) for prompt, output in window])
    return found


def _made(
    make: Callable[[str, int, random.Random, int], Recorded], vocab: int, rng: random.Random, length: int
) -> Workload:
    while True:
        text = make("", vocab, rng, length)
        yield [(text.prompt, text.output)]


def _repeated(asked: list[Asked], rng: random.Random, length: int) -> Workload:
    """Some of the answers in random order, from the same place on."""
    while True:
        chosen = rng.sample(asked, min(REPEATED, len(asked)))
        yield [([*prompt, *output[:BEGIN]][-PROMPT:], output[BEGIN : BEGIN + length]) for prompt, output in chosen]


def renamed(asked: list[Asked], vocab: int) -> list[Asked]:
    """The same texts in ids of this vocabulary, alike everywhere; by first appearance, so that no two are one."""
    names: dict[int, int] = {}
    for prompt, output in asked:
        for token in (*prompt, *output):
            names.setdefault(token, FIRST_TEXT_ID + len(names))
    if len(names) + FIRST_TEXT_ID > vocab:
        raise SystemExit(f"the texts hold {len(names)} different tokens, the target has {vocab}: take shorter ones")
    return [([names[token] for token in prompt], [names[token] for token in output]) for prompt, output in asked]


def rate(engine: Engine, asked: Sequence[Asked], salt: str, seed: int) -> float:
    """Tokens per second behind the first of each answer. Raises RequestFailed unless the record was followed."""
    tokens = seconds = 0.0
    for prompt, output in asked:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=len(output), ignore_eos=True)
        done = run(engine, request(prompt, params, output, salt=salt))
        if done.tokens != output:
            raise RequestFailed("the trace was not followed")
        tokens += done.statistics.decode_tokens_per_second * done.statistics.decode_seconds
        seconds += done.statistics.decode_seconds
    return tokens / seconds


def measured(
    engines: Mapping[str, Engine], texts: Mapping[str, Workload], args: argparse.Namespace
) -> dict[str, Rounds]:
    """Rounds until they are through or the time is up."""
    order, begun = random.Random(args.seed), time.perf_counter()
    found = {name: Rounds({mode: [] for mode in engines}) for name in texts}
    for turn in range(args.rounds):
        for name, workload in texts.items():
            (asked,) = islice(workload, 1)
            for mode in order.sample(sorted(engines), len(engines)):
                found[name].rates[mode].append(rate(engines[mode], asked, f"{name}/{turn}", args.seed + turn))
        spent = time.perf_counter() - begun
        told = ", ".join(f"{name} {median(rounds.ratios('auto', 'none')):.2f}" for name, rounds in found.items())
        print(f"round {turn + 1}/{args.rounds}, {spent:.0f} s: auto / none so far {told}", flush=True)
        if spent + spent / (turn + 1) > 60 * args.minutes:
            print(f"the {args.minutes:g} minutes are up", flush=True)
            break
    return found


def judged(name: str, rounds: Rounds) -> list[Verdict]:
    """What has to hold of one workload."""
    goal, bound = GOALS[name]
    verdict = _verdict("auto / none", rounds.ratios("auto", "none"), goal)
    verdicts = [replace(verdict, holds=verdict.holds and verdict.low >= bound)]
    fixed = [mode for mode in rounds.rates if mode != "auto"]
    half, rest = slice(0, None, 2), slice(1, None, 2)
    if len(rounds.rates["auto"]) > 1:
        best = max(fixed, key=lambda mode: median(rounds.ratios(mode, "none", half)))
        verdicts.append(_verdict(f"auto / {best}", rounds.ratios("auto", best, rest), BEST_GOAL))
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
        "per_token_us": 1e6 * budget.cost.per_token,
        "per_row_token_us": 1e6 * budget.cost.per_row_token,
        "branching_ms": 1000 * budget.cost.branching,
        "draft_ms": {
            name: {part: 1000 * getattr(m.cost, part) for part in ("start", "level", "token", "tree_level")}
            for name, m in budget.members.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.budget", description="Does the budget ever lose?")
    add_arguments(parser)
    parser.set_defaults(draft=str(BUNDLED / "draft"))
    parser.add_argument("--traces", type=Path, help="directory of recorded texts")
    parser.add_argument("--fixed", nargs="+", default=FIXED, help=f"default: {' '.join(FIXED)}")
    parser.add_argument("--workloads", nargs="+", choices=sorted(GOALS), default=sorted(GOALS))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--minutes", type=float, default=10.0, help="no round is begun that would end later")
    args = parser.parse_args()
    engines = build_all(["none", *args.fixed, "auto"], replace(Options.of(args), prefix_cache=True))
    first = next(iter(engines.values()))
    texts = {
        name: found
        for name, found in workloads(args, first.info.vocab_size, first.info.max_model_len).items()
        if name in args.workloads
    }
    for name in sorted(set(args.workloads) - set(texts)):
        print(f"{name}: left out, no such texts in --traces", flush=True)
    warm_up(engines.values(), list(range(FIRST_TEXT_ID, FIRST_TEXT_ID + 32)))
    result, failed = {}, False
    for name, rounds in measured(engines, texts, args).items():
        verdicts = judged(name, rounds)
        show(name, rounds, verdicts)
        failed = failed or not all(verdict.holds for verdict in verdicts)
        told = [{part: getattr(v, part) for part in ("what", "ratio", "low", "high", "holds")} for v in verdicts]
        result[name] = {"tokens_per_second": rounds.rates, "verdicts": told}
    model = record.models(first, args.target, args.draft)
    record.finish("budget", {**model, "measured": choices(engines["auto"]), "workloads": result}, not args.no_save)
    sys.exit(failed)


if __name__ == "__main__":
    main()
