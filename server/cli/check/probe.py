"""Load a pair and measure it: every text is decoded twice, drafted and plain, in turns, with the same weights. Both
texts must be equal. What that has measured, in numbers and in words; and a report for people: one row per finding."""

from __future__ import annotations

import os
import statistics as averages
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from foresay.server.cli.measure import (
    Speeds,
    Twice,
    Written,
    factor,
    in_turns,
    rounded,
    rounded_pair,
    why_unknown,
)
from foresay.server.cli.progress import Stages
from foresay.server.engine.build import build_engine
from foresay.server.engine.checks import CheckReport, Measured
from foresay.server.engine.drafting import DEFAULT_TOKENS
from foresay.server.engine.parameters import pinned
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.accept import GAIN, SHOWN, ByDepth, summed, tokens_per_step
from foresay.spec.engine import Engine
from foresay.spec.errors import ForesayError
from foresay.spec.request import EngineInfo, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.tree import ROOT_ONLY

PROMPTS = (
    "Once upon a time there was a little girl who",
    "The old king called his three sons together and said,",
    "To make bread you need flour, water, salt and yeast. First,",
    "def fibonacci(n):\n    ",
    "In the middle of the forest stood a house, and in that house",
    "Dear Sir or Madam,\n\nI am writing to you because",
)
TEMPERATURES = (0.0, 1.0)
#: Tokens of a text: few enough that each prompt gets its turn in time, enough to measure speeds.
_LEAST_TOKENS, _MOST_TOKENS = 16, 96
_WARM_UP_TOKENS = 8


class ProbeFailed(ForesayError):
    """The engine ended a text with an error."""


@dataclass(frozen=True, slots=True)
class Probed:
    """All decoded texts by temperature, and the engine's info."""

    info: EngineInfo
    texts: dict[float, list[Twice]]


def probe(config: EngineConfig, seconds: float) -> Probed:
    """Load the pair, then decode texts for ``seconds``, at least one at each temperature.

    Raises what loading raises, and ProbeFailed.
    """
    config = msgspec.structs.replace(config, prefix_cache=False)
    if "," not in config.draft and config.draft != "auto" and pinned(config) is None:
        # One drafter with a fixed shape, so that its acceptance by depth can be measured.
        config = msgspec.structs.replace(config, draft_tokens=DEFAULT_TOKENS)
    texts: dict[float, list[Twice]] = {temperature: [] for temperature in TEMPERATURES}
    with Stages() as stages:
        drafted = build_engine(config, stages)
        plain = _plain(drafted)
        prompts = _prompts(config, drafted.info)
        length = _tokens(plain, drafted, prompts, seconds)
        begun = time.perf_counter()
        for number in count():
            spent = time.perf_counter() - begun
            stages("probing", min(1.0, spent / seconds))
            if spent >= seconds and number >= len(TEMPERATURES):
                break
            temperature, turn = TEMPERATURES[number % len(TEMPERATURES)], number // len(TEMPERATURES)
            params = SamplingParams(temperature=temperature, seed=turn, max_tokens=length)
            write = partial(_write, prompts[turn % len(prompts)], params)
            texts[temperature].append(Twice(*in_turns((drafted, plain), turn, write)))
    return Probed(drafted.info, texts)


def _plain(drafted: Engine) -> Engine:
    """An engine with the same target and pages, without a drafter; the two are never used at the same time."""
    scheduler = Scheduler(drafted.pool, None, ROOT_ONLY, drafted.scheduler.cost, drafted.info.max_seqs)
    verifier = drafted.runner.verifier
    return Engine(
        info=drafted.info, pool=drafted.pool, prefix=None, verifier=verifier, drafter=None, scheduler=scheduler
    )


def _prompts(config: EngineConfig, info: EngineInfo) -> list[list[int]]:
    """The prompts as tokens, cut so that half of the context is left for output."""
    tokenizer = Tokenizer.load(target_directory(config))
    encoded = [tokenizer.encode(prompt)[: max(1, info.max_model_len // 2)] for prompt in PROMPTS]
    return [[token for token in ids if token < info.vocab_size] or [0] for ids in encoded]


def _tokens(plain: Engine, drafted: Engine, prompts: list[list[int]], seconds: float) -> int:
    """How long texts may be, so that each prompt is decoded both ways at both temperatures in about ``seconds``."""
    warm_up = SamplingParams(temperature=1.0, seed=0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    _write(prompts[0], warm_up, drafted)
    speed = _write(prompts[0], warm_up, plain).statistics.decode_tokens_per_second
    fits = int(speed * seconds / (2 * len(TEMPERATURES) * len(prompts)))
    room = plain.info.max_model_len - max(map(len, prompts)) - 1
    return max(1, min(max(fits, _LEAST_TOKENS), _MOST_TOKENS, room))


def _write(prompt: Sequence[int], params: SamplingParams, engine: Engine) -> Written:
    """Decode one text, alone in the engine."""
    engine.add(Request(id="probe", prompt=list(prompt), params=params))
    tokens: list[int] = []
    while True:
        for delta in engine.step():
            tokens += delta.tokens
            if delta.finish_reason is not None:
                if delta.statistics is None or delta.error is not None:
                    raise ProbeFailed(f"a text ended with an error: {delta.error or delta.finish_reason}")
                return Written(tokens, delta.statistics, engine.trace.crowded if engine.trace else 0.0)


# -- numbers -----------------------------------------------------------------------------------------------------------

#: Texts with fewer tokens do not count for speed, unless all are shorter.
_SHORT = 8


def measured(temperature: float, texts: Sequence[Twice]) -> Measured:
    """The numbers of one temperature."""
    telling = [text for text in texts if len(text.plain.tokens) >= _SHORT] or list(texts)
    speeds = Speeds.of((text.drafted.statistics, text.plain.statistics) for text in telling)
    drafted = [text.drafted.statistics for text in texts]
    steps, tokens = sum(one.steps for one in drafted), sum(one.completion_tokens for one in drafted)
    accepted = summed(one.accepted_per_depth for one in drafted)
    crowded = averages.mean(text.drafted.crowded for text in texts)
    spent = sum(seconds for one in drafted for phase, seconds in one.seconds.items() if phase != "queue")
    return Measured(
        temperature=temperature,
        runs=len(texts),
        tokens=tokens,
        speedup=rounded(speeds.speedup),
        spread=rounded_pair(speeds.spread),
        interval=rounded_pair(speeds.interval),
        crowded=round(crowded, 3),
        unknown=why_unknown(speeds, drafted, crowded),
        drafted_speed=round(speeds.drafted, 2),
        plain_speed=round(speeds.plain, 2),
        tokens_per_step=round(tokens_per_step(tokens, steps) or 0.0, 3),
        propose_share=round(sum(one.seconds.get("propose", 0.0) for one in drafted) / max(spent, 1e-9), 3),
        accepted_by_depth=ByDepth.of(accepted, sum(one.drafts for one in drafted)),
        same_tokens=all(text.drafted.tokens == text.plain.tokens for text in texts),
    )


# -- what the numbers mean --------------------------------------------------------------------------------


#: Below this many tokens per step the drafter is hardly ever right.
_SELDOM_RIGHT = 1.4
#: Above this share of a step's time the drafter itself is too slow.
_COSTLY = 0.35


def advice(measured: Sequence[Measured], levels: int) -> str:
    """Advice in a sentence. levels: draft depth of each step."""
    speeds = [one.speedup for one in measured if one.speedup is not None]
    each = " and ".join(f"{factor(one.speedup)} at temperature {one.temperature:g}" for one in measured if one.speedup)
    if unknown := next(filter(None, (one.unknown for one in measured)), ""):
        return f"Cannot tell how much it gains{f' ({each})' if each else ''}: {unknown}."
    if min(speeds) >= GAIN:
        return f"On this machine this pair writes faster than the target alone: {each}."
    if max(speeds) < GAIN:
        slow = "slower than" if max(speeds) <= 1 / GAIN else "no faster than"
        return f"On this machine this pair is {slow} the target alone ({each}): {_change(measured, levels)}."
    better = max(measured, key=lambda one: one.speedup or 0.0).temperature
    return f"On this machine this pair gains only at temperature {better:g} ({each}): {_change(measured, levels)}."


def gains(before: Sequence[Measured], after: Sequence[Measured]) -> bool:
    """Whether ``after`` is significantly faster at every temperature."""
    pairs = zip(before, after, strict=True)
    if any(one.unknown for one in after):
        return False
    return all((later.speedup or 0.0) >= GAIN * (earlier.speedup or 1.0) for earlier, later in pairs)


def _change(measured: Sequence[Measured], levels: int) -> str:
    """The likeliest cause, and what to do about it."""
    per_step = min(one.tokens_per_step for one in measured)
    share = max(one.propose_share for one in measured)
    fewer = f", or draft less (--draft-tokens {max(1, levels // 2)})" if levels > 1 else ""
    if per_step < _SELDOM_RIGHT:
        return (
            f"a step writes only {per_step:.2f} tokens, so the drafter is seldom right; use one made for this target, "
            "or --draft none"
        )
    if share > _COSTLY:
        return f"drafting takes {share:.0%} of the time; use a smaller drafter{fewer}, or --draft none"
    return f"checking the drafts costs more than they save; use --draft none{fewer}"


_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}


def show(report: CheckReport, out: TextIO) -> None:
    """Print the report: laid out and in colour on a terminal (``NO_COLOR`` keeps colours away), else as plain lines."""
    if out.isatty():
        _show_rich(report, out)
    else:
        out.write(plain(report))
    out.flush()


def plain(report: CheckReport) -> str:
    """One line per finding, and one for its fix."""
    width = max(len(finding.subject) for finding in report.findings)
    lines = [f"{report.target} with --draft {report.draft}"]
    for finding in report.findings:
        lines.append(f"{finding.status:<4}  {finding.subject:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"      {'':<{width}}  fix: {finding.fix}")
    lines += ["  ".join(row) for row in _measured_rows(report.probe)]
    return "\n".join([*lines, *filter(None, [report.verdict, report.recommended]), ""])


def _show_rich(report: CheckReport, out: TextIO) -> None:
    console = Console(file=out, highlight=False, no_color=bool(os.environ.get("NO_COLOR")))
    console.print(Text.assemble((report.target, "bold"), " with --draft ", (report.draft, "bold")))
    console.print(_findings(report))
    if report.probe:
        console.print(_measurements(report.probe))
    console.print(Text(report.verdict, style="bold green" if report.works else "bold red"))
    if report.recommended:
        console.print(Text(report.recommended))


def _findings(report: CheckReport) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for finding in report.findings:
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\nfix: {finding.fix}", style="italic")
        grid.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.subject, style="dim"), text)
    return grid


def _measurements(probe: list[Measured]) -> RenderableType:
    """The table, and below it what does not fit a column."""
    header, *rows = (row[:-1] for row in _measured_rows(probe))
    table = Table(*header, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    shares = [(one.temperature, one.accepted_by_depth.cumulative) for one in probe]
    depths = [f"{' '.join(f'{share:.0%}' for share in each[:SHOWN])} at T {at:g}" for at, each in shares if each]
    return Group(table, *[Text(f"accepted at depth 1, 2, ...: {line}") for line in depths])


def _measured_rows(probe: list[Measured]) -> list[tuple[str, ...]]:
    """A table of the measurements, with a header; empty if there are none."""
    if not probe:
        return []
    rows: list[tuple[str, ...]] = [("T", "speed-up", "tokens/s", "alone", "tokens per step", "accepted by depth")]
    for one in probe:
        spread = "" if one.spread is None else f" ({one.spread[0]:.2f} to {one.spread[1]:.2f})"
        speeds = (f"{one.drafted_speed:.1f}", f"{one.plain_speed:.1f}", f"{one.tokens_per_step:.2f}")
        rows.append(
            (
                f"{one.temperature:g}",
                f"{factor(one.speedup)}{spread}",
                *speeds,
                str(one.accepted_by_depth),
            )
        )
    return rows
