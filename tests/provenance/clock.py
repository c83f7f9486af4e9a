"""An event loop whose clock jumps to the next timer instead of waiting for it, so that times are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class _Jumping(selectors.DefaultSelector):
    """Never waits: what the loop would have waited is added to ``now``."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Nothing in it may wait for anything but timers."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run with such a clock."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)


def jumping(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs with such a clock: what else the machine does changes no order in it."""

    @wraps(test)
    def running(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return running
