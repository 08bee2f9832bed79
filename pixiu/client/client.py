"""The client: what users call.

    async with pixiu.connect("127.0.0.1:7000", client="billing") as px:
        await px.room(42).send(b"hello")                  # returns when it is queued, with a Receipt
        receipt = await px.room(42).send(b"important")
        await receipt                                     # returns when the cluster has accepted it
        await px.flush()                                  # all that was sent is resolved
        async for message in px.subscribe(room=42):
            print(message.payload)

Source: DESIGN section 15, "SDK"; section 9, "Room message".
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Self, Unpack

from pixiu.client.channels import Channels
from pixiu.client.directory import ClusterMap, Directory, ProxyDirectory, ZooKeeperDirectory
from pixiu.client.events import Failure
from pixiu.client.mail import MailSender
from pixiu.client.mail_writer import Level, MailOptions, MailPublisher, MailReceipt, MailShell, MailWriter
from pixiu.client.message import TYPE_MASK, check_topic_name
from pixiu.client.options import MAX_CLIENT_NAME_BYTES, ClientOptions, OptionOverrides
from pixiu.client.presence import UserPresence, query
from pixiu.client.publisher import PublisherCore
from pixiu.client.signalling import SignalPublisher, SignalReceipt
from pixiu.client.signals import SignalCounters
from pixiu.client.streams import PublisherShell, Receipt
from pixiu.client.subscriber import Subscription, Surroundings
from pixiu.client.target import ProxyTarget, ZooKeeperTarget, parse_target
from pixiu.client.worker import WorkerLease
from pixiu.errors import InvalidArgument, LeaseExpired, NotConnected, Overloaded, PixiuError, RecordTooLarge
from pixiu.ids import MAX_ID, MAX_ROOM, UIN, RoomID, topic_room
from pixiu.record import HEADER_SIZE, LANE_FIRST, LANE_NORMAL, Flag, Kind, encode, with_topic

MAX_EXTENSION_BYTES = 65_535
MAX_LIFETIME_MIN = 65_535
# Plain numbers: an operation with an IntFlag takes half a microsecond.
TO_ROOM = int(Flag.TO_ROOM)
TO_TOPIC = int(Flag.TO_ROOM | Flag.TOPIC)
ROOM_KIND = int(Kind.ROOM)
SIGNAL_KIND = int(Kind.SIGNAL)
CHAT_KIND = int(Kind.CHAT)
MAIL_KIND = int(Kind.MAIL)
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


class Draft(NamedTuple):
    """A message that was checked, and needs only its ID."""

    key: int
    flags: int
    body: bytes
    type: int
    lane: int
    lifetime_min: int
    extension: bytes
    size: int
    kind: int = ROOM_KIND


class Destination:
    """A room or a topic to send to. Cheap: make one for each use, or keep it."""

    __slots__ = ("_client", "_flags", "_key", "_kind", "_limit", "_topic")

    def __init__(self, client: Client, key: int, topic: str | None, kind: int = ROOM_KIND) -> None:
        self._client = client
        self._key = key
        self._topic = topic
        self._kind = kind
        self._flags = TO_TOPIC if topic is not None else TO_ROOM if kind == ROOM_KIND else 0
        self._limit = client.options.max_record_bytes

    def draft(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> Draft:
        """Check a message. Raises `InvalidArgument` and `RecordTooLarge`."""
        if not 0 <= type <= TYPE_MASK:
            raise InvalidArgument(f"a type is from 0 to {TYPE_MASK}, not {type}")
        if not 0 <= lifetime_min <= MAX_LIFETIME_MIN:
            raise InvalidArgument(f"lifetime_min is from 0 (without limit) to {MAX_LIFETIME_MIN}, not {lifetime_min}")
        if len(extension) > MAX_EXTENSION_BYTES:
            raise InvalidArgument(f"an extension has at most {MAX_EXTENSION_BYTES} bytes, this one {len(extension)}")
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise InvalidArgument(f"a payload is bytes, not {payload.__class__.__name__}; encode text with .encode()")
        body = bytes(payload) if self._topic is None else with_topic(self._topic, bytes(payload))
        size = HEADER_SIZE + len(extension) + len(body)
        if size > self._limit:
            raise RecordTooLarge(
                f"a message of {size} bytes with its header is above the limit of {self._limit}; send a reference instead"
            )
        lane = LANE_FIRST if first_lane else LANE_NORMAL
        return Draft(self._key, self._flags, body, lane << 6 | type, lane, lifetime_min, extension, size, self._kind)

    async def send(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> Receipt:
        """Send a message. Returns when it is queued: at once, or when the bounded queue has space again.

        Await the returned receipt to wait for the cluster's acceptance; a receipt that is dropped costs nothing.

        Args:
            payload: what to send; with the header (40 bytes), topic and extension at most 1 MiB.
            type: a number for the application, 0 to 63.
            lifetime_min: for how many minutes the message is of use, 0 without limit.
            extension: JSON headers, at most 65 535 bytes.
            first_lane: overtake messages of the normal lane.

        Raises `InvalidArgument` and `RecordTooLarge` for a message that cannot be sent, `NotConnected` outside of the
        client's `async with`, `Unavailable` when no proxy lends a number for message IDs.
        Source: DESIGN section 9, "Room message"; section 14, rule 2.
        """
        return await self._client.submit(
            self.draft(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        )

    async def send_and_wait(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> Receipt:
        """`send`, then wait for the acceptance. Raises what `send` and awaiting its receipt raise."""
        receipt = await self.send(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        await receipt
        return receipt

    def send_nowait(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> Receipt:
        """`send` that never waits. Raises `Overloaded` where `send` would wait (the first message always does)."""
        return self._client.submit_nowait(
            self.draft(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        )


class Room(Destination):
    """A room to send to, messages and signals."""

    __slots__ = ()

    @property
    def id(self) -> RoomID:
        """Its RoomID."""
        return RoomID(self._key)

    async def signal(
        self,
        payload: bytes,
        receipt: bool = False,
        *,
        type: int = 0,
        lifetime_min: int = 0,
        extension: bytes = b"",
        first_lane: bool = False,
    ) -> SignalReceipt:
        """Send a signal: three copies through three proxies and different brokers, delivered once, in no order.

        It survives the loss of any one process or datagram on its way. Returns when the copies are queued.

        Args:
            payload: what to send; this and what is not named here as in `send`.
            receipt: awaiting what is returned waits until a gateway has delivered the signal to somebody, and not only for a
                broker's acceptance; of a room on several gateways the first is enough. The signal is sent again after 200 ms
                without it, three times, with the same ID; then awaiting raises `Undelivered`.

        Raises what `send` raises, and `Overloaded` when the outcome of 10 000 signals is not known yet.
        Source: DESIGN section 9, "Signal".
        """
        draft = self.draft(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        return await self._client.signal(draft, receipt)


class Topic(Destination):
    """A free topic to send to."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Its name."""
        assert self._topic is not None
        return self._topic


class User:
    """A user to send to."""

    __slots__ = ("_chat", "_client", "uin")

    def __init__(self, client: Client, uin: UIN) -> None:
        self.uin = uin
        self._client = client
        self._chat = Destination(client, uin, None, CHAT_KIND)

    @property
    def destination(self) -> Destination:
        """Where chat messages to the user go."""
        return self._chat

    async def chat(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> Receipt:
        """Send a message to every device of the user that is online and takes messages, in real time. It is not kept.

        Arguments and what is raised as `Destination.send`. Awaiting the receipt raises `Offline` when no device was there.
        Source: DESIGN section 2 and section 9, "Chat".
        """
        return await self._chat.send(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)

    async def chat_and_wait(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> Receipt:
        """`chat`, then wait for the acceptance. Raises what `chat` and awaiting its receipt raise."""
        receipt = await self.chat(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        await receipt
        return receipt

    async def signal(
        self,
        payload: bytes,
        receipt: bool = False,
        *,
        type: int = 0,
        lifetime_min: int = 0,
        extension: bytes = b"",
        first_lane: bool = False,
    ) -> SignalReceipt:
        """Send a signal to every device of the user that takes messages; arguments and the rest as `Room.signal` has it.

        Source: DESIGN section 9, "Signal".
        """
        draft = self._chat.draft(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)
        return await self._client.signal(draft, receipt)

    async def mail(
        self,
        payload: bytes,
        *,
        level: Level = "replicated",
        lane: int = LANE_NORMAL,
        expire: timedelta | None = None,
        to: Iterable[int] = (),
        type: int = 0,
        extension: bytes = b"",
    ) -> MailReceipt:
        """Send a mail: it is kept in the user's inbox until it is acknowledged or expires. Returns when it is confirmed.

        Args:
            payload: what to send.
            level: "replicated": on the disks of all replicas in sync; "persisted": on both leaders' disks; "accepted": in both
                leaders' logs. The latter two may be lost by a change of leader.
            lane: 0 goes before 1; order holds within a lane.
            expire: for how long it is of use, in whole minutes; None: for as long as the cluster keeps mail.
            to: further receivers, with this one at most 1 000: the body is stored once.
            type, extension: as in `Destination.send`.

        Raises `OutcomeUnknown` when nobody confirmed it in `mail_timeout_s` (with `open_inboxes`, as far as is known),
        `InboxFull`, `DiskFull`, `Overloaded`, `IdTooOld`, `NotServed` and what `send` raises.
        Source: DESIGN sections 2 and 9, "Mail".
        """
        options = MailOptions(level, lane, expire, to)
        return await self._client.mails().send_and_wait(self.uin, payload, options, type, extension)

    def chat_nowait(
        self, payload: bytes, *, type: int = 0, lifetime_min: int = 0, extension: bytes = b"", first_lane: bool = False
    ) -> Receipt:
        """`chat` that never waits. Raises `Overloaded` where `chat` would wait (the first message always does)."""
        return self._chat.send_nowait(payload, type=type, lifetime_min=lifetime_min, extension=extension, first_lane=first_lane)


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
        self._subscriptions: set[Subscription] = set()

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
            for subscription in list(self._subscriptions):
                await subscription.close()
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
                MailShell(core, self._name, channels, directory.refresh),
                worker,
                lambda uin: Destination(self, uin, None, MAIL_KIND).draft,
                lambda draft, message_id: self._encode(MAIL_KIND, draft, message_id),
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
        Source: DESIGN section 15, "SDK"; section 8, "Topics".
        """
        if self._directory is None or self._channels is None:
            raise self._not_connected()
        if chat and not self._uin:
            raise InvalidArgument("messages to a user need to know whose: connect(…, uin=UIN)")
        wanted_rooms = [*rooms] if room is None else [room, *rooms]
        wanted_topics = topics if topic is None else [topic, *topics]
        surroundings = Surroundings(
            self._name, self._uin, self.options, self._channels, self._directory, self._uniform, self._subscriptions.discard
        )
        subscription = Subscription(surroundings, wanted_rooms, wanted_topics, on_gap, on_dropped, chat=chat)
        self._subscriptions.add(subscription)
        return subscription

    async def flush(self) -> None:
        """Wait until every message sent so far is accepted or has failed, and every signal with a receipt delivered or given
        up. Failures are in their receipts and in `stats()`.

        Source: seed 002 (`flush`); DESIGN section 9.
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
        """Totals since `open`."""
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
        return self._signals.send(self._encode(SIGNAL_KIND, draft, message_id), message_id, draft.lane, wants_receipt)

    def _offer(self, publisher: PublisherShell, worker: WorkerLease, draft: Draft, receipt: Receipt | None) -> Receipt:
        message_id = worker.next()
        record = self._encode(draft.kind, draft, message_id)
        if receipt is None:
            receipt = Receipt(record, draft.key, draft.lane, message_id)
        else:
            receipt.record, receipt.message_id = record, message_id
        publisher.offer(receipt)
        return receipt

    def _encode(self, kind: int, draft: Draft, message_id: int) -> bytes:
        return encode(
            kind,
            draft.key,
            draft.body,
            message_id,
            sender=self._uin,
            flags=draft.flags,
            type=draft.type,
            lifetime_min=draft.lifetime_min,
            extension=draft.extension,
            limit=self.options.max_record_bytes,
        )

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
    Source: DESIGN section 15.
    """
    return Client(target, uin, client, ClientOptions(**options))
