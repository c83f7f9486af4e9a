"""When an engine is given up: by frames and CPU time alone, at looks that are 1 s apart."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from foresay.server.engine_process.child import LOOKS, SLOW_FACTOR, SOON, STOPPED, Watchdog

LONG = LOOKS * SLOW_FACTOR
SEEN = LOOKS // SOON


def looks(
    most: int, heard: bool = False, busy: bool = False, loading: bool = False, kernels: str = "unseen"
) -> tuple[int, str | None]:
    """Looks until the engine is given up, and why; ``most`` if it is not. kernels: whether it is seen that they end."""
    watchdog, ticks = Watchdog(float(LOOKS)), count()
    for look in range(1, most + 1):
        progress = None if kernels == "unseen" else bytes([look % 256 if kernels == "end" else 0])
        if (why := watchdog.look(heard, next(ticks) if busy else 0, loading, False, progress)) is not None:
            return look, why
    return most, None


@pytest.mark.parametrize(
    ("shown", "given_up"),
    [
        ({}, LOOKS),
        ({"busy": True}, LONG),
        ({"loading": True}, LONG),
        ({"heard": True}, None),
        ({"heard": True, "busy": True}, None),
        ({"busy": True, "loading": True}, None),
        ({"kernels": "hang"}, SEEN + 1),
        ({"kernels": "hang", "busy": True}, LOOKS + 1),
        ({"kernels": "hang", "heard": True}, None),
        ({"kernels": "end", "busy": True}, LONG),
    ],
)
def test_what_shows_life_and_for_how_long(shown: dict[str, Any], given_up: int | None) -> None:
    look, why = looks(3 * LONG, **shown)
    assert (look if why is not None else None) == given_up


def test_the_reason_says_what_was_missed_and_for_how_long() -> None:
    assert looks(LONG)[1] == "the engine process hung (no sign of life for 30 s)"
    assert looks(LONG, busy=True)[1] == "the engine process hung (busy, but no answer for 600 s)"
    assert looks(LONG, kernels="hang")[1] == "the engine process hung (no sign of life for 6 s)"
    assert looks(LONG, busy=True, kernels="hang")[1] == "the engine process hung (busy, but no kernel ended for 30 s)"


@pytest.mark.parametrize("loading", [False, True])
def test_one_that_was_stopped_is_not_waited_for(loading: bool) -> None:
    """Unless it goes on at once, or a debugger has stopped it."""
    watchdog = Watchdog(30.0)
    assert STOPPED * watchdog.interval <= 2.0
    for _ in range(3):
        assert [watchdog.look(True, 0, loading, stopped=True) for _ in range(STOPPED - 1)] == [None] * (STOPPED - 1)
        assert watchdog.look(True, 0, loading) is None
    *_, why = (watchdog.look(False, 0, loading, stopped=True) for _ in range(STOPPED))
    assert why == "the engine process hung (it was stopped by a signal 2 s ago)"


def test_any_sign_of_life_starts_the_count_again() -> None:
    watchdog = Watchdog(float(LOOKS))
    for ticks in range(1, 4):
        for _ in range(LOOKS - 1):
            assert watchdog.look(False, ticks, False) is None
    assert watchdog.look(True, 3, False) is None
    for _ in range(LOOKS - 1):
        assert watchdog.look(False, 3, False) is None
    assert watchdog.look(False, 3, False) is not None
