"""What a server counts of its clients' connections, whatever model they ask for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from server.observe.telemetry.histogram import SOCKET_BOUNDS, Histogram


class Connections:
    """http: responses by status. websockets: open ones; websocket_seconds: how long the others were."""

    def __init__(self) -> None:
        self.http: dict[int, int] = {}
        self.websockets, self.websocket_seconds = 0, Histogram(SOCKET_BOUNDS)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Count a WebSocket while it is open."""
        self.websockets += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.websockets -= 1
            self.websocket_seconds.observe(time.monotonic() - began)

    def answered(self, status: int) -> None:
        """Count an HTTP response."""
        self.http[status] = self.http.get(status, 0) + 1
