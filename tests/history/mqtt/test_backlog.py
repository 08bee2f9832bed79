"""The judge of what sessions got when they came back, on forged histories."""

from __future__ import annotations

import pytest

from tests.history.mqtt.backlog import Came, Wanted, judge_backlog

WANTED = [
    Wanted(1, "a", 1),
    Wanted(2, "a", 1, resent=True),
    Wanted(3, "b", 2),
    Wanted(4, "b", 2),
    Wanted(5, "a", 1, accepted=False),
]
CAME = [Came(1, "a", 1, 1), Came(3, "b", 2, 1), Came(1, "a", 1, 2), Came(2, "a", 1, 2), Came(4, "b", 2, 2)]


def broken(came: list[Came]) -> set[str]:
    return {text.partition(":")[0] for text in judge_backlog({"s": WANTED}, {"s": came}).violations}


def test_a_backlog_may_repeat_qos_1_in_a_later_connection_and_have_what_was_not_accepted() -> None:
    assert broken(CAME) == broken([*CAME, Came(5, "a", 1, 2)]) == broken([Came(-1, "x", 1, 1), *CAME]) == set()
    assert broken([*CAME, Came(2, "a", 1, 2)]) == set()


@pytest.mark.parametrize(
    ("came", "what"),
    [
        (CAME[:-1], "QoS 2 is missing"),
        ([each for each in CAME if each.number != 2], "QoS 1 is missing"),
        ([], "QoS 1 is missing"),
        ([*CAME, Came(3, "b", 2, 2)], "QoS 2 twice"),
        ([*CAME, Came(1, "a", 1, 2)], "twice within a connection"),
        ([CAME[4], *CAME[:4]], "out of order"),
        ([*CAME, Came(9, "a", 1, 2)], "something else came"),
        ([*CAME[:4], Came(4, "a", 2, 2)], "something else came"),
        ([*CAME[:4], Came(4, "b", 1, 2)], "something else came"),
    ],
)
def test_each_lie_is_found(came: list[Came], what: str) -> None:
    assert what in broken(came)
