"""``/v1/responses`` of the real server with the bundled pair, through the official clients."""

from __future__ import annotations

import asyncio
from typing import Any

LAST = ("response.completed", "response.incomplete", "response.failed", "error")


async def test_a_warm_up_fills_the_cache(client):
    long = "There was once a miller who had three sons and a cat. " * 4
    async with client.responses.connect() as connection:
        await connection.response.create(model="bundled", instructions=long, generate=False, store=False)
        warm = await _last(connection)
        assert warm.output == [] and warm.usage.input_tokens > 40
        await connection.response.create(
            model="bundled",
            instructions=long,
            input="Go on.",
            previous_response_id=warm.id,
            max_output_tokens=4,
            store=False,
        )
        response = await _last(connection)
    assert response.usage.input_tokens_details.cached_tokens >= warm.usage.input_tokens - 16


async def _last(connection: Any) -> Any:
    async with asyncio.timeout(60):
        async for event in connection:
            assert event.type != "error", event
            if event.type in LAST:
                return event.response
    raise AssertionError("the connection was closed")
