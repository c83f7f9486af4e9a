"""Whoever is shown what the engine does, when nobody waits for its tokens.

The engine notes what happens and tells it later: :meth:`Observers.tell` is for the moment after the tokens of a step
went out. What is told is in order, and every event sees the sequence as it was when the event happened: the engine
tells before it changes anything again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import StepTrace

log = logging.getLogger("foresay.engine")


class Observer:
    """Overrides what it wants to know. It must not change what it is shown."""

    def begun(self, sequence: SequenceState) -> None:
        """A request was queued: its tokens are the prompt."""

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """A step is over; the tokens it emitted are the last ones of their sequences."""

    def ended(self, sequence: SequenceState) -> None:
        """A sequence is over, and this is its text."""

    def cut(self, id: str, at_token: int) -> None:
        """A sequence that had ended before ends, as was found later, with its output token number ``at_token``."""

    def dropped(self, error: Exception) -> None:
        """One of these raised, so that none is called any more: what it knows is no longer what happened."""


class Observers:
    """What was noted for some observers and not told yet. Costs nothing where nobody observes."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._untold: list[Callable[[Observer], None]] = []

    def note(self, event: Callable[[Observer], None], place: int | None = None) -> None:
        """Remember an event. place: before which noted one; behind all of them if None."""
        if self._observers:
            self._untold.insert(len(self._untold) if place is None else place, event)

    @property
    def noted(self) -> int:
        """How many events are not told yet."""
        return len(self._untold)

    def tell(self) -> None:
        """Tell what was noted. An observer that fails is told no more: no text shall end because of who looked on."""
        if self._untold:
            events, self._untold = self._untold, []
            for observer in list(self._observers):
                self._tell(observer, events)

    def _tell(self, observer: Observer, events: Sequence[Callable[[Observer], None]]) -> None:
        try:
            for event in events:
                event(observer)
        except Exception as error:
            log.exception("%s failed and is no longer notified", type(observer).__name__)
            self._observers.remove(observer)
            observer.dropped(error)
