"""From the engine's word of a run to what a client is told of its steps and tokens.

::

    run         a  b  c  d          d is the target's own, behind three accepted drafts
    the text    a  b|               it ends with b: a stop string
    told        step: accepted 2, discarded 2      tokens: a (depth 1), b (depth 2)
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from server.schemas.provenance import Source, StepProvenance, TokenProvenance
from server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart
from spec.request import Origin, TokenLogprobs


class TokenText(msgspec.Struct, frozen=True):
    """What one token adds to an answer: text as the model wrote it, and the parts it is split into."""

    text: str
    parts: list[Part]


def step_of(origin: Origin, kept: int, made: int) -> StepProvenance:
    """What a step did for an answer. kept: tokens of its run that are in the answer, of those it ``made``."""
    return StepProvenance(
        step=origin.step,
        drafter=origin.drafter or None,
        nodes=len(origin.parents),
        drafted=len(origin.parents) - 1,
        forced=origin.forced,
        accepted=min(len(origin.path), kept),
        discarded=made - kept,
        ms={phase: round(1000 * seconds, 3) for phase, seconds in origin.seconds.items()},
    )


def tokens_of(
    origin: Origin, tokens: Sequence[int], token_texts: Sequence[TokenText], logprobs: Sequence[TokenLogprobs]
) -> list[TokenProvenance]:
    """The tokens of a run, as far as they are in the answer. logprobs: one for each of them, or none."""
    told = [_token(origin, place, token, token_texts[place].parts) for place, token in enumerate(tokens)]
    for token, entry in zip(told, logprobs, strict=False):
        token.logprob = entry.logprob
    return told


def _token(origin: Origin, place: int, token: int, parts: Sequence[Part]) -> TokenProvenance:
    path = origin.path
    source: Source = "target" if place >= len(path) else "grammar" if path[place] <= origin.forced else "draft"
    told = TokenProvenance(id=token, text="", step=origin.step, origin=source, depth=0)
    if source != "target":
        told.depth = place + 1
    if source == "draft":
        told.drafter = origin.sources[place] if origin.sources else origin.drafter
    for part in parts:
        _say(told, part)
    return told


def _say(token: TokenProvenance, part: Part) -> None:
    match part:
        case TextPart(text=text):
            token.text += text
        case ReasoningPart(text=text):
            token.reasoning = text if token.reasoning is UNSET else token.reasoning + text
        case ToolCallPart(arguments=arguments) if arguments:
            token.arguments = arguments if token.arguments is UNSET else token.arguments + arguments
