"""What is kept of running requests, so that the next engine continues them if theirs ends.

::

                      sent              its second delta of this engine         its last delta
    waiting ────────────> unproven ────────────────────────> proven ────────────────> (gone)
       ^                      │                                │
       └────────────┴── the engine process ends, or is replaced ┘    unless it ended too often, or is the suspect

Of the resumed requests only one is unproven at a time, and new requests wait until all are proven: so if a request
kills engines, it is known which. What is kept is bounded: prompt and output fit the context. docs/resumption.md lists
the owners of all state.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from foresay.server.engine.generation import EngineStatus, Sink, check_comes
from foresay.server.engine_process import frames
from foresay.server.engine_process.frames import Channel
from foresay.server.schemas.errors import ApiError, EngineFailed, KillsEngine, Mistake
from foresay.spec.request import Delta, Progress, Request, RequestEnd
from foresay.spec.trace import StepTrace

log = logging.getLogger("foresay.server")

#: What a client can do about a request that is not resumed.
AGAIN = "this request was lost, please send it again"
#: After this many deltas an engine has survived a request's prefill and the step after it.
PROOF = 2
#: A request kills engines if this many in a row ended while it alone was unproven.
MOST_ALONE = 2


@dataclass(slots=True, eq=False)
class InFlight:
    """One running request. tokens: the output sent so far, 32 bits each. arrived: when it came (``time.perf_counter``).
    resumed, changed: as in :class:`~foresay.spec.request.RequestEnd`.

    deltas: deltas from its current engine. losses: engine processes that ended while it ran or waited. ran: it was
    in one of them. alone: how many in a row ended while it alone was unproven. ends_at: its text ends with this output
    token. fingerprint: of the engine that it was last sent to.
    """

    request: Request
    sink: Sink
    state: Literal["waiting", "unproven", "proven"] = "waiting"
    tokens: array[int] = field(default_factory=lambda: array("i"))
    arrived: float = field(default_factory=time.perf_counter)
    resumed: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    seed: int = 0
    cached_tokens: int = 0
    deltas: int = 0
    losses: int = 0
    ran: bool = False
    alone: int = 0
    ends_at: int | None = None
    fingerprint: str = ""

    def take(self, delta: Delta) -> None:
        """Record a step's delta."""
        self.deltas += 1
        if self.deltas >= PROOF and self.state == "unproven":
            self.state, self.alone = "proven", 0
        if not delta.tokens:
            return
        self.tokens.extend(delta.tokens)
        self.seed, self.cached_tokens = delta.seed, delta.cached_tokens

    def sent(self, fingerprint: str) -> Request:
        """The request to send now to the engine of this fingerprint; one of another may write a different text."""
        self.state, self.deltas = "unproven", 0
        before, self.fingerprint = self.fingerprint, fingerprint
        if not self.ran:
            return self.request
        self.resumed.append(len(self.tokens))
        if before != fingerprint:
            self.changed.append(len(self.tokens))
        params = replace(self.request.params, seed=self.seed) if self.tokens else self.request.params
        progress = Progress(committed=list(self.tokens), arrived=self.arrived, cached_tokens=self.cached_tokens)
        return replace(self.request, params=params, progress=progress)

    def last(self, levels: int) -> Delta:
        """The last delta of a text that ends with tokens already sent. levels: greatest draft depth."""
        return Delta(
            id=self.request.id,
            tokens=[],
            finish_reason="stop",
            seed=self.seed,
            cached_tokens=self.cached_tokens,
            ending=RequestEnd(levels=levels, resumed=self.resumed, changed=self.changed),
        )


class InFlights:
    """The running requests of one engine client, in order of arrival.

    send: sends to the current engine, if any. most_losses: how many engines may end while running a request.
    """

    def __init__(self, send: Callable[[frames.UpFrame], None], most_losses: int) -> None:
        self.send, self._most_losses = send, most_losses
        self._all: dict[str, InFlight] = {}
        self._waiting: deque[InFlight] = deque()
        self._probed: InFlight | None = None  # resumed in this engine, and unproven
        self._ready, self._levels, self._fingerprint = False, 0, ""
        self._queued = False  # the unproven request may only be waiting for a slot, judging by the last step

    # -- the engine ----------------------------------------------------------------------------------------------

    def ready(self, levels: int, fingerprint: str) -> int:
        """An engine takes requests. levels: greatest draft depth. Returns how many are resumed in it."""
        self._ready, self._queued = True, False
        self._levels, self._fingerprint = levels, fingerprint
        count = len(self._waiting)
        self._go_on()
        return count

    def hold(self) -> None:
        """The engine takes no more requests: new ones wait, and cannot be suspects."""
        self._ready = False

    def lost(self, reason: str, among: Collection[str] | None = None) -> None:
        """The engine process has ended: fail requests that cannot continue; the others wait for the next.

        among: the requests that may have caused it; None if any in its steps may have.
        """
        self._ready, self._probed = False, None
        unproven = [flight for flight in self._all.values() if flight.state == "unproven"]
        suspects = [flight for flight in unproven if among is None or flight.request.id in among]
        if len(suspects) == 1 and not (among is None and self._queued):
            suspects[0].alone += 1
        self._waiting.clear()
        for flight in list(self._all.values()):
            error = self._why_not(flight, reason)
            if flight.ends_at is not None:
                self._close(flight)
            elif error is not None:
                del self._all[flight.request.id]
                _fail(flight, error)
            else:
                flight.losses += 1
                self._wait(flight)

    def _wait(self, flight: InFlight) -> None:
        """Queue it for the next engine."""
        flight.ran = flight.ran or flight.state != "waiting"
        flight.state, flight.deltas = "waiting", 0
        self._waiting.append(flight)

    def move(self) -> None:
        """Stop using the engine, though it lives: all requests wait for the next."""
        self._ready, self._probed = False, None
        self._waiting.clear()
        for flight in list(self._all.values()):
            if flight.ends_at is not None:
                self._close(flight)
            elif flight.request.aside:
                del self._all[flight.request.id]
                _fail(flight, EngineFailed(f"the engine was replaced; {AGAIN}"))
            else:
                self._wait(flight)

    def fail(self, error: Callable[[], Exception]) -> None:
        """There will be no engine: end all requests."""
        running, self._all, self._probed, self._ready = self._all, {}, None, False
        self._waiting.clear()
        for flight in running.values():
            _fail(flight, error())

    def _go_on(self) -> None:
        """Send waiting requests, up to the first resumed one."""
        while self._ready and self._waiting and self._probed is None:
            flight = self._waiting.popleft()
            if flight.losses:
                self._probed = flight
            self.send(frames.Add(flight.sent(self._fingerprint)))

    def _why_not(self, flight: InFlight, reason: str) -> ApiError | None:
        """Why a request does not continue in the next engine; None if it does."""
        if flight.alone >= MOST_ALONE and self._most_losses:
            return _kills_engine(reason)
        if flight.losses < self._most_losses and not flight.request.aside:
            return None
        often = f" when it had been resumed {flight.losses} times (--max-resumes)" if flight.losses else ""
        return EngineFailed(f"{reason}{often}; {AGAIN}")

    # -- one request ---------------------------------------------------------------------------------------------

    def __contains__(self, id: object) -> bool:
        return id in self._all

    def __len__(self) -> int:
        return len(self._all)

    @property
    def unread(self) -> int:
        """Prompt tokens of requests without a delta yet."""
        return sum(len(flight.request.prompt) for flight in self._all.values() if not flight.deltas and not flight.ran)

    def add(self, request: Request, sink: Sink) -> None:
        """Add a request, after those being resumed."""
        self.take_over(InFlight(request, sink))

    def take_over(self, flight: InFlight) -> None:
        """Add a request that may have run elsewhere, after those being resumed."""
        self._all[flight.request.id] = flight
        self._waiting.append(flight)
        self._go_on()

    def leave(self) -> list[InFlight]:
        """Remove and return the waiting requests, to continue elsewhere."""
        leaving = list(self._waiting)
        self._waiting.clear()
        for flight in leaving:
            del self._all[flight.request.id]
        return leaving

    def cancel(self, id: str) -> None:
        flight = self._all.get(id)
        if flight is not None:
            if flight.state != "waiting":
                self.send(frames.Cancel(id))
            self._over(flight)

    def finish(self, id: str, at_token: int) -> None:
        """End the text of a request with this output token; its last delta still comes."""
        flight = self._all.get(id)
        if flight is None:
            return
        flight.ends_at = at_token
        if flight.deltas and flight.state != "waiting":
            self.send(frames.Finish(id, at_token))
        else:  # all of it came from the previous engine
            self._close(flight)

    def stepped(self, waiting: int) -> None:
        """The engine has taken a step. waiting: requests that were not in it."""
        self._queued = waiting > 0

    def take(self, delta: Delta) -> None:
        """Pass a delta on, and record what the next engine would need."""
        flight = self._all.get(delta.id)
        if flight is None:
            return  # cancelled while this delta was in transit
        if delta.finish_reason is not None:
            self._over(flight)
        if delta.ending is not None:
            delta.ending = replace(delta.ending, resumed=flight.resumed, changed=flight.changed)
        self._put(flight, delta)  # before recording: the client waits for it
        if delta.finish_reason is None:
            flight.take(delta)
            if flight.state == "proven":
                self._pass(flight)

    def reject(self, id: str, error: Exception) -> None:
        """The engine rejects a request."""
        flight = self._all.get(id)
        if flight is not None:
            self._over(flight)
            _fail(flight, error)

    def _put(self, flight: InFlight, delta: Delta) -> None:
        """Pass a delta on. If its sink fails, only this request ends."""
        id = flight.request.id
        try:
            flight.sink.put(delta)
            return
        except Exception:
            log.exception("the output for request %s could not be handed on", id)
        self.cancel(id)
        _fail(flight, Mistake(f"Internal server error; the server's log says more about request {id}"))

    def _close(self, flight: InFlight) -> None:
        """End a request whose text ends with what was sent."""
        if flight.state == "unproven":
            self.send(frames.Cancel(flight.request.id))
        self._over(flight)
        self._put(flight, flight.last(self._levels))

    def _over(self, flight: InFlight) -> None:
        del self._all[flight.request.id]
        if flight.state == "waiting":
            self._waiting.remove(flight)
        self._pass(flight)

    def _pass(self, flight: InFlight) -> None:
        """It no longer endangers the engine: send the next."""
        if self._probed is flight:
            self._probed = None
            self._go_on()


def _fail(flight: InFlight, error: Exception) -> None:
    """Report an error to a request's sink; it has ended even if the sink fails."""
    try:
        flight.sink.fail(error)
    except Exception:
        log.exception("request %s could not be notified of its end", flight.request.id)


def _kills_engine(reason: str) -> KillsEngine:
    message = f"{reason}, twice at the same position of this request: it may be what kills the engine"
    return KillsEngine(f"{message}, so it is not resumed")


# -- over a channel ----------------------------------------------------------------------------------------------------


class ChannelClient:
    """A :class:`~foresay.server.engine.generation.TokenEngine` while there is a channel, and it is ready.

    most_losses: how many engines may die while running a request.
    """

    status: EngineStatus

    def __init__(self, most_losses: int) -> None:
        self._in_flight = InFlights(self._send, most_losses)
        self._channel: Channel | None = None
        self._steps = 0  # number of the latest step

    def add(self, request: Request, sink: Sink) -> None:
        check_comes(self.status)
        self._in_flight.add(request, sink)

    def cancel(self, id: str) -> None:
        self._in_flight.cancel(id)

    def finish(self, id: str, at_token: int) -> None:
        self._in_flight.finish(id, at_token)

    def _send(self, frame: frames.UpFrame) -> None:
        if self._channel is not None:
            self._channel.send(frame)

    def _received(self, frame: frames.DownFrame) -> None:
        """Handle a frame of a running engine."""
        match frame:
            case frames.Deltas(deltas, trace):
                if trace is not None:
                    self._stepped(trace)
                for delta in deltas:
                    self._in_flight.take(delta)
            case frames.Rejected(id):
                self._in_flight.reject(id, frame.error)

    def _stepped(self, trace: StepTrace) -> None:
        self._steps = trace.number
        self._in_flight.stepped(trace.waiting)

    def _lose(self, reason: str, among: Collection[str] | None = ()) -> None:
        """The engine process has ended."""
        self._in_flight.lost(reason, among)
