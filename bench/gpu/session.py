"""One run of the benchmark: its clock, what was found so far, and parts that fail without taking the others along."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench import record
from bench.gpu.device import Device
from bench.gpu.settings import Settings


class Broken(RuntimeError):
    """A kernel ended badly, and with it all that this process could still ask of the GPU."""


class Clock:
    """A time limit in seconds from now on, and the list of what did not fit into it.

    A slice is a part's own limit inside this one; it writes into the same list.
    """

    def __init__(self, limit: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun = now()
        self.end = self._begun + limit
        self.skipped: list[str] = []

    @property
    def spent(self) -> float:
        """Seconds since it was started."""
        return self._now() - self._begun

    @property
    def left(self) -> float:
        """Seconds until its end; 0 when that is past."""
        return max(0.0, self.end - self._now())

    def fits(self, what: str, seconds: float) -> bool:
        """Whether there is time for ``what``, which takes about ``seconds``; if not it is noted as left out."""
        if seconds <= self.left:
            return True
        self.skipped.append(what)
        return False

    def slice(self, limit: float) -> Self:
        """A clock of its own that ends with this one at the latest."""
        part = type(self)(min(limit, self.left), now=self._now)
        part.skipped = self.skipped
        return part


#: A part is begun so often: one that died is tried once more.
_TRIES = 2
#: Seconds after which a part that hangs takes the process along; the next one goes on with another part.
_HANGS = 240.0
#: What another process has to know to go on.
_KEPT = ("found", "measured", "failures", "tried", "done", "read")


@dataclass(slots=True)
class Session:
    """found: results by part. measured: what the bars are about. failures: parts that raised, or whose check failed.
    read: bytes per second of the probe. kept: a file that has all of it after each part, and from which another process
    goes on. tried: how often each part was begun. done: those that need not be run again.
    """

    device: Device
    settings: Settings
    clock: Clock
    read: float = 1.0
    kept: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float | None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    tried: dict[str, int] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def resume(self, kept: Path) -> None:
        """Go on from this file, if it is there. Raises ValueError for what another GPU has said."""
        self.kept = kept
        if not kept.exists():
            return
        before = json.loads(kept.read_text())
        if before["gpu"] != self.device.name:
            raise ValueError(f"--resume {kept.name}: it is of another GPU, {before['gpu']}; name another file")
        for name in _KEPT:
            setattr(self, name, before[name])
        for name, tries in self.tried.items():
            if tries >= _TRIES and name not in self.done:
                self.failures.append(f"{name}: the process died")
                self.done.append(name)

    def keep(self) -> None:
        """Write everything down: a machine is lent for minutes, and a process may die at any of them."""
        if self.kept is None:
            return
        state = {"gpu": self.device.name} | {name: record.plain(getattr(self, name)) for name in _KEPT}
        fresh = self.kept.with_suffix(".new")
        fresh.write_text(json.dumps(state, indent=1))
        fresh.replace(self.kept)

    def part(self, name: str, needs: float, run: Callable[[], object]) -> None:
        """Run a part that takes at least ``needs`` seconds, if they are left; what it raises is shown and noted.

        It is done when nothing of it was left out. Raises :class:`Broken` where the GPU answers no more.
        """
        if name in self.done or not self.clock.fits(name, needs):
            return
        begun, left_out, failed = self.clock.spent, len(self.clock.skipped), len(self.failures)
        self.tried[name] = self.tried.get(name, 0) + 1
        self.keep()
        self.say(f"{name} ...")
        self._run(name, run)
        self.device.free()
        self.found.setdefault("seconds", {})[name] = self.clock.spent - begun
        if len(self.clock.skipped) == left_out or self.tried[name] >= _TRIES:
            self.done.append(name)
        elif self.kept is not None:
            del self.failures[failed:]  # it is run again, whole
        self.keep()

    def _run(self, name: str, run: Callable[[], object]) -> None:
        if self.kept is not None and self.device.cuda:
            signal.setitimer(signal.ITIMER_REAL, _HANGS)  # a kernel that never ends raises nothing: the process dies
        try:
            run()
        except Exception as error:  # another part may still tell something
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            if "CUDA error" in str(error):
                self.done.append(name)
                self.keep()
                raise Broken(name) from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def expect(self, good: bool, what: str) -> None:
        """Note a check that failed."""
        if not good:
            self.failures.append(what)

    def say(self, text: str) -> None:
        """Progress, with the time since the start."""
        print(f"[{self.clock.spent:5.1f} s] {text}", file=sys.stderr, flush=True)
