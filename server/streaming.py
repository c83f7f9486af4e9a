"""Running an answer to its end: as a stream of events, or collected into one body."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from aiohttp import web

from server.answers.base import Answer
from server.choice import Piece
from server.errors import ApiError, described
from server.generation import Generation
from server.sse import EventStream
from spec.errors import InvalidRequest
from spec.request import Delta

#: Before this, an error still gets its own HTTP status; after it, the client sees headers and pings.
HEADERS_AFTER_SECONDS = 1.0


async def stream(request: web.Request, answer: Answer, generation: Generation, ping: float) -> web.StreamResponse:
    """Write one event batch per engine step; a comment every ``ping`` seconds while there is nothing to say."""
    events = EventStream(request, answer.framing)
    try:
        await _stream(events, answer, generation, ping)
    except (ApiError, InvalidRequest) as error:
        if not events.started:
            raise
        await events.send([answer.broken(described(error)[1])])
    return await events.end()


async def _stream(events: EventStream, answer: Answer, generation: Generation, ping: float) -> None:
    unopened = set(range(len(answer.choices)))
    while not finished(answer):
        batch = await generation.next(ping if events.started else min(ping, HEADERS_AFTER_SECONDS))
        due = sorted(unopened & {index for index, _ in batch} if batch else unopened)
        unopened.difference_update(due)
        chunks = [chunk for index in due for chunk in answer.opening(index)]
        for index, piece in pieces_of(answer, generation, batch):
            chunks += answer.chunks(index, piece)
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
    return answer.whole(pieces)


def finished(answer: Answer) -> bool:
    """Whether every choice has ended."""
    return all(choice.finished for choice in answer.choices)


def pieces_of(answer: Answer, generation: Generation, batch: list[tuple[int, Delta]]) -> Iterator[tuple[int, Piece]]:
    """The text of a batch; tells the engine about stop strings found on the way."""
    for index, delta in batch:
        piece = answer.choices[index].take(delta)
        if piece.finish_at is not None:
            generation.finish(index, piece.finish_at)
        yield index, piece
