"""What changes inboxes, as callers send it to Pi and as it lies in Pi's log: operations end to end. Pure.

    ├── u8 ──┼─ u32 ─┼──────────────────────────────────────────────┤   little-endian
    │   op   │ size  │ body of `size` bytes                         │

    1 appends        worker u16 | generation u32 | S u32 | n × (MsgID u64 | UIN u64)
    2 fan-out        worker u16 | generation u32 | S u32 | MsgID u64 | n × UIN u64
    3 acknowledges   n × (UIN u64 | device u16 | lane u8 | 0 u8 | session u32 | UpTo u64 | map u64)
    4 open sessions  n × (UIN u64 | device u16)
    5 add device     UIN u64 | client ID; of a relay the DeviceID, 6 bytes, big-endian
    6 drop devices   n × (UIN u64 | device u16)
    7 trims          n × (UIN u64 | lane u8 | UpTo u64)
    8 clock          limits: cap u32 | full u8 | dedupe, history, age, device age u32 seconds; then, if it is not 0: from now u8
   10 deletes        n × (UIN u64 | lane u8 | first u64 | last u64)
   11 give up        n × (size u8 | key of a value of the state that no replica has whole)

A leader looks at them where they lie (`spans`) and joins what its callers sent; they are decoded once on each replica, when they
are applied. 9 was never given. What came later is written only where it is used, so that older logs are read, and replicas of an
older version read what does not use it.

Source: docs/protocol.md, "Inboxes"; docs/pi.md, "Modules".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from pixiu.errors import MalformedData
from pixiu.ids import DEVICE_BITS, WORKERS

ENTRY_KIND: Final = 16
"""Of the log's entries that hold operations."""
MAX_RECEIVERS: Final = 1000
"""Of one mail, the first included."""
MAX_CLIENT_ID_BYTES: Final = 128
DEVICE_ID_BYTES: Final = DEVICE_BITS // 8
"""A client ID begins with the DeviceID; the device's name follows."""
KEPT_NAME_BYTES: Final = MAX_CLIENT_ID_BYTES - DEVICE_ID_BYTES
"""A longer name of a device is cut."""
MAX_LANE: Final = 3
MAX_OPERATIONS: Final = 65_536
"""In one request, and in one entry of the log."""
MAX_OPERATIONS_BYTES: Final = 1 << 20
"""Of one request."""
MAX_READS: Final = 1000
"""Of one request."""
MAX_READ_ENTRIES: Final = 50_000
"""Of all reads of a request together. Policy: the later reads find fewer, or none."""
LANE_SHIFT: Final = 54
"""A MsgID's type byte is below its partition byte; the lane is the type's top two bits."""
GENERATION_EPOCH_S: Final = 1_577_836_800
"""2020-01-01: generations of writers are seconds since then, so that the next holder of a worker number begins above them."""
MAX_GENERATION: Final = (1 << 32) - 1
MAX_AHEAD_S: Final = 1 << 22
"""A writer that finds its number's generations ahead of the time goes up to so far ahead of it, 48 days."""

HEAD: Final = struct.Struct("<BI")
WRITER: Final = struct.Struct("<HII")
APPEND: Final = struct.Struct("<QQ")
U64: Final = struct.Struct("<Q")
ACKNOWLEDGE: Final = struct.Struct("<QHBxIQQ")
USER_DEVICE: Final = struct.Struct("<QH")
TRIM: Final = struct.Struct("<QBQ")
DELETE: Final = struct.Struct("<QBQQ")
LIMITS: Final = struct.Struct("<IBIIII")
_WRITER_BYTES: Final = WRITER.size
FANOUT_HEAD: Final = WRITER.size + U64.size
"""Bytes of a fan-out before its receivers."""


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
    GIVE_UP = 11


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
    DISK_FULL = 10


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
        """Encode as in the log and the store."""
        return LIMITS.pack(*self[:6]) + (bytes((self.from_now,)) if self.from_now else b"")

    @classmethod
    def decode(cls, body: bytes) -> Limits:
        """Decode from the log or the store. Raises MalformedData."""
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
    """Operation: move cursors forward."""

    items: bytes


class OpenSessions(NamedTuple):
    """Operation: give devices new session numbers."""

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


class GiveUp(NamedTuple):
    """Keys of values that no replica has whole any more: they are made anew from the rest, or are lost. By an operator's word."""

    keys: tuple[bytes, ...]


class Clock(NamedTuple):
    """The leader's limits; what is over its time goes now."""

    limits: Limits


Operation = Appends | Fanout | Acknowledges | OpenSessions | AddDevice | DropDevices | Trims | Deletes | Clock | GiveUp


# --- reading


_ANY: Final = 1 << 32
_FORMS: Final = {
    int(Op.APPENDS): (WRITER.size, APPEND.size, _ANY),
    int(Op.FANOUT): (FANOUT_HEAD, U64.size, _ANY),
    int(Op.ACKNOWLEDGES): (0, ACKNOWLEDGE.size, _ANY),
    int(Op.OPEN_SESSIONS): (0, USER_DEVICE.size, _ANY),
    int(Op.ADD_DEVICE): (U64.size, 1, U64.size + MAX_CLIENT_ID_BYTES),
    int(Op.DROP_DEVICES): (0, USER_DEVICE.size, _ANY),
    int(Op.TRIMS): (0, TRIM.size, _ANY),
    int(Op.CLOCK): (LIMITS.size, 1, LIMITS.size + 1),
    int(Op.DELETES): (0, DELETE.size, _ANY),
    int(Op.GIVE_UP): (2, 1, _ANY),
}
"""What bodies may look like: (bytes before the items, bytes of an item, bytes of all at most)."""
_UNKNOWN: Final = (1, 1, 0)


def spans(payload: bytes) -> list[tuple[int, int, int]]:
    """(number, where the body begins, where it ends) of each operation; bodies have sizes that are possible.

    Raises MalformedData.
    """
    found: list[tuple[int, int, int]] = []
    unpack, head, forms = HEAD.unpack_from, HEAD.size, _FORMS
    offset, end = 0, len(payload)
    while offset < end:
        begin = offset + head
        if begin > end:
            raise MalformedData("operations end within a head")
        op, size = unpack(payload, offset)
        least, item, most = forms.get(op, _UNKNOWN)
        if size < least or size > most or (size - least) % item:
            raise MalformedData(f"operation {op} of {size} bytes")
        offset = begin + size
        found.append((op, begin, offset))
    if offset != end:
        raise MalformedData("an operation ends in the middle")
    if len(found) > MAX_OPERATIONS:
        raise MalformedData(f"{len(found)} operations are too many: at most {MAX_OPERATIONS} at a time")
    return found


def writer_at(payload: bytes, begin: int) -> Writer:
    """The writer of appends or of a fan-out whose body begins there. Raises MalformedData."""
    worker, generation, epoch = WRITER.unpack_from(payload, begin)
    if worker >= WORKERS:
        raise MalformedData(f"worker {worker} is out of range: below {WORKERS}")
    return Writer(worker, generation, epoch)


def _appends(payload: bytes, begin: int, end: int) -> Operation:
    return Appends(writer_at(payload, begin), payload[begin + _WRITER_BYTES : end])


def _fanout(payload: bytes, begin: int, end: int) -> Operation:
    msg_id: int = U64.unpack_from(payload, begin + _WRITER_BYTES)[0]
    return Fanout(writer_at(payload, begin), msg_id, payload[begin + FANOUT_HEAD : end])


def _add_device(payload: bytes, begin: int, end: int) -> Operation:
    return AddDevice(U64.unpack_from(payload, begin)[0], payload[begin + U64.size : end])


def _give_up(payload: bytes, begin: int, end: int) -> Operation:
    keys: list[bytes] = []
    while begin < end:
        following = begin + 1 + payload[begin]
        if following > end or following == begin + 1:
            raise MalformedData("a key ends in the middle")
        keys.append(payload[begin + 1 : following])
        begin = following
    return GiveUp(tuple(keys))


_DECODERS: Final[dict[int, Callable[[bytes, int, int], Operation]]] = {
    int(Op.APPENDS): _appends,
    int(Op.FANOUT): _fanout,
    int(Op.ACKNOWLEDGES): lambda payload, begin, end: Acknowledges(payload[begin:end]),
    int(Op.OPEN_SESSIONS): lambda payload, begin, end: OpenSessions(payload[begin:end]),
    int(Op.ADD_DEVICE): _add_device,
    int(Op.DROP_DEVICES): lambda payload, begin, end: DropDevices(payload[begin:end]),
    int(Op.TRIMS): lambda payload, begin, end: Trims(payload[begin:end]),
    int(Op.CLOCK): lambda payload, begin, end: Clock(Limits.decode(payload[begin:end])),
    int(Op.DELETES): lambda payload, begin, end: Deletes(payload[begin:end]),
    int(Op.GIVE_UP): _give_up,
}


def decode(payload: bytes) -> list[Operation]:
    """The operations of a request or an entry. Raises MalformedData."""
    decoders = _DECODERS
    return [decoders[op](payload, begin, end) for op, begin, end in spans(payload)]


# --- writing


def encode(operations: Iterable[Operation]) -> bytes:
    """Operations end to end."""
    return b"".join([_encoded(operation) for operation in operations])


def _encoded(operation: Operation) -> bytes:
    match operation:
        case Appends(writer, items):
            return _operation(Op.APPENDS, WRITER.pack(*writer) + items)
        case Fanout(writer, msg_id, receivers):
            return _operation(Op.FANOUT, WRITER.pack(*writer) + U64.pack(msg_id) + receivers)
        case Acknowledges(items):
            return _operation(Op.ACKNOWLEDGES, items)
        case OpenSessions(items):
            return _operation(Op.OPEN_SESSIONS, items)
        case AddDevice(uin, client):
            return _operation(Op.ADD_DEVICE, U64.pack(uin) + client)
        case DropDevices(items):
            return _operation(Op.DROP_DEVICES, items)
        case Trims(items):
            return _operation(Op.TRIMS, items)
        case Deletes(items):
            return _operation(Op.DELETES, items)
        case GiveUp(keys):
            return _operation(Op.GIVE_UP, b"".join([bytes((len(key),)) + key for key in keys]))
        case Clock(limits):
            return _operation(Op.CLOCK, limits.encode())


def _operation(op: Op, body: bytes) -> bytes:
    return HEAD.pack(op, len(body)) + body


def encode_appends(worker: int, generation: int, epoch: int, msg_ids: Sequence[int], uins: Sequence[int]) -> bytes:
    """The operation that appends each MsgID to the inbox of the user beside it."""
    flat: list[int] = [0] * (2 * len(msg_ids))
    flat[0::2], flat[1::2] = msg_ids, uins
    return _operation(Op.APPENDS, WRITER.pack(worker, generation, epoch) + struct.pack(f"<{len(flat)}Q", *flat))


def encode_fanout(worker: int, generation: int, epoch: int, msg_id: int, uins: Iterable[int]) -> bytes:
    """The operation that appends one MsgID to several inboxes."""
    numbers = [msg_id, *uins]
    return _operation(Op.FANOUT, WRITER.pack(worker, generation, epoch) + struct.pack(f"<{len(numbers)}Q", *numbers))


def encode_acknowledges(items: Iterable[tuple[int, int, int, int, int, int]]) -> bytes:
    """Cursors: (UIN, device, session, lane, UpTo, map) each."""
    packed = [ACKNOWLEDGE.pack(uin, device, lane, session, up, bits) for uin, device, session, lane, up, bits in items]
    return _operation(Op.ACKNOWLEDGES, b"".join(packed))


def encode_opens(items: Iterable[tuple[int, int]]) -> bytes:
    """New sessions of (UIN, device) each."""
    return _operation(Op.OPEN_SESSIONS, b"".join([USER_DEVICE.pack(uin, device) for uin, device in items]))


def encode_add_device(uin: int, device_id: int, name: str = "") -> bytes:
    """A number for the device with this DeviceID (`pixiu.ids.device_of_name`): the one that it has, if it has one. `name`: what
    it is called from now on; empty: what it was called before."""
    return _operation(Op.ADD_DEVICE, U64.pack(uin) + client_id(device_id) + cut_name(name).encode())


def client_id(device_id: int) -> bytes:
    """What Pi knows a device by: its DeviceID, 6 bytes big-endian."""
    return device_id.to_bytes(DEVICE_ID_BYTES, "big")


def cut_name(name: str) -> str:
    """A device's name, cut to what Pi keeps of it."""
    if len(name) <= KEPT_NAME_BYTES and name.isascii():
        return name
    return name.encode("utf-8", "replace")[:KEPT_NAME_BYTES].decode("utf-8", "ignore")


def encode_drop_device(uin: int, device: int) -> bytes:
    """The operation after which nothing waits for a device any more."""
    return _operation(Op.DROP_DEVICES, USER_DEVICE.pack(uin, device))


def encode_delete(uin: int, lane: int, first: int, last: int) -> bytes:
    """The operation that deletes a range of InboxSeqs, for all devices."""
    return _operation(Op.DELETES, DELETE.pack(uin, lane, first, last))


def next_generation(last: int, now_s: float, jump: int = 0) -> int:
    """The generation of a writer's next stream. `now_s`: Unix seconds. `jump`: so much more, as far as `MAX_AHEAD_S` allows."""
    now = int(now_s) - GENERATION_EPOCH_S
    return min(max(last + 1, min(last + 1 + jump, now + MAX_AHEAD_S), now, 1), MAX_GENERATION)
