"""When messages leave."""

from __future__ import annotations

from tools.load.pace import Pace


def test_a_closed_load_fills_its_window() -> None:
    pace = Pace(window=10)
    assert [pace.due(99.0, 1000, under_way) for under_way in (0, 7, 10, 12)] == [10, 3, 0, 0]


def test_an_open_load_sends_what_is_due_whatever_became_of_those_before() -> None:
    pace = Pace(rate=100)
    assert [pace.due(at, sent, 500) for at, sent in ((0.0, 0), (0.0, 1), (0.25, 1), (0.25, 40))] == [1, 0, 25, 0]
    assert pace.at_s(25) == 0.25


def test_a_rate_with_a_window_waits_for_space() -> None:
    assert Pace(rate=100, window=10).due(1.0, 0, 4) == 6
