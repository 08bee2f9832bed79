"""What goes out of inboxes and when, and what is found broken; the rest is in the comparison with the model."""

from __future__ import annotations

import pytest

from cluster.replication.model import CLOCK, Entry, EntryKind
from pi.inboxes import expiry
from pi.inboxes.chunk import Chunk
from pi.keys import CHUNK_ENTRIES, CRC_BYTES, chunk_key
from pi.state import ReadRefusal
from pixiu.errors import MalformedData, StateDamaged
from pixiu.wire.cursor import Cursor
from pixiu.wire.inbox_operations import (
    ENTRY_KIND,
    MAX_RECEIVERS,
    TRIM,
    U64,
    USER_DEVICE,
    AddDevice,
    Clock,
    Code,
    DropDevices,
    Fanout,
    Limits,
    OpenSessions,
    Trims,
    Writer,
    client_id,
    decode,
    encode,
    encode_add_device,
)
from tests.pi.memory import HOUR, START_S, MemoryStore, Replica, at_us, entries_in
from tests.support.for_each import for_each
from tests.support.pi import acknowledges, appends, message

UIN = 7
DAY = 24 * HOUR


def filled(count: int) -> Replica:
    """With so many entries and a session of device 0."""
    replica = Replica()
    replica.apply(appends(1, *((message(number), UIN) for number in range(1, count + 1))))
    replica.apply(OpenSessions(USER_DEVICE.pack(UIN, 0)))
    return replica


def stored(replica: Replica, kind: bytes) -> int:
    replica.flush()
    return sum(key.startswith(kind) for key, _ in replica.store.scan(b"", b"\xff"))


def entries_stored(replica: Replica) -> int:
    replica.flush()
    return len(entries_in(dict(replica.store.scan(b"", b"\xff"))))


def test_a_message_sent_again_within_the_window_has_its_number_though_it_was_acknowledged_and_trimmed() -> None:
    replica = filled(5)
    assert replica.apply(acknowledges(UIN, 1, 3), Trims(TRIM.pack(UIN, 1, 5))) == [[0], [5]]
    replica.now_s += DAY - 1
    replica.apply(Clock(Limits()))
    assert replica.apply(appends(1, *((message(number), UIN) for number in (1, 5, 6)))) == [[1, 5, 6]]
    assert entries_stored(replica) == 6


def test_who_looks_without_a_device_sees_what_can_be_read_and_changes_nothing() -> None:
    replica = filled(5)
    replica.apply(acknowledges(UIN, 1, 2), Trims(TRIM.pack(UIN, 1, 1)))
    stored(replica, b"")
    found = replica.state.peek(UIN, 1, 0, 10)
    assert found.entries == [(number, message(number)) for number in range(found.floor + 1, 6)]
    assert replica.state.peek(UIN, 1, 3, 1).entries == [(4, message(4))]
    assert replica.state.peek(8, 1, 0, 10).entries == []
    with pytest.raises(ReadRefusal):
        replica.state.peek(UIN, 4, 0, 10)
    assert replica.state.unwritten == 0
    assert replica.state.read(UIN, 0, 1, 1, None, 10).entries[0] == (3, message(3))


def test_a_read_says_how_far_the_device_has_acknowledged() -> None:
    replica = filled(5)
    replica.apply(acknowledges(UIN, 1, 2, 0b10))
    assert [replica.state.read(UIN, 0, 1, 1, start, 9).up_to for start in (None, 0, 4)] == [2, 2, 2]
    assert replica.state.read(UIN, 0, 1, 1, None, 9).entries == [(3, message(3)), (5, message(5))]


def test_behind_the_window_what_was_acknowledged_goes_from_the_store() -> None:
    replica = filled(5)
    replica.apply(acknowledges(UIN, 1, 3))
    replica.now_s += DAY + 2 * HOUR
    assert replica.apply(Clock(Limits())) == [[1]]
    assert entries_stored(replica) == 2
    read = replica.state.read(UIN, 0, 1, 1, None, 10)
    assert ([seq for seq, _ in read.entries], read.floor, read.gap, read.dropped) == ([4, 5], 3, 0, 0)
    assert replica.apply(appends(1, (message(6), UIN))) == [[6]]


def test_over_the_age_entries_go_with_a_gap_that_says_how_many() -> None:
    replica = filled(5)
    replica.apply(acknowledges(UIN, 1, 2))
    replica.now_s += 29 * DAY
    replica.apply(appends(1, (message(6), UIN)))
    replica.now_s += DAY + 2 * HOUR
    replica.apply(OpenSessions(USER_DEVICE.pack(UIN, 0)))
    assert replica.apply(Clock(Limits())) == [[1]]
    read = replica.state.read(UIN, 0, 1, 2, None, 10)
    assert ([seq for seq, _ in read.entries], read.floor, read.gap, read.dropped) == ([6], 5, 5, 3)
    assert replica.state.inboxes.dropped == 3
    assert entries_stored(replica) == stored(replica, b"T") == 1


def test_history_keeps_what_was_acknowledged_readable() -> None:
    replica = filled(3)
    limits = Limits(history_s=2 * DAY)
    replica.apply(Clock(limits))
    replica.apply(acknowledges(UIN, 1, 3))
    assert len(replica.state.read(UIN, 0, 1, 1, 0, 10).entries) == 3
    assert not replica.state.read(UIN, 0, 1, 1, None, 10).entries
    replica.now_s += 2 * DAY + 2 * HOUR
    replica.apply(Clock(limits))
    assert not replica.state.read(UIN, 0, 1, 1, 0, 10).entries
    assert entries_stored(replica) == 0


def test_a_full_inbox_drops_its_oldest_or_refuses() -> None:
    replica = Replica()
    replica.apply(Clock(Limits(cap=3)))
    assert replica.apply(appends(1, *((message(number), UIN) for number in range(1, 6)))) == [[1, 2, 3, 4, 5]]
    head = replica.state.inboxes.head(UIN, 1)
    assert (head.floor, head.gap, head.dropped) == (2, 2, 2)
    replica.apply(Clock(Limits(cap=3, refuse_full=1)))
    refused = replica.apply(appends(1, (message(6), UIN), (message(5), UIN), (message(7), UIN + 1)))
    assert refused == [[-Code.INBOX_FULL, 5, 1]]
    replica.apply(OpenSessions(USER_DEVICE.pack(UIN, 0)), acknowledges(UIN, 1, 3))
    assert replica.apply(appends(1, (message(6), UIN))) == [[6]]


def test_sweeps_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "SWEEP_ENTRIES", 10)
    monkeypatch.setattr(expiry, "SWEEP_INBOXES", 3)
    replica = Replica()
    for uin in range(1, 21):
        replica.apply(appends(1, *((message(number), uin) for number in range(1, 8))))
    replica.now_s += 31 * DAY
    rounds = 0
    while replica.apply(Clock(Limits())) == [[0]]:
        replica.flush()
        replica.restart()
        rounds += 1
        assert rounds < 1000
    assert rounds > 10
    assert entries_stored(replica) == stored(replica, b"K") == stored(replica, b"T") == 0
    assert replica.state.inboxes.dropped == 140
    assert replica.state.inboxes.head(20, 1).last == 7


def test_a_ninth_device_takes_the_place_of_one_that_was_not_seen_for_long() -> None:
    replica = Replica()
    assert [replica.apply(AddDevice(UIN, b"%d" % number))[0][0] for number in range(9)] == [*range(1, 9), -Code.TOO_MANY_DEVICES]
    replica.now_s += 31 * DAY
    assert replica.apply(AddDevice(UIN, b"1")) == [[2]]
    assert replica.apply(AddDevice(UIN, b"new")) == [[9]]
    assert sorted(replica.state.inboxes.user(UIN).devices) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_without_space_new_devices_are_refused_and_known_ones_go_on() -> None:
    replica = Replica()
    assert replica.apply(AddDevice(UIN, b"phone"), appends(1, (message(1), UIN))) == [[1], [1]]
    replica.apply(Clock(Limits(no_space=1)))
    assert replica.apply(
        AddDevice(UIN, b"phone"), AddDevice(UIN, b"tablet"), AddDevice(UIN + 1, b"phone"),
        OpenSessions(USER_DEVICE.pack(UIN, 1) + USER_DEVICE.pack(UIN, 0) + USER_DEVICE.pack(UIN + 1, 0)),
        acknowledges(UIN, 1, 1, device=1),
    ) == [[1], [-Code.DISK_FULL], [-Code.DISK_FULL], [1, -Code.DISK_FULL, -Code.DISK_FULL], [0]]  # fmt: skip
    replica.apply(Clock(Limits()))
    assert replica.apply(AddDevice(UIN, b"tablet"), OpenSessions(USER_DEVICE.pack(UIN + 1, 0))) == [[2], [1]]


def test_a_device_is_known_by_its_id_and_keeps_the_name_that_it_was_given_last() -> None:
    replica = Replica()
    told = ("", "phone", "", "old phone", "x" + "é" * 100)
    assert [replica.apply(*decode(encode_add_device(UIN, 5, name))) for name in told] == [[[1]]] * 5
    names = [device.client_id for device in replica.state.inboxes.user(UIN).devices.values()]
    assert names == [client_id(5) + ("x" + "é" * 60).encode()], "cut between characters"
    assert replica.apply(*decode(encode_add_device(UIN, 6, "phone"))) == [[2]]


def test_sessions_grow_over_a_device_that_was_dropped_and_came_back() -> None:
    replica = Replica()
    assert replica.apply(AddDevice(UIN, b"a"), OpenSessions(USER_DEVICE.pack(UIN, 1) * 2)) == [[1], [1, 2]]
    assert replica.apply(DropDevices(USER_DEVICE.pack(UIN, 1)), OpenSessions(USER_DEVICE.pack(UIN, 1))) == [
        [0], [-Code.UNKNOWN_DEVICE],
    ]  # fmt: skip
    assert replica.apply(AddDevice(UIN, b"a"), OpenSessions(USER_DEVICE.pack(UIN, 2))) == [[2], [3]]


def test_the_slowest_device_holds_entries_back() -> None:
    replica = filled(4)
    replica.apply(AddDevice(UIN, b"tablet"), OpenSessions(USER_DEVICE.pack(UIN, 1)))
    replica.apply(acknowledges(UIN, 1, 4))
    assert replica.state.inboxes.head(UIN, 1).floor == 0
    replica.apply(acknowledges(UIN, 2, 1, bits=0b10, device=1))
    assert replica.state.inboxes.head(UIN, 1).floor == 1
    assert [seq for seq, _ in replica.state.read(UIN, 1, 1, 2, None, 10).entries] == [2, 4]
    replica.apply(acknowledges(UIN, 2, 2, device=1))
    assert replica.state.inboxes.head(UIN, 1).floor == 3


def test_more_than_a_thousand_receivers_are_refused() -> None:
    replica = Replica()
    users = b"".join(U64.pack(uin) for uin in range(1, MAX_RECEIVERS + 2))
    assert set(replica.apply(Fanout(Writer(1, 1, 1), message(1), users))[0]) == {-Code.TOO_MANY_RECEIVERS}
    assert replica.apply(Fanout(Writer(1, 1, 1), message(1), users[8:]))[0] == [1] * MAX_RECEIVERS


def test_reads_without_a_right_are_refused() -> None:
    replica = filled(1)
    for device, session, code in ((1, 0, Code.UNKNOWN_DEVICE), (0, 0, Code.OLD_SESSION), (0, 2, Code.INVALID_ARGUMENT)):
        with pytest.raises(ReadRefusal) as refused:
            replica.state.read(UIN, device, 1, session, None, 1)
        assert refused.value.code is code


def chunked(chunks: int) -> tuple[Replica, MemoryStore]:
    """With so many whole chunks stored, and nothing of them in memory; the session of device 0."""
    replica = filled(chunks * CHUNK_ENTRIES)
    replica.flush()
    replica.restart()
    assert isinstance(replica.store, MemoryStore)
    return replica, replica.store


@for_each("at", range(2 + 9 + 12 + 4))
def test_a_flipped_byte_of_a_chunk_is_found_by_the_read_and_others_are_served(at: int) -> None:
    replica, store = chunked(3)
    key = chunk_key(UIN, 1, CHUNK_ENTRIES + 1)
    value = bytearray(store.values[key])
    value[at if at < 2 + 9 + 12 else at - 2 - 9 - 12 - CRC_BYTES] ^= 0x20
    store.values[key] = bytes(value)
    assert len(replica.state.read(UIN, 0, 1, 1, 0, CHUNK_ENTRIES).entries) == CHUNK_ENTRIES
    assert len(replica.state.read(UIN, 0, 1, 1, 2 * CHUNK_ENTRIES, 100).entries) == CHUNK_ENTRIES
    for read in (
        lambda: replica.state.read(UIN, 0, 1, 1, 0, CHUNK_ENTRIES + 1),
        lambda: replica.state.peek(UIN, 1, 0, CHUNK_ENTRIES + 1, 2 * CHUNK_ENTRIES + 2),
        lambda: replica.apply(appends(1, (message(CHUNK_ENTRIES), UIN))),
    ):
        with pytest.raises(StateDamaged, match=f"entries {CHUNK_ENTRIES + 1} to {2 * CHUNK_ENTRIES} of lane 1"):
            read()


def test_a_value_under_a_wrong_key_and_a_missing_one_are_found() -> None:
    replica, store = chunked(2)
    first, second = chunk_key(UIN, 1, 1), chunk_key(UIN, 1, CHUNK_ENTRIES + 1)
    store.values[first] = store.values[second]
    with pytest.raises(StateDamaged, match="CRC"):
        replica.state.read(UIN, 0, 1, 1, 0, 1)
    del store.values[first]
    with pytest.raises(StateDamaged, match=f"entries 1 to {CHUNK_ENTRIES} of lane 1 of inbox 0000000000000007 are missing"):
        replica.state.read(UIN, 0, 1, 1, 0, 1)
    store.values[first] = Chunk(2).encode(first)
    with pytest.raises(StateDamaged, match="entry 1 of lane 1 of inbox 0000000000000007 is missing"):
        replica.state.read(UIN, 0, 1, 1, 0, 1)
    del store.values[first]
    with pytest.raises(StateDamaged):
        replica.apply(appends(1, (message(1), UIN)))


@pytest.mark.parametrize("gone", [False, True])
def test_appends_go_on_behind_a_chunk_that_is_broken_and_it_stays_broken(gone: bool) -> None:
    replica = filled(3)
    replica.flush()
    replica.restart()
    whole, store, key = Replica(MemoryStore()), replica.store, chunk_key(UIN, 1, 1)
    assert isinstance(store, MemoryStore)
    assert isinstance(whole.store, MemoryStore)
    whole.store.values = dict(store.values)
    whole.restart()
    store.values[key] = bytes((store.values[key][0] ^ 1,)) + store.values[key][1:]
    if gone:
        del store.values[key]
    for numbers in (range(4, 10), range(10, 2 * CHUNK_ENTRIES)):
        operation = appends(1, *((message(number), UIN) for number in numbers))
        assert replica.apply(operation) == whole.apply(operation) == [list(numbers)]
        for each in (replica, whole):
            each.flush()
            each.restart()
    with pytest.raises(StateDamaged, match="CRC"):
        replica.state.peek(UIN, 1, 8, 1)
    assert len(replica.state.peek(UIN, 1, CHUNK_ENTRIES, 100).entries) == CHUNK_ENTRIES - 1
    assert {each for each in whole.store.values if store.values[each] != whole.store.values[each]} == {key}


def test_entries_that_are_not_operations_change_nothing_but_the_position() -> None:
    replica = filled(1)
    counter = replica.state.applied.counter
    entries = [Entry(2, counter + 1, EntryKind.NOOP, 0, b""), Entry(2, counter + 2, ENTRY_KIND, 0, b"\xff\0\0\0\0")]
    assert replica.state.apply(entries) == [[], []]
    assert (replica.state.applied.counter, replica.state.damaged_entries) == (counter + 2, 1)
    with pytest.raises(ValueError, match="does not follow"):
        replica.state.apply(entries)


@pytest.mark.parametrize(
    "payload", [b"\x01", b"\x01\x05\0\0\0ab", b"\x09\0\0\0\0", b"\x03\x01\0\0\0a", b"\x08\0\0\0\0", b"\x05\x01\0\0\0a",
                b"\x01\x0a\0\0\0\xff\xff" + bytes(8), encode([Clock(Limits())])[:-1]],
)  # fmt: skip
def test_broken_operations_are_refused(payload: bytes) -> None:
    with pytest.raises(MalformedData):
        decode(payload)


def test_cursors_take_maps_and_never_go_back() -> None:
    cursor = Cursor()
    assert cursor.acknowledge(0, 0b1010)
    assert (cursor.up_to, cursor.bits) == (0, 0b1010)
    assert cursor.acknowledge(1, 0)
    assert (cursor.up_to, cursor.bits) == (2, 0b10)
    assert not cursor.acknowledge(1, 0b1)
    assert cursor.acknowledge(2, (1 << 64) - 1)
    assert (cursor.up_to, cursor.bits) == (66, 0)
    assert not cursor.acknowledge(3, 0)
    assert cursor.has(66)
    assert not cursor.has(67)


def test_a_clock_that_is_ahead_is_set_back_and_sweeps_begin_again() -> None:
    replica = filled(5)
    replica.now_s += 20 * DAY
    replica.apply(Clock(Limits()), appends(1, (message(6), UIN)))
    assert replica.state.inboxes.now_s == START_S + 20 * DAY
    entry = Entry(1, replica.state.applied.counter + 1, EntryKind.SET_CLOCK, at_us(START_S), CLOCK.pack(at_us(START_S)))
    replica.state.apply([entry])
    assert replica.state.inboxes.now_s == START_S
    replica.now_s = START_S + HOUR
    replica.apply(appends(1, (message(7), UIN)), Clock(Limits()))
    assert replica.state.inboxes.now_s == START_S + HOUR
    assert len(replica.state.read(UIN, 0, 1, 1, None, 100).entries) == 7, "nothing went early"
    replica.flush()
    restarted = Replica(replica.store)
    assert restarted.state.inboxes.now_s == START_S + HOUR
    replica.now_s = START_S + 31 * DAY
    replica.apply(Clock(Limits()))
    assert [seq for seq, _ in replica.state.peek(UIN, 1, 0, 100).entries] == [6, 7], "kept for longer"
