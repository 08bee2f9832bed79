"""Messages and the state as bytes: what goes in comes out, and what is broken is refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from cluster.replication.core.messages import Append, Appended, Message, Mismatch, Refused
from cluster.replication.model import NOBODY, Entry, Forced, MemberID, Position
from cluster.replication.peers.wire import decode_message, decode_state, encode_message, encode_state
from cluster.wire.v1 import replication_pb2 as pb
from pixiu.errors import MalformedData
from tests.cluster.replication.replica import A, B, C, entries, state

MESSAGES: list[Message] = [
    Append(3, A, Position(2, 7), [*entries(2, 8, 9), *entries(3, 10, 11)], 6, 11, 12.5),
    Append(3, A, Position(0, 0), [], 0, 11, -1.0),
    Append(3, A, None, [], 6, 11, 12.5),
    Append(3, A, None, [], 6, 11, 12.5, 17, (Forced(2, Position(1, 4)), Forced(3, Position(2, 9)))),
    Appended(3, B, 4, 11, float("-inf")),
    Appended(3, B, 4, 11, 1.5, True, 17, True),
    Mismatch(3, B, 4, 7, 12.5),
    Refused(9, MemberID((1 << 63) - 1)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_broken_bytes_are_refused_or_another_message_but_never_another_error(message: Message) -> None:
    rng = random.Random(3)
    data = encode_message(message)
    for _ in range(500):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            decode_message(bytes(broken[: rng.randint(0, len(broken))]))
        except MalformedData:
            continue


@pytest.mark.parametrize(
    ("epoch", "previous", "new"),
    [
        (3, Position(2, 7), entries(2, 9, 9)),
        (3, Position(2, 7), [*entries(2, 8, 8), *entries(2, 10, 10)]),
        (3, Position(2, 7), entries(1, 8, 8)),
        (3, Position(2, 7), entries(4, 8, 8)),
        (3, None, entries(3, 8, 8)),
    ],
    ids=["gap before", "gap within", "epoch falls", "epoch above the message's", "follows nothing"],
)
def test_entries_that_no_leader_sends_are_refused(epoch: int, previous: Position | None, new: list[Entry]) -> None:
    with pytest.raises(MalformedData):
        decode_message(encode_message(Append(epoch, A, previous, new, 0, 9, 1.0)))


def test_numbers_out_of_range_and_no_time_are_refused() -> None:
    for broken in (
        pb.ReplicaMessage(appended=pb.ReplicaMessage.Appended(epoch=1, sender=1 << 63)),
        pb.ReplicaMessage(appended=pb.ReplicaMessage.Appended(epoch=1, sender=1, matched=1 << 63)),
        pb.ReplicaMessage(appended=pb.ReplicaMessage.Appended(epoch=1, sender=1, sent_at=math.nan)),
        pb.ReplicaMessage(),
    ):
        with pytest.raises(MalformedData):
            decode_message(broken.SerializeToString())


def test_a_state_comes_back_and_has_the_documented_form() -> None:
    what = replace(state(4, A, C, A, B, incarnation=7), forced=(Forced(3, Position(1, 300)),))
    assert decode_state(encode_state(what)) == what
    assert json.loads(encode_state(what)) == {
        "epoch": 4, "leader": "0000000000000001", "incarnation": 7,
        "in_sync": ["0000000000000001", "0000000000000002", "0000000000000003"],
        "forced": [[3, 1, 300]],
    }  # fmt: skip
    handed_over = state(4, NOBODY, A, incarnation=0)
    assert decode_state(encode_state(handed_over)) == handed_over


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 0}, {"epoch": 1 << 32}, {"epoch": "4"}, {"epoch": True}, {"incarnation": -1}, {"incarnation": None},
        {"in_sync": []}, {"in_sync": "1"}, {"in_sync": ["x"]}, {"in_sync": ["1", "1"]}, {"in_sync": ["0"]}, {"in_sync": [1]},
        {"in_sync": [f"{i:x}" for i in range(1, 66)]}, {"leader": 5}, {"leader": "-1"}, {"leader": "f" * 16},
        {"forced": None}, {"forced": [[3, 1]]}, {"forced": [[3, 3, 9]]}, {"forced": [[5, 3, 9]]}, {"forced": [["3", 1, 9]]},
        {"forced": [[3, 1, -1]]}, {"forced": [[4, 1, 9]] * 17},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_is_not_one_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedData):
        decode_state(json.dumps(json.loads(encode_state(state(4, A, A, B))) | change).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000])
def test_other_data_is_not_a_state(data: bytes) -> None:
    with pytest.raises(MalformedData):
        decode_state(data)
