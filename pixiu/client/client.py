"""The client: what users call.

    async with pixiu.connect("127.0.0.1:7000", client="billing") as px:
        await px.room(42).send(b"hello")                  # returns when it is queued, with a Receipt
        receipt = await px.room(42).send(b"important")
        await receipt                                     # returns when the cluster has accepted it
        await px.flush()                                  # all that was sent is resolved
        async for message in px.subscribe(room=42):
            print(message.payload)

Source: README.md; docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, Unpack

from pixiu.client.destination import Room, Topic, User
from pixiu.client.directory import ClusterMap, Directory, ProxyDirectory, ZooKeeperDirectory
from pixiu.client.drafts import SIGNAL_KIND, Draft, encode
from pixiu.client.events import Failure
from pixiu.client.gateway_connection import ConnectionContext
from pixiu.client.inbox import Inbox, device_of
from pixiu.client.inbox_core import MailGap
from pixiu.client.mail import MailSender
from pixiu.client.mail_publisher import MailPublisher
from pixiu.client.mail_shell import MailShell
from pixiu.client.mail_writer import MailWriter
from pixiu.client.message import check_topic_name
from pixiu.client.options import MAX_CLIENT_NAME_BYTES, ClientOptions, OptionOverrides
from pixiu.client.presence import UserPresence, query
from pixiu.client.publisher import PublisherCore
from pixiu.client.signalling import SignalPublisher, SignalReceipt
from pixiu.client.signals import SignalCounters
from pixiu.client.streams import PublisherShell, Receipt
from pixiu.client.subscriber import Subscription
from pixiu.client.worker import WorkerLease
from pixiu.discovery.target import ProxyTarget, ZooKeeperTarget, parse_target
from pixiu.errors import InvalidArgument, LeaseExpired, NotConnected, Overloaded, PixiuError
from pixiu.ids import MAX_ID, MAX_ROOM, UIN, topic_room
from pixiu.rpc.channels import Channels

CLOSE_GRACE_S = 1.0
"""What the other side gets to take the end of a stream, seconds."""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Totals of one client since it connected."""

    sent: int = 0
    """Messages queued by `send`."""
    accepted: int = 0
    failed: int = 0
    failures_by_code: Mapping[str, int] = field(default_factory=dict)
    """`failed` by the error's code."""
    expired: int = 0
    """Those of `failed` that nobody confirmed in `publish_timeout_s`."""
    resent: int = 0
    """Messages sent once more, because a proxy died or went; gateways drop repetitions."""
    batches: int = 0
    unresolved: int = 0
    """Messages whose outcome is not known yet."""
    streams_opened: int = 0
    streams_died: int = 0
    malformed_replies: int = 0
    signals: SignalCounters = field(default_factory=SignalCounters)
    """Of signals, which the figures above leave out."""


class Client:
    """A connection to a cluster; made by `connect`, used with `async with`. All of it belongs to one event loop."""

    def __init__(self, target: str, uin: int, client: str, options: ClientOptions) -> None:
        options.validate()
        if not 0 <= uin <= MAX_ID:
            raise InvalidArgument(f"a UIN is from 0 (a service) to 2^63-1, not {uin}")
        if len(client.encode()) > MAX_CLIENT_NAME_BYTES:
            raise InvalidArgument(f"a client's name has at most {MAX_CLIENT_NAME_BYTES} bytes, this one {len(client.encode())}")
        self.options = options
        self._target: ProxyTarget | ZooKeeperTarget = parse_target(target)
        self._uin = uin
        self._name = client or f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._uniform = random.Random().random
        self._channels: Channels | None = None
        self._directory: Directory | None = None
        self._publisher: PublisherShell | None = None
        self._worker: WorkerLease | None = None
        self._signals: SignalPublisher | None = None
        self._mails: MailPublisher | None = None
        self._named = bool(client)
        self._receivers: set[Subscription | Inbox] = set()

    @property
    def name(self) -> str:
        """The client's name in logs and metrics of the cluster."""
        return self._name

    async def open(self) -> Self:
        """Connect. Raises `Unavailable` or `RegistryUnavailable` with every address that was tried."""
        if self._directory is not None:
            raise NotConnected("the client is open already; make another one for another connection")
        channels = Channels()
        directory: Directory
        if isinstance(self._target, ProxyTarget):
            directory = ProxyDirectory(self._target.addresses, self.options, channels, self._on_map)
        else:
            directory = ZooKeeperDirectory(self._target, self.options, self._on_map)
        try:
            await directory.start()
        except BaseException:
            await directory.close()
            await channels.close()
            raise
        self._channels, self._directory, self._signals, self._mails = channels, directory, None, None
        core = PublisherCore(self.options, directory.map.proxies, self._uniform)
        self._publisher = PublisherShell(core, self._name, channels, directory.refresh)
        self._worker = WorkerLease(
            self._name, self.options, channels, lambda: directory.map.proxies, lambda: time.time_ns() // 1_000_000, self._uniform
        )
        return self

    async def close(self) -> None:
        """Wait until all that was sent is resolved (at most `publish_timeout_s`, of mail `mail_timeout_s`), then disconnect."""
        directory, publisher, worker, channels = self._directory, self._publisher, self._worker, self._channels
        if directory is None or publisher is None or worker is None or channels is None:
            return
        self._directory = self._channels = None
        try:
            for receiver in list(self._receivers):
                await receiver.close()
            await self._flush(publisher)
        finally:
            await publisher.close(CLOSE_GRACE_S)
            if self._signals is not None:
                await self._signals.close(CLOSE_GRACE_S)
            if self._mails is not None:
                await self._mails.shell.close()
            await worker.close(CLOSE_GRACE_S)
            await directory.close()
            await channels.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def room(self, room: int) -> Room:
        """A room to send to, 1 to 2^62-1. Raises `InvalidArgument`."""
        if not 0 < room <= MAX_ROOM:
            raise InvalidArgument(f"a RoomID is from 1 to 2^62-1, not {room}")
        return Room(self, room, None)

    def topic(self, name: str) -> Topic:
        """A free topic to send to, such as "weather/shenzhen". Raises `InvalidArgument`."""
        return Topic(self, topic_room(check_topic_name(name)), name)

    def user(self, uin: int) -> User:
        """A user to send to, 1 to 2^63-1. Raises `InvalidArgument`."""
        if not 0 < uin <= MAX_ID:
            raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {uin}")
        return User(self, UIN(uin))

    def mail_writer(self) -> MailWriter:
        """Sends mail without waiting for each: `async with px.mail_writer() as writer: writer.send(7, b"…")`."""
        return MailWriter(self.mails())

    def mails(self) -> MailPublisher:
        """What all mail of this client goes through."""
        directory, channels, worker = self._directory, self._channels, self._worker
        if directory is None or channels is None or worker is None:
            raise self._not_connected()
        if self._mails is None:
            core = MailSender(self.options, directory.map.proxies, lambda: worker.worker, time.time, self._uniform)
            self._mails = MailPublisher(
                MailShell(core, self._name, channels, directory.refresh), worker, self._uin, self.options.max_record_bytes
            )
        return self._mails

    async def presence(self, uins: Iterable[int]) -> list[UserPresence]:
        """Who of these users is online, on how many devices, in the order asked for.

        Raises `InvalidArgument`, and `Unavailable` when nobody can tell: no proxy answers, or the cluster has no relays.
        """
        if self._directory is None or self._channels is None:
            raise self._not_connected()
        return await query(self._channels, self._directory.map.proxies, list(uins), self.options.connect_timeout_s)

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
    ) -> Subscription:
        """Messages of rooms and topics: `async for message in px.subscribe(room=42)`.

        With `chat` also those that are sent to the client's own user (`connect(…, uin=7)`); they have `message.user` set.
        Topics may have MQTT's wildcards. `async with px.subscribe(…) as sub` has joined everything when it begins, and
        leaves at its end; otherwise the first iteration connects, and the client's end closes. See `Subscription`.
        Source: README.md; docs/routing.md.
        """
        surroundings = self._surroundings()
        if chat and not self._uin:
            raise InvalidArgument("messages to a user need to know whose: connect(…, uin=UIN)")
        wanted_rooms = [*rooms] if room is None else [room, *rooms]
        wanted_topics = topics if topic is None else [topic, *topics]
        subscription = Subscription(surroundings, wanted_rooms, wanted_topics, on_gap, on_dropped, chat=chat)
        self._receivers.add(subscription)
        return subscription

    def inbox(self, *, uin: int = 0, device: str = "", on_gap: Callable[[MailGap], None] | None = None) -> Inbox:
        """Mail of a user: `async with px.inbox(uin=7, device="phone") as inbox: async for mail in inbox`. See `Inbox`.

        Args:
            uin: whose; 0: the client's own (`connect(…, uin=7)`).
            device: which of the user's devices, at most eight, each of which gets all mail; at most 128 bytes. Where it is not
                named it is the option `device`, else the name that the client was given.
            on_gap: called with mail that this device does not get.

        Raises `InvalidArgument` without a user, or without a device that stays the same. Source: README.md.
        """
        surroundings = self._surroundings()
        whose = uin or self._uin
        if not 0 < whose <= MAX_ID:
            raise InvalidArgument(f"an inbox is of a user, 1 to 2^63-1, not {whose}: inbox(uin=…), or connect(…, uin=…)")
        named = device_of(device, self.options, self._name if self._named else "")
        inbox = Inbox(surroundings, UIN(whose), named, on_gap, self.mails)
        self._receivers.add(inbox)
        return inbox

    def _surroundings(self) -> ConnectionContext:
        if self._directory is None or self._channels is None:
            raise self._not_connected()
        return ConnectionContext(
            self._name, self._uin, self.options, self._channels, self._directory, self._uniform, self._receivers.discard
        )

    async def flush(self) -> None:
        """Wait until every message sent so far is accepted or has failed, and every signal with a receipt delivered or given
        up. Failures are in their receipts and in `stats()`.

        Source: Swift (`flush`); docs/architecture.md.
        """
        if self._publisher is None:
            raise self._not_connected()
        await self._flush(self._publisher)

    async def _flush(self, publisher: PublisherShell) -> None:
        await publisher.flush()
        if self._signals is not None:
            await self._signals.flush()
        if self._mails is not None:
            await self._mails.finished()

    def stats(self) -> ClientStats:
        """The client's counters since `open`."""
        if self._publisher is None:
            return ClientStats()
        core = self._publisher.core
        counters = core.counters
        return ClientStats(
            counters.offered,
            counters.accepted,
            counters.failed,
            dict(counters.failures_by_code),
            counters.expired,
            counters.resent,
            counters.batches,
            core.unresolved_records,
            counters.streams_opened,
            counters.streams_died,
            counters.malformed_replies,
            self._signals.core.counters if self._signals is not None else SignalCounters(),
        )

    def cluster(self) -> ClusterMap:
        """The proxies and gateways that the client knows now."""
        if self._directory is None:
            raise self._not_connected()
        return self._directory.map

    async def submit(self, draft: Draft, receipt: Receipt | None = None) -> Receipt:
        """Queue a draft, waiting for space and for a worker number; with `receipt` that one is used."""
        publisher, worker = self._publisher, self._worker
        if publisher is None or worker is None:
            raise self._not_connected()
        while True:
            await publisher.admit(draft.size)
            try:
                return self._offer(publisher, worker, draft, receipt)
            except LeaseExpired:
                await worker.ready()

    def submit_nowait(self, draft: Draft) -> Receipt:
        """Queue a draft now. Raises `Overloaded`."""
        publisher, worker = self._publisher, self._worker
        if publisher is None or worker is None:
            raise self._not_connected()
        if not publisher.try_admit(draft.size):
            raise Overloaded(f"{publisher.core.unresolved_records} messages are unresolved: await send, or flush, instead")
        try:
            return self._offer(publisher, worker, draft, None)
        except LeaseExpired:
            raise Overloaded("no worker number for message IDs is held now: await send once instead") from None

    async def signal(self, draft: Draft, wants_receipt: bool) -> SignalReceipt:
        """Send a draft as a signal, waiting for a worker number."""
        while True:
            directory, channels, worker = self._directory, self._channels, self._worker
            if directory is None or channels is None or worker is None:
                raise self._not_connected()
            try:
                message_id = worker.next()
                break
            except LeaseExpired:
                await worker.ready()
        if self._signals is None:
            self._signals = SignalPublisher(
                self.options, directory.map.proxies, self._name, channels, directory.refresh, self._uniform
            )
        record = encode(draft, message_id, self._uin, self.options.max_record_bytes, SIGNAL_KIND)
        return self._signals.send(record, message_id, draft.lane, wants_receipt)

    def _offer(self, publisher: PublisherShell, worker: WorkerLease, draft: Draft, receipt: Receipt | None) -> Receipt:
        message_id = worker.next() if draft.derived_id is None else draft.derived_id
        record = encode(draft, message_id, self._uin, self.options.max_record_bytes)
        if receipt is None:
            receipt = Receipt(record, draft.key, draft.lane, message_id)
        else:
            receipt.record, receipt.message_id = record, message_id
        publisher.offer(receipt)
        return receipt

    def _on_map(self, found: ClusterMap) -> None:
        if self._publisher is not None:
            self._publisher.set_proxies(found.proxies)
        if self._signals is not None:
            self._signals.set_proxies(found.proxies)
        if self._mails is not None:
            self._mails.shell.set_proxies(found.proxies)

    @staticmethod
    def _not_connected() -> PixiuError:
        return NotConnected("the client is not connected: use it inside `async with pixiu.connect(…) as px:`")


def failure_of(error: PixiuError) -> Failure:
    """An error as a receipt keeps it."""
    return Failure(error.code, str(error), error.retry_after_ms if isinstance(error, Overloaded) else 0)


def connect(target: str, *, uin: int = 0, client: str = "", **options: Unpack[OptionOverrides]) -> Client:
    """A client of a cluster: `async with pixiu.connect("127.0.0.1:7000") as px:`.

    Args:
        target: "host:port,host:port" (gRPC addresses of any proxies; they tell the rest), or "zk://host:port/root".
        uin: who sends and subscribes; 0 for a service (as a subscriber it is then known by its name).
        client: a name for logs and metrics, at most 128 bytes; default: host, process and a random part.
        options: fields of `ClientOptions`.

    Raises `InvalidArgument` and `ConfigurationError` at once; entering raises `Unavailable` or `RegistryUnavailable`.
    Source: docs/operations.md.
    """
    return Client(target, uin, client, ClientOptions(**options))
