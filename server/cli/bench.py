"""``foresay bench``: measures what speculation gains on this machine, for these models.

Each round decodes every prompt with the drafter and without, in turns, so that a machine that slows down slows all
ways. Speeds are medians, and the speed-up is the quotient of the two that are shown. What may be due to chance is not
reported as a gain. Both ways give the same tokens if the engine is exact, and the report says whether they did.
"""

from __future__ import annotations

import math
import shlex
import statistics as averages
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from foresay.drafters.training.prompts import Prompt, read_prompts
from foresay.server.cli.command import JSON, argument, command
from foresay.server.cli.generate import sampling_params
from foresay.server.cli.progress import loaded
from foresay.server.settings.config import BenchConfig
from foresay.server.settings.resolved import check_names
from foresay.server.settings.units import aligned, counted
from foresay.spec.accept import GAIN, SCATTERED, ByDepth, summed, tokens_per_step
from foresay.spec.errors import ConfigurationError, InvalidRequest
from foresay.spec.names import NONE
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics

if TYPE_CHECKING:
    from foresay.server.engine_process.local import Engine, TextStream
    from foresay.server.engine_process.text_stream import Completion

#: What is measured on, and ``foresay prove`` too.
PROMPTS = (
    "Once upon a time there was a little girl who",
    "The old king called his three sons together and said,",
    "Tom had 12 apples. He gave 5 of them to his sister. How many apples",
    "In the middle of the forest stood a house, and in that house",
    "To make bread you need flour, water, salt and yeast. First,",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to you because",
)
#: How many of the prompts are used where none is named.
_USUAL = 4
#: Up to this many prompts, the number of tokens is shown for each.
_SHOWN = 8
#: The error probability of a speed-up's interval.
_DOUBT = 0.05
#: Texts with fewer tokens do not count for speed, unless all are shorter.
_SHORT = 8


@command(BenchConfig)
@argument(
    "--prompt",
    action="append",
    metavar="TEXT",
    help="measure on this prompt, in the model's chat template if it has one; may be repeated",
)
@argument(
    "--prompts",
    metavar="PATH",
    help="the prompts: .txt (one per line), .jsonl, a folder of such files, or - for standard input "
    "(default: those of foresay bench)",
)
@argument(
    "--compare",
    nargs="+",
    metavar="DRAFT",
    help="measure several values of --draft instead of the one that is set, each in its turn",
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
        print("\n".join(table(report, config)))
    else:
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
    texts: list[list[Completion]] = []
    for number in range(config.rounds + 1):
        params = msgspec.structs.replace(usual, seed=(config.seed or 0) + number)
        order = slice(None, None, 1 if number % 2 else -1)
        for prompt in prompts:
            each = []
            for name in ways[order]:
                each.append(begun(engines[name], prompt, params, config.stop).result())
                progress(next(written))
            texts += [each[order]] if number else []
    compared = [
        Comparison.of([(each[at], each[-1]) for each in texts], usual.temperature, name, engines[name].info.drafter)
        for at, name in enumerate(ways[:-1])
    ]
    info = engines[NONE].info
    return {
        "ways": compared,
        "off": compared[0].off,
        "winner": _winner(compared),
        "written": [
            averages.mean(len(each[-1].token_ids) for each in texts[at :: len(prompts)]) for at in range(len(prompts))
        ],
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


def table(report: dict[str, Any], config: BenchConfig) -> list[str]:
    """The report for a reader, line by line."""
    ways: list[Comparison] = report["ways"]
    lines = [_head(report)]
    if report["off"].tokens_per_second is None:
        return [*lines, ways[0].cannot_tell]
    rows = [("", "tokens/s", "lowest to highest", "tokens per step", "times as fast")]
    names = [way.draft if way.draft == way.drafter else f"{way.draft} ({way.drafter})" for way in ways]
    rows += [(name, *_cells(way.on), _times(way)) for name, way in zip(names, ways, strict=True)]
    rows.append((NONE, *_cells(report["off"]), "1.00"))
    return [*lines, *aligned(rows, right=range(1, len(rows[0]))), *_choice(report, config)]


def _head(report: dict[str, Any]) -> str:
    """What was measured."""
    requested, written = report["max_tokens"], [f"{one:g}" for one in report["written"]]
    shown = ", ".join(written) if len(written) <= _SHOWN else f"{averages.mean(report['written']):.1f} on average"
    prompts = f"{counted(report['prompts'], 'prompt')} of {counted(requested, 'token')} (written: {shown})"
    measured = f"{prompts}, {counted(report['rounds'], 'round')}"
    return f"{report['target']}, {report['dtype']}, temperature {report['temperature']:g}, {measured}"


def _cells(one: Totals) -> tuple[str, str, str]:
    low, high = one.spread or (0.0, 0.0)
    return f"{one.tokens_per_second or 0.0:.1f}", f"{low:.1f} to {high:.1f}", f"{one.tokens_per_step or 0.0:.2f}"


def _times(way: Comparison) -> str:
    return f"{way.speedup or 0.0:.2f}{' (cannot tell)' if way.cannot_tell else ''}"


def _choice(report: dict[str, Any], config: BenchConfig) -> Iterator[str]:
    """Which way to choose, with the command for it; before that, what else is known of each row of the table."""
    for way in report["ways"]:
        if any(way.on.drafted_per_depth):
            yield f"{way.draft}: accepted by depth: {way.on.accepted_by_depth}"
        if way.cannot_tell:
            yield f"{way.draft}: cannot tell how much it gains: {way.cannot_tell}"
        if not way.same_tokens:
            yield f"{way.draft}: it did NOT write the tokens of {NONE}"
    winner = report["winner"]
    if winner is None:
        yield "no drafter is certain to gain, so keep the default, auto: it drafts only where it pays"
        return
    flags = ["--draft", winner]
    flags += [] if config.draft_tokens is None else ["--draft-tokens", str(config.draft_tokens)]
    flags += [] if config.draft_tree is None else ["--draft-tree", str(config.draft_tree)]
    yield f"the fastest: {shlex.join(['foresay', 'serve', config.target, *flags])}"


# -- what the texts show -----------------------------------------------------------------------------------------------


def _interval(each: Sequence[float]) -> tuple[float, float]:
    """The confidence interval of the median, by the sign test, which assumes no distribution."""
    ordered, cut, beyond = sorted(each), 0, 0.0
    while (beyond := beyond + math.comb(len(ordered), cut) / 2 ** len(ordered)) <= _DOUBT / 2:
        cut += 1
    cut = max(0, cut - 1)
    return ordered[cut], ordered[-1 - cut]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Some texts decoded in one way. tokens_per_second: the median, after the first tokens; spread: the lowest and the
    highest. None: no text has a speed."""

    tokens_per_second: float | None
    spread: tuple[float, float] | None
    tokens_per_step: float | None
    drafted_per_depth: list[int]
    accepted_per_depth: list[int]
    accepted_by_depth: ByDepth
    seconds: dict[str, float]

    @classmethod
    def of(cls, measured: Sequence[Statistics], speeds: Sequence[float]) -> Self:
        """speeds: of those that have one."""
        steps, tokens = sum(one.steps for one in measured), sum(one.completion_tokens for one in measured)
        accepted = summed(one.accepted_per_depth for one in measured)
        phases = sorted({phase for one in measured for phase in one.seconds})
        return cls(
            tokens_per_second=round(averages.median(speeds), 2) if speeds else None,
            spread=(round(min(speeds), 2), round(max(speeds), 2)) if speeds else None,
            tokens_per_step=round(tokens_per_step(tokens, steps) or 0.0, 3) if speeds else None,
            drafted_per_depth=summed(one.drafted_per_depth for one in measured),
            accepted_per_depth=accepted,
            accepted_by_depth=ByDepth.of(accepted, sum(one.drafts for one in measured)),
            seconds={phase: round(sum(one.seconds.get(phase, 0.0) for one in measured), 4) for phase in phases},
        )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Texts decoded with drafts, and without. speedup: quotient of the medians; None: no text has a speed.
    speedup_spread: the least and the greatest of single texts, between which it lies; speedup_interval: the 95 %
    confidence interval of their median. cannot_tell: why this does not show whether drafts gain; empty if it does.
    same_tokens: whether both ways gave the same tokens in all texts."""

    draft: str
    drafter: str
    temperature: float
    texts: int
    on: Totals
    off: Totals
    speedup: float | None
    speedup_spread: tuple[float, float] | None
    speedup_interval: tuple[float, float] | None
    cannot_tell: str
    same_tokens: bool

    @classmethod
    def of(cls, pairs: Sequence[Sequence[Completion]], temperature: float, draft: str = "", drafter: str = "") -> Self:
        """pairs: each text, decoded with drafts and without. One that ended with its prompt or its first token has no
        speed."""
        drafted, plain = ([_counts(pair[way]) for pair in pairs] for way in (0, 1))
        longer = [pair for pair in pairs if len(pair[1].token_ids) >= _SHORT] or pairs
        rates = [[_rate(_counts(one)) for one in pair] for pair in longer]
        timed = [pair for pair in rates if all(pair)]
        fast, slow = ([pair[way] for pair in timed] for way in (0, 1))
        each = [one / other for one, other in timed]
        speedup = averages.median(fast) / averages.median(slow) if timed else None
        interval = _interval(each) if timed else None
        return cls(
            draft=draft,
            drafter=drafter,
            temperature=temperature,
            texts=len(pairs),
            on=Totals.of(drafted, fast),
            off=Totals.of(plain, slow),
            speedup=None if speedup is None else round(speedup, 3),
            speedup_spread=(round(min(each), 3), round(max(each), 3)) if timed else None,
            speedup_interval=None if interval is None else (round(interval[0], 3), round(interval[1], 3)),
            cannot_tell=_why_unknown(speedup, each, drafted),
            same_tokens=all(on.token_ids == off.token_ids for on, off in pairs),
        )


def _counts(text: Completion) -> Statistics:
    assert text.statistics is not None, "a completion that ran to its end has statistics"
    return text.statistics


def _rate(one: Statistics) -> float:
    """Tokens per second of a text; 0 if it has no speed."""
    return one.decode_tokens_per_second if one.completion_tokens > 1 else 0.0


#: A speed-up near 1 whose interval is within this factor certainly means no gain.
_NEAR = 1.1


def _why_unknown(speedup: float | None, each: Sequence[float], drafted: Sequence[Statistics]) -> str:
    """Why these speeds do not show whether drafts gain, and what to do; empty if they do. each: the speed-ups of single
    texts. drafted: statistics of the drafted texts."""
    if speedup is None:
        return _nothing(drafted)
    if not any(one.drafted for one in drafted):
        return "nothing was drafted, so a difference is noise"
    least, most, (low, high) = min(each), max(each), _interval(each)
    if most > SCATTERED * least:
        return f"single texts lie between {least:.2f}x and {most:.2f}x: run this again when the machine is quiet"
    none = 1 / GAIN < speedup < GAIN and low >= 1 / _NEAR and high <= _NEAR
    if min(low, speedup) <= 1.0 <= max(high, speedup) and not none:
        return f"it may be anything between {low:.2f}x and {high:.2f}x; measure more texts, on a quiet machine"
    return ""


def _nothing(drafted: Sequence[Statistics]) -> str:
    """Why no text has a speed."""
    if max((one.completion_tokens for one in drafted), default=0) <= 1:
        return "the model ended after 1 token: nothing to measure"
    return "every text was over when its prompt was read; ask for longer ones"


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
