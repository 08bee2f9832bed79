"""Filters in a tree match what the standard says, and what a naive matcher says."""

from __future__ import annotations

import random

import pytest

from pixiu.placement.filter_tree import FilterTree, filter_matches
from pixiu.placement.topics import Filter, TopicRefusal, parse_filter

EXAMPLES = [
    ("sport/tennis/player1/#", "sport/tennis/player1", True),
    ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
    ("sport/#", "sport", True),
    ("#", "sport/tennis", True),
    ("sport/+", "sport", False),
    ("sport/+", "sport/", True),
    ("+/+", "/finance", True),
    ("/+", "/finance", True),
    ("+", "/finance", False),
    ("#", "$SYS/uptime", False),
    ("+/monitor", "$SYS/monitor", False),
    ("$SYS/#", "$SYS/uptime", True),
    ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
    ("a//b", "a//b", True),
    ("a/+/b", "a//b", True),
]


def naive(name: str, topic: str) -> bool:
    """Section 4.7, level by level."""
    wanted, levels = name.split("/"), topic.split("/")
    if topic.startswith("$") and wanted[0] in ("+", "#"):
        return False

    def fits(wanted: list[str], levels: list[str]) -> bool:
        if not wanted:
            return not levels
        if wanted[0] == "#":
            return True
        return bool(levels) and wanted[0] in ("+", levels[0]) and fits(wanted[1:], levels[1:])

    return fits(wanted, levels)


@pytest.mark.parametrize(("name", "topic", "expected"), EXAMPLES)
def test_examples_of_the_standard(name: str, topic: str, expected: bool) -> None:
    tree: FilterTree[str] = FilterTree()
    tree.put(name.encode(), name)
    assert tree.match(topic.encode()) == [name] * expected
    assert filter_matches(name.encode(), topic.encode()) is expected is naive(name, topic)


def test_a_tree_matches_what_a_naive_matcher_does() -> None:
    chance = random.Random(7)
    tree: FilterTree[str] = FilterTree()
    present: set[str] = set()
    for _ in range(3000):
        levels = [chance.choice(["a", "b", "", "+", "$x"]) for _ in range(chance.randrange(1, 5))]
        if chance.random() < 0.3:
            levels[-1] = "#"
        name = "/".join(levels)
        if name in present and chance.random() < 0.6:
            tree.remove(name.encode())
            present.discard(name)
        else:
            tree.put(name.encode(), name)
            present.add(name)
        topic = "/".join(chance.choice(["a", "b", "", "c", "$x"]) for _ in range(chance.randrange(1, 5)))
        assert sorted(tree.match(topic.encode())) == sorted(found for found in present if naive(found, topic)), topic
    for name in present:
        tree.remove(name.encode())
    assert len(tree) == 0
    assert tree._root.is_empty(), "nodes that nothing needs are gone"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("room/5", Filter("", "room/5", False)),
        ("a/+/b", Filter("", "a/+/b", True)),
        ("$share/g/a/#", Filter("g", "a/#", True)),
        ("$share/g/room/5", Filter("g", "room/5", False)),
        ("$SYS/#", Filter("", "$SYS/#", True)),
        ("$SYS/uptime", Filter("", "$SYS/uptime", False)),
        ("", TopicRefusal.EMPTY),
        ("a/#/b", TopicRefusal.FILTER),
        ("a+", TopicRefusal.FILTER),
        ("room/+", TopicRefusal.ROOM_NUMBER),
        ("user/+", TopicRefusal.USER),
        ("$share/g", TopicRefusal.SHARE),
        ("$share//a", TopicRefusal.SHARE),
        ("$share/g/", TopicRefusal.SHARE),
        ("$share/+/a", TopicRefusal.SHARE),
        ("$share/g/user/7", TopicRefusal.USER),
        ("$share/g/$SYS/#", TopicRefusal.SYSTEM),
        ("$internal", TopicRefusal.SYSTEM),
        ("+/" * 128 + "#", TopicRefusal.LEVELS),
        ("a" * 4097, TopicRefusal.LONG),
    ],
)
def test_what_a_client_may_subscribe_to(text: str, expected: Filter | TopicRefusal) -> None:
    assert parse_filter(text) == expected
