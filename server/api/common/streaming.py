"""Running an answer to its end: as a stream of events, or collected into one body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import ParamSpec, TypeVar

import msgspec
from aiohttp import web

from server.api.common.answer import Answer
from server.api.common.pacing import Arrivals, Batch, Evenly
from server.api.common.sse import EventStream
from server.engine.generation import Generation
from server.schemas.errors import ApiError, described
from server.text.choice import Piece, merged
from server.text.warned import headers
from spec.errors import InvalidRequest
from spec.request import Delta

#: Before this, an error still gets its own HTTP status; after it, the client sees headers and pings.
HEADERS_AFTER_SECONDS = 1.0
#: Spelling this many logprobs, with the likeliest ones beside each, takes about a millisecond.
MOST_INLINE_ENTRIES = 200

P = ParamSpec("P")
T = TypeVar("T")


async def stream(request: web.Request, answer: Answer, generation: Generation, ping: float) -> web.StreamResponse:
    """Write one event batch per engine step; a comment every ``ping`` seconds while there is nothing to say."""
    events = EventStream.of(request, answer.framing, headers(answer.warnings))
    try:
        await _stream(events, answer, generation, ping)
    except (ApiError, InvalidRequest) as error:
        if not events.started:
            raise
        await events.send([answer.broken(described(error)[1])])
    return await events.end()


class Paced:
    """Holds pieces back until there are ``interval`` tokens to send. The first one of a choice goes out at once."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._begun: set[int] = set()
        self._held: dict[int, Piece] = {}

    def take(self, index: int, piece: Piece) -> Piece | None:
        """What of a choice is due with this piece; None if it is to wait."""
        if index in self._held:
            piece = merged([self._held.pop(index), piece])
        ended = piece.finish_reason is not None
        if ended or index not in self._begun or len(piece.token_ids) >= self._interval:
            self._begun.add(index)
            return piece
        self._held[index] = piece
        return None

    def rest(self) -> list[tuple[int, Piece]]:
        """What is still held back."""
        held, self._held = self._held, {}
        return sorted(held.items(), key=lambda item: item[0])


async def _stream(events: EventStream, answer: Answer, generation: Generation, ping: float) -> None:
    paced = Paced(answer.options.stream_interval)
    try:
        await _paced(events, answer, generation, ping, paced)
    except (ApiError, InvalidRequest):
        left = [chunk for index, piece in paced.rest() for chunk in answer.chunks(index, piece)]
        if left:
            await events.send(left)
        raise


async def _paced(events: EventStream, answer: Answer, generation: Generation, ping: float, paced: Paced) -> None:
    unopened = set(range(len(answer.choices)))
    arrivals = delivery(answer, generation)
    while not finished(answer):
        batch = await arrivals(ping if events.started else min(ping, HEADERS_AFTER_SECONDS))
        due = sorted(unopened & {index for index, _ in batch} if batch else unopened)
        unopened.difference_update(due)
        chunks = [chunk for index in due for chunk in answer.opening(index)]
        for index, piece in batch:
            ready = paced.take(index, piece)
            if ready is not None:
                chunks += await _unhurried([ready], answer.chunks, index, ready)
        if finished(answer):
            await events.send([*chunks, *answer.closing()], last=answer.framing.done)
        elif chunks or not batch:
            await events.send(chunks, last=b"" if batch else answer.framing.ping)


async def collect(answer: Answer, generation: Generation) -> msgspec.Struct:
    """Wait for every choice to finish; returns the whole answer."""
    pieces: list[list[Piece]] = [[] for _ in answer.choices]
    while not finished(answer):
        for index, piece in pieces_of(answer, generation, await generation.next()):
            pieces[index].append(piece)
    return await _unhurried([piece for of_choice in pieces for piece in of_choice], answer.whole, pieces)


async def _unhurried(pieces: Sequence[Piece], make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make something of the pieces; in a thread if there is so much that it would delay other streams."""
    entries = sum(len(piece.logprobs) + len(piece.prompt_logprobs or ()) for piece in pieces)
    if entries <= MOST_INLINE_ENTRIES:
        return make(*args, **kwargs)
    return await asyncio.to_thread(make, *args, **kwargs)


def finished(answer: Answer) -> bool:
    """Whether every choice has ended."""
    return all(choice.finished for choice in answer.choices)


def delivery(answer: Answer, generation: Generation) -> Arrivals:
    """What to call for the next pieces, at the time that the client wants them."""

    async def arrivals(timeout: float | None) -> Batch:
        return list(pieces_of(answer, generation, await generation.next(timeout)))

    return Evenly(arrivals) if answer.options.pacing == "even" else arrivals


def pieces_of(answer: Answer, generation: Generation, batch: list[tuple[int, Delta]]) -> Iterator[tuple[int, Piece]]:
    """The text of a batch, one piece for each choice in it; tells the engine about stop strings found on the way."""
    for index, deltas in groupby(batch, key=itemgetter(0)):
        piece = merged([_piece(answer, generation, index, delta) for _, delta in deltas])
        generation.delivered(index, piece)
        yield index, piece


def _piece(answer: Answer, generation: Generation, index: int, delta: Delta) -> Piece:
    """The text of one step of one choice."""
    piece = answer.choices[index].take(delta)
    generation.kept(index, delta, piece)
    if piece.finish_at is not None:
        generation.finish(index, piece.finish_at)
    return piece
