"""A sender's flow control and the queue before it."""

from __future__ import annotations

import itertools

from cluster.links.acknowledgement import Told
from cluster.links.outbox import ANY, LARGE, SMALL, Outbox, Run, Settlement
from cluster.links.window import INITIAL_BYTES, OVERHEAD_BYTES, SILENCE_S, VOID_S, Window

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


def run(some: list[bytes], now: float = 0.0, large: bool = False, settlement: Settlement | None = None) -> Run:
    return Run(some, sum(map(len, some)), large, settlement, now)


def test_a_datagram_takes_from_several_parcels_lane_0_first() -> None:
    box = Outbox(2, 1 << 20, [])
    box.put(run([b"b" * 100] * 3), 1)
    box.put(run([b"a" * 100] * 2), 0)
    parts, size, _ = box.take(450, SMALL)
    assert (b"".join(part[:1] for part in parts), size) == (b"aabb", 400)
    assert box.take(450, SMALL)[0] == [b"b" * 100]
    assert box.head() is None
    assert box.bytes == 0


def test_a_parcel_over_several_datagrams_settles_with_the_last_of_them() -> None:
    settled: list[tuple[int, bool]] = []
    settlement = Settlement(5)
    box = Outbox(1, 1 << 20, settled)
    box.put(run(items(10), settlement=settlement), 0)
    touched = []
    while box.head() is not None:
        parts, _, settlements = box.take(350, SMALL)
        touched.append((len(parts), len(settlements)))
    assert touched == [(3, 1), (3, 1), (3, 1), (1, 1)]
    assert settlement.open == 4
    assert settled == []


def test_taking_stops_where_the_carrier_changes() -> None:
    box = Outbox(1, 1 << 20, [])
    box.put(run(items(2)), 0)
    box.put(run([bytes(5000)], large=True), 0)
    box.put(run(items(2)), 0)
    assert len(box.take(1000, SMALL)[0]) == 2
    assert [len(part) for part in box.take(1000, LARGE)[0]] == [5000]
    assert len(box.take(1000, SMALL)[0]) == 2
    box.put(run([bytes(500)], large=True), 0)
    box.put(run(items(2)), 0)
    assert len(box.take(1000, ANY)[0]) == 3


def test_a_full_queue_drops_the_oldest_of_the_last_lane_first() -> None:
    settled: list[tuple[int, bool]] = []
    box = Outbox(2, 1000, settled)
    for token in range(1, 5):
        box.put(run(items(3), settlement=Settlement(token)), 0 if token == 1 else 1)
    assert box.overflow() == 6
    assert settled == [(2, False), (3, False)]
    assert box.bytes <= 1000


def test_what_was_partly_sent_is_dropped_with_its_rest_only() -> None:
    settled: list[tuple[int, bool]] = []
    settlement = Settlement(1)
    box = Outbox(1, 1 << 20, settled)
    box.put(run(items(10), now=5.0, settlement=settlement), 0)
    box.take(400, SMALL)
    assert box.drop_older(4.9) == 0
    assert box.drop_older(5.0) == 6
    assert (settlement.open, settlement.failed, box.bytes, settled) == (1, True, 0, [])
