"""Token buckets and guesses at how long to wait, on a clock that a test moves."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foresay.server.gateway.caller import LONGEST, Limits, Pace, RateLimiter, TokenBucket
from foresay.server.schemas.errors import RateLimited
from tests.gateway.guarded import Clock

#: What happens to a bucket: so many seconds pass, then somebody wants so much.
EVENTS = st.lists(
    st.tuples(st.floats(0, 200, allow_nan=False), st.integers(0, 500)),
    max_size=60,
)


def test_a_bucket_holds_one_minute_and_fills_steadily():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.level == 60
    bucket.spend(60)
    assert not bucket.holds(1)
    clock.now += 1.5
    assert bucket.level == pytest.approx(1.5)
    assert bucket.seconds_until(2) == pytest.approx(0.5)
    clock.now += 3600
    assert bucket.level == 60


def test_what_is_owed_is_paid_before_anything_can_be_had():
    clock = Clock()
    bucket = TokenBucket(600, clock)
    bucket.spend(700)
    assert bucket.level == -100
    assert bucket.seconds_until(1) == pytest.approx(10.1)
    clock.now += 10
    assert not bucket.holds(1)
    clock.now += 0.1
    assert bucket.holds(1)


def test_more_than_a_bucket_ever_holds_is_waited_for_until_it_is_full():
    bucket = TokenBucket(10, Clock())
    bucket.spend(10)
    assert bucket.seconds_until(1000) == pytest.approx(60)


def test_time_that_goes_backwards_takes_nothing_away():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.spend(30)
    clock.now -= 100
    assert bucket.level == 30


@given(per_minute=st.integers(1, 1000), events=EVENTS)
def test_over_any_time_no_more_is_had_than_a_minutes_worth_and_the_rate(per_minute, events):
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    had: list[tuple[float, int]] = []
    for passed, amount in events:
        clock.now += passed
        if bucket.holds(amount):
            bucket.spend(amount)
            had.append((clock.now, amount))
    for first, (begin, _) in enumerate(had):
        total = 0
        for at, amount in had[first:]:
            total += amount
            assert total <= per_minute * (1 + (at - begin) / 60) + 1e-3


@given(per_minute=st.integers(1, 1000), events=EVENTS)
def test_after_the_stated_wait_a_request_is_let_in(per_minute, events):
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    for passed, amount in events:
        clock.now += passed
        bucket.spend(amount)  # owing is allowed
        clock.now += math.ceil(bucket.seconds_until(1))
        assert bucket.holds(1)


@given(per_minute=st.integers(1, 1000), events=EVENTS)
def test_the_stated_wait_is_not_a_second_too_long(per_minute, events):
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    for passed, amount in events:
        clock.now += passed
        bucket.spend(amount)
        wait = bucket.seconds_until(1)
        if wait > 0.01:
            clock.now += wait - 0.005
            assert bucket.level < 1


def test_the_estimate_of_the_next_free_slot_follows_littles_law():
    pace = Pace()
    assert pace.retry_after(5) == 1
    for _ in range(100):
        pace.finished(40.0)
    assert (pace.retry_after(4), pace.retry_after(10), pace.retry_after(1000)) == (10, 4, 1)
    assert pace.retry_after(0) == 1
    for _ in range(100):
        pace.finished(4000.0)
    assert pace.retry_after(2) == LONGEST


# -- rate limiters -----------------------------------------------------------------------------------------------------


def test_a_refused_request_is_charged_nothing():
    clock = Clock()
    limits = Limits(max_requests_per_minute=6, max_tokens_per_minute=100, max_concurrent_requests=2)
    rate_limiter = RateLimiter(limits, clock)
    rate_limiter.enter(2, 30)
    with pytest.raises(RateLimited, match="it may have 2 at once"):
        rate_limiter.enter(1, 30)
    assert rate_limiter.requests is not None and rate_limiter.tokens is not None
    assert (rate_limiter.running, rate_limiter.requests.level, rate_limiter.tokens.level) == (2, 5, 70)
    rate_limiter.leave(2, 1.0)
    rate_limiter.spend(80)
    with pytest.raises(RateLimited, match="100 tokens per minute; try again in 7 s") as refused:
        rate_limiter.enter(1, 1)
    assert refused.value.headers == {"Retry-After": "7"}
    assert (rate_limiter.running, rate_limiter.requests.level) == (0, 5)


def test_requests_are_counted_by_answer_and_slots_by_choice():
    rate_limiter = RateLimiter(Limits(max_requests_per_minute=2, max_concurrent_requests=5), Clock())
    rate_limiter.enter(4, 10)
    rate_limiter.enter(1, 10)
    rate_limiter.leave(4, 1.0)
    with pytest.raises(RateLimited, match="2 requests per minute; try again in 30 s"):
        rate_limiter.enter(1, 10)


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "spend"]), st.integers(1, 4), st.floats(0, 20)), max_size=80
    )
)
def test_slots_are_never_more_than_allowed_and_all_come_back(events):
    clock = Clock()
    rate_limiter = RateLimiter(
        Limits(max_requests_per_minute=30, max_tokens_per_minute=300, max_concurrent_requests=4), clock
    )
    inside: list[int] = []
    for what, number, passed in events:
        clock.now += passed
        if what == "enter":
            with contextlib.suppress(RateLimited):
                rate_limiter.enter(number, 20 * number)
                inside.append(number)
        elif what == "leave" and inside:
            rate_limiter.leave(inside.pop(), passed)
        elif what == "spend" and inside:
            rate_limiter.spend(10 * number)
        assert rate_limiter.running == sum(inside) <= 4
    for number in inside:
        rate_limiter.leave(number, 1.0)
    assert rate_limiter.running == 0
