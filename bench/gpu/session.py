"""One run of the benchmark: its clock, what was found so far, and parts that fail without taking the others along."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.clock import Clock
from bench.gpu.device import Device
from bench.gpu.settings import Settings


@dataclass(slots=True)
class Session:
    """found: results by part. measured: what the bars are about. failures: parts that raised, or whose check failed.
    read: bytes per second of the probe.
    """

    device: Device
    settings: Settings
    clock: Clock
    read: float = 1.0
    found: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float | None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def part(self, name: str, needs: float, run: Callable[[], object]) -> None:
        """Run a part that takes at least ``needs`` seconds, if they are left; what it raises is shown and noted."""
        if not self.clock.fits(name, needs):
            return
        begun = self.clock.spent
        self.say(f"{name} ...")
        try:
            run()
        except Exception as error:  # another part may still tell something
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        self.device.free()
        self.found.setdefault("seconds", {})[name] = self.clock.spent - begun

    def expect(self, good: bool, what: str) -> None:
        """Note a check that failed."""
        if not good:
            self.failures.append(what)

    def say(self, text: str) -> None:
        """Progress, with the time since the start."""
        print(f"[{self.clock.spent:5.1f} s] {text}", file=sys.stderr, flush=True)
