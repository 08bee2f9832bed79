"""The subscriber: messages of rooms and topics from one gateway, and from another when that one leaves.

    gateway ──batch──▶ decode, CRC ──▶ bounded buffer ──▶ `async for`
                                         │ full: nothing is read, gRPC pushes back, the gateway drops and counts

Source: docs/promises.md, "Failure rules" 3 and 6, docs/operations.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from inspect import isawaitable
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, Self

from pixiu.client.messages.load_test import LoadTest, check_load_test, handling
from pixiu.client.messages.message import Message, Request, check_topic_filter, messages_of
from pixiu.client.receive.gateway_connection import ConnectionContext, GatewayConnection
from pixiu.client.receive.gateway_stream import GatewayStream
from pixiu.client.send.signals import RecentSignals
from pixiu.client.send.streams import Receipt
from pixiu.errors import InvalidArgument, NotAllowed
from pixiu.ids import MAX_ROOM, is_within
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX
from pixiu.wire.v1 import wire_pb2

MAX_NAMES: Final = 100_000
"""Limit of rooms and topics of one subscription."""
MAX_OVERLAP_IDS: Final = 100_000
"""Limit of messages that are remembered while two gateways deliver the same ones, on a change of gateway."""
LATE_S: Final = 10.0
"""Time after a change of gateway in which the new one, if it is slower, may still send what the old one sent already, seconds."""
REPEATED_S: Final = 60.0
"""Time after the loss of a gateway in which senders may repeat what it had delivered, seconds: their processes may be gone, too."""
MAX_RECENT: Final = 10_000
"""Limit of messages that are remembered for such a loss."""
SHOWN_NAMES: Final = 3
"""Limit of names in a text."""
ASKS_FOR_REPLY: Final = b'"reply-to"'
"""Text in the extension of a request."""
# Access by index, because this runs for every message.
_is_signal: Final = itemgetter(Message._fields.index("signal"))
_is_load_test: Final = itemgetter(Message._fields.index("load_test"))
_extension_of: Final = itemgetter(Message._fields.index("extension"))
log = logging.getLogger("pixiu.client")


@dataclass(slots=True)
class SubscriptionCounters:
    """Totals of one subscription."""

    received: int = 0
    """Messages taken from gateways, damaged ones not counted."""
    load_test_blocked: int = 0
    """Messages left out by `load_test`: marked ones, or with "only" all others."""
    damaged: int = 0
    """Messages whose CRC or lengths were wrong; they are left out."""
    dropped: int = 0
    """Messages that a gateway reports as dropped because this subscriber was too slow."""
    gaps: int = 0
    """Times that the connection was lost: messages of the time between are missing."""
    moves: int = 0
    """Changes of gateway without a gap."""
    handler_failures: int = 0
    """Messages for which the handler of `run` raised."""
    callback_errors: int = 0
    """Exceptions raised by `on_gap` and `on_dropped`."""


class Subscription(GatewayConnection):
    """Messages of rooms and topics: `async for message in subscription`. One task at a time may iterate.

    It connects when it is first iterated or joined, and reconnects by itself. `on_gap(reason)` is called when messages
    may be missing because a connection was lost; `on_dropped(count)` when the gateway dropped messages because this
    side was too slow. Both run in the event loop and must not block.

    Source: docs/promises.md, "Failure rules" 3 and 6; README.md.
    """

    what = "subscription"

    def __init__(
        self,
        surroundings: ConnectionContext,
        rooms: Iterable[int],
        topics: Iterable[str],
        on_gap: Callable[[str], None] | None,
        on_dropped: Callable[[int], None] | None,
        *,
        room: int | None = None,
        topic: str | None = None,
        chat: bool = False,
        load_test: LoadTest = "block",
    ) -> None:
        super().__init__(surroundings)
        self._load_test = check_load_test(load_test)
        self.counters = SubscriptionCounters()
        self._rooms, self._topics = self._check(rooms, topics)
        one_room, one_topic = self._check(() if room is None else (room,), () if topic is None else (topic,))
        self._rooms |= one_room
        self._topics |= one_topic
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
        self._taking = False
        self._seen: set[tuple[int, int]] | None = None
        """Messages that arrived while two gateways deliver; None while there is one."""
        self._came: set[tuple[int, int]] = set()
        """Those of the last change of gateway, until `_came_until`."""
        self._came_until = 0.0
        self._recent: deque[list[tuple[int, int]]] = deque()
        """Messages that arrived last, a list for each reply."""
        self._recent_count = 0
        self._signals = RecentSignals()
        self.answer: Callable[..., Awaitable[Receipt]] = surroundings.reply
        """Called by `message.reply`."""

    # Called by users.

    @property
    def rooms(self) -> frozenset[int]:
        """The rooms that are wanted."""
        return frozenset(self._rooms)

    @property
    def topics(self) -> frozenset[str]:
        """The topics and filters that are wanted."""
        return frozenset(self._topics)

    async def join(self, rooms: Iterable[int] = (), topics: Iterable[str] = (), *, timeout_s: float | None = None) -> None:
        """Join rooms and topics; returns when the whole cluster knows: messages sent from then on arrive.

        Raises `InvalidArgument`, the gateway's refusal, or `OutcomeUnknown` after `timeout_s` (default: the option
        `join_timeout_s`). After `OutcomeUnknown` they stay wanted and are joined once a gateway answers, unless left.
        """
        checked_rooms, checked_topics = self._check(rooms, topics)
        if len(self._rooms) + len(checked_rooms) + len(self._topics) + len(checked_topics) > MAX_NAMES:
            raise InvalidArgument(f"a subscription has at most {MAX_NAMES} rooms and topics; use several")
        self._rooms |= checked_rooms
        self._topics |= checked_topics
        await self._settle(checked_rooms, checked_topics, timeout_s)

    async def leave(self, rooms: Iterable[int] = (), topics: Iterable[str] = (), *, timeout_s: float | None = None) -> None:
        """Leave rooms and topics; returns when the whole cluster knows. Raises the errors of `join`."""
        checked_rooms, checked_topics = self._check(rooms, topics)
        self._rooms -= checked_rooms
        self._topics -= checked_topics
        await self._settle(checked_rooms, checked_topics, timeout_s)

    async def ready(self, *, timeout_s: float | None = None) -> None:
        """Connect, and wait until everything wanted has been joined. Raises the errors of `join`."""
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
        """Iterate over messages in the lists in which they arrived, never empty: faster than one by one."""
        if self._next < len(self._current):
            rest, self._current, self._next = self._current[self._next :], [], 0
            yield rest
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> list[Message] | None:
        """Wait for the messages that arrived together next, at least one; None once the subscription is closed.

        Raises the error that ended the subscription, a refusal, or `Unreachable` when no gateway could be reached at first; and
        `InvalidArgument` while another task waits for messages.
        """
        if self._task is None and not (self._rooms or self._topics or self._chat):
            raise InvalidArgument("nothing is subscribed to: subscribe(room=…), topic=…, chat=True, or join some first")
        if not self._closed:
            self._start()
        while not self._buffer or self._closed:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            if self._taking:
                raise InvalidArgument("another task iterates this subscription already: make one for each")
            self._arrived.clear()
            self._taking = True
            try:
                await self._arrived.wait()
            finally:
                self._taking = False
        messages, size = self._buffer.popleft()
        self._buffered_bytes -= size
        self._buffered_records -= len(messages)
        self._space.set()
        return messages

    async def run(self, handler: Callable[[Message], Awaitable[None] | None]) -> None:
        """Call `handler` with each message, one after the other. Ends when the subscription is closed.

        Messages are real time and not kept: one for which the handler raised is counted (`counters.handler_failures`), logged, and
        not delivered again.

        Args:
            handler: a coroutine function, or a function that does not block. While it runs, messages wait in the buffer; when
                that is full the gateway drops and counts (`on_dropped`).

        Raises the errors of iterating.
        """
        async for message in self:
            try:
                with handling(marked=message.load_test):
                    result = handler(message)
                    if isawaitable(result):
                        await result
            except Exception:
                self.counters.handler_failures += 1
                log.exception("message_handler_failed destination=%s id=%016x", message.destination, message.message_id)

    async def close(self) -> None:
        """Leave everything and stop. An iteration that waits ends."""
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        self._space.set()
        await self._stop()

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # Inside: the wanted names.

    @staticmethod
    def _check(rooms: Iterable[int], topics: Iterable[str]) -> tuple[set[int], set[str]]:
        if isinstance(topics, str):
            raise InvalidArgument(f"topics is a list of names; write topics=[{topics!r}]")
        if isinstance(rooms, str | bytes) or not isinstance(rooms, Iterable):
            raise InvalidArgument(f"rooms is a list of RoomIDs, not {rooms!r}; write rooms=[42], or room=42")
        found = list(rooms)
        for room in found:
            if not is_within(room, 1, MAX_ROOM):
                raise InvalidArgument(f"a RoomID is from 1 to 2^62-1, not {room!r}")
        return set(found), {check_topic_filter(topic) for topic in topics}

    # Inside: called by the connection.

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

    def _overlap(self, begins: bool) -> None:
        if not begins and self._seen:
            self._came, self._came_until = self._seen, asyncio.get_running_loop().time() + LATE_S
        self._seen = set() if begins else None

    def _lost(self) -> None:
        self._came, self._came_until = self._came.union(*self._recent), asyncio.get_running_loop().time() + REPEATED_S
        self.counters.gaps += 1
        self._call_back(self._on_gap, self._reason)

    def _moved(self) -> None:
        self.counters.moves += 1

    def _nudge(self) -> None:
        self._space.set()
        self._arrived.set()

    # Inside: replies.

    async def _content(self, stream: GatewayStream, reply: wire_pb2.SubscribeReply, *, held: bool) -> None:
        if reply.revoked_rooms or reply.revoked_topics:
            self._revoked(stream, set(reply.revoked_rooms), set(reply.revoked_topics), reply.error_text)
        if reply.dropped:
            self.counters.dropped += reply.dropped
            self._call_back(self._on_dropped, reply.dropped)
        if reply.batch or reply.count:
            if self._came and asyncio.get_running_loop().time() >= self._came_until:
                self._came = set()
            await self._deliver(reply, self._came if not held or self._seen is None else self._seen, held=held)

    def _revoked(self, stream: GatewayStream, rooms: set[int], topics: set[str], reason: str) -> None:
        """Forget what is no longer allowed: the next gateway is not asked for it. Raises `NotAllowed` if nothing is left."""
        self._rooms -= rooms
        stream.rooms -= rooms
        self._topics -= topics
        stream.topics -= topics
        self._chat = self._chat and f"{USER_PREFIX}{self._around.uin}" not in topics
        text = ", ".join(sorted((*(f"{ROOM_PREFIX}{room}" for room in rooms), *topics))[:SHOWN_NAMES])
        text = f"the permission to subscribe to {text} has ended" + (f": {reason}" if reason else "")
        if not (self._rooms or self._topics or self._chat):
            raise NotAllowed(text)
        self._call_back(self._on_gap, text)

    async def _deliver(self, reply: wire_pb2.SubscribeReply, repeated: set[tuple[int, int]], *, held: bool) -> None:
        messages, damaged = messages_of(reply.batch, reply.count)
        self.counters.damaged += damaged
        if any(map(_is_signal, messages)):
            is_new = self._signals.is_new
            messages = [message for message in messages if not message.signal or is_new(message.message_id, message.room)]
        if self._load_test != "pass" and (self._load_test == "only" or any(map(_is_load_test, messages))):
            before, wanted = len(messages), self._load_test == "only"
            messages = [message for message in messages if message.load_test is wanted]
            self.counters.load_test_blocked += before - len(messages)
        if any(map(_extension_of, messages)):
            messages = [self._request(message) if ASKS_FOR_REPLY in message.extension else message for message in messages]
        if repeated:
            messages = [message for message in messages if (message.message_id, message.room) not in repeated]
        if not messages:
            return
        came: list[tuple[int, int]] = [(message.message_id, message.room) for message in messages]
        if self._seen is not None and not held and len(self._seen) < MAX_OVERLAP_IDS:
            self._seen.update(came)
        self._recent.append(came)
        self._recent_count += len(came)
        while self._recent_count > MAX_RECENT and len(self._recent) > 1:
            self._recent_count -= len(self._recent.popleft())
        self.counters.received += len(messages)
        while self._full(len(messages), len(reply.batch)):
            # The task that awaits a confirmation may be the one that should empty the buffer: reading then continues and drops the
            # oldest.
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

    def _request(self, message: Message) -> Request:
        request = Request(*message)
        request.answer = self.answer
        return request

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

    def _call_back(self, callback: Callable[[Any], None] | None, value: Any) -> None:
        if callback is None:
            return
        try:
            callback(value)
        except Exception:
            self.counters.callback_errors += 1
            log.exception("subscription_callback_failed")
