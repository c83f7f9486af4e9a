"""One answer decoded again plainly, compared as it comes."""

from __future__ import annotations

import asyncio
from typing import Literal

from server.observe.selfcheck.answer import Answer, Difference, difference
from spec.request import Delta

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
