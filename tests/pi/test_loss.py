"""Values that no replica has whole are given up by an operator's word: the rest is kept, and every replica does the same."""

from __future__ import annotations

from random import Random

import pytest

from pi.checks import check
from pi.inboxes.loss import JUMP
from pi.keys import (
    CHUNK_ENTRIES,
    CHUNK_KEY,
    chunk_key,
    cursor_key,
    deleted_key,
    head_key,
    note_key,
    time_key,
    uin_of,
    unseal,
    user_key,
    writer_key,
)
from pixiu.errors import InvalidArgument, MalformedData, StateDamaged
from pixiu.wire.inbox_operations import (
    DELETE,
    TRIM,
    USER_DEVICE,
    Clock,
    Code,
    Deletes,
    DropDevices,
    GiveUp,
    Limits,
    Note,
    OpenSessions,
    Trims,
    decode,
    encode,
    spans,
)
from tests.pi.memory import HOUR, START_S, MemoryStore, Replica
from tests.support.pi import acknowledges, appends, message

UIN = 7
OTHER = 8
HEAD, DELETED, CURSOR = head_key(UIN, 1), deleted_key(UIN, 1), cursor_key(UIN, 0, 1)
LAST = 2 * CHUNK_ENTRIES + 10
CHUNKS = [chunk_key(UIN, 1, seq) for seq in range(1, LAST, CHUNK_ENTRIES)]


def world() -> Replica:
    """Two whole chunks and a third, 4 acknowledged, 7 deleted; and another user."""
    replica = Replica()
    replica.apply(appends(1, *((message(number), UIN) for number in range(1, LAST + 1))), appends(1, (message(1), OTHER)))
    replica.apply(OpenSessions(USER_DEVICE.pack(UIN, 0) + USER_DEVICE.pack(OTHER, 0)), acknowledges(UIN, 1, 4))
    replica.apply(Deletes(DELETE.pack(UIN, 1, 7, 7)))
    replica.flush()
    return replica


def again(replica: Replica, *keys: bytes) -> Replica:
    """The same stored state after a start, with other bytes under these keys."""
    store = MemoryStore()
    assert isinstance(replica.store, MemoryStore)
    store.values = dict(replica.store.values)
    for key in keys:
        value = store.values[key]
        store.values[key] = bytes((value[0] ^ 0x10,)) + value[1:]
    return Replica(store)


def broken(replica: Replica) -> list[bytes]:
    """Keys of stored values that are not whole."""
    replica.flush()
    found = []
    for key, value in replica.store.scan(b"", b"\xff"):
        try:
            unseal(key, value)
        except StateDamaged:
            found.append(key)
    return found


def listed(replica: Replica) -> dict[int, int]:
    """What the device is given: InboxSeq → MsgID."""
    return dict(replica.state.read(UIN, 0, 1, 1, None, 2 * LAST).entries)


def lost(first: int, last: int) -> dict[int, int]:
    return dict.fromkeys(range(first, last + 1), 0)


ENTRIES = {seq: message(seq) for seq in range(5, LAST + 1)} | lost(7, 7)


@pytest.mark.parametrize(
    ("key", "left"),
    [
        (CHUNKS[0], ENTRIES | lost(5, CHUNK_ENTRIES)),
        (CHUNKS[1], ENTRIES | lost(CHUNK_ENTRIES + 1, 2 * CHUNK_ENTRIES)),
        (CHUNKS[2], ENTRIES | lost(2 * CHUNK_ENTRIES + 1, LAST)),
        (HEAD, ENTRIES),
        (DELETED, ENTRIES | {7: message(7)}),
        (CURSOR, ENTRIES),  # what was acknowledged is no longer read
        (time_key(START_S // HOUR, UIN, 1), ENTRIES),
    ],
)
def test_what_is_lost_is_one_value_and_the_rest_goes_on(key: bytes, left: dict[int, int]) -> None:
    replica = again(world(), key)
    assert broken(replica) == [key]
    assert replica.apply(GiveUp((key,))) == [[1]]
    assert broken(replica) == []
    found = listed(replica)
    assert {seq: msg_id for seq, msg_id in found.items() if msg_id} == {seq: msg_id for seq, msg_id in left.items() if msg_id}
    repeats = [seq for seq in (1, 8, CHUNK_ENTRIES, CHUNK_ENTRIES + 1, LAST) if left.get(seq, key != CHUNKS[0])]
    operation = appends(1, *((message(number), UIN) for number in (*repeats, LAST + 1)))
    assert replica.apply(operation) == [[*repeats, LAST + 1]], "a repeat has its number"
    assert replica.state.peek(OTHER, 1, 0, 100).entries == [(1, message(1))]
    replica.flush()
    assert listed(again(replica)) == found | {LAST + 1: message(LAST + 1)}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_replica_does_the_same_whether_its_value_is_broken_or_not(chunk: bytes) -> None:
    keys = (chunk, HEAD, DELETED, CURSOR, user_key(OTHER), writer_key(1))
    replica = world()
    whole, rotten = again(replica), again(replica, *keys[:-1])
    listed(whole)  # it remembers heads and users, and then the newest chunk
    chance = Random(1)
    begun = (LAST if chunk != CHUNKS[2] else 3 * CHUNK_ENTRIES) + 1
    for each in (whole, rotten):
        assert each.apply(GiveUp(keys)) == [[1] * len(keys)]
        assert each.apply(appends(1, (message(LAST + 1), UIN))) == [[begun]], "no number is given twice"
        each.flush()
    for _ in range(20):
        numbers = [chance.randrange(1, LAST + 40) for _ in range(5)]
        operation = appends(1, *((message(number), UIN) for number in numbers))
        assert whole.apply(operation) == rotten.apply(operation)
    for each in (whole, rotten):
        each.flush()
    assert isinstance(whole.store, MemoryStore)
    assert isinstance(rotten.store, MemoryStore)
    assert whole.store.values == rotten.store.values
    assert broken(rotten) == []


def test_a_head_is_made_of_chunks_that_are_not_written_yet() -> None:
    replica, written = world(), world()
    for each in (replica, written):
        each.apply(appends(1, *((message(number), UIN) for number in range(LAST + 1, LAST + 20))))
    written.flush()
    for each in (replica, written):
        each.apply(GiveUp((HEAD,)))
        assert each.apply(appends(1, (message(LAST + 19), UIN), (message(LAST + 20), UIN))) == [[LAST + 19, LAST + 20]]


def test_entries_that_came_behind_a_broken_chunk_are_given_up_with_it() -> None:
    replica = again(world(), CHUNKS[2])
    more = range(LAST + 1, 3 * CHUNK_ENTRIES + 5)
    assert replica.apply(appends(1, *((message(number), UIN) for number in more))) == [list(more)]
    assert broken(replica) == [CHUNKS[2]]
    replica.apply(GiveUp((CHUNKS[2],)))
    assert broken(replica) == []
    found = {seq: msg_id for seq, msg_id in listed(replica).items() if seq > 2 * CHUNK_ENTRIES and msg_id}
    assert found == {seq: message(seq) for seq in range(3 * CHUNK_ENTRIES + 1, more[-1] + 1)}


def test_devices_that_are_lost_begin_again_with_higher_sessions_and_get_what_is_stored() -> None:
    replica = again(world(), user_key(UIN))
    assert replica.apply(GiveUp((user_key(UIN),))) == [[1]]
    assert replica.apply(acknowledges(UIN, 1, 6)) == [[-Code.UNKNOWN_DEVICE]]
    ((session,),) = replica.apply(OpenSessions(USER_DEVICE.pack(UIN, 0)))
    assert session > 1
    assert min(dict(replica.state.read(UIN, 0, 1, session, None, 100).entries)) == 5


def test_no_number_is_given_twice_in_an_inbox_whose_head_is_lost_and_that_holds_nothing() -> None:
    replica = world()
    replica.apply(acknowledges(UIN, 1, LAST))
    replica.now_s += 25 * HOUR
    for _ in range(3):
        replica.apply(Clock(Limits()), Trims(TRIM.pack(UIN, 1, LAST)))
    replica.flush()
    assert not list(replica.store.scan(chunk_key(UIN, 1, 1), chunk_key(OTHER, 0, 1)))
    replica = again(replica, HEAD)
    replica.now_s = START_S + 25 * HOUR
    replica.apply(GiveUp((HEAD,)))
    assert replica.apply(appends(1, (message(LAST + 1), UIN))) == [[LAST + JUMP + 1]]
    assert broken(replica) == []


def test_what_was_given_up_expires_like_everything_else() -> None:
    replica = again(world(), *CHUNKS)
    replica.apply(GiveUp(tuple(CHUNKS)))
    replica.apply(acknowledges(UIN, 1, LAST))
    replica.now_s += 26 * HOUR
    for _ in range(3):
        replica.apply(Clock(Limits()), DropDevices(USER_DEVICE.pack(OTHER, 0)))
    replica.flush()
    assert not list(replica.store.scan(chunk_key(UIN, 1, 1), chunk_key(OTHER, 0, 1)))
    assert broken(replica) == []


def test_only_a_leader_gives_up_and_keys_that_are_none_change_nothing() -> None:
    replica = world()
    stray = CHUNK_KEY.pack(b"K", UIN, 1, 5)
    before = dict(replica.store.scan(b"A", b"M"))
    assert replica.apply(GiveUp((b"X", b"E", b"M", stray))) == [[0, 0, 0, 1]], "the last one may be a key that the disk changed"
    replica.flush()
    assert dict(replica.store.scan(b"A", b"M")) == before
    payload = encode([GiveUp((HEAD,))])
    assert decode(payload) == [GiveUp((HEAD,))]
    with pytest.raises(InvalidArgument):
        check(payload, spans(payload), 0, 1)
    for wrong in (b"\x0b\x02\0\0\0\x05H", b"\x0b\x02\0\0\0\x00\x00"):
        with pytest.raises(MalformedData):
            decode(wrong)


def test_a_lost_note_is_gone_and_others_stay() -> None:
    replica = world()
    replica.apply(Note(UIN, 0, 5, b"session"), Note(UIN, 1, 5, b"inbound"), Note(OTHER, 0, 3, b"other"))
    replica.flush()
    broken_one = again(replica, note_key(UIN, 1))
    with pytest.raises(StateDamaged, match="note 1 of user 0000000000000007"):
        broken_one.state.notes.of(UIN)
    assert broken_one.apply(GiveUp((note_key(UIN, 1),))) == [[1]]
    assert broken(broken_one) == []
    assert broken_one.state.notes.of(UIN) == ([(0, 5, b"session")], 5)
    assert broken_one.apply(Note(UIN, 1, 4, b"late")) == [[-Code.OLD_SESSION]]
    assert broken_one.state.notes.of(OTHER) == ([(0, 3, b"other")], 3)


@pytest.mark.parametrize("also", [(), (note_key(UIN, 0),)])
def test_notes_outlive_the_loss_of_their_users_devices_and_go_by_age_all_the_same(also: tuple[bytes, ...]) -> None:
    replica = world()
    replica.apply(Note(UIN, 0, 5, b"session"), Note(UIN, 2, 6, b"released"))
    replica.flush()
    keys = (user_key(UIN), *also)
    rotten = again(replica, *keys)
    for each in (again(replica), rotten):
        each.now_s += HOUR
        assert each.apply(GiveUp(keys)) == [[1] * len(keys)]
        kept = [(2, 6, b"released")] if also else [(0, 5, b"session"), (2, 6, b"released")]
        assert each.state.notes.of(UIN) == (kept, 6)
        each.now_s += Limits().age_s + 2 * HOUR
        for _ in range(3):
            each.apply(Clock(Limits()))
        each.flush()
        assert [key for key, _ in each.store.scan(b"", b"\xff") if uin_of(key) == UIN] == []
