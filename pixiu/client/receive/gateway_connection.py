"""A client's connection to one gateway at a time; when that one leaves, it moves to another.

    choose ──▶ greet ──▶ serve ──▶ the gateway drains: prepare another one, move to it without a gap
      ▲                    │
      └──── back-off ◀─────┘ the connection was lost

The subclasses, `Subscription` and `Inbox`, handle the content of replies.

Source: docs/promises.md, "Failure rules" 3 and 6, docs/operations.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import xxhash

from pixiu.client.connection_events import ConnectionEvent, ConnectionState
from pixiu.client.directory import Directory
from pixiu.client.login import raise_for_login
from pixiu.client.options import ClientOptions
from pixiu.client.receive.gateway_stream import MAX_NAMES_A_REQUEST, GatewayStream, Waiter
from pixiu.client.send.streams import Receipt
from pixiu.client.timeouts import within
from pixiu.errors import (
    LocalError,
    LoginReplaced,
    NotConnected,
    NotServed,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
    Unavailable,
    Unreachable,
    error_of_code,
)
from pixiu.ids import MAX_ID
from pixiu.placement.partition import rendezvous_order
from pixiu.rpc.backoff import Backoff, Reconnects, Resting, retry_after_s
from pixiu.rpc.channels import Channels
from pixiu.rpc.duplex import CLOSED_BY_PEER, StreamEnded
from pixiu.rpc.grpc_streams import MAX_PUSHBACK_MS
from pixiu.wire.v1 import wire_pb2

MOVE_JITTER_S: Final = 1.0
"""Clients of a draining gateway leave it at a random moment within this time, seconds."""
LINGER_S: Final = 1.0
"""Time for which a draining gateway is still read after the new one has confirmed everything, seconds: what was accepted before
that goes through the old one alone, and may still be on its way."""
ANSWERS: Final = 2
"""Requests that a draining gateway answers after that, one after the other, before it is left: a gateway, or a client, that was
slow has caught up by then. The first answer may overtake messages that wait beside it."""
ANSWER_S: Final = 5.0
"""Time for each of these answers, seconds; without it messages may be missing."""
ASK_AGAIN_MS: Final = 1_000
"""Wait after a join that a gateway refused for now without naming a time, milliseconds."""
GONE_EARLY: Final = "the gateway was gone before another one had confirmed"
log = logging.getLogger("pixiu.client")


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """The parts of its client that a connection needs."""

    client: str
    uin: int
    options: ClientOptions
    channels: Channels
    directory: Directory
    uniform: Callable[[], float]
    on_close: Callable[[Any], None]
    tell: Callable[[ConnectionEvent], None]
    """Called with events of the connection."""
    reply: Callable[..., Awaitable[Receipt]]
    """Answers a request that was received."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A gateway that is ready to take over, and the replies it has sent meanwhile."""

    stream: GatewayStream
    held: list[wire_pb2.SubscribeReply]


class GatewayConnection:
    """Keeps one client connected to a gateway. The methods from `_connect` to `_nudge` are for subclasses."""

    what: ClassVar[str] = "connection"
    """Name of the connection in errors and tasks."""
    _linger_s: ClassVar[float] = LINGER_S
    """Time for which a gateway is still read after the client left it. 0 if nothing undelivered can get lost."""

    def __init__(self, surroundings: ConnectionContext) -> None:
        self._around = surroundings
        self._rooms: set[int] = set()
        self._topics: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._stream: GatewayStream | None = None
        self._waiters: list[Waiter] = []
        self._error: PixiuError | None = None
        self._closed = False
        self._reason = ""
        self._moved_to: GatewayStream | None = None
        self._resting = Resting()
        self._answered_at: float | None = None
        """Time of the current gateway's first answer; None before it."""
        self._confirmed = False
        """True if the last connection had confirmed everything when it ended."""
        self._last = ""
        """The address of the gateway that served last."""

    @property
    def gateway(self) -> str:
        """The address of the gateway that serves now; empty while there is none."""
        return self._stream.address if self._stream is not None else ""

    # Implemented by subclasses.

    def _connect(self, address: str) -> GatewayStream:
        """Open a stream to a gateway."""
        raise NotImplementedError

    async def _content(self, stream: GatewayStream, reply: wire_pb2.SubscribeReply, *, held: bool) -> None:
        """Process the content of a reply. `held`: it arrived before this gateway took over."""
        raise NotImplementedError

    def _overlap(self, begins: bool) -> None:
        """Called when two gateways begin to serve (`begins`), and when only one does again."""

    def _lost(self) -> None:
        """Called when a connection was lost and another one begins."""

    def _moved(self) -> None:
        """Called when another gateway took over without a gap."""

    def _stream_over(self, stream: GatewayStream) -> None:
        """Called when a stream has ended."""

    def _nudge(self) -> None:
        """Wake up waiting tasks, because something changed: the wanted names, an error, the end."""

    # Called by subclasses.

    async def _settle(self, rooms: set[int], topics: set[str], timeout_s: float | None) -> None:
        """Wait until the gateway has confirmed everything that is wanted. `rooms` and `topics` are those the caller asked for."""
        self._check_open()
        self._start()
        seconds = self._around.options.join_timeout_s if timeout_s is None else timeout_s
        waiter = Waiter(frozenset(rooms), frozenset(topics))
        self._waiters.append(waiter)
        if self._stream is not None:
            self._catch_up(self._stream)
        self._nudge()  # the reader must go on even if the buffer is full

        def late() -> OutcomeUnknown:
            why = self._why_late("did not confirm it")
            text = (
                f"the request did not take effect within {seconds:g} s ({why}); the client repeats it until a gateway confirms it"
            )
            return OutcomeUnknown(text)

        try:
            async with within(seconds, late):
                await waiter.done
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _why_late(self, missed: str) -> str:
        return f"gateway {self.gateway} {missed}" if self.gateway else f"no gateway: {self._reason or 'none answered yet'}"

    def _check_open(self) -> None:
        if self._closed:
            raise NotConnected(f"the {self.what} is closed; make a new one")
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-{self.what}")

    async def _stop(self) -> None:
        """End the connection; waiting callers get `NotConnected`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_waiters(NotConnected(f"the {self.what} was closed"))
        self._around.on_close(self)
        if self._error is None:
            self._announce(ConnectionState.CLOSED)

    # Connections.

    def _announce(self, state: ConnectionState, reason: str = "") -> None:
        self._around.tell(ConnectionEvent(state, self.what, self, self._last, reason))

    async def _run(self) -> None:
        try:
            await self._serve_for_ever()
        except PixiuError as error:
            self._fail(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("%s_failed", self.what)
            self._fail(PixiuError(f"the {self.what} failed: {type(error).__name__}: {error}"))

    def _fail(self, error: PixiuError) -> None:
        self._error = error
        self._fail_waiters(error)
        self._announce(ConnectionState.CLOSED, str(error))
        self._nudge()

    async def _serve_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._around.options.connect_timeout_s
        served_once = False
        options = self._around.options
        reconnects = Reconnects(Backoff(options.backoff_s, options.max_backoff_s, self._around.uniform))
        while True:
            address = self._choose(reconnects.failures)
            self._answered_at, self._confirmed = None, False
            if address:
                await self._pause(self._resting.left_s(address, loop.time()))
                await self._serve_gateway(address, served_once)
                served_once = served_once or self._answered_at is not None
                if self._answered_at is not None:
                    self._announce(ConnectionState.RECONNECTING, self._reason)
            else:
                self._reason = "the cluster has no gateway; start one"
            self._around.directory.refresh()
            if not served_once and loop.time() >= give_up:
                raise Unreachable(
                    f"no gateway accepted the {self.what} within {self._around.options.connect_timeout_s:g} s ({self._reason})"
                )
            log.warning("gateway_lost what=%s uin=%d reason=%s", self.what, self._around.uin, self._reason)
            lived_s = loop.time() - self._answered_at if self._answered_at is not None else 0.0
            await self._pause(reconnects.lost(lived_s, self._confirmed))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _choose(self, failures: int, avoid: str = "") -> str:
        """Choose a gateway: the client's own, by rendezvous of its name; after failures the next ones in that order."""
        by_hash = {xxhash.xxh3_64_intdigest(address.encode()) & MAX_ID: address for address in self._around.directory.map.gateways}
        order = [
            by_hash[number] for number in rendezvous_order(xxhash.xxh3_64_intdigest(self._around.client.encode()), list(by_hash))
        ]
        order = self._resting.usable([address for address in order if address != avoid], asyncio.get_running_loop().time())
        return order[failures % len(order)] if order else ""

    async def _serve_gateway(self, address: str, reconnect: bool) -> None:
        """Serve from one gateway, and from those it hands over to, until a connection is lost."""
        stream = self._connect(address)
        why, refused = CLOSED_BY_PEER, False
        try:
            await self._greet(stream)
            self._answered_at = asyncio.get_running_loop().time()
            if reconnect:
                self._lost()
            self._stream, self._last = stream, address
            self._announce(ConnectionState.CONNECTED)
            self._catch_up(stream)  # names that were asked for meanwhile
            while (successor := await self._serve(stream)) is not None:
                await self._end(stream)
                stream = self._stream = successor
                self._catch_up(stream)
        except StreamEnded as ended:
            why, refused = str(ended), ended.refused
            self._resting.refused(stream.address, ended.retry_after_ms / 1000, asyncio.get_running_loop().time())
        except Unavailable as error:
            why = str(error)
        finally:
            self._stream, self._confirmed = None, stream.settled and not stream.lacking
            await self._end(stream)
        self._reason = f"{stream.address}: {why}"
        if refused:
            raise_for_login((why,))
            raise Unavailable(f"the gateway refused the {self.what} ({self._reason})")

    async def _end(self, stream: GatewayStream) -> None:
        """Close a stream. The next stream answers the waiting callers; those it cannot answer fail now."""
        for waiter in await stream.close():
            if waiter.lost is None:
                self._waiters.append(waiter)
            else:
                waiter.finish(waiter.lost)
        self._stream_over(stream)

    async def _greet(self, stream: GatewayStream) -> None:
        """Join everything that is wanted and wait for the gateway's first reply. Raises `StreamEnded`."""
        self._catch_up(stream)
        reading = stream.read()
        await asyncio.wait({reading}, timeout=self._around.options.connect_timeout_s)
        if not reading.done():
            raise StreamEnded("no answer in time")
        if reading.exception() is not None:
            stream.take()

    def _catch_up(self, stream: GatewayStream) -> None:
        waiters, self._waiters = [waiter for waiter in self._waiters if not waiter.done.done()], []
        try:
            stream.reconcile(self._rooms, self._topics, waiters)
        except Overloaded as error:
            for waiter in waiters:
                waiter.finish(error)

    async def _serve(self, stream: GatewayStream) -> GatewayStream | None:
        """Deliver what a gateway sends. Returns the stream to continue with, None when this one ended."""
        successor: asyncio.Task[_Prepared | None] | None = None
        ended = False
        try:
            while True:
                if stream.draining and successor is None:
                    self._overlap(True)
                    successor = asyncio.create_task(self._prepare(stream.address), name="pixiu-next-gateway")
                waiting: list[asyncio.Task[Any]] = [] if ended else [stream.read()]
                if successor is not None:
                    waiting.append(successor)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if successor is not None and successor.done():
                    prepared = successor.result()
                    if prepared is not None:
                        missing = GONE_EARLY if ended else await self._read_rest(stream)
                        return await self._move(prepared, stream.address, missing)
                    if ended:
                        return None
                    # No other gateway is available: stay until this one ends.
                    stream.draining, successor = False, None
                    self._overlap(False)
                elif successor is None:
                    reply = stream.take()
                    if reply is None:
                        return None
                    await self._take(stream, reply)
                else:
                    ended = not await self._take_last(stream)
        finally:
            self._overlap(False)
            if successor is not None:
                await self._discard(successor)

    async def _take_last(self, stream: GatewayStream) -> bool:
        """Take a reply of a gateway that is leaving; False at its end, which is no longer a failure.

        `LoginReplaced` is no failure either: the device that connected elsewhere is the successor's connection.
        """
        try:
            reply = stream.take()
        except StreamEnded:
            return False
        if reply is not None and reply.error_code == LoginReplaced.code:
            return False
        if reply is not None:
            await self._take(stream, reply)
        return reply is not None

    async def _read_rest(self, stream: GatewayStream) -> str:
        """Deliver what the old gateway still sends; replies of the new one are held, so that the order is kept. Returns why
        messages may be missing; empty: none are."""
        if not self._linger_s or not await self._read_for(stream, self._linger_s):
            return ""
        for _ in range(ANSWERS):
            answer = Waiter(frozenset(), frozenset())
            try:
                stream.acknowledge([], answer)
                if not await self._read_for(stream, ANSWER_S, answer):
                    return ""
                if not answer.done.done():
                    return f"the draining gateway {stream.address} did not answer within {ANSWER_S:g} s"
            except Overloaded:
                return ""  # it has not confirmed many requests, which the new gateway has
            finally:
                answer.done.cancel()
        return ""

    async def _read_for(self, stream: GatewayStream, seconds: float, answer: Waiter | None = None) -> bool:
        """Deliver what a gateway that is leaving sends, for a time, or until it has answered. False at its end."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0 and not (answer is not None and answer.done.done()):
            done, _ = await asyncio.wait({stream.read()}, timeout=left)
            if done and not await self._take_last(stream):
                return False
        return True

    async def _discard(self, successor: asyncio.Task[_Prepared | None]) -> None:
        successor.cancel()
        for result in await asyncio.gather(successor, return_exceptions=True):
            if isinstance(result, _Prepared) and result.stream is not self._moved_to:
                await self._end(result.stream)

    async def _prepare(self, avoid: str) -> _Prepared | None:
        """Join everything at another gateway while the old one still delivers. Replies that arrive meanwhile are held."""
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
                    size += len(reply.batch) + len(reply.mail)
                return _Prepared(stream, held)
        except (TimeoutError, StreamEnded):
            await self._end(stream)
            return None
        except asyncio.CancelledError:
            await self._end(stream)
            raise

    async def _move(self, prepared: _Prepared, old: str, missing: str) -> GatewayStream:
        """Deliver what the new gateway has already sent, without what came from the old one. `missing`: why more may be missing."""
        self._moved_to, self._last = prepared.stream, prepared.stream.address
        self._moved()
        self._announce(ConnectionState.MOVED, f"the previous gateway, {old}, is draining")
        if missing:
            self._reason = missing
            self._lost()
        try:
            for reply in prepared.held:
                await self._take(prepared.stream, reply, held=True)
        except BaseException:
            await self._end(prepared.stream)
            raise
        return prepared.stream

    # Replies.

    async def _take(self, stream: GatewayStream, reply: wire_pb2.SubscribeReply, *, held: bool = False) -> None:
        if reply.uin:
            stream.uin = reply.uin
            stream.max_names = min(reply.max_names or MAX_NAMES_A_REQUEST, MAX_NAMES_A_REQUEST)
        if reply.draining:
            stream.draining = True
        if reply.error_code:
            self._refused(stream, reply)
        elif reply.request:
            stream.confirmed(reply.request)
        await self._content(stream, reply, held=held)

    def _refused(self, stream: GatewayStream, reply: wire_pb2.SubscribeReply) -> None:
        """Handle a refusal. Waiting callers get the error; otherwise an error of ours ends the subscription, and any other makes
        the client try another gateway."""
        rooms, topics, told = stream.refused(reply.request, reply.error_code, reply.error_text, reply.retry_after_ms)
        for waiter in told:
            self._rooms -= rooms & waiter.rooms
            self._topics -= topics & waiter.topics
        if told and not rooms & self._rooms and not topics & self._topics:
            return
        if reply.error_code == Overloaded.code and (rooms or topics):
            self._ask_again(stream, reply.retry_after_ms or ASK_AGAIN_MS)
            return
        text = f"gateway {stream.address} refused: {reply.error_text}"
        error = error_of_code(reply.error_code, text)
        raise error if isinstance(error, LocalError | NotServed) else Unavailable(text)

    def _ask_again(self, stream: GatewayStream, after_ms: int) -> None:
        """Join again later, because joins overload the gateway; reconnecting with all rooms would load this or another gateway
        more."""
        if stream.lacking:
            return
        stream.lacking = True

        def ask() -> None:
            stream.lacking = False
            if self._stream is stream:
                self._catch_up(stream)

        asyncio.get_running_loop().call_later(retry_after_s(min(after_ms, MAX_PUSHBACK_MS), self._around.uniform), ask)

    def _fail_waiters(self, error: PixiuError) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.finish(error)
