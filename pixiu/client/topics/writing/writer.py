"""Writers of durable topics, which send without waiting for each message.

    async with px.durable_topic("orders").writer() as writer:
        for order in orders:
            await writer.send(order.data, key=order.id)     # waits only while the queue is full
                                                            # the end waits until all are confirmed, and raises the first failure

    async with px.durable_topic("rows").writer(name="loader") as writer:
        for number, row in enumerate(rows[writer.progress:], writer.progress + 1):
            await writer.send(row, progress=number)         # a restart goes on after what is stored, and stores nothing twice

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self, Unpack

import xxhash

from pixiu.client.send.base_writer import BaseWriter
from pixiu.client.topics.drafts import TopicDraft, TopicSendOptions, check_name, check_seconds, draft
from pixiu.client.topics.surroundings import TopicContext, ask_leader
from pixiu.client.topics.topic_map import TopicMap
from pixiu.client.topics.writing.resumed import Stored
from pixiu.client.topics.writing.writer_core import WriterCore
from pixiu.client.topics.writing.writer_events import TopicCounters
from pixiu.client.topics.writing.writer_shell import TopicReceipt, WriterShell
from pixiu.errors import InvalidArgument, NotConnected, Overloaded, PixiuError, Unavailable
from pixiu.wire.levels import Triple
from pixiu.wire.v1 import topic_pb2

POSITIONS: Final = 5_000
"""Parts whose positions are asked for at once."""
NO_NAME: Final = "progress is kept for writers with a name: topic.writer(name=…)"


async def open_shell(around: TopicContext, topic: str, name: str = "") -> WriterShell:
    """Describe a topic and make a writer for it; with a name, ask first what it has stored.

    Raises `UnknownTopic`, `NotAllowed`, `Unavailable`.
    """
    shell: WriterShell | None = None

    def on_topic(found: TopicMap) -> None:
        if shell is not None:
            shell.on_topic(found)

    def on_end(error: PixiuError) -> None:
        if shell is not None:
            shell.on_end(error)

    found = await around.directory.follow(topic, on_topic, on_end)
    try:
        writer = xxhash.xxh3_64_intdigest(name.encode()) if name else 1 + secrets.randbits(63)
        epoch = await next_epoch(around, found, writer) if name else 0
        stored = await positions(around, found, writer, epoch) if name else None
    except BaseException:
        around.directory.leave(topic, on_topic)
        raise
    shell = WriterShell(around, topic, WriterCore(around.options, found, writer, around.uniform, stored), on_topic, epoch)
    shell.on_topic(await around.directory.topic(topic))  # it may have changed meanwhile
    around.users.add(shell)
    return shell


async def _ask_positions(
    around: TopicContext, topic: TopicMap, group: int, request: topic_pb2.WriterPositionsRequest
) -> topic_pb2.WriterPositionsReply:  # fmt: skip
    async def call(stub: Any, seconds: float) -> topic_pb2.WriterPositionsReply:
        found: topic_pb2.WriterPositionsReply = await stub.Positions(request, timeout=seconds, metadata=around.channels.metadata())
        return found

    return await ask_leader(around, topic.name, group, call)


async def next_epoch(around: TopicContext, topic: TopicMap, writer: int) -> int:
    """The epoch of a writer that opens now: a time, Unix µs, above all that the groups know of its name. Raises `Unavailable`."""
    request = topic_pb2.WriterPositionsRequest(topic=topic.id, writer=writer)
    groups = {part.group for part in topic.lineage.parts.values()}
    known = [(await _ask_positions(around, topic, group, request)).epoch for group in sorted(groups)]
    return max(time.time_ns() // 1000, *(each + 1 for each in known))


async def positions(around: TopicContext, topic: TopicMap, writer: int, epoch: int = 0) -> dict[int, Stored]:
    """Ask what a writer has stored in each part, and shut out those who have opened it before. Raises `Unavailable`, `StaleWriter`
    when somebody opens it at the same time."""
    found: dict[int, Stored] = {}
    by_group: dict[int, list[int]] = {}
    for part in topic.lineage.parts.values():
        by_group.setdefault(part.group, []).append(part.number)
    for group, parts in by_group.items():
        for at in range(0, len(parts), POSITIONS):
            asked = parts[at : at + POSITIONS]
            request = topic_pb2.WriterPositionsRequest(topic=topic.id, writer=writer, parts=asked, epoch=epoch)
            reply = await _ask_positions(around, topic, group, request)
            if len(reply.positions) != len(asked):
                raise Unavailable(f"topic group {group} answered for {len(reply.positions)} of {len(asked)} parts")
            for number, each in zip(asked, reply.positions, strict=True):
                if each.here:
                    found[number] = Stored(
                        each.position, each.progress, {before.part: before.progress for before in each.inherited}
                    )
    return found


class TopicWriter(BaseWriter[TopicReceipt]):
    """Writes to one topic: `async with topic.writer() as writer: await writer.send(b"…", key=…)`. The end of the block waits until
    everything is confirmed.

    Messages of one writer with the same key, or slot, are stored in the order of the calls, through every change of the topic's
    parts. Writers without a name share streams and order with `topic.send` of the same client.

    Args:
        around: the client.
        topic: the topic's name.
        name: the writer's name; empty: none.
        shared: opens the client's own writer of the topic.
    """

    def __init__(self, around: TopicContext, topic: str, name: str, shared: Any) -> None:
        super().__init__()
        if name:
            check_name(name, "topic's writer")
        self._around, self._topic, self.name = around, topic, name
        self._shared = shared
        self._shell: WriterShell | None = None

    async def open(self) -> Self:
        """Find the topic; a writer with a name learns what it has stored. Raises `UnknownTopic`, `NotAllowed`, `Unavailable`."""
        if self._shell is None:
            self._shell = await (open_shell(self._around, self._topic, self.name) if self.name else self._shared())
        return self

    async def close(self) -> None:
        """Wait until everything is confirmed or has failed, and end a writer with a name."""
        if self._shell is not None:
            await self._shell.finished()
            if self.name:
                await self._shell.close()
            self._shell = None

    def _opened(self) -> WriterShell:
        if self._shell is None:
            raise NotConnected("the writer is not open: `async with topic.writer() as writer:`")
        return self._shell

    def _checked(self, body: bytes, options: TopicSendOptions) -> TopicDraft:
        if options.get("progress") and not self.name:
            raise InvalidArgument(NO_NAME)
        return draft(body, **options)

    async def send(self, body: bytes, **options: Unpack[TopicSendOptions]) -> TopicReceipt:
        """Queue a message, waiting while the queue is full (`queue_records`, `queue_bytes`). Returns its receipt: awaiting it waits
        for the confirmation.

        Options: `TopicSendOptions`. A message whose progress the topic has already is resolved at once, and not stored again.
        Raises `InvalidArgument`, `RecordTooLarge`, and the error that ended the writer: `UnknownTopic`, `NotAllowed`.
        """
        shell, found = self._opened(), self._checked(body, options)
        receipt = TopicReceipt(found)
        await shell.send_in_turn(found, receipt)
        return self._note(receipt)

    def send_soon(self, body: bytes, **options: Unpack[TopicSendOptions]) -> TopicReceipt:
        """Queue a message now; arguments as for `send`. Raises `Overloaded` when too much is unconfirmed."""
        shell, found = self._opened(), self._checked(body, options)
        receipt = TopicReceipt(found)
        check_space(shell, receipt.size)
        shell.offer(found, receipt)
        return self._note(receipt)

    async def send_many(self, bodies: Iterable[bytes], **options: Unpack[TopicSendOptions]) -> list[TopicReceipt]:
        """Queue messages with the same options, and wait until all are confirmed or have failed. Raises the first failure."""
        receipts = [await self.send(body, **options) for body in bodies]
        await self.wait_finished()
        return receipts

    async def flush(self) -> None:
        """Let everything sent so far leave without waiting for others, and wait until it has left for a leader once."""
        await self._opened().flushed()

    async def wait_sent(self) -> None:
        """Wait until everything sent so far has left for a leader once."""
        await self._opened().flushed()

    async def wait_finished(self, *, timeout_s: float | None = None) -> None:
        """Wait until everything that this writer sent is confirmed at its level, or has failed; see `BaseWriter`."""
        if self._shell is not None:
            self._shell.hurry()
        check_seconds(timeout_s, "timeout_s")
        await super().wait_finished(timeout_s=timeout_s)

    @property
    def progress(self) -> int:
        """Progress after which to go on, of a writer with a name, as it was when the writer opened. Everything up to it is
        stored; what is stored beyond it is known, and not stored again if it is sent again. 0: nothing is stored."""
        resumed = self._opened().core.resumed
        return 0 if resumed is None else resumed.progress

    @property
    def triples(self) -> Mapping[int, Triple]:
        """Group → its state (V, S, C) at its last answer."""
        return self._opened().triples

    @property
    def counters(self) -> TopicCounters:
        """Totals of the writer."""
        return self._opened().core.counters

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await self.close()


def check_space(shell: WriterShell, size: int) -> None:
    """Raise `Overloaded` if a message of this size may not be offered now."""
    if not shell.try_admit(size):
        raise Overloaded(f"{shell.core.unresolved} messages are not confirmed: await send, or use a writer, which wait for space")
