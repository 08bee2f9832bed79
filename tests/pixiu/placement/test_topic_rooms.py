"""The rooms of topics by depth, and those that a filter spans: every topic that it matches is in one of them."""

from __future__ import annotations

from itertools import product

import pytest

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ROOM, TOPIC_ROOM, topic_room
from pixiu.placement.partition import rendezvous
from pixiu.placement.topic_rooms import BY_FIRST_LEVEL, TopicRooms

RULES = TopicRooms("devices=2:32, sensors/eu=3:4,sensors/eu/7=4:64")


def test_without_rules_the_first_level_chooses_as_ever() -> None:
    assert not BY_FIRST_LEVEL
    assert BY_FIRST_LEVEL.room("a/b/c") == topic_room("a/b/c") == topic_room("a")
    assert TopicRooms("devices=2").room("weather/berlin") == topic_room("weather")


def test_the_levels_up_to_the_depth_choose() -> None:
    assert RULES.room("devices/7/telemetry") == RULES.room("devices/7/state") == RULES.room("devices/7")
    assert len({RULES.room(f"devices/{number}/telemetry") for number in range(1000)}) == 32
    assert RULES.room("sensors/us/1/heat") == topic_room("sensors")
    assert RULES.room("sensors/eu/1/heat") == RULES.room("sensors/eu/1")
    assert RULES.room("sensors/eu/7/heat") != RULES.room("sensors/eu/7/cold")
    rooms = {RULES.room(topic) for topic in ("devices", "devices/7", "sensors/eu", "sensors/eu/7/x")}
    assert all(room > TOPIC_ROOM and room > MAX_ROOM for room in rooms)


def test_devices_are_spread_over_all_brokers() -> None:
    rules = TopicRooms("devices=2")
    brokers = list(range(1, 9))
    counts = dict.fromkeys(brokers, 0)
    for number in range(10_000):
        counts[rendezvous(rules.room(f"devices/{number}/telemetry"), brokers)] += 1
    assert min(counts.values()) > 900
    assert len({rendezvous(BY_FIRST_LEVEL.room(f"devices/{number}/telemetry"), brokers) for number in range(100)}) == 1


def matches(topic_filter: list[str], topic: list[str]) -> bool:
    """As MQTT says."""
    if not topic_filter:
        return not topic
    if topic_filter[0] == "#":
        return True
    if not topic:
        return False
    return (topic_filter[0] in ("+", topic[0]) and matches(topic_filter[1:], topic[1:])) or (
        topic_filter[0] in ("+", topic[0]) and topic_filter[1:] == ["#"] and len(topic) == 1
    )


def test_a_filters_rooms_carry_every_topic_that_it_matches_and_exact_ones_are_one() -> None:
    names = ["devices", "sensors", "eu", "7", "x"]
    topics = [list(levels) for length in (1, 2, 3, 4) for levels in product(names, repeat=length)]
    filters = [
        [first, *rest]
        for first in ("devices", "sensors", "x")
        for length in (0, 1, 2, 3)
        for rest in product(["eu", "7", "+"], repeat=length)
    ]
    filters += [[*one, "#"] for one in filters]
    compared = 0
    for one in filters:
        rooms = set(RULES.rooms("/".join(one)))
        if "+" not in one and "#" not in one:
            assert rooms == {RULES.room("/".join(one))}
        for topic in topics:
            if matches(one, topic):
                compared += 1
                assert RULES.room("/".join(topic)) in rooms, (one, topic)
    assert compared > 3000


def test_a_wide_filter_spans_no_more_than_it_must() -> None:
    assert len(RULES.rooms("devices/+/telemetry")) == 32
    assert len(RULES.rooms("devices/7/+")) == 1
    assert len(RULES.rooms("weather/#")) == 1
    assert len(RULES.rooms("sensors/us/#")) == 1
    assert len(RULES.rooms("sensors/eu/9/#")) == 1
    assert len(RULES.rooms("sensors/+/7/+")) == 1 + 4 + 64
    for everything in ("#", "+/a"):
        rooms = RULES.rooms(everything)
        assert [{room % count for room in rooms} for count in (1, 2, 128)] == [set(range(1)), set(range(2)), set(range(128))]


@pytest.mark.parametrize(
    "text",
    ["devices", "devices=1", "devices=17", "devices=2:0", "devices=2:70000", "a/b=2", "a//b=4", "room=2", "user/x=3", "$SYS=2",
     "a/+=3", "a=2,a=3", "a=2,,b=2", ",".join(f"a{number}=2" for number in range(65)), "a=2" * 2000],
)  # fmt: skip
def test_rules_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        TopicRooms(text)
