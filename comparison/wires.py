"""Protocols of a load: MQTT 3.1.1, and Redis' publish and subscribe. Pure.

Source: docs/performance.md, "Beside others"; MQTT 3.1.1; the protocol RESP2.
"""

from __future__ import annotations

import struct
from typing import Final, Protocol

PACKET_ID: Final = struct.Struct(">H")
KEEP_ALIVE_S: Final = 600
CLEAN: Final = 2
ID_COUNT: Final = 65_535


class Wire(Protocol):
    """A protocol of a load: prebuilt bytes, and answers of known size."""

    def connect(self, client: str, *, clean: bool = True) -> tuple[bytes, bytes]:
        """Return (first bytes on a connection, the right answer)."""

    def subscribe(self, topic: str, qos: int = 0) -> tuple[bytes, bytes]:
        """Return (a subscription, the right answer)."""

    def delivered(self, topic: str, body_bytes: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the body when a message of QoS 0 arrives."""

    def published(self, topic: str, body_bytes: int, qos: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the body of a publication; with QoS 1 the packet's number follows the first part."""

    def confirmed(self, chunk: bytes) -> float:
        """Return the number of confirmations in a chunk from a publisher's socket; a fraction for a part of one."""


def string(text: str) -> bytes:
    """Encode a string for MQTT."""
    data = text.encode()
    return struct.pack(">H", len(data)) + data


def packet_head(kind: int, size: int) -> bytes:
    """Encode the first byte of an MQTT packet and its length."""
    head = bytearray([kind])
    while True:
        size, low = size >> 7, size & 127
        head.append(low | (128 if size else 0))
        if not size:
            return bytes(head)


def packet(kind: int, rest: bytes) -> bytes:
    """Encode an MQTT packet from its first byte and the rest after the length."""
    return packet_head(kind, len(rest)) + rest


def packet_id(number: int) -> bytes:
    """Encode a message's packet number for MQTT: never 0."""
    return PACKET_ID.pack(number % ID_COUNT + 1)


class Mqtt:
    """MQTT 3.1.1."""

    def connect(self, client: str, *, clean: bool = True) -> tuple[bytes, bytes]:
        """Return CONNECT without a login; CONNACK without a session."""
        head = string("MQTT") + bytes([4, CLEAN if clean else 0]) + struct.pack(">H", KEEP_ALIVE_S)
        return packet(0x10, head + string(client)), b"\x20\x02\x00\x00"

    def subscribe(self, topic: str, qos: int = 0) -> tuple[bytes, bytes]:
        """Return SUBSCRIBE to one filter; SUBACK that grants it."""
        return packet(0x82, PACKET_ID.pack(1) + string(topic) + bytes([qos])), b"\x90\x03\x00\x01" + bytes([qos])

    def delivered(self, topic: str, body_bytes: int) -> tuple[bytes, bytes]:
        """Return the parts of a PUBLISH of QoS 0."""
        return self.published(topic, body_bytes, 0)

    def published(self, topic: str, body_bytes: int, qos: int) -> tuple[bytes, bytes]:
        """Return the parts of a PUBLISH."""
        name = string(topic)
        return packet_head(0x30 | qos << 1, len(name) + (PACKET_ID.size if qos else 0) + body_bytes) + name, b""

    def confirmed(self, chunk: bytes) -> float:
        """Count PUBACKs of four bytes."""
        return len(chunk) / 4


class Resp:
    """SUBSCRIBE and PUBLISH of Redis: neither logins nor levels of QoS; every publication is answered."""

    def connect(self, client: str, *, clean: bool = True) -> tuple[bytes, bytes]:
        """Return nothing: Redis waits for commands."""
        return b"", b""

    def subscribe(self, topic: str, qos: int = 0) -> tuple[bytes, bytes]:
        """Return SUBSCRIBE to one channel, and its answer."""
        return _words(b"SUBSCRIBE", topic.encode()), b"*3\r\n" + _word(b"subscribe") + _word(topic.encode()) + b":1\r\n"

    def delivered(self, topic: str, body_bytes: int) -> tuple[bytes, bytes]:
        """Return the parts of a channel's message."""
        return b"*3\r\n" + _word(b"message") + _word(topic.encode()) + b"$%d\r\n" % body_bytes, b"\r\n"

    def published(self, topic: str, body_bytes: int, qos: int) -> tuple[bytes, bytes]:
        """Return the parts of a PUBLISH."""
        return b"*3\r\n" + _word(b"PUBLISH") + _word(topic.encode()) + b"$%d\r\n" % body_bytes, b"\r\n"

    def confirmed(self, chunk: bytes) -> float:
        """Count lines: each has the number of subscribers that got a message."""
        return chunk.count(b"\n")


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def _words(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_word, words))


WIRES: Final[dict[str, Wire]] = {"mqtt": Mqtt(), "redis": Resp()}
