"""Between the engine and a request's reader: keeps the tokens, and hands them over when the text is whole."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from server.engine.generation import Sink
from server.gateway.caller import REQUEST_ID
from server.observe.selfcheck.answer import Answer
from spec.request import Delta, Request

#: How a text ends that nobody broke off.
WHOLE = ("stop", "length")


class Recorder:
    """A sink that passes on what it gets. keep: called with the answer; not if the request fails or is cancelled."""

    def __init__(self, request: Request, sink: Sink, keep: Callable[[Answer], None]) -> None:
        self._request, self._sink, self._keep = request, sink, keep
        self._request_id = REQUEST_ID.get("")
        self._tokens: list[int] = []

    def put(self, delta: Delta) -> None:
        """More tokens, or the end."""
        self._tokens += delta.tokens
        whole, length = delta.finish_reason in WHOLE, len(self._tokens)
        if delta.statistics is not None:  # fewer than were written, where a stop string cut them
            length = delta.statistics.completion_tokens
        self._sink.put(delta)
        if whole and length:
            self._keep(self._answer(delta.seed, length))

    def fail(self, error: Exception) -> None:
        """No delta will follow."""
        self._sink.fail(error)

    def _answer(self, seed: int, length: int) -> Answer:
        params = msgspec.structs.replace(self._request.params, seed=seed)
        asked = msgspec.structs.replace(self._request, params=params)
        return Answer(asked, self._tokens[:length], self._request_id)
