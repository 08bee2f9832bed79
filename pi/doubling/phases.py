"""The doubling of a partition of Pi: its phases, and the log entries that lead from one to the next. Pure.

    parent   NONE ──SPLIT──▶ SPLIT ──CLEAN──▶ CLEANING ──CLEAN … CLEAN──▶ NONE
    child    NONE ──BEGIN──▶ LEARNING ──RESET, DROP …, ROWS …, FOLLOW …──OPEN──▶ OPEN ──END──▶ NONE

    entry of kind 18    op u8 | doubling u64 | partitions u16 | partition u16 | body       little-endian

    BEGIN               nothing: the child takes over from its parent
    RESET               epoch u32 | counter u64: a snapshot of the parent at this position follows; DROP deletes what is here
    DROP                nothing: delete some more values
    ROWS                epoch u32 | counter u64 | last u8 | n × (key size u8 | value size u32 | key | value)
    FOLLOW              n × (epoch u32 | counter u64 | kind u8 | at u64 µs | size u32 | payload): the parent's committed entries
    HOLD                until u32: the parent's sweeps wait until then, so that they do the same on both sides
    NOTE                digest u64 | keys u64 | bytes u64: the moved values, as they were at the cut
    SPLIT               fence u64: no effect unless it is the state's
    TAKE_BACK           nothing: its counter is the state's fence from now on
    CLEAN, OPEN, END    nothing

`partition` is the child's in all entries: a key moves if key % partitions == partition.

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from cluster.replication.model import START, Entry, Position
from pi.keys import uin_of
from pixiu.errors import MalformedData
from pixiu.placement.partition import is_partition_count
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    DELETE,
    ENTRY_KIND,
    FANOUT_HEAD,
    HEAD,
    TRIM,
    U64,
    USER_DEVICE,
    WRITER,
    GiveUp,
    Op,
    decode,
    encode,
    spans,
)

DOUBLING_KIND: Final = 18
"""Kind of log entries that hold a command of a doubling."""
DOUBLING_KEY: Final = b"P"
"""Key of the state's value that holds the record."""
HOLD_S: Final = 300
"""Time for which a parent's sweeps wait for a child that has asked for its log, seconds. The child asks again every minute."""
MAX_HOLD_S: Final = 2 * HOLD_S
"""A longer wait does not count: the state's time was set back meanwhile."""

_HEAD: Final = struct.Struct("<BQHH")
_POSITION: Final = struct.Struct("<IQ")
_ROW: Final = struct.Struct("<BI")
_ENTRY: Final = struct.Struct("<IQBQI")
_HOLD: Final = struct.Struct("<I")
_NOTE: Final = struct.Struct("<QQQ")
_FENCE: Final = struct.Struct("<Q")
_RECORD: Final = struct.Struct("<BQHHIQIQBQIQQQQ")


class Phase(IntEnum):
    """The phases of `proto/cluster/wire/v1/doubling.proto`."""

    NONE = 0
    LEARNING = 1
    SPLIT = 2
    OPEN = 3
    CLEANING = 4


class Step(IntEnum):
    """The action of an entry."""

    BEGIN = 1
    RESET = 2
    DROP = 3
    ROWS = 4
    FOLLOW = 5
    OPEN = 6
    END = 7
    HOLD = 8
    SPLIT = 9
    CLEAN = 10
    NOTE = 11
    TAKE_BACK = 12


class Doubling(NamedTuple):
    """The ID of a doubling, and the users that it moves."""

    number: int
    """Its ID."""
    partitions: int
    """Number of Pi's partitions after it."""
    partition: int
    """The child's."""

    @property
    def parent(self) -> int:
        """The partition that is split."""
        return self.partition - self.partitions // 2

    def moves(self, uin: int) -> bool:
        """True if a user belongs to the child from the cut on."""
        return uin % self.partitions == self.partition


NO_DOUBLING: Final = Doubling(0, 0, 0)


class Command(NamedTuple):
    """An entry's payload."""

    step: Step
    doubling: Doubling
    body: bytes = b""

    def encode(self) -> bytes:
        """Encode as stored in the log."""
        return _HEAD.pack(self.step, *self.doubling) + self.body

    @classmethod
    def decode(cls, payload: bytes) -> Command:
        """Raises MalformedData."""
        try:
            step, *doubling = _HEAD.unpack_from(payload)
            found = cls(Step(step), Doubling(*doubling), payload[_HEAD.size :])
        except (struct.error, ValueError) as wrong:
            raise MalformedData(f"no command of a doubling: {wrong}") from wrong
        partitions, partition = found.doubling[1:]
        if not is_partition_count(partitions) or not partitions // 2 <= partition < partitions:
            raise MalformedData(f"partition {partition} of {partitions} has no parent")
        return found


@dataclass(frozen=True, slots=True)
class Record:
    """State of a partition's doubling: a value of the partition's state."""

    phase: Phase = Phase.NONE
    doubling: Doubling = NO_DOUBLING
    """The last one."""
    learned: Position = START
    """Child: the parent's entry up to which everything is here; START: nothing is complete."""
    source: Position = START
    """Child: position of the expected snapshot."""
    emptied: bool = False
    """Child: True if everything from before the snapshot has been deleted."""
    split_at: int = 0
    """The parent's counter of SPLIT."""
    hold_s: int = 0
    """The parent's sweeps wait until this time of the state."""
    keys: int = 0
    size: int = 0
    """Bytes of the keys and their values."""
    digest: int = 0
    """0: not known."""
    fence: int = 0
    """Counter of the last entry that took a doubling back; in a child that learns: its parent's."""
    place: bytes = b""
    """Position up to which values were deleted."""

    @property
    def partitions(self) -> int:
        """Number of Pi's partitions by this log; 0: it does not contain it."""
        return self.doubling.partitions

    @property
    def whole(self) -> bool:
        """True if a child has everything up to the cut."""
        return 0 < self.split_at <= self.learned.counter

    def holds(self, now_s: int) -> bool:
        """True if sweeps wait."""
        return now_s < self.hold_s <= now_s + MAX_HOLD_S

    def encode(self) -> bytes:
        """Encode as stored."""
        fixed = _RECORD.pack(
            self.phase, *self.doubling, *self.learned, *self.source, self.emptied, self.split_at, self.hold_s, self.keys,
            self.size, self.digest, self.fence,
        )  # fmt: skip
        return fixed + self.place

    @classmethod
    def decode(cls, body: bytes) -> Record:
        """Decode a stored value whose CRC was right."""
        phase, number, count, own, epoch, counter, source_epoch, source, emptied, split_at, hold_s, keys, size, digest, fence = (
            _RECORD.unpack_from(body)
        )
        learned, begun = Position(epoch, counter), Position(source_epoch, source)
        place = body[_RECORD.size :]
        doubling = Doubling(number, count, own)
        return cls(Phase(phase), doubling, learned, begun, bool(emptied), split_at, hold_s, keys, size, digest, fence, place)

    def splits(self, command: Command) -> bool:
        """True if a SPLIT would split this partition."""
        fits = self.phase in (Phase.NONE, Phase.OPEN) and self.partitions < command.doubling.partitions
        return fits and fence_of(command.body) == self.fence

    def takes_back(self, doubling: Doubling) -> bool:
        """True if a doubling can be taken back: it has not split this partition."""
        return self.doubling != doubling


class Served(NamedTuple):
    """The users that a partition serves."""

    partitions: int
    """Number of Pi's partitions, as the replica reports it; 0: not known, it serves every user."""
    nobody: bool = False
    """True for a child that has not opened: it serves no users."""


def served(record: Record, partition: int, layout: int, appended: int = 0) -> Served:
    """Return the users that a partition serves now.

    Args:
        record: of its state.
        partition: its number.
        layout: partitions by the layout; 0: not known.
        appended: partitions by a SPLIT that is in the leader's log but not in the state; 0: there is none.
    """
    if record.phase is Phase.LEARNING:
        return Served(record.partitions // 2, nobody=True)
    if 0 < layout <= partition and partition >= record.partitions:
        return Served(layout, nobody=True)
    return Served(max(layout, record.partitions, appended))


# --- bodies


def position_body(position: Position) -> bytes:
    """The body of RESET."""
    return _POSITION.pack(*position)


def position_of(body: bytes) -> Position:
    """The position in a body of RESET or ROWS. Raises struct.error."""
    return Position(*_POSITION.unpack_from(body))


def rows_body(source: Position, rows: Iterable[tuple[bytes, bytes]], *, last: bool) -> bytes:
    """The body of ROWS."""
    parts = [_POSITION.pack(*source), bytes((last,))]
    for key, value in rows:
        parts += (_ROW.pack(len(key), len(value)), key, value)
    return b"".join(parts)


def rows_of(body: bytes) -> tuple[bool, list[tuple[bytes, bytes]]]:
    """(True if these are the last rows, the rows). Raises struct.error."""
    at = _POSITION.size
    last, rows = bool(body[at]), list[tuple[bytes, bytes]]()
    at += 1
    while at < len(body):
        key_size, value_size = _ROW.unpack_from(body, at)
        begin = at + _ROW.size
        middle, at = begin + key_size, begin + key_size + value_size
        rows.append((body[begin:middle], body[middle:at]))
    return last, rows


def follow_body(entries: Iterable[Entry], doubling: Doubling) -> bytes:
    """The body of FOLLOW: the parts of the parent's entries that concern the child; of other entries only position and time."""
    parts: list[bytes] = []
    for epoch, counter, kind, at_us, payload in entries:
        kept = of_child(payload, doubling) if kind == ENTRY_KIND else payload if kind in (3, DOUBLING_KIND) else b""
        parts += (_ENTRY.pack(epoch, counter, kind, at_us, len(kept)), kept)
    return b"".join(parts)


def followed(body: bytes) -> Iterator[Entry]:
    """The parent's entries. Raises struct.error."""
    at = 0
    while at < len(body):
        epoch, counter, kind, at_us, size = _ENTRY.unpack_from(body, at)
        begin = at + _ENTRY.size
        at = begin + size
        yield Entry(epoch, counter, kind, at_us, body[begin:at])


def hold_body(until_s: int) -> bytes:
    """The body of HOLD."""
    return _HOLD.pack(until_s)


def hold_of(body: bytes) -> int:
    """The time in a body of HOLD. Raises struct.error."""
    return int(_HOLD.unpack(body)[0])


def fence_body(fence: int) -> bytes:
    """The body of SPLIT."""
    return _FENCE.pack(fence)


def fence_of(body: bytes) -> int:
    """The fence in a body of SPLIT. Raises struct.error."""
    return int(_FENCE.unpack(body)[0])


def note_body(digest: int, keys: int, size: int) -> bytes:
    """The body of NOTE."""
    return _NOTE.pack(digest, keys, size)


def note_of(body: bytes) -> tuple[int, int, int]:
    """Digest, keys and bytes in a body of NOTE. Raises struct.error."""
    digest, keys, size = _NOTE.unpack(body)
    return digest, keys, size


# --- the parts of an entry that concern a child


_USERS: Final = {
    int(Op.ACKNOWLEDGES): (0, ACKNOWLEDGE, 0), int(Op.OPEN_SESSIONS): (0, USER_DEVICE, 0),
    int(Op.DROP_DEVICES): (0, USER_DEVICE, 0), int(Op.TRIMS): (0, TRIM, 0), int(Op.DELETES): (0, DELETE, 0),
    int(Op.ADD_DEVICE): (0, None, 0),
    int(Op.APPENDS): (WRITER.size, APPEND, 8), int(Op.FANOUT): (FANOUT_HEAD, U64, 0),
}  # fmt: skip
"""By operation: bytes before its items, the format of an item, offset of the UIN in it."""
_WRITERS: Final = (int(Op.APPENDS), int(Op.FANOUT))
"""Operations that show which of a writer's streams is the newest; the child needs them even if none of their items move."""


def of_child(payload: bytes, doubling: Doubling) -> bytes:
    """Operations of a parent's entry, without users that stay. Malformed operations change nothing on either side."""
    try:
        found = spans(payload)
    except MalformedData:
        return payload
    parts: list[bytes] = []
    for op, begin, end in found:
        form = _USERS.get(op)
        if op == Op.GIVE_UP:
            parts.append(_keys_of_child(payload[begin - HEAD.size : end], doubling))
        elif form is None:
            parts.append(payload[begin - HEAD.size : end])
        else:
            body = _items_of_child(payload, begin, end, form, doubling)
            if body or op in _WRITERS:
                parts.append(HEAD.pack(op, len(body)) + body)
    return b"".join(parts)


def _items_of_child(
    payload: bytes, begin: int, end: int, form: tuple[int, struct.Struct | None, int], doubling: Doubling
) -> bytes:  # fmt: skip
    head, item, uin_at = form
    count, own = doubling.partitions, doubling.partition
    first = begin + head
    size = item.size if item is not None else end - first
    starts = [
        at for at in range(first, end, size or 1) if U64.unpack_from(payload, at + uin_at)[0] % count == own
    ] if end > first else []  # fmt: skip
    return payload[begin:first] + b"".join([payload[at : at + size] for at in starts])


def _keys_of_child(operation: bytes, doubling: Doubling) -> bytes:
    try:
        (given_up,) = decode(operation)
    except MalformedData:
        return operation
    assert isinstance(given_up, GiveUp)
    keys = tuple(key for key in given_up.keys if (uin := uin_of(key)) is None or doubling.moves(uin))
    return encode([GiveUp(keys)]) if keys else b""


class Cut(NamedTuple):
    """A SPLIT in a log, whatever its outcome."""

    counter: int
    doubling: Doubling


def cut_in(entries: Iterable[Entry]) -> Cut | None:
    """The last SPLIT among entries. Raises MalformedData."""
    found: Cut | None = None
    for entry in entries:
        if entry.kind == DOUBLING_KIND and entry.payload[:1] == bytes((Step.SPLIT,)):
            found = Cut(entry.counter, Command.decode(entry.payload).doubling)
    return found
