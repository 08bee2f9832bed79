"""One lane: the window, acknowledgements, what is passed over, and what is sent again."""

from __future__ import annotations

import random

import pytest

from relay.delivery import events as ev
from relay.delivery.window import WINDOW, Lane


def listing(*seqs: int, up_to: int = 0, floor: int = 0, gap: int = 0, last: int = 0) -> ev.Listing:
    return ev.Listing([(seq, 1000 + seq) for seq in seqs], floor, gap, last or max(seqs, default=floor), up_to)


def opened(up_to: int = 0, last: int = 0) -> Lane:
    """A lane that was read and sent up to `last`."""
    lane = Lane()
    plan = lane.plan(0, listing(*range(up_to + 1, last + 1), up_to=up_to, last=max(last, up_to)), WINDOW, WINDOW)
    lane.sent_up_to(plan.end)
    return lane


def test_the_first_read_says_what_was_acknowledged_before() -> None:
    lane = Lane()
    plan = lane.plan(2, listing(4, 6, 7, up_to=3, last=8), 64, 64)
    assert plan == (2, [(4, 1004), (6, 1006), (7, 1007)], 8)
    assert [lane.cursor.has(seq) for seq in range(1, 10)] == [True, True, True, False, True, False, False, True, False]


def test_a_read_that_was_full_leaves_the_lane_behind() -> None:
    lane = Lane()
    plan = lane.plan(0, listing(1, 2, 3, last=10), 3, 64)
    lane.sent_up_to(plan.end)
    assert (plan.end, lane.behind, lane.worth_a_fetch(0.0)) == (3, True, True)


def test_a_budget_ends_a_plan_where_it_is_used_up() -> None:
    plan = Lane().plan(0, listing(1, 2, 3, last=3), 64, 2)
    assert (plan.items, plan.end) == ([(1, 1001), (2, 1002)], 2)


def test_nothing_beyond_the_window_is_planned() -> None:
    lane = opened(0, 60)
    assert lane.plan(0, listing(*range(61, 80)), 19, 64).items == [(seq, 1000 + seq) for seq in range(61, WINDOW + 1)]


def test_a_fetch_waits_for_half_a_window_unless_the_rest_fits() -> None:
    lane = opened(0, 60)
    lane.last = 100
    assert not lane.worth_a_fetch(0.0)
    lane.last = 64
    assert lane.worth_a_fetch(0.0)
    lane.last = 100
    lane.acknowledge(28, 0)
    assert lane.worth_a_fetch(0.0)


def test_an_acknowledgement_goes_no_further_than_what_was_sent() -> None:
    lane = opened(0, 5)
    assert lane.acknowledge(2, 0b111_1110)  # 4 to 9, of which 6 and more were not sent
    assert (lane.cursor.up_to, lane.cursor.bits) == (2, 0b110)
    assert lane.acknowledge(900, 1)
    assert (lane.cursor.up_to, lane.cursor.bits, lane.sent) == (5, 0, 5)
    assert not lane.acknowledge(3, 0)


def test_after_a_rewind_what_is_acknowledged_late_still_counts() -> None:
    lane = opened(0, 5)
    lane.rewind()
    assert (lane.sent, lane.marked, lane.behind) == (0, 5, True)
    assert lane.acknowledge(4, 0)
    assert (lane.sent, lane.plan(0, listing(5, up_to=4, last=5), 64, 64).items) == (4, [(5, 1005)])


def test_what_follows_is_taken_and_nothing_else() -> None:
    lane = opened(0, 5)
    assert [lane.takes(seq) for seq in (5, 6, 7)] == [False, True, False]
    lane.last = 6  # it is told of, and not sent
    assert not lane.takes(6)
    full = opened(0, WINDOW)
    assert not full.takes(WINDOW + 1)
    assert not Lane().takes(1)


def test_a_gap_is_told_where_the_device_misses_something() -> None:
    lane = opened(3, 5)
    plan = lane.plan(1, listing(21, 22, floor=20, gap=20, last=22), 64, 64)
    assert plan.items == [(20, 0), (21, 1021), (22, 1022)]
    assert lane.cursor.up_to == 19  # the marker is to be acknowledged


def test_a_gap_is_told_although_the_last_that_went_was_acknowledged() -> None:
    plan = Lane().plan(1, listing(9, up_to=3, floor=6, gap=6, last=9), 64, 64)
    assert plan.items == [(6, 0), (9, 1009)]
    lane = Lane()
    lane.cursor.acknowledge(3, 0b110)  # 5 and 6
    lane.known = True
    lane.sent_up_to(3)
    assert lane.plan(1, listing(7, floor=6, gap=6, last=7), 64, 64).items == [(4, 0), (7, 1007)]


def test_a_new_device_misses_nothing_of_what_others_have_read() -> None:
    lane = Lane()
    assert lane.plan(0, listing(501, 502, floor=500, last=502), 64, 64).items == [(501, 1501), (502, 1502)]
    assert lane.cursor.up_to == 500


def test_a_new_session_forgets_all_but_what_was_sent() -> None:
    lane = opened(0, 5)
    lane.open()
    assert (lane.marked, lane.sent, lane.known, lane.behind) == (5, 0, False, True)


@pytest.mark.slow
def test_random_devices_get_everything_once() -> None:
    """Against an inbox that is a list: whatever is acknowledged and sent again, nothing is passed over."""
    rng = random.Random(5)
    for _ in range(200):
        lane, last, stored, got = Lane(), 0, lane_cursor(), set[int]()
        for _ in range(60):
            last += rng.randrange(12)
            if lane.worth_a_fetch(0.0):
                start = lane.sent if lane.known else stored[0]
                num = rng.choice((4, 64)) if lane.known else WINDOW
                found = [seq for seq in range(start + 1, last + 1) if lane.known or seq not in stored[1]][:num]
                plan = lane.plan(0, listing(*found, up_to=stored[0], last=last), num, rng.choice((3, 64)))
                for seq, _ in plan.items:
                    assert seq <= lane.limit
                    lane.sent_up_to(seq)
                    got.add(seq)
                lane.sent_up_to(plan.end)
            for seq in sorted(got):
                if seq > lane.cursor.up_to and rng.random() < 0.4:
                    lane.acknowledge(lane.cursor.up_to, 1 << (seq - lane.cursor.up_to - 1))
            if rng.random() < 0.1:
                lane.rewind()
            assert set(range(1, lane.sent + 1)) <= got
            if rng.random() < 0.05:
                cursor = lane.cursor
                if lane.known:
                    stored = (cursor.up_to, {seq for seq in range(cursor.up_to + 1, last + 1) if cursor.has(seq)})
                lane.open()


def lane_cursor() -> tuple[int, set[int]]:
    """Nothing acknowledged."""
    return 0, set()
