"""Rate limits, on a clock that a test moves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foresay.server.gateway.keys import MINUTE, RateLimiter
from foresay.server.schemas.errors import RateLimited
from tests.gateway.guarded import Clock


def wait(limiter: RateLimiter) -> int:
    """Seconds that a request is told to wait; 0: it was let in."""
    try:
        limiter.enter()
    except RateLimited as refused:
        return refused.retry_after or 0
    return 0


def test_a_minute_lets_in_so_many_and_a_refused_one_is_not_counted():
    clock = Clock()
    limiter = RateLimiter(2, clock)
    assert (wait(limiter), wait(limiter), wait(limiter)) == (0, 0, 60)
    clock.now += 20
    with pytest.raises(RateLimited, match="At most 2 requests per minute are allowed; try again in 40 s") as refused:
        limiter.enter()
    assert refused.value.headers == {"Retry-After": "40"}
    clock.now += 40
    assert (wait(limiter), wait(limiter), wait(limiter)) == (0, 0, 60)


def test_without_a_limit_all_are_let_in():
    limiter = RateLimiter(None, Clock())
    assert not any(wait(limiter) for _ in range(1000))


@given(per_minute=st.integers(1, 30), pauses=st.lists(st.floats(0, 40, allow_nan=False), max_size=80))
def test_no_minute_lets_in_more_and_after_the_stated_wait_one_is_let_in(per_minute, pauses):
    clock = Clock()
    limiter, admitted = RateLimiter(per_minute, clock), list[float]()
    for pause in pauses:
        clock.now += pause
        if seconds := wait(limiter):
            assert seconds == math.ceil(admitted[-per_minute] + MINUTE - clock.now), "not a second too long"
            clock.now += seconds
            assert wait(limiter) == 0
        admitted.append(clock.now)
        if len(admitted) > per_minute:
            assert admitted[-1] - admitted[-1 - per_minute] >= MINUTE - 1e-6, "but for what fp64 rounds"
