"""What a replica takes, refuses and answers; nothing is written here."""

from __future__ import annotations

import random

import pytest

from cluster.core.contract import NEVER, TICK
from cluster.replication.core.events import Accepted
from cluster.store.doubling.copied import Record
from cluster.store.doubling.phases import Doubling, Phase
from pi import core as module
from pi import events as ev
from pi.inboxes.notes import NoteFound
from pi.inboxes.reading import Read
from pixiu.ids import WORKERS
from pixiu.wire.inbox_operations import (
    MAX_OPERATIONS,
    MAX_OPERATIONS_BYTES,
    U64,
    USER_DEVICE,
    AddDevice,
    Clock,
    Code,
    Deletes,
    DropDevices,
    Fanout,
    Limits,
    OpenSessions,
    Operation,
    Trims,
    Writer,
    decode,
    encode,
    encode_delete,
)
from pixiu.wire.levels import Level
from tests.pi.world import Pi, Shelf, body
from tests.support.pi import acknowledges, appends, message


def test_reads_with_more_notes_than_an_answer_takes_are_to_be_asked_again() -> None:
    pi = Pi()

    class Noted(Shelf):
        def read(self, uin: int, *_: object) -> Read:
            return Read([], 0, 0, 0, 0, 0, notes=[NoteFound(0, 1, bytes(module.MAX_NOTES_BYTES // 2))], generation=uin)

    pi.core._inboxes = Noted()
    wanted = [ev.ReadRequest(uin, -1, 1, 0, None, 0, notes=True) for uin in (7, 9, 11, 13)]
    (reply,) = pi.step(ev.Requested(1, 1, b"", Level.REPLICATED, [*wanted, ev.ReadRequest(15, -1, 1, 0, None, 5)]))
    assert [read.code for read in reply.reads] == ["", "", "OVERLOADED", "OVERLOADED", ""]
    assert [read.generation for read in reply.reads] == [7, 9, 0, 0, 15]


def test_what_came_in_one_turn_is_one_entry_and_is_answered_when_it_is_applied() -> None:
    pi = Pi()
    assert not pi.ask(appends(5, (message(1), 7), (message(2), 9)))
    assert not pi.ask(acknowledges(7, 1, 1), appends(5, (message(3), 7)), request=2, stream=2)
    entry = pi.turn()
    assert entry is not None
    assert decode(body(entry)) == [
        appends(5, (message(1), 7), (message(2), 9)), acknowledges(7, 1, 1), appends(5, (message(3), 7)),
    ]  # fmt: skip
    assert entry.replicated
    assert not pi.accept(100)
    assert not pi.persist(100)
    assert pi.core.under_way == 2
    first, second = pi.apply(100, [[1, -Code.INBOX_FULL], [0], [2]], 3)
    assert (first.request, list(first.results), first.copies) == (1, [1, -Code.INBOX_FULL], 3)
    assert first.triple == (3, 5, 100)
    assert (second.request, second.stream, list(second.results)) == (2, 2, [0, 2])
    assert pi.core.counters.appends == 3
    assert pi.core.under_way == 0


def test_lower_levels_are_answered_earlier_without_results() -> None:
    pi = Pi()
    for request, level in ((1, Level.ACCEPTED), (2, Level.PERSISTED), (3, Level.REPLICATED)):
        pi.ask(appends(5, (message(request), 7)), request=request, level=level)
    assert pi.turn() is not None
    assert [reply.request for reply in pi.accept(100)] == [1]
    assert not pi.persist(99)
    assert [reply.request for reply in pi.persist(100)] == [2]
    (last,) = pi.apply(100, [[1], [2], [3]])
    assert (last.request, last.results) == (3, [3])


def test_what_is_on_fewer_disks_than_min_in_sync_is_applied_and_not_confirmed() -> None:
    pi = Pi()
    pi.ask(appends(5, (message(1), 7)), request=1)
    pi.ask(appends(5, (message(2), 7), worker=2), request=2, level=Level.PERSISTED)
    pi.turn()
    pi.accept(100)
    assert [reply.code for reply in pi.persist(100)] == [""]
    assert [(reply.request, reply.code) for reply in pi.apply(100, [[1], [2]], copies=0)] == [(1, "OUTCOME_UNKNOWN")]
    assert pi.core.under_way == 0
    assert pi.code(appends(5, (message(3), 7))) == "STALE_WRITER"
    pi.shelf.numbers = {(message(1), 7): 1}
    pi.ask(appends(5, (message(1), 7), generation=2))
    pi.turn()
    assert [reply.code for reply in pi.reject("DISK_FULL", "full")] == ["UNAVAILABLE"]


def test_a_callers_bytes_go_into_the_log_as_they_came() -> None:
    pi = Pi()
    one, two = encode([appends(5, (message(1), 7)), AddDevice(7, b"x")]), encode([acknowledges(9, 1, 1)])
    pi.ask(raw=one)
    pi.ask(raw=two, stream=2)
    entry = pi.turn()
    assert entry is not None
    assert body(entry) == one + two


@pytest.mark.slow
def test_an_entry_holds_no_more_operations_than_replicas_read() -> None:
    pi = Pi()
    nothing = encode([OpenSessions(b"")])
    many, more = module.MAX_ENTRY_BYTES // len(nothing), MAX_OPERATIONS // 2
    assert not pi.ask(raw=nothing * many)
    assert not pi.proposals
    assert not pi.ask(raw=nothing * more)
    assert pi.turn() is not None
    assert [len(decode(body(entry))) for entry in pi.proposals] == [1, many, more], "the leader's limits come first"


OF_USER_8: list[Operation] = [
    appends(5, (message(1), 7), (message(2), 8)),
    Fanout(Writer(2, 1, 5), message(1), U64.pack(7) + U64.pack(8)),
    acknowledges(8, 1, 1),
    OpenSessions(USER_DEVICE.pack(7, 0) + USER_DEVICE.pack(8, 0)),
    AddDevice(8, b"phone"),
    DropDevices(USER_DEVICE.pack(8, 1)),
    *decode(encode([Trims(U64.pack(8) + bytes(9))])),
    Deletes(encode_delete(8, 1, 1, 2)[5:]),
]


@pytest.mark.parametrize("operation", OF_USER_8, ids=lambda operation: type(operation).__name__)
def test_a_user_of_another_partition_is_refused_with_the_one_that_serves_him(operation: Operation) -> None:
    pi = Pi()
    (reply,) = pi.ask(operation)
    assert (reply.code, reply.server) == ("WRONG_PARTITION", (0, 2, "there:1"))
    assert pi.turn() is None


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        (Fanout(Writer(1, 1, 5), message(1), U64.pack(7) * 1001), "TOO_MANY_RECEIVERS"),
        (Fanout(Writer(1, 1, 5), 0, U64.pack(7)), "INVALID_ARGUMENT"),
        (Clock(Limits()), "INVALID_ARGUMENT"),
        (appends(5, (0, 7)), "INVALID_ARGUMENT"),
        (appends(5, (1 << 63, 7)), "INVALID_ARGUMENT"),
        (appends(5, (message(1), (1 << 63) + 1)), "INVALID_ARGUMENT"),
        (AddDevice((1 << 63) + 1, b""), "INVALID_ARGUMENT"),
    ],
)  # fmt: skip
def test_what_can_never_be_is_refused_before_the_log(operation: Operation, code: str) -> None:
    pi = Pi()
    assert pi.code(operation) == code
    assert pi.turn() is None


def test_before_the_layout_is_known_every_user_is_taken_but_none_that_cannot_be() -> None:
    pi = Pi(partitions=0)
    assert pi.code(appends(5, (message(1), 8))) == ""
    assert pi.code(appends(5, (message(1), 0))) == "INVALID_ARGUMENT"


def test_broken_bytes_and_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pi = Pi()
    assert pi.code(raw=b"\xff") == "MALFORMED"
    assert pi.code(raw=bytes(MAX_OPERATIONS_BYTES + 1)) == "INVALID_ARGUMENT"
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100)
    assert not pi.ask(*[acknowledges(7, 1, 1)] * 2)
    assert pi.code(acknowledges(7, 1, 1)) == "OVERLOADED"


def test_after_a_refusal_a_writers_stream_is_over_until_a_higher_generation() -> None:
    pi = Pi()
    pi.ask(appends(5, (message(1), 7)))
    pi.turn()
    assert [reply.code for reply in pi.reject("DISK_FULL", "full")] == ["DISK_FULL"]
    assert pi.code(appends(5, (message(2), 7))) == "STALE_WRITER"
    assert pi.code(appends(5, (message(2), 7), worker=2)) == ""
    assert pi.code(appends(5, (message(1), 7), generation=2)) == ""
    assert pi.code(appends(5, (message(3), 7)), stream=2) == ""
    pi.closed(1)
    assert pi.code(appends(5, (message(4), 7))) == ""


def test_the_refusal_of_every_writer_of_a_stream_is_remembered() -> None:
    """One random writer after the other has a mail refused, while its next one is under way already: none may overtake."""
    rng, pi = random.Random(7), Pi()
    refused = rng.sample(range(1, WORKERS), 500)
    for worker in refused:
        pi.ask(appends(5, (message(1), 7), worker=worker))
        pi.turn()
        pi.reject("DISK_FULL", "full")
    assert {pi.code(appends(5, (message(2), 7), worker=worker)) for worker in refused} == {"STALE_WRITER"}
    assert {pi.code(appends(5, (message(1), 7), worker=worker, generation=2)) for worker in refused[:100]} == {""}


def test_without_space_what_is_stored_is_confirmed_to_whoever_sends_it_again() -> None:
    pi = Pi()
    pi.shelf.numbers = {(message(1), 7): 4, (message(2), 7): 5, (message(2), 9): 1}
    pi.ask(appends(5, (message(1), 7), (message(2), 7)), Fanout(Writer(1, 1, 5), message(2), U64.pack(9)), request=1)
    pi.ask(appends(5, (message(1), 7), (message(3), 7), worker=2), request=2)
    pi.ask(appends(5, (message(3), 7), worker=3), request=3)
    pi.ask(appends(5, (message(1), 7), worker=4), acknowledges(7, 1, 1), request=4)
    pi.turn()
    repeated, mixed, new, other = pi.reject("DISK_FULL", "full")
    assert (repeated.code, list(repeated.results)) == ("", [4, 5, 1])
    assert (mixed.code, list(mixed.results)) == ("", [4, -Code.DISK_FULL])
    assert (new.code, list(new.results)) == ("DISK_FULL", [])
    assert (other.code, list(other.results)) == ("DISK_FULL", [])
    assert [pi.code(appends(5, (message(4), 7), worker=worker)) for worker in (1, 2, 3)] == ["", "STALE_WRITER", "STALE_WRITER"]


def test_inboxes_that_may_not_grow_refuse_mail_and_take_what_makes_space() -> None:
    pi = Pi()
    pi.shelf.space, pi.shelf.numbers = False, {(message(1), 7): 4}
    pi.ask(appends(5, (message(3), 7), worker=2), request=1)
    pi.ask(acknowledges(9, 1, 1), request=2)
    pi.ask(appends(5, (message(1), 7)), request=3)
    pi.ask(OpenSessions(USER_DEVICE.pack(9, 0)), request=4)
    pi.ask(appends(5, (message(4), 7), worker=3), acknowledges(9, 1, 1), request=5)
    pi.turn()
    *_, taken, beyond = pi.proposals
    assert body(taken) == encode([acknowledges(9, 1, 1), OpenSessions(USER_DEVICE.pack(9, 0))])
    assert (taken.grows, beyond.grows) == (False, True)
    pi.step(Accepted(taken.token, 5, 100, 100))
    replies = {reply.request: reply for reply in pi.reject("DISK_FULL", "full")}
    assert {number: reply.code for number, reply in replies.items()} == {1: "DISK_FULL", 3: "", 5: "DISK_FULL"}
    assert list(replies[3].results) == [4], "what is there is confirmed all the same"
    assert [(reply.request, list(reply.results)) for reply in pi.apply(100, [[0], [2]])] == [(2, [0]), (4, [2])]
    assert pi.core.under_way == 0
    clock = pi.tick()
    assert clock is None or not clock.grows
    pi.shelf.space = True
    pi.ask(appends(5, (message(3), 7), worker=2, generation=2), request=6)
    entry = pi.turn()
    assert entry is not None
    assert not entry.grows


def test_the_log_learns_before_all_else_whether_there_is_space() -> None:
    pi = Pi()
    said = []
    for request, space in enumerate((True, True, False, False, True), 1):
        pi.shelf.space = space
        pi.ask(AddDevice(7, b"phone"), request=request)
        pi.turn()
        assert decode(body(pi.proposals.pop())) == [AddDevice(7, b"phone")]
        said.append([decode(body(entry)) for entry in pi.proposals])
        pi.proposals.clear()
    full, free = [[Clock(Limits(cap=9, no_space=1))]], [[Clock(Limits(cap=9))]]
    assert said == [free, [], full, [], free]


def test_without_space_nothing_is_refused_for_good_that_may_be_in_the_log() -> None:
    pi = Pi()
    pi.shelf.numbers = {(message(1), 7): 4, (message(8), 7): -1}
    pi.ask(appends(5, (message(2), 7)))
    pi.turn()
    pi.accept(100)  # and not committed yet
    for number, code in ((2, "UNAVAILABLE"), (1, ""), (8, "UNAVAILABLE")):
        pi.ask(appends(5, (message(number), 7), worker=10 + number))
        pi.turn()
        assert [reply.code for reply in pi.reject("DISK_FULL", "full")] == [code]
    pi.apply(100, [[5]])
    pi.shelf.lease = False  # another leader's entries may be on their way
    pi.ask(appends(5, (message(3), 7), worker=5))
    pi.turn()
    assert [reply.code for reply in pi.reject("DISK_FULL", "full")] == ["UNAVAILABLE"]


def test_a_replica_that_does_not_lead_says_who_does() -> None:
    (reply,) = Pi(0).ask(appends(5, (message(1), 7)))
    assert (reply.code, reply.server) == ("NOT_LEADER", (1, 2, "other:1"))


def test_who_is_deposed_says_that_the_outcome_is_unknown() -> None:
    pi = Pi()
    pi.ask(appends(5, (message(1), 7)))
    pi.turn()
    pi.accept(100)
    pi.ask(appends(5, (message(2), 7)), request=2)
    pi.turn()
    pi.ask(appends(5, (message(3), 7)), request=3)
    assert [(reply.request, reply.code) for reply in pi.lead(0)] == [(number, "OUTCOME_UNKNOWN") for number in (1, 2, 3)]
    assert pi.core.under_way == 0
    assert not pi.apply(100, [[1]])
    pi.lead(7)
    assert pi.code(appends(7, (message(1), 7))) == "STALE_WRITER"


def test_reads_need_the_lease_and_each_has_its_own_error() -> None:
    pi = Pi()
    (reply,) = pi.ask(reads=3)
    found = reply.reads
    assert [(read.entries, read.code) for read in found] == [([(4, 44)], ""), ([], "OLD_SESSION"), ([], "STATE_DAMAGED")]
    assert (found[0].floor, found[0].gap, found[0].last, found[0].dropped) == (3, 2, 4, 2)
    pi.shelf.lease = False
    (reply,) = pi.ask(reads=1)
    assert [(read.entries, read.code) for read in reply.reads] == [([], "UNAVAILABLE")]


def test_the_leader_alone_appends_the_clock_with_its_limits() -> None:
    pi = Pi()
    pi.now = 50.0
    clock = pi.tick()
    assert clock is not None
    assert decode(body(clock)) == [Clock(Limits(cap=9))]
    assert pi.core.next_deadline() == 60.0
    pi.now = 59.0
    assert pi.tick() is None
    pi.now = 72.0
    assert pi.tick() is not None
    other = Pi(0)
    assert other.core.next_deadline() == NEVER
    assert other.tick() is None
    other.lead(6)
    assert other.core.next_deadline() < other.now, "a new leader's clock entry, with its limits, is due at once"


def test_nothing_is_taken_before_the_leaders_limits_are_in_the_log() -> None:
    pi = Pi()
    limits = pi.tick()
    pi.reject("OVERLOADED", "the clocks of the other replicas are not known yet")
    assert pi.core.next_deadline() < pi.now + 1.0, "and not after a whole interval"
    pi.ask(appends(5, (message(1), 7)))
    data = pi.turn()
    assert [limits and body(entry) == body(limits) for entry in pi.proposals] == [True, True, False]
    assert pi.proposals[-1] is data
    pi.accept(100)
    pi.ask(appends(5, (message(2), 7)))
    pi.turn()
    assert len(pi.proposals) == 4, "once is enough"


def test_a_sweep_that_did_not_come_to_its_end_goes_on_soon() -> None:
    pi = Pi()
    for counter, done, pause_s in ((100, 0, module.SWEEP_AGAIN_S), (101, 0, module.SWEEP_AGAIN_S), (102, 1, 10.0)):
        assert pi.tick() is not None
        pi.accept(counter)
        pi.apply(counter, [[done]])
        assert pi.core.next_deadline() == pytest.approx(pi.now + pause_s)
        pi.now += pause_s


def test_what_writers_ask_for_does_not_move_the_clock() -> None:
    pi = Pi()
    pi.tick()
    pi.accept(100)
    pi.apply(100, [[1]])
    pi.ask(appends(5, (message(1), 7)))
    pi.turn()
    pi.accept(101)
    pi.apply(101, [[0]])
    assert pi.core.next_deadline() == pi.now + 10.0


def test_from_split_on_moved_users_are_refused_with_the_childs_address_and_a_child_that_is_not_open_serves_nobody() -> None:
    doubling = Doubling(9, 4, 3)
    pi = Pi()
    pi.step(ev.LayoutChanged(4, 2, {0: "there:1", 1: "here:1", 3: "child:1"}))
    assert not pi.ask(appends(5, (message(1), 7)))
    assert pi.turn() is not None
    pi.step(ev.DoublingChanged(Record(), appended=4))  # SPLIT is in the log, and not committed
    (refused,) = pi.ask(appends(5, (message(2), 5), (message(2), 7)))
    assert (refused.code, refused.server) == ("WRONG_PARTITION", (3, 4, "child:1"))
    (refused,) = pi.ask(appends(5, (message(3), 5)))
    assert refused.code == "STALE_WRITER", "what follows in a stream does not overtake what was refused"
    assert not pi.ask(appends(5, (message(2), 5)), stream=2)
    pi.step(ev.DoublingChanged(Record()))  # a new leader did not have it
    assert not pi.ask(appends(5, (message(2), 7)), stream=3)

    for record in (Record(Phase.SPLIT, doubling), Record(Phase.CLEANING, doubling), Record(Phase.NONE, doubling)):
        pi.step(ev.DoublingChanged(record))
        (reply,) = pi.step(ev.Requested(4, 1, b"", Level.REPLICATED, [ev.ReadRequest(7, 0, 1, 1, None, 10)]))
        assert (reply.code, reply.server) == ("WRONG_PARTITION", (3, 4, "child:1"))

    for record in (Record(), Record(Phase.LEARNING, Doubling(9, 2, 1))):
        pi = Pi(partitions=1)
        pi.step(ev.DoublingChanged(record))
        told = pi.ask(appends(5, (message(1), 7)))
        if record.phase is Phase.LEARNING:
            pi.now += module.HELD_S
            told = pi.step(TICK)
        assert [(each.code, each.server) for each in told] == [("WRONG_PARTITION", (0, 1, "there:1"))]
        (answered,) = pi.ask()
        assert not answered.code, "whoever asks for its epoch is told"
    pi.step(ev.DoublingChanged(Record(Phase.OPEN, Doubling(9, 2, 1))))
    assert not pi.ask(appends(5, (message(1), 7)), stream=2)


def learning_child() -> Pi:
    pi = Pi(partitions=1)
    pi.tick()
    pi.step(ev.DoublingChanged(Record(Phase.LEARNING, Doubling(9, 2, 1))))
    return pi


def test_what_a_child_is_asked_before_it_opens_is_taken_in_order_when_it_does() -> None:
    pi = learning_child()
    first, second, third = (appends(5, (message(number), 7)) for number in (1, 2, 3))
    assert not pi.ask(first)
    assert not pi.ask(second, request=2)
    assert not pi.ask(second, request=1, stream=2)
    pi.closed(2)  # nobody would hear the answer
    assert pi.core.under_way == 2
    pi.step(ev.DoublingChanged(Record(Phase.OPEN, Doubling(9, 2, 1))))
    assert pi.core.next_deadline() < pi.now, "at once"
    assert not pi.ask(third, request=3), "nothing overtakes what was held"
    pi.turn()
    found = [decode(body(one)) for one in pi.proposals if one.replicated]
    assert [operation for each in found for operation in each] == [first, second, third]
    assert (pi.core.counters.held, pi.core.counters.held_too_long) == (3, 0)
    assert pi.core.under_way == 3


def test_what_a_child_cannot_keep_is_refused_and_what_follows_of_its_writer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD", 1)
    pi = learning_child()
    assert not pi.ask(appends(5, (message(1), 7)))
    assert pi.code(appends(5, (message(2), 7)), stream=2) == "WRONG_PARTITION"
    pi.step(ev.DoublingChanged(Record(Phase.OPEN, Doubling(9, 2, 1))))
    pi.step(TICK)
    assert pi.code(appends(5, (message(2), 7)), stream=2) == "STALE_WRITER"
    assert pi.core.under_way == 1


def test_who_stops_leading_answers_what_it_held() -> None:
    pi = learning_child()
    assert not pi.ask(appends(5, (message(1), 7)))
    assert [reply.code for reply in pi.lead(0)] == ["NOT_LEADER"]
    assert pi.core.under_way == 0
