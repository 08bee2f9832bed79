"""The shell of a topic writer: runs the streams to leaders that the core requests, its timer, and callers that wait.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from pixiu.client.login import refused_login
from pixiu.client.send.awaited import Awaited
from pixiu.client.send.callers import Callers
from pixiu.client.send.early import failure_of
from pixiu.client.send.ending import end_streams
from pixiu.client.send.events import Failure
from pixiu.client.topics.described import children_of, refused
from pixiu.client.topics.drafts import TopicDraft
from pixiu.client.topics.surroundings import TopicContext, is_hopeless
from pixiu.client.topics.topic_directory import OnTopic
from pixiu.client.topics.topic_map import TopicMap
from pixiu.client.topics.writing.writer_core import WriterCore
from pixiu.client.topics.writing.writer_events import (
    CloseStream,
    Effect,
    OpenStream,
    RefreshTopic,
    Resolved,
    Result,
    TopicTicket,
    Verdict,
    Writable,
)
from pixiu.errors import NotAllowed, NotAuthenticated, PixiuError, Refusal
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.rpc.duplex import Duplex, End, StreamEnded
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.block import Encoded
from pixiu.wire.levels import Triple
from pixiu.wire.v1 import topic_pb2, topic_pb2_grpc

DEFAULT_WINDOW: Final = 4 << 20
"""Bytes under way to a leader that names no limit."""
MIN_TICK_S: Final = 0.001
Call = GrpcCall[topic_pb2.TopicWriteRequest, topic_pb2.TopicWriteReply]


class TopicReceipt(Awaited, TopicTicket):
    """Receipt of a message to a topic. `await receipt` waits until it is confirmed at its level, and raises its failure.

    Source: docs/architecture.md: "a Future exists only for a message that is awaited".
    """

    __slots__ = ("_waiters", "unclaimed")

    def __init__(self, found: TopicDraft) -> None:
        super().__init__(found.encoded, found.level, found.progress)
        self._waiters: list[asyncio.Future[None]] | None = None

    @property
    def position(self) -> tuple[int, int] | None:
        """(part, offset) of the message; None until it is known, and for a repetition whose place is known no more."""
        return (self.part, self.offset) if self.offset >= 0 else None


class WriteStream:
    """One stream to a leader. `duplex` is set once its task runs."""

    __slots__ = ("answered", "closing", "duplex", "greeted", "number", "task")

    def __init__(self, number: int) -> None:
        self.number = number
        self.greeted = self.answered = self.closing = False
        self.duplex: Duplex[topic_pb2.TopicWriteRequest, topic_pb2.TopicWriteReply] | None = None
        self.task: asyncio.Task[None] | None = None

    def kick(self) -> None:
        """Wake up the stream: there may be something to write."""
        if self.duplex is not None:
            self.duplex.wake()


class WriterShell:
    """Runs one `WriterCore`.

    Args:
        around: the client.
        name: of the topic.
        core: the writer.
        follower: with which the directory knows it.
        epoch: of a writer with a name, when it was opened.
    """

    def __init__(self, around: TopicContext, name: str, core: WriterCore, follower: OnTopic, epoch: int = 0) -> None:
        self.core, self._around, self._name = core, around, name
        self._follower, self._epoch = follower, epoch
        self.triples: dict[int, Triple] = {}
        """Group → its state at its last answer."""
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, WriteStream] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._callers = Callers(core.has_space)
        self._alarm = DeadlineTimer(self._tick, least_s=MIN_TICK_S)
        self.closed = False

    # --- called by writers

    def try_admit(self, size: int) -> bool:
        """True if a message of `size` bytes may be offered now."""
        return self._callers.try_admit(size)

    async def admit(self, size: int) -> None:
        """Wait until a message of `size` bytes may be offered, see `Callers.admit`."""
        await self._callers.admit(size)

    def offer(self, found: TopicDraft, receipt: TopicReceipt) -> None:
        """Hand a message to the core. Raises the error that ended the writer."""
        slot = found.encoded.slot if found.has_slot else self.core.slot(found.key, found.progress)
        receipt.encoded = found.encoded._replace(slot=slot)
        effects = self.core.offer(receipt, self._loop.time())
        if receipt.resolved:
            receipt.wake()
        if effects:
            self._apply(effects)
        else:
            self._alarm.set(self.core.next_deadline())

    def offer_all(self, found: Sequence[TopicDraft], receipts: Sequence[TopicReceipt]) -> None:
        """Hand messages with the same options to the core. Raises the error that ended the writer."""
        slot = found[0].encoded.slot if found[0].has_slot else self.core.slot(found[0].key, 0)
        for each, receipt in zip(found, receipts, strict=True):
            receipt.encoded = Encoded(slot, each.encoded.flags, each.encoded.data)
        self._apply(self.core.offer_all(receipts, slot, self._loop.time()))

    async def send_in_turn(self, found: TopicDraft, receipt: TopicReceipt) -> None:
        """Offer a message once there is space for it."""
        await self._callers.admit(receipt.size)
        self.offer(found, receipt)

    def hurry(self) -> None:
        """Let everything offered so far leave without waiting for others."""
        self.core.flush()
        self._tick()

    async def flushed(self) -> None:
        """Let everything offered so far leave at once, and wait until it has left for a leader."""
        number = self.core.flush()
        self._tick()
        await self._callers.wait(lambda: self.core.sent(number))

    async def finished(self) -> None:
        """Wait until everything is resolved; the messages' time-outs bound the wait."""
        self.hurry()
        await self._callers.wait(lambda: not self.core.unresolved)

    def on_topic(self, topic: TopicMap) -> None:
        """Take a newer description of the topic."""
        if not self.closed:
            self._apply(self.core.set_topic(topic, self._loop.time()))

    def on_end(self, error: PixiuError) -> None:
        """Fail everything: the topic is gone, or may not be seen any more."""
        if not self.closed:
            self._apply(self.core.fail(failure_of(error)))

    async def close(self, grace_s: float = 1.0) -> None:
        """End the streams; unresolved messages fail."""
        if self.closed:
            return
        self.closed = True
        self._around.users.discard(self)
        self._around.directory.leave(self._name, self._follower)
        self._alarm.cancel()
        self._callers.close()
        await end_streams(
            self._streams.values(), self._ending, grace_s,
            lambda: self._apply(self.core.abandon("the client was closed before a leader confirmed it")),
        )  # fmt: skip

    # --- effects

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Writable):
                stream = self._streams.get(effect.stream)
                if stream is not None:
                    stream.kick()
            elif isinstance(effect, Resolved):
                for ticket in effect.tickets:
                    if isinstance(ticket, Awaited):
                        if ticket.failure is not None:
                            self._around.reports.watch(ticket, ticket.failure)
                        ticket.wake()
            elif isinstance(effect, OpenStream):
                self._open(effect)
            elif isinstance(effect, CloseStream):
                self._end(effect.stream)
            elif isinstance(effect, RefreshTopic):
                self._around.directory.refresh(self._name, newer=effect.newer)
        self._callers.let_in()
        self._callers.check()
        if not self.closed:
            self._alarm.set(self.core.next_deadline())

    def _open(self, effect: OpenStream) -> None:
        if self.closed:
            return
        stream = self._streams[effect.stream] = WriteStream(effect.stream)
        stream.task = self._loop.create_task(self._run(stream, effect.address), name=f"pixiu-topic-write-{effect.address}")
        self._ending.add(stream.task)
        stream.task.add_done_callback(self._ending.discard)

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None and stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.time()))

    # --- streams

    async def _run(self, stream: WriteStream, address: str) -> None:
        channels = self._around.channels
        try:
            call: Call = GrpcCall.over(
                channels, address, lambda channel: topic_pb2_grpc.TopicLogStub(channel).Write(metadata=channels.metadata())
            )
            async with call:
                stream.duplex = Duplex(call, lambda reply: self._take(stream, reply), lambda: self._give(stream))
                self._over(stream, await stream.duplex.run())
        except StreamEnded as why:  # it was not opened
            self._over(stream, End(str(why), why.refused))

    def _over(self, stream: WriteStream, end: End) -> None:
        if self._streams.pop(stream.number, None) is None or self.closed:
            return
        if end.refused and not stream.answered:
            login = refused_login(end.text)
            self._apply(self.core.fail(Failure(NotAuthenticated.code, login) if login else Failure(NotAllowed.code, end.text)))
        else:
            self._apply(self.core.stream_died(stream.number, self._loop.time(), end.text))

    def _give(self, stream: WriteStream) -> topic_pb2.TopicWriteRequest | None:
        if not stream.greeted:
            stream.greeted = True
            return topic_pb2.TopicWriteRequest(client=self._around.client)
        if not stream.answered:
            return None
        self._callers.check()  # the block before this one has been sent
        request = self.core.next_request(stream.number, self._loop.time())
        if request is not None:
            return topic_pb2.TopicWriteRequest(
                request=request.request, block=request.data, level=request.level.value, epoch=self._epoch
            )
        if stream.closing and stream.duplex is not None:
            stream.duplex.finish()
        return None

    def _take(self, stream: WriteStream, reply: topic_pb2.TopicWriteReply) -> None:
        now = self._loop.time()
        if not stream.answered:
            stream.answered = True
            self._apply(self.core.opened(stream.number, reply.window_bytes or DEFAULT_WINDOW, now))
            stream.kick()
        if reply.HasField("triple"):
            self._heard(stream.number, reply.triple)
        if reply.results:
            self._apply(self.core.results(stream.number, [self._result(each) for each in reply.results], now))
        if reply.draining:
            self._apply(self.core.draining(stream.number, now))
        if reply.HasField("end"):
            self._ended(stream, reply.end, now)

    def _heard(self, number: int, triple: topic_pb2.TopicTriple) -> None:
        group = self.core.group_of(number)
        if group is not None:
            self.triples[group] = Triple(triple.version, triple.epoch, triple.committed)

    def _result(self, found: topic_pb2.TopicWriteResult) -> Result:
        why, refusal = found.refusal, None
        if found.HasField("refusal"):
            refusal = Refusal(why.code, why.text, why.retry_after_ms)
        try:
            verdict = Verdict(found.verdict)
        except ValueError:
            verdict = Verdict.REFUSED
            self.core.counters.malformed_replies += 1
        return Result(found.request, verdict, found.position, found.base, refusal, why.leader, children_of(found.children))

    def _ended(self, stream: WriteStream, end: topic_pb2.TopicRefusal, now: float) -> None:
        self._streams.pop(stream.number, None)
        error = refused(end, self._name)
        if is_hopeless(error):
            self._apply(self.core.fail(failure_of(error)))
        else:
            effects = self.core.stream_died(stream.number, now, f"{end.code}: {end.text}", end.leader, end.retry_after_ms / 1000)
            self._apply(effects)
        if stream.duplex is not None:
            stream.duplex.end(end.text)
