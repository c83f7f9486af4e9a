"""One engine at the other end of a channel: what it is asked, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from server.engine.generation import EngineStatus, Sink, unavailable
from server.host import frames
from server.host.frames import Channel
from server.host.resumption import InFlights
from spec.errors import ContextLengthExceeded, InvalidRequest
from spec.request import Request
from spec.trace import ShadowReport, StepTrace


class Asked:
    """A :class:`~server.engine.generation.TokenEngine` while there is a channel, and it is ready.

    observe, observe_shadow: told of every step of the engine, and of what its shadow drafter would have done; must not
    block. most_losses: engines that may end under a request.
    """

    status: EngineStatus

    def __init__(self, most_losses: int) -> None:
        self.observe: Callable[[StepTrace], None] | None = None
        self.observe_shadow: Callable[[ShadowReport], None] | None = None
        self._in_flight = InFlights(self._send, most_losses)
        self._inspections: list[asyncio.Future[frames.Inspected]] = []
        self._channel: Channel | None = None
        self._steps = 0  # the number of the latest

    def add(self, request: Request, sink: Sink) -> None:
        """Begin a request; its results go to ``sink``."""
        self._ready_channel()
        self._in_flight.add(request, sink)

    def cancel(self, id: str) -> None:
        """Drop a request and free what it holds; its sink hears no more."""
        self._in_flight.cancel(id)

    def finish(self, id: str, at_token: int) -> None:
        """End a request after its output token number ``at_token``; the last delta still comes."""
        self._in_flight.finish(id, at_token)

    def keep_warm(self, tokens: list[int], salt: str) -> None:
        """Let the KV of this text be the last to make room; no harm done if it is not there."""
        if self._channel is not None and self.status.state == "ready":
            self._channel.send(frames.KeepWarm(tokens, salt))

    async def inspect(self) -> frames.Inspected:
        """Have the engine check its page ledger between two steps."""
        channel = self._ready_channel()
        answer: asyncio.Future[frames.Inspected] = asyncio.get_running_loop().create_future()
        self._inspections.append(answer)
        channel.send(frames.Inspect())
        return await answer

    def _send(self, frame: frames.UpFrame) -> None:
        if self._channel is not None:
            self._channel.send(frame)

    def _ready_channel(self) -> Channel:
        if self._channel is None or self.status.state != "ready":
            raise unavailable(self.status)
        return self._channel

    def _received(self, frame: frames.DownFrame) -> None:
        """What an engine says while it runs."""
        match frame:
            case frames.Deltas(deltas, trace):
                if trace is not None:
                    self._stepped(trace)
                for delta in deltas:
                    self._in_flight.take(delta)
            case frames.Rejected(id, param, message, code):
                kind = ContextLengthExceeded if code == ContextLengthExceeded.code else InvalidRequest
                self._in_flight.reject(id, kind(param, message))
            case frames.Shadowed(report):
                if self.observe_shadow is not None:
                    self.observe_shadow(report)
            case frames.Inspected():
                self._inspections.pop(0).set_result(frame)

    def _stepped(self, trace: StepTrace) -> None:
        self._steps = trace.number
        self._in_flight.stepped(trace.waiting)
        if self.observe is not None:
            self.observe(trace)

    def _lose(self, number: int, reason: str, among: Collection[str] | None = ()) -> None:
        """Engine process ``number`` has ended, or is about to. May be said again of one, when more is known."""
        self._in_flight.lost(number, reason, among)
        self._drop_inspections()

    def _drop_inspections(self) -> None:
        inspections, self._inspections = self._inspections, []
        for answer in inspections:
            answer.cancel()
