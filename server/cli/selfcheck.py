"""``foresay selfcheck``: are the tokens on this machine those of plain decoding?"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from server.cli.command import Command
from server.cli.generate import sampling_params
from server.settings.config import SamplingConfig
from spec.errors import ConfigurationError

if TYPE_CHECKING:
    from drafters.training.prompts import Prompt
    from server.cli.selfcheck_prompts import Report
    from server.host.local import Engine
    from spec.sampling import SamplingParams


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        metavar="PATH",
        help="what to write on from: .txt (a prompt a line), .jsonl, a folder of such files, - for standard input "
        "(default: those of foresay bench)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(config: SamplingConfig, arguments: Namespace) -> int:
    """Write every prompt with the drafter and plainly; 0 if all tokens are the same, 1 if not."""
    from drafters.training.progress import Progress
    from server.cli.progress import loaded
    from server.cli.selfcheck_prompts import check, rows, sentence

    if config.shadow is not None:
        raise ConfigurationError("selfcheck compares the drafter in use with plain decoding: --shadow has no part")
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
    from drafters.training.prompts import Prompt, read_prompts
    from server.cli.bench import PROMPTS

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


COMMAND = Command(
    "selfcheck",
    "decode prompts with the drafter and plainly, and compare every token",
    (
        "foresay selfcheck",
        "foresay selfcheck Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompts prompts.txt --temperature 0.7",
    ),
    SamplingConfig,
    run,
    _add_arguments,
)
