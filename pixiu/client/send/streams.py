"""The publisher's shell: runs the streams that the core requests, and its timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from pixiu.client.connection_events import ConnectionState
from pixiu.client.login import refused_login
from pixiu.client.send.awaited import Awaited, FailureReports
from pixiu.client.send.events import (
    Batch,
    CloseStream,
    Effect,
    Failure,
    Group,
    OpenStream,
    RefreshCluster,
    Resolved,
    Ticket,
    Writable,
)
from pixiu.client.send.publisher import PublisherCore
from pixiu.errors import NotConnected, Overloaded, PixiuError
from pixiu.ids import SnowflakeID
from pixiu.rpc.channels import Channels
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.rpc.duplex import Carrier, Duplex, End, StreamEnded
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

MAX_WAITING_SENDS: Final = 100_000
"""Coroutines that may wait in `send` for space; more are refused as `Overloaded`."""
MIN_TICK_S: Final = 0.01
PublishCarrier = Carrier[wire_pb2.PublishRequest, wire_pb2.PublishReply]


def publish_call(channels: Channels, address: str) -> GrpcCall[wire_pb2.PublishRequest, wire_pb2.PublishReply]:
    """Open a stream of messages to a proxy, over gRPC."""
    return GrpcCall.over(
        channels, address, lambda channel: wire_pb2_grpc.PublisherStub(channel).Publish(metadata=channels.metadata())
    )


class Receipt(Awaited, Ticket):
    """Receipt of a message. `await receipt` waits for the cluster's acceptance.

    Awaiting returns None once every broker that serves the message has handled it; the number of gateways is not reported. It
    raises `Overloaded`, `NotSent`, `OutcomeUnknown` or another `PixiuError`. A receipt that nobody awaits costs nothing more: its
    failure is counted (`Client.stats()`), and reported when the receipt is dropped (`connect(on_failure=…)`).

    Source: docs/architecture.md: "a Future exists only for a message that is awaited".
    """

    __slots__ = ("_waiters", "unclaimed")

    def __init__(self, record: bytes, key: int, lane: int, message_id: int) -> None:
        super().__init__(record, key, lane, message_id)
        self._waiters: list[asyncio.Future[None]] | None = None

    @property
    def id(self) -> SnowflakeID:
        """The message's ID; 0 until it has left the caller's thread (synchronous client only)."""
        return SnowflakeID(self.message_id)

    def _problem(self) -> PixiuError | None:
        return self.failure.error() if self.failure is not None else None

    def fail(self, failure: Failure, reports: FailureReports) -> None:
        """Fail a message that never reached the core."""
        self.failure = failure
        self.resolved = True  # last: another thread may look
        reports.watch(self, failure)
        self.wake()


class _Stream:
    """One stream to a proxy. `duplex` is set once its task runs."""

    __slots__ = ("address", "answered", "closing", "draining", "duplex", "greeted", "loans", "number", "task")

    def __init__(self, number: int, address: str) -> None:
        self.number, self.address = number, address
        self.loans = 0
        """Version of the loans that the stream was sent last."""
        self.closing = self.greeted = self.answered = self.draining = False
        self.duplex: Duplex[wire_pb2.PublishRequest, wire_pb2.PublishReply] | None = None
        self.task: asyncio.Task[None] | None = None

    def kick(self) -> None:
        """Wake up the stream: there may be something to write."""
        if self.duplex is not None:
            self.duplex.wake()


class PublisherShell:
    """Runs one `PublisherCore`. `on_refresh` is called when a proxy failed or is leaving; `reports` gets failures that nobody
    awaits; `tell` gets the state, address and reason of each event of a connection. `opens` opens a stream to a proxy; None: a gRPC
    call."""

    def __init__(
        self,
        core: PublisherCore,
        client: str,
        channels: Channels,
        on_refresh: Callable[[], None],
        reports: FailureReports | None = None,
        tell: Callable[[ConnectionState, str, str], None] = lambda _state, _address, _reason: None,
        opens: Callable[[str], AbstractAsyncContextManager[PublishCarrier]] | None = None,
    ) -> None:
        self.core = core
        self._client = client
        self._channels = channels
        self._on_refresh = on_refresh
        self._reports = reports
        self._tell = tell
        self._opens = opens if opens is not None else lambda address: publish_call(channels, address)
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, _Stream] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reserved_records = 0
        self._reserved_bytes = 0
        self._flushing: list[tuple[Group, asyncio.Future[None]]] = []
        self._alarm = DeadlineTimer(self._tick, least_s=MIN_TICK_S)
        self._closed = False

    def try_admit(self, size: int) -> bool:
        """True if a record of `size` bytes may be offered now."""
        if self._closed:
            raise NotConnected("the client is closed; open it again with `async with pixiu.connect(…)`")
        return not self._waiting and self.core.has_space(size, self._reserved_bytes, self._reserved_records)

    async def admit(self, size: int) -> None:
        """Wait, in order of arrival, until a record of `size` bytes may be offered; the caller must offer it at once.

        Raises `Overloaded` when too many wait already.
        """
        if self.try_admit(size):
            return
        if len(self._waiting) >= MAX_WAITING_SENDS:
            raise Overloaded(f"{MAX_WAITING_SENDS} sends wait for space already: await each `send` before the next one")
        future: asyncio.Future[None] = self._loop.create_future()
        entry = (size, future)
        self._waiting.append(entry)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(size)
                self._let_in()
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise
        self._give_back(size)
        if self._closed:
            raise NotConnected("the client was closed while the message waited for space; it was not sent")

    def offer(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        """Hand a message to the core."""
        effects = self.core.offer(ticket, self._loop.time(), timeout_s)
        if effects:
            self._apply(effects)
        if timeout_s is not None or not self._alarm.is_set:
            self._arm()

    async def flush(self) -> None:
        """Wait until everything offered so far is resolved; `publish_timeout_s` bounds the wait."""
        group = self.core.close_group()
        if group is None:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._flushing.append((group, future))
        await future

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """Pass on a change of the cluster's proxies."""
        if not self._closed:
            self._apply(self.core.set_proxies(addresses, self._loop.time()))

    async def close(self, grace_s: float) -> None:
        """End the streams; unresolved messages fail. Waits at most `grace_s` for the proxies to take the end."""
        self._closed = True
        self._alarm.cancel()
        for _, future in self._waiting:
            if not future.done():
                future.set_result(None)
        tasks = []
        for stream in self._streams.values():
            stream.closing = True
            stream.kick()
            if stream.task is not None:
                tasks.append(stream.task)
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        self._apply(self.core.abandon("the client was closed before a proxy confirmed the message"))
        ending = [*self._ending, *tasks]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def request_of(self, batch: Batch) -> wire_pb2.PublishRequest:
        """Make the request that carries a batch."""
        return wire_pb2.PublishRequest(batch=batch.data, count=batch.count, position=batch.position, more=batch.more)

    def heard(self, reply: wire_pb2.PublishReply) -> None:
        """Called with every reply; subclasses use it for parts other than the resolved positions."""

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Writable):
                stream = self._streams.get(effect.stream)
                if stream is not None:
                    stream.kick()
            elif isinstance(effect, Resolved):
                for ticket in effect.tickets:
                    if isinstance(ticket, Receipt):
                        if ticket.failure is not None and self._reports is not None:
                            self._reports.watch(ticket, ticket.failure)
                        ticket.wake()
            elif isinstance(effect, OpenStream):
                self._open(effect)
            elif isinstance(effect, CloseStream):
                self._end(effect.stream)
            elif isinstance(effect, RefreshCluster):
                self._on_refresh()
        self._let_in()
        self._check_flushes()
        self._arm()

    def _open(self, effect: OpenStream) -> None:
        if self._closed:
            return
        stream = self._streams[effect.stream] = _Stream(effect.stream, effect.address)
        stream.task = self._loop.create_task(self._run(stream), name=f"pixiu-publish-{effect.address}")
        self._ending.add(stream.task)
        stream.task.add_done_callback(self._ending.discard)

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None and stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()

    def _give_back(self, size: int) -> None:
        self._reserved_records -= 1
        self._reserved_bytes -= size

    def _let_in(self) -> None:
        while self._waiting and not self._closed:
            size, future = self._waiting[0]
            if not future.done():
                if not self.core.has_space(size, self._reserved_bytes, self._reserved_records):
                    return
                self._reserved_records += 1
                self._reserved_bytes += size
                future.set_result(None)
            self._waiting.popleft()

    def _check_flushes(self) -> None:
        if self._flushing:
            waiting = []
            for group, future in self._flushing:
                if not self.core.group_done(group):
                    waiting.append((group, future))
                elif not future.done():
                    future.set_result(None)
            self._flushing = waiting

    def _arm(self) -> None:
        if not self._closed:
            self._alarm.set(self.core.next_deadline())

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.time()))

    async def _run(self, stream: _Stream) -> None:
        """Run one stream from its opening to its end."""
        try:
            async with self._opens(stream.address) as carrier:
                stream.duplex = Duplex(carrier, lambda reply: self._take(stream, reply), lambda: self._give(stream))
                self._over(stream, await stream.duplex.run())
        except StreamEnded as why:  # it was not opened
            self._over(stream, End(str(why)))

    def _over(self, stream: _Stream, end: End) -> None:
        """Handle a stream that has ended, or could not be opened."""
        self._streams.pop(stream.number, None)
        if stream.answered and not (stream.draining or stream.closing):
            self._tell(ConnectionState.RECONNECTING, stream.address, end.text)
        if not self._closed:
            login = refused_login(end.text) if end.refused and not stream.answered else ""
            self._apply(self.core.stream_died(stream.number, self._loop.time(), end.text, login))

    def _give(self, stream: _Stream) -> wire_pb2.PublishRequest | None:
        if not stream.greeted:
            stream.greeted = True
            return wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client=self._client))
        if not stream.answered:
            return None  # a proxy that refuses the stream has taken nothing, and its status has the reason
        batch = self.core.next_batch(stream.number, self._loop.time())
        if batch is not None:
            request, loans = self.request_of(batch), self._channels.loans
            if stream.loans != loans.version:
                stream.loans = loans.version
                request.loans.extend(loans.all())
            return request
        if stream.closing and stream.duplex is not None:
            stream.duplex.finish()
        return None

    def _take(self, stream: _Stream, reply: wire_pb2.PublishReply) -> None:
        if not stream.answered:
            stream.answered = True
            stream.kick()
            self._tell(ConnectionState.CONNECTED, stream.address, "")
        if reply.draining and not stream.draining:
            stream.draining = True
            self._tell(ConnectionState.MOVED, stream.address, "the proxy is draining: other proxies take new messages")
        self.heard(reply)
        failures = [
            (failure.first, failure.last, Failure(failure.code, failure.text, failure.retry_after_ms)) for failure in reply.failures
        ]
        now, up_to, window_bytes, draining = self._loop.time(), reply.up_to, reply.window_bytes, reply.draining
        largest = reply.max_batch_bytes, reply.max_batch_records
        self._apply(self.core.reply(stream.number, now, up_to, failures, window_bytes, draining, *largest))
