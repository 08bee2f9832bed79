"""What is known of an inbox, of a cursor and of a user: values that the state keeps in memory while they are used. Pure.

    1 ────── base ────── floor ────── gap? ───────── last
      gone         kept for       can be read
                   the dedupe window

Source: docs/pi.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from pi.chunk import Chunk
from pi.ranges import NO_RANGES, Ranges
from pixiu.wire.cursor import Cursor

MAX_DEVICES: Final = 8
"""Of a user. Policy: one that was not seen for long makes room, or the next is refused."""

HEAD: Final = struct.Struct("<QQQQQI")
HIGHEST: Final = struct.Struct("<BQ")
HAS_DELETED: Final = b"\1"
"""Behind a head: there are deleted ranges."""
USER: Final = struct.Struct("<IHB")
DEVICE: Final = struct.Struct("<HIIB")


class Head:
    """One inbox: what a user has in one lane."""

    __slots__ = ("base", "deleted", "dropped", "floor", "gap", "highest", "hour", "last", "oldest_s", "tail")

    def __init__(self) -> None:
        self.last = 0
        """InboxSeq of the newest entry."""
        self.floor = 0
        """Entries up to here can no longer be read."""
        self.base = 0
        """Entries up to here are no longer stored."""
        self.gap = 0
        """The newest entry that went before every device had acknowledged it."""
        self.dropped = 0
        """How many did."""
        self.hour = 0
        """The newest hour under which the inbox is noted."""
        self.highest: dict[int, int] = {}
        """Highest counter of a MsgID for each Xiu partition: what is above it cannot be here yet."""
        self.oldest_s = 0
        """When the first stored entry was appended; 0: not looked up. Not stored."""
        self.deleted: Ranges | None = NO_RANGES
        """What nobody can read any more, of the entries above the floor; None: not looked up. Stored apart from this; here is
        only whether there is anything, so that nobody looks for it in vain."""
        self.tail: Chunk | None = None
        """The chunk that `last` is in; None: not looked up, or it is empty. Stored apart from this."""

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
    """By lane; those that were looked up. Not stored here."""


class User:
    """A user's devices."""

    __slots__ = ("devices", "newest", "sessions")

    def __init__(self) -> None:
        self.devices: dict[int, Device] = {}
        self.newest = 0
        """The DeviceID given last."""
        self.sessions = 0
        """The session number given last, to whichever device: numbers of a device that comes back grow, too."""

    def encode(self) -> bytes:
        """Encode as stored."""
        parts = [USER.pack(self.sessions, self.newest, len(self.devices))]
        for number, device in self.devices.items():
            parts += (DEVICE.pack(number, device.session, device.seen_s, len(device.client_id)), device.client_id)
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
        return user

    def free_number(self) -> int:
        """A DeviceID from 1 to 65535 that no device has."""
        number = self.newest
        while True:
            number = number % 65_535 + 1
            if number not in self.devices:
                return number
