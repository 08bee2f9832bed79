"""The synchronous twin: the same names, for programs without asyncio. One background thread runs the event loop.

with pixiu.connect_sync("127.0.0.1:7000") as px:
    px.room(42).send(b"hello")
    px.room(42).send(b"important").wait()
    for message in px.subscribe(room=42):
        print(message.payload)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from pixiu.client.client import Client, ClientStats, connect, failure_of
from pixiu.client.destination import Destination, Draft, Room, User
from pixiu.client.directory import ClusterMap
from pixiu.client.events import Failure
from pixiu.client.inbox import Inbox
from pixiu.client.inbox_core import MailGap
from pixiu.client.mail_writer import LevelName
from pixiu.client.message import Message
from pixiu.client.options import OptionOverrides
from pixiu.client.presence import UserPresence
from pixiu.client.signalling import SignalReceipt
from pixiu.client.streams import Receipt
from pixiu.client.subscriber import Subscription, SubscriptionCounters
from pixiu.client.sync_inbox import SyncInbox
from pixiu.client.sync_mail import SyncMailReceipt, SyncMailWriter
from pixiu.errors import NotConnected, PixiuError, Unavailable
from pixiu.ids import SnowflakeID
from pixiu.wire.record import LANE_NORMAL

MAX_OUTBOX: Final = 1_000
"""Messages between a caller's thread and the loop; a `send` above it waits."""
T = TypeVar("T")


class SyncReceipt:
    """What `send` and `signal` return. Not waiting for it costs nothing; a failure is then only counted."""

    __slots__ = ("_client", "_receipt")

    def __init__(self, client: SyncClient, receipt: Receipt | SignalReceipt) -> None:
        self._client = client
        self._receipt = receipt

    @property
    def id(self) -> SnowflakeID:
        """The message's ID; 0 until the background thread has taken the message."""
        return self._receipt.id

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._receipt.done

    @property
    def error(self) -> PixiuError | None:
        """Why the message failed; None when it was accepted or is not resolved yet."""
        return self._receipt.error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the cluster's acceptance, or a signal's delivery. Raises as awaiting a `Receipt` or a `SignalReceipt` does,
        and TimeoutError after `timeout_s`.
        """

        async def accepted() -> None:
            async with asyncio.timeout(timeout_s):
                await self._receipt

        self._client.run(accepted())


class SyncDestination:
    """A room or a topic to send to."""

    __slots__ = ("_client", "_destination")

    def __init__(self, client: SyncClient, destination: Destination) -> None:
        self._client = client
        self._destination = destination

    def send(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> SyncReceipt:
        """Send a message; returns when it is queued. As `Destination.send`, except that a missing worker number for
        message IDs shows in the receipt.
        """
        draft = self._destination.draft(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        return self._client.post(draft)

    def send_and_wait(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> SyncReceipt:
        """`send`, then wait for the acceptance."""
        receipt = self.send(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        receipt.wait()
        return receipt


class SyncRoom(SyncDestination):
    """A room to send to, messages and signals."""

    __slots__ = ("_room",)

    def __init__(self, client: SyncClient, room: Room) -> None:
        super().__init__(client, room)
        self._room = room

    def signal(
        self,
        payload: bytes,
        receipt: bool = False,
        *,
        type: int = 0,
        lifetime_min: int = 0,
        extension: bytes = b"",
        first_lane: bool = False,
    ) -> SyncReceipt:
        """As `Room.signal`. Wait for what is returned where that is awaited."""
        signal = self._room.signal(
            payload, receipt, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane
        )
        return SyncReceipt(self._client, self._client.run(signal))


class SyncUser:
    """A user to send to."""

    __slots__ = ("_client", "_destination", "_user")

    def __init__(self, client: SyncClient, user: User) -> None:
        self._client = client
        self._user = user
        self._destination = SyncDestination(client, user.destination)

    def mail(
        self,
        payload: bytes,
        *,
        level: LevelName = "replicated",
        lane: int = LANE_NORMAL,
        expire: timedelta | None = None,
        to: Iterable[int] = (),
        type: int = 0,
        extension: bytes = b"",
    ) -> SyncMailReceipt:
        """As `User.mail`: returns when it is confirmed."""
        mail = self._user.mail(payload, level=level, lane=lane, expire=expire, to=to, type=type, extension=extension)
        return SyncMailReceipt(self._client, self._client.run(mail))

    def chat(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> SyncReceipt:
        """As `User.chat`; returns when it is queued."""
        return self._destination.send(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)

    def chat_and_wait(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> SyncReceipt:
        """`chat`, then wait for the acceptance."""
        return self._destination.send_and_wait(
            payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane
        )


class SyncSubscription:
    """`Subscription` for a thread: `for message in px.subscribe(room=42)`. One thread at a time may iterate.

    The callbacks run in the background thread.
    """

    def __init__(self, client: SyncClient, subscription: Subscription) -> None:
        self._client = client
        self._subscription = subscription
        self._current: list[Message] = []
        self._next = 0

    @property
    def counters(self) -> SubscriptionCounters:
        """Totals."""
        return self._subscription.counters

    @property
    def gateway(self) -> str:
        """The address of the gateway that serves now; empty while there is none."""
        return self._subscription.gateway

    def join(self, rooms: Iterable[int] = (), topics: Iterable[str] = (), *, timeout_s: float | None = None) -> None:
        """As `Subscription.join`."""
        self._client.run(self._subscription.join(rooms, topics, timeout_s=timeout_s))

    def leave(self, rooms: Iterable[int] = (), topics: Iterable[str] = (), *, timeout_s: float | None = None) -> None:
        """As `Subscription.leave`."""
        self._client.run(self._subscription.leave(rooms, topics, timeout_s=timeout_s))

    def ready(self, *, timeout_s: float | None = None) -> None:
        """As `Subscription.ready`."""
        self._client.run(self._subscription.ready(timeout_s=timeout_s))

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while self._next >= len(self._current):
            batch = self._client.run(self._subscription.next_batch())
            if batch is None:
                raise StopIteration
            self._current, self._next = batch, 0
        message = self._current[self._next]
        self._next += 1
        return message

    def batches(self) -> Iterator[list[Message]]:
        """The messages in the lists in which they arrived."""
        if self._next < len(self._current):
            rest, self._current, self._next = self._current[self._next :], [], 0
            yield rest
        while (batch := self._client.run(self._subscription.next_batch())) is not None:
            yield batch

    def close(self) -> None:
        """As `Subscription.close`."""
        self._client.run(self._subscription.close())

    def __enter__(self) -> Self:
        self.ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SyncClient:
    """`Client` for programs without asyncio; made by `connect_sync`, used with `with`. Threads may share it.

    Source: DESIGN section 15, "a synchronous twin".
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        make()  # a wrong argument shows here, not in the other thread
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._outbox: deque[tuple[Draft, Receipt, float] | concurrent.futures.Future[None]] = deque()
        self._changed = threading.Condition()
        self._pumping = False
        self._pump_task: asyncio.Task[None] | None = None

    def open(self) -> Self:
        """Connect. Raises `Unavailable` or `RegistryUnavailable` with every address that was tried."""
        if self._loop is not None:
            raise NotConnected("the client is open already; make another one for another connection")
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._thread = threading.Thread(target=self._turn, args=(loop,), name="pixiu-client", daemon=True)
        self._thread.start()
        try:
            self._client = self.run(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def close(self) -> None:
        """Wait until all that was sent is resolved (at most `publish_timeout_s`), then disconnect and end the thread."""
        client = self._client
        if client is None:
            return
        try:
            self._wait_for_outbox()
            self._client = None
            self.run(client.close())
        finally:
            self._client = None
            self._stop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The client's name in logs and metrics of the cluster."""
        return self._connected().name

    def room(self, room: int) -> SyncRoom:
        """As `Client.room`."""
        return SyncRoom(self, self._connected().room(room))

    def topic(self, name: str) -> SyncDestination:
        """As `Client.topic`."""
        return SyncDestination(self, self._connected().topic(name))

    def user(self, uin: int) -> SyncUser:
        """As `Client.user`."""
        return SyncUser(self, self._connected().user(uin))

    def mail_writer(self) -> SyncMailWriter:
        """As `Client.mail_writer`."""
        return SyncMailWriter(self, self._connected())

    def presence(self, uins: Iterable[int]) -> list[UserPresence]:
        """As `Client.presence`."""
        return self.run(self._connected().presence(uins))

    def subscribe(
        self,
        *,
        room: int | None = None,
        topic: str | None = None,
        rooms: Iterable[int] = (),
        topics: Iterable[str] = (),
        chat: bool = False,
        on_gap: Callable[[str], None] | None = None,
        on_dropped: Callable[[int], None] | None = None,
    ) -> SyncSubscription:
        """As `Client.subscribe`."""
        client = self._connected()

        async def make() -> Subscription:
            return client.subscribe(
                room=room, topic=topic, rooms=rooms, topics=topics, chat=chat, on_gap=on_gap, on_dropped=on_dropped
            )

        return SyncSubscription(self, self.run(make()))

    def inbox(self, *, uin: int = 0, device: str = "", on_gap: Callable[[MailGap], None] | None = None) -> SyncInbox:
        """As `Client.inbox`."""
        client = self._connected()

        async def make() -> Inbox:
            return client.inbox(uin=uin, device=device, on_gap=on_gap)

        return SyncInbox(self, self.run(make()))

    def flush(self) -> None:
        """Wait until every message sent so far is accepted or has failed."""
        client = self._connected()
        self._wait_for_outbox()
        self.run(client.flush())

    def stats(self) -> ClientStats:
        """Totals since `open`."""
        return self._connected().stats()

    def cluster(self) -> ClusterMap:
        """The proxies and gateways that the client knows now."""
        return self._connected().cluster()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background thread and wait for it; an interrupt of this thread cancels it."""
        loop = self._loop
        if loop is None or loop.is_closed():
            work.close()
            raise self._not_connected()
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call something in the background thread, without waiting."""
        loop = self._loop
        if loop is None or loop.is_closed():
            raise self._not_connected()
        loop.call_soon_threadsafe(call)

    def post(self, draft: Draft) -> SyncReceipt:
        """Hand a message to the loop. Waking the loop costs more than a message: it is woken once for many."""
        self._connected()
        receipt = Receipt(b"", draft.key, draft.lane, 0)
        self._put((draft, receipt, time.monotonic()))
        return SyncReceipt(self, receipt)

    def _put(self, item: tuple[Draft, Receipt, float] | concurrent.futures.Future[None]) -> None:
        with self._changed:
            while len(self._outbox) >= MAX_OUTBOX:
                self._changed.wait()
            self._outbox.append(item)
            wake = not self._pumping
            self._pumping = True
        if wake:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._start_pump)

    def _start_pump(self) -> None:
        self._pump_task = asyncio.get_running_loop().create_task(self._pump(), name="pixiu-outbox")

    async def _pump(self) -> None:
        client = self._connected()
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
            draft, receipt, posted_at = item
            try:
                if time.monotonic() > posted_at + client.options.publish_timeout_s:
                    # What waited as long as this while the one before it got no space or no ID must not wait once more.
                    raise Unavailable("the message was not sent in time, because earlier ones could not be; send again")
                await client.submit(draft, receipt)
            except PixiuError as error:
                receipt.fail(failure_of(error))
            except Exception as error:
                receipt.fail(Failure(PixiuError.code, f"{type(error).__name__}: {error}"))

    def _wait_for_outbox(self) -> None:
        reached: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._put(reached)
        reached.result()

    def _connected(self) -> Client:
        if self._client is None:
            raise self._not_connected()
        return self._client

    @staticmethod
    def _not_connected() -> NotConnected:
        return NotConnected("the client is not connected: use it inside `with pixiu.connect_sync(…) as px:`")

    async def _open(self) -> Client:
        return await self._make().open()

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        if thread is not None:
            thread.join()

    @staticmethod
    def _turn(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def connect_sync(target: str, *, uin: int = 0, client: str = "", **options: Unpack[OptionOverrides]) -> SyncClient:
    """A synchronous client: `with pixiu.connect_sync("127.0.0.1:7000") as px:`. Arguments and errors as `connect` has them."""
    return SyncClient(lambda: connect(target, uin=uin, client=client, **options))
