"""What `pixiu topic …` says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID
from pixiu.wire.block import INDEX, Message, encode_message
from pixiu.wire.v1 import topic_pb2
from tools.cli.output import visible
from tools.topics import calls, tables
from tools.topics.calls import TopicCluster
from tools.topics.channels import SHOWN_BYTES, dead_text, line_in, moved_text
from tools.topics.command import none_text
from tools.topics.values import bytes_of, duration_text, moment_of, seconds_of, timeout_ms_of


def dead(message: Message | None) -> topic_pb2.DeadMessage:
    """A dead letter, as a leader sends it."""
    found = topic_pb2.Delivery(part=3, base=41, time_us=1_000_000, sender=7)
    if message is not None:
        made = encode_message(message)
        found.data, found.index = made.data, INDEX.pack(len(made.data), made.slot, made.flags, 0)
    return topic_pb2.DeadMessage(part=3, attempts=16, reason="no\x1b way", at_us=2_000_000, message=found)


def test_a_dead_letter_is_shown_as_it_was_written() -> None:
    letter = dead(Message("größer\n".encode(), 9, b"key\x1b", [("site", b"eu")], event_at_us=5, tag="tag"))
    where, attempts, reason, when, key, body = dead_text("t", letter).split("\t")
    assert (where, attempts, when) == ("3:41", "16 attempts", "1970-01-01T00:00:02+00:00")
    assert (reason, key, body) == (visible("no\x1b way"), visible("key\x1b"), visible("größer\n"))
    line = line_in("t", letter)
    assert line is not None
    assert line.text().split("\t") == ["3:41", "1970-01-01T00:00:01.000000Z", key, body], "as `read` and `tail` show it"
    assert line.json()["headers"] == {"site": "eu"}
    assert dead_text("t", dead(Message(b"x" * 500, 9))).endswith(f"\t-\t{'x' * SHOWN_BYTES}…")
    assert dead_text("t", dead(None)).endswith("\t(cannot be read)")


@pytest.mark.parametrize(
    ("milliseconds", "most", "text"),
    [
        (604_800_000, 4, "7 days"), (60_000, 4, "1 minute"), (90_061_000, 4, "1 day 1 hour 1 minute 1 second"),
        (1_500, 4, "1 second 500 ms"),
        (90_061_500, 2, "1 day 1 hour"), (12, 2, "12 ms"), (0, 4, "0 seconds"),
    ],
)  # fmt: skip
def test_a_time_is_said_in_units_of_people(milliseconds: int, most: int, text: str) -> None:
    assert duration_text(milliseconds, most) == text


def test_values_are_exact_up_to_their_bounds() -> None:
    assert (seconds_of("0"), seconds_of("1.5h"), seconds_of("1000ms")) == (0, 5_400, 1)
    assert (timeout_ms_of("0"), timeout_ms_of("100ms"), timeout_ms_of("24h")) == (0, 100, 86_400_000)
    assert (bytes_of("1.5kb"), bytes_of(str(MAX_ID))) == (1_500, MAX_ID)
    settings = topic_pb2.TopicSettings(retention_s=seconds_of("106751991d"), retention_bytes=bytes_of("8388607TiB"))
    assert settings.retention_s == 106_751_991 * 86_400
    for text in ("99ms", "24.1h"):
        with pytest.raises(InvalidArgument):
            timeout_ms_of(text)


def test_a_moment_is_not_before_1970() -> None:
    assert moment_of("100s", 100.0) == 0
    assert moment_of("1970-01-01T00:00:01+00:00", 0.0) == 1_000_000
    for text in ("101s", "99999999999999d", "1969-12-31"):
        with pytest.raises(InvalidArgument):
            moment_of(text, 100.0)


def test_a_table_shows_the_beginning_of_a_long_filter() -> None:
    long = topic_pb2.TopicChannel(name="c", filter='key == "' + "x" * 4_000 + '"')
    shown = tables.Shown(topic_pb2.TopicDescription(channels=[long]), {}, [], {})
    (cell,) = tables.channel_table(shown).columns[-1].cells
    assert (len(str(cell)), str(cell)[-1]) == (60, "…")
    assert tables.shown_json(shown)["channels"][0]["filter"] == long.filter


def test_a_topic_is_kept_for_days() -> None:
    topic = topic_pb2.TopicDescription(settings=topic_pb2.TopicSettings(retention_s=604_800))
    assert tables.settings_text(topic) == "kept 7 days"


def test_a_reason_is_said_once_for_all_parts() -> None:
    parts = [topic_pb2.ChannelPart(channel="c", part=number, stuck=["no member is here"]) for number in (3, 1, 2, 7)]
    shown = tables.Shown(topic_pb2.TopicDescription(), {}, [*parts, topic_pb2.ChannelPart(channel="d", part=1, stuck=["x"])], {})
    assert shown.stuck() == ["c, parts 1-3, 7: no member is here", "d, part 1: x"]


def test_what_cannot_be_uploaded_is_said_with_its_size_and_reason() -> None:
    away = [topic_pb2.TopicStore(url="s3://b", end=5, waiting_bytes=1_000, oldest_ms=90_000, problem="503") for _ in range(2)]
    fine = topic_pb2.TopicStore(url="s3://b", end=9)
    sizes = {1: tables.Size(0, 9, away[0]), 2: tables.Size(0, 9, fine), 3: tables.Size(0, 9, away[1]), 4: tables.Size(0, 9)}
    parts = [topic_pb2.TopicPart(number=number, high=1) for number in sizes]
    shown = tables.Shown(topic_pb2.TopicDescription(parts=parts), sizes, [], {})
    assert shown.stuck() == ["parts 1, 3: 2,000 bytes wait for the object store: 503"]
    stored = [part.get("store", {}).get("end") for part in tables.shown_json(shown)["parts"]]
    assert stored == [5, 9, 5, None]
    assert len(tables.part_table(shown).columns) == len(tables.part_table(tables.Shown(shown.topic, {}, [], {})).columns) + 2
    assert tables.settings_text(topic_pb2.TopicDescription(settings=topic_pb2.TopicSettings(store="/s"))) == (
        "kept for ever, stored in /s"
    )


@pytest.mark.parametrize(
    ("offset", "text"),
    [(3, "; it goes on at 1:3"), (9, "; it goes on at 1:5, its end, and not at 9"), (5, "; it goes on at 1:5")],
)
def test_a_seek_beyond_the_end_says_where_it_went(offset: int, text: str) -> None:
    there = [topic_pb2.ChannelPart(part=1, floor=min(offset, 5), end=5)]
    assert moved_text(topic_pb2.SeekChannel(offset=offset), there) == text
    assert moved_text(topic_pb2.SeekChannel(end=True), there) == ""


def test_a_login_that_sees_no_topic_is_not_told_to_make_one() -> None:
    assert "create" in none_text("", login=False)
    assert "create" not in none_text("a", login=True)


class Busy(TopicCluster):
    """A cluster that takes a change once it was said what it waits for."""

    def __init__(self, said: Callable[[], str]) -> None:
        self._said = said

    async def _ask(
        self, method: str, request: object, name: str, limit_s: float, on_wait: Callable[[str], None] = lambda _why: None
    ) -> Any:  # fmt: skip
        on_wait("no admin leads")
        said = ""
        while "waiting" not in said:
            await asyncio.sleep(0)
            said += self._said()
        assert "no admin leads" in said
        return topic_pb2.TopicDescription(name=name)


def test_a_change_that_takes_long_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(calls, "SILENT_S", 0.0)
    cluster = Busy(lambda: capsys.readouterr().err)
    assert asyncio.run(cluster.change(topic_pb2.TopicChange(name="orders"))).name == "orders"
