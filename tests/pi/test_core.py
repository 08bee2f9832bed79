"""What a replica takes, refuses and answers; nothing is written here."""

from __future__ import annotations

from typing import TypeVar

import pytest

from pi import core as module
from pi.core import Core
from pi.events import (
    Effect,
    EntryApplied,
    Event,
    LayoutChanged,
    LeaderChanged,
    Level,
    LogPersisted,
    Notify,
    ProposalAccepted,
    ProposalRejected,
    Propose,
    ReadRequest,
    Reply,
    Requested,
    StreamClosed,
    Tick,
    TurnEnded,
)
from pi.operations import U64, Clock, Code, Fanout, Limits, Operation, Writer, decode, encode
from pi.state import Read, Refusal
from pixiu.errors import StateDamaged
from tests.support.effects import of, only
from tests.support.pi import acknowledges, appends, message

T = TypeVar("T")


class Shelf:
    """Answers reads by the device's number."""

    lease = True

    def may_read(self) -> bool:
        return self.lease

    def read(self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, *_: object) -> Read:
        if number == 1:
            raise Refusal(Code.OLD_SESSION)
        if number == 2:
            raise StateDamaged("broken")
        return Read([(4, 44)], 3, 2, 4, 2, 0)


def leader(epoch: int = 5) -> Core:
    core = Core(partition=1, inboxes=Shelf(), limits=Limits(cap=9), clock_interval_s=10.0)
    core.step(LayoutChanged(3, 2, {0: "there:1"}), 0.0)
    core.step(LeaderChanged(epoch, "here:1" if epoch else "other:1"), 0.0)
    return core


def ask(
    core: Core, *operations: Operation, request: int = 1, stream: int = 1, level: Level = Level.REPLICATED, reads: int = 0,
) -> list[Effect]:  # fmt: skip
    wanted = [ReadRequest(7, device, 1, 1, None, 10) for device in range(reads)]
    return core.step(Requested(stream, request, encode(operations), level, wanted), 1.0)


def step(core: Core, event: Event) -> list[Effect]:
    return core.step(event, 2.0)


def test_what_came_in_one_turn_is_one_entry_and_is_answered_when_it_is_applied() -> None:
    core = leader()
    assert not ask(core, appends(5, (message(1), 7), (message(2), 9)))
    assert not ask(core, acknowledges(7, 1, 1), appends(5, (message(3), 7)), request=2, stream=2)
    propose = only(Propose, step(core, TurnEnded()))
    assert decode(propose.payload) == [
        appends(5, (message(1), 7), (message(2), 9)), acknowledges(7, 1, 1), appends(5, (message(3), 7)),
    ]  # fmt: skip
    assert propose.replicated
    assert not step(core, ProposalAccepted(propose.token, 5, 100))
    assert not step(core, LogPersisted(100))
    assert core.under_way == 2
    out = step(core, EntryApplied(100, [[1, -Code.INBOX_FULL], [0], [2]], 3))
    first, second = of(Reply, out)
    assert (first.request, list(first.results), first.copies) == (1, [1, -Code.INBOX_FULL], 3)
    assert (first.epoch, first.committed, first.layout_version) == (5, 100, 3)
    assert (second.request, second.stream, list(second.results)) == (2, 2, [0, 2])
    assert only(Notify, out).appended == [(7, 1, 1, message(1)), (7, 1, 2, message(3))]
    assert core.under_way == 0


def test_lower_levels_are_answered_earlier_without_results_and_notified_all_the_same() -> None:
    core = leader()
    for request, level in ((1, Level.ACCEPTED), (2, Level.PERSISTED), (3, Level.REPLICATED)):
        ask(core, appends(5, (message(request), 7)), request=request, level=level)
    token = only(Propose, step(core, TurnEnded())).token
    assert only(Reply, step(core, ProposalAccepted(token, 5, 100))).request == 1
    assert not step(core, LogPersisted(99))
    assert only(Reply, step(core, LogPersisted(100))).request == 2
    out = step(core, EntryApplied(100, [[1], [2], [3]], 1))
    assert (only(Reply, out).request, only(Reply, out).results) == (3, [3])
    assert len(only(Notify, out).appended) == 3


def test_a_user_of_another_partition_is_refused_with_the_one_that_serves_him() -> None:
    core = leader()
    for operation in (appends(5, (message(1), 8)), acknowledges(8, 1, 1), Fanout(Writer(2, 1, 5), message(1), U64.pack(8))):
        reply = only(Reply, ask(core, operation))
        assert (reply.code, reply.server) == ("WRONG_PARTITION", (0, 2, "there:1"))


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        (Fanout(Writer(1, 1, 5), message(1), U64.pack(7) * 1001), "TOO_MANY_RECEIVERS"),
        (Clock(Limits()), "INVALID_ARGUMENT"),
        (appends(5, (0, 7)), "INVALID_ARGUMENT"),
        (appends(5, (1 << 63, 7)), "INVALID_ARGUMENT"),
        (appends(5, (message(1), (1 << 63) + 1)), "INVALID_ARGUMENT"),
    ],
)  # fmt: skip
def test_what_can_never_be_is_refused_before_the_log(operation: Operation, code: str) -> None:
    core = leader()
    assert only(Reply, ask(core, operation)).code == code
    assert not step(core, TurnEnded())


def test_broken_bytes_and_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core = leader()
    assert only(Reply, core.step(Requested(1, 1, b"\xff", Level.REPLICATED, ()), 0.0)).code == "MALFORMED"
    large = bytes(module.MAX_REQUEST_BYTES + 1)
    assert only(Reply, core.step(Requested(1, 2, large, Level.REPLICATED, ()), 0.0)).code == "INVALID_ARGUMENT"
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100)
    assert not ask(core, *[acknowledges(7, 1, 1)] * 2)
    assert only(Reply, ask(core, acknowledges(7, 1, 1))).code == "OVERLOADED"


def test_after_a_refusal_a_writers_stream_is_over_until_a_higher_generation() -> None:
    core = leader()
    ask(core, appends(5, (message(1), 7)))
    token = only(Propose, step(core, TurnEnded())).token
    assert only(Reply, step(core, ProposalRejected(token, "DISK_FULL", "full"))).code == "DISK_FULL"
    assert only(Reply, ask(core, appends(5, (message(2), 7)))).code == "STALE_WRITER"
    assert not ask(core, appends(5, (message(2), 7), worker=2))
    assert not ask(core, appends(5, (message(1), 7), generation=2))
    assert not ask(core, appends(5, (message(3), 7)), stream=2)
    step(core, StreamClosed(1))
    assert not ask(core, appends(5, (message(4), 7)))


def test_a_replica_that_does_not_lead_says_who_does() -> None:
    reply = only(Reply, ask(leader(0), appends(5, (message(1), 7))))
    assert (reply.code, reply.server) == ("NOT_LEADER", (1, 2, "other:1"))


def test_who_is_deposed_says_that_the_outcome_is_unknown() -> None:
    core = leader()
    ask(core, appends(5, (message(1), 7)))
    step(core, ProposalAccepted(only(Propose, step(core, TurnEnded())).token, 5, 100))
    ask(core, appends(5, (message(2), 7)), request=2)
    step(core, TurnEnded())
    ask(core, appends(5, (message(3), 7)), request=3)
    replies = of(Reply, step(core, LeaderChanged(0, "other:1")))
    assert [(reply.request, reply.code) for reply in replies] == [(number, "OUTCOME_UNKNOWN") for number in (1, 2, 3)]
    assert core.under_way == 0
    assert not step(core, EntryApplied(100, [[1]], 1))
    step(core, LeaderChanged(7, "here:1"))
    assert only(Reply, ask(core, appends(7, (message(1), 7)))).code == "STALE_WRITER"


def test_reads_need_the_lease_and_each_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    core = leader()
    found = only(Reply, ask(core, reads=3)).reads
    assert [(read.entries, read.code) for read in found] == [([(4, 44)], ""), ([], "OLD_SESSION"), ([], "STATE_DAMAGED")]
    assert (found[0].floor, found[0].gap, found[0].last, found[0].dropped) == (3, 2, 4, 2)
    assert core.damaged == "broken"
    monkeypatch.setattr(Shelf, "lease", False)
    assert [(read.entries, read.code) for read in only(Reply, ask(core, reads=1)).reads] == [([], "UNAVAILABLE")]


def test_the_leader_alone_appends_the_clock_with_its_limits() -> None:
    core = leader()
    assert decode(only(Propose, core.step(Tick(), 50.0)).payload) == [Clock(Limits(cap=9))]
    assert not core.step(Tick(), 59.0)
    assert core.step(Tick(), 72.0)
    assert not leader(0).step(Tick(), 50.0)
