"""A text that was written, and the request that writes it again plainly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec

from spec.request import Delta, Request


class Answer(msgspec.Struct, frozen=True):
    """request: with the seed that was drawn with. tokens: what was written, as far as it is in the text.

    request_id: the ``X-Request-Id`` of the HTTP request it came with; empty if it came otherwise. tries: re-runs that
    were begun and had to make way.
    """

    request: Request
    tokens: list[int]
    request_id: str = ""
    tries: int = 0

    def plainly(self, id: str) -> Request:
        """The request, called ``id``, that writes these tokens again: one a step, from no KV that is there already.

        A fork is repeated by its own seed. What is only reported (logprobs) is left out.
        """
        asked, length = self.request, len(self.tokens)
        params = msgspec.structs.replace(
            asked.params,
            max_tokens=length,
            min_tokens=min(asked.params.min_tokens, length),
            logprobs=None,
            prompt_logprobs=None,
        )
        return Request(
            id=id,
            prompt=asked.prompt,
            params=params,
            salt=asked.salt,  # what is compiled for it again tells nobody else
            grammar=asked.grammar,
            speculate=False,
            aside=True,
        )


class Difference(msgspec.Struct, frozen=True):
    """Where a text differs from plain decoding. position: of the output token, from 0 on. written: the token in the
    text. plain: the one that plain decoding writes there; None if it ends before."""

    position: int
    written: int
    plain: int | None


def difference(written: Sequence[int], plain: Sequence[int], begin: int = 0) -> Difference | None:
    """The first difference, if there is one. plain: what plain decoding wrote from position ``begin`` on, so far."""
    for position, token in enumerate(plain, start=begin):
        if token != written[position]:
            return Difference(position, written[position], token)
    return None


# -- decoded again, compared as it comes -------------------------------------------------------------------------------


#: compared: to its end, or to the first difference. interrupted: somebody needed the engine. lost: it failed.
Outcome = Literal["compared", "interrupted", "lost"]


class Rerun:
    """A sink for the plain request. tokens: compared so far; difference: the first one, which ends it."""

    def __init__(self, answer: Answer, id: str) -> None:
        self.answer, self.request = answer, answer.plainly(id)
        self.tokens = 0
        self.difference: Difference | None = None
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    async def outcome(self) -> Outcome:
        """How it ended."""
        return await self._outcome

    def put(self, delta: Delta) -> None:
        """Compare what came."""
        if self._outcome.done():
            return
        if delta.finish_reason in ("error", "cancelled"):
            self.end("lost")
            return
        written, length = self.answer.tokens, len(self.answer.tokens)
        self.difference = difference(written, delta.tokens[: length - self.tokens], self.tokens)
        self.tokens += len(delta.tokens)
        if self.difference is not None:
            self.tokens = self.difference.position + 1
        elif delta.finish_reason is not None and self.tokens < length:
            self.difference = Difference(self.tokens, written[self.tokens], None)
        if self.difference is not None or self.tokens >= length:
            self.end("compared")

    def fail(self, error: Exception) -> None:
        """The engine refused it, or died."""
        self.end("lost")

    def end(self, outcome: Outcome) -> None:
        """It is over; whatever comes later changes nothing."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)
