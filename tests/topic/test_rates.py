"""Rates of parts come near to what is written, and fade."""

from __future__ import annotations

import pytest

from topic.rates import Rates


def test_a_steady_part_has_its_rate_and_a_silent_one_loses_it() -> None:
    rates = Rates()
    for second in range(0, 400, 5):
        rates.look({1: (1000 * second, 10 * second), 2: (50, 5)}, second)
    size, messages = rates.of(1)
    assert 990 < size <= 1000
    assert 9.9 < messages <= 10
    assert rates.of(2) == rates.of(3) == (0.0, 0.0)
    for second in range(400, 460, 5):
        rates.look({1: (400_000, 4000)}, second)
    assert 200 < rates.of(1)[0] < 300
    rates.look({}, 465)
    assert rates.of(1) == (0.0, 0.0)


def test_the_cpu_of_a_process_is_what_it_used_lately_without_its_start() -> None:
    rates = Rates()
    rates.look({}, 100.0, 7.0)
    assert rates.cpu == 0.0
    for second in range(1, 301):
        rates.look({}, 100.0 + second, 7.0 + second / 2)
    assert rates.cpu == pytest.approx(0.5, rel=0.01)
    rates.look({}, 430.0, 157.0)
    assert rates.cpu == pytest.approx(0.25, rel=0.01)
