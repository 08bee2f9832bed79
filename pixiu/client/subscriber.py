"""The subscriber: messages of rooms and topics from one gateway, and from another one when that one goes.

    gateway ──batch──▶ decode, CRC ──▶ bounded buffer ──▶ `async for`
                                         │ full: nothing is read, gRPC pushes back, the gateway drops and counts

Source: DESIGN sections 14 (rules 3 and 6) and 15.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
import xxhash

from pixiu.client.channels import REFUSED, STREAM_ERRORS, Channels, reason_of
from pixiu.client.directory import Directory
from pixiu.client.gateway_stream import GatewayStream, Waiter
from pixiu.client.message import Message, check_topic_filter, messages_of
from pixiu.client.options import ClientOptions
from pixiu.client.signals import RecentSignals
from pixiu.errors import InvalidArgument, LocalError, NotConnected, Overloaded, PixiuError, Unavailable, error_of_code
from pixiu.ids import MAX_ID, MAX_ROOM
from pixiu.partition import rendezvous_order
from pixiu.wire.v1 import wire_pb2

MAX_NAMES: Final = 100_000
"""Rooms and topics of one subscription."""
MAX_OVERLAP_IDS: Final = 100_000
"""Messages that are remembered while two gateways deliver the same ones, on a change of gateway."""
MOVE_JITTER_S: Final = 1.0
"""A draining gateway's clients leave it within this time, at random."""
log = logging.getLogger("pixiu.client")


@dataclass(slots=True)
class SubscriptionCounters:
    """Totals of one subscription."""

    received: int = 0
    """Messages taken from gateways, damaged ones not counted."""
    damaged: int = 0
    """Messages whose CRC or lengths were wrong; they are left out."""
    dropped: int = 0
    """Messages that a gateway says it dropped because this subscriber was too slow."""
    gaps: int = 0
    """Times at which the connection was lost: messages of the time between are missing."""
    moves: int = 0
    """Changes of gateway without a gap."""
    callback_errors: int = 0
    """Exceptions out of `on_gap` and `on_dropped`."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a subscription needs of its client."""

    client: str
    uin: int
    options: ClientOptions
    channels: Channels
    directory: Directory
    uniform: Callable[[], float]
    on_close: Callable[[Subscription], None]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A gateway that is ready to take over, and what it sent since."""

    stream: GatewayStream
    held: list[wire_pb2.SubscribeReply]


class Subscription:
    """Messages of rooms and topics: `async for message in subscription`. One task at a time may iterate.

    It connects when it is first iterated or joined, and reconnects by itself. `on_gap(reason)` is called when messages
    may be missing because a connection was lost; `on_dropped(count)` when the gateway dropped messages because this
    side was too slow. Both run in the event loop and must not block.

    Source: DESIGN section 14, rules 3 and 6; section 15, "SDK".
    """

    def __init__(
        self,
        surroundings: Surroundings,
        rooms: Iterable[int],
        topics: Iterable[str],
        on_gap: Callable[[str], None] | None,
        on_dropped: Callable[[int], None] | None,
        *,
        chat: bool = False,
    ) -> None:
        self.counters = SubscriptionCounters()
        self._around = surroundings
        self._rooms, self._topics = self._check(rooms, topics)
        self._chat = chat
        self._on_gap = on_gap
        self._on_dropped = on_dropped
        self._buffer: deque[tuple[list[Message], int]] = deque()
        self._buffered_bytes = 0
        self._buffered_records = 0
        self._arrived = asyncio.Event()
        self._space = asyncio.Event()
        self._current: list[Message] = []
        self._next = 0
        self._task: asyncio.Task[None] | None = None
        self._stream: GatewayStream | None = None
        self._waiters: list[Waiter] = []
        self._error: PixiuError | None = None
        self._closed = False
        self._reason = ""
        self._seen: set[tuple[int, int]] | None = None
        self._signals = RecentSignals()
        self._moved_to: GatewayStream | None = None

    # What users call.

    @property
    def gateway(self) -> str:
        """The address of the gateway that serves this subscription now; empty while there is none."""
        return self._stream.address if self._stream is not None else ""

    @property
    def rooms(self) -> frozenset[int]:
        """The rooms that are wanted."""
        return frozenset(self._rooms)

    @property
    def topics(self) -> frozenset[str]:
        """The topics and filters that are wanted."""
        return frozenset(self._topics)

    async def join(self, rooms: Iterable[int] = (), topics: Iterable[str] = (), *, timeout_s: float | None = None) -> None:
        """Join rooms and topics; returns when the whole cluster has taken them in: what is sent from then on arrives.

        Raises `InvalidArgument`, what the gateway refuses with, or `Unavailable` after `timeout_s` (default: the option
        `join_timeout_s`); after the latter they stay wanted and are joined once a gateway answers, unless left.
        """
        checked_rooms, checked_topics = self._check(rooms, topics)
        if len(self._rooms) + len(checked_rooms) + len(self._topics) + len(checked_topics) > MAX_NAMES:
            raise InvalidArgument(f"a subscription has at most {MAX_NAMES} rooms and topics; use several")
        self._rooms |= checked_rooms
        self._topics |= checked_topics
        await self._settle(checked_rooms, checked_topics, timeout_s)

    async def leave(self, rooms: Iterable[int] = (), topics: Iterable[str] = (), *, timeout_s: float | None = None) -> None:
        """Leave rooms and topics; returns when the whole cluster knows. Raises as `join` does."""
        checked_rooms, checked_topics = self._check(rooms, topics)
        self._rooms -= checked_rooms
        self._topics -= checked_topics
        await self._settle(checked_rooms, checked_topics, timeout_s)

    async def ready(self, *, timeout_s: float | None = None) -> None:
        """Connect, and wait until all that is wanted has been joined. Raises as `join` does."""
        await self._settle(set(self._rooms), set(self._topics), timeout_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while self._next >= len(self._current):
            batch = await self.next_batch()
            if batch is None:
                raise StopAsyncIteration
            self._current, self._next = batch, 0
        message = self._current[self._next]
        self._next += 1
        return message

    async def batches(self) -> AsyncIterator[list[Message]]:
        """The messages in the lists in which they arrived, never empty: faster than one by one."""
        if self._next < len(self._current):
            rest, self._current, self._next = self._current[self._next :], [], 0
            yield rest
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> list[Message] | None:
        """The messages that arrived together and come next, at least one; None once the subscription is closed.

        Raises what ended the subscription: a refusal, or `Unavailable` when no gateway could be reached at first.
        """
        if not self._closed:
            self._start()
        while not self._buffer or self._closed:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        messages, size = self._buffer.popleft()
        self._buffered_bytes -= size
        self._buffered_records -= len(messages)
        self._space.set()
        return messages

    async def close(self) -> None:
        """Leave everything and stop. An iteration that waits ends."""
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        self._space.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_waiters(NotConnected("the subscription was closed"))
        self._around.on_close(self)

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # Inside: what is wanted.

    @staticmethod
    def _check(rooms: Iterable[int], topics: Iterable[str]) -> tuple[set[int], set[str]]:
        if isinstance(topics, str):
            raise InvalidArgument(f"topics is a list of names; write topics=[{topics!r}]")
        checked = set(rooms)
        for room in checked:
            if not 0 < room <= MAX_ROOM:
                raise InvalidArgument(f"a RoomID is from 1 to 2^62-1, not {room}")
        return checked, {check_topic_filter(topic) for topic in topics}

    async def _settle(self, rooms: set[int], topics: set[str], timeout_s: float | None) -> None:
        if self._closed:
            raise NotConnected("the subscription is closed; make a new one with subscribe(…)")
        if self._error is not None:
            raise self._error
        self._start()
        seconds = self._around.options.join_timeout_s if timeout_s is None else timeout_s
        waiter = Waiter(frozenset(rooms), frozenset(topics))
        self._waiters.append(waiter)
        if self._stream is not None:
            self._catch_up(self._stream)
        self._space.set()  # the reader must go on although the buffer may be full
        try:
            await asyncio.wait_for(waiter.done, seconds)
        except TimeoutError:
            why = (
                f"gateway {self.gateway} did not confirm it"
                if self.gateway
                else f"no gateway: {self._reason or 'none answered yet'}"
            )
            raise Unavailable(
                f"the request did not take effect within {seconds:g} s ({why}); it stays wanted until a gateway confirms it"
            ) from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pixiu-subscription")

    # Inside: connections.

    async def _run(self) -> None:
        try:
            await self._serve_for_ever()
        except PixiuError as error:
            self._error = error
            self._fail_waiters(error)
            self._arrived.set()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("subscription_failed")
            self._error = PixiuError(f"the subscription failed: {type(error).__name__}: {error}")
            self._fail_waiters(self._error)
            self._arrived.set()

    async def _serve_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._around.options.connect_timeout_s
        served_once = False
        failures = 0
        while True:
            address = self._choose(failures)
            if address:
                served = await self._serve_gateway(address, served_once)
                failures = 0 if served else failures
                served_once = served_once or served
            else:
                self._reason = "the cluster has no gateway; start one"
            self._around.directory.refresh()
            if not served_once and loop.time() >= give_up:
                raise Unavailable(
                    f"no gateway took the subscription within {self._around.options.connect_timeout_s:g} s ({self._reason})"
                )
            log.warning("gateway_lost reason=%s", self._reason)
            failures += 1
            backoff = min(self._around.options.backoff_s * 2 ** min(failures - 1, 16), self._around.options.max_backoff_s)
            await asyncio.sleep(backoff * (0.5 + 0.5 * self._around.uniform()))

    def _connect(self, address: str) -> GatewayStream:
        around = self._around
        options = around.options
        return GatewayStream(
            address,
            around.channels,
            around.uin,
            around.client,
            chat=self._chat,
            device=options.device,
            device_class=options.device_class,
        )

    def _choose(self, failures: int, avoid: str = "") -> str:
        """The client's own gateway by rendezvous of its name; the next ones in order after failures."""
        by_hash = {xxhash.xxh3_64_intdigest(address.encode()) & MAX_ID: address for address in self._around.directory.map.gateways}
        order = [
            by_hash[number] for number in rendezvous_order(xxhash.xxh3_64_intdigest(self._around.client.encode()), list(by_hash))
        ]
        order = [address for address in order if address != avoid]
        return order[failures % len(order)] if order else ""

    async def _serve_gateway(self, address: str, reconnect: bool) -> bool:
        """Serve from one gateway, and from those it hands over to, until a connection is lost. True when one answered."""
        stream = self._connect(address)
        answered = False
        error: BaseException | None = None
        try:
            await self._greet(stream)
            answered = True
            if reconnect:
                self._gap()
            self._stream = stream
            self._catch_up(stream)  # what was asked for meanwhile
            while (successor := await self._serve(stream)) is not None:
                self._waiters += await stream.close()
                stream = self._stream = successor
                self._catch_up(stream)
        except (TimeoutError, Unavailable, *STREAM_ERRORS) as caught:
            error = caught
        finally:
            self._stream = None
            self._waiters += await stream.close()
        self._reason = f"{stream.address}: {reason_of(error)}"
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in REFUSED:
            raise Unavailable(f"the gateway refused the subscription ({self._reason})")
        return answered

    async def _greet(self, stream: GatewayStream) -> None:
        """Join what is wanted and wait for the gateway's first reply. Raises TimeoutError, or what gRPC raises."""
        self._catch_up(stream)
        reading = stream.read()
        await asyncio.wait({reading}, timeout=self._around.options.connect_timeout_s)
        if not reading.done():
            raise TimeoutError
        if reading.exception() is not None:
            stream.take()

    def _catch_up(self, stream: GatewayStream) -> None:
        waiters, self._waiters = [waiter for waiter in self._waiters if not waiter.done.done()], []
        try:
            stream.reconcile(self._rooms, self._topics, waiters)
        except Overloaded as error:
            for waiter in waiters:
                waiter.finish(error)

    def _gap(self) -> None:
        self.counters.gaps += 1
        self._call_back(self._on_gap, self._reason)

    async def _serve(self, stream: GatewayStream) -> GatewayStream | None:
        """Deliver what a gateway sends. Returns the stream to go on with, None when this one ended."""
        successor: asyncio.Task[_Prepared | None] | None = None
        ended = False
        try:
            while True:
                if stream.draining and successor is None:
                    self._seen = set()
                    successor = asyncio.create_task(self._prepare(stream.address), name="pixiu-next-gateway")
                waiting: list[asyncio.Task[Any]] = [] if ended else [stream.read()]
                if successor is not None:
                    waiting.append(successor)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if successor is not None and successor.done():
                    prepared = successor.result()
                    if prepared is not None:
                        return await self._move(prepared, ended)
                    if ended:
                        return None
                    # Nobody else to go to: stay until it ends.
                    stream.draining, successor, self._seen = False, None, None
                elif successor is None:
                    reply = stream.take()
                    if reply is None:
                        return None
                    await self._take(stream, reply)
                else:
                    ended = not await self._take_last(stream)
        finally:
            self._seen = None
            if successor is not None:
                await self._discard(successor)

    async def _take_last(self, stream: GatewayStream) -> bool:
        """A reply of a gateway that is going; False at its end, which is no failure any more."""
        try:
            reply = stream.take()
        except STREAM_ERRORS:
            return False
        if reply is not None:
            await self._take(stream, reply)
        return reply is not None

    async def _discard(self, successor: asyncio.Task[_Prepared | None]) -> None:
        successor.cancel()
        for result in await asyncio.gather(successor, return_exceptions=True):
            if isinstance(result, _Prepared) and result.stream is not self._moved_to:
                await result.stream.close()

    async def _prepare(self, avoid: str) -> _Prepared | None:
        """Join everything at another gateway, while the old one still delivers. What comes meanwhile is held."""
        options = self._around.options
        await asyncio.sleep(MOVE_JITTER_S * self._around.uniform())
        self._around.directory.refresh()
        address = self._choose(0, avoid)
        if not address:
            return None
        stream = self._connect(address)
        held: list[wire_pb2.SubscribeReply] = []
        size = 0
        try:
            async with asyncio.timeout(options.join_timeout_s):
                stream.reconcile(self._rooms, self._topics, [])
                while not stream.settled and size < options.receive_bytes:
                    await asyncio.wait({stream.read()})
                    reply = stream.take()
                    if reply is None or reply.error_code or reply.draining:
                        raise TimeoutError
                    stream.confirmed(reply.request)
                    held.append(reply)
                    size += len(reply.batch)
                return _Prepared(stream, held)
        except (TimeoutError, *STREAM_ERRORS):
            await stream.close()
            return None
        except asyncio.CancelledError:
            await stream.close()
            raise

    async def _move(self, prepared: _Prepared, ended: bool) -> GatewayStream:
        """Deliver what the new gateway sent already, without what came from the old one."""
        self._moved_to = prepared.stream
        self.counters.moves += 1
        if ended:
            self._reason = "the gateway was gone before another one had confirmed"
            self._gap()
        for reply in prepared.held:
            await self._take(prepared.stream, reply, repeated=self._seen)
        return prepared.stream

    # Inside: replies.

    async def _take(
        self, stream: GatewayStream, reply: wire_pb2.SubscribeReply, repeated: set[tuple[int, int]] | None = None
    ) -> None:
        if reply.uin:
            stream.uin = reply.uin
        if reply.draining:
            stream.draining = True
        if reply.error_code:
            self._refused(stream, reply)
        elif reply.request:
            stream.confirmed(reply.request)
        if reply.dropped:
            self.counters.dropped += reply.dropped
            self._call_back(self._on_dropped, reply.dropped)
        if reply.batch or reply.count:
            await self._deliver(reply, repeated)

    async def _deliver(self, reply: wire_pb2.SubscribeReply, repeated: set[tuple[int, int]] | None) -> None:
        messages, damaged = messages_of(reply.batch, reply.count)
        self.counters.damaged += damaged
        if any(message.signal for message in messages):
            is_new = self._signals.is_new
            messages = [message for message in messages if not message.signal or is_new(message.message_id, message.room)]
        if repeated is not None:
            messages = [message for message in messages if (message.message_id, message.room) not in repeated]
        elif self._seen is not None and len(self._seen) < MAX_OVERLAP_IDS:
            self._seen.update((message.message_id, message.room) for message in messages)
        if not messages:
            return
        self.counters.received += len(messages)
        while self._full(len(messages), len(reply.batch)):
            # Who awaits a confirmation may be the one who should empty the buffer: then reading goes on, dropping what is oldest.
            if self._stream is not None and self._stream.awaited:
                if not self._full(len(messages), len(reply.batch), times=2):
                    break
                self._drop_oldest()
            else:
                self._space.clear()
                await self._space.wait()
        self._buffer.append((messages, len(reply.batch)))
        self._buffered_bytes += len(reply.batch)
        self._buffered_records += len(messages)
        self._arrived.set()

    def _full(self, records: int, size: int, times: int = 1) -> bool:
        options = self._around.options
        return bool(self._buffer) and (
            self._buffered_bytes + size > times * options.receive_bytes
            or self._buffered_records + records > times * options.receive_records
        )

    def _drop_oldest(self) -> None:
        messages, size = self._buffer.popleft()
        self._buffered_bytes -= size
        self._buffered_records -= len(messages)
        self.counters.dropped += len(messages)
        self._call_back(self._on_dropped, len(messages))

    def _refused(self, stream: GatewayStream, reply: wire_pb2.SubscribeReply) -> None:
        """Who waits is told. For the rest, a fault of ours ends the subscription, another one makes us try elsewhere."""
        rooms, topics, told = stream.refused(reply.request, reply.error_code, reply.error_text)
        for waiter in told:
            self._rooms -= rooms & waiter.rooms
            self._topics -= topics & waiter.topics
        if told and not rooms & self._rooms and not topics & self._topics:
            return
        text = f"gateway {stream.address} refused: {reply.error_text}"
        error = error_of_code(reply.error_code, text)
        raise error if isinstance(error, LocalError) else Unavailable(text)

    def _fail_waiters(self, error: PixiuError) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.finish(error)

    def _call_back(self, callback: Callable[[Any], None] | None, value: Any) -> None:
        if callback is None:
            return
        try:
            callback(value)
        except Exception:
            self.counters.callback_errors += 1
            log.exception("subscription_callback_failed")
