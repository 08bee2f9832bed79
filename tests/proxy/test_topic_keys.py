"""The proxy gives records of free topics the rooms that the rules say, in place, and leaves all else."""

from __future__ import annotations

from random import Random

from pixiu.ids import SnowflakeID, topic_room
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.record import Flag, Kind, decode, encode, split, with_topic
from proxy.records.topic_keys import with_rooms

RULES = TopicRooms("devices=2")
TOPIC, OTHER = "devices/7/telemetry", "weather/berlin"


def record(topic: str, kind: Kind = Kind.ROOM, *, extension: bytes = b"", flags: int = Flag.TO_ROOM | Flag.TOPIC) -> bytes:
    return encode(kind, topic_room(topic), with_topic(topic, b"21.5"), SnowflakeID(5), sender=9, flags=flags, extension=extension)


def test_topics_get_their_rooms_and_nothing_else_changes() -> None:
    plain = encode(Kind.ROOM, 42, b"devices", SnowflakeID(6), flags=Flag.TO_ROOM)
    records = [record(TOPIC), plain, record(OTHER), record(TOPIC, Kind.SIGNAL), record(TOPIC, extension=b"x" * 9)]
    found = with_rooms(b"--" + b"".join(records), 2, 2 + sum(map(len, records)), 5, RULES)
    assert found[:2] == b"--"
    after = split(found[2:], 5)
    room = RULES.room(TOPIC)
    assert [decode(one).key for one in after] == [room, 42, topic_room(OTHER), room, room]
    assert [one[:24] + one[32:] for one in after] == [one[:24] + one[32:] for one in records]
    assert with_rooms(found, 2, len(found), 5, RULES) is found


def test_a_record_that_only_says_it_has_a_topic_is_not_read_beyond_its_end() -> None:
    damaged = bytearray(record(TOPIC))
    damaged[40:42] = b"\xff\xff"
    assert with_rooms(bytes(damaged), 0, len(damaged), 1, RULES) == damaged


def test_malformed_batches_are_left_as_they_are() -> None:
    random = Random(1)
    whole = record(TOPIC) * 3
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(random.randrange(1, 6)):
            data[random.randrange(len(data))] = random.randrange(256)
        end = random.randrange(len(data) + 1)
        found = with_rooms(bytes(data), 0, end, 3, RULES)
        assert len(found) == len(data)
        assert found[end:] == data[end:]
