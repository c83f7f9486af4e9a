"""Forced draws: a recorded text decides what is drawn, every pass is really computed.

``python -m bench.forced --target DIR --trace FILE`` or ``--synthetic copy fresh``. Acceptance is then the text's, cost
is the machine's, so a toy model measures workloads it could never write. A trace is jsonl, one request a line:
``{"prompt_token_ids": [...], "output_token_ids": [...]}``. The synthetic ones need no file: ``copy`` quotes its prompt
with small edits, as editing and summarising do; in ``fresh`` no token occurs twice, so that looking back never pays and
speculation should cost nothing. ``--edits FILE`` answers with an edit of a text (:mod:`bench.edits`), which the request
predicts where the way of decoding is ``prediction``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.decode import compare, progress
from bench.drive import Options, RequestFailed, add_arguments, build_all, mode_of, request, run, warm_up
from bench.edits import edits
from bench.summary import Sample
from foresay.spec.engine import Engine
from foresay.spec.names import PREDICTION
from foresay.spec.sampling import SamplingParams

MODES = ("none", "ngram:4", "ngram:8", "draft_model:4")
FIRST_TEXT_ID = 16  # below lie special tokens, in most vocabularies


class BadTrace(ValueError):
    """A trace that cannot be run."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace: what was asked, what was answered and perhaps what was predicted, as token ids."""

    name: str
    prompt: list[int]
    output: list[int]
    prediction: list[int] | None = None


def read_trace(path: Path) -> list[Recorded]:
    """The requests of a jsonl file."""
    trace = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line) if line.strip() else {}
        prompt, output = row.get("prompt_token_ids"), row.get("output_token_ids")
        if not prompt or not output:
            raise BadTrace(f"{path}, line {number}: needs prompt_token_ids and output_token_ids, both not empty")
        trace.append(Recorded(f"{path.stem}-{number}", prompt, output))
    return trace


def copy_heavy(name: str, vocab: int, rng: random.Random, length: int = 128) -> Recorded:
    """The prompt quoted in order, one token in ten or so replaced."""
    prompt = [rng.randrange(FIRST_TEXT_ID, vocab) for _ in range(length)]
    output = [token if rng.random() < 0.9 else rng.randrange(FIRST_TEXT_ID, vocab) for token in prompt]
    return Recorded(name, prompt, output)


def fresh(name: str, vocab: int, rng: random.Random, length: int = 128) -> Recorded:
    """Prompt and output without any token twice."""
    tokens = rng.sample(range(FIRST_TEXT_ID, vocab), 2 * length)
    return Recorded(name, tokens[:length], tokens[length:])


SYNTHETIC = {"copy": copy_heavy, "fresh": fresh}


def interleave(engines: Mapping[str, Engine], trace: Sequence[Recorded], args: argparse.Namespace) -> list[Sample]:
    """Every request through every engine in turns. Raises RequestFailed if an engine writes anything but the record."""
    order, samples, begun = random.Random(args.seed), [], time.perf_counter()
    for turn in range(args.rounds):
        for recorded in trace:
            params = SamplingParams(
                temperature=args.temperature, seed=args.seed + turn, max_tokens=len(recorded.output), ignore_eos=True
            )
            for mode in order.sample(sorted(engines), len(engines)):
                predicted = recorded.prediction if mode.startswith(PREDICTION) else None
                done = run(engines[mode], request(recorded.prompt, params, recorded.output, predicted))
                if done.tokens != recorded.output:
                    raise RequestFailed(f"{mode} did not follow the trace {recorded.name}")
                samples.append(Sample(mode, args.temperature, recorded.name, turn, done))
        progress(f"round {turn + 1}/{args.rounds}", begun)
    return samples


def show(name: str, compared: Mapping[str, Mapping[str, Any]]) -> None:
    """The table of one workload."""
    rows = [
        [
            mode, s["tokens_per_second"], s.get("vs_none", ""), s["tokens_per_step"], s["ms_per_step"],
            " ".join(f"{x:.2f}" for x in s["acceptance_per_depth"]),
        ]
        for mode, s in compared.items()
    ]  # fmt: skip
    columns = ["decoding", "tok/s", "vs none", "tokens/step", "ms/step", "accepted of drafted, depth 1, 2, ..."]
    record.table(f"forced draws, {name}", columns, rows)


def workloads(args: argparse.Namespace, vocab: int) -> dict[str, list[Recorded]]:
    """The traces asked for, by name."""
    rng = random.Random(args.seed)
    made = {
        kind: [SYNTHETIC[kind](f"{kind}-{n}", min(vocab, 4096), rng) for n in range(args.requests)]
        for kind in args.synthetic
    }
    if args.edits:
        asked = edits(args.edits, args.edit_rate, Options.of(args).tokenizer, args.seed, args.characters)
        made["edits"] = [Recorded(one.name, one.text, one.answer, one.text) for one in asked]
    return made | {path.stem: read_trace(path) for path in args.trace}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.forced", description="Cost under recorded acceptance.")
    add_arguments(parser)
    parser.add_argument("--trace", nargs="+", type=Path, default=[])
    parser.add_argument("--synthetic", nargs="+", choices=sorted(SYNTHETIC), default=[])
    parser.add_argument("--edits", nargs="+", type=Path, default=[], metavar="TEXT")
    parser.add_argument("--edit-rate", type=float, default=0.1, help="share of words edited (0.1)")
    parser.add_argument("--characters", type=int, default=600, help="of each text (600)")
    parser.add_argument("--requests", type=int, default=4, help="requests of each synthetic trace")
    parser.add_argument("--modes", nargs="+", type=mode_of, default=MODES, help=f"default: {' '.join(MODES)}")
    parser.add_argument("--temperature", type=float, default=0.0, help="at which drafters draft (the draws are forced)")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if not args.trace and not args.synthetic and not args.edits:
        parser.error("give --trace FILE, --synthetic copy fresh or --edits TEXT")
    engines = build_all(args.modes, Options.of(args))
    first = next(iter(engines.values()))
    traces = workloads(args, first.info.vocab_size)
    warm_up(engines.values(), next(iter(traces.values()))[0].prompt)
    result = {}
    for name, trace in traces.items():
        result[name] = compare(interleave(engines, trace, args), list(engines))
        show(name, result[name])
    model = record.models(first, args.target, args.draft)
    record.finish("forced", {**model, "rounds": args.rounds, "traces": result}, not args.no_save)


if __name__ == "__main__":
    main()
