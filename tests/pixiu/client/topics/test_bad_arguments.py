"""Wrong arguments of durable topics are refused before anything is sent, by a text that says what is right."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from pixiu.client.topics.drafts import draft
from pixiu.client.topics.durable_topic import DurableTopic, TopicClient
from pixiu.client.topics.reading.reader_core import slots_of
from pixiu.client.topics.surroundings import TopicContext
from pixiu.client.topics.topic_admin import Topics, differing
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import SLOTS, Lineage, Part
from pixiu.wire.block import join, parse
from pixiu.wire.v1 import topic_pb2


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
        ({"key": "\ud800"}, "a key has half a character at 0"),
        ({"tag": "\ud800"}, "a tag has half a character at 0"),
        ({"tag": b"x"}, "a tag is text, not bytes"),
        ({"tag": 3}, "a tag is text, not int"),
        ({"tag": "t" * 101}, "a tag has 1 to 100 bytes, this one 101"),
        ({"headers": {"\ud800": "a"}}, "a header's name has half a character"),
        ({"headers": {"a": "x\ud800"}}, "the header 'a' has half a character at 1"),
        ({"headers": {b"a": "a"}}, "the header b'a': a name is text, not bytes"),
        ({"event_time": datetime.min.replace(tzinfo=UTC)}, "a time is from 1970 on"),
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
        (lambda topics: topics.seek("a", "c", datetime.min.replace(tzinfo=UTC)), "a time is from 1970 on"),
        (lambda topics: topics.create("a", retention=5), "retention .* is a timedelta, .* not int"),
        (lambda topics: topics.create("a", retention=timedelta(0)), "retention .* is from a second to"),
        (lambda topics: topics.create("a", compact=timedelta.max), r"compact, .* to 4,294,967,295 seconds \(49,710 days\), not"),
        (lambda topics: topics.create("a", retention_bytes=2**64), "retention_bytes .* is a number from 0"),
        (lambda topics: topics.create("a", messages_per_s=1.5), "messages_per_s .* is a number from 0"),
        (lambda topics: topics.create("a", messages_per_s=2**64), "messages_per_s .* is a number from 0"),
        (lambda topics: topics.create("a", store=5), "a store is text, not int"),
        (lambda topics: topics.create("a", store="/\ud800"), "a store has half a character"),
        (lambda topics: topics.resize("a", 1), "parts is a list"),
        (lambda topics: topics.resize("a", [1], groups=1), "groups is a list"),
        (lambda topics: topics.resend("a", "c", [5]), "letters are what `dead_letters` returned, not 5"),
        (lambda topics: topics.set_channel("a", "c", filter='key=="\ud800"'), "a filter has half a character at 6"),
        (lambda topics: topics.set_channel("a", "c", filter=[{"header": "a", "equal": b"x"}]), "conditions of texts: .*bytes"),
    ],
)
async def test_arguments_of_changes(call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        await call(Topics(cast(TopicContext, None)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda topic: topic.channel("c", tag="t" * 200), "a tag has 1 to 100 bytes, this one 200"),
        (lambda topic: topic.channel("c", tag=5), "a tag is text, not int"),
        (lambda topic: topic.channel("c", filter="\ud800"), "a filter has half a character"),
        (lambda _: slots_of(cast(Any, 5)), "slots is a list"),
    ],
)
def test_arguments_of_members_and_readers(call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        call(DurableTopic(cast(TopicClient, None), "a"))


async def test_a_time_limit_is_a_number() -> None:
    with pytest.raises(InvalidArgument, match="timeout_s is from 0 to 1e\\+09 seconds, not '1'"):
        await DurableTopic(cast(TopicClient, None), "a").send(b"", timeout_s=cast(float, "1"))


def test_a_topic_that_was_there_says_what_of_it_is_not_as_asked_for() -> None:
    there = TopicMap("orders", 1, 2, Lineage([Part(1, 0, SLOTS, 0)]), retention_s=5, store="/mnt/a")
    asked = topic_pb2.CreateTopic(parts=2, settings=topic_pb2.TopicSettings(retention_s=5, compact=60), if_missing=True)
    assert differing(asked, there) == ("compact_s is 0, not 60", "store is '/mnt/a', not ''", "parts is 1, not 2")
    asked = topic_pb2.CreateTopic(settings=topic_pb2.TopicSettings(retention_s=5, store="/mnt/a"), if_missing=True)
    assert differing(asked, there) == ()


def test_who_uses_a_topic_that_goes_into_the_bin_is_told_how_it_comes_back() -> None:
    there = TopicMap("orders", 1, 2, Lineage([Part(1, 0, SLOTS, 0)]))
    assert "`pixiu topic restore orders`" in TopicMap("orders", 1, 3, there.lineage, deleted_at_ms=5).gone_text()
    assert "restore" not in TopicMap("orders", 2, 3, there.lineage).gone_text()
