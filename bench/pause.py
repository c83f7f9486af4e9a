"""The pause of a stream whose engine is killed: ``python -m bench pause --kills 9``. Starts a server of its own.

Each stream is generated twice with one seed, once with the engine killed at its eighth event, and must have the same
text; the pause is the longest wait for an event, from the signal on.
"""

from __future__ import annotations

import os
import signal
import time
from argparse import ArgumentParser, Namespace
from itertools import pairwise
from typing import Any

from bench import record
from bench.experiment import Case, Experiment, Sample, Variant
from bench.serving import exchange, running
from bench.soak.served import engine_of

AT = 8
ASKED = {"prompt": "The meaning of life is", "max_tokens": 300, "temperature": 1.0, "stream": True, "ignore_eos": True}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")


def main(args: Namespace) -> None:
    with running(["--no-log-stats"]) as (process, port):

        def kill(event: int) -> None:
            if event == AT:
                os.kill(engine_of(process.pid) or 0, signal.SIGKILL)

        def measure(body: dict[str, Any], kills: bool) -> Sample:
            time.sleep(0.5)  # there is a spare again
            answer = exchange(port, body, kill if kills else None)
            after = pairwise(answer.arrivals[AT - 1 :])
            return Sample({"pause_s": max(b - a for a, b in after)}, answer.text)

        _, found = Experiment(
            variants=[
                Variant("undisturbed", lambda case, turn: measure(ASKED | {"seed": turn}, kills=False)),
                Variant("killed", lambda case, turn: measure(ASKED | {"seed": turn}, kills=True)),
            ],
            cases=[Case("from SIGKILL to the next token", "")],
            figure="pause_s",
            rounds=args.kills,
            more=lambda taken: {"longest_s": max(one.sample.figures["pause_s"] for one in taken)},
        ).run()
    record.finish("pause", {"groups": found.groups}, not args.no_save)
