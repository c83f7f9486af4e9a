"""``foresay bench``: how much speculation gives on this machine, for these models. ``foresay selfcheck``: are the
tokens on this machine those of plain decoding?

Each round of a bench decodes every prompt with the drafter and without, in turns, so that a machine that slows down
slows both. Both ways write the same tokens where the engine is exact, and the report says whether they did. Speeds are
medians, and the speed-up is the quotient of the two that are printed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from foresay.server.cli.command import Command
from foresay.server.cli.generate import sampling_params
from foresay.server.settings.config import BenchConfig, SamplingConfig
from foresay.spec.acceptance import ByDepth, by_place, tokens_per_step
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import NONE

if TYPE_CHECKING:
    from foresay.drafters.training.prompts import Prompt
    from foresay.server.cli.selfcheck_prompts import Report
    from foresay.server.host.completion import Completion
    from foresay.server.host.local import Engine
    from foresay.spec.sampling import SamplingParams
    from foresay.spec.trace import Statistics

PROMPTS = (
    "Once upon a time there was a little girl who",
    "The old king called his three sons together and said,",
    "Tom had 12 apples. He gave 5 of them to his sister. How many apples",
    "In the middle of the forest stood a house, and in that house",
)


def _add_bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="measure on this prompt; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def bench(config: BenchConfig, arguments: Namespace) -> int:
    """Measure, and print a table or, if that is asked for, JSON."""
    from foresay.drafters.training.progress import Progress
    from foresay.server.cli.progress import loaded

    if config.shadow is not None or config.trace is not None:
        raise ConfigurationError("bench measures without --shadow and --trace: they would slow one side down")
    config = msgspec.structs.replace(config, seed=0 if config.seed is None else config.seed)
    plain = msgspec.structs.replace(config, draft=NONE, draft_tree=None, draft_history=None)
    prompts = tuple(arguments.prompt or PROMPTS)
    with loaded(config) as drafted, loaded(plain) as bare:
        if drafted.info.drafter == bare.info.drafter:
            raise ConfigurationError("there is nothing to compare: choose a drafter with --draft")
        with Progress("measured", 2 * (config.rounds + 1) * len(prompts), "answers") as progress:
            report = measure({"on": drafted, "off": bare}, config, prompts, progress.to)
        report |= {"target": drafted.info.target, "drafter": drafted.info.drafter, "dtype": drafted.info.dtype}
    print(msgspec.json.encode(report).decode() if arguments.json else table(report))
    return 0


def measure(
    engines: dict[str, Engine],
    config: BenchConfig,
    prompts: tuple[str, ...],
    progress: Callable[[int], None] = lambda written: None,
) -> dict[str, Any]:
    """Run the rounds, after one that is not counted; returns the report. progress: called with the answers so far."""
    from foresay.server.cli.check.summary import Speeds, rounded

    written = 0

    kept: dict[str, list[Completion]] = {name: [] for name in engines}
    for number in range(config.rounds + 1):
        for prompt in prompts:
            for name in list(engines) if number % 2 else list(engines)[::-1]:
                params = msgspec.structs.replace(sampling_params(config), seed=(config.seed or 0) + number)
                completion = engines[name].generate(prompt, params, stop=config.stop)
                progress(written := written + 1)
                if number > 0:
                    kept[name].append(completion)
    pairs = list(zip(kept["on"], kept["off"], strict=True))
    speeds = Speeds.of((_statistics(on), _statistics(off)) for on, off in pairs)
    return {
        "on": _summarised(kept["on"], speeds.drafted, speeds.drafted_range),
        "off": _summarised(kept["off"], speeds.plain, speeds.plain_range),
        "speedup": rounded(speeds.speedup),
        "speedup_spread": None if speeds.spread is None else [round(one, 3) for one in speeds.spread],
        "same_tokens": all(on.token_ids == off.token_ids for on, off in pairs),
        "exact": kept["on"][0].exact,
        "rounds": config.rounds,
        "prompts": len(prompts),
        "max_tokens": config.max_tokens or engines["on"].usual_tokens,
        "temperature": sampling_params(config).temperature,
    }


def _statistics(completion: Completion) -> Statistics:
    assert completion.statistics is not None, "a completion that ran to its end has statistics"
    return completion.statistics


def _summarised(completions: list[Completion], speed: float, spread: tuple[float, float]) -> dict[str, Any]:
    measured = [_statistics(completion) for completion in completions]
    steps, tokens = sum(one.steps for one in measured), sum(one.completion_tokens for one in measured)
    accepted = by_place(one.accepted_per_depth for one in measured)
    phases = {phase for one in measured for phase in one.seconds}
    return {
        "tokens_per_second": round(speed, 2),
        "spread": [round(one, 2) for one in spread],
        "tokens_per_step": round(tokens_per_step(tokens, steps) or 0.0, 3),
        "drafted_per_depth": by_place(one.drafted_per_depth for one in measured),
        "accepted_per_depth": accepted,
        "accepted_by_depth": ByDepth.of(accepted, sum(one.drafts for one in measured)),
        "seconds": {phase: round(sum(one.seconds.get(phase, 0.0) for one in measured), 4) for phase in sorted(phases)},
    }


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    from foresay.server.cli.check.summary import why_unknown

    prompts = f"{report['prompts']} prompts of {report['max_tokens']} tokens, {report['rounds']} rounds"
    rows = [("", "tokens/s", "lowest to highest", "tokens per step")]
    for name, who in (("on", f"drafted by {report['drafter']}"), ("off", "plain decoding")):
        one = report[name]
        low, high = one["spread"]
        rows.append(
            (who, f"{one['tokens_per_second']:.1f}", f"{low:.1f} to {high:.1f}", f"{one['tokens_per_step']:.2f}")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))]
        )
        for first, *cells in rows
    ]
    same = "both wrote the same tokens" if report["same_tokens"] else "they did NOT write the same tokens"
    gain = "" if report["speedup"] is None else f"{report['speedup']:.2f} times as fast with drafts"
    if unknown := why_unknown(report["speedup_spread"]):
        gain = f"cannot tell how much drafts gain{f' ({gain})' if gain else ''}: {unknown}"
    return "\n".join(
        [
            f"{report['target']}, {report['dtype']}, temperature {report['temperature']:g}, {prompts}",
            *lines,
            f"{gain}; {same}",
        ]
    )


BENCH = Command(
    "bench",
    "measure what speculation gives on this machine",
    ("foresay bench", "foresay bench --draft ngram --temperature 0 --rounds 10"),
    BenchConfig,
    bench,
    _add_bench_arguments,
)


# -- foresay selfcheck -------------------------------------------------------------------------------------------------


def _add_selfcheck_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        metavar="PATH",
        help="the prompts: .txt (one per line), .jsonl, a folder of such files, or - for standard input "
        "(default: those of foresay bench)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def selfcheck(config: SamplingConfig, arguments: Namespace) -> int:
    """Write every prompt with the drafter and plainly; 0 if all tokens are the same, 1 if not."""
    from foresay.drafters.training.progress import Progress
    from foresay.server.cli.progress import loaded
    from foresay.server.cli.selfcheck_prompts import check, rows, sentence

    if config.shadow is not None:
        raise ConfigurationError(
            "selfcheck compares the drafter in use with plain decoding: --shadow has no effect here"
        )
    prompts = prompts_of(arguments.prompts)
    samplings = _samplings(config)
    with (
        loaded(config) as engine,
        Progress("checked", len(prompts) * len(samplings), "answers") as progress,
    ):
        if arguments.prompts is None:
            prompts = [_short(engine, prompt) for prompt in prompts]
        report = check(engine, prompts, samplings, config.stop, progress.to)
    _show(report, arguments.json, [*rows(report), sentence(report)])
    return 1 if report.mismatches else 0


def prompts_of(path: str | None) -> list[Prompt]:
    """What ``--prompts`` says; raises ConfigurationError for a file of no use."""
    from foresay.drafters.training.prompts import Prompt, read_prompts

    if path is None:
        return [Prompt(text, f"prompt {number} of foresay bench") for number, text in enumerate(PROMPTS, start=1)]
    return read_prompts(Path("/dev/stdin" if path == "-" else path))


def _short(engine: Engine, prompt: Prompt) -> Prompt:
    """A prompt of ours, cut so that half of the context is left to write in."""
    assert isinstance(prompt.content, str), "ours are texts"
    ids, most = engine.tokenizer.encode(prompt.content), max(1, engine.info.max_model_len // 2)
    return prompt if len(ids) <= most else replace(prompt, content=engine.tokenizer.decode(ids[:most]))


def _samplings(config: SamplingConfig) -> list[SamplingParams]:
    """At temperature 0 and at the one that was asked for."""
    params = msgspec.structs.replace(sampling_params(config), seed=0 if config.seed is None else config.seed)
    return [msgspec.structs.replace(params, temperature=at) for at in sorted({0.0, params.temperature})]


def _show(report: Report, as_json: bool, lines: Sequence[str]) -> None:
    print(msgspec.json.encode(report).decode() if as_json else "\n".join(lines), file=sys.stdout, flush=True)


SELFCHECK = Command(
    "selfcheck",
    "decode prompts with and without drafts, and compare every token",
    (
        "foresay selfcheck",
        "foresay selfcheck Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompts prompts.txt --temperature 0.7",
    ),
    SamplingConfig,
    selfcheck,
    _add_selfcheck_arguments,
)
