"""Lookup drafters on recorded texts: exact, since a text does not depend on who drafts it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvpaging import PagePool, PageTable
from server.engine.drafters.registry import LOOKUPS
from server.engine.trace.reader import Told
from server.observe.replay.ways import Outcome, Way
from spec.errors import ConfigurationError
from spec.noise import Noise
from spec.sampling import SamplingParams
from spec.sequence import SequenceState
from spec.walk import Walk

#: Tokens of a prompt that the engine reads in a step, about: a drafter is shown as many at a time.
_CHUNK = 256


def judge(way: Way, requests: Iterable[Told]) -> Outcome:
    """Draft again, with one drafter for all requests but those with a grammar, which prunes what is drafted and forces
    more. Raises ConfigurationError if the trace has no text."""
    assert way.shape is not None, "a lookup drafter is told how far ahead to draft"
    drafter, outcome, seconds = LOOKUPS[way.source](), Outcome(), 0.0
    for told in requests:
        if told.begin.grammar:
            continue
        text, prompt = told.output(), told.begin.tokens
        if text is None or prompt is None:
            raise ConfigurationError(
                f"--draft {way.text}: the trace holds no tokens to look up; record one with --trace-text"
            )
        walk = Walk(drafter, way.shape, _sequence(told, prompt))
        for _ in range(len(prompt) // _CHUNK):
            walk.read()
        # The step that computes the prompt drafts nothing, whoever drafts.
        walk.begin(text[: told.parts[0].emitted] if told.parts[0].lead else [])
        begun = time.perf_counter()
        walk.follow([*prompt, *text], over=True)
        seconds += time.perf_counter() - begun
        walk.close()
        for drafted, accepted in zip(walk.trace.per_step_drafted, walk.trace.per_step_accepted, strict=True):
            outcome.count(drafted, drafted, accepted)
    outcome.seconds = seconds
    return outcome


def _sequence(told: Told, prompt: list[int]) -> SequenceState:
    """The request as far as a lookup drafter looks at it."""
    return SequenceState(
        id=told.begin.id,
        tokens=prompt,
        prompt_length=len(prompt),
        sampling=SamplingParams(),
        table=PageTable(PagePool(2)),
        noise=Noise(0, 1),
        limit=told.begin.limit,
        stop_ids=frozenset(),
    )
