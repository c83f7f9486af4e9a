"""Statistics in answers: usage, and vLLM's ``metrics`` with ``speculative_decoding``."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from foresay.server.schemas import shared
from foresay.server.text.choice import Choice
from foresay.spec.accept import tokens_per_step


def usage(choices: Sequence[Choice]) -> shared.Usage:
    """Tokens of all choices so far. A prompt counts once, however many choices continue it."""
    prompts = [choice for choice in choices if choice.request.fork_of is None]
    prompt = sum(len(choice.request.prompt) for choice in prompts)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in prompts)
    counts = completion_details(choices)
    has_details = counts.reasoning_tokens or counts.accepted_prediction_tokens is not UNSET
    details = counts if has_details else UNSET
    return shared.Usage(prompt, completion, prompt + completion, shared.PromptTokensDetails(cached), details)


def completion_details(choices: Sequence[Choice]) -> shared.CompletionTokensDetails:
    """Details of the completion tokens; those about predictions only if there was one."""
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    if all(choice.request.prediction is None for choice in choices):
        return shared.CompletionTokensDetails(reasoning)
    accepted = sum(choice.accepted_prediction_tokens for choice in choices)
    return shared.CompletionTokensDetails(
        reasoning, accepted, sum(choice.rejected_prediction_tokens for choice in choices)
    )


def metrics(choices: Sequence[Choice], level: shared.MetricsLevel, exact: bool) -> shared.Metrics | None:
    """Times and drafting of all choices: the first choice's first token, the longest generation, counts added up.

    None if not wanted, or if a choice ended without statistics.
    """
    known = [choice.statistics for choice in choices if choice.statistics is not None]
    if level == "none" or len(known) < len(choices):
        return None
    decode = max(statistics.decode_seconds for statistics in known)
    longest = max(choice.completion_tokens for choice in choices)
    per_step = tokens_per_step(
        sum(choice.completion_tokens for choice in choices), sum(statistics.steps for statistics in known)
    )
    return shared.Metrics(
        time_to_first_token_ms=_milliseconds(min(statistics.time_to_first_token for statistics in known)),
        generation_time_ms=_milliseconds(decode),
        queue_time_ms=_milliseconds(max(statistics.seconds.get("queue", 0.0) for statistics in known)),
        mean_itl_ms=_milliseconds(decode / (longest - 1)) if longest > 1 else None,
        tokens_per_second=round(sum(statistics.decode_tokens_per_second for statistics in known), 2),
        tokens_per_step=None if per_step is None else round(per_step, 4),
        exact=exact,
        resumed=max(len(statistics.ending.resumed) for statistics in known),
        speculative_decoding=speculative_decoding(choices, level),
    )


def timings(choices: Sequence[Choice]) -> shared.Timings | None:
    """The times of all choices together, in llama.cpp's format; None if one ended without statistics."""
    known = [choice.statistics for choice in choices if choice.statistics is not None]
    if len(known) < len(choices):
        return None
    counts = usage(choices)
    cached, written = counts.prompt_tokens_details.cached_tokens, counts.completion_tokens
    read, later = counts.prompt_tokens - cached, max(0, written - len(choices))  # first tokens come with the prompt
    prompt_ms = _milliseconds(max(0.0, *(one.time_to_first_token - one.seconds.get("queue", 0.0) for one in known)))
    decode_ms = _milliseconds(max(one.decode_seconds for one in known))
    drafting = speculative_decoding(choices, "summary")
    return shared.Timings(
        cache_n=cached,
        prompt_n=read,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, read),
        prompt_per_second=_ratio(1000 * read, prompt_ms),
        predicted_n=written,
        predicted_ms=decode_ms,
        predicted_per_token_ms=_ratio(decode_ms, later),
        predicted_per_second=_ratio(1000 * later, decode_ms),
        draft_n=UNSET if drafting is None else drafting.num_draft_tokens,
        draft_n_accepted=UNSET if drafting is None else drafting.num_accepted_draft_tokens,
    )


def _ratio(over: float, under: float) -> float:
    return over / under if under else 0.0


def speculative_decoding(choices: Sequence[Choice], level: shared.MetricsLevel) -> shared.SpeculativeDecoding | None:
    """Drafting statistics over the steps that drafted; None if no drafter is configured."""
    levels = max((choice.statistics.num_spec_tokens for choice in choices if choice.statistics), default=0)
    if levels == 0:
        return None
    steps = [step for choice in choices for step in drafting_steps(choice)]
    drafted = sum(drafted for drafted, _ in steps)
    accepted = sum(accepted for _, accepted in steps)
    histogram = [0] * (levels + 1)
    for _, count in steps:
        histogram[count] += 1
    detailed = level == "detailed"
    return shared.SpeculativeDecoding(
        mean_acceptance_length=round(1 + accepted / len(steps), 4) if steps else 1.0,
        draft_acceptance_rate=round(accepted / drafted, 4) if drafted else 0.0,
        acceptance_histogram=histogram,
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=levels,
        per_step_accepted=[accepted for _, accepted in steps] if detailed else UNSET,
        per_step_drafted=[drafted for drafted, _ in steps] if detailed else UNSET,
    )


def drafting_steps(choice: Choice) -> list[tuple[int, int]]:
    """Drafted tokens of each step that drafted, and those accepted that are in the text."""
    steps = zip(choice.counts.per_step_drafted, choice.counts.per_step_accepted, strict=True)
    return [(drafted, accepted) for drafted, accepted in steps if drafted]


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
