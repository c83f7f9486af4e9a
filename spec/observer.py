"""Observers of the engine, which are notified when nothing waits for its tokens.

The engine queues events and delivers them later: :meth:`Observers.notify` is called after a step's tokens were sent.
Events are delivered in order, and each sees the sequence as it was when the event happened: the engine delivers them
before it changes anything again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import StepTrace

log = logging.getLogger("foresay.engine")


class Observer:
    """Override the events you need. An observer must not change its arguments."""

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """A step has ended; the tokens it emitted are the last ones of their sequences."""

    def ended(self, sequence: SequenceState) -> None:
        """A sequence has ended, with this text."""

    def dropped(self, error: Exception) -> None:
        """One of these methods raised, so the observer is not called any more: its state is out of date."""


class Observers:
    """Events that are not delivered yet. Costs nothing without observers."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._queued: list[Callable[[Observer], None]] = []

    def add(self, observer: Observer) -> None:
        """Deliver events to one more, from now on."""
        self._observers.append(observer)

    def note(self, event: Callable[[Observer], None], at: int | None = None) -> None:
        """Queue an event. at: the index in the queue; None: at the end."""
        if self._observers:
            self._queued.insert(len(self._queued) if at is None else at, event)

    @property
    def noted(self) -> int:
        """How many events are not delivered yet."""
        return len(self._queued)

    def notify(self) -> None:
        """Deliver the queued events. An observer that fails is dropped: no text may end because of an observer."""
        if self._queued:
            events, self._queued = self._queued, []
            for observer in list(self._observers):
                self._deliver(observer, events)

    def _deliver(self, observer: Observer, events: Sequence[Callable[[Observer], None]]) -> None:
        try:
            for event in events:
                event(observer)
        except Exception as error:
            log.exception("%s failed and is no longer notified", type(observer).__name__)
            self._observers.remove(observer)
            observer.dropped(error)
