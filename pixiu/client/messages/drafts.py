"""Messages that are checked and need only an ID, and the records made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from pixiu.client.messages.load_test import mark_of
from pixiu.client.messages.message import TYPE_MASK
from pixiu.client.messages.send_options import SendOptions
from pixiu.errors import InvalidArgument, RecordTooLarge
from pixiu.ids import MAX_ID
from pixiu.wire import record
from pixiu.wire.headers import encode_headers
from pixiu.wire.record import HEADER_SIZE, LANE_FIRST, LANE_NORMAL, TYPE_BITS, Flag, Kind, with_topic

MAX_EXTENSION_BYTES: Final = 65_535
MAX_LIFETIME_MIN: Final = 65_535
# Plain numbers: an operation with an IntFlag takes half a microsecond.
TO_ROOM: Final = int(Flag.TO_ROOM)
TO_TOPIC: Final = int(Flag.TO_ROOM | Flag.TOPIC)
DERIVED_ID: Final = int(Flag.DERIVED_ID)
LOAD_TEST: Final = int(Flag.LOAD_TEST)
ROOM_KIND: Final = int(Kind.ROOM)
CHAT_KIND: Final = int(Kind.CHAT)
SIGNAL_KIND: Final = int(Kind.SIGNAL)
MAIL_KIND: Final = int(Kind.MAIL)
BYTES: Final = (bytes, bytearray, memoryview)


class Draft(NamedTuple):
    """A message that is checked and needs only an ID."""

    key: int
    flags: int
    body: bytes
    type: int
    lane: int
    lifetime_min: int
    extension: bytes
    size: int
    kind: int
    derived_id: int | None = None
    origin: int = 0
    """QoS and RETAIN with which a client of MQTT published it; 0: none did."""


def draft(
    kind: int,
    key: int,
    payload: bytes,
    limit: int,
    topic: str | None = None,
    *,
    type: int = 0,
    lifetime_min: int = 0,
    extension: bytes = b"",
    headers: Mapping[str, str] | None = None,
    first_lane: bool = False,
    derived_id: int | None = None,
    load_test: bool | None = None,
    **unknown: object,
) -> Draft:
    """Check a message to a room (its RoomID), a topic (its RoomID and name) or a user (the UIN).

    Args:
        kind: of the record: `ROOM_KIND`, `CHAT_KIND` or `MAIL_KIND`.
        key: of the record.
        payload: bytes to send.
        limit: largest record, bytes.
        topic: name, for a message to a topic.
        type, lifetime_min, extension, headers, first_lane, derived_id, load_test: as in `SendOptions`.

    Raises `InvalidArgument` and `RecordTooLarge`.
    """
    if unknown:
        raise no_such_option(unknown, SendOptions.__annotations__)
    if not 0 <= type <= TYPE_MASK:
        raise InvalidArgument(f"a type is from 0 to {TYPE_MASK}, not {type}")
    if not 0 <= lifetime_min <= MAX_LIFETIME_MIN:
        raise InvalidArgument(f"lifetime_min is from 0 (without limit) to {MAX_LIFETIME_MIN}, not {lifetime_min}")
    if headers is not None:
        if extension:
            raise InvalidArgument("a message has headers= or extension=, not both: headers are its extension")
        extension = encode_headers(headers)
    if extension.__class__ is not bytes:
        raise InvalidArgument(f"an extension is bytes, not {extension.__class__.__name__}; a mapping of texts goes into headers=")
    if len(extension) > MAX_EXTENSION_BYTES:
        raise InvalidArgument(f"an extension has at most {MAX_EXTENSION_BYTES} bytes, this one {len(extension)}")
    if payload.__class__ is not bytes and not isinstance(payload, BYTES):
        raise InvalidArgument(f"a payload is bytes, not {payload.__class__.__name__}; encode text with .encode()")
    body = bytes(payload)
    if topic is not None:
        body = with_topic(topic, body)
    size = HEADER_SIZE + len(extension) + len(body)
    if size > limit:
        raise RecordTooLarge(f"a message of {size} bytes with its header is above the limit of {limit}; send a reference instead")
    flags = TO_TOPIC if topic is not None else TO_ROOM if kind == ROOM_KIND else 0
    if derived_id is not None:
        if not 0 < derived_id <= MAX_ID:
            raise InvalidArgument(f"a derived ID is from 1 to 2^63-1, not {derived_id}")
        flags |= DERIVED_ID
    if mark_of(load_test):
        flags |= LOAD_TEST
    lane = LANE_FIRST if first_lane else LANE_NORMAL
    return Draft(key, flags, body, lane << TYPE_BITS | type, lane, lifetime_min, extension, size, kind, derived_id)


def no_such_option(unknown: Iterable[str], known: Iterable[str]) -> InvalidArgument:
    """Build the error for unknown keyword arguments."""
    name = next(iter(unknown))
    return InvalidArgument(f"there is no option {name!r} of a message; known: {', '.join(sorted(known))}")


def encode(draft: Draft, message_id: int, sender: int, limit: int, kind: int | None = None) -> bytes:
    """Encode the record of a draft.

    Args:
        draft: the checked message.
        message_id: its SnowflakeID.
        sender: the sender's UIN, 0 for a service.
        limit: largest record, bytes.
        kind: kind of the record, if it differs from the draft's.
    """
    return record.encode(
        draft.kind if kind is None else kind,
        draft.key,
        draft.body,
        message_id,
        sender=sender,
        flags=draft.flags,
        type=draft.type,
        lifetime_min=draft.lifetime_min,
        extension=draft.extension,
        limit=limit,
        origin=draft.origin,
    )
