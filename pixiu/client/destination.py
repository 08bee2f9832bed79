"""Rooms, topics and users to send to.

| waits for the outcome | gives a receipt at once | many, with backpressure |
|---|---|---|
| `await room.send(…)` | `room.send_soon(…)` | `await room.send_many(…)`, `room.writer()` |
| `await room.signal(…)` | `room.signal_soon(…)` | |
| `await user.chat(…)` | `user.chat_soon(…)` | `user.destination.writer()` |
| `await user.mail(…)` | `user.mail_soon(…)` | `px.mail_writer()` |

Source: docs/sdk.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Unpack

from pixiu.client.drafts import CHAT_KIND, ROOM_KIND, Draft, draft
from pixiu.client.mail_options import MailSendOptions
from pixiu.client.mail_receipt import MailReceipt
from pixiu.client.message import Message
from pixiu.client.options import ClientOptions
from pixiu.client.send_options import SendOptions
from pixiu.client.signalling import SignalReceipt
from pixiu.client.streams import Receipt
from pixiu.client.writer import Writer
from pixiu.ids import UIN, RoomID


class Sender(Protocol):
    """The client: what sends."""

    options: ClientOptions

    async def send(self, draft: Draft, timeout_s: float | None) -> Receipt:
        """Send a message, and wait until it is accepted."""

    async def send_many(self, drafts: list[Draft], timeout_s: float | None) -> list[Receipt]:
        """Send messages, and wait until all are accepted or have failed."""

    async def submit(self, draft: Draft) -> Receipt:
        """Queue a message, waiting for space."""

    def submit_soon(self, draft: Draft, timeout_s: float | None = None) -> Receipt:
        """Queue a message now. Raises `Overloaded`."""

    async def request(self, to: Destination, payload: bytes, timeout_s: float | None, options: SendOptions) -> Message:
        """Send a request, and wait for its reply."""

    async def signal(self, draft: Draft, wants_receipt: bool, timeout_s: float | None) -> SignalReceipt:
        """Send a signal, and wait for its outcome."""

    def signal_soon(self, draft: Draft, wants_receipt: bool) -> SignalReceipt:
        """Send a signal now. Raises `Overloaded`."""

    async def mail(self, uin: int, payload: bytes, timeout_s: float | None, options: MailSendOptions) -> MailReceipt:
        """Send a mail, and wait until it is confirmed."""

    def mail_soon(self, uin: int, payload: bytes, options: MailSendOptions) -> MailReceipt:
        """Queue a mail now. Raises `Overloaded`."""


class Destination:
    """A room or a topic to send to. Cheap: make one for each use, or keep it."""

    __slots__ = ("_client", "_key", "_kind", "_limit", "_topic")

    def __init__(self, client: Sender, key: int, topic: str | None, kind: int = ROOM_KIND) -> None:
        self._client = client
        self._key = key
        self._topic = topic
        self._kind = kind
        self._limit = client.options.max_record_bytes

    def draft(self, payload: bytes, **options: Unpack[SendOptions]) -> Draft:
        """Check a message. Raises `InvalidArgument` and `RecordTooLarge`."""
        return draft(self._kind, self._key, payload, self._limit, self._topic, **options)

    async def send(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Receipt:
        """Send a message, and wait until the cluster has accepted it: every broker that serves it has it.

        A message that the cluster refuses for now (`Overloaded` with a time after which to try again) is sent again after that
        time, with the same ID, as long as it may take; one that was `Dropped` on the way for ten seconds at most.

        Args:
            payload: what to send; with the header (40 bytes), topic and extension at most 1 MiB.
            timeout_s: how long it may take, seconds; None: the option `publish_timeout_s`.
            type: a number for the application, 0 to 63.
            lifetime_min: for how many minutes the message is of use, 0 without limit.
            headers: texts by their names, at most 64, together 65 535 bytes; receivers have them as `message.headers`.
            extension: bytes of the application instead of headers.
            first_lane: overtake messages of the normal lane.

        Raises `NotSent` when no process took it in time, `OutcomeUnknown` when one took it and did not confirm it,
        `Overloaded`, `Dropped`, `Offline` (to a user), `InvalidArgument` and `RecordTooLarge` for a message that cannot be
        sent, `NotConnected` outside of the client's `async with`.
        Source: docs/sdk.md; docs/architecture.md, "A message to a room"; docs/promises.md, "Failure rules" 2.
        """
        message = draft(self._kind, self._key, payload, self._limit, self._topic, **options)
        return await self._client.send(message, timeout_s)

    def send_soon(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Receipt:
        """Send a message without waiting; messages to one destination leave in the order of the calls.

        Await the receipt to wait for the acceptance. The failure of a receipt that nobody awaits reaches
        `connect(on_failure=…)`, or is logged. Arguments as `send`.

        Raises `Overloaded` when too much is unresolved (`queue_records`, `queue_bytes`): use `writer()`, which waits for
        space; and what `send` raises at once.
        """
        message = draft(self._kind, self._key, payload, self._limit, self._topic, **options)
        return self._client.submit_soon(message, timeout_s)

    async def send_many(
        self, payloads: Iterable[bytes], *, timeout_s: float | None = None, **options: Unpack[SendOptions]
    ) -> list[Receipt]:
        """Send messages in order, and wait until all are accepted or have failed. Arguments as `send`.

        Raises the error of the first one that failed; the others are sent nevertheless.
        """
        drafts = [draft(self._kind, self._key, payload, self._limit, self._topic, **options) for payload in payloads]
        return await self._client.send_many(drafts, timeout_s)

    async def request(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Message:
        """Send a message and wait for a reply: the first one that a subscriber sends by `message.reply(…)`.

        The message and its reply are as any others: real time, and either may be lost. Where several subscribers reply, the first
        one is taken.

        Args:
            payload: what to send; this and the options as in `send`. `extension` is for the headers that a request has.
            timeout_s: how long it may take, with the reply, seconds; None: the option `publish_timeout_s`.

        Raises `OutcomeUnknown`, a TimeoutError, when no reply came in time; what `send` raises when the request was not accepted;
        `Overloaded` when 10 000 requests of the client wait.
        """
        return await self._client.request(self, payload, timeout_s, options)

    def writer(self) -> Writer:
        """Sends without waiting for each: `async with room.writer() as writer: await writer.send(b"…")`."""
        return Writer(self.draft, self._client.submit)


class Room(Destination):
    """A room to send to, messages and signals."""

    __slots__ = ()

    @property
    def id(self) -> RoomID:
        """The room's RoomID."""
        return RoomID(self._key)

    async def signal(
        self, payload: bytes, receipt: bool = False, *, timeout_s: float | None = None, **options: Unpack[SendOptions]
    ) -> SignalReceipt:
        """Send a signal and wait for its outcome: three copies through three proxies and different brokers, delivered once, in
        no order. It survives the loss of any one process or datagram on its way.

        Args:
            payload: what to send; this and what is not named here as in `send`.
            receipt: wait until a gateway has delivered the signal to somebody, and not only until a broker has it; of a room on
                several gateways the first is enough, and `SignalReceipt.gateways` counts them. The signal is sent again after
                200 ms without it, three times, with the same ID; then `Undelivered` is raised.

        Raises what `send` raises, and `Overloaded` when the outcome of 10 000 signals is not known yet.
        Source: docs/architecture.md, "A signal to a room".
        """
        return await self._client.signal(self.draft(payload, **options), receipt, timeout_s)

    def signal_soon(self, payload: bytes, receipt: bool = False, **options: Unpack[SendOptions]) -> SignalReceipt:
        """Send a signal without waiting; await what is returned for what `signal` waits for. Arguments as `signal`."""
        return self._client.signal_soon(self.draft(payload, **options), receipt)


class Topic(Destination):
    """A free topic to send to."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The topic's name."""
        assert self._topic is not None
        return self._topic


class User:
    """A user to send to."""

    __slots__ = ("_chat", "_client", "uin")

    def __init__(self, client: Sender, uin: UIN) -> None:
        self.uin = uin
        self._client = client
        self._chat = Destination(client, uin, None, CHAT_KIND)

    @property
    def destination(self) -> Destination:
        """Where chat messages to the user go."""
        return self._chat

    async def chat(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Receipt:
        """Send a message to every device of the user that is online and takes messages, in real time, and wait until it is
        accepted. It is not kept.

        Arguments and what is raised as `Destination.send`; `Offline` when no device was there.
        Source: docs/promises.md and docs/architecture.md, "A message to a user".
        """
        return await self._chat.send(payload, timeout_s=timeout_s, **options)

    async def request(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Message:
        """Send a chat message to the user's devices, and wait for the first reply; arguments and the rest as
        `Destination.request`."""
        return await self._chat.request(payload, timeout_s=timeout_s, **options)

    def chat_soon(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Receipt:
        """Send a message to the user's devices without waiting; arguments and the rest as `Destination.send_soon`."""
        return self._chat.send_soon(payload, timeout_s=timeout_s, **options)

    async def signal(
        self, payload: bytes, receipt: bool = False, *, timeout_s: float | None = None, **options: Unpack[SendOptions]
    ) -> SignalReceipt:
        """Send a signal to every device of the user that takes messages; arguments and the rest as `Room.signal` has it.

        Source: docs/architecture.md, "A signal to a room".
        """
        return await self._client.signal(self._chat.draft(payload, **options), receipt, timeout_s)

    def signal_soon(self, payload: bytes, receipt: bool = False, **options: Unpack[SendOptions]) -> SignalReceipt:
        """Send a signal to the user's devices without waiting; arguments and the rest as `Room.signal_soon`."""
        return self._client.signal_soon(self._chat.draft(payload, **options), receipt)

    async def mail(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Send a mail: it is kept in the user's inbox until it is acknowledged or expires. Returns when it is confirmed.

        Args:
            payload: what to send.
            timeout_s: how long to wait for the confirmation, seconds; None: the option `mail_timeout_s`.
            level: "replicated": on the disks of all replicas in sync; "persisted": on both leaders' disks; "accepted": in both
                leaders' logs. The latter two may be lost by a change of leader.
            lane: 0 goes before 1; order holds within a lane.
            expire: for how long it is of use, in whole minutes; None: for as long as the cluster keeps mail.
            to: further receivers, with this one at most 1 000: the body is stored once.
            type, headers, extension: as in `Destination.send`.

        Raises `OutcomeUnknown` when nobody confirmed it in time (with `open_inboxes`, as far as is known), `NotSent`,
        `InboxFull`, `DiskFull`, `Overloaded`, `IdTooOld`, `NotServed` and what `send` raises.
        Source: docs/promises.md, docs/architecture.md, "A mail is sent".
        """
        return await self._client.mail(self.uin, payload, timeout_s, options)

    def mail_soon(self, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Send a mail without waiting; await the receipt for its confirmation. Arguments as `mail`.

        Raises `Overloaded` when too much is unconfirmed: use `px.mail_writer()`, which waits for room.
        """
        return self._client.mail_soon(self.uin, payload, options)
