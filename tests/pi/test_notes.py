"""Notes of users who stand for something that ends, and what is left of such a user: nothing."""

from __future__ import annotations

import pytest

from pi.checks import check
from pi.core import MAX_NOTES_BYTES
from pi.keys import CHUNK_ENTRIES, uin_of
from pi.state import State
from pixiu.errors import WrongPartition
from pixiu.wire.inbox_operations import (
    CLEAR,
    DELETE,
    MAX_NOTE_BYTES,
    AddDevice,
    Clears,
    Clock,
    Code,
    Deletes,
    Limits,
    Note,
    OpenSessions,
    encode,
    spans,
)
from tests.pi.memory import HOUR, MemoryStore, Replica
from tests.support.pi import acknowledges, appends, message

UIN, PERSON = 7, 8
LAST = 3 * CHUNK_ENTRIES + 5
DEVICE = b"\0\0\0\0\0\1client"
LIMITS = Limits(dedupe_s=5 * HOUR, age_s=20 * HOUR, device_age_s=30 * HOUR)


def world() -> Replica:
    """A session with mail in two lanes, some of it deleted, and a person with the same."""
    replica = Replica()
    replica.apply(Clock(LIMITS), Note(UIN, 0, 5, b"filters"), AddDevice(UIN, DEVICE), AddDevice(PERSON, DEVICE))
    for uin in (UIN, PERSON):
        replica.apply(appends(1, *((message(number, lane), uin) for lane in (0, 1) for number in range(1, LAST + 1))))
        replica.apply(Deletes(DELETE.pack(uin, 1, 4, 6)))
    return replica


def of(replica: Replica, uin: int) -> dict[bytes, bytes]:
    """What is stored of a user."""
    replica.flush()
    return {key: value for key, value in replica.store.scan(b"", b"\xff") if uin_of(key) == uin}


def clear(replica: Replica, uin: int, generation: int) -> int:
    ((result,),) = replica.apply(Clears(CLEAR.pack(uin, generation)))
    return result


def later(replica: Replica, seconds: float) -> None:
    replica.now_s += seconds
    for _ in range(4):
        replica.apply(Clock(LIMITS))


def test_the_newest_writer_alone_sets_notes_whatever_their_names() -> None:
    replica = world()
    results = replica.apply(
        Note(UIN, 1, 6, b"new"), Note(UIN, 2, 5, b"of the old one"), Note(UIN, 0, 6, b"again"), Note(UIN, 0, 6, b"and again"),
        Note(UIN, 8, 9, b"no such name"), Note(UIN, 0, 0, b"no generation"), Note(UIN, 1, 7, b""), Note(UIN, 0, 6, b"late"),
    )  # fmt: skip
    assert results == [
        [0], [-Code.OLD_SESSION], [0], [0], [-Code.INVALID_ARGUMENT], [-Code.INVALID_ARGUMENT], [0], [-Code.OLD_SESSION],
    ]  # fmt: skip
    assert replica.state.notes.of(UIN) == ([(0, 6, b"and again")], 7)
    replica.flush()
    replica.restart()
    assert replica.state.notes.of(UIN) == ([(0, 6, b"and again")], 7)
    assert replica.state.notes.of(PERSON) == ([], 0)


def test_a_clear_leaves_nothing_but_numbers() -> None:
    replica = world()
    assert clear(replica, UIN, 4) == -Code.OLD_SESSION
    assert clear(replica, UIN, 0) == -Code.INVALID_ARGUMENT
    assert clear(replica, UIN, 6) == 0
    assert {key[:1] for key in of(replica, UIN)} == {b"H", b"T", b"U"}
    for lane in (0, 1):
        assert replica.state.peek(UIN, lane, 0, 100, devices=True)[:6] == ([], LAST, 0, LAST, 0, 0), "no gap, nothing dropped"
    assert replica.apply(Note(UIN, 1, 5, b"late")) == [[-Code.OLD_SESSION]]
    assert replica.apply(appends(1, (message(LAST + 1), UIN))) == [[LAST + 1]], "numbers go on"
    (number,) = replica.apply(AddDevice(UIN, DEVICE))[0]
    assert number == 2, "the device is another one: what was for the first one is refused"
    session = replica.apply(OpenSessions(number.to_bytes(2, "little").rjust(10, b"\0")))  # of user 0: nobody's
    assert session == [[-Code.UNKNOWN_DEVICE]]
    assert replica.state.peek(UIN, 1, 0, 100).entries == [(LAST + 1, message(LAST + 1))]


def test_a_user_without_notes_cannot_be_cleared() -> None:
    replica = world()
    before = of(replica, PERSON)
    assert clear(replica, PERSON, 1 << 60) == 0
    assert of(replica, PERSON) == before


def test_what_nobody_comes_back_to_goes_whole_and_people_stay() -> None:
    replica = world()
    later(replica, 15 * HOUR)
    assert replica.apply(Note(UIN, 0, 5, b"still there")) == [[0]]
    later(replica, 15 * HOUR)
    assert replica.state.notes.of(UIN)[0], "its notes were set again meanwhile"
    later(replica, 10 * HOUR)
    assert of(replica, UIN) == {}
    assert {key[:1] for key in of(replica, PERSON)} == {b"H", b"U"}
    assert replica.apply(Note(UIN, 0, 1, b"anew"), appends(1, (message(999), UIN))) == [[0], [1]]


def test_a_device_that_is_seen_keeps_what_it_has() -> None:
    replica = world()
    ((session,),) = replica.apply(OpenSessions(UIN.to_bytes(8, "little") + b"\1\0"))
    for _ in range(10):
        later(replica, 15 * HOUR)
        assert replica.apply(acknowledges(UIN, session, 0, device=1)) == [[0]]
        assert replica.state.notes.of(UIN)[0]
    later(replica, 60 * HOUR)
    assert of(replica, UIN) == {}


def test_a_cleared_session_that_came_back_is_kept_and_its_repeat_of_an_hour_is_not_the_end() -> None:
    replica = world()
    for hours in range(1, 60):
        later(replica, HOUR)
        assert replica.apply(Note(UIN, 0, 5, b"%d" % hours)) == [[0]]
    assert clear(replica, UIN, 9) == 0
    later(replica, 19 * HOUR)
    assert {key[:1] for key in of(replica, UIN)} == {b"H", b"T", b"U"}
    later(replica, 3 * HOUR)
    assert of(replica, UIN) == {}


def test_without_space_no_note_grows_and_everything_can_go() -> None:
    replica = world()
    replica.apply(Clock(LIMITS._replace(no_space=1)))
    assert replica.apply(
        Note(UIN, 0, 5, b"smaller"), Note(UIN, 0, 5, b"the larger one"), Note(UIN, 1, 5, b"new"), Note(PERSON, 0, 5, b"x"),
    ) == [[0], [-Code.DISK_FULL], [-Code.DISK_FULL], [-Code.DISK_FULL]]  # fmt: skip
    assert replica.state.notes.of(PERSON) == ([], 0)
    assert replica.apply(Note(UIN, 0, 5, b"")) == [[0]]
    assert clear(replica, UIN, 5) == 0


def test_large_notes_that_wait_to_be_written_count_by_their_size() -> None:
    replica = Replica()
    before = replica.state.unwritten
    for name in range(8):
        replica.apply(Note(UIN, name, 1, bytes(MAX_NOTE_BYTES)))
    assert replica.state.unwritten - before > 8 * (MAX_NOTE_BYTES >> 10)
    assert MAX_NOTES_BYTES >= 8 * MAX_NOTE_BYTES, "one user's notes fit into an answer"
    replica.state.freeze()
    assert replica.state.unwritten == 0
    replica.state.table.refused()
    assert replica.state.unwritten > 8 * (MAX_NOTE_BYTES >> 10), "a transaction that failed is still to be written"


def test_a_leader_refuses_notes_of_users_whom_it_does_not_serve() -> None:
    for operation in (Note(UIN, 0, 1, b"x"), Clears(CLEAR.pack(UIN, 1))):
        payload = encode([operation])
        assert check(payload, spans(payload), 1, 2) == 0
        with pytest.raises(WrongPartition):
            check(payload, spans(payload), 0, 2)


def test_two_replicas_have_the_same_bytes_when_one_remembers_more() -> None:
    stores = MemoryStore(), MemoryStore()
    states = State(stores[0], max_heads=1, max_users=1), State(stores[1])
    replica = Replica()
    for state, store in zip(states, stores, strict=True):
        replica.store, replica.state = store, state
        replica.now_s, replica.epoch = 400_000_000, 1
        for step in range(40):
            replica.now_s += HOUR
            replica.apply(Note(UIN + step % 3, step % 4, step + 1, bytes(step % 5)), Clock(LIMITS))
            replica.apply(appends(1, (message(step + 1), UIN + step % 3)))
            if step % 7 == 0:
                clear(replica, UIN + step % 3, step + 1)
        replica.flush()
    assert stores[0].values == stores[1].values
