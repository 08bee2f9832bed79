"""Rooms, topics and users to send to, and the messages for them that were checked."""

from __future__ import annotations

from typing import Protocol, Unpack

from pixiu.client.drafts import CHAT_KIND, ROOM_KIND, Draft, SendOptions, draft
from pixiu.client.mail_options import MailSendOptions
from pixiu.client.mail_publisher import MailPublisher
from pixiu.client.mail_receipt import MailReceipt
from pixiu.client.options import ClientOptions
from pixiu.client.signalling import SignalReceipt
from pixiu.client.streams import Receipt
from pixiu.ids import UIN, RoomID


class Sender(Protocol):
    """The client: what sends."""

    options: ClientOptions

    async def submit(self, draft: Draft) -> Receipt:
        """Queue a message, waiting for space."""

    def submit_nowait(self, draft: Draft) -> Receipt:
        """Queue a message now. Raises `Overloaded`."""

    async def signal(self, draft: Draft, wants_receipt: bool) -> SignalReceipt:
        """Send a signal."""

    def mails(self) -> MailPublisher:
        """What all mail goes through."""


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

    async def send(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
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
        Source: docs/architecture.md, "A message to a room"; docs/promises.md, "Failure rules" 2.
        """
        return await self._client.submit(draft(self._kind, self._key, payload, self._limit, self._topic, **options))

    async def send_and_wait(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """`send`, then wait for the acceptance. Raises what `send` and awaiting its receipt raise."""
        receipt = await self.send(payload, **options)
        await receipt
        return receipt

    def send_nowait(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """`send` that never waits. Raises `Overloaded` where `send` would wait (the first message always does)."""
        return self._client.submit_nowait(draft(self._kind, self._key, payload, self._limit, self._topic, **options))


class Room(Destination):
    """A room to send to, messages and signals."""

    __slots__ = ()

    @property
    def id(self) -> RoomID:
        """Its RoomID."""
        return RoomID(self._key)

    async def signal(self, payload: bytes, receipt: bool = False, **options: Unpack[SendOptions]) -> SignalReceipt:
        """Send a signal: three copies through three proxies and different brokers, delivered once, in no order.

        It survives the loss of any one process or datagram on its way. Returns when the copies are queued.

        Args:
            payload: what to send; this and what is not named here as in `send`.
            receipt: awaiting what is returned waits until a gateway has delivered the signal to somebody, and not only for a
                broker's acceptance; of a room on several gateways the first is enough. The signal is sent again after 200 ms
                without it, three times, with the same ID; then awaiting raises `Undelivered`.

        Raises what `send` raises, and `Overloaded` when the outcome of 10 000 signals is not known yet.
        Source: docs/architecture.md, "A signal to a room".
        """
        return await self._client.signal(self.draft(payload, **options), receipt)


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

    def __init__(self, client: Sender, uin: UIN) -> None:
        self.uin = uin
        self._client = client
        self._chat = Destination(client, uin, None, CHAT_KIND)

    @property
    def destination(self) -> Destination:
        """Where chat messages to the user go."""
        return self._chat

    async def chat(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """Send a message to every device of the user that is online and takes messages, in real time. It is not kept.

        Arguments and what is raised as `Destination.send`. Awaiting the receipt raises `Offline` when no device was there.
        Source: docs/promises.md and docs/architecture.md, "A message to a user".
        """
        return await self._chat.send(payload, **options)

    async def chat_and_wait(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """`chat`, then wait for the acceptance. Raises what `chat` and awaiting its receipt raise."""
        receipt = await self.chat(payload, **options)
        await receipt
        return receipt

    async def signal(self, payload: bytes, receipt: bool = False, **options: Unpack[SendOptions]) -> SignalReceipt:
        """Send a signal to every device of the user that takes messages; arguments and the rest as `Room.signal` has it.

        Source: docs/architecture.md, "A signal to a room".
        """
        return await self._client.signal(self._chat.draft(payload, **options), receipt)

    async def mail(self, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
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
        Source: docs/promises.md, docs/architecture.md, "A mail is sent".
        """
        return await self._client.mails().send_and_wait(self.uin, payload, **options)

    def chat_nowait(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """`chat` that never waits. Raises `Overloaded` where `chat` would wait (the first message always does)."""
        return self._chat.send_nowait(payload, **options)
