"""When the pieces of a stream go out: at once, or evenly (``stream_pacing: "even"``).

::

    the engine      abc         def     gh              i
    at once         abc         def     gh              i
    evenly          a   b   c   d  e  f g    h          i

The tokens of a run are spread over the time that the next run is expected to take. What is left when that run comes
goes out with it, and nothing waits at the end of the text; so nothing is ever later than the run behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf

from server.text.choice import Piece, merged
from server.text.parts import joined

Batch = list[tuple[int, Piece]]
#: Waits for the next pieces with the index of their choice; none if none came within so many seconds.
Arrivals = Callable[[float | None], Awaitable[Batch]]

#: How much the latest interval between two runs counts for what is expected of the next.
WEIGHT = 0.3


class Spread:
    """The tokens of one choice that wait for their time. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Piece]] = deque()
        self._last: float | None = None
        self._interval: float | None = None

    @property
    def next_due(self) -> float | None:
        """When the next token is to go out; None if none waits."""
        return self._waiting[0][0] if self._waiting else None

    def arrive(self, now: float, run: Piece) -> None:
        """The next run. Everything before it is due now, and so is its first token."""
        self._expect(now)
        tokens = split(run)
        over = run.finish_reason is not None or run.finish_at is not None
        pause = 0.0 if over or self._interval is None else self._interval / len(tokens)
        self.hasten()
        self._waiting += ((now + place * pause, piece) for place, piece in enumerate(tokens))

    def hasten(self) -> None:
        """Nothing that waits is to wait any longer."""
        self._waiting = deque((-inf, piece) for _, piece in self._waiting)

    def due(self, now: float) -> Piece | None:
        """What is to go out by now, in one piece."""
        pieces = []
        while self._waiting and self._waiting[0][0] <= now:
            pieces.append(self._waiting.popleft()[1])
        return merged(pieces) if pieces else None

    def _expect(self, now: float) -> None:
        """Learn from the time since the last run how long the next one will take."""
        if self._last is not None:
            passed = now - self._last
            self._interval = passed if self._interval is None else self._interval + WEIGHT * (passed - self._interval)
        self._last = now


class Evenly:
    """Hands on what arrives, token by token at the running rate. clock: seconds."""

    def __init__(self, arrivals: Arrivals, clock: Callable[[], float] | None = None) -> None:
        self._arrivals = arrivals
        self._clock = clock or asyncio.get_running_loop().time
        self._spreads: dict[int, Spread] = {}
        self._error: Exception | None = None

    async def __call__(self, timeout: float | None) -> Batch:
        """As the arrivals; what they raise comes behind all that came before it."""
        began = self._clock()
        while True:
            if due := self._due(self._clock()):
                return due
            if self._error is not None:
                raise self._error
            left = None if timeout is None else max(0.0, began + timeout - self._clock())
            if not await self._arrive(left) and left == 0.0:
                return []

    async def _arrive(self, timeout: float | None) -> bool:
        """Wait for what comes, until the next token is due; whether anything came."""
        times = [spread.next_due for spread in self._spreads.values() if spread.next_due is not None]
        waits = [max(0.0, min(times) - self._clock())] if times else []
        try:
            batch = await self._arrivals(min([*waits, *([] if timeout is None else [timeout])], default=None))
        except Exception as error:
            self._error = error
            for spread in self._spreads.values():
                spread.hasten()
            return True
        for index, run in batch:
            self._spreads.setdefault(index, Spread()).arrive(self._clock(), run)
        return bool(batch)

    def _due(self, now: float) -> Batch:
        due = ((index, spread.due(now)) for index, spread in self._spreads.items())
        return [(index, piece) for index, piece in due if piece is not None]


def split(run: Piece) -> list[Piece]:
    """A piece for each token; what goes with the beginning of the run with the first, its end with the last."""
    if len(run.token_texts) < 2:
        return [run]
    pieces = [
        Piece(
            text=token_texts.text,
            parts=joined(token_texts.parts),
            token_ids=run.token_ids[place : place + 1],
            logprobs=run.logprobs[place : place + 1],
            offsets=run.offsets[place : place + 1],
            tokens=run.tokens[place : place + 1],
            token_texts=[token_texts],
        )
        for place, token_texts in enumerate(run.token_texts)
    ]
    pieces[0].prompt_logprobs, pieces[0].steps = run.prompt_logprobs, run.steps
    pieces[-1].finish_reason, pieces[-1].finish_at = run.finish_reason, run.finish_at
    return pieces
