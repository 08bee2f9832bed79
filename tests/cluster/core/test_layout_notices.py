"""Who is told of a newer layout reads the registry at once, but not all the time."""

from __future__ import annotations

from itertools import pairwise

from cluster.core.layout_notices import FIRST_REFRESH_S, LAST_REFRESH_S, REFRESH_SPREAD_S, LayoutRefresh


def test_a_newer_layout_is_read_within_the_spread() -> None:
    assert LayoutRefresh().noticed(6, 5, 0.0, 100.0) == 0.0
    assert LayoutRefresh().noticed(6, 5, 0.5, 100.0) == REFRESH_SPREAD_S / 2


def test_a_layout_that_is_known_or_older_needs_nothing() -> None:
    refresh = LayoutRefresh()
    assert refresh.noticed(5, 5, 0.0, 100.0) is None
    assert refresh.noticed(4, 5, 0.0, 100.0) is None
    assert refresh.notices == 2


def test_many_notices_make_one_reading() -> None:
    refresh = LayoutRefresh()
    told = [refresh.noticed(6, 5, 0.0, 100.0 + tenth / 10) for tenth in range(10)]
    assert [delay is not None for delay in told] == [True] + [False] * 9


def test_readings_that_bring_nothing_become_rare() -> None:
    refresh = LayoutRefresh()
    read = [second for second in range(1000) if refresh.noticed(6, 5, 0.0, float(second)) is not None]
    gaps = [later - earlier for earlier, later in pairwise(read)]
    assert gaps[0] == FIRST_REFRESH_S
    assert gaps[-1] == LAST_REFRESH_S
    assert gaps == sorted(gaps)


def test_a_newer_layout_that_came_makes_the_next_notice_count_at_once() -> None:
    refresh = LayoutRefresh()
    assert refresh.noticed(6, 5, 0.0, 100.0) is not None
    assert refresh.noticed(7, 6, 0.0, 100.5) is not None
