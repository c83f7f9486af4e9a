"""The parts of an answer: text, reasoning, tool calls; the interface of parsers; and provenance.

A parser sees the output as a growing text, in pieces of any size, and the special tokens that it registered by id; its
result depends only on the whole, never on how it was cut into pieces.

From the tokens of an engine step to a client's provenance of steps and tokens::

    step        a  b  c  d          d is the target's own, after three accepted drafts
    the text    a  b|               it ends with b: a stop string
    reported    step: accepted 2, discarded 2      tokens: a (depth 1), b (depth 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import msgspec
from msgspec import UNSET

from foresay.server.schemas.chat import Source, StepProvenance, TokenProvenance
from foresay.spec.names import GRAMMAR
from foresay.spec.request import Origin, TokenLogprobs


class TextPart(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ReasoningPart(msgspec.Struct, frozen=True):
    """More of the reasoning before the answer."""

    text: str


class ToolCallPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a tool call. id, name: on the first piece of each call. arguments: more of their JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = TextPart | ReasoningPart | ToolCallPart


class OutputParser(Protocol):
    """Splits one choice's output into parts."""

    @property
    def markers(self) -> frozenset[int]:
        """Token ids that are passed to :meth:`marker` instead of becoming text."""

    @property
    def thinking(self) -> bool:
        """Whether the output so far ends in the middle of reasoning."""

    @property
    def heading(self) -> bool:
        """Whether the output so far ends between messages, in text that is part of none: no stop string is in it."""

    @property
    def complete(self) -> bool:
        """Whether the answer ends here, as at a stop string."""

    def feed(self, text: str) -> list[Part]:
        """Take more text; returns the parts that are now certain."""

    def marker(self, token: int) -> list[Part]:
        """A marker token between the text so far and what follows."""

    def flush(self) -> list[Part]:
        """The output has ended: what was held back."""


class PlainText:
    """The parser of a model that only writes text."""

    markers: frozenset[int] = frozenset()
    thinking = heading = complete = False

    def feed(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def marker(self, token: int) -> list[Part]:
        raise AssertionError("plain text has no markers")

    def flush(self) -> list[Part]:
        return []


def continues(part: Part, more: Part) -> bool:
    """Whether ``more`` continues the same text, reasoning or call as ``part``."""
    return _continued(part) == _continued(more)


def _continued(part: Part) -> tuple[type[Part], int]:
    """What a part belongs to: the text, the reasoning, or a call."""
    return type(part), part.index if isinstance(part, ToolCallPart) else 0


def part_text(part: Part) -> str:
    """A part's text; a call's arguments."""
    return part.arguments if isinstance(part, ToolCallPart) else part.text


def joined(parts: list[Part]) -> list[Part]:
    """The same parts with neighbours of one kind merged."""
    merged: list[Part] = []
    for _, neighbours in groupby(parts, _continued):
        first, *others = neighbours
        if others:
            text = "".join(map(part_text, (first, *others)))  # at once: a whole answer has as many parts as steps
            field = "arguments" if isinstance(first, ToolCallPart) else "text"
            first = msgspec.structs.replace(first, **{field: text})
        merged.append(first)
    return merged


def text_of(parts: Sequence[Part]) -> str:
    """The answer's text in these parts."""
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def thought_of(parts: Sequence[Part]) -> str:
    """The reasoning in these parts."""
    return "".join(part.text for part in parts if isinstance(part, ReasoningPart))


def step_of(origin: Origin, kept: int, made: int) -> StepProvenance:
    """The provenance of a step. kept: how many of the ``made`` tokens are in the answer."""
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


def drafters_of(origin: Origin | None, kept: int) -> list[str]:
    """The drafter of each of the first ``kept`` tokens of a step; "" if the target sampled it."""
    if origin is None:
        return [""] * kept
    names = [
        GRAMMAR if node <= origin.forced else origin.sources[place] if origin.sources else origin.drafter
        for place, node in enumerate(origin.path[:kept])
    ]
    return names + [""] * (kept - len(names))


def tokens_of(
    origin: Origin, tokens: Sequence[int], parts: Sequence[Sequence[Part]], logprobs: Sequence[TokenLogprobs]
) -> list[TokenProvenance]:
    """The provenance of a step's tokens that are in the answer. parts: what each adds. logprobs: one for each of them,
    or none."""
    made = zip(tokens, drafters_of(origin, len(tokens)), parts, strict=True)
    provenance = [_token(origin.step, depth, *each) for depth, each in enumerate(made, start=1)]
    for token, entry in zip(provenance, logprobs, strict=False):
        token.logprob = entry.logprob
    return provenance


def _token(step: int, depth: int, token: int, drafter: str, parts: Sequence[Part]) -> TokenProvenance:
    source: Source = "target" if not drafter else "grammar" if drafter == GRAMMAR else "draft"
    provenance = TokenProvenance(id=token, text="", step=step, origin=source, depth=depth if drafter else 0)
    if source == "draft":
        provenance.drafter = drafter
    for part in parts:
        _add_text(provenance, part)
    return provenance


def _add_text(token: TokenProvenance, part: Part) -> None:
    match part:
        case TextPart(text=text):
            token.text += text
        case ReasoningPart(text=text):
            token.reasoning = text if token.reasoning is UNSET else token.reasoning + text
        case ToolCallPart(arguments=arguments) if arguments:
            token.arguments = arguments if token.arguments is UNSET else token.arguments + arguments
