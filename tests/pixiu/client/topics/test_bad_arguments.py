"""Wrong arguments of durable topics are refused before anything is sent, by a text that says what is right."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from pixiu.client.topics.drafts import draft
from pixiu.client.topics.surroundings import TopicContext
from pixiu.client.topics.topic_admin import Topics
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import SLOTS, Lineage, Part
from pixiu.wire.block import join, parse


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key": 7}, r"a key is bytes or text, not int; str\(key\)"),
        ({"headers": [("a", "b")]}, "headers are a dict of texts, not list"),
        ({"headers": {"a": 1}}, "the header 'a': a name is text, a value text or bytes, not int"),
        ({"headers": {1: "a"}}, "the header 1: a name is text"),
        ({"deliver_at": datetime(2030, 1, 1)}, "has no time zone"),
        ({"deliver_at": datetime.now(UTC) + timedelta(days=367)}, "deliver_at is at most a year ahead"),
        ({"deliver_at": -1}, "a time is a datetime or Unix µs"),
        ({"expires_in_s": 0}, "expires_in_s is a number from 1 to"),
        ({"expires_in_s": 0.5}, "expires_in_s is a number"),
    ],
)
def test_options_of_a_message(options: Any, text: str) -> None:
    """bytes(1) is a NUL: a number in headers was stored as that many zeros."""
    with pytest.raises(InvalidArgument, match=text):
        draft(b"", **options)


def test_a_message_says_when_it_is_due_and_until_when() -> None:
    at = datetime.now(UTC) + timedelta(days=365)
    found = draft(b"x", deliver_at=at, expires_in_s=60)
    stored = parse(join([found.encoded], topic=1, part=1, writer=1, first=1)).message(0)
    assert (stored.deliver_at_us, stored.expires_in_s) == (int(at.timestamp() * 1_000_000), 60)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda topics: topics.create("a", parts=-1), "parts is a number from 0 to"),
        (lambda topics: topics.create("a", parts="2"), "parts is a number"),
        (lambda topics: topics.resize("a", [-1]), "a part is a number"),
        (lambda topics: topics.resize("a", [1], bounds=[70_000]), "a first slot is a number from 0 to 65535"),
        (lambda topics: topics.resize("a", [1], groups=[-1]), "a group is a number"),
        (lambda topics: topics.set_channel("a", "c", max_attempts=-1), "max_attempts is a number"),
        (lambda topics: topics.set_channel("a", "c", timeout_s=-1), "timeout_s is from 0"),
        (lambda topics: topics.set_channel("a", "c", timeout_s=1e9), "timeout_s is from 0"),
        (lambda topics: topics.dead_letters("a", "c", limit=-1), "limit is a number"),
        (lambda topics: topics.seek("a", "c", {1: -1}), "an offset is a number"),
    ],
)
async def test_arguments_of_changes(call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        await call(Topics(cast(TopicContext, None)))


def test_who_uses_a_topic_that_goes_into_the_bin_is_told_how_it_comes_back() -> None:
    there = TopicMap("orders", 1, 2, Lineage([Part(1, 0, SLOTS, 0)]))
    assert "`pixiu topic restore orders`" in TopicMap("orders", 1, 3, there.lineage, deleted_at_ms=5).gone_text()
    assert "restore" not in TopicMap("orders", 2, 3, there.lineage).gone_text()
