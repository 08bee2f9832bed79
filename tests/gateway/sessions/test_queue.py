"""What waits for Pi, with answers, losses, refusals and doublings: every call ends once, and those of a session in order."""

from __future__ import annotations

import random

import pytest

from gateway.sessions.queue import (
    BYTES_A_REQUEST,
    CALLS_A_REQUEST,
    MAX_BYTES,
    MAX_REQUESTS,
    RETRY_S,
    Call,
    Done,
    Kind,
    Request,
    SessionQueue,
)
from pi.core import MAX_NOTES_BYTES
from pixiu.errors import DiskFull, InvalidArgument, OldSession, Overloaded, StateDamaged, Unavailable
from pixiu.wire.inbox_operations import Code, Note, decode
from pixiu.wire.v1 import pi_pb2
from tests.pi.memory import Replica
from tests.support.for_each import for_each

UIN = 7
TIMEOUT_S = 10.0


def write(value: bytes = b"v", uin: int = UIN, name: int = 0, generation: int = 1, waiter: int = 0, now: float = 0.0) -> Call[int]:
    return Call(Kind.WRITE, uin, now + TIMEOUT_S, name, generation, value, [waiter])


def read(uin: int = UIN, waiter: int = 0) -> Call[int]:
    return Call(Kind.READ, uin, TIMEOUT_S, waiters=[waiter])


def answer(replica: Replica, request: Request[int]) -> pi_pb2.PiReply:
    """Of a Pi that leads, with its production state."""
    reply = pi_pb2.PiReply()
    if request.operations:
        reply.results.extend(number for found in replica.apply(*decode(request.operations)) for number in found)
    room = MAX_NOTES_BYTES
    for each in request.reads:
        if each.notes and room <= 0:
            reply.reads.add(code=Overloaded.code)
            continue
        found = replica.state.peek(each.uin, each.lane, each.start, each.num)
        notes, generation = replica.state.notes.of(each.uin) if each.notes else ([], 0)
        room -= sum(len(note.value) for note in notes)
        shown = reply.reads.add(last=found.last, unread=found.unread, dropped=found.dropped, notes_generation=generation)
        for note in notes:
            shown.notes.add(name=note.name, generation=note.generation, value=note.value)
    return reply


class Queue:
    """A queue and what ended."""

    def __init__(self) -> None:
        self.queue = SessionQueue[int]()
        self.over: list[Done[int]] = []
        self.now = 0.0

    def add(self, *calls: Call[int]) -> None:
        for call in calls:
            self.queue.add(call)

    def answer(self, request: Request[int], reply: pi_pb2.PiReply | None, partitions: int = 0) -> None:
        self.over += self.queue.answered(request, reply, partitions, self.now)

    def requests(self) -> list[Request[int]]:
        return self.queue.requests(self.now)

    def errors(self) -> list[type[Exception] | None]:
        found: list[type[Exception] | None] = [None if done.error is None else type(done.error) for done in self.over]
        self.over.clear()
        return found


def test_calls_of_many_sessions_go_together_and_of_one_session_one_after_another() -> None:
    queue = Queue()
    queue.add(write(uin=1, waiter=1), write(uin=2, waiter=2), write(uin=1, name=1, waiter=3), read(uin=3, waiter=4), read(uin=1))
    changes, reads = queue.requests()
    assert [operation.uin for operation in decode(changes.operations) if isinstance(operation, Note)] == [1, 2]
    assert [each.uin for each in reads.reads] == [3] * 4
    queue.answer(changes, pi_pb2.PiReply(results=[0, 0]))
    assert [done.call.waiters for done in queue.over] == [[1], [2]]
    (following,) = queue.requests()
    assert decode(following.operations) == [Note(1, 1, 1, b"v")]


def test_writes_of_a_note_that_wait_become_one_and_all_who_wait_are_told() -> None:
    queue = Queue()
    queue.add(write(b"a", waiter=1), write(b"b", waiter=2), write(b"c", waiter=3), write(b"other", name=1), write(b"d", waiter=4))
    for values, waiters in (([b"a"], [1]), ([b"c"], [2, 3]), ([b"other"], [0]), ([b"d"], [4])):
        (request,) = queue.requests()
        assert [operation.value for operation in decode(request.operations) if isinstance(operation, Note)] == values
        queue.answer(request, pi_pb2.PiReply(results=[0]))
        assert queue.over.pop().call.waiters == waiters
    assert (queue.queue.calls, queue.queue.bytes, queue.queue.merged) == (0, 0, 1)


def test_a_newer_generation_does_not_take_an_older_ones_place() -> None:
    queue = Queue()
    queue.add(write(b"a"), write(b"b", generation=2), write(b"c", generation=3))
    for value in (b"a", b"b", b"c"):
        (request,) = queue.requests()
        assert [operation.value for operation in decode(request.operations) if isinstance(operation, Note)] == [value]
        queue.answer(request, pi_pb2.PiReply(results=[0]))


@pytest.mark.parametrize(
    ("result", "error"), [(Code.OLD_SESSION, OldSession), (Code.DISK_FULL, DiskFull), (Code.INVALID_ARGUMENT, InvalidArgument)]
)
def test_what_pi_refuses_is_refused_at_once(result: Code, error: type[Exception]) -> None:
    queue = Queue()
    queue.add(write())
    queue.answer(queue.requests()[0], pi_pb2.PiReply(results=[-result]))
    assert queue.errors() == [error]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("NOT_LEADER", Unavailable), ("OUTCOME_UNKNOWN", Unavailable), ("OVERLOADED", Overloaded), ("DISK_FULL", DiskFull),
        ("STATE_DAMAGED", StateDamaged), ("", Unavailable),
    ],
)  # fmt: skip
def test_a_call_is_sent_again_until_its_time_is_over_and_then_says_why(code: str, error: type[Exception]) -> None:
    queue = Queue()
    queue.add(write())
    times = 0
    while not queue.over:
        for request in queue.requests():
            times += 1
            queue.answer(request, pi_pb2.PiReply(code=code) if code else None)
        due = queue.queue.next_deadline()
        queue.now = due if due is not None else queue.now
    assert queue.errors() == [error]
    assert TIMEOUT_S <= queue.now < TIMEOUT_S + 2 * RETRY_S
    assert times > 50
    assert queue.requests() == []


def test_requests_are_bounded_and_what_is_too_much_is_refused() -> None:
    queue = Queue()
    queue.add(*(write(bytes(1000), uin=uin) for uin in range(1, 5_000)))
    requests = queue.requests()
    assert len(requests) == MAX_REQUESTS
    assert all(len(request.calls) <= CALLS_A_REQUEST and len(request.operations) <= BYTES_A_REQUEST + 64 for request in requests)
    queue.answer(requests[0], pi_pb2.PiReply(results=[0] * len(requests[0].calls)))
    assert len(queue.requests()) == 1
    with pytest.raises(Overloaded):
        queue.add(*(write(bytes(60_000), uin=uin) for uin in range(6_000, 8_000)))
    assert queue.queue.bytes <= MAX_BYTES


def test_large_sessions_are_read_in_as_many_requests_as_it_takes() -> None:
    queue, replica = Queue(), Replica()
    for uin in range(1, 41):
        replica.apply(*(Note(uin, name, 5, bytes(60_000)) for name in range(3)))
    queue.add(*(read(uin, waiter=uin) for uin in range(1, 41)))
    rounds = 0
    while len(queue.over) < 40:
        rounds += 1
        for request in queue.requests():
            queue.answer(request, answer(replica, request))
    assert rounds < 10
    assert all(done.state is not None and done.state.exists and len(done.state.notes) == 3 for done in queue.over)
    assert queue.now == 0.0, "without a pause"


def test_a_split_partition_is_asked_at_its_child_and_a_child_that_is_not_open_at_its_parent() -> None:
    queue = Queue()
    queue.queue.split.set_count(2)
    queue.add(write(uin=7))
    (request,) = queue.requests()
    assert request.partition == 1
    queue.answer(request, pi_pb2.PiReply(code="WRONG_PARTITION"), partitions=4)
    (request,) = queue.requests()
    assert request.partition == 3
    queue.answer(request, pi_pb2.PiReply(code="WRONG_PARTITION"), partitions=2)
    assert queue.requests() == []
    queue.now += RETRY_S
    (request,) = queue.requests()
    assert request.partition == 1
    queue.answer(request, pi_pb2.PiReply(results=[0]))
    assert queue.errors() == [None]


@for_each("seed", range(20))
def test_every_call_ends_once_and_the_last_value_of_each_note_is_the_one_stored(seed: int) -> None:
    """A Pi that loses requests, answers late or not at all, and applies what it did not answer."""
    chance, queue, replica = random.Random(seed), Queue(), Replica()
    waiters: set[int] = set()
    newest: dict[tuple[int, int], bytes] = {}
    open_: list[Request[int]] = []
    for waiter in range(1, 400):
        uin, name = chance.randrange(1, 6), chance.randrange(2)
        if chance.random() < 0.2:
            queue.add(Call(Kind.READ, uin, 1e9, waiters=[waiter]))
        else:
            value = b"%d" % waiter
            newest[uin, name] = value
            queue.add(Call(Kind.WRITE, uin, 1e9, name, 1, value, [waiter]))
        waiters.add(waiter)
        queue.now += chance.choice((0, 0.01, 0.2))
        open_ += queue.requests()
        chance.shuffle(open_)
        while open_ and chance.random() < 0.6:
            _answer_somehow(chance, queue, replica, open_.pop())
    while waiters - {waiter for done in queue.over for waiter in done.call.waiters}:
        queue.now += 0.2
        open_ += queue.requests()
        while open_:
            _answer_somehow(chance, queue, replica, open_.pop())
    ended = [waiter for done in queue.over for waiter in done.call.waiters]
    assert sorted(ended) == sorted(waiters)
    assert all(done.error is None for done in queue.over)
    for (uin, name), value in newest.items():
        assert {note.name: note.value for note in replica.state.notes.of(uin)[0]}[name] == value
    assert (queue.queue.calls, queue.queue.bytes, queue.queue.all()) == (0, 0, [])


def _answer_somehow(chance: random.Random, queue: Queue, replica: Replica, request: Request[int]) -> None:
    fate = chance.random()
    if fate < 0.2:
        queue.answer(request, None)
        return
    reply = answer(replica, request)
    queue.answer(request, None if fate < 0.4 else reply)
