"""The server's end of the socket pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.host import frames


class Channel(asyncio.Protocol):
    """Frames over the socket pair; ``closed`` is done when the engine's end is gone. retired: it was closed because
    another engine goes on."""

    def __init__(self, receive: Callable[[frames.DownFrame], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._splitter = frames.FrameSplitter()
        self._transport: asyncio.WriteTransport | None = None
        self._heard = self.retired = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard = True
        for body in self._splitter.feed(data):
            self._receive(frames.unpack_down(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    def heard(self) -> bool:
        """Whether anything came since this was asked last."""
        heard, self._heard = self._heard, False
        return heard

    def send(self, frame: frames.UpFrame) -> None:
        """Send a frame; into the void if the engine is gone."""
        if self._transport is not None:
            self._transport.write(frames.pack(frame))

    def hand_to(self, receive: Callable[[frames.DownFrame], None]) -> None:
        """Frames go to another from now on."""
        self._receive = receive

    def retire(self) -> None:
        """Another engine goes on: nothing that still comes of this one counts."""
        self.retired = True
        self.hand_to(lambda frame: None)
        self.send(frames.Stop())
        self.close()

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None:
            self._transport.close()
