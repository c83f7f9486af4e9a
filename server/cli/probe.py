"""Load a pair and measure it: every text is decoded drafted and plain, with the same weights. What that has measured,
in words; and a report for people: one row per finding."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from foresay.server.cli.measure import PROMPTS, Comparison, Written, factor, in_turns
from foresay.server.cli.progress import Stages
from foresay.server.engine.build import build_engine
from foresay.server.engine.checks import Finding
from foresay.server.engine.drafting import DEFAULT_TOKENS
from foresay.server.engine.parameters import pinned
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.accept import GAIN
from foresay.spec.engine import EngineCore
from foresay.spec.errors import ForesayError
from foresay.spec.request import EngineInfo, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.tree import ROOT_ONLY

TEMPERATURES = (0.0, 1.0)
#: Tokens of a text: few enough that each prompt gets its turn in time, enough to measure speeds.
_LEAST_TOKENS, _MOST_TOKENS = 16, 96
_WARM_UP_TOKENS = 8


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. works: nothing failed. probe: measurements by temperature, if requested.

    recommended: a draft known to suit the target, if none was requested or the requested one does not fit.
    """

    target: str
    draft: str
    works: bool
    verdict: str
    findings: list[Finding]
    probe: list[Comparison] = []
    recommended: str = ""


class ProbeFailed(ForesayError):
    """The engine ended a text with an error."""


class _ProbeText(NamedTuple):
    """One text to decode."""

    prompt: list[int]
    params: SamplingParams


def probe(config: EngineConfig, seconds: float) -> tuple[EngineInfo, list[Comparison]]:
    """Load the pair, then decode texts for ``seconds``, at least one at each temperature. Returns what was measured at
    each of them.

    Raises what loading raises, and ProbeFailed.
    """
    config = msgspec.structs.replace(config, prefix_cache=False)
    if "," not in config.draft and config.draft != "auto" and pinned(config) is None:
        # One drafter with a fixed shape, so that its acceptance by depth can be measured.
        config = msgspec.structs.replace(config, draft_tokens=DEFAULT_TOKENS)
    pairs: dict[float, list[list[Written]]] = {temperature: [] for temperature in TEMPERATURES}
    with Stages() as stages:
        drafted = build_engine(config, stages)
        plain = _plain(drafted)
        prompts = _prompts(config, drafted.info)
        length = _tokens(plain, drafted, prompts, seconds)
        for text, pair in in_turns((drafted, plain), _texts(prompts, length, seconds, stages), _write):
            pairs[text.params.temperature].append(pair)
    return drafted.info, [Comparison.of(texts, temperature) for temperature, texts in pairs.items()]


def _texts(prompts: list[list[int]], length: int, seconds: float, stages: Stages) -> Iterator[tuple[int, _ProbeText]]:
    """The prompts in turn, each at each temperature, for so long."""
    begun, number = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < seconds or number < len(TEMPERATURES):
        stages("probing", min(1.0, spent / seconds))
        turn, at = divmod(number, len(TEMPERATURES))
        params = SamplingParams(temperature=TEMPERATURES[at], seed=turn, max_tokens=length)
        yield turn, _ProbeText(prompts[turn % len(prompts)], params)
        number += 1


def _plain(drafted: EngineCore) -> EngineCore:
    """An engine with the same target and pages, without a drafter; the two are never used at the same time."""
    scheduler = Scheduler(drafted.pool, None, ROOT_ONLY, drafted.scheduler.cost, drafted.info.max_seqs)
    verifier = drafted.runner.verifier
    return EngineCore(
        info=drafted.info, pool=drafted.pool, prefix=None, verifier=verifier, drafter=None, scheduler=scheduler
    )


def _prompts(config: EngineConfig, info: EngineInfo) -> list[list[int]]:
    """The prompts as tokens, cut so that half of the context is left for output."""
    tokenizer = Tokenizer.load(target_directory(config))
    encoded = [tokenizer.encode(prompt)[: max(1, info.max_model_len // 2)] for prompt in PROMPTS]
    return [[token for token in ids if token < info.vocab_size] or [0] for ids in encoded]


def _tokens(plain: EngineCore, drafted: EngineCore, prompts: list[list[int]], seconds: float) -> int:
    """How long texts may be, so that each prompt is decoded both ways at both temperatures in about ``seconds``."""
    warm_up = SamplingParams(temperature=1.0, seed=0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    text = _ProbeText(prompts[0], warm_up)
    _write(text, drafted)
    speed = _write(text, plain).statistics.decode_tokens_per_second
    fits = int(speed * seconds / (2 * len(TEMPERATURES) * len(prompts)))
    room = plain.info.max_model_len - max(map(len, prompts)) - 1
    return max(1, min(max(fits, _LEAST_TOKENS), _MOST_TOKENS, room))


def _write(text: _ProbeText, engine: EngineCore) -> Written:
    """Decode one text, alone in the engine."""
    engine.add(Request(id="probe", prompt=list(text.prompt), params=text.params))
    tokens: list[int] = []
    while True:
        for delta in engine.step():
            tokens += delta.tokens
            if delta.finish_reason is not None:
                if delta.statistics is None or delta.error is not None:
                    raise ProbeFailed(f"a text ended with an error: {delta.error or delta.finish_reason}")
                return Written(tokens, delta.statistics, engine.trace.crowded if engine.trace else 0.0)


# -- what the numbers mean --------------------------------------------------------------------------------


#: Below this many tokens per step the drafter is hardly ever right.
_SELDOM_RIGHT = 1.4
#: Above this share of a step's time the drafter itself is too slow.
_COSTLY = 0.35


def advice(measured: Sequence[Comparison], levels: int) -> str:
    """Advice in a sentence. levels: draft depth of each step."""
    speeds = [one.speedup for one in measured if one.speedup is not None]
    each = " and ".join(f"{factor(one.speedup)} at temperature {one.temperature:g}" for one in measured if one.speedup)
    if unknown := next(filter(None, (one.cannot_tell for one in measured)), ""):
        return f"Cannot tell how much it gains{f' ({each})' if each else ''}: {unknown}."
    if min(speeds) >= GAIN:
        return f"On this machine this pair writes faster than the target alone: {each}."
    if max(speeds) < GAIN:
        slow = "slower than" if max(speeds) <= 1 / GAIN else "no faster than"
        return f"On this machine this pair is {slow} the target alone ({each}): {_change(measured, levels)}."
    better = max(measured, key=lambda one: one.speedup or 0.0).temperature
    return f"On this machine this pair gains only at temperature {better:g} ({each}): {_change(measured, levels)}."


def _change(measured: Sequence[Comparison], levels: int) -> str:
    """The likeliest cause, and what to do about it."""
    per_step = min(one.on.tokens_per_step or 0.0 for one in measured)
    share = max(one.on.propose_share for one in measured)
    fewer = f", or draft less (--draft-tokens {max(1, levels // 2)})" if levels > 1 else ""
    if per_step < _SELDOM_RIGHT:
        return (
            f"a step writes only {per_step:.2f} tokens, so the drafter is seldom right; use one made for this target, "
            "or --draft none"
        )
    if share > _COSTLY:
        return f"drafting takes {share:.0%} of the time; use a smaller drafter{fewer}, or --draft none"
    return f"checking the drafts costs more than they save; use --draft none{fewer}"


def plain(report: CheckReport) -> str:
    """The report for people: one line per finding, and one for its fix."""
    width = max(len(finding.subject) for finding in report.findings)
    lines = [f"{report.target} with --draft {report.draft}"]
    for finding in report.findings:
        lines.append(f"{finding.status:<4}  {finding.subject:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"      {'':<{width}}  fix: {finding.fix}")
    lines += ["  ".join(row) for row in _measured_rows(report.probe)]
    return "\n".join([*lines, *filter(None, [report.verdict, report.recommended])])


def _measured_rows(probe: list[Comparison]) -> Iterator[tuple[str, ...]]:
    """A table of the measurements, with a header; empty if there are none."""
    if probe:
        yield "T", "speed-up", "tokens/s", "alone", "tokens per step", "accepted by depth"
    for one in probe:
        low_high = one.speedup_spread
        spread = "" if low_high is None else f" ({low_high[0]:.2f} to {low_high[1]:.2f})"
        speeds = (one.on.tokens_per_second, one.off.tokens_per_second)
        yield (
            f"{one.temperature:g}",
            f"{factor(one.speedup)}{spread}",
            *(f"{speed or 0.0:.1f}" for speed in speeds),
            f"{one.on.tokens_per_step or 0.0:.2f}",
            str(one.on.accepted_by_depth),
        )
