"""Values that Pi keeps for an MQTT session that outlives its connection. Pure.

    all         version u8 = 1 | fields                                               little-endian
    session     UIN u64 | expiry u32 | connected u8 | ended u64 | client ID (u16, UTF-8) | tenant (u16, UTF-8) | n u16
                n × (filter (u16, UTF-8) | QoS u8 | options u8 | identifier u32)
    inbound     n × (packet ID u16 | SnowflakeID u64)
    released    n × packet ID u16

Source: docs/mqtt.md, "Sessions"; docs/pi.md, "Notes".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from pixiu.errors import LimitError, MalformedData
from pixiu.wire.inbox_operations import MAX_NOTE_BYTES

VERSION: Final = 1
MAX_FILTERS: Final = 1_000
"""Limit of filters of one session."""
MAX_INBOUND: Final = 1_024
"""Limit of QoS 2 messages of one client whose PUBREL has not come. Policy: the client's receive maximum is below it."""
MAX_RELEASED: Final = 16_384
"""Limit of released packet IDs: all that a session's inbox uses."""
NEVER_EXPIRES: Final = 0xFFFF_FFFF
"""Session expiry of a session that does not end by time, as in MQTT 5."""
_SESSION: Final = struct.Struct("<BQIBQ")
_SIZE: Final = struct.Struct("<H")
_OPTIONS: Final = struct.Struct("<BBI")
_INBOUND: Final = struct.Struct("<HQ")


class NoteName(IntEnum):
    """Names of a session's notes in Pi."""

    SESSION = 0
    INBOUND = 1
    RELEASED = 2


class SessionFilter(NamedTuple):
    """A subscription of a session."""

    filter: str
    qos: int
    """Granted, 0 to 2."""
    options: int = 0
    """The options byte of SUBSCRIBE."""
    identifier: int = 0
    """Subscription identifier; 0: none."""


@dataclass(slots=True)
class SessionNote:
    """A session: its filters and its terms."""

    client_id: str
    uin: int
    """Of the user whose client it is."""
    expiry_s: int
    """Time for which it outlives a connection, seconds; `NEVER_EXPIRES`: for ever."""
    connected: bool = True
    ended_at_ms: int = 0
    """Unix milliseconds of the end of its last connection; 0: unknown, or it is connected."""
    filters: list[SessionFilter] = field(default_factory=list)
    tenant: str = ""
    """The tenant among whose sessions it has a place; empty: none."""

    def encode(self) -> bytes:
        """Encode as a note. Raises LimitError: too many filters, or too many bytes of them."""
        if len(self.filters) > MAX_FILTERS:
            raise LimitError(f"a session that outlives its connection has at most {MAX_FILTERS} filters")
        terms = _SESSION.pack(VERSION, self.uin, self.expiry_s, self.connected, self.ended_at_ms)
        parts = [terms, _text(self.client_id), _text(self.tenant), _SIZE.pack(len(self.filters))]
        for name, qos, options, identifier in self.filters:
            parts += (_text(name), _OPTIONS.pack(qos, options, identifier))
        return _bounded(b"".join(parts), "filters")

    @classmethod
    def decode(cls, value: bytes) -> SessionNote:
        """Decode a note. Raises MalformedData."""
        reader = _Reader(value)
        version, uin, expiry_s, connected, ended_at_ms = reader.take(_SESSION)
        _check_version(version)
        note = cls(reader.text(), uin, expiry_s, bool(connected), ended_at_ms, tenant=reader.text())
        (count,) = reader.take(_SIZE)
        if count > MAX_FILTERS:
            raise MalformedData(f"a session with {count} filters")
        for _ in range(count):
            name = reader.text()
            qos, options, identifier = reader.take(_OPTIONS)
            if qos > 2:
                raise MalformedData(f"a filter with QoS {qos}")
            note.filters.append(SessionFilter(name, qos, options, identifier))
        reader.end()
        return note


class InboundTable:
    """Packet ID → SnowflakeID of QoS 2 messages from the client whose PUBREL has not come."""

    __slots__ = ("messages",)

    def __init__(self) -> None:
        self.messages: dict[int, int] = {}

    def encode(self) -> bytes:
        """Encode as a note; empty without messages: that removes the note. Raises LimitError."""
        if not self.messages:
            return b""
        if len(self.messages) > MAX_INBOUND:
            raise LimitError(f"a client has at most {MAX_INBOUND} unreleased QoS 2 messages")
        return bytes((VERSION,)) + b"".join([_INBOUND.pack(*item) for item in self.messages.items()])

    @classmethod
    def decode(cls, value: bytes) -> InboundTable:
        """Decode a note; an empty one has no messages. Raises MalformedData."""
        table = cls()
        for packet_id, snowflake_id in _items(value, _INBOUND, MAX_INBOUND):
            _check_packet_id(packet_id)
            table.messages[packet_id] = snowflake_id
        return table


class Released:
    """Packet IDs of QoS 2 messages to the client whose PUBREC came and whose PUBCOMP has not."""

    __slots__ = ("packet_ids",)

    def __init__(self) -> None:
        self.packet_ids: set[int] = set()

    def encode(self) -> bytes:
        """Encode as a note; empty without packet IDs: that removes the note. Raises LimitError."""
        if not self.packet_ids:
            return b""
        if len(self.packet_ids) > MAX_RELEASED:
            raise LimitError(f"a session has at most {MAX_RELEASED} released packet identifiers")
        return bytes((VERSION,)) + b"".join([_SIZE.pack(packet_id) for packet_id in sorted(self.packet_ids)])

    @classmethod
    def decode(cls, value: bytes) -> Released:
        """Decode a note; an empty one has no packet IDs. Raises MalformedData."""
        table = cls()
        for (packet_id,) in _items(value, _SIZE, MAX_RELEASED):
            _check_packet_id(packet_id)
            table.packet_ids.add(packet_id)
        return table


class _Reader:
    """Takes fields from a note. Raises MalformedData."""

    __slots__ = ("_at", "_value")

    def __init__(self, value: bytes) -> None:
        self._value, self._at = value, 0

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        if self._at + form.size > len(self._value):
            raise MalformedData("a session's note ends in the middle")
        found = form.unpack_from(self._value, self._at)
        self._at += form.size
        return found

    def text(self) -> str:
        (size,) = self.take(_SIZE)
        begin, self._at = self._at, self._at + size
        if self._at > len(self._value):
            raise MalformedData("a session's note ends in the middle")
        try:
            return self._value[begin : self._at].decode()
        except UnicodeDecodeError as error:
            raise MalformedData("a session's note has a text that is not UTF-8") from error

    def end(self) -> None:
        if self._at != len(self._value):
            raise MalformedData("a session's note has bytes after its end")


def _items(value: bytes, form: struct.Struct, limit: int) -> Iterator[tuple[int, ...]]:
    if not value:
        return iter(())
    _check_version(value[0])
    if (len(value) - 1) % form.size or (len(value) - 1) // form.size > limit:
        raise MalformedData(f"a session's note of {len(value)} bytes")
    return form.iter_unpack(memoryview(value)[1:])


def _check_version(version: int) -> None:
    if version != VERSION:
        raise MalformedData(f"a session's note has version {version}, this program reads {VERSION}")


def _check_packet_id(packet_id: int) -> None:
    if not packet_id:
        raise MalformedData("a session's note has packet identifier 0")


def _text(text: str) -> bytes:
    found = text.encode()
    return _SIZE.pack(len(found)) + found


def _bounded(value: bytes, what: str) -> bytes:
    if len(value) > MAX_NOTE_BYTES:
        raise LimitError(f"the {what} of a session that outlives its connection have at most {MAX_NOTE_BYTES >> 10} KiB")
    return value
