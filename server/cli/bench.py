"""``foresay bench``: measures what speculation gains on this machine, for these models.

Each round of a bench decodes every prompt with the drafter and without, in turns. Both ways give the same tokens if the
engine is exact, and the report says whether they did, or that it cannot tell whether drafts gain.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import msgspec

from foresay.drafters.training.prompts import Prompt, read_prompts
from foresay.server.cli.command import JSON, argument, command, loaded
from foresay.server.cli.generate import sampling_params
from foresay.server.cli.measure import PROMPTS, Comparison, Totals, Written, in_turns
from foresay.server.settings.config import BenchConfig
from foresay.server.settings.resolved import check_names
from foresay.server.settings.units import counted
from foresay.spec.accept import GAIN
from foresay.spec.errors import ConfigurationError, InvalidRequest
from foresay.spec.names import NONE
from foresay.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from foresay.server.engine_process.local import Engine
    from foresay.server.engine_process.text_stream import TextStream

#: How many of the prompts are used where none is named.
_USUAL = 4
#: Up to this many prompts, the number of tokens is shown for each.
_SHOWN = 8


_PROMPTS = argument(
    "--prompts",
    metavar="PATH",
    help="the prompts: .txt (one per line), .jsonl, a folder of such files, or - for standard input "
    "(default: those of foresay bench)",
)


@command(BenchConfig)
@argument(
    "--prompt",
    action="append",
    metavar="TEXT",
    help="measure on this prompt, in the model's chat template if it has one; may be repeated",
)
@_PROMPTS
@argument(
    "--compare",
    nargs="+",
    metavar="DRAFT",
    help="measure several values of --draft instead of the one that is set, each in its turn, and say which to use",
)
@JSON
def bench(config: BenchConfig, arguments: Namespace) -> int:
    """Measure what speculation gives on this machine.

    foresay bench
    foresay bench --draft ngram --temperature 0 --rounds 10
    foresay bench Qwen/Qwen3-8B --compare auto Qwen/Qwen3-0.6B --prompts prompts.jsonl --rounds 1
    """
    from foresay.drafters.training.progress import ProgressBar

    config = msgspec.structs.replace(config, seed=0 if config.seed is None else config.seed)
    ways = _ways(config, arguments.compare)
    prompts = _bench_prompts(arguments)
    for way in ways.values():
        check_names(way)
    with ExitStack() as opened:
        engines = {name: opened.enter_context(loaded(way)) for name, way in ways.items()}
        if not arguments.compare and engines[config.draft].info.drafter == NONE:
            raise ConfigurationError("there is nothing to compare: choose a drafter with --draft")
        with ProgressBar("measured", len(ways) * (config.rounds + 1) * len(prompts), "answers") as progress:
            report = measure(engines, config, prompts, progress.to)
    if not arguments.json:
        print("\n".join(table(report, config, bool(arguments.compare))))
        return 0
    if not arguments.compare:
        report |= msgspec.structs.asdict(report.pop("ways")[0])
    print(msgspec.json.encode(report).decode())
    return 0


def _ways(config: BenchConfig, compared: Sequence[str] | None) -> dict[str, BenchConfig]:
    """The configurations to load, by name; the last is decoding without drafts."""
    names = [name for name in dict.fromkeys(compared or [config.draft]) if name != NONE]
    if not names:
        flag = "--compare" if compared else "--draft"
        raise ConfigurationError(f"there is nothing to compare: choose a drafter with {flag}")
    ways = {name: msgspec.structs.replace(config, draft=name) for name in names}
    return ways | {NONE: msgspec.structs.replace(config, draft=NONE, draft_tree=None)}


def _bench_prompts(arguments: Namespace) -> list[Prompt]:
    own = [Prompt(text, f"--prompt {number}") for number, text in enumerate(arguments.prompt or (), start=1)]
    return own + (prompts_of(arguments.prompts) if arguments.prompts or not own else [])


def measure(
    engines: dict[str, Engine],
    config: BenchConfig,
    prompts: Sequence[Prompt],
    progress: Callable[[int], None] = lambda written: None,
) -> dict[str, Any]:
    """Run the rounds, after one that is not counted; returns the report. engines: by name of the way to draft,
    including ``none``. progress: called with the number of answers so far."""
    ways, prompts = list(engines), [_as_chat(engines[NONE], prompt) for prompt in prompts]
    usual, written = sampling_params(config), count(1)

    def write(case: tuple[int, Prompt], name: str) -> Written:
        number, prompt = case
        params = msgspec.structs.replace(usual, seed=(config.seed or 0) + number)
        completion = begun(engines[name], prompt, params, config.stop).result()
        progress(next(written))
        assert completion.statistics is not None, "a completion that ran to its end has statistics"
        return Written(completion.token_ids, completion.statistics, engines[name].crowded)

    cases = ((number + 1, (number, prompt)) for number in range(config.rounds + 1) for prompt in prompts)
    texts = [each for (number, _), each in in_turns(ways, cases, write) if number > 0]
    compared = [
        Comparison.of([(each[at], each[-1]) for each in texts], usual.temperature, name, engines[name].info.drafter)
        for at, name in enumerate(ways[:-1])
    ]
    info = engines[NONE].info
    return {
        "ways": compared,
        "off": compared[0].off,
        "winner": _winner(compared),
        "crowded": round(mean(one.crowded for one in compared), 3),
        "written": [mean(len(each[-1].tokens) for each in texts[at :: len(prompts)]) for at in range(len(prompts))],
        "exact": all(engines[name].info.exact for name in ways[:-1]),
        "prompts": len(prompts),
        "rounds": config.rounds,
        "max_tokens": config.max_tokens or engines[NONE].usual_tokens,
        "temperature": usual.temperature,
        "target": info.target,
        "dtype": info.dtype,
    }


def _as_chat(engine: Engine, prompt: Prompt) -> Prompt:
    """The prompt as a chat message, if the model has a chat template."""
    if not isinstance(prompt.content, str) or not engine.tokenizer.has_template:
        return prompt
    return replace(prompt, content=[{"role": "user", "content": prompt.content}])


def _winner(ways: list[Comparison]) -> str | None:
    """The fastest of the ways that certainly gain; None if there is none."""
    sure = {way.draft: way.speedup for way in ways if not way.cannot_tell and (way.speedup or 0.0) >= GAIN}
    return max(sure, key=lambda name: sure[name] or 0.0) if sure else None


def table(report: dict[str, Any], config: BenchConfig, compared: bool) -> list[str]:
    """The report for a reader, line by line. compared: several ways were to be."""
    ways: list[Comparison] = report["ways"]
    lines = [_head(report)]
    if report["off"].tokens_per_second is None:
        return [*lines, ways[0].cannot_tell]
    rows = [("", "tokens/s", "lowest to highest", "tokens per step", *(["times as fast"] if compared else []))]
    for way in ways:
        label = way.draft if compared else f"drafted by {way.drafter}"
        rows.append((label, *_cells(way.on), *([_times(way)] if compared else [])))
    rows.append((NONE if compared else "plain decoding", *_cells(report["off"]), *(["1.00"] if compared else [])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        rest = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *rest]))
    if compared:
        return [*lines, *_choice(report, config)]
    if any(ways[0].on.drafted_per_depth):
        lines.append(f"accepted by depth: {ways[0].on.accepted_by_depth}")
    return [*lines, _gain(ways[0])]


def _head(report: dict[str, Any]) -> str:
    """What was measured."""
    requested, written = report["max_tokens"], [f"{one:g}" for one in report["written"]]
    shown = ", ".join(written) if len(written) <= _SHOWN else f"{mean(report['written']):.1f} on average"
    prompts = f"{counted(report['prompts'], 'prompt')} of {counted(requested, 'token')} (written: {shown})"
    measured = f"{prompts}, {counted(report['rounds'], 'round')}"
    return f"{report['target']}, {report['dtype']}, temperature {report['temperature']:g}, {measured}"


def _cells(one: Totals) -> tuple[str, str, str]:
    low, high = one.spread or (0.0, 0.0)
    return f"{one.tokens_per_second or 0.0:.1f}", f"{low:.1f} to {high:.1f}", f"{one.tokens_per_step or 0.0:.2f}"


def _times(way: Comparison) -> str:
    return f"{way.speedup or 0.0:.2f}{' (cannot tell)' if way.cannot_tell else ''}"


def _same(way: Comparison) -> str:
    return "both wrote the same tokens" if way.same_tokens else "they did NOT write the same tokens"


def _gain(way: Comparison) -> str:
    """The gain from drafts, in one line."""
    gain = f"{way.speedup or 0.0:.2f} times as fast with drafts"
    unknown = way.cannot_tell
    if not sum(way.on.drafted_per_depth):
        gain = unknown
    elif unknown:
        gain = f"cannot tell how much drafts gain ({gain}): {unknown}"
    elif (way.speedup or 0.0) < GAIN:
        gain = f"{gain}: use one made for this target, or --draft none"
    return f"{gain}; {_same(way)}"


def _choice(report: dict[str, Any], config: BenchConfig) -> Iterator[str]:
    """Which way to choose, with the command for it; before that, doubts about rows of the table."""
    unsure: dict[str, list[str]] = {}
    for way in report["ways"]:
        if way.cannot_tell:
            unsure.setdefault(way.cannot_tell, []).append(way.draft)
        if not way.same_tokens:
            yield f"{way.draft}: {_same(way)}"
    for why, names in unsure.items():
        yield f"{', '.join(names)}: cannot tell how much {'it gains' if len(names) == 1 else 'each gains'}: {why}"
    winner = report["winner"]
    if winner is None:
        yield "no drafter is certain to gain, so keep the default, auto: it drafts only where it pays"
        return
    flags = ["--draft", winner]
    flags += [] if config.draft_tokens is None else ["--draft-tokens", str(config.draft_tokens)]
    flags += [] if config.draft_tree is None else ["--draft-tree", str(config.draft_tree)]
    yield f"the fastest: {shlex.join(['foresay', 'serve', config.target, *flags])}"


# -- prompts -----------------------------------------------------------------------------------------------------------


def prompts_of(path: str | None) -> list[Prompt]:
    """The prompts of ``--prompts``, else the default ones. Raises ConfigurationError for a file that cannot be used."""
    if path is None:
        return [
            Prompt(text, f"prompt {number} of foresay bench") for number, text in enumerate(PROMPTS[:_USUAL], start=1)
        ]
    return read_prompts(Path("/dev/stdin" if path == "-" else path))


def begun(engine: Engine, prompt: Prompt, params: SamplingParams, stop: Sequence[str]) -> TextStream:
    """Start the answer to a prompt. Raises ConfigurationError for one that cannot be served."""
    try:
        if isinstance(prompt.content, str):
            return engine.stream(prompt.content, params, stop=stop)
        return engine.stream_chat(prompt.content, params, stop=stop)
    except InvalidRequest as error:
        raise ConfigurationError(f"{prompt.where}: {error}") from None
