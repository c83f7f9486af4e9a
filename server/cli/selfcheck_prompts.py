"""Prompts decoded with the drafter and then plainly, and compared: for ``foresay selfcheck``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from foresay.drafters.training.prompts import Prompt
from foresay.server.observe.selfcheck import Difference, RecordedAnswer, difference
from foresay.server.observe.telemetry.report import from_counts
from foresay.spec.errors import ConfigurationError, InvalidRequest
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from foresay.server.host.local import Engine
    from foresay.server.host.text_stream import Completion, TextStream


class Checked(msgspec.Struct, kw_only=True):
    """One answer. prompt: its number, from 1; where: its source. steps: target passes for the tokens. difference: the
    first difference from plain decoding; None if there is none."""

    prompt: int
    where: str
    temperature: float
    seed: int
    tokens: int
    steps: int
    tokens_per_step: float
    difference: Difference | None


class SelfCheckReport(msgspec.Struct, kw_only=True):
    """All answers, and the engine. tokens: of all answers; mismatches: number of answers that differ. exact: whether
    the engine claims that none can."""

    target: str
    drafter: str
    dtype: str
    device: str
    exact: bool
    exact_reason: str
    answers: list[Checked]
    tokens: int
    mismatches: int


def check(
    engine: Engine,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingParams],
    stop: Sequence[str] = (),
    done: Callable[[int], None] = lambda answers: None,
) -> SelfCheckReport:
    """Decode every prompt with each of ``samplings``, as many at once as the engine takes; then each one plainly,
    alone.

    done: called with the number of compared answers. Raises ConfigurationError for a prompt that cannot be served.
    """
    pairs = [(number, prompt, params) for params in samplings for number, prompt in enumerate(prompts, start=1)]
    answers: list[Checked] = []
    ids = (f"plainly-{number}" for number in count())
    for begin in range(0, len(pairs), engine.info.max_seqs):
        group = pairs[begin : begin + engine.info.max_seqs]
        streams = [begun(engine, prompt, params, stop) for _, prompt, params in group]
        completions = [stream.result() for stream in streams]
        for (number, prompt, params), completion in zip(group, completions, strict=True):
            found = _differing(engine, completion, params, next(ids))
            answers.append(_checked(number, prompt, params, completion, found))
            done(len(answers))
    return _report(engine, answers)


def begun(engine: Engine, prompt: Prompt, params: SamplingParams, stop: Sequence[str]) -> TextStream:
    """Start the answer to a prompt. Raises ConfigurationError for one that cannot be served."""
    try:
        if isinstance(prompt.content, str):
            return engine.stream(prompt.content, params, stop=stop)
        return engine.stream_chat(prompt.content, params, stop=stop)
    except InvalidRequest as error:
        raise ConfigurationError(f"{prompt.where}: {error}") from None


def _differing(engine: Engine, completion: Completion, params: SamplingParams, id: str) -> Difference | None:
    """Decode the answer again plainly, and compare."""
    written = completion.token_ids
    sampled = msgspec.structs.replace(params, seed=completion.seed)
    request = Request(id=id, prompt=completion.prompt_token_ids, params=sampled)
    plain = engine.run(RecordedAnswer(request, written).plainly(id)).result().token_ids
    return difference(written, plain, over=True)


def _checked(
    number: int, prompt: Prompt, params: SamplingParams, completion: Completion, found: Difference | None
) -> Checked:
    statistics, tokens = completion.statistics, len(completion.token_ids)
    assert statistics is not None, "a completion that ran to its end has statistics"
    return Checked(
        prompt=number,
        where=prompt.where,
        temperature=params.temperature,
        seed=completion.seed,
        tokens=tokens,
        steps=statistics.steps,
        tokens_per_step=round(statistics.tokens_per_step or 0.0, 3),
        difference=found,
    )


def _report(engine: Engine, answers: list[Checked]) -> SelfCheckReport:
    return from_counts(
        SelfCheckReport,
        engine.info,
        answers=answers,
        tokens=sum(answer.tokens for answer in answers),
        mismatches=sum(answer.difference is not None for answer in answers),
    )


def rows(report: SelfCheckReport) -> Iterator[str]:
    """The report as a table, a line for each answer."""
    yield "prompt   temperature   tokens   steps   tokens/step   plain decoding"
    for one in report.answers:
        figures = f"{one.prompt:>6}   {one.temperature:>11g}   {one.tokens:>6}   {one.steps:>5}"
        yield f"{figures}   {one.tokens_per_step:>11.2f}   {_described(one.difference)}"


def _described(found: Difference | None) -> str:
    if found is None:
        return "the same"
    plain = "ends there" if found.plain is None else f"writes {found.plain}"
    return f"{plain} where output token {found.position} is {found.written}"


def sentence(report: SelfCheckReport) -> str:
    """The result, compared with the engine's claim, in a sentence."""
    count = len(report.answers)
    if not report.mismatches:
        line = f"Plain decoding writes the same: {count} answers, {report.tokens} tokens."
        return line if report.exact else f"{line} This machine does not promise it, though: {report.exact_reason}"
    differ = f"{report.mismatches} of {count} answers differ from plain decoding"
    if report.exact:
        return f"{differ}, although this engine claims to be exact. That is a fault of Foresay: please report it."
    return f"{differ}. This engine did not claim to be exact: {report.exact_reason}"
