"""What is kept of the requests that an engine runs, so that the next one goes on with them when it ends.

::

                      sent              its second delta of this engine         its last delta
    waiting ────────────> unproven ────────────────────────> proven ────────────────> (gone)
       ^                      │                                │
       └────────────┴── the engine process ends, or is replaced ┘    unless it ended too often, or is the suspect

Of those that go on only one is unproven at a time, and whoever comes meanwhile waits behind them: so it is known
of whom an engine died, if it was of one. What is kept is bounded: prompt and output are no more than the context holds.
docs/resumption.md tells who owns what when.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from foresay.server.engine.generation import Sink
from foresay.server.host import frames
from foresay.server.schemas.errors import ApiError, EngineFailed, KillsEngine, Mistake
from foresay.spec.request import Delta, Progress, Request
from foresay.spec.trace import SequenceTrace, depths_of

log = logging.getLogger("foresay.server")

#: What a client can do about a request that does not go on.
AGAIN = "this request was lost, please send it again"
#: An engine has read a request's text, and stood the step behind that, with so many deltas of it.
PROOF = 2
#: A request kills engines if so many in a row ended with it alone unproven.
MOST_ALONE = 2


@dataclass(slots=True, eq=False)
class InFlight:
    """One running request. tokens: the output that went out, in 32 bits each; trace: how it came about, counted as the
    engine does.

    heard: deltas of the engine that has it now. losses: engine processes that ended while it ran or waited. ran: it was
    in one of them. alone: of how many in a row it alone was unproven. ends_at: its text ends with this output token.
    changed: the next engine may write another text. text: which one the engine writes that has it, or had it last.
    """

    request: Request
    sink: Sink
    state: Literal["waiting", "unproven", "proven"] = "waiting"
    tokens: array[int] = field(default_factory=lambda: array("i"))
    trace: SequenceTrace = field(default_factory=SequenceTrace)
    seed: int = 0
    cached_tokens: int = 0
    heard: int = 0
    losses: int = 0
    ran: bool = False
    alone: int = 0
    ends_at: int | None = None
    changed: bool = False
    text: str = ""

    def take(self, delta: Delta) -> None:
        """Keep what a step did for it."""
        self.heard += 1
        if self.heard >= PROOF and self.state == "unproven":
            self.state, self.alone = "proven", 0
        if not delta.tokens:
            return
        self.tokens.extend(delta.tokens)
        self.seed, self.cached_tokens = delta.seed, delta.cached_tokens
        trace, origin = self.trace, delta.origin
        trace.started = trace.started or trace.arrived + delta.queued
        trace.record(depths_of(origin.parents)[1:] if origin else [], delta.accepted, len(delta.tokens))
        if origin is not None:
            trace.forced += origin.forced
            trace.charge(origin.seconds)

    def sent(self) -> Request:
        """The request as an engine is to get it now."""
        self.state, self.heard = "unproven", 0
        if not self.ran:
            return self.request
        self.trace.resumed.append(len(self.tokens))
        if self.changed:
            self.trace.changed.append(len(self.tokens))
            self.changed = False
        params = replace(self.request.params, seed=self.seed) if self.tokens else self.request.params
        progress = Progress(committed=list(self.tokens), trace=self.trace, cached_tokens=self.cached_tokens)
        return replace(self.request, params=params, progress=progress)

    def last(self, levels: int) -> Delta:
        """The last delta, where the text ends with what went out already. levels: the deepest draft."""
        assert self.ends_at is not None, "somebody saw where it ends"
        self.trace.cut(len(self.tokens) - self.ends_at)
        prompt, cached = len(self.request.prompt), self.cached_tokens
        statistics = self.trace.statistics(prompt, cached, self.ends_at, levels)
        return Delta(
            id=self.request.id,
            tokens=[],
            finish_reason="stop",
            seed=self.seed,
            cached_tokens=cached,
            statistics=statistics,
        )


class InFlights:
    """The running requests of one engine client, in order of arrival.

    send: to the engine that is there now, if one is. most_losses: engines that may end under a request.
    """

    def __init__(self, send: Callable[[frames.UpFrame], None], most_losses: int) -> None:
        self.send, self._most_losses = send, most_losses
        self._all: dict[str, InFlight] = {}
        self._waiting: deque[InFlight] = deque()
        self._probed: InFlight | None = None  # goes on in this engine, and is unproven
        self._ready, self._levels = False, 0
        self._queued = False  # who is unproven only waits for a place, as far as the last step tells
        self._unproven: list[InFlight] = []  # when the last engine ended
        self._ended = 0  # the number of the engine process that ended last

    # -- the engine ----------------------------------------------------------------------------------------------

    def ready(self, levels: int) -> int:
        """An engine takes requests. levels: the deepest draft. Returns how many go on in it."""
        self._ready, self._levels, self._queued = True, levels, False
        count = len(self._waiting)
        self._go_on()
        return count

    def hold(self) -> None:
        """The engine takes nothing more: who comes from now on waits, and is none that it may have died of."""
        self._ready = False

    def lost(self, number: int, reason: str, among: Collection[str] | None = None) -> None:
        """Engine process ``number`` has ended, or will in a moment: who cannot go on is told, the others wait.

        among: the requests that it may have died of; None if that may be any in its steps. May be said again of one,
        when more is known.
        """
        late = number == self._ended
        if not late:
            self._ended, self._ready, self._probed = number, False, None
            self._unproven = [flight for flight in self._all.values() if flight.state == "unproven"]
        suspect = self._blamed(among)
        if not late:
            self._wait_again(reason)
        elif suspect is not None and suspect.alone >= MOST_ALONE:
            self.reject(suspect.request.id, _kills_engine(reason))

    def _blamed(self, among: Collection[str] | None) -> InFlight | None:
        """The only one that was unproven of those that the engine may have died of: this tells against it."""
        found = [flight for flight in self._unproven if among is None or flight.request.id in among]
        if len(found) != 1 or (among is None and self._queued) or self._all.get(found[0].request.id) is not found[0]:
            return None
        self._unproven = []
        found[0].alone += 1
        return found[0]

    def _wait_again(self, reason: str) -> None:
        """Who can goes on in the next engine."""
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
        """Let it be sent to the next engine."""
        flight.ran = flight.ran or flight.state != "waiting"
        flight.state, flight.heard = "waiting", 0
        self._waiting.append(flight)

    def move(self, changed: bool) -> int:
        """Nobody asks the engine any more, though it lives: all go on in the next one; returns how many. changed: which
        may write another text."""
        self._ready, self._probed = False, None
        self._waiting.clear()
        for flight in list(self._all.values()):
            if flight.ends_at is not None:
                self._close(flight)
            elif flight.request.aside:
                del self._all[flight.request.id]
                _fail(flight, EngineFailed(f"the engine was replaced; {AGAIN}"))
            else:
                flight.changed = flight.changed or changed
                self._wait(flight)
        return len(self._waiting)

    def fail(self, error: Callable[[], Exception]) -> None:
        """There will be no engine: end all of them."""
        running, self._all, self._probed, self._ready = self._all, {}, None, False
        self._waiting.clear()
        for flight in running.values():
            _fail(flight, error())

    def _go_on(self) -> None:
        """Send those whose turn it is."""
        while self._ready and self._waiting and self._probed is None:
            flight = self._waiting.popleft()
            if flight.losses:
                self._probed = flight
            self.send(frames.Add(flight.sent()))

    def _why_not(self, flight: InFlight, reason: str) -> ApiError | None:
        """Why a request does not go on in the next engine; None if it does."""
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
        """Tokens of prompts of which nothing was heard yet."""
        return sum(len(flight.request.prompt) for flight in self._all.values() if not flight.heard and not flight.ran)

    def add(self, request: Request, sink: Sink) -> None:
        """One more; it waits behind those that go on."""
        self.take_over(InFlight(request, sink))

    def take_over(self, flight: InFlight, text: str = "") -> None:
        """One that ran elsewhere, or nowhere; it waits behind those that go on. text: which one the engine writes."""
        flight.changed = flight.changed or (flight.ran and bool(flight.text) and flight.text != text)
        flight.text = text
        self._all[flight.request.id] = flight
        self._waiting.append(flight)
        self._go_on()

    def leave(self) -> list[InFlight]:
        """Those that wait go on elsewhere."""
        leaving = list(self._waiting)
        self._waiting.clear()
        for flight in leaving:
            del self._all[flight.request.id]
        return leaving

    def cancel(self, id: str) -> None:
        """Drop a request; its sink hears no more."""
        flight = self._all.get(id)
        if flight is not None:
            if flight.state != "waiting":
                self.send(frames.Cancel(id))
            self._over(flight)

    def finish(self, id: str, at_token: int) -> None:
        """The text of a request ends with this output token; its last delta still comes."""
        flight = self._all.get(id)
        if flight is None or flight.heard:
            self.send(frames.Finish(id, at_token))  # if it is over already, that is for who observes the engine
        if flight is not None:
            flight.ends_at = at_token
            if not flight.heard:  # all of it came from the engine before
                self._close(flight)

    def stepped(self, waiting: int) -> None:
        """The engine has taken a step. waiting: requests that were not in it."""
        self._queued = waiting > 0

    def take(self, delta: Delta) -> None:
        """Hand a delta on, and keep what the next engine would have to know."""
        flight = self._all.get(delta.id)
        if flight is None:
            return  # cancelled while this delta was under way
        if delta.finish_reason is not None:
            self._over(flight)
        self._put(flight, delta)  # before anything is kept: the client waits for it
        if delta.finish_reason is None:
            flight.take(delta)
            if flight.state == "proven":
                self._pass(flight)

    def reject(self, id: str, error: Exception) -> None:
        """The engine does not take a request."""
        flight = self._all.get(id)
        if flight is not None:
            self._over(flight)
            _fail(flight, error)

    def _put(self, flight: InFlight, delta: Delta) -> None:
        """Hand a delta on. If its sink fails, that ends this request: others and the engine have no part in it."""
        id = flight.request.id
        try:
            flight.sink.put(delta)
            return
        except Exception:
            log.exception("the output for request %s could not be handed on", id)
        self.cancel(id)
        _fail(flight, Mistake(f"Internal server error; the server's log says more about request {id}"))

    def _close(self, flight: InFlight) -> None:
        """End a request whose text ends with what went out."""
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
        """This one is no danger to the engine any more: the next."""
        if self._probed is flight:
            self._probed = None
            self._go_on()


def _fail(flight: InFlight, error: Exception) -> None:
    """Tell a request of its end. If its sink fails, it is over all the same."""
    try:
        flight.sink.fail(error)
    except Exception:
        log.exception("request %s could not be notified of its end", flight.request.id)


def _kills_engine(reason: str) -> KillsEngine:
    told = f"{reason}, twice at the same position of this request: it may be what kills the engine"
    return KillsEngine(f"{told}, so it is not resumed")
