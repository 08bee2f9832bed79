"""Deliveries that may wait: in order, all of them, a few at a time, and bounded."""

from __future__ import annotations

from collections.abc import Callable

from gateway import events as ev
from gateway.clients.paced_fanout import MAX_WAITING, MIN_WRITES, SHARE, PacedFanout


class Loop:
    """Timers that fire when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []
        self.written: list[tuple[int, bytes, int]] = []
        self.dropped = 0
        self.queue = PacedFanout(self._write, lambda _, function: self.timers.append(function), self._drop)

    def _write(self, number: int, data: bytes, count: int) -> None:
        self.written.append((number, data, count))

    def _drop(self, messages: int) -> None:
        self.dropped += messages

    def turn(self) -> int:
        """One timer; how many were written to."""
        before = len(self.written)
        self.timers.pop()()
        return len(self.written) - before


def test_everybody_is_written_to_once_in_order() -> None:
    loop = Loop()
    for body in (b"a", b"b"):
        loop.queue.put(ev.Deliver(tuple(range(100)), body, 1, True))
    while loop.timers:
        assert len(loop.timers) == 1
        assert loop.turn() <= max(MIN_WRITES, 200 // SHARE)
    assert loop.written == [(number, body, 1) for body in (b"a", b"b") for number in range(100)]
    assert len(loop.queue) == 0


def test_the_more_waits_the_more_is_written_at_a_time() -> None:
    loop = Loop()
    loop.queue.put(ev.Deliver(tuple(range(10_000)), b"a", 1, True))
    assert loop.turn() == 10_000 // SHARE
    loop.queue.put(ev.Deliver((1,), b"b", 1, True))
    turns = 0
    while loop.timers:
        loop.turn()
        turns += 1
    assert turns < 100
    assert loop.written[-1] == (1, b"b", 1)


def test_nothing_is_written_at_once_and_nothing_runs_when_idle() -> None:
    loop = Loop()
    loop.queue.put(ev.Deliver((1, 2), b"a", 3, True))
    assert loop.written == []
    assert loop.turn() == 2
    assert loop.timers == []
    loop.queue.put(ev.Deliver((3,), b"b", 1, True))
    assert loop.turn() == 1


def test_beyond_the_bound_the_oldest_goes_and_is_counted() -> None:
    loop = Loop()
    loop.queue.put(ev.Deliver(tuple(range(40)), b"old", 2, True))
    assert loop.turn() == MIN_WRITES
    for number in range(MAX_WAITING):
        loop.queue.put(ev.Deliver((number,), b"new", 1, True))
    assert loop.dropped == 2 * (40 - MIN_WRITES)
    assert len(loop.queue) == MAX_WAITING
    while loop.timers:
        loop.turn()
    assert [number for number, data, _ in loop.written if data == b"new"] == list(range(MAX_WAITING))
