"""A sender's flow control and the queue before it."""

from __future__ import annotations

import itertools

from cluster.links.datagrams.acknowledgement import Told
from cluster.links.peer.outbox import FIRST_LANE_TURNS, ItemRun, Outbox, Settlement
from cluster.links.peer.window import INITIAL_BYTES, OVERHEAD_BYTES, SILENCE_S, VOID_S, Window

SIZE = 1000
COST = SIZE + OVERHEAD_BYTES
INFINITY = float("inf")


def told(upcoming: int, missing: list[tuple[int, int]] | None = None, known_from: int = 1) -> list[Told]:
    return [Told(upcoming, known_from, missing or []), Told(1, 1, [])]


def fill(window: Window, now: float) -> int:
    sent = 0
    while window.may_send(SIZE, now):
        window.sent(0, 10, SIZE, (), now)
        sent += 1
    return sent


def test_before_the_first_acknowledgement_64_kib_may_be_in_flight() -> None:
    window = Window()
    assert fill(window, 0.0) == INITIAL_BYTES // COST
    assert window.cost == INITIAL_BYTES // COST * COST


def test_an_acknowledgement_opens_the_window_to_what_it_says() -> None:
    window = Window()
    sent = fill(window, 0.0)
    window.acknowledge(told(1 + 10 * sent), 5 * COST, [], 0.01)
    assert window.cost == 0
    assert fill(window, 0.01) == 5


def test_a_count_far_ahead_is_not_believed() -> None:
    window = Window()
    fill(window, 0.0)
    cost, upcoming = window.cost, list(window.upcoming)
    assert window.acknowledge(told((1 << 62) - 1), 5 * COST, [], 0.01) == 0
    assert (window.cost, window.upcoming) == (cost, upcoming)
    assert window.acknowledge(told(1 << 30), 5 * COST, [], 0.01) > 0, "it knows of what an earlier process of this name sent"
    assert window.upcoming[0] == 1 << 30


def test_a_window_of_nothing_still_lets_one_datagram_out() -> None:
    window = Window()
    window.acknowledge(told(1), 0, [], 0.0)
    assert fill(window, 0.0) == 1


def test_after_100_ms_of_silence_one_datagram_at_a_time_is_a_probe() -> None:
    window = Window()
    window.sent(0, 1, SIZE, (), 0.0)
    assert fill(window, SILENCE_S - 0.001) > 1
    assert not window.may_send(SIZE, SILENCE_S)
    sent = []
    for tick in range(2, 30):
        now = tick * 0.05
        if window.may_send(SIZE, now):
            window.sent(0, 1, SIZE, (), now)
            sent.append(now)
    assert len(sent) >= 10
    assert all(later - earlier >= SILENCE_S - 1e-9 for earlier, later in itertools.pairwise(sent))


def test_an_acknowledgement_ends_the_silence() -> None:
    window = Window()
    window.sent(0, 1, SIZE, (), 0.0)
    assert window.silent(0.2)
    window.acknowledge(told(1), INITIAL_BYTES, [], 0.2)
    assert not window.silent(0.25)
    assert fill(window, 0.25) > 10


def test_after_3_s_without_an_acknowledgement_the_window_is_void() -> None:
    window = Window()
    settlement = Settlement(7)
    settlement.open = 1
    window.sent(0, 10, SIZE, [settlement], 0.0)
    assert not window.expired(VOID_S - 0.01)
    assert window.expired(VOID_S)
    settled: list[tuple[int, bool]] = []
    assert window.void(settled) == 10
    assert settled == [(7, False)]
    assert (window.cost, window.limit, window.deadline(True)) == (0, INITIAL_BYTES, INFINITY)


def settle(window: Window, answer: list[Told]) -> tuple[int, list[tuple[int, bool]]]:
    settled: list[tuple[int, bool]] = []
    return window.acknowledge(answer, INITIAL_BYTES, settled, 0.0), settled


def three_parcels() -> Window:
    window = Window()
    for token in (1, 2, 3):
        settlement = Settlement(token)
        settlement.open = 1
        window.sent(0, 10, SIZE, [settlement], 0.0)
    return window


def test_each_datagram_below_the_count_is_handled_or_lost() -> None:
    assert settle(three_parcels(), told(31)) == (0, [(1, True), (2, True), (3, True)])
    assert settle(three_parcels(), told(31, [(11, 20)])) == (10, [(1, True), (2, False), (3, True)])
    assert settle(three_parcels(), told(21, [(1, 10)])) == (10, [(1, False), (2, True)])
    assert settle(three_parcels(), told(31, known_from=12)) == (20, [(1, False), (2, False), (3, True)])


def test_a_receiver_that_counts_what_was_never_sent_settles_nothing_as_handled() -> None:
    window = three_parcels()
    assert settle(window, told(5001)) == (30, [(1, False), (2, False), (3, False)])
    assert window.upcoming[0] == 5001, "going on from there the link works again"


def items(count: int, size: int = 100) -> list[bytes]:
    return [bytes([number]) * size for number in range(count)]


def run(some: list[bytes], now: float = 0.0, fragments: bool = False, settlement: Settlement | None = None) -> ItemRun:
    return ItemRun(some, sum(map(len, some)), settlement, now, fragments=fragments)


def test_a_datagram_takes_from_several_parcels_lane_0_first() -> None:
    box = Outbox(2, [])
    box.put(run([b"b" * 100] * 3), 1)
    box.put(run([b"a" * 100] * 2), 0)
    parts, size, *_ = box.take(450)
    assert (b"".join(part[:1] for part in parts), size) == (b"aabb", 400)
    assert box.take(450)[0] == [b"b" * 100]
    assert box.bytes == 0


def test_a_parcel_over_several_datagrams_settles_with_the_last_of_them() -> None:
    settled: list[tuple[int, bool]] = []
    settlement = Settlement(5)
    box = Outbox(1, settled)
    box.put(run(items(10), settlement=settlement), 0)
    touched = []
    while box.bytes:
        parts, _, settlements, *_ = box.take(350)
        touched.append((len(parts), len(settlements)))
    assert touched == [(3, 1), (3, 1), (3, 1), (1, 1)]
    assert settlement.open == 4
    assert settled == []


def test_a_fragment_leaves_alone_and_what_is_behind_it_after_the_last_one() -> None:
    settled: list[tuple[int, bool]] = []
    settlement = Settlement(3)
    box = Outbox(1, settled)
    box.put(run(items(2)), 0)
    box.put(run([b"a" * 900, b"b" * 900, b"c" * 10], fragments=True, settlement=settlement), 0)
    box.put(run(items(3)), 0)
    taken = [box.take(1000) for _ in range(5)]
    assert [(len(parts), size, fragments, last) for parts, size, _, fragments, last in taken] == [
        (2, 200, 0, False),
        (1, 900, 3, False),
        (1, 900, 3, False),
        (1, 10, 3, True),
        (3, 300, 0, False),
    ]
    assert settlement.open == 3, "each fragment in flight is waited for"
    assert (box.bytes, settled) == (0, [])


def lanes_of(box: Outbox, datagrams: int) -> str:
    """Which lane each datagram came from."""
    return "".join(box.take(100)[0][0][:1].decode() for _ in range(datagrams))


def test_a_full_first_lane_leaves_the_other_one_a_datagram_in_nine() -> None:
    box = Outbox(2, [])
    for _ in range(40):
        box.put(run([b"a" * 100]), 0)
        box.put(run([b"b" * 100]), 1)
    assert lanes_of(box, 27) == 3 * ("a" * FIRST_LANE_TURNS + "b")


def test_the_fragments_of_an_item_leave_one_after_the_other_whatever_waits_in_the_other_lane() -> None:
    for lane, expected in ((0, "aaaaaaaaaaaaaaaabbbbbbbbbbbb"), (1, "aaaaaaaabbbbbbbbbbbbaaaaaaaa")):
        box = Outbox(2, [])
        for _ in range(16):
            box.put(run([b"a" * 100]), 0)
        if lane:
            box.put(run([b"b" * 100] * 12, fragments=True), 1)
        else:
            box = Outbox(2, [])
            box.put(run([b"a" * 100] * 16, fragments=True), 0)
            for _ in range(12):
                box.put(run([b"b" * 100]), 1)
        assert lanes_of(box, 28) == expected


def test_a_full_queue_drops_the_oldest_of_the_last_lane_first() -> None:
    settled: list[tuple[int, bool]] = []
    box = Outbox(2, settled)
    for token in range(1, 5):
        box.put(run(items(3), settlement=Settlement(token)), 0 if token == 1 else 1)
    assert box.overflow(1000) == 6
    assert settled == [(2, False), (3, False)]
    assert box.bytes <= 1000


def test_what_was_partly_sent_is_dropped_with_its_rest_only() -> None:
    settled: list[tuple[int, bool]] = []
    settlement = Settlement(1)
    box = Outbox(1, settled)
    box.put(run(items(10), now=5.0, settlement=settlement), 0)
    box.take(400)
    assert box.drop_older(4.9) == 0
    assert box.drop_older(5.0) == 6
    assert (settlement.open, settlement.failed, box.bytes, settled) == (1, True, 0, [])
