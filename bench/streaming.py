"""The cost of streaming: ``python -m bench streaming --target DIR``. Starts a server of its own.

The same request streamed and not, wall time from the request to the last byte. Both answers must have the same text.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import prompts, record
from bench.drive import Options, add_arguments
from bench.experiment import Case, Experiment, Sample, Taken, Variant
from bench.serving import exchange, running
from bench.stats import percentile


def options(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--prompts", type=Path)


def main(args: Namespace) -> None:
    encode = prompts.Encoder(Options.of(args).tokenizer)
    asked = [(prompt.name, encode(prompt)) for prompt in prompts.load(args.prompts)]
    flags = [args.target, "--dtype", args.dtype, "--draft", args.draft or "auto", "--no-prefix-cache"]
    flags += ["--draft-tokens", str(args.draft_tokens), *(["--threads", str(args.threads)] if args.threads else [])]
    sampling = {"max_tokens": args.max_tokens, "ignore_eos": True, "temperature": args.temperature}
    with running(flags) as (_, port):

        def variant(name: str, stream: bool) -> Variant:
            def measure(case: Case, turn: int) -> Sample:
                body = {"model": None, "prompt": case.input, "seed": args.seed + turn, "stream": stream, **sampling}
                answer = exchange(port, body)
                figures = {"ms": 1e3 * answer.seconds, "first_ms": 1e3 * answer.arrivals[0]}
                return Sample(figures, answer.text, answer.arrivals)

            return Variant(name, measure)

        _, found = Experiment(
            variants=[variant("streamed", True), variant("whole", False)],
            cases=lambda turn: [Case("streamed against not streamed", *asked[turn % len(asked)])],
            figure="ms",
            bases=["whole"],
            rounds=args.pairs,
            warm=1,
            seed=args.seed,
            more=gaps,
        ).run()
    names = {"target": Path(args.target).name, "draft": Path(args.draft).name if args.draft else "auto"}
    shape = {"pairs": args.pairs, "server_threads": args.threads, **sampling}
    record.finish("streaming", {**names, **shape, "groups": found.groups}, not args.no_save)


def gaps(taken: list[Taken]) -> dict[str, Any]:
    """The times between events."""
    found = [1e3 * (b - a) for one in taken for a, b in pairwise(one.sample.detail)]
    events = sum(len(one.sample.detail) for one in taken) / len(taken)
    return {"events": events} | {f"gap_ms_p{share}": percentile(found or [0.0], share) for share in (50, 99)}
