"""The sender's shell: runs the streams that the core requests, its timer, and callers that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Generic, TypeVar

from pixiu.client.connection_events import ConnectionState
from pixiu.client.login import refused_login
from pixiu.client.send.awaited import Awaited, FailureReports
from pixiu.client.send.callers import Callers, Check
from pixiu.client.send.ending import end_streams
from pixiu.client.send.events import (
    Batch,
    CloseStream,
    Effect,
    Failure,
    OpenStream,
    Outcome,
    RefreshCluster,
    Resolved,
    Ticket,
    Writable,
)
from pixiu.client.send.sender import Sender
from pixiu.rpc.channels import Channels
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.rpc.duplex import Carrier, Duplex, End, StreamEnded
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.v1 import mail_pb2, wire_pb2, wire_pb2_grpc

MIN_TICK_S: Final = 0.01
Request = TypeVar("Request", bound=wire_pb2.PublishRequest | mail_pb2.MailRequest)
Reply = TypeVar("Reply", bound=wire_pb2.PublishReply | mail_pb2.MailReply)


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


class Stream(Generic[Request, Reply]):
    """One stream to a proxy. `duplex` is set once its task runs."""

    __slots__ = ("answered", "closing", "draining", "duplex", "greeted", "loans", "opening", "task")

    def __init__(self, opening: OpenStream) -> None:
        self.opening = opening
        self.loans = 0
        """Version of the loans that the stream was sent last."""
        self.closing = self.greeted = self.answered = self.draining = False
        self.duplex: Duplex[Request, Reply] | None = None
        self.task: asyncio.Task[None] | None = None

    def kick(self) -> None:
        """Wake up the stream: there may be something to write."""
        if self.duplex is not None:
            self.duplex.wake()


class SenderShell(Generic[Request, Reply]):
    """Runs one `Sender`; a subclass speaks the protocol. `on_refresh` is called when a proxy failed or is leaving; `opens` opens a
    stream to a proxy; `reports` gets failures that nobody awaits; `tell` gets the state, address and reason of each event of a
    connection."""

    def __init__(
        self,
        core: Sender,
        client: str,
        channels: Channels,
        on_refresh: Callable[[], None],
        opens: Callable[[str], AbstractAsyncContextManager[Carrier[Request, Reply]]],
        reports: FailureReports | None = None,
        tell: Callable[[ConnectionState, str, str], None] = lambda _state, _address, _reason: None,
    ) -> None:
        self.core = core
        self.client = client
        self._channels = channels
        self._on_refresh = on_refresh
        self._reports = reports
        self._tell = tell
        self._opens = opens
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, Stream[Request, Reply]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._callers = Callers(core.has_space)
        self._alarm = DeadlineTimer(self._tick, least_s=MIN_TICK_S)
        self._closed = False

    def hello(self, opening: OpenStream) -> Request:
        """Make the first request of a stream."""
        raise NotImplementedError

    def request_of(self, batch: Batch) -> Request:
        """Make the request that carries a batch."""
        raise NotImplementedError

    def heard(self, number: int, reply: Reply, now: float) -> list[Effect]:
        """Give the core a reply."""
        raise NotImplementedError

    def try_admit(self, size: int) -> bool:
        """True if a record of `size` bytes may be offered now."""
        return self._callers.try_admit(size)

    async def admit(self, size: int) -> None:
        """Wait until a record of `size` bytes may be offered, see `Callers.admit`."""
        await self._callers.admit(size)

    async def wait(self, check: Check) -> None:
        """Wait for a condition of the core, or until the shell is closed."""
        await self._callers.wait(check)

    def offer(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        """Hand a message to the core."""
        effects = self.core.offer(ticket, self._loop.time(), timeout_s)
        if effects:
            self._apply(effects)
        if timeout_s is not None or not self._alarm.is_set:
            self._arm()

    async def flush(self) -> None:
        """Wait until everything offered so far is resolved; the messages' time-outs bound the wait."""
        group = self.core.close_group()
        if group is not None:
            await self.wait(lambda: self.core.group_done(group))

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """Pass on a change of the cluster's proxies."""
        if not self._closed:
            self._apply(self.core.set_proxies(addresses, self._loop.time()))

    async def close(self, grace_s: float) -> None:
        """End the streams; unresolved messages fail. Waits at most `grace_s` for the proxies to take what was sent, and the end."""
        self._closed = True
        self._alarm.cancel()
        self._callers.close()
        await end_streams(
            self._streams.values(), self._ending, grace_s,
            lambda: self._apply(self.core.abandon("the client was closed before a proxy confirmed it")),
        )  # fmt: skip

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Writable):
                stream = self._streams.get(effect.stream)
                if stream is not None:
                    stream.kick()
            elif isinstance(effect, Resolved):
                for ticket in effect.tickets:
                    if isinstance(ticket, Awaited):
                        if ticket.failure is not None and self._reports is not None:
                            self._reports.watch(ticket, ticket.failure)
                        ticket.wake()
            elif isinstance(effect, OpenStream):
                self._open(effect)
            elif isinstance(effect, CloseStream):
                self._end(effect.stream)
            elif isinstance(effect, RefreshCluster):
                self._on_refresh()
        self._callers.let_in()
        self._callers.check()
        self._arm()

    def _open(self, effect: OpenStream) -> None:
        if self._closed:
            return
        stream = self._streams[effect.stream] = Stream(effect)
        stream.task = self._loop.create_task(self._run(stream), name=f"pixiu-send-{effect.address}")
        self._ending.add(stream.task)
        stream.task.add_done_callback(self._ending.discard)

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None and stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()

    def _arm(self) -> None:
        if not self._closed:
            self._alarm.set(self.core.next_deadline())

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.time()))

    async def _run(self, stream: Stream[Request, Reply]) -> None:
        """Run one stream from its opening to its end."""
        try:
            async with self._opens(stream.opening.address) as carrier:
                stream.duplex = Duplex(carrier, lambda reply: self._take(stream, reply), lambda: self._give(stream))
                self._over(stream, await stream.duplex.run())
        except StreamEnded as why:  # it was not opened
            self._over(stream, End(str(why)))

    def _over(self, stream: Stream[Request, Reply], end: End) -> None:
        """Handle a stream that has ended, or could not be opened."""
        self._streams.pop(stream.opening.stream, None)
        if stream.answered and not (stream.draining or stream.closing):
            self._tell(ConnectionState.RECONNECTING, stream.opening.address, end.text)
        if not self._closed:
            login = refused_login(end.text) if end.refused and not stream.answered else ""
            self._apply(self.core.stream_died(stream.opening.stream, self._loop.time(), end.text, login))

    def _give(self, stream: Stream[Request, Reply]) -> Request | None:
        if not stream.greeted:
            stream.greeted = True
            return self._with_loans(stream, self.hello(stream.opening))
        if not stream.answered:
            return None  # a proxy that refuses the stream has taken nothing, and its status has the reason
        self._callers.check()  # the previous batch has been sent
        batch = self.core.next_batch(stream.opening.stream, self._loop.time())
        if batch is not None:
            return self._with_loans(stream, self.request_of(batch))
        if stream.closing and stream.duplex is not None:
            stream.duplex.finish()
        return None

    def _with_loans(self, stream: Stream[Request, Reply], request: Request) -> Request:
        loans = self._channels.loans
        if stream.loans != loans.version:
            stream.loans = loans.version
            request.loans.extend(loans.all())
        return request

    def _take(self, stream: Stream[Request, Reply], reply: Reply) -> None:
        if not stream.answered:
            stream.answered = True
            stream.kick()
            self._tell(ConnectionState.CONNECTED, stream.opening.address, "")
        if reply.draining and not stream.draining:
            stream.draining = True
            self._tell(ConnectionState.MOVED, stream.opening.address, "the proxy is draining: other proxies take new messages")
        self._apply(self.heard(stream.opening.stream, reply, self._loop.time()))


class PublisherShell(SenderShell[wire_pb2.PublishRequest, wire_pb2.PublishReply]):
    """Publishes to rooms, topics and users."""

    def hello(self, opening: OpenStream) -> wire_pb2.PublishRequest:
        """Make the first request of a stream."""
        return wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client=self.client))

    def request_of(self, batch: Batch) -> wire_pb2.PublishRequest:
        """Make the request that carries a batch."""
        return wire_pb2.PublishRequest(batch=batch.data, count=batch.count, position=batch.position, more=batch.more)

    def heard(self, number: int, reply: wire_pb2.PublishReply, now: float) -> list[Effect]:
        """Give the core a reply."""
        failures = [
            Outcome(each.first, each.last - each.first + 1, Failure(each.code, each.text, each.retry_after_ms))
            for each in reply.failures
        ]
        largest = reply.max_batch_bytes, reply.max_batch_records
        return self.core.reply(number, now, reply.up_to, failures, reply.window_bytes, reply.draining, *largest)
