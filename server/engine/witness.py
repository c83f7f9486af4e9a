"""Whether an engine is exact: probed at this start, or found at an earlier start of the same engine and then probed
again while no request runs.

The probe takes longer than everything else in a start with cached kernels and weights. Its result is cached under a key
of all that it depends on: settings, the model's files, threads, the processor, torch and our sources. A result is valid
for a day, only "exact" is cached, and if a later probe contradicts it the engine process ends: the next one probes
before it is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import torch

from foresay.kvpaging import PagePool
from foresay.server.settings.units import moment
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu import kept
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.probe import EQUAL, Exactness, probe, probing

#: Seconds for which a result is valid; and idle seconds before it is probed again, doubled each time a trial is
#: interrupted.
_LASTS, _QUIET = 86400.0, 10.0


class NotExact(RuntimeError):
    """Rows differ, although they did not at an earlier start."""


class Witness:
    """The exactness of one engine process. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._quiet_since, self._pause = clock, clock(), _QUIET
        self._key = ""
        self._begin: Callable[[], Generator[None, None, Exactness]] | None = None
        self._passes: Generator[None, None, Exactness] | None = None

    def exactness(self, of: str, model: ModelRunner, pool: PagePool, report: Callable[[str], None]) -> Exactness:
        """The cached result, else the probe's. of: a digest of what it depends on, besides the machine and the code."""
        self._key = kept.key_of("probe", of, repr(Processor.here()), torch.__version__, kept.sources())
        if (when := self._known()) is not None:
            own = ModelRunner(model.decoder, model.store, model.max_positions)  # keeps the recordings of requests
            self._begin = lambda: probing(own, pool)
            return Exactness(True, f"{EQUAL} (probed at an earlier start, {moment(when)[:16].replace('T', ' ')} UTC)")
        report("probing exactness")
        return self._noted(probe(model, pool))

    def _known(self) -> float | None:
        """When rows were found to be equal; None if no valid result is cached."""
        try:
            when = float(kept.find(self._key) or b"")
        except ValueError:
            return None
        return when if 0 <= self._clock() - when < _LASTS else None

    def _noted(self, found: Exactness) -> Exactness:
        kept.keep(self._key, str(self._clock()).encode() if found.exact else b"")
        return found

    # -- trials while no request runs -----------------------------------------------------------------------------

    @property
    def going(self) -> bool:
        """Whether a trial is in progress."""
        return self._passes is not None

    def rest(self, requested: bool) -> None:
        """The engine has something else to do: abort a trial, which leaves nothing behind. requested: whether that is a
        request."""
        if requested or self._passes is not None:
            self._quiet_since = self._clock()
        if self._passes is not None:
            self._passes.close()
            self._passes, self._pause = None, 2 * self._pause

    def go_on(self) -> None:
        """Run one pass of the trial, if it is time. Raises :class:`NotExact` if the last one shows that rows differ."""
        if self._begin is None or self._clock() - self._quiet_since < self._pause:
            return
        self._passes = self._passes or self._begin()
        try:
            next(self._passes)
        except StopIteration as done:
            self._begin = self._passes = None
            found = self._noted(done.value)
            if not found.exact:
                raise NotExact(f"{found.reason}, although they did not at an earlier start") from None
