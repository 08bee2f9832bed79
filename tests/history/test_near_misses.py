"""One history for each thing that looks wrong and is allowed, beside its neighbour that is wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tests.history.checker import check, report
from tests.history.record import (
    ACCEPTED,
    ALL_DEVICES,
    PERSISTED,
    REPLICATED,
    Acknowledge,
    Acknowledged,
    Drop,
    Fault,
    Gap,
    History,
    Listed,
    LoggedIn,
    Login,
    Mail,
    Operation,
    Read,
    Result,
    Send,
    Sent,
)
from tests.history.violation import Limits, Rule

LIMITS = Limits(sends=0, deliveries=0, acknowledgements=0, faults=0, window=2, inbox_cap=5, settle_us=50, handover_us=50)
UIN, DEVICE, LANE = 7, 1, 1
MAIL = Send(100, 1, (UIN,), LANE)


class Tale:
    """A history of one user, written by hand: a tick passes before each event."""

    def __init__(self) -> None:
        ticks = count()
        self.history = History(lambda: next(ticks))

    def call(self, process: str, operation: Operation, result: Result | None = None) -> None:
        self.history.ok(self.history.invoke(process, operation), result)

    def log_in(self, process: str = "app", device: int = DEVICE, starts: int = 0) -> None:
        self.call(process, Login(UIN, device), LoggedIn(((LANE, starts),)))

    def send(self, id_: int, seq: int, **more: object) -> Send:
        sent = replace(MAIL, id=id_, **more)  # type: ignore[arg-type]
        self.call("writer", sent, Sent(id_ + 1000, ((UIN, seq),) if seq else ()))
        return sent

    def copy(self, id_: int, seq: int, device: int = DEVICE, dup: bool = False) -> Mail:
        return Mail(UIN, device, LANE, id_, seq, id_ + 1000, dup)

    def arrive(self, id_: int, seq: int, process: str = "app", device: int = DEVICE) -> None:
        """On the wire, and to the application."""
        self.history.wire(process, self.copy(id_, seq, device))
        self.history.delivered(process, self.copy(id_, seq, device))

    def acknowledge(self, up_to: int, process: str = "app", device: int = DEVICE) -> None:
        self.call(process, Acknowledge(UIN, device, LANE, up_to), Acknowledged(up_to))

    def look(self, *seqs: int, last: int, device: int = DEVICE, **more: int) -> None:
        """The last list; message 100 + n has InboxSeq n + 1."""
        entries = tuple((seq, seq + 1099, 0) for seq in seqs)
        self.call("reader", Read(UIN, device, LANE, final=True), Listed(entries, last, **more))

    def found(self) -> set[Rule]:
        """The rules that do not hold."""
        return {violation.rule for violation in check(self.history, LIMITS)}

    def passes(self) -> None:
        violations = check(self.history, LIMITS)
        assert not violations, report(self.history, violations)


@pytest.fixture
def tale() -> Tale:
    """A user with one device, logged in."""
    tale = Tale()
    tale.log_in()
    return tale


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_unknown_is_zero_or_one_time(tale: Tale, stored: bool, told: bool) -> None:
    call = tale.history.invoke("writer", MAIL)
    if told:
        tale.history.unknown(call, "timeout")
    if stored:
        tale.arrive(100, 1)
        tale.acknowledge(1)
    tale.look(last=int(stored))
    tale.passes()


def test_a_refusal_before_a_retry_is_no_refusal(tale: Tale) -> None:
    tale.history.fail(tale.history.invoke("writer", MAIL), "RESOURCE_EXHAUSTED")
    tale.send(100, 1)
    tale.arrive(100, 1)
    tale.look(1, last=1)
    tale.passes()


def test_what_was_refused_and_arrives_before_its_retry_is_found(tale: Tale) -> None:
    tale.history.fail(tale.history.invoke("writer", MAIL), "RESOURCE_EXHAUSTED")
    tale.arrive(100, 1)
    tale.send(100, 1)
    tale.look(1, last=1)
    assert tale.found() == {Rule.REFUSED}


def test_a_repeat_on_the_wire_is_marked(tale: Tale) -> None:
    tale.send(100, 1)
    tale.arrive(100, 1)
    tale.log_in()
    tale.history.wire("app", tale.copy(100, 1, dup=True))
    tale.look(1, last=1)
    tale.passes()
    tale.history.wire("app", tale.copy(100, 1))
    assert tale.found() == {Rule.DUP}


def test_another_relay_marks_nothing_on_another_connection(tale: Tale) -> None:
    tale.send(100, 1)
    tale.arrive(100, 1)
    tale.history.fault(Fault("stop", "relay/0"))
    tale.log_in("app again")
    tale.history.wire("app again", tale.copy(100, 1))
    tale.look(1, last=1)
    tale.passes()
    tale.history.wire("app again", tale.copy(100, 1))
    assert tale.found() == {Rule.DUP}, "its gateway knows what it wrote"


def test_a_relay_that_has_been_well_for_long_marks_what_comes_again(tale: Tale) -> None:
    tale.history.fault(Fault("stop", "relay/0"))
    tale.history.fault(Fault("stop", "relay/0", heals=True))
    for number in range(LIMITS.handover_us):
        tale.send(200 + number, 2 + number)
    tale.send(100, 1)
    tale.arrive(100, 1)
    tale.log_in("app again")
    tale.history.wire("app again", tale.copy(100, 1))
    assert Rule.DUP in tale.found()


def test_a_first_copy_is_marked_where_one_may_have_been_lost(tale: Tale) -> None:
    tale.send(100, 1)
    tale.history.fault(Fault("kill", "gateway/1"))
    tale.history.wire("app", tale.copy(100, 1, dup=True))
    tale.look(1, last=1)
    tale.passes()


def test_another_run_of_an_application_gets_what_was_not_acknowledged(tale: Tale) -> None:
    tale.send(100, 1)
    tale.arrive(100, 1)
    tale.history.unknown(tale.history.invoke("app", Acknowledge(UIN, DEVICE, LANE, 1)), "the connection broke")
    tale.log_in("app again")
    tale.history.wire("app again", tale.copy(100, 1, dup=True))
    tale.history.delivered("app again", tale.copy(100, 1))
    tale.look(last=1)
    tale.passes()


def test_what_was_on_its_way_when_it_was_acknowledged_may_arrive(tale: Tale) -> None:
    tale.send(100, 1)
    tale.arrive(100, 1)
    call = tale.history.invoke("app", Acknowledge(UIN, DEVICE, LANE, 1))
    tale.log_in("app again")
    tale.history.ok(call, Acknowledged(1))
    tale.history.delivered("app again", tale.copy(100, 1))
    tale.passes()
    tale.log_in("and again")
    tale.history.delivered("and again", tale.copy(100, 1))
    assert tale.found() == {Rule.ACKNOWLEDGED_AGAIN}


def test_an_acknowledged_and_trimmed_entry_is_gone(tale: Tale) -> None:
    for number in range(3):
        tale.send(100 + number, number + 1)
        tale.arrive(100 + number, number + 1)
    tale.acknowledge(2)
    tale.look(3, last=3, floor=2, cursor=2)
    tale.passes()


def test_a_device_that_joined_later_is_owed_what_comes_after(tale: Tale) -> None:
    tale.send(100, 1)
    tale.arrive(100, 1)
    tale.acknowledge(1)
    tale.log_in("tablet", device=2, starts=1)
    tale.look(last=1)
    tale.look(last=1, device=2)
    tale.passes()
    tale.send(101, 2)
    tale.look(2, last=2)
    assert tale.found() == {Rule.LOST}
    tale.look(2, last=2, device=2)
    tale.passes()


def test_every_device_has_a_cursor_of_its_own(tale: Tale) -> None:
    tale.log_in("tablet", device=2)
    tale.send(100, 1)
    tale.arrive(100, 1)
    tale.arrive(100, 1, "tablet", device=2)
    tale.acknowledge(1)
    tale.look(last=1)
    tale.look(last=1, device=2)
    assert tale.found() == {Rule.KEPT}


def test_nothing_is_owed_to_a_device_that_was_given_up(tale: Tale) -> None:
    tale.send(100, 1)
    tale.call("operator", Drop(UIN, DEVICE))
    tale.passes()


def test_what_is_deleted_for_all_devices_is_owed_to_none(tale: Tale) -> None:
    tale.send(100, 1)
    tale.call("app", Acknowledge(UIN, ALL_DEVICES, LANE, 0, (1,)))
    tale.look(last=1, floor=1)
    tale.passes()


@pytest.mark.parametrize("expires_us", [0, 4])
def test_expired_mail_leaves_a_gap(tale: Tale, expires_us: int) -> None:
    tale.send(100, 1, expires_us=expires_us)
    tale.send(101, 2)
    tale.history.gap("app", Gap(UIN, DEVICE, LANE, 1, 1))
    tale.arrive(101, 2)
    tale.look(2, last=2)
    assert tale.found() == (set() if expires_us else {Rule.GAP})


def test_a_list_may_tell_of_the_gap(tale: Tale) -> None:
    tale.send(100, 1, expires_us=4)
    tale.send(101, 2)
    tale.look(2, last=2, floor=1, gap=1)
    tale.passes()


@pytest.mark.parametrize("above", [4, 5])
def test_the_oldest_go_over_the_cap(tale: Tale, above: int) -> None:
    for number in range(above + 1):
        tale.send(100 + number, number + 1)
    tale.look(*range(2, above + 2), last=above + 1, floor=1, gap=1)
    assert tale.found() == (set() if above >= LIMITS.inbox_cap else {Rule.GAP})


@pytest.mark.parametrize("unseen", [1, 2])
def test_the_oldest_may_have_gone_before_anybody_saw_their_numbers(tale: Tale, unseen: int) -> None:
    end = LIMITS.inbox_cap + 1
    for number in range(end):
        tale.send(100 + number, number and number + 1)
    for number in range(1, unseen):
        tale.send(500 + number, 0)  # one number is gone, and two messages
    tale.look(*range(2, end + 1), last=end, floor=1, gap=1)
    assert tale.found() == (set() if unseen == 1 else {Rule.LOST})


@pytest.mark.parametrize("level", [ACCEPTED, PERSISTED, REPLICATED])
@pytest.mark.parametrize("target", ["", "gateway/1", "xiu/0/1", "pi/3/1"])
def test_a_weaker_level_is_lost_with_a_leader_and_else_never(tale: Tale, level: str, target: str) -> None:
    tale.send(100, 0, level=level)
    if target:
        tale.history.fault(Fault("kill", target))
    tale.look(last=0)
    assert tale.found() == (set() if level != REPLICATED and target.startswith(("xiu", "pi")) else {Rule.LOST})


def test_a_store_that_was_whole_for_long_loses_nothing(tale: Tale) -> None:
    tale.history.fault(Fault("kill", "xiu/0/1"))
    tale.history.fault(Fault("restart", "xiu/0/1", heals=True))
    for _ in range(LIMITS.settle_us):
        tale.log_in()
    tale.send(100, 0, level=ACCEPTED)
    tale.look(last=0)
    assert tale.found() == {Rule.LOST}


def test_a_retry_behind_what_came_after_is_in_order(tale: Tale) -> None:
    tale.history.unknown(tale.history.invoke("writer", MAIL), "timeout")
    tale.send(101, 1)
    tale.send(100, 2)
    tale.call("reader", Read(UIN, DEVICE, LANE, final=True), Listed(((1, 1101, 0), (2, 1100, 0)), 2))
    tale.passes()


def test_calls_at_the_same_time_may_stand_either_way(tale: Tale) -> None:
    one = tale.history.invoke("writer", MAIL)
    other = tale.history.invoke("another", replace(MAIL, id=101))
    tale.history.ok(one, Sent(1100, ((UIN, 2),)))
    tale.history.ok(other, Sent(1101, ((UIN, 1),)))
    tale.call("reader", Read(UIN, DEVICE, LANE, final=True), Listed(((1, 1101, 0), (2, 1100, 0)), 2))
    tale.passes()


def test_lists_and_answers_that_overlap_may_be_older(tale: Tale) -> None:
    tale.send(100, 1)
    tale.arrive(100, 1)
    early = tale.history.invoke("reader", Read(UIN, DEVICE, LANE))
    tale.send(101, 2)
    tale.acknowledge(1)
    tale.history.ok(early, Listed(((1, 1100, 100),), 1, cursor=0))
    tale.look(2, last=2, cursor=1)
    tale.passes()


def test_a_client_that_learns_no_numbers_is_known_by_its_messages(tale: Tale) -> None:
    for number in range(3):
        tale.history.unknown(tale.history.invoke("writer", replace(MAIL, id=100 + number)), "timeout")
        tale.history.wire("app", Mail(UIN, DEVICE, LANE, 100 + number))
        tale.history.delivered("app", Mail(UIN, DEVICE, LANE, 100 + number))
        tale.history.unknown(tale.history.invoke("app", Acknowledge(UIN, DEVICE, LANE, ids=(100 + number,))), "PUBACK")
    tale.send(103, 4)
    tale.look(4, last=4)
    tale.passes()
    tale.history.delivered("app", Mail(UIN, DEVICE, LANE, 101))
    assert tale.found() == {Rule.ONCE}


def test_a_window_is_repeated_on_each_connection(tale: Tale) -> None:
    for number in range(3):
        tale.send(100 + number, number + 1)
        tale.arrive(100 + number, number + 1)
    tale.look(1, 2, 3, last=3)
    for _ in range(3):
        tale.log_in()
        tale.history.wire("app", tale.copy(100, 1, dup=True))
        tale.history.wire("app", tale.copy(101, 2, dup=True))
    tale.passes()
    tale.history.wire("app", tale.copy(102, 3, dup=True))
    assert tale.found() == {Rule.WINDOW}


def test_lanes_and_receivers_have_numbers_of_their_own(tale: Tale) -> None:
    tale.call("app", Login(8, DEVICE))
    tale.call("writer", replace(MAIL, receivers=(UIN, 8)), Sent(1100, ((UIN, 1), (8, 1))))
    tale.call("writer", replace(MAIL, id=101, lane=0), Sent(1101, ((UIN, 1),)))
    tale.call("reader", Read(UIN, DEVICE, 0, final=True), Listed(((1, 1101, 0),), 1))
    tale.look(1, last=1)
    assert tale.found() == {Rule.LOST}
    tale.call("reader", Read(8, DEVICE, LANE, final=True), Listed(((1, 1100, 0),), 1))
    tale.passes()


@pytest.mark.parametrize("gap", [0, 1])
def test_expired_mail_to_somebody_without_a_device_leaves_a_gap(gap: int) -> None:
    tale = Tale()
    tale.send(100, 1, expires_us=2)
    tale.look(last=1, floor=1, gap=gap)
    assert tale.found() == (set() if gap else {Rule.EXPIRED_SILENTLY})


def test_an_inboxseq_is_of_one_message(tale: Tale) -> None:
    tale.history.ok(tale.history.invoke("writer", MAIL), Sent(1100, ((UIN, 1),)))
    tale.history.ok(tale.history.invoke("another", replace(MAIL, id=101)), Sent(1101, ((UIN, 1),)))
    tale.call("reader", Read(UIN, DEVICE, LANE, final=True), Listed(((1, 1100, 0), (1, 1101, 0)), 1))
    assert Rule.ENTRY in tale.found()


def test_what_makes_no_sense_is_said(tale: Tale) -> None:
    tale.passes()
    login = next(event for event in tale.history.events if event.kind == "invoke")
    at_us = tale.history.events[-1].at_us
    tale.history.events.append(replace(login, at_us=at_us))
    assert tale.found() == {Rule.HISTORY}
    tale.history.events[-1] = replace(login, at_us=at_us, kind="wire")
    assert tale.found() == {Rule.HISTORY}
