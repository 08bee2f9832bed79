"""The map of retained messages: the last writer wins, listings come in slices, digests find differences, limits hold."""

from __future__ import annotations

import random
from itertools import count

from pixiu.wire.record import Kind, encode
from router.replicated.table import REMOVED_MS, Stored
from router.retained.map import MAX_SLICE, Entry, RetainedMap

NOW = 1_000_000


def entry(topic: str, version: int, payload: bytes = b"x", *, room: int = 1, expires: int = 0) -> Entry:
    record = encode(Kind.ROOM, room, payload, version) if payload else b""
    return Entry(topic.encode(), version, version, record, expires, room)


def listed(found: RetainedMap, *filters: str, partition: int = 0, partitions: int = 1) -> list[str]:
    """All slices."""
    topics: list[str] = []
    after = b""
    for slices in count():
        part = found.listing([name.encode() for name in filters], after, 0, NOW, partition, partitions)
        topics += [each.topic.decode() for each in part.entries]
        after = part.next
        if not after:
            return topics
        assert slices < 10_000, "a listing ends"
    return topics


def test_the_newest_wins_in_any_order() -> None:
    found = RetainedMap(10, 1 << 20)
    assert found.put(entry("a", 5), NOW) is Stored.NEW
    assert found.put(entry("a", 5), NOW) is Stored.SAME
    assert found.put(entry("a", 4), NOW) is Stored.SUPERSEDED
    assert found.put(entry("a", 6, b""), NOW) is Stored.NEW
    assert (len(found), found.removed) == (0, 1)
    assert found.put(entry("a", 5), NOW) is Stored.SUPERSEDED, "a cleared topic is not revived"
    assert found.put(entry("a", 7), NOW) is Stored.NEW
    assert listed(found, "#") == ["a"]


def test_a_listing_has_each_topic_once_in_slices() -> None:
    found = RetainedMap(10_000, 1 << 24)
    for number in range(2 * MAX_SLICE + 5):
        found.put(entry(f"d/{number}/t", number + 1), NOW)
    found.put(entry("room/5", 9_000), NOW)
    everything = listed(found, "#")
    assert len(everything) == 2 * MAX_SLICE + 5 == len(set(everything)), "a room is no topic that a wildcard matches"
    assert listed(found, "d/7/+", "room/5", "d/8/t") == ["d/7/t", "d/8/t", "room/5"]
    assert listed(found, "d/9/t", "nothing") == ["d/9/t"]
    assert listed(found, "e/#") == []


def test_a_listing_is_what_a_filter_matches_whatever_is_put_meanwhile() -> None:
    chance = random.Random(3)
    found = RetainedMap(10_000, 1 << 24)
    topics = {f"{chance.choice('abc')}/{chance.randrange(40)}/{chance.choice('xy')}" for _ in range(200)}
    for version, topic in enumerate(sorted(topics), 1):
        found.put(entry(topic, version), NOW)
    assert listed(found, "a/+/x") == sorted(topic for topic in topics if topic[0] == "a" and topic[-1] == "x")
    assert listed(found, "+/3/#", "b/#") == sorted(topic for topic in topics if topic.split("/")[1] == "3" or topic[0] == "b")


def test_each_partition_lists_its_rooms() -> None:
    found = RetainedMap(10, 1 << 20)
    for room in range(4):
        found.put(entry(f"t{room}", room + 1, room=room), NOW)
    assert [listed(found, "#", partition=partition, partitions=2) for partition in range(2)] == [["t0", "t2"], ["t1", "t3"]]
    assert sorted(found.purge(1, 2)) == [b"t0", b"t2"]
    assert listed(found, "#") == ["t1", "t3"]


def test_limits_hold_for_messages_and_bytes() -> None:
    found = RetainedMap(2, 1 << 20)
    assert [found.put(entry(topic, 1), NOW) for topic in ("a", "b", "c")] == [Stored.NEW, Stored.NEW, Stored.FULL]
    assert found.put(entry("a", 2), NOW) is Stored.NEW, "a topic that is there may change"
    assert found.put(entry("c", 2), NOW, limited=False) is Stored.NEW, "what a peer has is taken"
    small = RetainedMap(100, 2_000)
    assert small.put(entry("a", 1, bytes(1_000)), NOW) is Stored.NEW
    assert small.put(entry("b", 1, bytes(1_000)), NOW) is Stored.FULL
    assert small.put(entry("a", 2, b""), NOW) is Stored.NEW
    assert small.put(entry("b", 1, bytes(1_000)), NOW) is Stored.NEW
    assert small.counters.refused == 1


def test_what_is_over_is_neither_listed_nor_kept() -> None:
    found = RetainedMap(10, 1 << 20)
    found.put(entry("a", 1, expires=NOW + 10), NOW)
    found.put(entry("b", 1), NOW)
    assert [each.topic for each in found.listing([b"#"], b"", 0, NOW + 10).entries] == [b"b"]
    assert found.expire(NOW + 10) == [b"a"]
    assert found.put(entry("b", 2, expires=NOW - 1), NOW) is Stored.NEW
    assert listed(found, "#") == [], "a message that comes too late still takes the place of the one before"
    assert found.expire(NOW + REMOVED_MS) == [b"b"]
    assert found.bytes == 0


def test_digests_show_where_replicas_differ() -> None:
    one, two = RetainedMap(100, 1 << 20), RetainedMap(100, 1 << 20)
    entries = [entry(f"t{number}", number + 1, room=number) for number in range(50)]
    for each in entries:
        one.put(each, NOW)
    for each in reversed(entries[:-1]):
        two.put(each, NOW)
    two.put(entry("t3", 100, b"", room=3), NOW)
    for mine, other in ((one, two), (two, one)):
        for each in list(other.differing(mine.digests(), 0, 1)):
            mine.put(each, NOW, limited=False)
    assert one.digests() == two.digests()
    assert "t3" not in listed(one, "#")
    assert list(one.differing(two.digests(), 0, 1)) == []
