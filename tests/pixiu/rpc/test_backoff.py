"""Exponential backoff with jitter."""

from __future__ import annotations

from random import Random

from pixiu.rpc.backoff import Backoff


def longest() -> float:
    """A uniform number that shortens nothing: the end of [0, 1) that is never drawn."""
    return 1.0


def test_waits_double_from_the_first_to_the_longest() -> None:
    backoff = Backoff(0.1, 1.0, longest)
    assert [round(backoff.next_s(), 3) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_after_a_success_the_first_wait_comes_again() -> None:
    backoff = Backoff(0.1, 1.0, longest)
    for _ in range(3):
        backoff.next_s()
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_s() == 0.1


def test_jitter_shortens_a_wait_by_up_to_a_half() -> None:
    chance = Random(7)
    backoff = Backoff(1.0, 1.0, chance.random)
    waits = [backoff.next_s() for _ in range(1_000)]
    assert 0.5 <= min(waits) < 0.51
    assert 0.99 < max(waits) < 1.0


def test_a_wait_after_a_number_of_failures_counts_none() -> None:
    backoff = Backoff(0.5, 60.0, longest)
    assert [backoff.after_s(failures) for failures in (1, 2, 5)] == [0.5, 1.0, 8.0]
    assert backoff.failures == 0


def test_any_number_of_failures_is_bounded() -> None:
    assert Backoff(0.1, 5.0, longest).after_s(1_000_000) == 5.0
