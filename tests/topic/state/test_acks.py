"""Acknowledged offsets: a floor and bitmaps, against a plain set."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import runs
from topic.state.acks import CHUNK, Acks

EXAMPLES = runs("PIXIU_TOPIC_EXAMPLES", local=100, ci=500)
offsets = st.one_of(st.integers(0, 40), st.integers(CHUNK - 10, CHUNK + 10), st.integers(0, 3 * CHUNK))
ranges = st.tuples(offsets, st.integers(0, 50) | st.integers(0, 2 * CHUNK)).map(lambda found: (found[0], found[0] + found[1]))


@given(st.integers(0, 30), st.lists(st.lists(ranges, max_size=9), max_size=4))
@settings(max_examples=EXAMPLES, deadline=None)
def test_many_ranges_at_once_are_the_same(floor: int, added: list[list[tuple[int, int]]]) -> None:
    once, singly = Acks(floor), Acks(floor)
    for each in added:
        before = dict(once.chunks)
        touched = once.add_all(each)
        for low, high in each:
            if low < high:
                singly.add(low, high)
        changed = {chunk for chunk in before.keys() | once.chunks.keys() if before.get(chunk) != once.chunks.get(chunk)}
        assert changed <= touched
        assert all((offset in once) == (offset in singly) for offset in range(4 * CHUNK))
        assert once.floor == singly.floor


@given(st.integers(0, 30), st.lists(ranges, max_size=12), st.lists(offsets, max_size=5), ranges)
@settings(max_examples=EXAMPLES, deadline=None)
def test_it_is_a_set(floor: int, added: list[tuple[int, int]], asked: list[int], within: tuple[int, int]) -> None:
    acks, plain = Acks(floor), set(range(floor))
    for low, high in added:
        before = dict(acks.chunks)
        touched = acks.add(low, high)
        plain |= set(range(low, high))
        changed = {chunk for chunk in before.keys() | acks.chunks.keys() if before.get(chunk) != acks.chunks.get(chunk)}
        assert changed <= touched
    assert all((offset in acks) == (offset in plain) for offset in range(4 * CHUNK))
    assert acks.floor == next(offset for offset in range(6 * CHUNK) if offset not in plain)
    for offset in asked:
        assert acks.next_missing(offset) == next(each for each in range(offset, 6 * CHUNK) if each not in plain)
    gaps = {offset for low, high in acks.gaps(*within) for offset in range(low, high)}
    assert gaps == set(range(*within)) - plain
    low, high = acks.next_gap(within[0], within[1], 100)
    assert low >= high or (set(range(low, high)) <= gaps and (high in plain or high in (within[1], low + 100)))
    assert acks.missing_in(*within) == len(set(range(*within)) - plain)


def test_a_million_holes_stay() -> None:
    acks = Acks()
    for offset in range(1, 2_000_000, 2):
        acks.add(offset, offset + 1)
    assert acks.floor == 0
    assert len(acks.chunks) == 489
    assert acks.missing_in(0, 2_000_000) == 1_000_000
    assert acks.raise_floor(1_999_999) == set(range(488))
    assert (acks.floor, len(acks.chunks)) == (2_000_000, 1)
