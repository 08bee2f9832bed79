"""The sender's decisions on signals: acceptance by one copy, repeats until a receipt, the end."""

from __future__ import annotations

import gc

import pytest

from pixiu.client.send.events import Failure
from pixiu.client.send.signals import (
    COPIES,
    MAX_UNRESOLVED,
    REPEAT_AFTER_S,
    REPEATS,
    RecentSignals,
    SendCopies,
    Signal,
    SignalCore,
    SignalResolved,
)
from pixiu.errors import Undelivered
from pixiu.rpc.deadline_timer import NEVER

DROPPED = Failure("DROPPED", "a broker did not confirm it")


def offered(core: SignalCore, number: int = 1, receipt: bool = False, now: float = 0.0) -> Signal:
    signal = Signal(b"record", number, 1, receipt)
    assert core.offer(signal, now) == [SendCopies(signal)]
    return signal


def test_one_accepted_copy_is_enough_without_a_receipt() -> None:
    core = SignalCore()
    signal = offered(core)
    assert core.copy_done(signal, DROPPED) == []
    assert core.copy_done(signal, None) == [SignalResolved(signal)]
    assert core.copy_done(signal, DROPPED) == []
    assert (signal.resolved, signal.failure, core.unresolved, core.counters.accepted) == (True, None, 0, 1)
    assert core.next_deadline() == NEVER


def test_a_signal_fails_when_every_copy_has() -> None:
    core = SignalCore()
    signal = offered(core)
    assert core.copy_done(signal, DROPPED) == core.copy_done(signal, DROPPED) == []
    assert core.copy_done(signal, DROPPED) == [SignalResolved(signal)]
    assert signal.failure == DROPPED
    assert core.counters.failed == 1


def test_with_a_receipt_only_a_gateway_resolves_it() -> None:
    core = SignalCore()
    signal = offered(core, receipt=True)
    for _ in range(COPIES):
        assert core.copy_done(signal, None) == []
    assert core.delivered([7, 1, 1], 5) == [SignalResolved(signal)]
    assert core.delivered([1], 5) == []
    assert (signal.failure, core.counters.delivered, core.next_deadline()) == (None, 1, NEVER)


def test_a_receipt_counts_each_gateway_once_also_after_the_first() -> None:
    core = SignalCore()
    signal, undelivered = offered(core, 1, receipt=True), offered(core, 2, receipt=True)
    assert core.delivered([1], 5) == [SignalResolved(signal)]
    assert set(signal.delivered_by) == {5}
    assert core.delivered([1, 1], 6) == core.delivered([1], 5) == []
    assert set(signal.delivered_by) == {5, 6}
    core.abandon("closed")
    assert core.delivered([2], 6) == []
    assert (undelivered.delivered_by, core.counters.delivered, core.counters.failed) == ((6,), 1, 1)


@pytest.mark.slow
def test_a_receipt_that_nobody_keeps_is_not_counted_any_more() -> None:
    core = SignalCore()
    core.delivered([offered(core, 1, receipt=True).message_id], 5)
    gc.collect()
    assert not core._counted  # the one place where it could stay
    assert core.delivered([1], 6) == []


def test_it_is_repeated_three_times_with_the_same_id_and_then_given_up() -> None:
    core = SignalCore()
    signal = offered(core, receipt=True)
    for repeat in range(1, REPEATS + 1):
        due = core.next_deadline()
        assert due == pytest.approx(repeat * REPEAT_AFTER_S)
        assert core.tick(due - 0.001) == []
        assert core.tick(due) == [SendCopies(signal)]
        assert signal.record == b"record"
    due = core.next_deadline()
    assert core.tick(due) == [SignalResolved(signal)]
    assert signal.failure is not None
    error = signal.failure.error()
    assert isinstance(error, Undelivered)
    assert "sent 4 times in 800 ms; no broker confirmed it" in str(error)
    assert (core.counters.repeated, core.counters.failed, core.unresolved) == (3, 1, 0)
    assert core.delivered([1], 5) == []


def test_a_late_delivery_of_an_earlier_try_counts() -> None:
    core = SignalCore()
    signal = offered(core, receipt=True)
    core.tick(0.2)
    assert core.delivered([1], 5) == [SignalResolved(signal)]
    assert core.tick(10.0) == []


def test_lost_copies_are_no_failure_before_the_last_try_but_what_cannot_be_sent_is() -> None:
    core = SignalCore()
    signal = offered(core, receipt=True)
    for _ in range(COPIES):
        assert core.copy_done(signal, DROPPED) == []
    other = offered(core, 2, receipt=True)
    too_large = Failure("RECORD_TOO_LARGE", "above the cluster's limit")
    assert [core.copy_done(other, too_large) for _ in range(COPIES)] == [[], [], [SignalResolved(other)]]
    assert other.failure == too_large
    assert not signal.resolved


def test_each_signal_has_its_own_time() -> None:
    core = SignalCore()
    first, second = offered(core, 1, True, 0.0), offered(core, 2, True, 0.1)
    assert core.tick(0.25) == [SendCopies(first)]
    assert core.next_deadline() == pytest.approx(0.3)
    assert core.tick(0.31) == [SendCopies(second)]
    assert core.next_deadline() == pytest.approx(0.45)


def test_the_error_says_what_the_brokers_said() -> None:
    core = SignalCore()
    accepted, refused = offered(core, 1, receipt=True), offered(core, 2, receipt=True)
    core.copy_done(accepted, None)
    core.copy_done(refused, DROPPED)
    for now in (1.0, 2.0, 3.0, 4.0):
        core.tick(now)
    assert accepted.failure is not None
    assert "brokers have it" in accepted.failure.text
    assert refused.failure is not None
    assert DROPPED.text in refused.failure.text


def test_unresolved_signals_are_bounded_and_a_closing_client_gives_them_up() -> None:
    core = SignalCore()
    signals = [offered(core, number, receipt=True) for number in range(MAX_UNRESOLVED)]
    assert not core.has_space()
    core.delivered([5], 5)
    assert core.has_space()
    assert len(core.abandon("closed")) == MAX_UNRESOLVED - 1
    assert core.unresolved == 0
    assert all(signal.resolved for signal in signals)


def test_recent_signals_are_bounded_and_remember_a_generation() -> None:
    recent = RecentSignals(generation=100)
    assert all(recent.is_new(number, 1) for number in range(1000))
    assert not any(recent.is_new(number, 1) for number in range(900, 1000))
    assert recent.is_new(999, 2)
    assert recent.is_new(5, 1)
