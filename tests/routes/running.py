"""The real application over real HTTP in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from typing import Any

from aiohttp.test_utils import TestServer

from foresay.server.engine.generation import Sink
from foresay.server.engine_process import frames
from foresay.server.http.app import HTTP_LOG, create_app
from foresay.server.models.service import Text
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from foresay.spec.request import Request
from tests.replicas.scripted import asked
from tests.server.scripted import ScriptedEngine
from tests.server.staying import alone, service_of


class SentEngine(ScriptedEngine):
    """A scripted engine that gets its requests the way the real one does: as bytes."""

    def add(self, request: Request, sink: Sink) -> None:
        frame = frames.unpack_up(frames.pack(frames.Add(request))[frames.HEADER_BYTES :])
        assert isinstance(frame, frames.Add)
        super().add(frame.request, sink)


def scripted_server(tokenizer: Tokenizer, tokens: list[int], run: int = 4) -> AbstractContextManager[str]:
    """The address of a server whose engine says ``tokens``."""
    return running(SentEngine(tokens, run), tokenizer)


@contextmanager
def running(engine: ScriptedEngine, tokenizer: Tokenizer, **options: Any) -> Iterator[str]:
    """The address of a server around ``engine``."""
    loop, replicas = asyncio.new_event_loop(), AsyncExitStack()

    async def start() -> TestServer:
        text = Text(tokenizer, SamplingDefaults(), ChatFormat.of(tokenizer))
        asking = await replicas.enter_async_context(asked(engine))
        server = TestServer(create_app(alone(service_of(asking, text, **options))))
        await server.start_server(logger=HTTP_LOG)
        return server

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
        try:
            yield str(server.make_url("")).rstrip("/")
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(120)
            asyncio.run_coroutine_threadsafe(replicas.aclose(), loop).result(120)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
