"""The synchronous twin: the same names, for programs without asyncio. One background thread runs the event loop.

with pixiu.connect_sync("127.0.0.1:7002") as px:
    px.room(42).send(b"hello")                       # returns when the cluster has accepted it
    receipt = px.room(42).send_soon(b"hello")        # returns at once
    receipt.wait()
    for message in px.subscribe(room=42):
        print(message.payload)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Final, Self, Unpack

from pixiu.client.client import Client, connect
from pixiu.client.connection_events import ConnectionEvent, ConnectionEventStream
from pixiu.client.destination import Destination, Room, Topic, User
from pixiu.client.login import Token
from pixiu.client.messages.drafts import Draft
from pixiu.client.messages.message import Message
from pixiu.client.messages.send_options import SendOptions
from pixiu.client.options import ClientOptions, OptionOverrides
from pixiu.client.receive.subscriber import Subscription, SubscriptionCounters
from pixiu.client.send.awaited import SendFailure
from pixiu.client.send.early import failure_of
from pixiu.client.send.streams import Receipt
from pixiu.client.sync.blocking import Background, Twin, TwinWriter, blocking, blocking_as, here, here_as, in_loop_as, sending_as
from pixiu.client.sync.mail import SyncInbox, SyncMailReceipt, SyncMailWriter
from pixiu.client.sync.receipts import SyncReceipt, SyncSignalReceipt
from pixiu.client.sync.topics import SyncDurableTopic, SyncTopics
from pixiu.client.topics.topic_admin import Topics
from pixiu.client.writer import Writer
from pixiu.errors import InvalidArgument, NotConnected, NotSent
from pixiu.ids import UIN, RoomID

Posted = tuple[Draft, Receipt, float, float | None]
"""A message, its receipt, the monotonic time at which it was posted, and its own time-out."""
MAX_OUTBOX: Final = 1_000
"""Limit of messages between a caller's thread and the loop; a `send` above it waits."""


def _receipts(background: Background, receipts: list[Receipt]) -> list[SyncReceipt]:
    return [SyncReceipt(background, receipt) for receipt in receipts]


def _as_it_is(background: Background, message: Message) -> Message:
    return message


def _reply_elsewhere(message: Message, *_: object, **__: object) -> Awaitable[Receipt]:
    raise InvalidArgument("in threads a request is answered by px.reply(message, payload)")


class SyncWriter(TwinWriter[Writer]):
    """`Writer` for a thread: `with px.room(42).writer() as writer: writer.send(b"…")`."""

    __slots__ = ()
    send = sending_as(SyncReceipt, Writer.send)


class SyncDestination(Twin[Destination]):
    """A room or a topic to send to."""

    __slots__ = ()
    send = sending_as(SyncReceipt, Destination.send)
    send_many = sending_as(_receipts, Destination.send_many)
    request = sending_as(_as_it_is, Destination.request)
    writer = here_as(SyncWriter, Destination.writer)

    def send_soon(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> SyncReceipt:
        """Send a message without waiting for its outcome. It waits for space where `Destination.send_soon` raises `Overloaded`. The
        receipt reports a missing worker number for message IDs.
        """
        draft = self._wrapped.draft(payload, **options)
        return SyncReceipt(self._background, self._background.post(draft, timeout_s))


class SyncRoom(SyncDestination):
    """A room to send messages and signals to."""

    __slots__ = ()
    _wrapped: Room
    signal = blocking_as(SyncSignalReceipt, Room.signal)
    signal_soon = in_loop_as(SyncSignalReceipt, Room.signal_soon)

    @property
    def id(self) -> RoomID:
        """The room's RoomID."""
        return self._wrapped.id


class SyncTopic(SyncDestination):
    """A free topic to send to."""

    __slots__ = ()
    _wrapped: Topic

    @property
    def name(self) -> str:
        """The topic's name."""
        return self._wrapped.name


class SyncUser(Twin[User]):
    """A user to send to."""

    __slots__ = ()
    chat = sending_as(SyncReceipt, User.chat)
    request = sending_as(_as_it_is, User.request)
    signal = blocking_as(SyncSignalReceipt, User.signal)
    signal_soon = in_loop_as(SyncSignalReceipt, User.signal_soon)
    mail = blocking_as(SyncMailReceipt, User.mail)
    mail_soon = in_loop_as(SyncMailReceipt, User.mail_soon)

    @property
    def destination(self) -> SyncDestination:
        """The destination of chat messages to the user."""
        return SyncDestination(self._background, self._wrapped.destination)

    @property
    def uin(self) -> UIN:
        """The user's UIN."""
        return self._wrapped.uin

    def chat_soon(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> SyncReceipt:
        """Send a message to every device of the user that is online and takes messages, without waiting for its outcome; options as
        for `Destination.send_soon`."""
        return self.destination.send_soon(payload, timeout_s=timeout_s, **options)


class SyncSubscription(Twin[Subscription]):
    """`Subscription` for a thread: `for message in px.subscribe(room=42)`. One thread at a time may iterate.

    The callbacks run in the background thread.
    """

    def __init__(self, background: Background, subscription: Subscription) -> None:
        super().__init__(background, subscription)
        subscription.answer = _reply_elsewhere
        self._current: list[Message] = []
        self._next = 0

    join = blocking(Subscription.join)
    leave = blocking(Subscription.leave)
    ready = blocking(Subscription.ready)
    close = blocking(Subscription.close)

    @property
    def rooms(self) -> frozenset[int]:
        """The rooms that are wanted."""
        return self._wrapped.rooms

    @property
    def topics(self) -> frozenset[str]:
        """The topics and filters that are wanted."""
        return self._wrapped.topics

    @property
    def counters(self) -> SubscriptionCounters:
        """Counters since the subscription was opened."""
        return self._wrapped.counters

    @property
    def gateway(self) -> str:
        """The address of the gateway that serves now; empty while there is none."""
        return self._wrapped.gateway

    def run(self, handler: Callable[[Message], None]) -> None:
        """Call `handler` with each message, one after the other, until another thread closes the subscription. `handler` runs in a
        thread of its own and may block; a message for which it raised is counted and logged, as by `Subscription.run`."""

        async def called(message: Message) -> None:
            await asyncio.to_thread(handler, message)

        self._background.run(self._wrapped.run(called))

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while self._next >= len(self._current):
            batch = self._background.run_until_end(self._wrapped.next_batch())
            if batch is None:
                raise StopIteration
            self._current, self._next = batch, 0
        message = self._current[self._next]
        self._next += 1
        return message

    def batches(self) -> Iterator[list[Message]]:
        """Iterate over messages in the lists in which they arrived."""
        if self._next < len(self._current):
            rest, self._current, self._next = self._current[self._next :], [], 0
            yield rest
        while (batch := self._background.run_until_end(self._wrapped.next_batch())) is not None:
            yield batch

    def __enter__(self) -> Self:
        self.ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SyncConnectionEvents(Twin[ConnectionEventStream]):
    """Connection events for a thread: `for event in px.connection_events()`. It ends when the client is closed."""

    __slots__ = ()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ConnectionEvent:
        event = self._background.run_until_end(self._wrapped.next())
        if event is None:
            event = self._wrapped.take()  # the client was closed: take the events that are left
        if event is None:
            raise StopIteration
        return event


class SyncClient(Background):
    """`Client` for programs without asyncio; made by `connect_sync`, used with `with`. Threads may share it.

    Source: docs/operations.md.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        super().__init__()
        self._make = make
        make()  # wrong arguments raise here, not in the other thread
        self._client: Client | None = None
        self._outbox: deque[Posted | concurrent.futures.Future[None]] = deque()
        self._changed = threading.Condition()
        self._pumping = False
        self._pump_task: asyncio.Task[None] | None = None

    room = here_as(SyncRoom, Client.room)
    topic = here_as(SyncTopic, Client.topic)
    user = here_as(SyncUser, Client.user)
    durable_topic = in_loop_as(SyncDurableTopic, Client.durable_topic)
    subscribe = in_loop_as(SyncSubscription, Client.subscribe)
    inbox = in_loop_as(SyncInbox, Client.inbox)
    mail_writer = in_loop_as(SyncMailWriter, Client.mail_writer)
    connection_events = in_loop_as(SyncConnectionEvents, Client.connection_events)
    presence = blocking(Client.presence)
    reply = sending_as(SyncReceipt, Client.reply)
    stats = here(Client.stats)
    cluster = here(Client.cluster)

    @property
    def topics(self) -> SyncTopics:
        """The cluster's durable topics, to create, change and look at."""
        client = self._wrapped

        async def there() -> Topics:
            return client.topics

        return SyncTopics(self, self.run(there()))

    def open(self) -> Self:
        """Connect. Raises `Unreachable` or `RegistryUnavailable` with every address that was tried."""
        if self._loop is not None:
            raise NotConnected("the client is open already; make another one for another connection")
        self.start_thread()
        try:
            self._client = self.run(self._open())
        except BaseException:
            self.stop_thread()
            raise
        return self

    def close(self) -> None:
        """Wait until everything sent is resolved (at most `publish_timeout_s`), then disconnect and end the thread."""
        reached: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._changed:
            client, self._client = self._client, None
            if client is None:
                return
            self._append(client, reached)  # the last one: nothing is taken any more
            self._changed.notify_all()
        try:
            reached.result()
            self.run(client.close())
        finally:
            self.stop_thread()
            for item in self._outbox:
                if isinstance(item, concurrent.futures.Future):
                    item.set_exception(self._not_connected())
            self._outbox.clear()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The client's name in logs and metrics of the cluster."""
        return self._wrapped.name

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until every message sent so far is accepted or has failed. Raises `OutcomeUnknown` after `timeout_s`."""
        client = self._wrapped
        self._wait_for_outbox()
        self.run(client.flush(timeout_s=timeout_s))

    def forked(self) -> None:
        """Drop all connections: this process is a child of the one that connected."""
        super().forked()
        self._client = None
        self._changed = threading.Condition()

    def settle(self) -> None:
        """Wait until the client has everything that was handed over."""
        if self._client is not None and self._pumping:
            self._wait_for_outbox()

    def post(self, draft: Draft, timeout_s: float | None) -> Receipt:
        """Hand a message to the loop. Waking the loop costs more than a message, so it is woken once for many."""
        receipt = Receipt(b"", draft.key, draft.lane, 0)
        self._put((draft, receipt, time.monotonic(), timeout_s))
        return receipt

    def _put(self, item: Posted | concurrent.futures.Future[None]) -> None:
        with self._changed:
            client = self._wrapped
            while len(self._outbox) >= MAX_OUTBOX:
                self._changed.wait()
                client = self._wrapped
            self._append(client, item)

    def _append(self, client: Client, item: Posted | concurrent.futures.Future[None]) -> None:
        """Add to the outbox; the caller holds its lock."""
        if not self._pumping:
            self.call_soon(partial(self._start_pump, client))
            self._pumping = True
        self._outbox.append(item)

    def _start_pump(self, client: Client) -> None:
        self._pump_task = asyncio.get_running_loop().create_task(self._pump(client), name="pixiu-outbox")

    async def _pump(self, client: Client) -> None:
        while True:
            with self._changed:
                if not self._outbox:
                    self._pumping = False
                    return
                item = self._outbox.popleft()
                if len(self._outbox) == MAX_OUTBOX // 2:
                    self._changed.notify_all()
            if isinstance(item, concurrent.futures.Future):
                item.set_result(None)
                continue
            draft, receipt, posted_at, timeout_s = item
            limit_s = client.options.publish_timeout_s if timeout_s is None else timeout_s
            try:
                if time.monotonic() > posted_at + limit_s:
                    # A message that waited this long while the one before it got no space or no ID must not wait again.
                    raise NotSent("the message was not sent in time, because earlier ones could not be; send again")
                await client.submit(draft, receipt, None if timeout_s is None else posted_at + timeout_s)
            except Exception as error:
                receipt.fail(failure_of(error), client.reports)

    def _wait_for_outbox(self) -> None:
        reached: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._put(reached)
        reached.result()

    @property
    def _background(self) -> Background:
        return self

    @property
    def _wrapped(self) -> Client:
        if self._client is None:
            raise self._not_connected()
        return self._client

    async def _open(self) -> Client:
        return await self._make().open()


def connect_sync(
    target: str | None = None,
    *,
    uin: int = 0,
    client: str = "",
    token: Token | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    options: ClientOptions | None = None,
    on_failure: Callable[[SendFailure], None] | None = None,
    on_connection: Callable[[ConnectionEvent], None] | None = None,
    **overrides: Unpack[OptionOverrides],
) -> SyncClient:
    """Make a synchronous client: `with pixiu.connect_sync("127.0.0.1:7002") as px:`. Arguments and errors as for `connect`;
    `on_failure` and `on_connection` run in the background thread."""

    def make() -> Client:
        return connect(
            target,
            uin=uin,
            client=client,
            token=token,
            ca=ca,
            certificate=certificate,
            options=options,
            on_failure=on_failure,
            on_connection=on_connection,
            **overrides,
        )

    return SyncClient(make)
