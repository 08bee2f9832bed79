"""Durable topics as NSQ's clients use them: made when they are first named, written message by message.

Source: docs/nsq.md, "What is what".
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

from cluster.nsq.frames import EPHEMERAL
from nsqdoor.options import Options
from nsqdoor.protocol.commands import Refused
from nsqdoor.protocol.events import Publish, Subscribe
from nsqdoor.protocol.extended import Headers
from pixiu.client.client import Client
from pixiu.client.topics.drafts import TopicSendOptions
from pixiu.client.topics.durable_topic import DurableTopic
from pixiu.client.topics.reading.member import ChannelMember
from pixiu.client.topics.writing.writer_shell import TopicReceipt
from pixiu.errors import (
    InvalidArgument,
    LimitError,
    NotAllowed,
    NotAuthenticated,
    PixiuError,
    RecordTooLarge,
    TopicExists,
    UnknownTopic,
)

MAX_KNOWN: Final = 10_000
"""Topics that are remembered to be there. Policy: the one that was used longest ago is looked up again."""
EPHEMERAL_CHANNEL: Final = ".ephemeral"
"""End of a channel's name instead of `#ephemeral`, which is no name of a channel."""


class Topics:
    """The topics of one login."""

    def __init__(self, px: Client) -> None:
        self._px = px
        self._known: OrderedDict[str, DurableTopic] = OrderedDict()

    def knows(self, topic: str) -> bool:
        """True if the topic was there lately."""
        return topic in self._known

    def forget(self, topic: str) -> None:
        """Look a topic up before its next use."""
        self._known.pop(topic, None)

    async def ensure(self, topic: str, options: Options) -> None:
        """Find a topic, or make it. Raises `UnknownTopic`, `NotAllowed`, `Unavailable`, `InvalidArgument`."""
        if topic.endswith(EPHEMERAL):
            raise InvalidArgument("there are no ephemeral topics: what is published is stored")
        try:
            await self._px.topics.describe(topic)
        except UnknownTopic:
            if not options.creates(topic):
                raise
            try:
                await self._px.topics.create(topic, parts=options.parts, retain_acknowledged=True)
            except TopicExists:
                pass
        self._known[topic] = self._px.durable_topic(topic)
        self._known.move_to_end(topic)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def send(self, found: Publish) -> list[TopicReceipt]:
        """Hand messages to the writer of their topic. Raises `Overloaded`, `RecordTooLarge`, `InvalidArgument`. If it raises for
        one of several with headers of their own, those before it are sent."""
        topic = self._known.get(found.topic) or self._px.durable_topic(found.topic)
        at = time.time_ns() // 1000 + found.delay_ms * 1000 if found.delay_ms else None
        if len(found.headers) == 1:
            return topic.send_many_soon(found.bodies, **options_of(found.headers[0], at))
        return [topic.send_soon(body, **options_of(own, at)) for body, own in zip(found.bodies, found.headers, strict=True)]

    async def join(self, found: Subscribe, options: Options) -> ChannelMember:
        """Open a member of a channel, without credit. Raises what `ensure` raises."""
        await self.ensure(found.topic, options)
        described = await self._px.topics.describe(found.topic)
        name = channel_name(found.channel)
        # As with nsqd: the first channel gets what was published before it, and each further one what comes from now on.
        from_end = bool(described.channels) or found.channel.endswith(EPHEMERAL)
        member = self._px.durable_topic(found.topic).channel(
            name, credit=0, tag=found.tag, filter=found.filter or "", load_test=options.load_test, from_end=from_end,
            max_attempts=options.max_attempts,
        )  # fmt: skip
        return await member.open()

    async def make_channel(self, topic: str, channel: str, options: Options) -> None:
        """Make a channel if it is missing, as `join` does. Raises what `ensure` raises."""
        await self.ensure(topic, options)
        described = await self._px.topics.describe(topic)
        if channel not in described.channels:
            await self._px.topics.set_channel(topic, channel, from_end=bool(described.channels), max_attempts=options.max_attempts)

    async def leave(self, found: Subscribe) -> None:
        """Remove an ephemeral channel that nobody reads any more. Raises `PixiuError`."""
        if not found.channel.endswith(EPHEMERAL):
            return
        name = channel_name(found.channel)
        if not any(part.members for part in await self._px.topics.channel_state(found.topic, name)):
            await self._px.topics.remove_channel(found.topic, name)


def channel_name(channel: str) -> str:
    """The name of a channel in the cluster."""
    return channel.removesuffix(EPHEMERAL) + EPHEMERAL_CHANNEL if channel.endswith(EPHEMERAL) else channel


def options_of(headers: Headers, deliver_at: int | None) -> TopicSendOptions:
    """Options of a message."""
    found = TopicSendOptions(load_test=headers.load_test)
    if deliver_at is not None:
        found["deliver_at"] = deliver_at
    if headers.values:
        found["headers"] = headers.values
    if headers.tag:
        found["tag"] = headers.tag
    return found


def refused(error: PixiuError, command: str, topic: str, channel: str = "") -> Refused:
    """Convert an error to nsqd's words. The connection ends with it, as with nsqd."""
    if isinstance(error, NotAllowed | NotAuthenticated):
        return Refused("E_UNAUTHORIZED", f'AUTH failed for {command} on "{topic}" "{channel}"')
    if isinstance(error, RecordTooLarge):
        return Refused("E_BAD_MESSAGE", f"{command} message too big: {error}")
    if isinstance(error, UnknownTopic) or (isinstance(error, InvalidArgument) and not isinstance(error, LimitError)):
        return Refused(
            "E_BAD_TOPIC" if isinstance(error, UnknownTopic) or not channel else "E_SUB_FAILED", f"{command} failed {error}"
        )
    kind = command.removesuffix("_EXT")
    return Refused(f"E_{kind}_FAILED", f"{command} failed {error}")
