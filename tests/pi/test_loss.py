"""Values that no replica has whole are given up by an operator's word: the rest is kept, and every replica does the same."""

from __future__ import annotations

import pytest

from pi.checks import check
from pi.keys import cursor_key, deleted_key, entry_key, head_key, index_key, time_key, unseal, user_key, writer_key
from pi.loss import JUMP
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


def world() -> Replica:
    """Ten entries, 4 acknowledged, 7 deleted; and another user."""
    replica = Replica()
    replica.apply(appends(1, *((message(number), UIN) for number in range(1, 11))), appends(1, (message(1), OTHER)))
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
    return dict(replica.state.read(UIN, 0, 1, 1, None, 100).entries)


ENTRIES = {seq: message(seq) for seq in (5, 6, 7, 8, 9, 10)} | {7: 0}


@pytest.mark.parametrize(
    ("key", "left"),
    [
        (entry_key(UIN, 1, 8), ENTRIES | {8: 0}),
        (entry_key(UIN, 1, 5), ENTRIES | {5: 0}),
        (entry_key(UIN, 1, 2), ENTRIES),  # acknowledged
        (index_key(UIN, 1, message(8)), ENTRIES),
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
    assert replica.apply(appends(1, (message(10), UIN), (message(11), UIN))) == [[10, 11]], "a repeat has its number"
    assert replica.state.peek(OTHER, 1, 0, 100).entries == [(1, message(1))]
    replica.flush()
    assert listed(again(replica)) == found | {11: message(11)}


def test_every_replica_does_the_same_whether_its_value_is_broken_or_not() -> None:
    keys = (entry_key(UIN, 1, 8), index_key(UIN, 1, message(9)), HEAD, DELETED, CURSOR, user_key(OTHER), writer_key(1))
    whole, rotten = again(world()), again(world(), *keys[:-1])
    listed(whole)  # it remembers heads and users
    for replica in (whole, rotten):
        assert replica.apply(GiveUp(keys)) == [[1] * len(keys)]
        assert replica.apply(appends(1, (message(12), UIN))) == [[11]]
        replica.flush()
    assert isinstance(whole.store, MemoryStore)
    assert isinstance(rotten.store, MemoryStore)
    assert whole.store.values == rotten.store.values


def test_devices_that_are_lost_begin_again_with_higher_sessions_and_get_what_is_stored() -> None:
    replica = again(world(), user_key(UIN))
    assert replica.apply(GiveUp((user_key(UIN),))) == [[1]]
    assert replica.apply(acknowledges(UIN, 1, 6)) == [[-Code.UNKNOWN_DEVICE]]
    ((session,),) = replica.apply(OpenSessions(USER_DEVICE.pack(UIN, 0)))
    assert session > 1
    assert min(dict(replica.state.read(UIN, 0, 1, session, None, 100).entries)) == 5


def test_no_number_is_given_twice_in_an_inbox_whose_head_is_lost_and_that_holds_nothing() -> None:
    replica = world()
    replica.apply(acknowledges(UIN, 1, 10))
    replica.now_s += 25 * HOUR
    replica.apply(Clock(Limits()), Trims(TRIM.pack(UIN, 1, 10)))
    replica.flush()
    assert not list(replica.store.scan(b"E" + UIN.to_bytes(8, "big"), b"E" + OTHER.to_bytes(8, "big")))
    replica = again(replica, HEAD)
    replica.now_s = START_S + 25 * HOUR
    replica.apply(GiveUp((HEAD,)))
    assert replica.apply(appends(1, (message(11), UIN))) == [[10 + JUMP + 1]]
    assert broken(replica) == []


def test_what_was_given_up_expires_like_everything_else() -> None:
    replica = again(world(), entry_key(UIN, 1, 8))
    replica.apply(GiveUp((entry_key(UIN, 1, 8),)))
    replica.apply(acknowledges(UIN, 1, 10))
    replica.now_s += 26 * HOUR
    for _ in range(3):
        replica.apply(Clock(Limits()), DropDevices(USER_DEVICE.pack(OTHER, 0)))
    replica.flush()
    assert not [key for key, _ in replica.store.scan(b"E" + UIN.to_bytes(8, "big"), b"E" + OTHER.to_bytes(8, "big"))]
    assert broken(replica) == []


def test_only_a_leader_gives_up_and_keys_that_are_none_change_nothing() -> None:
    replica = world()
    assert replica.apply(GiveUp((b"X", b"E", b"M"))) == [[0, 0, 0]]
    payload = encode([GiveUp((HEAD,))])
    assert decode(payload) == [GiveUp((HEAD,))]
    with pytest.raises(InvalidArgument):
        check(payload, spans(payload), 0, 1)
    for wrong in (b"\x0b\x02\0\0\0\x05H", b"\x0b\x02\0\0\0\x00\x00"):
        with pytest.raises(MalformedData):
            decode(wrong)
