"""Rooms, topics and users to send to, and the messages for them that were checked."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from pixiu.client.mail_writer import Level, MailOptions, MailReceipt
from pixiu.client.message import TYPE_MASK
from pixiu.client.signalling import SignalReceipt
from pixiu.client.streams import Receipt
from pixiu.errors import InvalidArgument, RecordTooLarge
from pixiu.ids import MAX_ID, UIN, RoomID
from pixiu.wire.record import HEADER_SIZE, LANE_FIRST, LANE_NORMAL, Flag, Kind, with_topic

if TYPE_CHECKING:
    from pixiu.client.client import Client

MAX_EXTENSION_BYTES = 65_535
MAX_LIFETIME_MIN = 65_535
# Plain numbers: an operation with an IntFlag takes half a microsecond.
TO_ROOM = int(Flag.TO_ROOM)
TO_TOPIC = int(Flag.TO_ROOM | Flag.TOPIC)
ROOM_KIND = int(Kind.ROOM)
CHAT_KIND = int(Kind.CHAT)
DERIVED_ID = int(Flag.DERIVED_ID)


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
    derived_id: int | None = None
    """The message's ID, made from where its content comes from; None: it gets one of its own."""


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
        self,
        payload: bytes,
        *,
        type: int = 0,
        lifetime_min: int = 0,
        extension: bytes = b"",
        first_lane: bool = False,
        derived_id: int | None = None,
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
        if derived_id is not None and not 0 < derived_id <= MAX_ID:
            raise InvalidArgument(f"a derived ID is from 1 to 2^63-1, not {derived_id}")
        lane = LANE_FIRST if first_lane else LANE_NORMAL
        flags = self._flags if derived_id is None else self._flags | DERIVED_ID
        return Draft(self._key, flags, body, lane << 6 | type, lane, lifetime_min, extension, size, self._kind, derived_id)

    async def send(
        self,
        payload: bytes,
        *,
        type: int = 0,
        lifetime_min: int = 0,
        extension: bytes = b"",
        first_lane: bool = False,
        derived_id: int | None = None,
    ) -> Receipt:
        """Send a message. Returns when it is queued: at once, or when the bounded queue has space again.

        Await the returned receipt to wait for the cluster's acceptance; a receipt that is dropped costs nothing.

        Args:
            payload: what to send; with the header (40 bytes), topic and extension at most 1 MiB.
            type: a number for the application, 0 to 63.
            lifetime_min: for how many minutes the message is of use, 0 without limit.
            extension: JSON headers, at most 65 535 bytes.
            first_lane: overtake messages of the normal lane.
            derived_id: an ID made from where the content comes from, so that who sends it again sends the same message.

        Raises `InvalidArgument` and `RecordTooLarge` for a message that cannot be sent, `NotConnected` outside of the
        client's `async with`, `Unavailable` when no proxy lends a number for message IDs.
        Source: DESIGN section 9, "Room message"; section 14, rule 2.
        """
        return await self._client.submit(
            self.draft(
                payload,
                type=type,
                lifetime_min=lifetime_min,
                extension=extension,
                first_lane=first_lane,
                derived_id=derived_id,
            )
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
