"""Durable topics for programs without asyncio: the blocking twins of `DurableTopic`, its writer, members and readers, and of
`Topics`.

    with pixiu.connect_sync("127.0.0.1:7002") as px:
        px.durable_topic("orders").send(b"…", key="customer-7")
        with px.durable_topic("orders").channel("billing") as messages:
            for message in messages:
                message.ack()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self

from pixiu.client.sync.blocking import Background, Twin, TwinWriter, blocking, blocking_as, here_as, in_loop_as
from pixiu.client.sync.receipts import TwinReceipt
from pixiu.client.topics.durable_topic import DurableTopic
from pixiu.client.topics.reading.member import ChannelMember, ChannelMessage
from pixiu.client.topics.reading.member_core import MemberCounters
from pixiu.client.topics.reading.reader import TopicReader
from pixiu.client.topics.reading.received import TopicMessage
from pixiu.client.topics.topic_admin import Topics
from pixiu.client.topics.writing.writer import TopicWriter
from pixiu.client.topics.writing.writer_events import TopicCounters
from pixiu.client.topics.writing.writer_shell import TopicReceipt
from pixiu.errors import InvalidArgument, NotConnected
from pixiu.wire.levels import Triple


class SyncTopicReceipt(TwinReceipt[TopicReceipt]):
    """Receipt of a message to a topic: `wait` waits until it is confirmed at its level."""

    __slots__ = ()

    @property
    def position(self) -> tuple[int, int] | None:
        """(part, offset) of the message; None until it is known, and for a repetition whose place is known no more."""
        return self._wrapped.position


def _receipts(background: Background, receipts: list[TopicReceipt]) -> list[SyncTopicReceipt]:
    return [SyncTopicReceipt(background, receipt) for receipt in receipts]


class SyncTopicWriter(TwinWriter[TopicWriter]):
    """`TopicWriter` for a thread: `with topic.writer() as writer: writer.send(b"…", key=…)`."""

    __slots__ = ()
    send = blocking_as(SyncTopicReceipt, TopicWriter.send)
    send_soon = in_loop_as(SyncTopicReceipt, TopicWriter.send_soon)
    send_many = blocking_as(_receipts, TopicWriter.send_many)
    flush = blocking(TopicWriter.flush)
    wait_sent = blocking(TopicWriter.wait_sent)
    wait_finished = blocking(TopicWriter.wait_finished)
    close = blocking(TopicWriter.close)

    @property
    def progress(self) -> int:
        """Progress after which to go on, of a writer with a name; see `TopicWriter.progress`."""
        return self._wrapped.progress

    @property
    def triples(self) -> Mapping[int, Triple]:
        """Group → its state (V, S, C) at its last answer."""
        return self._wrapped.triples

    @property
    def counters(self) -> TopicCounters:
        """Totals of the writer."""
        return self._wrapped.counters

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._background.run(self._wrapped.__aexit__(kind, error, trace))


class SyncChannelMessage(Twin[ChannelMessage]):
    """`ChannelMessage` for threads: any thread may read and acknowledge it."""

    __slots__ = ()
    ack = blocking(ChannelMessage.ack)
    nack = blocking(ChannelMessage.nack)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __repr__(self) -> str:
        return repr(self._wrapped)

    @property
    def message(self) -> ChannelMessage:
        """The message: its fields may be read in any thread."""
        return self._wrapped

    @property
    def body(self) -> bytes:
        """The bytes that the writer sent."""
        return self._wrapped.body

    @property
    def key(self) -> bytes | None:
        """The key; None if it has none."""
        return self._wrapped.key

    @property
    def attempts(self) -> int:
        """Deliveries, this one included: 1 the first time."""
        return self._wrapped.attempts

    def ack_soon(self) -> None:
        """Acknowledge the message without waiting; see `ChannelMessage.ack_soon`."""
        self._soon(self._wrapped.ack_soon)

    def nack_soon(self, delay_s: float = 0.0) -> None:
        """`nack` without waiting."""
        self._soon(lambda: self._wrapped.nack_soon(delay_s))

    def touch(self) -> None:
        """Ask for the channel's whole time-out again, because handling the message takes long."""
        self._soon(self._wrapped.touch)

    def _soon(self, call: Callable[[], None]) -> None:
        def there() -> None:
            with suppress(NotConnected):  # closed meanwhile
                call()

        self._background.call_soon(there)


class SyncChannelMember(Twin[ChannelMember]):
    """`ChannelMember` for a thread: `with topic.channel("billing") as messages: for message in messages`. One thread at a time may
    take messages; any may acknowledge them."""

    def __init__(self, background: Background, member: ChannelMember) -> None:
        super().__init__(background, member)
        self._running = False

    open = blocking(ChannelMember.open)
    flush = blocking(ChannelMember.flush)
    close = blocking(ChannelMember.close)

    @property
    def counters(self) -> MemberCounters:
        """Totals since the member was opened."""
        return self._wrapped.counters

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncChannelMessage:
        if self._running:
            raise InvalidArgument("`run` takes this member's messages: iterate after it has ended, or open another member")
        message = self._background.run_until_end(self._wrapped.next())
        if message is None:
            raise StopIteration
        return SyncChannelMessage(self._background, message)

    def run(
        self,
        handler: Callable[[SyncChannelMessage], None],
        *,
        workers: int = 1,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
    ) -> None:
        """Handle messages until another thread closes the member; arguments as for `ChannelMember.run`. `handler` runs in threads
        of its own, `workers` of them, and may block."""
        if not 1 <= workers <= 1_000:
            raise InvalidArgument(f"workers is from 1 to 1000 threads, not {workers}")
        with ThreadPoolExecutor(workers, "pixiu-topic-handler") as pool:

            async def called(message: ChannelMessage) -> None:
                call = partial(copy_context().run, handler, SyncChannelMessage(self._background, message))
                await asyncio.get_running_loop().run_in_executor(pool, call)

            self._running = True
            try:
                self._background.run(self._wrapped.run(called, workers=workers, backoff_s=backoff_s, max_backoff_s=max_backoff_s))
            finally:
                self._running = False

    def __enter__(self) -> Self:
        self._background.run(self._wrapped.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SyncTopicReader(Twin[TopicReader]):
    """`TopicReader` for a thread: `with topic.reader() as reader: for message in reader`."""

    __slots__ = ()
    close = blocking(TopicReader.close)

    @property
    def position(self) -> dict[str, int]:
        """{part: offset of the next message}: everything before was returned."""
        return self._wrapped.position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TopicMessage:
        message = self._background.run_until_end(self._wrapped.next())
        if message is None:
            raise StopIteration
        return message

    def batches(self) -> Iterator[list[TopicMessage]]:
        """Iterate over messages in lists, each of one part and at most a mebibyte."""
        while (batch := self._background.run_until_end(self._wrapped.next_batch())) is not None:
            yield batch

    def __enter__(self) -> Self:
        self._background.run(self._wrapped.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SyncDurableTopic(Twin[DurableTopic]):
    """`DurableTopic` for threads."""

    __slots__ = ()
    send = blocking_as(SyncTopicReceipt, DurableTopic.send)
    send_soon = in_loop_as(SyncTopicReceipt, DurableTopic.send_soon)
    send_many_soon = in_loop_as(_receipts, DurableTopic.send_many_soon)
    send_many = blocking_as(_receipts, DurableTopic.send_many)
    writer = here_as(SyncTopicWriter, DurableTopic.writer)
    channel = in_loop_as(SyncChannelMember, DurableTopic.channel)
    reader = in_loop_as(SyncTopicReader, DurableTopic.reader)
    last = blocking(DurableTopic.last)
    describe = blocking(DurableTopic.describe)

    @property
    def name(self) -> str:
        """The topic's name."""
        return self._wrapped.name


class SyncTopics(Twin[Topics]):
    """`Topics` for threads: `px.topics.create("orders")`."""

    __slots__ = ()
    create = blocking(Topics.create)
    describe = blocking(Topics.describe)
    list = blocking(Topics.list)
    alter = blocking(Topics.alter)
    delete = blocking(Topics.delete)
    restore = blocking(Topics.restore)
    resize = blocking(Topics.resize)
    set_channel = blocking(Topics.set_channel)
    remove_channel = blocking(Topics.remove_channel)
    channel_state = blocking(Topics.channel_state)
    dead_letters = blocking(Topics.dead_letters)
    resend = blocking(Topics.resend)
    seek = blocking(Topics.seek)
