"""The client, the entry point of the SDK.

    async with pixiu.connect("127.0.0.1:7002", client="billing") as px:
        await px.room(42).send(b"hello")                  # returns when the cluster has accepted it
        receipt = px.room(42).send_soon(b"hello")         # returns at once
        await receipt                                     # returns when the cluster has accepted it
        await px.flush()                                  # all that was sent is resolved
        async for message in px.subscribe(room=42):
            print(message.payload)

Source: README.md; docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from pixiu.client import forks
from pixiu.client.connection_events import ConnectionEvent, ConnectionEvents, ConnectionEventStream, ConnectionState
from pixiu.client.destination import Destination, Room, Topic, User
from pixiu.client.directory import ClusterMap, Directory, ProxyDirectory, ZooKeeperDirectory
from pixiu.client.forks import BEFORE_FORK
from pixiu.client.inbox.core import MailGap
from pixiu.client.inbox.inbox import Inbox, device_of
from pixiu.client.login import Token, authorization
from pixiu.client.mail.options import MailSendOptions
from pixiu.client.mail.policy import mail_policy
from pixiu.client.mail.publisher import MailPublisher
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.mail.shell import MailShell
from pixiu.client.mail.writer import MailWriter
from pixiu.client.messages.drafts import SIGNAL_KIND, Draft, encode
from pixiu.client.messages.load_test import LoadTest
from pixiu.client.messages.message import Message, check_topic_name
from pixiu.client.messages.send_options import SendOptions
from pixiu.client.options import MAX_CLIENT_NAME_BYTES, ClientOptions, OptionOverrides
from pixiu.client.presence import UserPresence, query
from pixiu.client.receive.gateway_connection import ConnectionContext
from pixiu.client.receive.subscriber import Subscription
from pixiu.client.requests import Replies, reply_options, request_options, where_to_reply
from pixiu.client.send.awaited import FailureReports, SendFailure
from pixiu.client.send.early import EarlySends, failure_of
from pixiu.client.send.events import PERHAPS, in_doubt
from pixiu.client.send.policy import SEND_AGAIN, room_policy
from pixiu.client.send.sender import Sender
from pixiu.client.send.signalling import SignalPublisher, SignalReceipt
from pixiu.client.send.signals import SignalCounters
from pixiu.client.send.streams import PublisherShell, Receipt, publish_call
from pixiu.client.timeouts import within
from pixiu.client.topics.durable_topic import DurableTopic, TopicClient
from pixiu.client.topics.surroundings import TopicContext
from pixiu.client.topics.topic_admin import Topics
from pixiu.client.topics.topic_directory import TopicDirectory
from pixiu.client.worker import WorkerLease
from pixiu.discovery.target import ProxyTarget, RegistryAddress, parse_target
from pixiu.errors import (
    ConfigurationError,
    Dropped,
    InvalidArgument,
    LeaseExpired,
    NotConnected,
    NotSent,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
)
from pixiu.ids import MAX_ID, MAX_ROOM, UIN, is_within, topic_room
from pixiu.rpc.backoff import Backoff, retry_after_s
from pixiu.rpc.channels import Channels
from pixiu.rpc.client_tls import ClientTls, client_tls

TARGET_VARIABLE = "PIXIU_TARGET"
"""The environment variable that names the cluster if the program does not."""
REPEATS_S = 10.0
"""`send` repeats a message that was dropped on the way, and may have been delivered, for less time than gateways remember it."""
CLOSE_GRACE_S = 1.0
"""Time for the other side to take the end of a stream, seconds."""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Totals of one client since it connected."""

    sent: int = 0
    """Messages queued by `send`."""
    accepted: int = 0
    failed: int = 0
    failures_by_code: Mapping[str, int] = field(default_factory=dict)
    """`failed` by error code."""
    expired: int = 0
    """Those of `failed` that nobody confirmed within `publish_timeout_s`."""
    resent: int = 0
    """Messages sent again because a proxy died or left; gateways drop repeats."""
    batches: int = 0
    unresolved: int = 0
    """Messages whose outcome is not known yet."""
    streams_opened: int = 0
    streams_died: int = 0
    malformed_replies: int = 0
    signals: SignalCounters = field(default_factory=SignalCounters)
    """Counters of signals, which the figures above do not include."""


class Client:
    """A connection to a cluster; made by `connect`, used with `async with`. It belongs to one event loop."""

    def __init__(
        self,
        target: str,
        uin: int,
        client: str,
        options: ClientOptions,
        on_failure: Callable[[SendFailure], None] | None = None,
        on_connection: Callable[[ConnectionEvent], None] | None = None,
        token: Token | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        options.validate()
        self._authorization, self._tls = authorization(token), tls
        if not is_within(uin, 0, MAX_ID):
            raise InvalidArgument(f"a UIN is from 0 (a service) to 2^63-1, not {uin!r}")
        if len(client.encode()) > MAX_CLIENT_NAME_BYTES:
            raise InvalidArgument(f"a client's name has at most {MAX_CLIENT_NAME_BYTES} bytes, this one {len(client.encode())}")
        self.options = options
        self._on_failure = on_failure
        self._target: ProxyTarget | RegistryAddress = parse_target(target)
        self._uin = uin
        self._name = client or f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._uniform = random.Random().random
        self._channels: Channels | None = None
        self._directory: Directory | None = None
        self._publisher: PublisherShell | None = None
        self._worker: WorkerLease | None = None
        self._signals: SignalPublisher | None = None
        self._mails: MailPublisher | None = None
        self._topics: TopicClient | None = None
        self._early: EarlySends | None = None
        self.reports: FailureReports
        self._forked = False
        self._named = bool(client)
        self._receivers: set[Subscription | Inbox] = set()
        self._events = ConnectionEvents(on_connection)
        self._replies: Replies | None = None

    @property
    def name(self) -> str:
        """The client's name in logs and metrics of the cluster."""
        return self._name

    async def open(self) -> Self:
        """Connect. Raises `Unreachable` or `RegistryUnavailable` with every address that was tried."""
        if self._directory is not None:
            raise NotConnected("the client is open already; make another one for another connection")
        channels = Channels(authorization=self._authorization, tls=self._tls)
        directory: Directory
        if isinstance(self._target, ProxyTarget):
            directory = ProxyDirectory(self._target.addresses, self.options, channels, self._on_map)
        else:
            directory = ZooKeeperDirectory(self._target, self.options, self._on_map, tls=self._tls is not None)
        try:
            await directory.start()
        except BaseException:
            await directory.close()
            await channels.close()
            raise
        self._channels, self._directory, self._signals, self._mails, self._topics = channels, directory, None, None, None
        core = Sender(room_policy(self.options), directory.map.proxies, self._uniform)
        self.reports = FailureReports(self._on_failure)
        self._early = EarlySends(self.options, self.reports)
        opens = partial(publish_call, channels)
        self._publisher = PublisherShell(core, self._name, channels, directory.refresh, opens, self.reports, self._tell)
        self._worker = self._worker_lease(channels, directory)
        self._forked = False
        forks.watch(self)
        return self

    def _worker_lease(self, channels: Channels, directory: Directory) -> WorkerLease:
        clock_ms = lambda: time.time_ns() // 1_000_000  # noqa: E731
        return WorkerLease(self._name, self.options, channels, lambda: directory.map.proxies, clock_ms, self._uniform)

    async def close(self) -> None:
        """Wait until everything sent is resolved (at most `publish_timeout_s`, for mail `mail_timeout_s`, for durable topics
        `topic_timeout_s`), then disconnect."""
        directory, publisher, worker, channels = self._directory, self._publisher, self._worker, self._channels
        if directory is None or publisher is None or worker is None or channels is None:
            return
        self._directory = self._channels = None
        forks.forget(self)
        try:
            for receiver in list(self._receivers):
                await receiver.close()
            if self._replies is not None:
                await self._replies.close()
            await self._flush(publisher)
        finally:
            if self._early is not None:
                await self._early.close()
            await publisher.close(CLOSE_GRACE_S)
            if self._signals is not None:
                await self._signals.close(CLOSE_GRACE_S)
            if self._mails is not None:
                await self._mails.close(CLOSE_GRACE_S)
            if self._topics is not None:
                await self._topics.close()
            await worker.close(CLOSE_GRACE_S)
            await directory.close()
            await channels.close()
            self._tell(ConnectionState.CLOSED, "", "")
            self._events.end()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def room(self, room: int) -> Room:
        """A room to send to, 1 to 2^62-1. Raises `InvalidArgument`."""
        if not is_within(room, 1, MAX_ROOM):
            raise InvalidArgument(f"a RoomID is from 1 to 2^62-1, not {room!r}")
        return Room(self, room, None)

    def topic(self, name: str) -> Topic:
        """A free topic to send to, such as "weather/shenzhen". Raises `InvalidArgument`."""
        return Topic(self, topic_room(check_topic_name(name)), name)

    def durable_topic(self, name: str) -> DurableTopic:
        """A durable topic, a log that channels and readers read: `await px.durable_topic("orders").send(b"…", key="…")`. It is
        created by `px.topics.create`. Raises `InvalidArgument`."""
        return DurableTopic(self._durable(), name)

    @property
    def topics(self) -> Topics:
        """The cluster's durable topics, to create, change and look at: `await px.topics.create("orders", parts=4)`."""
        return self._durable().admin

    def _durable(self) -> TopicClient:
        directory, channels = self._directory, self._channels
        if directory is None or channels is None:
            raise self._not_connected()
        if self._topics is None:
            found = TopicDirectory(channels, directory, self.options, self._uniform)
            self._topics = TopicClient(TopicContext(self._name, self.options, channels, found, self._uniform, self.reports, set()))
        return self._topics

    def user(self, uin: int) -> User:
        """A user to send to, 1 to 2^63-1. Raises `InvalidArgument`."""
        if not is_within(uin, 1, MAX_ID):
            raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {uin!r}")
        return User(self, UIN(uin))

    def mail_writer(self) -> MailWriter:
        """A writer that sends mail without waiting for each one: `async with px.mail_writer() as writer: writer.send(7, b"…")`."""
        return MailWriter(self.mails())

    def mails(self) -> MailPublisher:
        """The publisher that all mail of this client goes through."""
        directory, channels, worker = self._directory, self._channels, self._worker
        if directory is None or channels is None or worker is None:
            raise self._not_connected()
        if self._mails is None:
            options, proxies = self.options, directory.map.proxies
            first = int(self._uniform() * len(proxies))
            streams: list[tuple[MailShell, WorkerLease]] = []
            for number in range(options.mail_streams):
                # Each stream is a writer, which a worker number identifies.
                own = self._worker_lease(channels, directory) if number else worker
                core = Sender(mail_policy(options, own.worker, time.time), proxies, self._uniform, first + number)
                streams.append((MailShell(core, self._name, channels, directory.refresh, self.reports), own))
            self._mails = MailPublisher(streams, self._uin, options.max_record_bytes)
        return self._mails

    async def presence(self, uins: Iterable[int], *, timeout_s: float | None = None) -> list[UserPresence]:
        """Ask for the online state and number of devices of users, in the order given. Each proxy that is asked has `timeout_s` to
        answer (default: `connect_timeout_s`).

        Raises `InvalidArgument`, and `Unavailable` when the state cannot be found out: no proxy answers, or the cluster has no
        relays.
        """
        if self._directory is None or self._channels is None:
            raise self._not_connected()
        seconds = self.options.connect_timeout_s if timeout_s is None else timeout_s
        if isinstance(uins, str | bytes) or not isinstance(uins, Iterable):
            raise InvalidArgument(f"uins is a list of UINs, not {uins!r}; write presence([7])")
        return await query(self._channels, self._directory.map.proxies, list(uins), seconds)

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
        load_test: LoadTest = "block",
    ) -> Subscription:
        """Subscribe to rooms and topics: `async for message in px.subscribe(room=42)`.

        `load_test`: "block": messages of load tests do not come; "pass": they do; "only": nothing else does.
        `chat` adds messages to the client's own user (`connect(…, uin=7)`); they have `message.user` set.
        Topics that no room carries are refused at once; so are filters with wildcards, which clients of MQTT alone have.
        `async with px.subscribe(…) as sub` has joined everything when the block begins, and leaves at its end. Otherwise the first
        iteration connects, and closing the client closes the subscription. See `Subscription`.
        Source: README.md; docs/routing.md.
        """
        surroundings = self._surroundings()
        if chat and not self._uin:
            raise InvalidArgument("messages to a user need the user's UIN: connect(…, uin=UIN)")
        subscription = Subscription(
            surroundings, rooms, topics, on_gap, on_dropped, room=room, topic=topic, chat=chat, load_test=load_test
        )
        self._receivers.add(subscription)
        return subscription

    def inbox(
        self,
        *,
        uin: int = 0,
        device: str = "",
        on_gap: Callable[[MailGap], None] | None = None,
        load_test: LoadTest = "block",
    ) -> Inbox:
        """Open an inbox to receive mail of a user: `async with px.inbox(uin=7, device="phone") as inbox: async for mail in inbox`.
        See `Inbox`.

        Args:
            uin: the user; 0: the client's own (`connect(…, uin=7)`).
            device: name of the user's device, at most 128 bytes. A user has at most eight devices, and each gets all mail. Default:
                the option `device`, else the name that the client was given.
            on_gap: called for mail that this device does not get.
            load_test: "block": mail of load tests is acknowledged and not given; "pass": it comes, too; "only": all other mail is
                acknowledged and not given, so take a device of its own.

        Raises `InvalidArgument` without a user, or without a device that stays the same. Source: README.md.
        """
        surroundings = self._surroundings()
        whose = uin or self._uin
        if not is_within(whose, 1, MAX_ID):
            raise InvalidArgument(
                f"an inbox belongs to a user with a UIN from 1 to 2^63-1, not {whose!r}: inbox(uin=…), or connect(…, uin=…)"
            )
        named = device_of(device, self.options, self._name if self._named else "")
        inbox = Inbox(surroundings, UIN(whose), named, on_gap, self.mails, load_test)
        self._receivers.add(inbox)
        return inbox

    def _surroundings(self) -> ConnectionContext:
        if self._directory is None or self._channels is None:
            raise self._not_connected()
        return ConnectionContext(
            self._name,
            self._uin,
            self.options,
            self._channels,
            self._directory,
            self._uniform,
            self._receivers.discard,
            self._events.tell,
            self.reply,
        )

    async def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until every message sent so far is accepted or has failed, and every signal with a receipt is delivered or given up.
        Failures are in the receipts and in `stats()`. Raises `OutcomeUnknown` after `timeout_s`.

        Source: Swift (`flush`); docs/architecture.md.
        """
        if self._publisher is None:
            raise self._not_connected()
        async with within(timeout_s, lambda: OutcomeUnknown(f"messages are still unresolved after {timeout_s:g} s; see stats()")):
            await self._flush(self._publisher)

    async def _flush(self, publisher: PublisherShell) -> None:
        if self._early is not None:
            await self._early.idle()
        await publisher.flush()
        if self._signals is not None:
            await self._signals.flush()
        if self._mails is not None:
            await self._mails.finished()
        if self._topics is not None:
            await self._topics.finished()

    def connection_events(self) -> ConnectionEventStream:
        """Iterate over events of the client's connections from now on: `async for event in px.connection_events()`. Connections
        that send mail and signals are not included. The callback of `connect(on_connection=…)` gets the same events."""
        return self._events.stream()

    def _tell(self, state: ConnectionState, address: str, reason: str) -> None:
        self._events.tell(ConnectionEvent(state, "publisher", self, address, reason))

    def stats(self) -> ClientStats:
        """The client's counters since `open`."""
        if self._publisher is None:
            return ClientStats()
        core = self._publisher.core
        counters = core.counters
        return ClientStats(
            counters.offered,
            counters.confirmed,
            counters.failed,
            dict(counters.failures_by_code),
            counters.expired,
            counters.resent,
            counters.batches,
            core.unresolved,
            counters.streams_opened,
            counters.streams_died,
            counters.malformed_replies,
            self._signals.core.counters if self._signals is not None else SignalCounters(),
        )

    def cluster(self) -> ClusterMap:
        """The proxies and gateways that the client currently knows."""
        if self._directory is None:
            raise self._not_connected()
        return self._directory.map

    async def send(self, draft: Draft, timeout_s: float | None) -> Receipt:
        """Send a draft and wait until it is accepted. It is sent again with the same ID if it is refused for now, after the time
        that the refusal names, and if it was dropped on the way."""
        loop = asyncio.get_running_loop()
        began, deadline = loop.time(), self._deadline(timeout_s)
        backoff = Backoff(self.options.backoff_s, self.options.max_backoff_s, self._uniform)
        receipt: Receipt | None = None
        doubtful = False
        while True:
            again = 0 if receipt is None else receipt.message_id
            receipt = Receipt(b"", draft.key, draft.lane, again)
            receipt.watched = True
            try:
                async with within(deadline - loop.time(), _not_queued):
                    await self.submit(draft, receipt, deadline)
                await receipt
                return receipt
            except PixiuError as error:
                failure, until = receipt.failure or failure_of(error), deadline
                if failure.code == Dropped.code:
                    wait_s, until = backoff.next_s(), min(deadline, began + REPEATS_S)
                else:
                    wait_s = retry_after_s(failure.retry_after_ms, self._uniform)
                if not wait_s or loop.time() + wait_s >= until:
                    if doubtful:
                        raise in_doubt(failure, SEND_AGAIN).error() from error
                    raise
                doubtful = doubtful or failure.code in PERHAPS
            await asyncio.sleep(wait_s)

    async def send_many(self, drafts: list[Draft], timeout_s: float | None) -> list[Receipt]:
        """Send drafts in order and wait for all of them."""
        loop = asyncio.get_running_loop()
        deadline = self._deadline(timeout_s)
        async with within(deadline - loop.time(), _not_queued):
            receipts = [await self.submit(draft, None, deadline) for draft in drafts]
        failures = [await receipt.outcome() for receipt in receipts]
        first = next((failure for failure in failures if failure is not None), None)
        if first is not None:
            raise first
        return receipts

    def _deadline(self, timeout_s: float | None) -> float:
        """The deadline of a message, by the loop's clock."""
        return asyncio.get_running_loop().time() + (self.options.publish_timeout_s if timeout_s is None else timeout_s)

    async def submit(self, draft: Draft, receipt: Receipt | None = None, deadline: float | None = None) -> Receipt:
        """Queue a draft, waiting for space and for a worker number; `receipt`, if given, is used. `deadline`: the draft is of no
        use later, by the loop's clock."""
        if self._early is not None:
            await self._early.idle()
        return await self._submit(draft, receipt, deadline)

    async def _submit(self, draft: Draft, receipt: Receipt | None, deadline: float | None) -> Receipt:
        publisher, worker = self._publisher, self._worker
        if publisher is None or worker is None:
            raise self._not_connected()
        while True:
            await publisher.admit(draft.size)
            try:
                return self._offer(publisher, worker, draft, receipt, deadline)
            except LeaseExpired:
                await worker.ready()

    def submit_soon(self, draft: Draft, timeout_s: float | None = None) -> Receipt:
        """Queue a draft now. Raises `Overloaded`."""
        publisher, worker, early = self._publisher, self._worker, self._early
        if publisher is None or worker is None or early is None:
            raise self._not_connected()
        if not publisher.try_admit(draft.size):
            text = f"{publisher.core.unresolved} messages are unresolved: await send, or use a writer, which wait for space"
            raise Overloaded(text)
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        if not early.items:
            try:
                return self._offer(publisher, worker, draft, None, deadline)
            except LeaseExpired:
                pass
        receipt = Receipt(b"", draft.key, draft.lane, 0)
        early.put(lambda: self._submit(draft, receipt, deadline), receipt, draft.size)
        return receipt

    async def request(self, to: Destination, payload: bytes, timeout_s: float | None, options: SendOptions) -> Message:
        """Send a request and wait for its reply."""
        seconds = self.options.publish_timeout_s if timeout_s is None else timeout_s
        if self._replies is None or self._replies.failed:
            self._replies = Replies(lambda room: self.subscribe(room=room, load_test="pass"))
        replies, identity = self._replies, secrets.token_hex(8)
        checked = request_options(replies.room, identity, options)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        try:
            await replies.ready(seconds)
        except OutcomeUnknown as error:
            raise NotSent(f"the request was not sent: no gateway takes its reply: {error}") from None
        with replies.expect(identity) as reply:
            await to.send(payload, timeout_s=max(deadline - loop.time(), 0.0), **checked)
            unanswered = OutcomeUnknown(f"the request was accepted, but nobody replied within {seconds:g} s")
            async with within(deadline - loop.time(), lambda: unanswered):
                return await reply

    async def reply(
        self, message: Message, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]
    ) -> Receipt:
        """Answer a request that a subscription of the client received, and wait until the answer is accepted; arguments and errors
        as for `Room.send`. Raises `InvalidArgument` if the message does not ask for a reply."""
        room, identity = where_to_reply(message)
        options = {"load_test": True, **options} if message.load_test else options
        return await self.room(room).send(payload, timeout_s=timeout_s, **reply_options(identity, options))

    async def signal(self, draft: Draft, wants_receipt: bool, timeout_s: float | None) -> SignalReceipt:
        """Send a draft as a signal and wait for its outcome."""
        receipt = SignalReceipt(b"", 0, draft.lane, wants_receipt)
        receipt.watched = True
        signals, worker = self._signalling()

        def late() -> PixiuError:
            if not receipt.tries:
                return NotSent(f"the signal was not sent within {timeout_s:g} s: the client holds no worker number for its ID")
            return OutcomeUnknown(f"the outcome of the signal is not known after {timeout_s:g} s")

        async with within(timeout_s, late):
            await self._signal(signals, worker, draft, receipt)
            await receipt
        return receipt

    def signal_soon(self, draft: Draft, wants_receipt: bool) -> SignalReceipt:
        """Send a draft as a signal now. Raises `Overloaded`."""
        signals, worker = self._signalling()
        early = self._early
        receipt = SignalReceipt(b"", 0, draft.lane, wants_receipt)
        try:
            self._signal_now(signals, worker, draft, receipt)
        except LeaseExpired:
            assert early is not None
            early.put(lambda: self._signal(signals, worker, draft, receipt), receipt, draft.size)
        return receipt

    def _signalling(self) -> tuple[SignalPublisher, WorkerLease]:
        directory, channels, worker = self._directory, self._channels, self._worker
        if directory is None or channels is None or worker is None:
            raise self._not_connected()
        if self._signals is None:
            self._signals = SignalPublisher(
                self.options, directory.map.proxies, self._name, channels, directory.refresh, self._uniform, self.reports
            )
        return self._signals, worker

    async def _signal(self, signals: SignalPublisher, worker: WorkerLease, draft: Draft, receipt: SignalReceipt) -> None:
        while True:
            try:
                self._signal_now(signals, worker, draft, receipt)
                return
            except LeaseExpired:
                await worker.ready()

    def _signal_now(self, signals: SignalPublisher, worker: WorkerLease, draft: Draft, receipt: SignalReceipt) -> None:
        receipt.message_id = worker.next()
        receipt.record = encode(draft, receipt.message_id, self._uin, self.options.max_record_bytes, SIGNAL_KIND)
        signals.send(receipt)

    async def mail(self, uin: int, payload: bytes, timeout_s: float | None, options: MailSendOptions) -> MailReceipt:
        """Send a mail and wait until it is confirmed."""
        mails = self.mails()
        if self._early is not None:
            await self._early.idle()
        checked, receipt = mails.check(uin, payload, **options)

        def late() -> PixiuError:
            if not receipt.message_id:
                return NotSent(f"the mail was not sent within {timeout_s:g} s: there was no space for it")
            return OutcomeUnknown(f"the mail was not confirmed within {timeout_s:g} s: it may still be")

        async with within(timeout_s, late):
            await mails.send_in_turn(checked, receipt)
            await receipt
        return receipt

    def mail_soon(self, uin: int, payload: bytes, options: MailSendOptions) -> MailReceipt:
        """Queue a mail now. Raises `Overloaded`."""
        mails, early = self.mails(), self._early
        assert early is not None
        if mails.usable(uin) and not early.items:
            return mails.send(uin, payload, **options)
        checked, receipt = mails.check(uin, payload, **options)
        early.put(lambda: mails.send_in_turn(checked, receipt), receipt, checked.size)
        return receipt

    def _offer(
        self, publisher: PublisherShell, worker: WorkerLease, draft: Draft, receipt: Receipt | None, deadline: float | None
    ) -> Receipt:
        if receipt is not None and receipt.message_id:
            message_id = receipt.message_id  # it is sent again
        else:
            message_id = worker.next() if draft.derived_id is None else draft.derived_id
        record = encode(draft, message_id, self._uin, self.options.max_record_bytes)
        if receipt is None:
            receipt = Receipt(record, draft.key, draft.lane, message_id)
        else:
            receipt.begin(record, message_id)
        publisher.offer(receipt, None if deadline is None else deadline - asyncio.get_running_loop().time())
        return receipt

    def _on_map(self, found: ClusterMap) -> None:
        if self._publisher is not None:
            self._publisher.set_proxies(found.proxies)
        if self._signals is not None:
            self._signals.set_proxies(found.proxies)
        if self._mails is not None:
            self._mails.set_proxies(found.proxies)

    def forked(self) -> None:
        """Drop all connections: this process is a child of the one that connected."""
        self._directory = self._channels = self._publisher = self._worker = self._signals = self._mails = self._early = None
        self._topics = None
        self._forked = True

    def _not_connected(self) -> PixiuError:
        if self._forked:
            return NotConnected(BEFORE_FORK)
        return NotConnected("the client is not connected: use it inside `async with pixiu.connect(…) as px:`")


def _not_queued() -> PixiuError:
    return NotSent("the message was not sent in time: the client's queue was full, or no worker number was held")


def connect(
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
) -> Client:
    """Make a client of a cluster: `async with pixiu.connect("127.0.0.1:7002") as px:`.

    Args:
        target: "host:port,host:port" (gRPC addresses of any proxies; the client learns the others from them), or
            "zk://host:port/root"; default: the environment variable `PIXIU_TARGET`.
        uin: the user who sends and subscribes; 0 for a service (as a subscriber it is then identified by its name).
        client: a name for logs and metrics, at most 128 bytes; default: host, process and a random part.
        token: the login, if the cluster requires one: a token, or a function that returns the current one and is called for each
            connection; default: the environment variable `PIXIU_TOKEN`.
        ca: for TLS, the PEM file of the cluster's certificate authority, or "system"; default: the environment variable `PIXIU_CA`;
            empty: no TLS.
        certificate: the PEM file of your own certificate and its private key, if the cluster accepts certificates; default: the
            environment variable `PIXIU_CERTIFICATE`.
        on_failure: called with the failure of each receipt that nobody awaited, once the receipt is dropped; it runs in the event
            loop and must not block. Without it, failures are logged, each code once.
        on_connection: called when a connection is up, is lost, moves or ends, with the events of `px.connection_events()`; it runs
            in the event loop and must not block.
        options: the client's options; default: `ClientOptions()`.
        overrides: fields of `ClientOptions` that replace those in `options`.

    Raises `InvalidArgument` and `ConfigurationError` at once; entering raises `Unreachable` or `RegistryUnavailable`.
    Source: docs/operations.md.
    """
    where = os.environ.get(TARGET_VARIABLE) if target is None else target
    if where is None:
        raise ConfigurationError(f'no target: connect("host:port"), or set {TARGET_VARIABLE} to the addresses of proxies')
    tls = client_tls(ca, certificate)
    return Client(where, uin, client, replace(options or ClientOptions(), **overrides), on_failure, on_connection, token, tls)
