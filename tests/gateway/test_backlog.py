"""The bounded buffer before a slow connection."""

from __future__ import annotations

from gateway.connections import Backlog


def test_what_is_put_comes_out_in_order_and_in_pieces() -> None:
    backlog = Backlog(100, 10.0)
    for number in range(5):
        assert backlog.put(b"%d" % number * 10, 2, 0.0)
    assert backlog.take(25) == ([b"0" * 10, b"1" * 10], 4)
    assert backlog.take(1) == ([b"2" * 10], 2)
    assert backlog.take(1000) == ([b"3" * 10, b"4" * 10], 4)
    assert not backlog
    assert backlog.take(10) == ([], 0)


def test_the_oldest_go_first_when_it_is_full() -> None:
    backlog = Backlog(30, 10.0)
    for number in range(5):
        backlog.put(b"%d" % number * 10, 3, 0.0)
    assert backlog.dropped == 6
    assert backlog.take(1000) == ([b"2" * 10, b"3" * 10, b"4" * 10], 9)


def test_a_chunk_above_the_bound_is_dropped_itself() -> None:
    backlog = Backlog(30, 10.0)
    backlog.put(b"x" * 31, 1, 0.0)
    assert (backlog.dropped, bool(backlog)) == (1, False)


def test_patience_ends_only_when_it_stays_over_the_bound() -> None:
    backlog = Backlog(10, 5.0)
    assert backlog.put(b"x" * 10, 1, 0.0)
    assert backlog.put(b"x" * 10, 1, 1.0)
    assert backlog.put(b"x" * 10, 1, 5.9)
    assert not backlog.put(b"x" * 10, 1, 6.0)
    backlog.take(1000)
    assert backlog.put(b"x" * 20, 1, 20.0)
    assert backlog.put(b"x" * 20, 1, 24.9)
    assert not backlog.put(b"x" * 20, 1, 25.0)
