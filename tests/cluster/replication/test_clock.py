"""The time of entries under wall clocks that jump, and that are wrong from the start."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.replication.core.clock import MAX_STEP_US, Clock

YEAR_US = 365 * 86_400 * 1_000_000
HOUR_US = 3_600 * 1_000_000
BEGIN = 50 * YEAR_US
BEGIN_2018_US = 48 * YEAR_US


def read(clock: Clock, wall_us: int, now: float, *others: int) -> int:
    """What a leader reads: other replicas' wall clocks are `others`, Unix µs."""
    clock.saw(wall_us, now)
    clock.judge([other - round(now * 1_000_000) for other in others])
    return clock.time_us(now)


def test_small_corrections_of_the_clock_are_followed() -> None:
    rng, clock, wall, now = random.Random(3), Clock(), YEAR_US, 0.0
    for _ in range(200):
        now += 1.0
        wall += 1_000_000 + rng.randint(-5_000_000, 5_000_000)
        assert read(clock, wall, now) == wall
        assert clock.off_s == 0.0


@pytest.mark.parametrize("jump", [10 * YEAR_US, -10 * YEAR_US, MAX_STEP_US + 1, -MAX_STEP_US - 1])
@pytest.mark.parametrize("others", [1, 2])
def test_a_jump_is_not_followed_and_is_said_until_the_clock_is_right_again(jump: int, others: int) -> None:
    clock = Clock()
    read(clock, BEGIN, 5.0, *[BEGIN] * others)
    for second in range(1, 500):
        expected = BEGIN + second * 1_000_000
        assert read(clock, expected + jump, 5.0 + second, *[expected] * others) == expected
    assert clock.off_s == jump / 1_000_000
    right = BEGIN + 500 * 1_000_000 + 7
    assert read(clock, right, 505.0, *[right] * others) == right
    assert clock.off_s == 0.0


@pytest.mark.parametrize("far", [10 * YEAR_US, -10 * YEAR_US])
def test_who_takes_office_with_a_wrong_clock_goes_on_with_the_former_leaders_time(far: int) -> None:
    clock = Clock()
    clock.heard(BEGIN, 5.0)
    assert read(clock, BEGIN + far, 6.0) == BEGIN + 1_000_000
    assert read(clock, BEGIN + far, 7.0, BEGIN + 2_000_000) == BEGIN + 2_000_000
    assert clock.off_s == pytest.approx(far / 1e6, abs=2)


@pytest.mark.parametrize("jump", [8 * HOUR_US, -8 * HOUR_US, 30 * HOUR_US, -30 * HOUR_US, 10 * YEAR_US, BEGIN_2018_US - BEGIN])
def test_a_jump_of_the_only_clock_that_ever_spoke_is_followed_when_it_lasts(jump: int) -> None:
    clock = Clock()
    read(clock, BEGIN, 5.0)
    for second in range(1, 60):  # and it is no better for a clock that changes again meanwhile
        expected = BEGIN + second * 1_000_000
        assert read(clock, expected + (jump if second > 30 else -jump), 5.0 + second) == expected
    assert clock.off_s == jump / 1_000_000
    for second in range(60, 120):
        read(clock, BEGIN + second * 1_000_000 + jump, 5.0 + second)
    assert clock.time_us(125.0) == BEGIN + 120 * 1_000_000 + jump
    assert clock.off_s == 0.0


@pytest.mark.parametrize(
    "ask", [lambda clock: clock.heard(BEGIN, 5.0), lambda clock: read(clock, BEGIN, 5.0, BEGIN)], ids=["led", "leads"]
)
def test_who_ever_agreed_with_another_one_does_not_follow_its_own_clock_alone(ask: Callable[[Clock], object]) -> None:
    clock = Clock()
    ask(clock)
    for second in range(1, 500):
        read(clock, BEGIN + second * 1_000_000 + YEAR_US, 5.0 + second)
    assert clock.time_us(505.0) == BEGIN + 500 * 1_000_000


def test_of_two_clocks_that_nobody_judges_the_earlier_one_is_taken_of_three_the_middle_one() -> None:
    assert read(Clock(), BEGIN + YEAR_US, 5.0, BEGIN) == BEGIN
    assert read(Clock(), BEGIN, 5.0, BEGIN + YEAR_US) == BEGIN
    for far in (YEAR_US, -YEAR_US):
        assert read(Clock(), BEGIN + far, 5.0, BEGIN, BEGIN + 9) == (BEGIN + 9 if far > 0 else BEGIN)
        assert read(Clock(), BEGIN + 5, 5.0, BEGIN + far, BEGIN) == BEGIN + 5


def test_an_agreement_on_a_wrong_time_ends_when_two_clocks_speak_against_it() -> None:
    clock = Clock()
    assert read(clock, BEGIN + YEAR_US, 5.0) == BEGIN + YEAR_US, "alone it has nobody to ask"
    assert read(clock, BEGIN, 5.0) == BEGIN + YEAR_US
    assert clock.off_s == -YEAR_US / 1e6
    assert read(clock, BEGIN, 5.0, BEGIN + 1) == BEGIN
    assert clock.off_s == 0.0
