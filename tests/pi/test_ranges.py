"""Ranges of numbers against a set of numbers."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from pi.inboxes.ranges import MAX_RANGES, Ranges
from tests.support.for_each import for_each


@for_each("seed", range(40))
def test_ranges_are_what_a_set_of_numbers_is(seed: int) -> None:
    random, ranges, numbers = Random(seed), Ranges(), set[int]()
    for _ in range(60):
        first = random.randrange(1, 80)
        last = first + random.choice((0, 0, 1, 3, 20))
        if random.random() < 0.8:
            assert ranges.add(first, last)
            numbers |= set(range(first, last + 1))
        else:
            ranges.cut(first)
            numbers -= set(range(1, first + 1))
        ranges = Ranges(ranges.encode())
        assert {n for low, high in ranges for n in range(low, high + 1)} == numbers
        assert ranges.count(first, last) == len(numbers & set(range(first, last + 1)))
        assert [bool(ranges.at(n)) for n in range(1, 120)] == [n in numbers for n in range(1, 120)]
        end = first
        while end + 1 in numbers:
            end += 1
        assert ranges.after(first) == end
        pairs = list(ranges)
        assert all(low <= high for low, high in pairs)
        assert all(high + 1 < low for (_, high), (low, _) in pairwise(pairs)), "apart from each other"


def test_there_are_so_many_and_no_more_but_what_touches_one_is_taken() -> None:
    ranges = Ranges()
    for number in range(MAX_RANGES):
        assert ranges.add(3 * number + 1, 3 * number + 1)
    assert not ranges.add(3 * MAX_RANGES + 1, 3 * MAX_RANGES + 1)
    assert ranges.add(2, 2)
    assert (len(ranges), ranges.count(1, 10 * MAX_RANGES)) == (MAX_RANGES, MAX_RANGES + 1)
    assert ranges.add(3, 3)
    assert ranges.add(3 * MAX_RANGES + 1, 3 * MAX_RANGES + 1), "two became one"
