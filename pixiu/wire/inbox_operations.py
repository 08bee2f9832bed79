"""Operations that change inboxes, as callers send them to Pi and as Pi's log holds them, end to end. Pure.

    ├── u8 ──┼─ u32 ─┼──────────────────────────────────────────────┤   little-endian
    │   op   │ size  │ body of `size` bytes                         │

    1 appends        worker u16 | generation u32 | S u32 | n × (MsgID u64 | UIN u64)
    2 fan-out        worker u16 | generation u32 | S u32 | MsgID u64 | n × UIN u64
    3 acknowledges   n × (UIN u64 | device u16 | lane u8 | 0 u8 | session u32 | UpTo u64 | map u64)
    4 open sessions  n × (UIN u64 | device u16)
    5 add device     UIN u64 | client ID; of a relay the DeviceID, 6 bytes, big-endian
    6 drop devices   n × (UIN u64 | device u16)
    7 trims          n × (UIN u64 | lane u8 | UpTo u64)
    8 clock          limits: cap u32 | full u8 | dedupe, history, age, device age u32 seconds | from_now u8
   10 deletes        n × (UIN u64 | lane u8 | first u64 | last u64)
   11 give up        n × (size u8 | key of a value of the state that no replica has intact)
   12 note           UIN u64 | name u8 | generation u64 | value; an empty value removes the note
   13 clears         n × (UIN u64 | generation u64)

A leader reads them in place (`spans`) and joins its callers' requests; each replica decodes them once, when they are applied.
Number 9 is not used.

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
"""Kind of the log entries that hold operations."""
MAX_RECEIVERS: Final = 1000
"""Limit of receivers of one mail, the first included."""
MAX_CLIENT_ID_BYTES: Final = 128
DEVICE_ID_BYTES: Final = DEVICE_BITS // 8
"""A client ID begins with the DeviceID; the device's name follows."""
KEPT_NAME_BYTES: Final = MAX_CLIENT_ID_BYTES - DEVICE_ID_BYTES
"""Limit of a device's name, bytes; a longer one is cut."""
MAX_LANE: Final = 3
MAX_NOTE: Final = 7
"""Highest name of a note."""
MAX_NOTE_BYTES: Final = 64 << 10
"""Limit of a note's value, bytes."""
MAX_OPERATIONS: Final = 65_536
"""Limit of operations in one request, and in one entry of the log."""
MAX_OPERATIONS_BYTES: Final = 1 << 20
"""Limit of the operations of one request, bytes."""
MAX_READS: Final = 1000
"""Limit of reads in one request."""
MAX_READ_ENTRIES: Final = 50_000
"""Limit of entries in all reads of a request together. Policy: the later reads return fewer, or none."""
LANE_SHIFT: Final = 54
"""A MsgID's type byte is below its partition byte; the lane is the type's top two bits."""
GENERATION_EPOCH_S: Final = 1_577_836_800
"""2020-01-01: generations of writers are seconds since then, so that the next holder of a worker number begins above them."""
MAX_GENERATION: Final = (1 << 32) - 1
MAX_AHEAD_S: Final = 1 << 22
"""Limit by which a writer that finds its number's generations ahead of the time may go ahead of it: 48 days."""

HEAD: Final = struct.Struct("<BI")
WRITER: Final = struct.Struct("<HII")
APPEND: Final = struct.Struct("<QQ")
U64: Final = struct.Struct("<Q")
ACKNOWLEDGE: Final = struct.Struct("<QHBxIQQ")
USER_DEVICE: Final = struct.Struct("<QH")
TRIM: Final = struct.Struct("<QBQ")
DELETE: Final = struct.Struct("<QBQQ")
NOTE: Final = struct.Struct("<QBQ")
CLEAR: Final = struct.Struct("<QQ")
LIMITS: Final = struct.Struct("<IBIIIIBB")
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
    NOTE = 12
    CLEARS = 13


class Code(IntEnum):
    """Outcome of an item that is not a number. On the wire and in results it is `-code`."""

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
    """Limits of inboxes: entries and times. Part of the log, so that every replica drops the same entries. Seconds."""

    cap: int = 100_000
    """Readable entries of an inbox."""
    refuse_full: int = 0
    """1: a full inbox refuses mail; 0: it drops its oldest entry, with a gap marker."""
    dedupe_s: int = 24 * 3600
    """Time for which an entry and its index stay, acknowledged or not."""
    history_s: int = 0
    """Time after its append for which an entry that every device has acknowledged can be read."""
    age_s: int = 30 * 24 * 3600
    """Age at which an entry is dropped, with a gap marker if it was not acknowledged."""
    device_age_s: int = 30 * 24 * 3600
    """Time without a connection after which a device no longer counts."""
    from_now: int = 0
    """1: a user's further devices begin after the newest entry; 0: with everything that can be read."""
    no_space: int = 0
    """1: new devices are refused, because the leader's inboxes hold more than their bound."""

    def encode(self) -> bytes:
        """Encode as in the log and the store."""
        return LIMITS.pack(*self)

    @classmethod
    def decode(cls, body: bytes) -> Limits:
        """Decode from the log or the store. Raises MalformedData."""
        if len(body) != LIMITS.size:
            raise MalformedData(f"limits of {len(body)} bytes")
        return cls(*LIMITS.unpack(body))


DEFAULT_LIMITS: Final = Limits()


class Writer(NamedTuple):
    """A writer and the generation of its stream of appends."""

    worker: int
    generation: int
    epoch: int
    """S: the epoch of Pi in which the stream was opened."""


class Appends(NamedTuple):
    """Operation: append entries of one receiver each."""

    writer: Writer
    items: bytes
    """n × `APPEND`."""


class Fanout(NamedTuple):
    """Operation: append one MsgID to many inboxes."""

    writer: Writer
    msg_id: int
    receivers: bytes
    """n × UIN."""


class Acknowledges(NamedTuple):
    """Operation: move cursors forward."""

    items: bytes


class OpenSessions(NamedTuple):
    """Operation: assign new session numbers to devices."""

    items: bytes


class AddDevice(NamedTuple):
    """Operation: assign a device number to a client ID; the existing one if there is one."""

    uin: int
    client_id: bytes


class DropDevices(NamedTuple):
    """Operation: remove devices for good."""

    items: bytes


class Trims(NamedTuple):
    """Operation: remove entries up to a number."""

    items: bytes


class Deletes(NamedTuple):
    """Operation: delete ranges of entries for all devices."""

    items: bytes


class GiveUp(NamedTuple):
    """Operation of an operator: give up values that no replica has intact; they are rebuilt from the rest, or lost."""

    keys: tuple[bytes, ...]


class Note(NamedTuple):
    """Operation: set a note of a user, a value that a server keeps beside the inbox; an empty value removes it."""

    uin: int
    name: int
    generation: int
    value: bytes


class Clears(NamedTuple):
    """Operation: remove all notes, devices and entries of users who have notes."""

    items: bytes


class Clock(NamedTuple):
    """Operation: set the leader's limits, and drop entries that are over their time."""

    limits: Limits


Operation = (
    Appends | Fanout | Acknowledges | OpenSessions | AddDevice | DropDevices | Trims | Deletes | Clock | GiveUp | Note | Clears
)  # fmt: skip


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
    int(Op.CLOCK): (LIMITS.size, 1, LIMITS.size),
    int(Op.DELETES): (0, DELETE.size, _ANY),
    int(Op.GIVE_UP): (2, 1, _ANY),
    int(Op.NOTE): (NOTE.size, 1, NOTE.size + MAX_NOTE_BYTES),
    int(Op.CLEARS): (0, CLEAR.size, _ANY),
}
"""Allowed bodies: (bytes before the items, bytes of an item, limit of all bytes)."""
_UNKNOWN: Final = (1, 1, 0)


def spans(payload: bytes) -> list[tuple[int, int, int]]:
    """Find (number, start of the body, its end) of each operation; the sizes of bodies are checked.

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
    """Read the writer of appends or of a fan-out whose body begins at `begin`. Raises MalformedData."""
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


def _note(payload: bytes, begin: int, end: int) -> Operation:
    uin, name, generation = NOTE.unpack_from(payload, begin)
    return Note(uin, name, generation, payload[begin + NOTE.size : end])


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
    int(Op.NOTE): _note,
    int(Op.CLEARS): lambda payload, begin, end: Clears(payload[begin:end]),
}


def decode(payload: bytes) -> list[Operation]:
    """Decode the operations of a request or an entry. Raises MalformedData."""
    decoders = _DECODERS
    return [decoders[op](payload, begin, end) for op, begin, end in spans(payload)]


# --- writing


def encode(operations: Iterable[Operation]) -> bytes:
    """Encode operations, end to end."""
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
        case Note(uin, name, generation, value):
            return encode_note(uin, name, generation, value)
        case Clears(items):
            return _operation(Op.CLEARS, items)
        case Clock(limits):
            return _operation(Op.CLOCK, limits.encode())


def _operation(op: Op, body: bytes) -> bytes:
    return HEAD.pack(op, len(body)) + body


def encode_appends(worker: int, generation: int, epoch: int, msg_ids: Sequence[int], uins: Sequence[int]) -> bytes:
    """Encode the operation that appends each MsgID to the inbox of its user."""
    flat: list[int] = [0] * (2 * len(msg_ids))
    flat[0::2], flat[1::2] = msg_ids, uins
    return _operation(Op.APPENDS, WRITER.pack(worker, generation, epoch) + struct.pack(f"<{len(flat)}Q", *flat))


def encode_fanout(worker: int, generation: int, epoch: int, msg_id: int, uins: Iterable[int]) -> bytes:
    """Encode the operation that appends one MsgID to several inboxes."""
    numbers = [msg_id, *uins]
    return _operation(Op.FANOUT, WRITER.pack(worker, generation, epoch) + struct.pack(f"<{len(numbers)}Q", *numbers))


def encode_acknowledges(items: Iterable[tuple[int, int, int, int, int, int]]) -> bytes:
    """Encode acknowledgements: (UIN, device, session, lane, UpTo, map) each."""
    packed = [ACKNOWLEDGE.pack(uin, device, lane, session, up, bits) for uin, device, session, lane, up, bits in items]
    return _operation(Op.ACKNOWLEDGES, b"".join(packed))


def encode_opens(items: Iterable[tuple[int, int]]) -> bytes:
    """Encode the opening of new sessions for (UIN, device) each."""
    return _operation(Op.OPEN_SESSIONS, b"".join([USER_DEVICE.pack(uin, device) for uin, device in items]))


def encode_add_device(uin: int, device_id: int, name: str = "") -> bytes:
    """Encode the operation that assigns a number to the device with this DeviceID (`pixiu.ids.device_of_name`), or keeps its
    existing one. `name`: its new name; empty: keep the name."""
    return _operation(Op.ADD_DEVICE, U64.pack(uin) + client_id(device_id) + cut_name(name).encode())


def client_id(device_id: int) -> bytes:
    """Key of a device in Pi: its DeviceID, 6 bytes big-endian."""
    return device_id.to_bytes(DEVICE_ID_BYTES, "big")


def cut_name(name: str) -> str:
    """Cut a device's name to the length that Pi keeps."""
    if len(name) <= KEPT_NAME_BYTES and name.isascii():
        return name
    return name.encode("utf-8", "replace")[:KEPT_NAME_BYTES].decode("utf-8", "ignore")


def encode_drop_device(uin: int, device: int) -> bytes:
    """Encode the operation that removes a device, so that nothing waits for it any more."""
    return _operation(Op.DROP_DEVICES, USER_DEVICE.pack(uin, device))


def encode_delete(uin: int, lane: int, first: int, last: int) -> bytes:
    """Encode the operation that deletes a range of InboxSeqs for all devices."""
    return _operation(Op.DELETES, DELETE.pack(uin, lane, first, last))


def next_generation(last: int, now_s: float, jump: int = 0) -> int:
    """Compute the generation of a writer's next stream. `now_s`: Unix seconds. `jump`: number to skip, as far as `MAX_AHEAD_S`
    allows."""
    now = int(now_s) - GENERATION_EPOCH_S
    return min(max(last + 1, min(last + 1 + jump, now + MAX_AHEAD_S), now, 1), MAX_GENERATION)


def encode_note(uin: int, name: int, generation: int, value: bytes) -> bytes:
    """Encode the operation that sets a note of a user, or removes it if the value is empty."""
    return _operation(Op.NOTE, NOTE.pack(uin, name, generation) + value)


def encode_clears(items: Iterable[tuple[int, int]]) -> bytes:
    """Encode the removal of notes, devices and entries: (UIN, generation) each."""
    return _operation(Op.CLEARS, b"".join([CLEAR.pack(uin, generation) for uin, generation in items]))
