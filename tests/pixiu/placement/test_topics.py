"""Names of topics and the rooms that carry them."""

from __future__ import annotations

import pytest

from pixiu.ids import MAX_ID, MAX_ROOM, topic_room
from pixiu.placement.topics import MAX_TOPIC_LENGTH, TopicRefusal, destination, is_filter, resolve


@pytest.mark.parametrize("room", [1, 7, 10, 4294967296, MAX_ROOM])
def test_a_room_has_its_number_as_name(room: int) -> None:
    assert resolve(f"room/{room}") == room


@pytest.mark.parametrize(
    "name",
    [
        "room/", "room/0", "room/01", "room/+1", "room/-1", "room/1 ", "room/ 1", "room/1/2", "room/abc", "room/1.0", "room/0x1",
        "room/١", "room/²", f"room/{MAX_ROOM + 1}", f"room/{MAX_ID}", "room/" + "9" * 19, "room/" + "1" * 4000,
    ],
)  # fmt: skip
def test_other_room_names_are_errors(name: str) -> None:
    assert resolve(name) in (TopicRefusal.ROOM_NUMBER, TopicRefusal.WILDCARD)


@pytest.mark.parametrize("name", ["a", "a/b", "/", "/a", "room", "user", "rooms/1", "Room/1", "a$", "a/$b", "x" * MAX_TOPIC_LENGTH])
def test_free_topics_belong_to_the_room_of_their_first_level(name: str) -> None:
    assert resolve(name) == topic_room(name) > MAX_ROOM


def test_topics_with_the_same_first_level_share_a_room() -> None:
    assert resolve("sensors/1/temperature") == resolve("sensors/2") != resolve("alarms/1")


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("", TopicRefusal.EMPTY),
        ("x" * (MAX_TOPIC_LENGTH + 1), TopicRefusal.LONG),
        ("user/1", TopicRefusal.USER),
        ("user/", TopicRefusal.USER),
        ("$SYS/broker", TopicRefusal.SYSTEM),
        ("$", TopicRefusal.SYSTEM),
        ("#", TopicRefusal.WILDCARD),
        ("+", TopicRefusal.WILDCARD),
        ("a/+/b", TopicRefusal.WILDCARD),
        ("room/#", TopicRefusal.WILDCARD),
        ("user/+", TopicRefusal.WILDCARD),
    ],
)
def test_names_that_no_room_carries(name: str, refusal: TopicRefusal) -> None:
    assert resolve(name) is refusal


@pytest.mark.parametrize("name", ["#", "+", "a/#", "+/+", "/+", "+/", "a/+/b/#", "/#", "plain"])
def test_mqtt_4_7_1_valid_filters(name: str) -> None:
    assert is_filter(name)


@pytest.mark.parametrize("name", ["##", "#/", "a#", "a/#/b", "a+", "+a", "a/b+/c", "+#", "#/#"])
def test_mqtt_4_7_1_invalid_filters(name: str) -> None:
    assert not is_filter(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("user/1", 1),
        (f"user/{MAX_ID}", MAX_ID),
        (f"user/{MAX_ID + 1}", TopicRefusal.USER),
        ("user/01", TopicRefusal.USER),
        ("user/0", TopicRefusal.USER),
        ("user/", TopicRefusal.USER),
        ("user/٣", TopicRefusal.USER),
        ("user/7/x", TopicRefusal.USER),
        ("user/+", TopicRefusal.WILDCARD),
        ("room/7", 7),
        ("$SYS", TopicRefusal.SYSTEM),
    ],
)
def test_a_user_is_named_by_a_decimal_uin(name: str, found: object) -> None:
    assert destination(name) == found
