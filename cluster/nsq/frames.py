"""Frames of NSQ's protocol V2, of both sides. Pure.

    command    NAME words…\\n, or NAME words…\\n[size: i32][body]
    frame      [size: i32][type: i32][data], size counts type and data
    message    [time: i64 ns][attempts: u16][ID: 16 bytes][body]
    extended   [time][attempts][ID][version: u8][length: u16][JSON][body], without length and JSON if the version is 0

A listener's ID of a message is its position, (part, offset), in 16 characters of URL-safe base64: the same in each delivery, and
text for those who take it for one.

Source: https://nsq.io/clients/tcp_protocol_spec.html; docs/nsq.md.
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from pixiu.errors import MalformedData

MAGIC: Final = b"  V2"
RESPONSE: Final = 0
ERROR: Final = 1
MESSAGE: Final = 2
OK: Final = b"OK"
HEARTBEAT: Final = b"_heartbeat_"
CLOSE_WAIT: Final = b"CLOSE_WAIT"
ID_BYTES: Final = 16
MAX_NAME: Final = 128
"""Characters of a name, its suffix included. nsqd takes 64."""
EPHEMERAL: Final = "#ephemeral"
CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
PLAIN_EXTENSION: Final = 0
"""Version of an extended message without headers."""
JSON_EXTENSION: Final = 4
"""Version of one whose headers are a JSON object, as Youzan's servers and clients have it."""
MAX_ATTEMPTS: Final = 0xFFFF
MAX_FRAME: Final = 64 << 20
"""Longest frame that a client takes, bytes: nsqd's limit of a message is its operator's."""

_FRAME = struct.Struct(">ii")
_HEAD = struct.Struct(">iiqH16s")
_MESSAGE = struct.Struct(">qH16s")
_POSITION = struct.Struct(">IHIH")
_OVERHEAD: Final = 4 + 8 + 2 + ID_BYTES
"""Bytes of a message's frame that its size counts, without the body."""


class Sent(NamedTuple):
    """A message for a client."""

    id: bytes
    time_us: int
    attempts: int
    body: bytes
    extension: bytes | None = None
    """JSON; empty: the message has no headers; None: the client does not know extended messages."""


def frame(kind: int, data: bytes) -> bytes:
    """Encode a frame."""
    return _FRAME.pack(len(data) + 4, kind) + data


def message_frames(messages: Iterable[Sent]) -> bytes:
    """Encode messages, each as its frame."""
    parts: list[bytes] = []
    for each in messages:
        body = each.body if each.extension is None else _extended(each.extension) + each.body
        attempts = min(each.attempts, MAX_ATTEMPTS)
        parts.append(_HEAD.pack(_OVERHEAD + len(body), MESSAGE, each.time_us * 1000, attempts, each.id))
        parts.append(body)
    return b"".join(parts)


def _extended(found: bytes) -> bytes:
    if not found:
        return bytes((PLAIN_EXTENSION,))
    return bytes((JSON_EXTENSION,)) + len(found).to_bytes(2, "big") + found


def message_id(part: int, offset: int) -> bytes:
    """The ID of a position."""
    return urlsafe_b64encode(_POSITION.pack(part, offset >> 32, offset & 0xFFFF_FFFF, 0))


def position_of(found: bytes) -> tuple[int, int]:
    """The position, (part, offset), that an ID stands for. Raises `MalformedData`."""
    try:
        part, high, low, rest = _POSITION.unpack(urlsafe_b64decode(found))
    except (ValueError, struct.error):
        raise MalformedData("this is no ID of a message") from None
    if rest or message_id(part, high << 32 | low) != found:
        raise MalformedData("this is no ID of a message")
    return part, high << 32 | low


class Got(NamedTuple):
    """A message from an nsqd."""

    time_ns: int
    attempts: int
    id: bytes
    body: bytes


def message_of(data: bytes) -> Got:
    """The message of a frame. Raises `MalformedData`."""
    if len(data) < _MESSAGE.size:
        raise MalformedData(f"a message of NSQ has at least {_MESSAGE.size} bytes, not {len(data)}")
    time_ns, attempts, found = _MESSAGE.unpack_from(data)
    return Got(time_ns, attempts, found, data[_MESSAGE.size :])


class FrameReader:
    """Cuts frames out of what comes from an nsqd."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take bytes. Returns (type, data) of each frame that is whole. Raises `MalformedData` for a size that no frame has."""
        self._buffer += data
        buffer, at, found = self._buffer, 0, list[tuple[int, bytes]]()
        while len(buffer) - at >= _FRAME.size:
            size, kind = _FRAME.unpack_from(buffer, at)
            if not 4 <= size <= MAX_FRAME:
                raise MalformedData(f"a frame of NSQ has 4 to {MAX_FRAME} bytes, not {size}: is this the TCP port of an nsqd?")
            if len(buffer) - at < 4 + size:
                break
            found.append((kind, bytes(buffer[at + _FRAME.size : at + 4 + size])))
            at += 4 + size
        del buffer[:at]
        return found


def with_body(line: bytes, body: bytes) -> bytes:
    """Encode a command that has a body."""
    return line + b"\n" + len(body).to_bytes(4, "big") + body


def body_of_many(bodies: Sequence[bytes]) -> bytes:
    """Encode the body of an MPUB."""
    return b"".join((len(bodies).to_bytes(4, "big"), *(part for body in bodies for part in (len(body).to_bytes(4, "big"), body))))


def is_name(name: str) -> bool:
    """True if a topic or channel may have this name."""
    plain = name.removesuffix(EPHEMERAL)
    return bool(plain) and len(name) <= MAX_NAME and CHARACTERS.issuperset(plain)
