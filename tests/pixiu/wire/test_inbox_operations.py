"""The one codec of inbox operations: what callers write is what replicas read, and nothing else is read."""

from __future__ import annotations

import itertools

import pytest

from pixiu.errors import MalformedData
from pixiu.ids import WORKERS
from pixiu.wire import inbox_operations as op
from pixiu.wire.inbox_operations import decode, encode, spans

WRITER = op.Writer(9, 70, 3)
EXAMPLES: dict[op.Op, op.Operation] = {
    op.Op.APPENDS: op.Appends(WRITER, op.APPEND.pack(11, 1) + op.APPEND.pack(12, 2)),
    op.Op.FANOUT: op.Fanout(WRITER, 11, b"".join(op.U64.pack(uin) for uin in (1, 2, 3))),
    op.Op.ACKNOWLEDGES: op.Acknowledges(op.ACKNOWLEDGE.pack(7, 2, 1, 30, 500, 1 << 63)),
    op.Op.OPEN_SESSIONS: op.OpenSessions(op.USER_DEVICE.pack(7, 2) + op.USER_DEVICE.pack(9, 1)),
    op.Op.ADD_DEVICE: op.AddDevice(7, b"abcdef"),
    op.Op.DROP_DEVICES: op.DropDevices(op.USER_DEVICE.pack(7, 3)),
    op.Op.TRIMS: op.Trims(op.TRIM.pack(7, 1, 44)),
    op.Op.CLOCK: op.Clock(op.Limits(cap=9, history_s=5, from_now=1, no_space=1)),
    op.Op.DELETES: op.Deletes(op.DELETE.pack(7, 1, 3, 9)),
    op.Op.GIVE_UP: op.GiveUp((b"M", b"E" + bytes(17))),
    op.Op.NOTE: op.Note(7, 2, 1 << 40, b"value"),
    op.Op.CLEARS: op.Clears(op.CLEAR.pack(7, 5) + op.CLEAR.pack(8, 6)),
}


def raw(number: int, size: int) -> bytes:
    return op.HEAD.pack(number, size) + bytes(size)


def test_every_operation_comes_back_as_it_was_alone_and_among_others() -> None:
    assert set(EXAMPLES) == set(op.Op), "an operation without an example"
    for number, operation in EXAMPLES.items():
        payload = encode([operation])
        assert decode(payload) == [operation]
        assert spans(payload) == [(number, op.HEAD.size, len(payload))]
    for first, second in itertools.product(EXAMPLES.values(), repeat=2):
        assert decode(encode([first, second])) == [first, second]
        assert encode([first]) + encode([second]) == encode([first, second]), "a leader joins what callers sent"
    assert decode(b"") == []


def test_what_proxies_relays_and_the_sdk_write_is_what_replicas_read() -> None:
    written = {
        op.Op.APPENDS: op.encode_appends(9, 70, 3, [11, 12], [1, 2]),
        op.Op.FANOUT: op.encode_fanout(9, 70, 3, 11, (1, 2, 3)),
        op.Op.ACKNOWLEDGES: op.encode_acknowledges([(7, 2, 30, 1, 500, 1 << 63)]),
        op.Op.OPEN_SESSIONS: op.encode_opens([(7, 2), (9, 1)]),
        op.Op.ADD_DEVICE: op.encode_add_device(7, int.from_bytes(b"abcdef")),
        op.Op.DROP_DEVICES: op.encode_drop_device(7, 3),
        op.Op.DELETES: op.encode_delete(7, 1, 3, 9),
        op.Op.NOTE: op.encode_note(7, 2, 1 << 40, b"value"),
        op.Op.CLEARS: op.encode_clears([(7, 5), (8, 6)]),
    }
    for number, payload in written.items():
        assert decode(payload) == [EXAMPLES[number]]


def test_a_body_of_an_impossible_size_is_malformed() -> None:
    fine: dict[op.Op, set[int]] = {
        op.Op.APPENDS: {10, 26, 42},
        op.Op.FANOUT: {18, 26, 34, 42, 50},
        op.Op.ACKNOWLEDGES: {0, 32},
        op.Op.OPEN_SESSIONS: {0, 10, 20, 30, 40, 50},
        op.Op.ADD_DEVICE: set(range(8, 51)),
        op.Op.DROP_DEVICES: {0, 10, 20, 30, 40, 50},
        op.Op.TRIMS: {0, 17, 34},
        op.Op.CLOCK: {23},
        op.Op.DELETES: {0, 25, 50},
        op.Op.NOTE: set(range(17, 51)),
        op.Op.CLEARS: {0, 16, 32, 48},
    }
    for number, sizes in fine.items():
        assert {size for size in range(51) if _reads(raw(number, size))} == sizes, number
    assert _reads(raw(op.Op.ADD_DEVICE, 8 + op.MAX_CLIENT_ID_BYTES))
    assert not _reads(raw(op.Op.ADD_DEVICE, 9 + op.MAX_CLIENT_ID_BYTES))
    assert _reads(raw(op.Op.NOTE, op.NOTE.size + op.MAX_NOTE_BYTES))
    assert not _reads(raw(op.Op.NOTE, op.NOTE.size + op.MAX_NOTE_BYTES + 1))


def _reads(payload: bytes) -> bool:
    try:
        decode(payload)
    except MalformedData:
        return False
    return True


@pytest.mark.parametrize("number", [0, 9, 12, 255])
def test_an_unknown_operation_is_malformed(number: int) -> None:
    with pytest.raises(MalformedData, match=f"operation {number} of 8 bytes"):
        decode(raw(number, 8))


def test_what_is_cut_off_anywhere_is_malformed() -> None:
    whole = encode([EXAMPLES[op.Op.APPENDS], EXAMPLES[op.Op.TRIMS]])
    ends = {0, len(encode([EXAMPLES[op.Op.APPENDS]])), len(whole)}
    assert {size for size in range(len(whole) + 1) if _reads(whole[:size])} == ends


def test_a_worker_that_cannot_be_and_too_many_operations_are_malformed() -> None:
    with pytest.raises(MalformedData, match=f"worker {WORKERS}"):
        decode(op.encode_appends(WORKERS, 1, 1, [], []))
    empty = op.encode_opens([])
    assert len(decode(empty * op.MAX_OPERATIONS)) == op.MAX_OPERATIONS
    with pytest.raises(MalformedData, match="too many"):
        decode(empty * (op.MAX_OPERATIONS + 1))


def test_generations_grow_and_begin_at_the_time() -> None:
    assert op.next_generation(0, op.GENERATION_EPOCH_S + 1000) == 1000
    assert op.next_generation(1000, op.GENERATION_EPOCH_S + 1000) == 1001
    assert op.next_generation(5, 0) == 6
    assert op.next_generation(op.MAX_GENERATION, 0) == op.MAX_GENERATION
