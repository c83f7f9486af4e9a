"""An answer as it is generated, and when it is finished; notebooks show its tokens in the colours of their drafters."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Self

import msgspec

from foresay.server.schemas.chat import StepProvenance, TokenProvenance
from foresay.spec.request import TokenLogprobs
from foresay.spec.trace import Statistics

#: Most characters of text in a repr.
_SHORT = 60


@cache
def colours() -> dict[str, str]:
    """The page's colours by name: of drafters, and of any other one."""
    theme = Path(__file__).parents[1] / "api/about/static/theme.css"
    return dict(re.findall(r"--(\w+): (#\w{6});", theme.read_text("utf-8").partition("}")[0]))


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished text.

    token_ids: the output, including the token that ended it; cut after the token in which a stop string ended.
    finish_reason: ``"stop"`` (end of text, stop token, stop string), ``"length"`` or ``"cancelled"``. seed: reproduces
    the text. logprobs, prompt_logprobs: an entry per token, if requested; of several choices for one prompt only the
    first has prompt_logprobs. exact: whether this machine guarantees the same tokens with any drafter.
    drafters: the drafter of each token; "" if the target sampled it. offsets: for each token, the characters of text
    before it.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    seed: int
    exact: bool
    statistics: Statistics | None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafters: list[str] = []
    offsets: list[int] = []

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHORT else f"{self.text[: _SHORT - 3]}..."
        return f"Completion({text!r}, {len(self.token_ids)} tokens, {self.finish_reason}, seed={self.seed})"

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """For notebooks: the text, each drafted token in the colour of its drafter."""
        words = "".join(_coloured(text, drafter) for text, drafter in self._spans())
        names = sorted(set(self.drafters) - {""})
        legend = [f"{len(self.token_ids)} tokens{self._cost()}", *(_coloured(name, name) for name in names)]
        return (
            f'<div style="white-space: pre-wrap">{words}</div>'
            f'<div style="opacity: 0.8; font-size: 85%">{" &middot; ".join(legend)}</div>'
        )

    def _cost(self) -> str:
        """Target passes and seconds from the request to the last token, if known."""
        if (known := self.statistics) is None:
            return ""
        return f" in {known.steps} passes, {known.time_to_first_token + known.decode_seconds:.2f} s"

    def _spans(self) -> Iterator[tuple[str, str]]:
        """The text of each token, and its drafter."""
        ends = pairwise([*self.offsets, len(self.text)])
        return ((self.text[begin:end], drafter) for (begin, end), drafter in zip(ends, self.drafters, strict=True))


def _coloured(text: str, drafter: str) -> str:
    if not drafter or not text:
        return escape(text)
    colour = colours().get(drafter, colours()["other"])
    style = f"background: {colour}40; border-bottom: 2px solid {colour}"
    return f'<span style="{style}" title="drafted by {escape(drafter)}">{escape(text)}</span>'


class AnswerStream(ABC):
    """An answer, piece by piece; ``completion`` once it has ended.

    Closing it early, or leaving its ``with`` block, cancels the request. steps, tokens: provenance of the text so far,
    if requested.
    """

    def __init__(self) -> None:
        self.completion: Completion | None = None
        self.steps: list[StepProvenance] = []
        self.tokens: list[TokenProvenance] = []
        self._unwanted = False
        self._pieces: deque[str] = deque()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._pieces:
            if self.completion is not None:
                raise StopIteration
            self._step_or_close()
        return self._pieces.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Cancel the request if it still runs; what was written so far becomes the completion."""

    def close_soon(self) -> None:
        """Close it after the current step: for signal handlers, which must not change an engine in mid-step."""
        self._unwanted = True

    def result(self) -> Completion:
        """Run to the end and return the completion."""
        while self.completion is None:
            self._step_or_close()
        return self.completion

    def _step_or_close(self) -> None:
        if self._unwanted:
            self.close()
        else:
            self._step()

    @abstractmethod
    def _step(self) -> None:
        """Wait for what comes next of it."""
