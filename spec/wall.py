"""A wall around drafters, and around choosing drafts: whatever fails there costs speed, and no text.

::

    propose, find, prepare       nothing is drafted in this step; after three failures in a row: off
    committed, extend, observe   its state may be wrong now: off
    off                          it is called no more until the engine restarts
"""

from __future__ import annotations

import importlib
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from foresay.spec.sequence import SequenceState

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("foresay.drafters")

#: Failures in a row after which a drafter is switched off: one may be a text's, three are the drafter's.
MOST_FAILURES = 3


class BadProposal(ValueError):
    """A drafter returned an invalid proposal; the message says why."""


class Wall:
    """off: why drafters, by name, are called no more. failures: of each in all."""

    def __init__(self) -> None:
        self.off: dict[str, str] = {}
        self.failures = Counter[str]()
        self._in_a_row = Counter[str]()

    def ask(
        self,
        name: str,
        call: Callable[Concatenate[Sequence[SequenceState], P], T],
        sequences: Sequence[SequenceState],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T | None:
        """What a call for drafts of these sequences returns; None if it failed, or is off. A sys.exit would end all
        texts, so it is a failure too."""
        if name not in self.off:
            try:
                found = call(sequences, *args, **kwargs)
            except (Exception, SystemExit) as error:
                self._in_a_row[name] += 1
                self._failed(name, call.__name__, error, off=self._in_a_row[name] >= MOST_FAILURES)
            else:
                self._in_a_row[name] = 0
                return found
        self.explain(name, sequences)
        return None

    def tell(self, name: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell a drafter what became text, or what ended; of that one that is off is told too."""
        if name in self.off and call.__name__ != "finished":
            return
        try:
            call(*args, **kwargs)
        except (Exception, SystemExit) as error:
            self._failed(name, call.__name__, error, off=True)

    def explain(self, name: str, sequences: Iterable[SequenceState]) -> None:
        """Say in these sequences why nothing comes from this drafter."""
        for sequence in sequences:
            sequence.unable = self.off.get(name) or f"{name} cannot draft: it failed, as the log says."

    def _failed(self, name: str, call: str, error: BaseException, off: bool) -> None:
        self.failures[name] += 1
        if (off and name not in self.off) or self.failures[name] == 1:
            then = "is switched off until the engine restarts" if off else "drafts nothing in this step"
            shown = None if isinstance(error, BadProposal) else error
            log.warning("%s failed in %s and %s: %s", name, call, then, where_raised(error), exc_info=shown)
        if off:
            self.off[name] = f"{name} is switched off until the engine restarts: it failed in {call}, as the log says."


@runtime_checkable
class Walled(Protocol):
    """Drafters behind a wall."""

    wall: Wall


def wall_of(drafter: object) -> Wall:
    """The wall that a drafter's members are behind, or one of its own."""
    return drafter.wall if isinstance(drafter, Walled) else Wall()


def where_raised(error: BaseException) -> str:
    """The exception and where it was raised."""
    if isinstance(error, BadProposal):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = frames and frames[-1].filename != importlib.__file__
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"
