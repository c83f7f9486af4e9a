"""The events of a response read once more, from the record of those made last; a running one is followed to its end."""

from __future__ import annotations

import asyncio

from aiohttp import web

from server.api.common.sse import NAMED_EVENTS, EventStream
from server.api.responses.store import Record
from spec.errors import InvalidRequest


async def follow(http: web.Request, record: Record, after: int, ping: float) -> web.StreamResponse:
    """Send the events with numbers above ``after``; :class:`InvalidRequest` if some of them are no longer kept.

    ping: seconds between comments while there is nothing to send.
    """
    first = record.events[0].sequence_number if record.events else 0
    if after + 1 < first:
        raise InvalidRequest(
            "starting_after",
            f"Only the last {len(record.events)} events are kept, from number {first} on",
        )
    events = EventStream(http, NAMED_EVENTS)
    while True:
        changed = record.changed  # taken before looking, so that nothing that comes later is missed
        over = record.response.status != "in_progress"
        fresh = [event for event in record.events if event.sequence_number > after]
        await events.send(fresh)
        after = max([after, *(event.sequence_number for event in fresh)])
        if over:
            return await events.end()
        try:
            async with asyncio.timeout(ping):
                await changed.wait()
        except TimeoutError:
            await events.write(NAMED_EVENTS.ping)
