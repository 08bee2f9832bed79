"""Weights out of heartbeats: down and up in steps, late, and never because of jitter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixiu.ids import EndpointID
from pixiu.placement.link_quality import UNMEASURED, Heartbeats, Quality
from pixiu.placement.weights import DOWN_AFTER, FLOOR_US, STEPS, UP_AFTER, Weights

A, B, C = EndpointID(1), EndpointID(2), EndpointID(3)
GOOD = Quality(1_000.0, 1.0)


def slow(times: float) -> Quality:
    return Quality(times * FLOOR_US, 1.0)


def measured(weights: Weights, quality: Quality, times: int, others: Quality = GOOD) -> list[float]:
    """A's weight after each measurement beside two others."""
    found = []
    for _ in range(times):
        weights.measure([{A: quality, B: others, C: others}])
        found.append(weights.weight(A))
        assert weights.weight(B) == weights.weight(C) == 1.0
    return found


def test_a_slow_replica_loses_weight_after_some_measurements_that_agree() -> None:
    assert measured(Weights(), slow(3), DOWN_AFTER) == [1.0] * (DOWN_AFTER - 1) + [0.5]
    assert measured(Weights(), slow(3), 500)[-1] == 0.5
    assert measured(Weights(), slow(100), 3 * DOWN_AFTER)[-DOWN_AFTER - 1 :] == [0.25] * (DOWN_AFTER + 1)


def test_it_gets_it_back_step_by_step_and_later() -> None:
    weights = Weights()
    measured(weights, slow(100), 2 * DOWN_AFTER)
    found = measured(weights, GOOD, 2 * UP_AFTER)
    assert found == [0.25] * (UP_AFTER - 1) + [0.5] * UP_AFTER + [1.0]
    assert weights.changes == 4


@pytest.mark.parametrize(("answered", "weight"), [(1.0, 1.0), (0.9, 1.0), (0.7, 0.5), (0.4, 0.25), (0.0, 0.25)])
def test_a_replica_that_answers_seldom_loses_weight(answered: float, weight: float) -> None:
    assert measured(Weights(), Quality(1_000.0, answered), 100)[-1] == weight


def test_short_round_trips_are_as_good_as_each_other() -> None:
    assert measured(Weights(), Quality(FLOOR_US, 1.0), 200, Quality(50.0, 1.0))[-1] == 1.0


def test_what_all_have_in_common_is_no_reason() -> None:
    assert measured(Weights(), slow(50), 200, slow(40))[-1] == 1.0


@given(st.randoms(use_true_random=False), st.sampled_from([1.0, 2.0, 3.0, 4.0]))
@pytest.mark.slow
def test_jitter_about_a_boundary_changes_a_weight_once_at_most(rng: random.Random, centre: float) -> None:
    weights = Weights()
    for _ in range(300):
        weights.measure([{A: slow(centre * rng.uniform(0.8, 1.2)), B: GOOD}])
    assert weights.changes <= 1


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), max_size=200))
def test_whatever_is_measured_weights_are_steps_and_change_seldom(found: list[tuple[float, float]]) -> None:
    weights = Weights()
    for quality in found:
        before = weights.changes
        changed = weights.measure([{A: Quality(*quality), B: GOOD}])
        assert changed is (weights.changes > before)
        assert {weights.weight(A), weights.weight(B)} <= set(STEPS)
    assert weights.changes <= len(found) / DOWN_AFTER


def test_partitions_are_measured_each_for_itself() -> None:
    weights = Weights()
    for _ in range(50):
        weights.measure([{A: slow(50)}, {B: GOOD, C: GOOD}])
    assert weights.weight(A) == 1.0, "it has nobody to give rooms to"


def test_one_that_was_never_heard_of_counts_for_nothing_and_one_that_left_is_forgotten() -> None:
    weights = Weights()
    for _ in range(50):
        weights.measure([{A: UNMEASURED, B: slow(9), C: slow(1)}])
    assert (weights.weight(A), weights.weight(B)) == (1.0, 0.25)
    weights.measure([{A: UNMEASURED, C: slow(1)}])
    assert weights.weight(B) == 1.0


def test_the_quality_is_a_smoothed_round_trip_and_the_share_that_was_answered() -> None:
    heartbeats = Heartbeats()
    assert heartbeats.quality == UNMEASURED
    for _ in range(100):
        heartbeats.sent()
        heartbeats.replied(2_000)
    assert heartbeats.quality == (2_000.0, 1.0)
    heartbeats.sent()
    heartbeats.replied(10_000)
    assert heartbeats.last_us == 10_000
    assert 2_000 < heartbeats.quality.round_trip_us <= 3_000
    heartbeats.sent()
    for answered in (False, True) * 50:
        if answered:
            heartbeats.replied(2_000)
        heartbeats.sent()
    assert heartbeats.quality.answered == pytest.approx(0.5, abs=0.1)
    for _ in range(50):
        heartbeats.sent()
    assert heartbeats.quality.answered < 0.01
