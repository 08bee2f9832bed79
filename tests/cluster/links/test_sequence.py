"""The receiver's tracker: gaps, late arrivals, duplicates, bounds; checked against a model of sets."""

from __future__ import annotations

import random

from cluster.links.datagrams.acknowledgement import decode, encode
from cluster.links.datagrams.head import HEAD_SIZE
from cluster.links.datagrams.sequence import MAX_JUMP, MAX_RANGES, MAX_TOLD, TELL_TIMES, Tracker


def test_items_in_order_are_accepted_once() -> None:
    tracker = Tracker()
    assert tracker.accept(1, 10)
    assert tracker.accept(11, 5)
    assert not tracker.accept(11, 5)
    assert not tracker.accept(1, 10)
    assert (tracker.next, tracker.lost, tracker.duplicates, tracker.reordered) == (16, 0, 15, 0)


def test_a_gap_says_how_many_items_are_lost_and_a_late_arrival_takes_it_back() -> None:
    tracker = Tracker()
    assert tracker.accept(1, 2)
    assert tracker.accept(10, 1)
    assert (tracker.lost, tracker.missing) == (7, [(3, 9)])
    assert tracker.accept(5, 2)
    assert (tracker.lost, tracker.reordered, tracker.missing) == (5, 2, [(3, 4), (7, 9)])
    assert not tracker.accept(5, 2)
    assert tracker.accept(3, 2)
    assert tracker.accept(7, 3)
    assert (tracker.lost, tracker.reordered, tracker.missing) == (0, 7, [])


def test_what_overlaps_with_something_that_came_is_refused_whole() -> None:
    tracker = Tracker()
    tracker.accept(1, 2)
    tracker.accept(10, 5)
    assert not tracker.accept(2, 3)
    assert not tracker.accept(8, 4)
    assert not tracker.accept(12, 10)
    assert tracker.missing == [(3, 9)]
    assert tracker.next == 15


def test_an_unbelievable_jump_is_refused() -> None:
    tracker = Tracker()
    assert not tracker.accept(2 + MAX_JUMP, 1)
    assert not tracker.reveal(2 + MAX_JUMP)
    assert tracker.next == 1


def test_a_heartbeat_reveals_a_lost_tail_once() -> None:
    tracker = Tracker()
    tracker.accept(1, 4)
    assert not tracker.reveal(5)
    assert not tracker.reveal(3)
    assert tracker.reveal(8)
    assert (tracker.lost, tracker.next) == (3, 8)
    assert not tracker.reveal(8)
    assert tracker.accept(5, 3)
    assert tracker.lost == 0


def test_ranges_are_bounded_and_the_oldest_is_confirmed_lost() -> None:
    tracker = Tracker()
    for number in range(MAX_RANGES + 10):
        assert tracker.accept(2 + 2 * number, 1)
    assert len(tracker.missing) == MAX_RANGES
    assert tracker.missing[0] == (21, 21)
    assert not tracker.accept(1, 1)
    assert tracker.accept(21, 1)
    assert tracker.lost == MAX_RANGES + 9


def test_an_acknowledgement_tells_the_newest_ranges_and_from_where_it_knows() -> None:
    tracker = Tracker()
    for number in range(MAX_TOLD + 8):
        tracker.accept(2 + 2 * number, 1)
    known_from, told, cut = tracker.tell()
    assert cut
    assert len(told) == MAX_TOLD
    assert told[0] == (17, 17)
    assert known_from == 16
    assert tracker.next > told[-1][1]


def test_a_range_is_told_a_bounded_number_of_times_and_then_not_known() -> None:
    tracker = Tracker()
    tracker.accept(5, 1)
    for _ in range(TELL_TIMES):
        assert tracker.tell() == (1, [(1, 4)], False)
    assert tracker.tell() == (5, [], False)
    assert tracker.accept(1, 4), "it can still arrive late"


def test_what_turned_out_malformed_is_missing() -> None:
    tracker = Tracker()
    tracker.accept(1, 3)
    tracker.accept(4, 3)
    tracker.reject(4, 3)
    tracker.accept(7, 1)
    assert tracker.tell() == (1, [(4, 6)], False)
    assert tracker.lost == 3


def test_random_traffic_agrees_with_a_model_of_sets() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        datagrams = []
        at = 1
        for _ in range(80):
            count = chance.randint(1, 5)
            datagrams.append((at, count))
            at += count
        traffic = [one for one in datagrams for _ in range(chance.choice((0, 1, 1, 1, 2)))]
        for i in range(len(traffic)):
            j = min(len(traffic) - 1, i + chance.randint(0, 6))
            traffic[i], traffic[j] = traffic[j], traffic[i]
        tracker = Tracker()
        seen: set[int] = set()
        for first, count in traffic:
            items = set(range(first, first + count))
            assert tracker.accept(first, count) is not bool(items & seen), f"seed {seed}"
            seen |= items
            assert tracker.lost == tracker.next - 1 - len(seen), f"seed {seed}"
        missing = {item for first, last in tracker.missing for item in range(first, last + 1)}
        assert missing == set(range(1, tracker.next)) - seen, f"seed {seed}"


def test_an_acknowledgements_body_survives_the_wire_and_nonsense_does_not() -> None:
    records, control = Tracker(), Tracker()
    records.accept(5, 2)
    records.accept(10, 1)
    control.accept(2, 1)
    body, ranges, cut = encode(records, control, 12_345)
    data = bytes(HEAD_SIZE) + body
    found = decode(data, len(data), ranges)
    assert found is not None
    assert not cut
    assert found.records == (11, 1, [(1, 4), (7, 9)])
    assert found.control == (3, 1, [(1, 1)])
    assert found.window == 12_345
    assert decode(data, len(data), ranges + 1) is None
    for end in range(len(data)):
        assert decode(data, end, ranges) is None
    swapped = data[:-32] + data[-16:] + data[-32:-16]
    assert decode(swapped, len(swapped), ranges) is None
