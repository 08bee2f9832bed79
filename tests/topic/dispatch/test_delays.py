"""Messages that are not due, by time: everything comes once, when it is due, in whatever order it was added."""

from __future__ import annotations

import random

import pytest

from cluster.core.contract import NEVER
from topic.dispatch import delays
from topic.dispatch.delays import LONGEST, Delays

START = 10_000.25
SPANS = (0.5, 30.0, 3_000.0, 90_000.0, 30_000_000.0)


@pytest.mark.parametrize("seed", range(20))
def test_everything_comes_once_when_it_is_due(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "SPLIT", 7)
    rng, now, offset = random.Random(seed), START, 0
    waits, index = dict[int, float](), Delays(now)
    while waits or offset < 3_000:
        for _ in range(rng.choice((0, 5, 40)) if offset < 3_000 else 0):
            count, due = rng.choice((1, 1, 3)), now + rng.random() * rng.choice(SPANS)
            index.add(due, offset, offset + count)
            waits.update(dict.fromkeys(range(offset, offset + count), due))
            offset += count
        deadline = index.next_deadline()
        assert not waits or deadline <= min(waits.values()) + 0.001
        now = max(now, deadline if waits and rng.random() < 0.7 else now + rng.random() * rng.choice(SPANS[:4]))
        for low, high in index.take(now):
            for each in range(low, high):
                assert waits.pop(each) <= now
        assert all(due > now - 0.001 for due in waits.values())
    assert (index.count, index.next_deadline()) == (0, NEVER)


def test_what_is_due_together_is_one_entry() -> None:
    index = Delays(START)
    for due in (START + 60.0, START + 60_000.0):
        for low in range(0, 3 * LONGEST, 1_000):
            index.add(due, low, low + 1_000)
    assert index.count < 20
    assert sum(high - low for low, high in index.take(START + 100_000.0)) == 2 * (-(-3 * LONGEST // 1_000) * 1_000)


def test_an_hour_is_split_before_it_comes_and_not_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "SPLIT", 100)
    index, begin = Delays(0.0), 10 << delays.HOUR_BITS
    for number in range(1_000):
        index.add(begin + number * 1.5 + 0.25, number, number + 1)
    turns, now = 0, 0.0
    while (now := max(now, index.next_deadline())) < begin:
        assert now >= begin - delays.LEAD_S
        assert index.take(now) == []
        turns += 1
    assert turns == 10
    assert (index.take(begin + 0.25), index.count) == ([(0, 1)], 999)
