"""Whether an engine is exact, as the probe finds it at a start; or as it found it at an earlier start of the very same,
and then it is run again while nobody asks anything.

The probe takes longer than all else of a start whose kernels and weights are kept. What it finds follows from what the
name of a finding follows from: settings, the model's files, threads, the processor, torch and our sources. A finding is
taken for true for a day, only the good one is kept, and one that does not hold any more ends the engine process: the
next one probes before it is ready.
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

#: Seconds that a finding is taken for true, and without a request before it is tried again, which double each time that
#: a trial is given up.
_LASTS, _QUIET = 86400.0, 10.0


class NotExact(RuntimeError):
    """Rows differ although they did not at an earlier start."""


class Witness:
    """Of one engine process. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._quiet_since, self._patience = clock, clock(), _QUIET
        self._key = ""
        self._begin: Callable[[], Generator[None, None, Exactness]] | None = None
        self._passes: Generator[None, None, Exactness] | None = None

    def exactness(self, of: str, model: ModelRunner, pool: PagePool, say: Callable[[str], None]) -> Exactness:
        """What is known, else what the probe finds. of: a digest of what it hangs on, beside the machine and the
        code."""
        self._key = kept.key_of("probe", of, repr(Processor.here()), torch.__version__, kept.sources())
        if (when := self._known()) is not None:
            own = ModelRunner(model.decoder, model.store, model.max_positions)  # recordings that requests use stay
            self._begin = lambda: probing(own, pool)
            return Exactness(True, f"{EQUAL} (probed at an earlier start, {moment(when)[:16].replace('T', ' ')} UTC)")
        say("probing exactness")
        return self._noted(probe(model, pool))

    def _known(self) -> float | None:
        """When rows were found to be equal."""
        try:
            when = float(kept.find(self._key) or b"")
        except ValueError:
            return None
        return when if 0 <= self._clock() - when < _LASTS else None

    def _noted(self, found: Exactness) -> Exactness:
        kept.keep(self._key, str(self._clock()).encode() if found.exact else b"")
        return found

    # -- again, while nobody asks anything -----------------------------------------------------------------------------

    @property
    def going(self) -> bool:
        """Whether it has begun and is not done."""
        return self._passes is not None

    def rest(self, asked: bool) -> None:
        """The engine has something else to do. What has begun is given up, and leaves nothing behind. asked: whether
        that is a request."""
        if asked or self._passes is not None:
            self._quiet_since = self._clock()
        if self._passes is not None:
            self._passes.close()
            self._passes, self._patience = None, 2 * self._patience

    def go_on(self) -> None:
        """Run one pass, if it is time for that. Raises :class:`NotExact` if the last one shows that rows differ."""
        if self._begin is None or self._clock() - self._quiet_since < self._patience:
            return
        self._passes = self._passes or self._begin()
        try:
            next(self._passes)
        except StopIteration as done:
            self._begin = self._passes = None
            found = self._noted(done.value)
            if not found.exact:
                raise NotExact(f"{found.reason}, although they did not at an earlier start") from None
