"""Creating, changing and looking at durable topics and their channels: `px.topics`.

    await px.topics.create("orders", parts=4)
    for topic in await px.topics.list():
        print(topic.name, len(topic.parts))
    for part in await px.topics.channel_state("orders", "billing"):
        print(part.part, part.unacknowledged, part.stuck)

Source: docs/sdk.md, "Durable topics".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from math import ceil
from typing import Any, Final, Literal, NamedTuple

from pixiu.client.topics.described import topic_map
from pixiu.client.topics.drafts import check_count, check_name, check_seconds, duration_of, list_of, micros_of, text_of
from pixiu.client.topics.reading.received import Origin, TopicMessage, spans
from pixiu.client.topics.surroundings import TopicContext, ask_leader
from pixiu.client.topics.topic_map import ChannelInfo, DescribedSettings, TopicMap
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID
from pixiu.objects.manifest import check_url
from pixiu.placement.slots import SLOTS, Part
from pixiu.wire.block import MAX_OFFSET
from pixiu.wire.v1 import topic_pb2

PAGE: Final = 1_000
MAX_OFFSETS: Final = 10_000
"""Offsets in one question."""
MAX_FILTER_BYTES: Final = 4_096
MAX_TIMEOUT_S: Final = 4e6
"""Longest time-out of a channel that a request can name, seconds; the cluster allows less."""
FIELD_NAMES: Final = {"compact_s": "compact"}
"""Settings that have another name on the wire."""
Filter = str | Mapping[str, Any] | Sequence[Any]
"""A filter: an expression or JSON, or what is encoded to JSON."""


@dataclass(frozen=True, slots=True)
class TopicInfo(DescribedSettings):
    """A topic as described."""

    name: str
    id: int
    version: int
    """Rises with every change."""
    parts: tuple[Part, ...]
    """By number; sealed ones are kept until retention drops them."""
    channels: Mapping[str, ChannelInfo]
    deleted_at_ms: int
    """Unix ms; 0: it is not deleted."""
    differs: tuple[str, ...] = ()
    """After `create(…, if_missing=True)` of a topic that was there: what of it is not as asked for, in words."""

    @property
    def open_parts(self) -> tuple[Part, ...]:
        """The parts that take messages."""
        return tuple(part for part in self.parts if not part.sealed)


class MemberInfo(NamedTuple):
    """A member of a channel, at one leader."""

    name: str
    tag: str
    credit: int
    having: int
    """Messages that it has not reported."""


class ChannelPartInfo(NamedTuple):
    """A channel in one part."""

    channel: str
    part: int
    floor: int
    """Everything below this offset is acknowledged."""
    end: int
    unacknowledged: int
    with_members: int
    waiting: int
    """For another delivery."""
    dead: int
    lost: int
    """Dropped by retention, or unreadable, before they were acknowledged."""
    oldest_us: int
    """Time at which the oldest unacknowledged message was stored, Unix µs; 0: none."""
    members: tuple[MemberInfo, ...]
    stuck: tuple[str, ...]
    """Why messages wait, in words."""
    filter_errors: int = 0
    """Messages for which the filter's expression had no value since the leader began; they did not match."""


class DeadMessage(NamedTuple):
    """A message whose attempts are used up."""

    part: int
    offset: int
    attempts: int
    reason: str
    at_us: int
    """Time at which it was given up, Unix µs."""
    message: TopicMessage | None
    """None: it can no longer be read."""


class Topics:
    """The cluster's durable topics: `px.topics`. Changes are in effect when the call returns.

    Every method raises `NotAllowed`, `Unavailable` and `NotServed` (a cluster without topics), and those of a topic `UnknownTopic`.
    """

    def __init__(self, around: TopicContext) -> None:
        self._around = around

    @property
    def context(self) -> TopicContext:
        """The parts of the client that its calls use, for commands that show the cluster's own messages."""
        return self._around

    async def create(
        self,
        name: str,
        *,
        parts: int = 0,
        retention: timedelta | None = None,
        retention_bytes: int = 0,
        messages_per_s: int = 0,
        bytes_per_s: int = 0,
        read_messages_per_s: int = 0,
        read_bytes_per_s: int = 0,
        retain_acknowledged: bool = False,
        compact: timedelta | None = None,
        store: str = "",
        if_missing: bool = False,
    ) -> TopicInfo:
        """Create a topic.

        Args:
            name: 1 to 128 characters of A-Z a-z 0-9 . _ -
            parts: parallel logs at the beginning; 0: one for each group.
            retention: age after which messages may be dropped; None: never.
            retention_bytes: size of a part above which its oldest messages may be dropped; 0: no limit.
            messages_per_s, bytes_per_s: what the topic takes, from all writers together; each part has the share of it that it has
                of the slots. Writers wait for it. 0: no limit.
            read_messages_per_s, read_bytes_per_s: what the topic gives, to all members and readers together, shared likewise. 0: no
                limit.
            retain_acknowledged: drop what all channels have acknowledged, also before it has its age or size; while there is no
                channel, nothing goes for this.
            compact: keep the last message of each key; a message with a key and no body deletes the key, and is kept for this time.
                None: keep all. It cannot be given later, nor together with a store.
            store: object store where closed segments go: an absolute folder, or a URL such as s3://bucket/folder; "": as the
                servers are configured.
            if_missing: return a topic that is there, instead of raising `TopicExists`. It stays as it is; `differs` of the answer
                says what of it is not as asked for.
        """
        settings = _settings(
            retention,
            retention_bytes,
            messages_per_s,
            bytes_per_s,
            read_messages_per_s,
            read_bytes_per_s,
            retain_acknowledged,
            compact,
            store,
        )
        create = topic_pb2.CreateTopic(parts=check_count(parts, "parts"), settings=settings, if_missing=if_missing)
        made = await self._around.directory.change(topic_pb2.TopicChange(name=check_name(name), create=create))
        return replace(info_of(made), differs=differing(create, made))

    async def describe(self, name: str) -> TopicInfo:
        """Describe a topic: its parts, channels and settings."""
        return info_of(await self._around.directory.describe(check_name(name)))

    async def list(self, prefix: str = "", *, deleted: bool = False) -> list[TopicInfo]:
        """List all topics whose names begin with `prefix`, by name. `deleted`: also those in the bin."""
        found: list[TopicInfo] = []
        after = ""
        while True:
            request = topic_pb2.ListTopicsRequest(prefix=prefix, after=after, limit=PAGE, deleted=deleted)
            reply = await self._around.directory.list(request)
            found += [info_of(topic_map(each)) for each in reply.topics]
            if not reply.more or not reply.topics:
                return found
            after = reply.topics[-1].name

    async def alter(
        self,
        name: str,
        *,
        retention: timedelta | None = None,
        retention_bytes: int = 0,
        messages_per_s: int = 0,
        bytes_per_s: int = 0,
        read_messages_per_s: int = 0,
        read_bytes_per_s: int = 0,
        retain_acknowledged: bool = False,
        compact: timedelta | None = None,
        store: str = "",
    ) -> TopicInfo:
        """Set a topic's retention, rates and store; arguments as for `create`. All of them are set; of a topic that is compacted
        `compact` has to be given, too. What is in another store stays there, and is read from there."""
        settings = _settings(
            retention,
            retention_bytes,
            messages_per_s,
            bytes_per_s,
            read_messages_per_s,
            read_bytes_per_s,
            retain_acknowledged,
            compact,
            store,
        )
        return await self._change(topic_pb2.TopicChange(name=check_name(name), alter=settings))

    async def delete(self, name: str, *, force: bool = False, now: bool = False) -> TopicInfo:
        """Delete a topic: it takes and gives nothing any more, and is dropped after 24 hours, in which `restore` brings it back.

        Args:
            force: although channels have members.
            now: drop it at once.
        """
        return await self._change(topic_pb2.TopicChange(name=check_name(name), delete=topic_pb2.DeleteTopic(force=force, now=now)))

    async def restore(self, name: str) -> TopicInfo:
        """Bring a deleted topic back."""
        return await self._change(topic_pb2.TopicChange(name=check_name(name), restore=topic_pb2.RestoreTopic()))

    async def resize(self, name: str, parts: Iterable[int], *, bounds: Iterable[int] = (), groups: Iterable[int] = ()) -> TopicInfo:
        """Seal parts and open others for their slots: split, merge or move them. Order of each key holds.

        Args:
            parts: numbers of open parts; adjoining ones, if they are merged.
            bounds: first slots of the new parts after the first one; none: one new part.
            groups: of the new parts; none: chosen by load.
        """
        resize = topic_pb2.ResizeTopic(
            parts=[check_count(each, "a part") for each in list_of(parts, "parts")],
            bounds=[check_count(each, "a first slot", SLOTS - 1) for each in list_of(bounds, "bounds")],
            groups=[check_count(each, "a group") for each in list_of(groups, "groups")],
        )
        return await self._change(topic_pb2.TopicChange(name=check_name(name), resize=resize))

    async def set_channel(
        self,
        name: str,
        channel: str,
        *,
        ordered: bool = False,
        from_end: bool = False,
        max_attempts: int = 0,
        timeout_s: float = 0.0,
        filter: Filter = "",
    ) -> TopicInfo:
        """Create a channel, or change the attempts, time-out and filter of one that is there. Raises `InvalidArgument` if that
        one was made without `ordered` or `from_end`, and it is asked for.

        Args:
            ordered: the messages of a key, or slot, come one batch after the other.
            from_end: begin with what is stored from now on; False: with everything that is kept.
            max_attempts: deliveries of a message before it goes to the dead letters; 0: the cluster's default.
            timeout_s: time for which a member may keep a message; 0: the cluster's default.
            filter: which messages the channel gets: an expression such as `headers["region"] == "eu"`, or conditions; empty: all.
        """
        check_seconds(timeout_s, "timeout_s", MAX_TIMEOUT_S)
        wanted = topic_pb2.TopicChannel(
            name=check_name(channel, "channel"), ordered=ordered, from_end=from_end,
            max_attempts=check_count(max_attempts, "max_attempts"), timeout_ms=ceil(timeout_s * 1000), filter=filter_of(filter),
        )  # fmt: skip
        return await self._change(topic_pb2.TopicChange(name=check_name(name), set_channel=wanted))

    async def remove_channel(self, name: str, channel: str) -> TopicInfo:
        """Remove a channel with everything that it knows."""
        return await self._change(topic_pb2.TopicChange(name=check_name(name), remove_channel=check_name(channel, "channel")))

    async def _change(self, change: topic_pb2.TopicChange) -> TopicInfo:
        return info_of(await self._around.directory.change(change))

    # --- channels, at the leaders of all groups

    async def channel_state(self, name: str, channel: str = "") -> Sequence[ChannelPartInfo]:
        """The state of a channel, or of all, in each part."""
        replies = await self._ask(name, topic_pb2.ChannelRequest(topic=name, channel=channel, state=True))
        return sorted(_channel_part(each) for reply in replies for each in reply.parts)

    async def acknowledged(self, name: str, channel: str, positions: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Ask which positions (part, offset) are acknowledged, or of a part that is gone: the channel never delivers these again,
        unless it is moved (`seek`). The channel has to exist."""
        asked: dict[int, list[int]] = {}
        for part, offset in sorted(set(positions)):
            asked.setdefault(part, []).append(offset)
        found = set[tuple[int, int]]()
        topic = await self._around.directory.describe(check_name(name))
        for part, offsets in asked.items():
            if part not in topic.lineage.parts:
                found.update((part, offset) for offset in offsets)
                continue
            for at in range(0, len(offsets), MAX_OFFSETS):
                wanted = topic_pb2.AcknowledgedOffsets(offsets=offsets[at : at + MAX_OFFSETS])
                request = topic_pb2.ChannelRequest(topic=name, channel=channel, parts=[part], acknowledged=wanted)
                replies = await self._ask(name, request)
                found.update((part, offset) for reply in replies for offset in reply.acknowledged)
        return found

    async def dead_letters(self, name: str, channel: str, *, limit: int = 100) -> Sequence[DeadMessage]:
        """Messages of a channel whose attempts are used up, at most `limit` of each group."""
        request = topic_pb2.ChannelRequest(
            topic=name, channel=channel, dead=topic_pb2.DeadLettersRequest(limit=check_count(limit, "limit"))
        )
        return sorted(
            (dead_message(name, each) for reply in await self._ask(name, request) for each in reply.dead), key=lambda dead: dead[:2]
        )

    async def resend(self, name: str, channel: str, letters: Iterable[DeadMessage] | None = None) -> int:
        """Deliver dead letters again, with new attempts; None: all. Returns their number."""
        if letters is None:
            replies = await self._ask(name, topic_pb2.ChannelRequest(topic=name, channel=channel, resend=topic_pb2.ResendDead()))
            return sum(reply.changed for reply in replies)
        offsets: dict[int, set[int]] = {}
        for each in list_of(letters, "letters"):
            if not isinstance(each, DeadMessage):
                raise InvalidArgument(f"letters are what `dead_letters` returned, not {each!r}")
            offsets.setdefault(each.part, set()).add(each.offset)
        changed = 0
        for part, wanted in offsets.items():
            resend = topic_pb2.ResendDead(offsets=sorted(wanted))
            request = topic_pb2.ChannelRequest(topic=name, channel=channel, parts=[part], resend=resend)
            changed += sum(reply.changed for reply in await self._ask(name, request))
        return changed

    async def seek(
        self,
        name: str,
        channel: str,
        to: Literal["start", "end"] | datetime | int | Mapping[int, int],
        *,
        force: bool = False,
    ) -> int:
        """Move a channel: it goes on at the start or end of what is kept, at a time, or in each part of {part: offset} there.

        An offset that a part does not keep any more is its first one, and one beyond its end is its end. `force`: although it has
        members. Returns the number of messages that are to be delivered again or are skipped.
        """
        seeks: Sequence[tuple[Sequence[int], topic_pb2.SeekChannel]] = []
        if isinstance(to, Mapping):
            for part, offset in to.items():
                wanted = topic_pb2.SeekChannel(offset=check_count(offset, "an offset", MAX_OFFSET), force=force)
                seeks = [*seeks, ([check_count(part, "a part")], wanted)]
        elif to == "start":
            seeks = [([], topic_pb2.SeekChannel(start=True, force=force))]
        elif to == "end":
            seeks = [([], topic_pb2.SeekChannel(end=True, force=force))]
        elif isinstance(to, datetime | int):
            seeks = [([], topic_pb2.SeekChannel(time_us=micros_of(to) or 0, force=force))]
        else:
            raise InvalidArgument(f'to is "start", "end", a time, or {{part: offset}}, not {to!r}')
        changed = 0
        for parts, seek in seeks:
            request = topic_pb2.ChannelRequest(topic=name, channel=channel, parts=parts, seek=seek)
            changed += sum(reply.changed for reply in await self._ask(name, request))
        await self._ask(name, topic_pb2.ChannelRequest(topic=name, channel=channel, rejoin=True))
        return changed

    async def _ask(self, name: str, request: topic_pb2.ChannelRequest) -> Sequence[topic_pb2.ChannelReply]:
        """Ask the leaders of all groups, or of those that hold the request's parts."""
        topic = await self._around.directory.describe(check_name(name))
        wanted = set(request.parts) or topic.lineage.parts.keys()
        groups = sorted({part.group for number, part in topic.lineage.parts.items() if number in wanted})
        if not groups:
            raise InvalidArgument(f"the topic {name} has no parts {sorted(wanted)}")

        async def call(stub: Any, seconds: float) -> topic_pb2.ChannelReply:
            reply: topic_pb2.ChannelReply = await stub.Channel(request, timeout=seconds, metadata=self._around.channels.metadata())
            return reply

        return tuple(await asyncio.gather(*(ask_leader(self._around, name, group, call) for group in groups)))


def _settings(
    retention: timedelta | None,
    retention_bytes: int,
    messages_per_s: int,
    bytes_per_s: int,
    read_messages_per_s: int,
    read_bytes_per_s: int,
    retain_acknowledged: bool,
    compact: timedelta | None,
    store: str,
) -> topic_pb2.TopicSettings:
    kept = duration_of(compact, "compact, the time for which deleted keys are remembered,", (1 << 32) - 1)
    seconds = duration_of(retention, "retention (None: messages are kept for ever)", MAX_ID // 1_000_000)
    check_count(retention_bytes, "retention_bytes (0: no limit)", MAX_ID)
    rates = {
        "messages_per_s": messages_per_s,
        "bytes_per_s": bytes_per_s,
        "read_messages_per_s": read_messages_per_s,
        "read_bytes_per_s": read_bytes_per_s,
    }
    for name, rate in rates.items():
        check_count(rate, f"{name} (0: no limit)", MAX_ID)
    return topic_pb2.TopicSettings(
        retention_s=seconds, retention_bytes=retention_bytes, retain_acknowledged=retain_acknowledged, compact=kept,
        store=check_url(text_of(store, "a store")), **rates,
    )  # fmt: skip


def filter_of(filter: Filter) -> str:
    """A filter as text. Raises `InvalidArgument`."""
    try:
        text = filter if isinstance(filter, str) else json.dumps(filter, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidArgument(f"a filter is an expression, or a list of conditions of texts: {problem}") from None
    if len(text_of(text, "a filter").encode()) > MAX_FILTER_BYTES:
        raise InvalidArgument(f"a filter has at most {MAX_FILTER_BYTES} bytes, this one {len(text.encode())}")
    return text


def differing(asked: topic_pb2.CreateTopic, topic: TopicMap) -> tuple[str, ...]:
    """Say what of a topic is not as asked for, in words."""
    wanted = {each.name: getattr(asked.settings, FIELD_NAMES.get(each.name, each.name)) for each in fields(DescribedSettings)}
    found = {name: getattr(topic, name) for name in wanted}
    if asked.parts:
        wanted["parts"], found["parts"] = asked.parts, len(topic.lineage.open_parts())
    return tuple(f"{name} is {found[name]!r}, not {value!r}" for name, value in wanted.items() if found[name] != value)


def info_of(topic: TopicMap) -> TopicInfo:
    """The description that users get."""
    settings = {each.name: getattr(topic, each.name) for each in fields(DescribedSettings)}
    return TopicInfo(
        topic.name, topic.id, topic.version, tuple(topic.lineage.parts.values()), topic.channels, topic.deleted_at_ms, **settings
    )


def _channel_part(found: topic_pb2.ChannelPart) -> ChannelPartInfo:
    members = tuple(MemberInfo(each.name, each.tag, each.credit, each.having) for each in found.members)
    return ChannelPartInfo(
        found.channel, found.part, found.floor, found.end, found.unacknowledged, found.with_members, found.waiting, found.dead,
        found.lost, found.oldest_us, members, tuple(found.stuck), found.filter_errors,
    )  # fmt: skip


def dead_message(topic: str, found: topic_pb2.DeadMessage) -> DeadMessage:
    """A dead letter as a leader sends it."""
    sent = found.message
    message = None
    for span in spans(sent.index, data := sent.data):
        message = TopicMessage(Origin(topic, found.part, sent.time_us, sent.sender, sent.writer), sent.base, data, *span)
    return DeadMessage(found.part, sent.base, found.attempts, found.reason, found.at_us, message)
