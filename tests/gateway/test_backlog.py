"""The buffer before a slow connection: bounded, its grade by the oldest message, and when patience ends."""

from __future__ import annotations

from gateway.clients.backlog import CHUNK_BYTES, Backlog, Grade


def test_the_grade_is_the_age_of_the_oldest_message() -> None:
    backlog = Backlog(10_000, 5.0)
    assert backlog.grade(100.0) is Grade.PROMPT
    backlog.put(b"a", 1, 100.0)
    backlog.put(b"b", 1, 100.9)
    assert [backlog.grade(now) for now in (100.0, 100.099, 100.101, 100.99, 101.01, 200.0)] == [
        Grade.PROMPT, Grade.PROMPT, Grade.BATCHED, Grade.BATCHED, Grade.STALLED, Grade.STALLED
    ]  # fmt: skip


def test_what_was_taken_waits_until_it_has_left() -> None:
    backlog = Backlog(10_000, 5.0)
    backlog.put(b"a", 1, 0.0)
    assert backlog.take(100) == ([b"a"], 1)
    backlog.put(b"b", 1, 0.5)
    assert backlog.behind_s(0.6) == 0.6
    backlog.left()
    assert round(backlog.behind_s(0.6), 6) == 0.1
    backlog.take(100)
    backlog.left()
    assert backlog.behind_s(9.0) == 0.0


def test_what_was_written_directly_counts_from_when_it_did_not_leave() -> None:
    backlog = Backlog(10_000, 5.0)
    backlog.leaving(1.0)
    backlog.leaving(2.0)
    assert backlog.behind_s(2.5) == 1.5


def test_the_oldest_go_at_the_bound_also_when_messages_are_tiny() -> None:
    backlog = Backlog(1000, 5.0)
    for number in range(100):
        backlog.put(b"%02d" % number, 1, 0.0)
    chunks, count = backlog.take(1 << 20)
    assert backlog.dropped == 100 - count
    assert count == 1000 // (2 + CHUNK_BYTES)
    assert chunks == [b"%02d" % number for number in range(100 - count, 100)]


def test_a_chunk_above_the_bound_is_dropped_whole() -> None:
    backlog = Backlog(1000, 5.0)
    assert backlog.put(b"x" * 5000, 7, 0.0)
    assert not backlog
    assert backlog.dropped == 7


def test_patience_ends_when_a_connection_stays_over_the_bound() -> None:
    backlog = Backlog(1000, 5.0)
    assert backlog.put(b"x" * 2000, 1, 0.0)
    assert backlog.put(b"x" * 2000, 1, 4.9)
    assert not backlog.put(b"x", 1, 5.1)


def test_patience_ends_when_a_connection_stays_stalled_and_not_before() -> None:
    backlog = Backlog(1_000_000, 5.0)
    backlog.put(b"x", 1, 0.0)
    assert all(backlog.patient(now) for now in (0.5, 1.0, 3.0, 5.9))
    assert not backlog.patient(6.1)


def test_catching_up_restores_patience() -> None:
    backlog = Backlog(1_000_000, 5.0)
    backlog.put(b"x", 1, 0.0)
    assert backlog.patient(4.0)
    backlog.take(100)
    backlog.left()
    assert backlog.patient(5.0)
    backlog.put(b"x", 1, 9.0)
    assert backlog.patient(10.5)
    assert backlog.patient(14.0)
    assert not backlog.patient(16.0)


def test_chunks_leave_in_order_and_at_least_one() -> None:
    backlog = Backlog(1_000_000, 5.0)
    for data in (b"a" * 50, b"b" * 50, b"c" * 500):
        backlog.put(data, 2, 0.0)
    assert backlog.take(100) == ([b"a" * 50, b"b" * 50], 4)
    assert backlog.take(100) == ([b"c" * 500], 2)
    assert backlog.take(100) == ([], 0)


def test_who_caught_up_long_ago_has_all_patience_again() -> None:
    """Also when nobody looked in between: two short delays are not one long one."""
    backlog = Backlog(1_000_000, 5.0)
    backlog.leaving(0.0)
    assert backlog.put(b"first", 1, 2.0)
    backlog.left()
    backlog.take(1000)
    backlog.left()
    backlog.leaving(100.0)
    assert backlog.put(b"second", 1, 102.0)
    assert not backlog.put(b"third", 1, 107.0)
