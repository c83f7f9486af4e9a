"""Running an answer to its end: as a stream of events, or collected into one body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import ParamSpec, TypeVar

import msgspec
from aiohttp import web

from foresay.server.api.common.answer import Answer
from foresay.server.api.common.route import EventStream, error_body
from foresay.server.engine.generation import Generation
from foresay.server.schemas.errors import ApiError
from foresay.server.schemas.shared import ErrorBody
from foresay.server.text.choice import Piece, merged
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta

#: How often a client that wants to know how far its prompt is read is told.
PROGRESS_SECONDS = 1.0
#: Until then an error gets its own HTTP status; afterwards the client gets headers and pings.
HEADERS_AFTER_SECONDS = 1.0
#: Formatting this many logprobs, with the likeliest of each, takes about a millisecond.
MOST_INLINE_ENTRIES = 200

#: Makes a chunk of an error, from the HTTP status and OpenAI's body.
Broken = Callable[[int, ErrorBody], msgspec.Struct]

P = ParamSpec("P")
T = TypeVar("T")


async def stream(request: web.Request, answer: Answer, generation: Generation, ping: float) -> web.StreamResponse:
    """Write one event batch per engine step; a comment every ``ping`` seconds while idle."""
    events = EventStream.of(request, answer.framing)

    def patience() -> float:
        if not events.started:
            return min(ping, HEADERS_AFTER_SECONDS)
        reports = answer.body.return_progress and not generation.begun
        return min(ping, PROGRESS_SECONDS) if reports else ping

    pending = batches(answer, generation, patience)
    try:
        async for chunks, last in pending:
            await events.send(chunks, last)
    except Exception as error:
        return await reported(error, events, lambda status, body: answer.broken(body))
    return await events.end()


async def reported(error: Exception, events: EventStream, broken: Broken) -> web.StreamResponse:
    """End a stream with an error, which is raised if the stream has not started; internal errors are raised as well."""
    if not events.started or isinstance(error, ConnectionError):
        raise error
    chunk = broken(*error_body(error))
    if not isinstance(error, ApiError | InvalidRequest):
        await events.fail(chunk)
        raise error
    await events.break_off(chunk)
    return await events.end()


async def batches(
    answer: Answer, generation: Generation, timeout: Callable[[], float | None]
) -> AsyncIterator[tuple[list[msgspec.Struct], bytes]]:
    """The chunks of an answer, one batch per engine step, and the bytes that an event stream has after them. A batch
    may be empty if nothing arrived for ``timeout()`` seconds."""
    unopened = set(range(len(answer.choices)))
    reports = bool(answer.body.return_progress)
    while not finished(answer):
        batch = list(pieces_of(answer, generation, await generation.next(timeout())))
        due = sorted(unopened & {index for index, _ in batch} if batch else unopened)
        unopened.difference_update(due)
        chunks = [chunk for index in due for chunk in answer.opening(index)]
        if reports and (progress := generation.progress) is not None:
            chunks += answer.progress(progress)
        reports = reports and not generation.begun
        for index, piece in batch:
            chunks += await _unhurried([piece], answer.chunks, index, piece)
        if finished(answer):
            yield [*chunks, *answer.closing()], answer.framing.done
        elif chunks or not batch:
            yield chunks, b"" if batch else answer.framing.ping


async def collect(answer: Answer, generation: Generation) -> msgspec.Struct:
    """Wait for every choice to finish; returns the whole answer."""
    pieces: list[list[Piece]] = [[] for _ in answer.choices]
    while not finished(answer):
        for index, piece in pieces_of(answer, generation, await generation.next()):
            pieces[index].append(piece)
    all_pieces = [merged(of_choice) for of_choice in pieces]
    return await _unhurried(all_pieces, answer.whole, all_pieces)


async def _unhurried(pieces: Sequence[Piece], make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``make``; in a thread if there are so many logprobs that it would delay other streams."""
    entries = sum(len(piece.logprobs) + len(piece.prompt_logprobs or ()) for piece in pieces)
    if entries <= MOST_INLINE_ENTRIES:
        return make(*args, **kwargs)
    return await asyncio.to_thread(make, *args, **kwargs)


def finished(answer: Answer) -> bool:
    """Whether every choice has ended."""
    return all(choice.finished for choice in answer.choices)


def pieces_of(answer: Answer, generation: Generation, batch: list[tuple[int, Delta]]) -> Iterator[tuple[int, Piece]]:
    """The text of a batch, one piece for each choice in it; ends requests in which a stop string was found."""
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
