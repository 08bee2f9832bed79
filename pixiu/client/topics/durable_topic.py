"""A durable topic: a log that many channels and readers read, each at its own pace.

    topic = px.durable_topic("orders")
    await topic.send(b"…", key="customer-7")                # stored on all replicas in sync when it returns
    async with topic.writer() as writer: …                  # many, without waiting for each
    async with topic.channel("billing") as messages: …      # shared work, each message until it is acknowledged
    async with topic.reader(start="earliest") as reader: …  # everything, and nothing is kept of it

Source: docs/topics.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Unpack

from pixiu.client.messages.load_test import LoadTest, check_load_test
from pixiu.client.send.early import EarlySends
from pixiu.client.timeouts import within
from pixiu.client.topics.drafts import TopicDraft, TopicSendOptions, check_count, check_name, check_seconds, draft, drafts, tag_of
from pixiu.client.topics.reading.last import last
from pixiu.client.topics.reading.member import MAX_CREDIT, ChannelMember, Joining
from pixiu.client.topics.reading.reader import Start, TopicGap, TopicReader
from pixiu.client.topics.reading.received import TopicMessage
from pixiu.client.topics.surroundings import TopicContext
from pixiu.client.topics.topic_admin import Filter, TopicInfo, Topics, filter_of
from pixiu.client.topics.topic_directory import TopicDirectory
from pixiu.client.topics.writing.writer import NO_NAME, TopicWriter, check_space, open_shell
from pixiu.client.topics.writing.writer_shell import TopicReceipt, WriterShell
from pixiu.errors import InvalidArgument, NotSent, OutcomeUnknown, PixiuError, UnknownTopic
from pixiu.wire.v1 import topic_pb2

LOAD_TESTS: Final = {
    "block": topic_pb2.LOAD_TEST_BLOCK,
    "pass": topic_pb2.LOAD_TEST_PASS,
    "only": topic_pb2.LOAD_TEST_ONLY,
}
DEFAULT_CREDIT: Final = 64


class TopicClient:
    """Durable topics of a client: their directory, and one writer without a name for each topic.

    Args:
        around: the client.
    """

    def __init__(self, around: TopicContext) -> None:
        self.around = around
        self.admin = Topics(around)
        self._shells: dict[str, WriterShell] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._early: dict[str, EarlySends] = {}

    async def shell(self, topic: str) -> WriterShell:
        """The client's own writer of a topic. Raises `UnknownTopic`, `NotAllowed`, `Unavailable`."""
        found = self.usable(topic)
        if found is None:
            async with self._opening.setdefault(topic, asyncio.Lock()):
                found = self.usable(topic)
                if found is None:
                    old = self._shells.pop(topic, None)
                    if old is not None:
                        await old.close()
                    found = self._shells[topic] = await open_shell(self.around, topic)
        return found

    def usable(self, topic: str) -> WriterShell | None:
        """The client's own writer of a topic, if it is open and did not fail."""
        found = self._shells.get(topic)
        return None if found is None or found.closed or found.core.failed is not None else found

    def early(self, topic: str) -> EarlySends:
        """Sends that wait until the topic is found."""
        found = self._early.get(topic)
        if found is None:
            found = self._early[topic] = EarlySends(self.around.options, self.around.reports)
        return found

    async def finished(self) -> None:
        """Wait until everything that was sent is resolved."""
        for early in self._early.values():
            await early.idle()
        for user in list(self.around.users):
            if isinstance(user, WriterShell):
                await user.finished()

    async def close(self) -> None:
        """End writers, members and readers."""
        for early in self._early.values():
            await early.close()
        await asyncio.gather(*(user.close() for user in list(self.around.users)))
        await self.around.directory.close()

    @property
    def directory(self) -> TopicDirectory:
        """Knows where topics are."""
        return self.around.directory


class DurableTopic:
    """A topic. Cheap: make one for each use, or keep it."""

    __slots__ = ("_client", "name")

    def __init__(self, client: TopicClient, name: str) -> None:
        self._client = client
        self.name = check_name(name)
        """The topic's name."""

    async def send(self, body: bytes, *, timeout_s: float | None = None, **options: Unpack[TopicSendOptions]) -> TopicReceipt:
        """Store a message, and wait until that is confirmed at its level. `receipt.position` is its place, (part, offset).

        Args:
            body: bytes; with key and headers at most 1 MiB.
            timeout_s: time limit, seconds; None: the option `topic_timeout_s`.
            key: messages with the same key stay in order.
            headers, slot, event_time, deliver_at, expires_in_s, tag, load_test, level: see `TopicSendOptions`.

        A message is sent again, under the same position, until its time is over; so it is stored once, whatever dies meanwhile.
        Raises `OutcomeUnknown` when nobody confirmed it in time, `NotSent` when no leader took it, `UnknownTopic` when there is no
        such topic, `NotAllowed`, and `InvalidArgument` or `RecordTooLarge` for a message that cannot be sent.
        """
        check_seconds(timeout_s, "timeout_s")
        found = draft(body, **options)
        if found.progress:
            raise InvalidArgument(NO_NAME)
        receipt = TopicReceipt(found)
        receipt.watched = True

        def late() -> PixiuError:
            if not receipt.message_id:
                return NotSent(f"the message was not sent within {timeout_s:g} s: the topic was not found, or there was no space")
            return OutcomeUnknown(f"the message was not confirmed within {timeout_s:g} s: it may still be")

        async with within(timeout_s, late):
            await self._client.early(self.name).idle()
            await (await self._client.shell(self.name)).send_in_turn(found, receipt)
            await receipt
        return receipt

    def send_soon(self, body: bytes, **options: Unpack[TopicSendOptions]) -> TopicReceipt:
        """Store a message without waiting; await the receipt for the confirmation. Arguments as for `send`.

        Raises `Overloaded` when too much is unconfirmed (`queue_records`, `queue_bytes`): use `writer()`, which waits for space.
        """
        found = draft(body, **options)
        if found.progress:
            raise InvalidArgument(NO_NAME)
        receipt, shell, early = TopicReceipt(found), self._client.usable(self.name), self._client.early(self.name)
        if shell is not None and not early.items:
            check_space(shell, receipt.size)
            shell.offer(found, receipt)
        else:

            async def in_turn() -> None:
                await (await self._client.shell(self.name)).send_in_turn(found, receipt)

            early.put(in_turn, receipt, receipt.size)
        return receipt

    def send_many_soon(self, bodies: Sequence[bytes], **options: Unpack[TopicSendOptions]) -> list[TopicReceipt]:
        """Store messages with the same options without waiting, in order and next to each other: cheaper than `send_soon` for each.
        Await the receipts for the confirmations. Arguments as for `send`.

        Raises as `send_soon`; then none of them is sent.
        """
        found = drafts(bodies, **options)
        if found and found[0].progress:
            raise InvalidArgument(NO_NAME)
        receipts, shell, early = (
            [TopicReceipt(each) for each in found],
            self._client.usable(self.name),
            self._client.early(self.name),
        )
        size = sum(each.size for each in receipts)
        if shell is not None and not early.items:
            check_space(shell, size)
            if found:
                shell.offer_all(found, receipts)
            return receipts
        early.check_space(size, len(found))

        async def in_turn(each: TopicDraft, receipt: TopicReceipt) -> None:
            await (await self._client.shell(self.name)).send_in_turn(each, receipt)

        for each, receipt in zip(found, receipts, strict=True):
            early.put(partial(in_turn, each, receipt), receipt, receipt.size)
        return receipts

    async def send_many(
        self, bodies: Iterable[bytes], *, timeout_s: float | None = None, **options: Unpack[TopicSendOptions]
    ) -> list[TopicReceipt]:
        """Store messages in order, and wait until all are confirmed or have failed. Arguments as for `send`.

        Raises the error of the first message that failed; the others are still sent.
        """
        async with self.writer() as writer:
            receipts = [await writer.send(body, **options) for body in bodies]
            await writer.wait_finished(timeout_s=timeout_s)
        return receipts

    def writer(self, name: str = "") -> TopicWriter:
        """A writer that sends without waiting for each message: `async with topic.writer() as writer: await writer.send(b"…")`.

        Args:
            name: of a writer whose positions and `progress` the topic keeps, for 30 days after its last message: a program that
                starts again goes on after `writer.progress` and stores nothing twice. One process at a time uses a name.
        """
        return TopicWriter(self._client.around, self.name, name, lambda: self._client.shell(self.name))

    def channel(
        self,
        channel: str,
        *,
        credit: int = DEFAULT_CREDIT,
        credit_bytes: int = 0,
        tag: str = "",
        filter: Filter = "",
        load_test: LoadTest = "block",
        create: bool = True,
        ordered: bool | None = None,
        from_end: bool = False,
        max_attempts: int = 0,
        timeout_s: float = 0.0,
    ) -> ChannelMember:
        """A member of a channel: `async with topic.channel("billing") as messages: async for message in messages: …`.

        Every channel gets everything, from its beginning on; its members share the work. A message is the member's until it is
        acknowledged; it goes to another one after the channel's time-out, and when the member leaves.

        Args:
            credit: messages that this member may have unreported, 0 to 10,000. Each of the topic's groups gives at least one. 0:
                nothing comes until `set_credit`.
            credit_bytes: bytes of unreported messages above which the member receives no more; 0: no bound. What it is given
                meanwhile waits at the servers, for the channel's time-out.
            tag: gets messages with this tag; empty: those without one, and those for which there is no member with their tag.
            filter: of the channel; if it is there already, it must be this one or not be given.
            load_test: "block": messages of load tests count as acknowledged; "pass": they come, too; "only": nothing else comes.
            create: make the channel if it is missing, with the arguments after this one; they do not change one that is there.
            ordered: True: the messages of a key, or slot, come one batch after the other. None: as the channel is; False if it is
                made now.
            from_end: begin with what is stored from now on; False: with everything that is kept.
            max_attempts: deliveries before a message goes to the dead letters; 0: the cluster's default.
            timeout_s: time for which a member may keep a message; 0: the cluster's default.
        """
        check_name(channel, "channel")
        check_count(credit, "credit", MAX_CREDIT)
        check_count(credit_bytes, "credit_bytes")
        text = filter_of(filter)
        if tag != "":
            tag_of(tag)

        async def prepare() -> int:
            topic = await self._client.directory.describe(self.name)
            known = topic.channels.get(channel)
            if known is None and not create:
                raise UnknownTopic(
                    f"the topic {self.name} has no channel {channel!r}: `await px.topics.set_channel({self.name!r}, {channel!r})`, "
                    "or create=True"
                )
            if known is None:
                made = await self._client.admin.set_channel(
                    self.name, channel, ordered=bool(ordered), from_end=from_end, max_attempts=max_attempts, timeout_s=timeout_s,
                    filter=text,
                )  # fmt: skip
                return made.version
            if ordered is not None and known.ordered is not ordered:
                mode = "ordered" if known.ordered else "any"
                raise InvalidArgument(f"the channel {channel} of {self.name} has the mode {mode}, which cannot be changed")
            return topic.version

        joining = Joining(self.name, channel, credit, tag, text, load_test_of(load_test), credit_bytes)
        return ChannelMember(self._client.around, joining, prepare)

    def reader(
        self,
        start: Start = "earliest",
        *,
        slots: Iterable[int] | None = None,
        on_gap: Callable[[TopicGap], None] | None = None,
        load_test: LoadTest = "block",
    ) -> TopicReader:
        """A reader: `async with topic.reader(start="latest") as reader: async for message in reader: …`. The cluster keeps nothing
        of it; `reader.position` is where another one goes on.

        Args:
            start: "earliest", "latest", a datetime or Unix µs (the first block stored then or later), or a position.
            slots: logical partitions to read, 0 to 65535; None: all.
            on_gap: called with a `TopicGap` for messages that are missing; it runs in the event loop and must not block.
            load_test: "block": messages of load tests do not come; "pass": they do; "only": nothing else does.
        """
        return TopicReader(self._client.around, self.name, start, slots, on_gap, load_test_of(load_test))

    async def last(self, key: str | bytes, *, slot: int | None = None) -> TopicMessage | None:
        """Read the last message of a key, in a topic that is compacted; None: there is none, or the key was deleted by a message
        without a body.

        Args:
            key: of the message.
            slot: that of its messages, if their writers named one.

        Raises `InvalidArgument` if the topic is not compacted.
        """
        return await last(self._client.around, self.name, key, slot)

    async def describe(self) -> TopicInfo:
        """Describe the topic: its parts, channels and settings. Raises `UnknownTopic`."""
        return await self._client.admin.describe(self.name)


def load_test_of(load_test: str) -> int:
    """Look up a treatment of load tests. Raises `InvalidArgument`."""
    return LOAD_TESTS[check_load_test(load_test)]
