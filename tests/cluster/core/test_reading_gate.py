"""The gate before a client's input: reasons and times, its two edges, and the clock that stands still meanwhile."""

from __future__ import annotations

from cluster.core.contract import NEVER
from cluster.core.reading_gate import Hold, ReadingGate


def gate() -> tuple[ReadingGate, list[bool]]:
    edges: list[bool] = []
    return ReadingGate(edges.append), edges


def test_the_first_reason_stops_reading_and_the_last_one_that_goes_begins_it_again() -> None:
    held, edges = gate()
    held.hold(Hold.TURN, 1.0)
    held.hold(Hold.RATE, 2.0, until=9.0)
    held.release(Hold.TURN, 3.0)
    held.release(Hold.TURN, 3.0)
    assert (edges, held.reads, held.reasons) == ([False], False, {Hold.RATE: 2.0})
    assert held.holds_only(Hold.RATE)
    held.release(Hold.RATE, 4.0)
    assert (edges, held.reads, held.reasons) == ([False, True], True, {})


def test_a_longer_time_replaces_a_shorter_one_and_the_reason_counts_from_its_beginning() -> None:
    held, _ = gate()
    held.hold(Hold.RATE, 1.0, until=5.0)
    held.hold(Hold.RATE, 2.0, until=4.0)
    assert held.next_deadline() == 5.0
    held.hold(Hold.RATE, 3.0, until=8.0)
    assert (held.next_deadline(), held.reasons) == (8.0, {Hold.RATE: 1.0})


def test_a_reason_ends_with_its_time_and_one_without_a_time_stays() -> None:
    held, edges = gate()
    held.hold(Hold.RATE, 1.0, until=1.0)
    assert (held.reads, held.expire(1.0), held.next_deadline()) == (True, False, NEVER)
    held.hold(Hold.RATE, 1.0, until=5.0)
    held.hold(Hold.JOINS, 1.0, until=6.0)
    assert not held.expire(4.9)
    assert held.expire(5.0)
    assert held.reasons == {Hold.JOINS: 1.0}
    held.hold(Hold.ANSWERS, 5.0)
    assert held.expire(7.0)
    assert (held.reasons, held.next_deadline(), edges) == ({Hold.ANSWERS: 5.0}, NEVER, [False])


def test_who_continues_at_the_edge_may_hold_the_gate_again() -> None:
    edges: list[bool] = []

    def turned(reads: bool) -> None:
        edges.append(reads)
        if reads:
            held.hold(Hold.TURN, 2.0)

    held = ReadingGate(turned)
    held.hold(Hold.RATE, 1.0, until=2.0)
    assert held.expire(2.0)
    assert (edges, held.reads, held.reasons) == ([False, True, False], False, {Hold.TURN: 2.0})


def test_the_clock_of_what_a_client_has_to_send_stands_still_while_it_is_not_read_from() -> None:
    held, _ = gate()
    assert held.clock(3.0) == 3.0
    held.hold(Hold.TURN, 3.0)
    assert held.clock(10.0) == 3.0
    held.release(Hold.TURN, 13.0)
    assert (held.clock(14.0), held.held_s) == (4.0, 10.0)
