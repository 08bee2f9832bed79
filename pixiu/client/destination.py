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

from pixiu.client.mail.options import MailSendOptions
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.messages.drafts import CHAT_KIND, ROOM_KIND, Draft, draft
from pixiu.client.messages.message import Message
from pixiu.client.messages.send_options import SendOptions
from pixiu.client.options import ClientOptions
from pixiu.client.send.signalling import SignalReceipt
from pixiu.client.send.streams import Receipt
from pixiu.client.writer import Writer
from pixiu.ids import UIN, RoomID


class Sender(Protocol):
    """The interface of the client that destinations send through."""

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
        time, with the same ID, until `timeout_s` is over. One that was `Dropped` on the way is sent again for at most ten seconds.

        Args:
            payload: bytes to send; with the header (40 bytes), topic and extension at most 1 MiB.
            timeout_s: time limit, seconds; None: the option `publish_timeout_s`.
            type: a number for the application, 0 to 63.
            lifetime_min: lifetime of the message, minutes; 0: no limit.
            headers: texts by name, at most 64, together 65 535 bytes; receivers read them as `message.headers`.
            extension: bytes for the application, instead of headers.
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

        Await the receipt to wait for the acceptance. The failure of a receipt that nobody awaits is passed to
        `connect(on_failure=…)`, or logged. Arguments as for `send`.

        Raises `Overloaded` when too much is unresolved (`queue_records`, `queue_bytes`): use `writer()`, which waits for space.
        Raises the argument errors of `send`.
        """
        message = draft(self._kind, self._key, payload, self._limit, self._topic, **options)
        return self._client.submit_soon(message, timeout_s)

    async def send_many(
        self, payloads: Iterable[bytes], *, timeout_s: float | None = None, **options: Unpack[SendOptions]
    ) -> list[Receipt]:
        """Send messages in order, and wait until all are accepted or have failed. Arguments as for `send`.

        Raises the error of the first message that failed; the others are still sent.
        """
        drafts = [draft(self._kind, self._key, payload, self._limit, self._topic, **options) for payload in payloads]
        return await self._client.send_many(drafts, timeout_s)

    async def request(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Message:
        """Send a message and wait for the first reply that a subscriber sends by `message.reply(…)`.

        Request and reply are ordinary messages: real time, and either may be lost. If several subscribers reply, the first reply is
        returned.

        Args:
            payload, options: as for `send`, without `extension`: a request has headers of its own.
            timeout_s: time limit, with the reply, seconds; None: the option `publish_timeout_s`.

        Raises `OutcomeUnknown`, a TimeoutError, when no reply arrived in time; the errors of `send` when the request was not
        accepted; `Overloaded` when 10 000 requests of the client wait.
        """
        return await self._client.request(self, payload, timeout_s, options)

    def writer(self) -> Writer:
        """A writer that sends without waiting for each message: `async with room.writer() as writer: await writer.send(b"…")`."""
        return Writer(self.draft, self._client.submit)


class Room(Destination):
    """A room to send messages and signals to."""

    __slots__ = ()

    @property
    def id(self) -> RoomID:
        """The room's RoomID."""
        return RoomID(self._key)

    async def signal(
        self, payload: bytes, receipt: bool = False, *, timeout_s: float | None = None, **options: Unpack[SendOptions]
    ) -> SignalReceipt:
        """Send a signal and wait for its outcome. Three copies take three proxies and different brokers; the signal is delivered
        once, in no order. It survives the loss of any one process or datagram on its way.

        Args:
            payload: bytes to send; this and all options as for `send`.
            receipt: wait until a gateway has delivered the signal to a client, and not only until a broker has it. If the room is
                on several gateways, the first is enough; `SignalReceipt.gateways` counts them. Without a receipt after 200 ms the
                signal is sent again with the same ID, three times; then `Undelivered` is raised.

        Raises the errors of `send`, and `Overloaded` when the outcome of 10 000 signals is not known yet.
        Source: docs/architecture.md, "A signal to a room".
        """
        return await self._client.signal(self.draft(payload, **options), receipt, timeout_s)

    def signal_soon(self, payload: bytes, receipt: bool = False, **options: Unpack[SendOptions]) -> SignalReceipt:
        """Send a signal without waiting; await the receipt for the outcome that `signal` waits for. Arguments as for `signal`."""
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
        """The destination of chat messages to the user."""
        return self._chat

    async def chat(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Receipt:
        """Send a message to every device of the user that is online and takes messages, in real time, and wait until it is
        accepted. It is not kept.

        Arguments and errors as for `Destination.send`; raises `Offline` when the user has no device online.
        Source: docs/promises.md and docs/architecture.md, "A message to a user".
        """
        return await self._chat.send(payload, timeout_s=timeout_s, **options)

    async def request(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Message:
        """Send a chat message to the user's devices, and wait for the first reply; arguments and errors as for
        `Destination.request`."""
        return await self._chat.request(payload, timeout_s=timeout_s, **options)

    def chat_soon(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Receipt:
        """Send a message to the user's devices without waiting; arguments and errors as for `Destination.send_soon`."""
        return self._chat.send_soon(payload, timeout_s=timeout_s, **options)

    async def signal(
        self, payload: bytes, receipt: bool = False, *, timeout_s: float | None = None, **options: Unpack[SendOptions]
    ) -> SignalReceipt:
        """Send a signal to every device of the user that takes messages; arguments and errors as for `Room.signal`.

        Source: docs/architecture.md, "A signal to a room".
        """
        return await self._client.signal(self._chat.draft(payload, **options), receipt, timeout_s)

    def signal_soon(self, payload: bytes, receipt: bool = False, **options: Unpack[SendOptions]) -> SignalReceipt:
        """Send a signal to the user's devices without waiting; arguments and errors as for `Room.signal_soon`."""
        return self._client.signal_soon(self._chat.draft(payload, **options), receipt)

    async def mail(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Send a mail, and wait until it is confirmed. The user's inbox keeps it until it is acknowledged or expires.

        Args:
            payload: bytes to send.
            timeout_s: time limit for the confirmation, seconds; None: the option `mail_timeout_s`.
            level: "replicated": on the disks of all replicas in sync; "persisted": on both leaders' disks; "accepted": in both
                leaders' logs. The latter two may be lost by a change of leader.
            lane: 0 is delivered before 1; order holds within a lane.
            expire: lifetime, in whole minutes; None: as long as the cluster keeps mail.
            to: further receivers, at most 1 000 in all with this user; the body is stored once.
            type, headers, extension: as for `Destination.send`.

        Raises `OutcomeUnknown` when nobody confirmed it in time (with `open_inboxes`, as far as is known), `NotSent`,
        `InboxFull`, `DiskFull`, `Overloaded`, `IdTooOld`, `NotServed` and the errors of `send`.
        Source: docs/promises.md, docs/architecture.md, "A mail is sent".
        """
        return await self._client.mail(self.uin, payload, timeout_s, options)

    def mail_soon(self, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Send a mail without waiting; await the receipt for its confirmation. Arguments as for `mail`.

        Raises `Overloaded` when too much is unconfirmed: use `px.mail_writer()`, whose `space()` waits for space.
        """
        return self._client.mail_soon(self.uin, payload, options)
