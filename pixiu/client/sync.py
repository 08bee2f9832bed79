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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self, Unpack

from pixiu.client.blocking import Background, Twin, blocking, blocking_as, here, here_as, in_loop_as
from pixiu.client.client import Client, connect, failure_of
from pixiu.client.destination import Destination, Room, User
from pixiu.client.drafts import Draft, SendOptions
from pixiu.client.events import Failure
from pixiu.client.message import Message
from pixiu.client.options import OptionOverrides
from pixiu.client.streams import Receipt
from pixiu.client.subscriber import Subscription, SubscriptionCounters
from pixiu.client.sync_mail import SyncInbox, SyncMailReceipt, SyncMailWriter
from pixiu.client.sync_receipt import SyncReceipt
from pixiu.errors import NotConnected, PixiuError, Unavailable

MAX_OUTBOX: Final = 1_000
"""Messages between a caller's thread and the loop; a `send` above it waits."""


class SyncDestination(Twin[Destination]):
    """A room or a topic to send to."""

    __slots__ = ()

    def send(self, payload: bytes, **options: Unpack[SendOptions]) -> SyncReceipt:
        """Send a message; returns when it is queued. As `Destination.send`, except that a missing worker number for
        message IDs shows in the receipt.
        """
        return SyncReceipt(self._background, self._background.post(self._wrapped.draft(payload, **options)))

    def send_and_wait(self, payload: bytes, **options: Unpack[SendOptions]) -> SyncReceipt:
        """`send`, then wait for the acceptance. Raises what `send` and waiting for its receipt raise."""
        receipt = self.send(payload, **options)
        receipt.wait()
        return receipt


class SyncRoom(SyncDestination):
    """A room to send to, messages and signals."""

    __slots__ = ()
    signal = blocking_as(SyncReceipt, Room.signal)


class SyncUser(Twin[User]):
    """A user to send to."""

    __slots__ = ()
    mail = blocking_as(SyncMailReceipt, User.mail)
    signal = blocking_as(SyncReceipt, User.signal)

    def chat(self, payload: bytes, **options: Unpack[SendOptions]) -> SyncReceipt:
        """Send a message to every device of the user that is online and takes messages; returns when it is queued. It is not
        kept: waiting for the receipt raises `Offline` when no device was there. Options as in `Destination.send`."""
        return SyncDestination(self._background, self._wrapped.destination).send(payload, **options)

    def chat_and_wait(self, payload: bytes, **options: Unpack[SendOptions]) -> SyncReceipt:
        """`chat`, then wait for the acceptance. Raises what `chat` and waiting for its receipt raise."""
        receipt = self.chat(payload, **options)
        receipt.wait()
        return receipt


class SyncSubscription(Twin[Subscription]):
    """`Subscription` for a thread: `for message in px.subscribe(room=42)`. One thread at a time may iterate.

    The callbacks run in the background thread.
    """

    def __init__(self, background: Background, subscription: Subscription) -> None:
        super().__init__(background, subscription)
        self._current: list[Message] = []
        self._next = 0

    join = blocking(Subscription.join)
    leave = blocking(Subscription.leave)
    ready = blocking(Subscription.ready)
    close = blocking(Subscription.close)

    @property
    def counters(self) -> SubscriptionCounters:
        """Totals."""
        return self._wrapped.counters

    @property
    def gateway(self) -> str:
        """The address of the gateway that serves now; empty while there is none."""
        return self._wrapped.gateway

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while self._next >= len(self._current):
            batch = self._background.run(self._wrapped.next_batch())
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
        while (batch := self._background.run(self._wrapped.next_batch())) is not None:
            yield batch

    def __enter__(self) -> Self:
        self.ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SyncClient(Background):
    """`Client` for programs without asyncio; made by `connect_sync`, used with `with`. Threads may share it.

    Source: docs/operations.md.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        super().__init__()
        self._make = make
        make()  # a wrong argument shows here, not in the other thread
        self._client: Client | None = None
        self._outbox: deque[tuple[Draft, Receipt, float] | concurrent.futures.Future[None]] = deque()
        self._changed = threading.Condition()
        self._pumping = False
        self._pump_task: asyncio.Task[None] | None = None

    room = here_as(SyncRoom, Client.room)
    topic = here_as(SyncDestination, Client.topic)
    user = here_as(SyncUser, Client.user)
    subscribe = in_loop_as(SyncSubscription, Client.subscribe)
    inbox = in_loop_as(SyncInbox, Client.inbox)
    mail_writer = in_loop_as(SyncMailWriter, Client.mail_writer)
    presence = blocking(Client.presence)
    stats = here(Client.stats)
    cluster = here(Client.cluster)

    def open(self) -> Self:
        """Connect. Raises `Unavailable` or `RegistryUnavailable` with every address that was tried."""
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
            self.stop_thread()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The client's name in logs and metrics of the cluster."""
        return self._wrapped.name

    def flush(self) -> None:
        """Wait until every message sent so far is accepted or has failed."""
        client = self._wrapped
        self._wait_for_outbox()
        self.run(client.flush())

    def post(self, draft: Draft) -> Receipt:
        """Hand a message to the loop. Waking the loop costs more than a message: it is woken once for many."""
        if self._client is None:
            raise self._not_connected()
        receipt = Receipt(b"", draft.key, draft.lane, 0)
        self._put((draft, receipt, time.monotonic()))
        return receipt

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
        client = self._wrapped
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


def connect_sync(target: str, *, uin: int = 0, client: str = "", **options: Unpack[OptionOverrides]) -> SyncClient:
    """A synchronous client: `with pixiu.connect_sync("127.0.0.1:7000") as px:`. Arguments and errors as `connect` has them."""
    return SyncClient(lambda: connect(target, uin=uin, client=client, **options))
