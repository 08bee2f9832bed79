"""Messages as a subscriber gets them, and decoding them from a batch of records. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Unpack
from zlib import crc32

from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import UIN, RoomID, SnowflakeID, snowflake_time_ms
from pixiu.placement.topics import MAX_TOPIC_LENGTH, ROOM_PREFIX, USER_PREFIX, TopicRefusal, resolve
from pixiu.wire.headers import decode_headers
from pixiu.wire.record import HEADER, HEADER_SIZE, LANE_FIRST, STAMP_SIZE, TYPE_BITS, Flag, Kind, offsets

if TYPE_CHECKING:
    from pixiu.client.messages.send_options import SendOptions
    from pixiu.client.send.streams import Receipt

TYPE_MASK: Final = (1 << TYPE_BITS) - 1
# Plain numbers: an operation with an IntFlag takes half a microsecond.
TRACED: Final = int(Flag.TRACED)
TOPIC: Final = int(Flag.TOPIC)
DERIVED_ID: Final = int(Flag.DERIVED_ID)
TO_ROOM: Final = int(Flag.TO_ROOM)
LOAD_TEST: Final = int(Flag.LOAD_TEST)
ROOM_KIND: Final = int(Kind.ROOM)
SIGNAL: Final = int(Kind.SIGNAL)


class Message(NamedTuple):
    """A message as a subscriber sees it."""

    room: RoomID
    """The room it was sent to; for a topic, the room that carries the topic; 0 for a message to a user."""
    topic: str | None
    """The topic's name; None for a message to a room."""
    sender: int
    """The sender's UIN, 0 for a service."""
    payload: bytes
    """The bytes that were sent."""
    message_id: SnowflakeID
    """The sender's ID of the message."""
    type: int
    """The application's type, 0 to 63."""
    first_lane: bool
    """True if it overtook messages of the normal lane."""
    sent_at_ms: int
    """Time of sending, Unix milliseconds; 0 if the ID was derived from other content and holds no time."""
    extension: bytes
    """Bytes of the application beside the payload: its headers, encoded, or another format; empty if it sent none."""
    lifetime_min: int
    """Lifetime, minutes; 0: no limit."""
    signal: bool = False
    """True if it was sent as a signal."""
    user: UIN = UIN(0)
    """The user it was sent to; 0 for a message to a room or topic."""
    load_test: bool = False
    """True if it belongs to a load test."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The application's headers; empty if it sent none, or an extension in another format. Decoded at each access."""
        return decode_headers(self.extension)

    def reply(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Awaitable[Receipt]:
        """Answer a request: `await message.reply(b"…")`; arguments and errors as for `Room.send`.

        Raises `InvalidArgument` if the message does not ask for a reply, and with the synchronous client: use
        `px.reply(message, b"…")` there.
        """
        raise InvalidArgument("the message is not a request that a subscription received: it asks for no reply")

    @property
    def destination(self) -> str:
        """The destination as an MQTT topic: "room/42", "user/7" or the free topic's name."""
        if self.topic is not None:
            return self.topic
        return f"{USER_PREFIX}{self.user}" if self.user else f"{ROOM_PREFIX}{self.room}"

    @property
    def sent_at(self) -> datetime | None:
        """Time of sending, UTC; None if the ID holds no time."""
        return datetime.fromtimestamp(self.sent_at_ms / 1000, UTC) if self.sent_at_ms else None


class Request(Message):
    """A message that asks for a reply, as a subscription returns it."""

    answer: Callable[..., Awaitable[Receipt]]

    def reply(self, payload: bytes, *, timeout_s: float | None = None, **options: Unpack[SendOptions]) -> Awaitable[Receipt]:
        return self.answer(self, payload, timeout_s=timeout_s, **options)


def message_of(record: bytes) -> Message:
    """Decode the message in one whole record. Raises `MalformedData` when lengths, the CRC or the topic's name are wrong.

    It reads the header once and makes one object: `pixiu.wire.record.decode` with its `Record` would take three times as long.
    """
    _, kind, flags, type_, _, length, lifetime_min, crc, message_id, key, sender = HEADER.unpack_from(record)
    start = HEADER_SIZE + length
    end = len(record)
    if flags & TRACED:
        end -= 1 + STAMP_SIZE * record[-1]
    if start > end or crc32(memoryview(record)[HEADER_SIZE:end]) != crc:
        raise MalformedData("the record's lengths or its CRC are wrong: it was damaged on the way")
    topic = None
    extension = record[HEADER_SIZE:start] if length else b""
    if flags & TOPIC:
        name = start + 2
        start = name + (record[name - 2] << 8 | record[name - 1]) if name <= end else end + 1
        if start > end:
            raise MalformedData("the topic's name does not fit into the record")
        try:
            topic = record[name:start].decode()
        except UnicodeDecodeError:
            raise MalformedData("the topic's name is not UTF-8") from None
    to_user = kind != ROOM_KIND and not flags & TO_ROOM
    return Message(
        RoomID(0 if to_user else key),
        topic,
        sender,
        record[start:end],
        SnowflakeID(message_id),
        type_ & TYPE_MASK,
        type_ >> TYPE_BITS == LANE_FIRST,
        0 if flags & DERIVED_ID else snowflake_time_ms(message_id),
        extension,
        lifetime_min,
        kind == SIGNAL,
        UIN(key if to_user else 0),
        flags & LOAD_TEST != 0,
    )


def messages_of(batch: bytes, count: int) -> tuple[list[Message], int]:
    """Decode a batch of `count` records; returns the messages, and the number of damaged ones that were left out. Never raises.

    Source: docs/protocol.md, "Record": the CRC is checked where the record leaves the cluster.
    """
    if not 0 <= count <= len(batch):
        return [], 1
    found = offsets(batch, 0, len(batch), count)
    if found is None:
        return [], max(count, 1)
    messages: list[Message] = []
    damaged = 0
    for start, end in pairwise(found):
        try:
            messages.append(message_of(batch[start:end]))
        except MalformedData:
            damaged += 1
    return messages, damaged


def check_topic_name(topic: str) -> str:
    """Check a topic to publish to. Raises `InvalidArgument`.

    Source: MQTT 5.0 section 4.7; docs/routing.md.
    """
    if "+" in topic or "#" in topic:
        raise InvalidArgument(f"the topic {topic!r} has a wildcard; wildcards are for subscribing")
    return _check(topic)


def check_topic_filter(topic: str) -> str:
    """Check a topic to subscribe to. Raises `InvalidArgument` if no gateway serves it.

    Source: MQTT 5.0 section 4.7.1; docs/routing.md.
    """
    levels = topic.split("/")
    for place, level in enumerate(levels):
        if "#" in level and (level != "#" or place != len(levels) - 1):
            raise InvalidArgument(f"in the filter {topic!r} '#' must be a whole level, and the last one")
        if "+" in level and level != "+":
            raise InvalidArgument(f"in the filter {topic!r} '+' must be a whole level")
    found = resolve(_check(topic))
    if isinstance(found, TopicRefusal):
        raise InvalidArgument(f"{topic!r} cannot be subscribed to: {found.value}")
    return topic


def _check(topic: str) -> str:
    if not topic or "\0" in topic:
        raise InvalidArgument("a topic has at least one character and no NUL")
    try:
        topic.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("a topic must be text that UTF-8 can carry: it has a lone surrogate") from error
    if len(topic) > MAX_TOPIC_LENGTH:
        raise InvalidArgument(f"a topic has at most {MAX_TOPIC_LENGTH} characters, this one {len(topic)}")
    for prefix, instead in (("room/", "room(…) or room="), ("user/", "user(…) or chat=True")):
        if topic.startswith(prefix):
            raise InvalidArgument(f"{topic!r}: names that begin with {prefix!r} are not free topics; use {instead}")
    return topic
