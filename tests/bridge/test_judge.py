"""The judge of what a bridge carried, on histories that were made for it."""

from __future__ import annotations

import pytest

from benchmarks.clusters.bridging.judge import Promise, judge

SENT = {"a": [1, 3, 5], "b": [2, 4]}
WHOLE = [("a", 1), ("b", 2), ("a", 3), ("b", 4), ("a", 5)]


def test_a_whole_history_has_no_violations() -> None:
    assert judge(SENT, WHOLE, Promise(once=True), 0).violations == []


def test_repeats_are_allowed_unless_once_is_promised() -> None:
    repeated = [*WHOLE[:3], *WHOLE[1:]]
    found = judge(SENT, repeated, Promise(), 0)
    assert (found.violations, found.repeats) == ([], 2)
    (text,) = judge(SENT, repeated, Promise(once=True), 0).violations
    assert "came more than once: 2" in text


@pytest.mark.parametrize(
    ("got", "lag", "text"),
    [
        (WHOLE[1:], 0, "missing: 1, such as [('a', 1)]"),
        ([*WHOLE, ("a", 2)], 0, "never sent: 1"),
        ([WHOLE[2], WHOLE[0], *WHOLE[3:], WHOLE[1]], 0, "key a: out of order: 1, such as [1]"),
        (WHOLE, 3, "the lag is 3"),
        ([], 0, "missing: 5"),
    ],
)
def test_what_is_wrong_is_found(got: list[tuple[str, int]], lag: int, text: str) -> None:
    assert any(text in each for each in judge(SENT, got, Promise(), lag).violations)


def test_order_is_judged_only_where_it_is_promised() -> None:
    assert judge(SENT, WHOLE[::-1], Promise(ordered=False), 0).violations == []
