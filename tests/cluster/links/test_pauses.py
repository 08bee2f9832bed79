"""When what a process receives came during a pause of it."""

from __future__ import annotations

import pytest

from cluster.links.options import LinkOptions
from cluster.links.pauses import Pauses

NEVER = float("inf")


@pytest.mark.parametrize(
    ("now", "due", "over"),
    [(12.9, 11.0, True), (11.9, 11.0, False), (100.0, NEVER, False)],
    ids=["suspected", "not yet suspected", "nobody to heartbeat: the loop slept"],
)
def test_a_pause_is_an_overdue_turn_that_peers_noticed(now: float, due: float, over: bool) -> None:
    pauses = Pauses(LinkOptions())
    assert not pauses.is_over(50.0, 0.0), "the first turn of all"
    pauses.turn(10.0)
    assert pauses.is_over(now, due) is over
    pauses.turn(now)
    assert not pauses.is_over(now, due)


def test_peers_with_a_longer_interval_suspect_later() -> None:
    pauses = Pauses(LinkOptions(heartbeat_interval_ms=3000))
    pauses.turn(10.0)
    assert (pauses.is_over(15.9, 13.0), pauses.is_over(16.0, 13.0)) == (False, True)
