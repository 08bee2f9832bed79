"""What changes inboxes, as bytes in the log: operations end to end in the payload of one entry. Pure.

    ├── u8 ──┼─ u32 ─┼──────────────────────────────────────────────┤   little-endian
    │   op   │ size  │ body of `size` bytes                         │

    1 appends        worker u16 | generation u32 | S u32 | n × (MsgID u64 | UIN u64)
    2 fan-out        worker u16 | generation u32 | S u32 | MsgID u64 | n × UIN u64
    3 acknowledges   n × (UIN u64 | device u16 | lane u8 | 0 u8 | session u32 | UpTo u64 | map u64)
    4 open sessions  n × (UIN u64 | device u16)
    5 add device     UIN u64 | client ID
    6 drop devices   n × (UIN u64 | device u16)
    7 trims          n × (UIN u64 | lane u8 | UpTo u64)
    8 clock          limits: cap u32 | full u8 | dedupe, history, age, device age u32 seconds; then, if it is not 0: from now u8
   10 deletes        n × (UIN u64 | lane u8 | first u64 | last u64)

Bodies of many items stay bytes until they are applied. 9 was never given. What came later is written only where it is used, so that
older logs are read, and replicas of an older version read what does not use it.

Source: DESIGN sections 5, 9 ("Mail") and 11 ("Pi").
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from pixiu.errors import MalformedData
from pixiu.ids import WORKERS

ENTRY_KIND: Final = 16
"""Of the log's entries that hold operations."""
MAX_RECEIVERS: Final = 1000
MAX_DEVICES: Final = 8
MAX_CLIENT_ID_BYTES: Final = 128
MAX_LANE: Final = 3
MAX_OPERATIONS: Final = 65_536
"""In one entry."""
LANE_SHIFT: Final = 54
"""A MsgID's type byte is below its partition byte; the lane is the type's top two bits."""

HEAD: Final = struct.Struct("<BI")
WRITER: Final = struct.Struct("<HII")
APPEND: Final = struct.Struct("<QQ")
U64: Final = struct.Struct("<Q")
ACKNOWLEDGE: Final = struct.Struct("<QHBxIQQ")
USER_DEVICE: Final = struct.Struct("<QH")
TRIM: Final = struct.Struct("<QBQ")
DELETE: Final = struct.Struct("<QBQQ")
LIMITS: Final = struct.Struct("<IBIIII")


class Op(IntEnum):
    """Numbers of the operations."""

    APPENDS = 1
    FANOUT = 2
    ACKNOWLEDGES = 3
    OPEN_SESSIONS = 4
    ADD_DEVICE = 5
    DROP_DEVICES = 6
    TRIMS = 7
    CLOCK = 8
    DELETES = 10


class Code(IntEnum):
    """What became of an item, where it is not a number of its own. On the wire and in results as `-code`."""

    OK = 0
    STALE_WRITER = 1
    INBOX_FULL = 2
    UNKNOWN_DEVICE = 3
    OLD_SESSION = 4
    CURSOR_BEYOND_END = 5
    TOO_MANY_DEVICES = 6
    TOO_MANY_RECEIVERS = 7
    INVALID_ARGUMENT = 8
    TOO_MANY_DELETIONS = 9


class Limits(NamedTuple):
    """What inboxes hold, and how long. Part of the log, so that every replica drops the same. Seconds."""

    cap: int = 100_000
    """Entries of an inbox that can be read."""
    refuse_full: int = 0
    """1: an inbox at its cap refuses; 0: it drops its oldest, with a gap marker."""
    dedupe_s: int = 24 * 3600
    """An entry and its index stay so long, acknowledged or not."""
    history_s: int = 0
    """An entry that every device acknowledged can be read for so long after it was appended."""
    age_s: int = 30 * 24 * 3600
    """An older entry goes, with a gap marker if it was not acknowledged."""
    device_age_s: int = 30 * 24 * 3600
    """A device that was not seen for so long no longer counts."""
    from_now: int = 0
    """1: a user's further devices begin behind the newest entry; 0: with everything that can be read."""

    def encode(self) -> bytes:
        """As the log and the store have them."""
        return LIMITS.pack(*self[:6]) + (bytes((self.from_now,)) if self.from_now else b"")

    @classmethod
    def decode(cls, body: bytes) -> Limits:
        """From the log or the store. Raises MalformedData."""
        if not LIMITS.size <= len(body) <= LIMITS.size + 1:
            raise MalformedData(f"limits of {len(body)} bytes")
        return cls(*LIMITS.unpack_from(body), *body[LIMITS.size :])


DEFAULT_LIMITS: Final = Limits()


class Writer(NamedTuple):
    """Whose stream of appends, and which of its streams."""

    worker: int
    generation: int
    epoch: int
    """S: the epoch of Pi in which the stream was opened."""


class Appends(NamedTuple):
    """Appends of one receiver each."""

    writer: Writer
    items: bytes
    """n × `APPEND`."""


class Fanout(NamedTuple):
    """One MsgID into many inboxes."""

    writer: Writer
    msg_id: int
    receivers: bytes
    """n × UIN."""


class Acknowledges(NamedTuple):
    """Cursors forward."""

    items: bytes


class OpenSessions(NamedTuple):
    """New session numbers."""

    items: bytes


class AddDevice(NamedTuple):
    """A DeviceID for a client ID: the old one when there is one."""

    uin: int
    client_id: bytes


class DropDevices(NamedTuple):
    """Devices that are gone for good."""

    items: bytes


class Trims(NamedTuple):
    """Entries up to a number go."""

    items: bytes


class Deletes(NamedTuple):
    """Ranges of entries that nobody can read any more."""

    items: bytes


class Clock(NamedTuple):
    """The leader's limits; what is over its time goes now."""

    limits: Limits


Operation = Appends | Fanout | Acknowledges | OpenSessions | AddDevice | DropDevices | Trims | Deletes | Clock


def body_of(operation: Operation) -> tuple[Op, bytes]:
    """An operation's number and body."""
    if isinstance(operation, Appends):
        return Op.APPENDS, WRITER.pack(*operation.writer) + operation.items
    if isinstance(operation, Fanout):
        return Op.FANOUT, WRITER.pack(*operation.writer) + U64.pack(operation.msg_id) + operation.receivers
    if isinstance(operation, Acknowledges):
        return Op.ACKNOWLEDGES, operation.items
    if isinstance(operation, OpenSessions):
        return Op.OPEN_SESSIONS, operation.items
    if isinstance(operation, AddDevice):
        return Op.ADD_DEVICE, U64.pack(operation.uin) + operation.client_id
    if isinstance(operation, DropDevices):
        return Op.DROP_DEVICES, operation.items
    if isinstance(operation, Trims):
        return Op.TRIMS, operation.items
    if isinstance(operation, Deletes):
        return Op.DELETES, operation.items
    return Op.CLOCK, operation.limits.encode()


def encode(operations: Iterable[Operation]) -> bytes:
    """The payload of an entry."""
    parts: list[bytes] = []
    for operation in operations:
        op, body = body_of(operation)
        parts += (HEAD.pack(op, len(body)), body)
    return b"".join(parts)


_ITEM_BYTES: Final = {
    Op.ACKNOWLEDGES: ACKNOWLEDGE.size, Op.OPEN_SESSIONS: USER_DEVICE.size, Op.DROP_DEVICES: USER_DEVICE.size, Op.TRIMS: TRIM.size,
    Op.DELETES: DELETE.size,
}  # fmt: skip
_OF_ITEMS: Final[dict[Op, type[Acknowledges] | type[OpenSessions] | type[DropDevices] | type[Trims] | type[Deletes]]] = {
    Op.ACKNOWLEDGES: Acknowledges, Op.OPEN_SESSIONS: OpenSessions, Op.DROP_DEVICES: DropDevices, Op.TRIMS: Trims,
    Op.DELETES: Deletes,
}  # fmt: skip


def _writer(body: bytes) -> Writer:
    if len(body) < WRITER.size:
        raise MalformedData("an append ends within its writer")
    writer = Writer(*WRITER.unpack_from(body))
    if writer.worker >= WORKERS:
        raise MalformedData(f"there is no worker {writer.worker}")
    return writer


def _operation(op: int, body: bytes) -> Operation:
    size = len(body)
    if op == Op.APPENDS:
        writer = _writer(body)
        if (size - WRITER.size) % APPEND.size:
            raise MalformedData(f"appends of {size} bytes")
        return Appends(writer, body[WRITER.size :])
    if op == Op.FANOUT:
        writer = _writer(body)
        if size < WRITER.size + 8 or (size - WRITER.size) % 8:
            raise MalformedData(f"a fan-out of {size} bytes")
        return Fanout(writer, U64.unpack_from(body, WRITER.size)[0], body[WRITER.size + 8 :])
    if op == Op.ADD_DEVICE:
        if not 8 <= size <= 8 + MAX_CLIENT_ID_BYTES:
            raise MalformedData(f"a device of {size} bytes")
        return AddDevice(U64.unpack_from(body)[0], body[8:])
    if op == Op.CLOCK:
        return Clock(Limits.decode(body))
    known = _ITEM_BYTES.get(Op(op)) if op in Op.__members__.values() else None
    if known is None or size % known:
        raise MalformedData(f"operation {op} of {size} bytes")
    return _OF_ITEMS[Op(op)](body)


def decode(payload: bytes) -> list[Operation]:
    """The operations of an entry. Raises MalformedData."""
    found: list[Operation] = []
    offset, end = 0, len(payload)
    while offset < end:
        if offset + HEAD.size > end or len(found) == MAX_OPERATIONS:
            raise MalformedData("operations end within a head, or are too many")
        op, size = HEAD.unpack_from(payload, offset)
        offset += HEAD.size
        if offset + size > end:
            raise MalformedData("an operation ends in the middle")
        found.append(_operation(op, payload[offset : offset + size]))
        offset += size
    return found
