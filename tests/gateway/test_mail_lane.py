"""One lane of a connection's mail: what may be written, and what its acknowledgement says."""

from __future__ import annotations

import random

import pytest

from gateway.mail.lane import MailLane


def lane_with(*seqs: int) -> MailLane:
    lane = MailLane()
    for seq in seqs:
        assert lane.write(seq)
    return lane


def said(lane: MailLane) -> tuple[int, int]:
    return lane.up_to, lane.bits


def test_what_was_written_waits_until_it_is_acknowledged_in_any_order() -> None:
    lane = lane_with(5, 6, 7)
    assert (said(lane), lane.unacknowledged) == ((4, 0), 3)
    assert lane.acknowledge(7, 7) == (1, True)
    assert said(lane) == (4, 0b100)
    assert lane.acknowledge(5, 5) == (1, True)
    assert said(lane) == (5, 0b10)
    assert lane.acknowledge(6, 6) == (1, True)
    assert (said(lane), lane.unacknowledged) == ((7, 0), 0)


def test_what_lies_between_two_entries_that_were_written_counts_as_acknowledged() -> None:
    lane = lane_with(5, 9)
    assert (said(lane), lane.unacknowledged) == ((4, 0b01110), 2)
    lane.acknowledge(5, 5)
    assert said(lane) == (8, 0)


def test_an_acknowledgement_of_what_was_not_written_is_unknown_and_moves_nothing_else() -> None:
    lane = lane_with(5, 6)
    assert lane.acknowledge(7, 9) == (0, False)
    assert lane.acknowledge(6, 9) == (1, False)
    assert lane.acknowledge(1, 4) == (0, True)
    assert lane.acknowledge(6, 6) == (0, True)
    assert (said(lane), lane.highest) == ((4, 0b10), 6)
    assert MailLane().acknowledge(1, 1) == (0, False)


def test_nothing_beyond_the_window_is_written_nor_behind_it_before_it_has_come_again() -> None:
    lane = lane_with(*range(1, 65))
    assert not lane.write(65)
    lane.acknowledge(1, 64)
    assert not lane.write(66), "65 would be taken for acknowledged"
    assert lane.write(65)
    assert lane.write(66)
    assert said(lane) == (64, 0)


def test_nothing_is_written_behind_what_was_damaged_before_it_has_come_again() -> None:
    lane = lane_with(4)
    lane.acknowledge(4, 4)
    lane.hold_back(6)
    lane.hold_back(5)
    assert not lane.write(6)
    assert lane.write(5)
    assert lane.write(6)


def test_a_marker_of_what_the_inbox_dropped_releases_what_waits_below_it() -> None:
    lane = lane_with(*range(1, 11))
    lane.hold_back(20)
    assert lane.write(500, releases=True)
    assert (said(lane), lane.unacknowledged) == ((499, 0), 1)
    assert lane.acknowledge(3, 3) == (0, True)
    assert lane.write(501)
    # What is missing above it is still missing.
    lane.hold_back(503)
    assert lane.write(502, releases=True)
    assert not lane.write(504)


def test_packet_identifiers_name_what_waits() -> None:
    lane = lane_with(4_092)
    for seq in range(4_093, 4_112):
        lane.write(seq)
    assert lane.seq_of(1 << 12 | 4_092 + 1) == 4_092
    assert lane.seq_of(1 << 12 | 1) == 4_095
    assert lane.seq_of(1 << 12 | 17) == 4_111
    assert lane.seq_of(1 << 12 | 18) == 0, "4,112 was not written"
    assert lane.seq_of(1 << 12) == 0, "the identifier of no InboxSeq"


def test_a_run_is_written_as_far_as_its_entries_are_one_by_one() -> None:
    rng = random.Random(9)
    parts = set()
    for _ in range(200):
        together, apart = MailLane(), MailLane()
        for _ in range(60):
            first, count = together.highest + rng.choice((1, 1, 1, 2, 9, 40)), rng.choice((1, 3, 10, 70))
            releases = rng.random() < 0.05
            written = together.write(first, count, releases=releases)
            one_by_one = [apart.write(seq, releases=releases and seq == first) for seq in range(first, first + count)]
            assert one_by_one == [1] * written + [0] * (count - written)
            parts.add((written > 0) + (written == count))
            if rng.random() < 0.5:
                low = rng.randrange(max(1, together.highest - 80), together.highest + 3)
                high = low + rng.randrange(80)
                assert together.acknowledge(low, high) == apart.acknowledge(low, high)
            if rng.random() < 0.1:
                missing = together.highest + rng.randrange(1, 20)
                together.hold_back(missing)
                apart.hold_back(missing)
            assert (said(together), together.highest, together.unacknowledged) == (said(apart), apart.highest, apart.unacknowledged)
    assert parts == {0, 1, 2}


@pytest.mark.slow
def test_at_random_it_says_what_a_list_of_all_entries_says() -> None:
    rng = random.Random(7)
    for _ in range(300):
        lane = MailLane()
        written: dict[int, bool] = {}
        for _ in range(200):
            if rng.random() < 0.5:
                seq = lane.highest + rng.choice((1, 1, 1, 2, 5, 70))
                lowest = min((number for number, done in written.items() if not done), default=0)
                if lane.write(seq):
                    assert not lowest or seq <= lowest + 63
                    written[seq] = False
                else:
                    assert seq > lowest + 63
                    lane = MailLane()
                    written = {}
            elif written:
                seq = rng.choice(list(written))
                assert lane.acknowledge(seq, seq) == (int(not written[seq]), True)
                written[seq] = True
            waiting = [number for number, done in written.items() if not done]
            assert lane.unacknowledged == len(waiting)
            assert lane.up_to == min(waiting, default=lane.highest + 1) - 1
            told = {lane.up_to + 1 + bit for bit in range(64) if lane.bits >> bit & 1}
            assert not told & set(waiting)
            assert told >= {number for number, done in written.items() if done and number > lane.up_to}
            assert lane.bits < 1 << 64
