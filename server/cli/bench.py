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
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import msgspec

from foresay.drafters.training.prompts import Prompt, read_prompts
from foresay.server.cli.command import JSON, argument, command
from foresay.server.cli.generate import sampling_params
from foresay.server.cli.measure import Speeds, Written, in_turns, rounded, rounded_pair, why_unknown
from foresay.server.cli.progress import loaded
from foresay.server.settings.config import BenchConfig
from foresay.server.settings.resolved import check_names
from foresay.server.settings.units import counted
from foresay.spec.accept import GAIN, ByDepth, summed, tokens_per_step
from foresay.spec.errors import ConfigurationError, InvalidRequest
from foresay.spec.names import NONE, SUFFIX
from foresay.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from foresay.server.host.local import Engine
    from foresay.server.host.text_stream import TextStream
    from foresay.spec.request import EngineInfo

PROMPTS = (
    "Once upon a time there was a little girl who",
    "The old king called his three sons together and said,",
    "Tom had 12 apples. He gave 5 of them to his sister. How many apples",
    "In the middle of the forest stood a house, and in that house",
)
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
    if not arguments.compare:
        report |= report.pop("ways")[0]
    print(msgspec.json.encode(report).decode() if arguments.json else "\n".join(table(report, config)))
    return 0


def _ways(config: BenchConfig, compared: Sequence[str] | None) -> dict[str, BenchConfig]:
    """The configurations to load, by name; the last is decoding without drafts."""
    names = [name for name in dict.fromkeys(compared or [config.draft]) if name != NONE]
    if not names:
        flag = "--compare" if compared else "--draft"
        raise ConfigurationError(f"there is nothing to compare: choose a drafter with {flag}")
    ways = {name: msgspec.structs.replace(config, draft=name) for name in names}
    for name, way in ways.items():
        if compared and not {SUFFIX, "auto"} & set(name.split(",")):
            ways[name] = msgspec.structs.replace(way, draft_history=None)
    return ways | {NONE: msgspec.structs.replace(config, draft=NONE, draft_tree=None, draft_history=None)}


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
    kept: dict[str, list[Written]] = {name: [] for name in engines}
    prompts = [_as_chat(engines[NONE], prompt) for prompt in prompts]
    written = count(1)

    def write(prompt: Prompt, params: SamplingParams, name: str) -> Written:
        completion = begun(engines[name], prompt, params, config.stop).result()
        progress(next(written))
        assert completion.statistics is not None, "a completion that ran to its end has statistics"
        return Written(completion.token_ids, completion.statistics, engines[name].crowded)

    for number in range(config.rounds + 1):
        params = msgspec.structs.replace(sampling_params(config), seed=(config.seed or 0) + number)
        for prompt in prompts:
            texts = in_turns(list(engines), number + 1, partial(write, prompt, params))
            if number > 0:
                for each, text in zip(kept.values(), texts, strict=True):
                    each.append(text)
    return _report(kept, {name: engine.info for name, engine in engines.items()}, len(prompts)) | {
        "rounds": config.rounds,
        "max_tokens": config.max_tokens or engines[NONE].usual_tokens,
        "temperature": sampling_params(config).temperature,
        "target": engines[NONE].info.target,
        "dtype": engines[NONE].info.dtype,
    }


def _report(kept: dict[str, list[Written]], infos: dict[str, EngineInfo], prompts: int) -> dict[str, Any]:
    """The report of the rounds. kept: the answers by way of drafting, in the order of the rounds."""
    crowded = mean(one.crowded for texts in kept.values() for one in texts)
    plain = kept.pop(NONE)
    ways = [_way(name, drafted, plain, crowded) | {"drafter": infos[name].drafter} for name, drafted in kept.items()]
    alone = [way.pop("off") for way in ways]
    return {
        "ways": ways,
        "off": alone[0],
        "winner": _winner(ways),
        "crowded": round(crowded, 3),
        "written": [mean(len(one.tokens) for one in plain[at::prompts]) for at in range(prompts)],
        "exact": all(infos[name].exact for name in kept),
        "prompts": prompts,
    }


def _as_chat(engine: Engine, prompt: Prompt) -> Prompt:
    """The prompt as a chat message, if the model has a chat template."""
    if not isinstance(prompt.content, str) or not engine.tokenizer.has_template:
        return prompt
    return replace(prompt, content=[{"role": "user", "content": prompt.content}])


def _way(name: str, drafted: list[Written], plain: list[Written], crowded: float) -> dict[str, Any]:
    """The results of one way of drafting."""
    pairs = list(zip(drafted, plain, strict=True))
    speeds = Speeds.of((on.statistics, off.statistics) for on, off in pairs)
    return {
        "draft": name,
        "on": _summarised(drafted, speeds.drafted, speeds.drafted_range),
        "off": _summarised(plain, speeds.plain, speeds.plain_range),
        "speedup": rounded(speeds.speedup),
        "speedup_spread": rounded_pair(speeds.spread),
        "speedup_interval": rounded_pair(speeds.interval),
        "cannot_tell": why_unknown(speeds, [one.statistics for one in drafted], crowded),
        "same_tokens": all(on.tokens == off.tokens for on, off in pairs),
    }


def _winner(ways: list[dict[str, Any]]) -> str | None:
    """The fastest of the ways that certainly gain; None if there is none."""
    sure = [way for way in ways if not way["cannot_tell"] and way["speedup"] >= GAIN]
    return max(sure, key=lambda way: way["speedup"])["draft"] if sure else None


def _summarised(texts: list[Written], speed: float, spread: tuple[float, float]) -> dict[str, Any]:
    """Totals of some answers. speed: 0 if none could be measured; then figures derived from it are None."""
    measured = [text.statistics for text in texts]
    steps, tokens = sum(one.steps for one in measured), sum(one.completion_tokens for one in measured)
    accepted = summed(one.accepted_per_depth for one in measured)
    phases = {phase for one in measured for phase in one.seconds}
    return {
        "tokens_per_second": round(speed, 2) if speed else None,
        "spread": [round(one, 2) for one in spread] if speed else None,
        "tokens_per_step": round(tokens_per_step(tokens, steps) or 0.0, 3) if speed else None,
        "drafted_per_depth": summed(one.drafted_per_depth for one in measured),
        "accepted_per_depth": accepted,
        "accepted_by_depth": ByDepth.of(accepted, sum(one.drafts for one in measured)),
        "seconds": {phase: round(sum(one.seconds.get(phase, 0.0) for one in measured), 4) for phase in sorted(phases)},
    }


def table(report: dict[str, Any], config: BenchConfig) -> list[str]:
    """The report for a reader, line by line."""
    ways = report.get("ways", [report])
    lines = [_head(report)]
    if report["off"]["tokens_per_second"] is None:
        return [*lines, ways[0]["cannot_tell"]]
    compared = "ways" in report
    rows = [("", "tokens/s", "lowest to highest", "tokens per step", *(["times as fast"] if compared else []))]
    for way in ways:
        label = way["draft"] if compared else f"drafted by {way['drafter']}"
        rows.append((label, *_cells(way["on"]), *([_times(way)] if compared else [])))
    rows.append((NONE if compared else "plain decoding", *_cells(report["off"]), *(["1.00"] if compared else [])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        rest = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *rest]))
    return [*lines, *(_choice(report, config) if compared else [_gain(report)])]


def _head(report: dict[str, Any]) -> str:
    """What was measured."""
    requested, written = report["max_tokens"], [f"{one:g}" for one in report["written"]]
    shown = ", ".join(written) if len(written) <= _SHOWN else f"{mean(report['written']):.1f} on average"
    prompts = f"{counted(report['prompts'], 'prompt')} of {counted(requested, 'token')} (written: {shown})"
    measured = f"{prompts}, {counted(report['rounds'], 'round')}"
    return f"{report['target']}, {report['dtype']}, temperature {report['temperature']:g}, {measured}"


def _cells(one: dict[str, Any]) -> tuple[str, str, str]:
    low, high = one["spread"]
    return f"{one['tokens_per_second']:.1f}", f"{low:.1f} to {high:.1f}", f"{one['tokens_per_step']:.2f}"


def _times(way: dict[str, Any]) -> str:
    return f"{way['speedup']:.2f}{' (cannot tell)' if way['cannot_tell'] else ''}"


def _same(way: dict[str, Any]) -> str:
    return "both wrote the same tokens" if way["same_tokens"] else "they did NOT write the same tokens"


def _gain(way: dict[str, Any]) -> str:
    """The gain from drafts, in one line."""
    gain = f"{way['speedup']:.2f} times as fast with drafts"
    unknown = way["cannot_tell"]
    if not sum(way["on"]["drafted_per_depth"]):
        gain = unknown
    elif unknown:
        gain = f"cannot tell how much drafts gain ({gain}): {unknown}"
    return f"{gain}; {_same(way)}"


def _choice(report: dict[str, Any], config: BenchConfig) -> Iterator[str]:
    """Which way to choose, with the command for it; before that, doubts about rows of the table."""
    unsure: dict[str, list[str]] = {}
    for way in report["ways"]:
        if way["cannot_tell"]:
            unsure.setdefault(way["cannot_tell"], []).append(way["draft"])
        if not way["same_tokens"]:
            yield f"{way['draft']}: {_same(way)}"
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
        return [Prompt(text, f"prompt {number} of foresay bench") for number, text in enumerate(PROMPTS, start=1)]
    return read_prompts(Path("/dev/stdin" if path == "-" else path))


def begun(engine: Engine, prompt: Prompt, params: SamplingParams, stop: Sequence[str]) -> TextStream:
    """Start the answer to a prompt. Raises ConfigurationError for one that cannot be served."""
    try:
        if isinstance(prompt.content, str):
            return engine.stream(prompt.content, params, stop=stop)
        return engine.stream_chat(prompt.content, params, stop=stop)
    except InvalidRequest as error:
        raise ConfigurationError(f"{prompt.where}: {error}") from None
