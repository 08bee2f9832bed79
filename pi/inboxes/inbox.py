"""Inboxes, cursors and users as values that the state keeps in memory while they are used. Pure.

    1 ────── base ────── floor ────── gap? ───────── last
      gone         kept for       can be read
                   the dedupe window

Source: docs/pi.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from pi.inboxes.chunk import Chunk
from pi.inboxes.ranges import NO_RANGES, Ranges
from pixiu.wire.cursor import Cursor

MAX_DEVICES: Final = 8
"""Limit of devices of a user. Policy: one not seen for long is replaced, else the next one is refused."""

HEAD: Final = struct.Struct("<QQQQQI")
HIGHEST: Final = struct.Struct("<BQ")
HAS_DELETED: Final = b"\1"
"""Follows a head that has deleted ranges."""
USER: Final = struct.Struct("<IHB")
DEVICE: Final = struct.Struct("<HIIB")
NOTES: Final = struct.Struct("<QBI")
"""Follows the devices of a user who has, or had, notes."""


class Head:
    """One inbox: a user's mail in one lane."""

    __slots__ = ("base", "deleted", "dropped", "floor", "gap", "highest", "hour", "last", "oldest_s", "tail")

    def __init__(self) -> None:
        self.last = 0
        """InboxSeq of the newest entry."""
        self.floor = 0
        """Entries up to here can no longer be read."""
        self.base = 0
        """Entries up to here are no longer stored."""
        self.gap = 0
        """The newest entry dropped before every device had acknowledged it."""
        self.dropped = 0
        """Number of such entries."""
        self.hour = 0
        """The newest hour under which the inbox is listed."""
        self.highest: dict[int, int] = {}
        """Xiu partition → highest counter of its MsgIDs; MsgIDs above it cannot be here yet."""
        self.oldest_s = 0
        """Append time of the first stored entry; 0: not looked up. Not stored."""
        self.deleted: Ranges | None = NO_RANGES
        """Deleted entries above the floor; None: not looked up. Stored apart; the head stores only whether there are any, to avoid
        look-ups in vain."""
        self.tail: Chunk | None = None
        """The chunk that `last` is in; None: not looked up, or it is empty. Stored apart."""

    def encode(self) -> bytes:
        """Encode as stored."""
        body = HEAD.pack(self.last, self.floor, self.base, self.gap, self.dropped, self.hour)
        body += b"".join([HIGHEST.pack(*item) for item in sorted(self.highest.items())])
        return body if self.deleted is NO_RANGES else body + HAS_DELETED

    @classmethod
    def decode(cls, body: bytes) -> Head:
        """Decode a stored value whose CRC was right."""
        head = cls()
        head.last, head.floor, head.base, head.gap, head.dropped, head.hour = HEAD.unpack_from(body)
        rest = body[HEAD.size :]
        if len(rest) % HIGHEST.size:
            head.deleted, rest = None, rest[: -len(HAS_DELETED)]
        head.highest = dict(HIGHEST.iter_unpack(rest))
        return head


@dataclass(slots=True)
class Device:
    """One device of a user."""

    session: int
    seen_s: int
    client_id: bytes
    cursors: dict[int, Cursor] = field(default_factory=dict)
    """By lane; only those that were looked up. Not stored here."""


class User:
    """A user's devices, and which notes there are."""

    __slots__ = ("devices", "generation", "hour", "names", "newest", "sessions")

    def __init__(self) -> None:
        self.devices: dict[int, Device] = {}
        self.newest = 0
        """The last DeviceID assigned."""
        self.sessions = 0
        """The last session number assigned, to any device: numbers of a returning device grow, too."""
        self.generation = 0
        """The highest generation that set or removed a note; 0: there never was one."""
        self.names = 0
        """Bit i: there is a note i."""
        self.hour = 0
        """The newest hour under which the notes are listed."""

    def encode(self) -> bytes:
        """Encode as stored."""
        parts = [USER.pack(self.sessions, self.newest, len(self.devices))]
        for number, device in self.devices.items():
            parts += (DEVICE.pack(number, device.session, device.seen_s, len(device.client_id)), device.client_id)
        if self.generation:
            parts.append(NOTES.pack(self.generation, self.names, self.hour))
        return b"".join(parts)

    @classmethod
    def decode(cls, body: bytes) -> User:
        """Decode a stored value whose CRC was right."""
        user = cls()
        user.sessions, user.newest, count = USER.unpack_from(body)
        assert count <= MAX_DEVICES
        offset = USER.size
        for _ in range(count):
            number, session, seen_s, size = DEVICE.unpack_from(body, offset)
            offset += DEVICE.size
            user.devices[number] = Device(session, seen_s, body[offset : offset + size])
            offset += size
        if offset < len(body):
            user.generation, user.names, user.hour = NOTES.unpack_from(body, offset)
        return user

    def free_number(self) -> int:
        """A DeviceID from 1 to 65535 that no device has."""
        number = self.newest
        while True:
            number = number % 65_535 + 1
            if number not in self.devices:
                return number
