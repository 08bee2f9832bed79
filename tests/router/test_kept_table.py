"""The table of kept filters: which sessions a message is for, limits, listings."""

from __future__ import annotations

import random

import pytest

from pixiu.ids import ALL_TOPICS, topic_room
from pixiu.placement.filter_tree import filter_matches
from router.kept.table import Entry, KeptTable
from router.replicated.table import Stored

NOW = 1_000_000
UNTIL = NOW + 60_000


def entry(name: str, session: int, version: int = 1, *, room: int = 0, until: int = UNTIL, live: bool = True) -> Entry:
    return Entry(room or topic_room(name), session, name.encode(), version, until, live, False)


def table(*entries: Entry, most: int = 1_000, bytes_: int = 1 << 24, sessions: int = 100) -> KeptTable:
    found = KeptTable(most, bytes_, sessions)
    for each in entries:
        assert found.put(each, NOW) is Stored.NEW
    return found


def matched(found: KeptTable, topic: str, publisher: int = 0, now_ms: int = NOW) -> list[int]:
    return found.match(0, topic_room(topic), topic.encode(), publisher, now_ms)


def test_a_message_is_for_each_session_with_a_filter_that_matches_once() -> None:
    found = table(entry("a/b", 3), entry("a/+", 3), entry("a/#", 2), entry("b/#", 4), entry("#", 5, room=ALL_TOPICS))
    assert matched(found, "a/b") == [2, 3, 5]
    assert matched(found, "b") == [4, 5]
    assert found.match(1, topic_room("b"), b"b", 0, NOW) == [4], "another partition has its own room of all topics"
    found.put(entry("a/+", 3, 2, live=False), NOW)
    assert matched(found, "a/b") == [2, 3, 5]
    found.put(entry("a/b", 3, 2, live=False), NOW)
    assert matched(found, "a/b") == [2, 5]


def test_numbered_rooms_are_no_topics_that_a_wildcard_matches() -> None:
    found = table(entry("room/42", 1, room=42), entry("#", 2, room=ALL_TOPICS))
    assert found.match(0, 42, b"room/42", 0, NOW) == [1]


def test_matches_agree_with_one_comparison_after_the_other() -> None:
    chance = random.Random(7)
    found, kept = KeptTable(10_000, 1 << 24, 1_000), {}
    for version in range(1, 600):
        name = "t/" + "/".join(chance.choice(["a", "b", "+"]) for _ in range(chance.randrange(1, 4))) + chance.choice(["", "/#"])
        each = entry(name, chance.randrange(1, 20), version, live=chance.random() < 0.6)
        found.put(each, NOW)
        kept[each.key] = each
    for _ in range(200):
        topic = "t/" + "/".join(chance.choice("ab") for _ in range(chance.randrange(1, 5)))
        wanted = {each.session for each in kept.values() if each.live and filter_matches(each.filter, topic.encode())}
        assert matched(found, topic) == sorted(wanted)
    assert len(found) == sum(each.live for each in kept.values())


def test_what_is_void_matches_nothing_and_leaves() -> None:
    found = table(entry("a", 1, until=NOW + 10), entry("a", 2))
    assert matched(found, "a", now_ms=NOW + 10) == [2]
    for version in range(2, 3_000):
        found.put(entry("a", 2, version, until=UNTIL + version), NOW)
    assert len(found._timers) < 2_000, "a session that renews its filters leaves no timers behind for days"
    assert found.expire(NOW + 10) == [entry("a", 1).key]
    assert found.expire(UNTIL + 2_998) == []
    assert found.expire(UNTIL + 2_999) == [entry("a", 2).key]
    assert (found.bytes, list(found.rooms)) == (0, [])


def test_a_client_does_not_get_its_own_message_if_it_does_not_want_it() -> None:
    found = table(entry("a", 1)._replace(no_local=True), entry("a", 2))
    assert matched(found, "a", publisher=1) == [2]
    assert matched(found, "a", publisher=2) == [1, 2]
    assert found.put(entry("a/#", 1), NOW) is Stored.NEW
    assert matched(found, "a", publisher=1) == [1, 2], "another filter of it does"


def test_a_room_has_a_limit_of_sessions_and_none_of_filters_of_one() -> None:
    found = table(entry("a/1", 1), entry("a/2", 2), sessions=2)
    assert found.put(entry("a/3", 3), NOW) is Stored.FULL
    assert found.crowded(entry("a/3", 3))
    assert found.put(entry("a/3", 1), NOW) is Stored.NEW
    assert found.put(entry("b", 3), NOW) is Stored.NEW, "another room"
    assert found.put(entry("a/3", 3), NOW, limited=False) is Stored.NEW, "what a peer has is taken"
    for session, name in ((3, "a/3"), (2, "a/2")):
        assert found.put(entry(name, session, 2, live=False), NOW) is Stored.NEW
    assert found.put(entry("a/4", 4), NOW) is Stored.NEW


def test_a_tenant_has_as_many_places_as_the_newest_session_says() -> None:
    def place(session: int, version: int = 1, *, limit: int = 2, live: bool = True, until: int = UNTIL) -> Entry:
        return entry("$tenant/acme", session, version, room=topic_room("acme"), live=live, until=until)._replace(limit=limit)

    found = table(place(1, until=NOW + 10), place(2), entry("acme/a", 2))
    assert (found.places(b"$tenant/acme"), list(found.rooms)) == (2, [topic_room("acme")])
    assert matched(found, "acme/a") == [2], "a place is no filter"
    assert found.put(place(3), NOW) is Stored.FULL
    assert found.put(place(3, limit=0), NOW) is Stored.NEW
    assert found.put(place(2, 2, limit=1), NOW) is Stored.NEW, "a session that has a place keeps it"
    assert found.put(entry("$tenant/globex", 3, room=topic_room("globex"))._replace(limit=1), NOW) is Stored.NEW
    assert found.put(place(3, 2, live=False), NOW) is Stored.NEW
    found.expire(NOW + 10)
    assert found.places(b"$tenant/acme") == 1
    assert found.put(place(3, 3), NOW) is Stored.NEW
    assert [each.session for each in found.listing(0, b"", 0)[0] if each.is_place and b"acme" in each.filter] == [2, 3]


def test_what_is_there_can_be_renewed_when_nothing_more_has_space() -> None:
    found = table(entry("a", 1), bytes_=2_000)
    assert found.put(entry("b", 1), NOW) is Stored.FULL
    found.put(entry("b", 1), NOW, limited=False)
    assert found.put(entry("a", 1, 2, until=UNTIL + 1), NOW) is Stored.NEW


def test_listings_come_in_slices_with_each_entry_once() -> None:
    entries = {each.key: each for session in range(1, 60) for each in (entry(f"t/{n}", session) for n in range(5))}
    found = table(*entries.values())
    found.put(entry("t/0", 7, 2, live=False), NOW)
    listed: list[Entry] = []
    after = b""
    while True:
        part, after = found.listing(0, after, 7)
        listed += part
        if not after:
            break
        assert len(part) == 7
    assert sorted(each.key for each in listed) == sorted(key for key in entries if key != entry("t/0", 7).key)
    assert {each.filter for each in found.listing(7, b"", 0)[0]} == {b"t/1", b"t/2", b"t/3", b"t/4"}
    part, after = found.listing(9, b"", 3)
    assert len(part) == 3
    assert len(found.listing(9, after, 3)[0]) == 2


@pytest.mark.parametrize(
    ("name", "room", "whole"),
    [
        ("room/42", 42, True), ("room/42", 43, False), ("a/+/b", 0, True), ("a/+/b", 42, False), ("#", ALL_TOPICS + 5, True),
        ("a/#/b", 0, False), ("$share/g/a", 0, False), ("$SYS/x", 0, False), ("user/7", 0, False), ("", 0, False),
        ("$tenant/acme", topic_room("acme"), True), ("$tenant/acme", topic_room("other"), False), ("$tenant/", 0, False),
    ],
)  # fmt: skip
def test_only_filters_of_rooms_are_kept(name: str, room: int, whole: bool) -> None:
    assert entry(name, 1, room=room).is_whole is whole
    assert not entry(name, 1, room=room)._replace(expires_at_ms=0).is_whole
