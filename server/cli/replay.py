"""``foresay replay``: what other trees, budgets and lookup drafters would have been worth in a recorded trace."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from foresay.server.cli.command import Command
from foresay.spec.errors import ConfigurationError

if TYPE_CHECKING:
    from foresay.server.engine.trace import Session, Trace
    from foresay.server.observe.replay.evaluate import Evaluation


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a trace that foresay serve --trace FILE has written")
    parser.add_argument(
        "--draft",
        action="append",
        metavar="WAY",
        help="a way of drafting to evaluate; may be given several times: none, recorded (as it was), recorded:4 "
        "(a chain), recorded:3,2,1 (a tree), recorded@8 (the 8 likeliest nodes), ngram:4 or suffix:4 (these "
        "need --trace-text). Default: a table of the usual ones",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(config: None, arguments: Namespace) -> int:
    """Read, evaluate, print."""
    import msgspec

    if not Path(arguments.file).is_file():
        raise ConfigurationError(f"{arguments.file}: no such file")
    from foresay.server.engine.trace import read
    from foresay.server.observe.replay.evaluate import evaluate, largest
    from foresay.server.observe.replay.ways import parse, usual

    asked = None if arguments.draft is None else [parse(text) for text in arguments.draft]
    trace = read(Path(arguments.file))
    if trace.broken:
        print(f"{arguments.file}: left out {trace.broken} broken lines", file=sys.stderr)
    sessions = _alike(trace)
    if not any(session.requests for session in sessions):
        raise ConfigurationError(f"{arguments.file}: contains no request")
    ways = asked or usual(*largest(sessions), text=all(session.start.text for session in sessions))
    evaluation = evaluate(sessions, ways)
    print(msgspec.json.encode(evaluation).decode() if arguments.json else _shown(evaluation))
    return 0


def _alike(trace: Trace) -> list[Session]:
    """The sessions of the models that ran last: figures of different pairs do not add up."""
    last = trace.sessions[-1].start.engine
    same = [s for s in trace.sessions if all(s.start.engine.get(k) == last.get(k) for k in ("target", "drafter"))]
    left_out = len(trace.sessions) - len(same)
    if left_out:
        print(f"left out {left_out} of {len(trace.sessions)} runs, which had other models", file=sys.stderr)
    return same


def _shown(evaluation: Evaluation) -> str:
    lines = [
        f"{evaluation.target} <- {evaluation.drafter}: {evaluation.requests} requests, {evaluation.tokens} tokens, "
        f"{evaluation.steps} steps; the median decoding step took {evaluation.milliseconds:.2f} ms",
        "",
        f"{'draft':<18} {'tokens/step':>11} {'drafted/step':>12} {'accepted':>8} {'ms/step':>8} {'tokens/s':>8} "
        f"{'x none':>6}",
    ]
    best = max(row.tokens_per_second for row in evaluation.rows)
    for row in evaluation.rows:
        tokens = f"{'>= ' if row.at_least else ''}{row.tokens_per_step:.2f}"
        accepted = "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}"
        lines.append(
            f"{row.draft:<18} {tokens:>11} {row.drafted_per_step:>12.1f} {accepted:>8} {row.milliseconds:>8.2f} "
            f"{row.tokens_per_second:>8.1f} {row.speed_up:>6.2f}{'  <- best' if row.tokens_per_second == best else ''}"
        )
    return "\n".join([*lines, "", _NOTE])


_NOTE = """\
Times are estimates, from the recorded steps and the passes measured when the engine started. Trees cut from the
recorded ones are judged at the recorded roots; lookups go through the recorded texts again. Steps that read prompts
are not counted. >=: the recorded trees were smaller than asked for."""


COMMAND = Command(
    "replay",
    "evaluate other ways of drafting on a recorded trace",
    ("foresay replay trace.jsonl", "foresay replay trace.jsonl --draft recorded:2 --draft recorded@8 --draft ngram:6"),
    None,
    run,
    _add_arguments,
)
