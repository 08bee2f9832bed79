"""Token buckets: the rate in the long run, the burst, debts, and tables of them that stay bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.token_bucket import Meter, Meters, TokenBucket


def test_a_burst_passes_and_then_the_rate() -> None:
    bucket = TokenBucket(10.0, 5.0, 0.0)
    assert [bucket.take(1, 0.0) for _ in range(5)] == [0.0] * 5
    assert bucket.take(1, 0.0) > 0
    assert bucket.take(1, 0.1) == 0.0
    assert bucket.take(1, 0.1) > 0


def test_a_batch_above_the_burst_is_taken_and_its_debt_is_waited_for() -> None:
    bucket = TokenBucket(10.0, 5.0, 0.0)
    assert bucket.take(25, 0.0) == 0.0
    assert bucket.take(1, 0.0) == pytest.approx(2.0)
    assert bucket.take(1, 1.5) == pytest.approx(0.5)
    assert bucket.take(1, 2.1) == 0.0


def test_a_silence_is_worth_one_burst_only_and_time_never_goes_back() -> None:
    bucket = TokenBucket(10.0, 5.0, 0.0)
    assert bucket.take(5, 1000.0) == 0.0
    assert bucket.take(1, 1000.0) > 0
    assert bucket.take(1, 999.0) > 0
    assert bucket.full_at() == pytest.approx(1000.5)


def test_spending_tells_how_long_the_debt_takes() -> None:
    bucket = TokenBucket(10.0, 5.0, 0.0)
    assert bucket.spend(5, 0.0) == 0.0
    assert bucket.spend(20, 0.0) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 50)), min_size=20, max_size=200), st.floats(1.0, 1000.0))
def test_what_passes_never_exceeds_rate_and_burst_by_more_than_a_batch(steps: list[tuple[float, int]], rate: float) -> None:
    bucket, now, passed = TokenBucket(rate, rate, 0.0), 0.0, 0
    for pause, amount in steps:
        now += pause
        if not bucket.take(amount, now):
            passed += amount
    assert passed <= rate * now + rate + 50


@given(st.integers(1, 100), st.integers(1, 60))
def test_waiting_as_told_is_enough(rate: int, amount: int) -> None:
    bucket = TokenBucket(rate, rate, 0.0)
    now = 0.0
    for _ in range(50):
        wait_s = bucket.take(amount, now)
        if wait_s:
            now += wait_s + 1e-6
            assert bucket.take(amount, now) == 0.0


def test_a_meter_asks_both_buckets_and_takes_from_neither_when_one_says_no() -> None:
    meter = Meter(100.0, 1000.0, 1.0, 0.0)
    assert meter.take(1, 1500, 0.0) == 0.0
    assert meter.take(1, 1, 0.0) == pytest.approx(0.5)
    assert meter.take(98, 1, 0.6) == 0.0
    assert meter.take(3, 1, 0.6) == 0.0  # had the refusal taken a message, one would be missing


def test_a_rate_of_zero_is_no_limit() -> None:
    assert Meter(0, 10.0, 1.0, 0.0).take(10**9, 1, 0.0) == 0.0
    assert Meter(10.0, 0, 1.0, 0.0).take(1, 10**9, 0.0) == 0.0
    assert Meter(0, 0, 1.0, 0.0).spend(10**9, 10**9, 0.0) == 0.0


def test_keys_have_meters_of_their_own() -> None:
    meters: Meters[str] = Meters(10.0, 0, 1.0, 100)
    assert meters.take("a", 10, 0, 0.0) == 0.0
    assert meters.take("a", 1, 0, 0.0) > 0
    assert meters.take("b", 10, 0, 0.0) == 0.0
    meters.forget("a")
    assert meters.take("a", 1, 0, 0.0) == 0.0


def test_the_table_is_bounded_and_forgets_who_was_silent_longest() -> None:
    meters: Meters[int] = Meters(1.0, 0, 1.0, 10)
    for key in range(1000):
        meters.take(key, 100, 0, 0.0)
        meters.take(0, 1, 0, 0.0)
    assert len(meters) == 10
    assert meters.evicted == 990
    assert meters.take(0, 1, 0, 0.0) > 0
    assert meters.take(999, 1, 0, 0.0) > 0


def test_full_meters_are_forgotten_before_the_bound() -> None:
    meters: Meters[int] = Meters(1.0, 0, 1.0, 1000)
    for key in range(500):
        meters.take(key, 1, 0, float(key) * 10)
    assert len(meters) < 5
    assert meters.evicted == 0
