"""The entries by which a child copies its parent's keys, besides those of `phases`, and the record of it. Pure.

    child    LEARNING ──RESET, DROP …, ROWS …, FOLLOW …──OPEN──▶ OPEN

    RESET               epoch u32 | counter u64: a snapshot of the parent at this position follows; DROP deletes what is here
    DROP                nothing: delete some more values
    ROWS                epoch u32 | counter u64 | last u8 | n × (key size u8 | value size u32 | key | value)
    FOLLOW              n × (epoch u32 | counter u64 | kind u8 | at u64 µs | size u32 | payload): the parent's committed entries
    HOLD                until u32: the parent's sweeps wait until then, so that they do the same on both sides
    NOTE                digest u64 | keys u64 | bytes u64: the moved values, as they were at the cut
    OPEN                nothing

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from cluster.replication.model import START, Entry, EntryKind, Position
from cluster.store.doubling import phases
from cluster.store.doubling.phases import DOUBLING_KIND, RECORD_BYTES, Doubling

OfChild = Callable[[int, bytes, Doubling], bytes]
"""Given an entry's kind and payload, what of it concerns the child: all that changes a moved key, or what decides about those."""
DOUBLING_KEY: Final = b"P"
"""Key of the state's value that holds the record. No other key of a role is this one."""
HOLD_S: Final = 300
"""Time for which a parent's sweeps wait for a child that has asked for its log, seconds. The child asks again every minute."""
MAX_HOLD_S: Final = 2 * HOLD_S
"""A longer wait does not count: the state's time was set back meanwhile."""

_POSITION: Final = struct.Struct("<IQ")
_ROW: Final = struct.Struct("<BI")
_ENTRY: Final = struct.Struct("<IQBQI")
_HOLD: Final = struct.Struct("<I")
_NOTE: Final = struct.Struct("<QQQ")
_COPY: Final = struct.Struct("<IQIQBIQQQ")


@dataclass(frozen=True, slots=True)
class Record(phases.Record):
    """State of a partition's doubling, and of its copying."""

    learned: Position = START
    """Child: the parent's entry up to which everything is here; START: nothing is complete."""
    source: Position = START
    """Child: position of the expected snapshot."""
    emptied: bool = False
    """Child: True if everything from before the snapshot has been deleted."""
    hold_s: int = 0
    """The parent's sweeps wait until this time of the state."""
    keys: int = 0
    size: int = 0
    """Bytes of the keys and their values."""
    digest: int = 0
    """0: not known."""
    place: bytes = b""
    """Position up to which values were deleted."""

    @property
    def whole(self) -> bool:
        """True if a child has everything up to the cut."""
        return 0 < self.split_at <= self.learned.counter

    @property
    def lacks(self) -> str:
        """See `phases.Record`."""
        cut = f"the cut at {self.split_at}" if self.split_at else "the cut, which is not made"
        return "" if self.whole else f"has learned up to {self.learned.counter} of {cut}"

    def holds(self, now_s: int) -> bool:
        """True if sweeps wait."""
        return now_s < self.hold_s <= now_s + MAX_HOLD_S

    def encode(self) -> bytes:
        """Encode as stored."""
        fixed = _COPY.pack(*self.learned, *self.source, self.emptied, self.hold_s, self.keys, self.size, self.digest)
        return self._packed() + fixed + self.place

    @classmethod
    def decode(cls, body: bytes) -> Record:
        """Decode a stored value whose CRC was right."""
        epoch, counter, source_epoch, source, emptied, hold_s, keys, size, digest = _COPY.unpack_from(body, RECORD_BYTES)
        learned, begun, place = Position(epoch, counter), Position(source_epoch, source), body[RECORD_BYTES + _COPY.size :]
        return cls(*phases.unpacked(body), learned, begun, bool(emptied), hold_s, keys, size, digest, place)


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


def follow_body(entries: Iterable[Entry], doubling: Doubling, of_child: OfChild) -> bytes:
    """The body of FOLLOW: the parts of the parent's entries that concern the child; of other entries only position and time."""
    parts: list[bytes] = []
    for epoch, counter, kind, at_us, payload in entries:
        kept = payload if kind in (EntryKind.SET_CLOCK, DOUBLING_KIND) else of_child(kind, payload, doubling)
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


def note_body(digest: int, keys: int, size: int) -> bytes:
    """The body of NOTE."""
    return _NOTE.pack(digest, keys, size)


def note_of(body: bytes) -> tuple[int, int, int]:
    """Digest, keys and bytes in a body of NOTE. Raises struct.error."""
    digest, keys, size = _NOTE.unpack(body)
    return digest, keys, size
