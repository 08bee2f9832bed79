"""Which user a request's work is for."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pi.streams.work import of_notes, removals, work_of
from pixiu.errors import MalformedData
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    HEAD,
    U64,
    USER_DEVICE,
    WRITER,
    Limits,
    Op,
    encode_acknowledges,
    encode_clears,
    encode_delete,
    encode_drop_device,
    encode_note,
)  # fmt: skip
from pixiu.wire.v1 import pi_pb2

WRITES = WRITER.pack(1, 2, 3)


def operation(number: Op, body: bytes) -> bytes:
    return HEAD.pack(number, len(body)) + body


def test_a_user_of_each_operation_is_found() -> None:
    assert work_of(operation(Op.APPENDS, WRITES + APPEND.pack(99, 7)), [], 0.0)[0] == 7
    assert work_of(operation(Op.FANOUT, WRITES + U64.pack(99) + U64.pack(5)), [], 0.9)[0] == 5
    assert work_of(operation(Op.ACKNOWLEDGES, ACKNOWLEDGE.pack(12, 1, 0, 1, 1, 0)), [], 0.5)[0] == 12
    assert work_of(operation(Op.OPEN_SESSIONS, USER_DEVICE.pack(13, 1)), [], 0.0) == (13, 1)
    assert work_of(operation(Op.ADD_DEVICE, U64.pack(14) + b"telephone"), [], 0.99)[0] == 14
    assert work_of(encode_note(15, 0, 1, b"value"), [], 0.5)[0] == 15
    assert work_of(encode_clears([(16, 1)]), [], 0.5)[0] == 16
    assert work_of(b"", [4, 6], 0.5) == (6, 2), "reads alone"
    assert work_of(operation(Op.CLOCK, Limits().encode()), [], 0.5) == (0, 0), "nobody's"
    assert work_of(b"", [], 0.5) == (0, 0)


def test_the_lot_falls_on_users_by_their_share_whatever_the_order() -> None:
    """The defect: a sender whose batches began with one user made that user look like all of the load."""
    hot = b"".join(APPEND.pack(i, 7) for i in range(60))
    others = operation(Op.APPENDS, WRITES + b"".join(APPEND.pack(i, 100 + i) for i in range(20)))
    request = operation(Op.APPENDS, WRITES + hot) + others
    drawn = Counter(work_of(request, list(range(1000, 1020)), step / 1000)[0] for step in range(1000))
    assert 550 < drawn[7] < 650
    assert 150 < sum(count for uin, count in drawn.items() if uin >= 1000) < 250


def test_what_is_malformed_raises_nothing() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        uin, count = work_of(rng.randbytes(rng.randrange(60)), [], rng.random())
        assert (uin == 0) == (count == 0)


def test_what_takes_mail_from_a_user_is_named_and_nothing_else() -> None:
    request = encode_delete(7, 1, 3, 9) + encode_acknowledges([(7, 1, 2, 1, 5, 0)]) + encode_drop_device(8, 2)
    assert list(removals(request)) == [
        {"what": "delete", "uin": 7, "lane": 1, "first": 3, "last": 9},
        {"what": "drop device", "uin": 8, "device": 2},
    ]
    assert list(removals(encode_acknowledges([(7, 1, 2, 1, 5, 0)]))) == []
    rng = random.Random(4)
    for _ in range(500):
        damaged = bytearray(request)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        list(removals(bytes(damaged[: rng.randrange(len(damaged) + 1)])))


def test_notes_alone_are_told_from_everything_else() -> None:
    look = [pi_pb2.PiRead(uin=7, peek=True, lane=lane, notes=True) for lane in range(4)]
    assert of_notes(encode_note(7, 0, 1, b"value") + encode_clears([(7, 1)]), look)
    assert of_notes(b"", [])
    for operations in (encode_delete(7, 1, 1, 2), encode_note(7, 0, 1, b"") + encode_drop_device(7, 1)):
        assert not of_notes(operations, [])
    for read in (pi_pb2.PiRead(uin=7, device=1), pi_pb2.PiRead(uin=7, peek=True, num=1)):
        assert not of_notes(b"", [read])
    with pytest.raises(MalformedData):
        of_notes(b"\x0c\xff\0\0\0", [])


def test_a_clear_is_written_to_the_audit_log() -> None:
    assert list(removals(encode_clears([(7, 1), (8, 2)]))) == [{"what": "clear", "uin": 7}, {"what": "clear", "uin": 8}]
