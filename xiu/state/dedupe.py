"""Look-up of stored SnowflakeIDs and their MsgIDs: in written rows, and in decisions that are not written yet. Pure.

    SnowflakeID   0 | upper time 19 | lower time 22 | worker 12     | sequence 10
    place         0 | upper time 19 | worker 12     | lower time 22 | sequence 10
                      └── span: 70 min of a worker ─┘└── low: rises with the ID ┘

    b"w" place of the first      MsgID u64 of the first | records u32 | low u32 of each | CRC u32 of each
                                 and if the MsgIDs are not consecutive: offset u16 of each from the first one's

A writer's SnowflakeIDs rise. New records of one worker, span and type with rising IDs in one entry of the log are a run, which has
one row. An ID is added to a run only if it is above all IDs in runs of its span. Therefore no two runs of a span overlap, and such
an ID is new without a look-up. Another ID is looked up, and gets a row of its own if it is new. So do derived IDs, which contain no
time.

At or above `runs_from`, only IDs that were not above a run's have rows of their own. IDs below may have been restored. Runs are
deleted by whole spans, when all their IDs are `forgotten`; IDs below that may be accepted again when the clock is set back, and
then get rows of their own.

Source: docs/stores.md, docs/identifiers.md.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from pixiu.ids import msg_id
from pixiu.wire.record import SIZE_FIELD, Flag
from xiu.records.block import MAX_BLOCK_RECORDS
from xiu.state.keys import DEDUPE, DERIVED, DERIVED_KEY, KEY, RUNS, SNOWFLAKES

Known = tuple[int, int]
"""MsgID and CRC of a stored record."""
Row = tuple[bytes, bytes]

FIELDS: Final = struct.Struct("<IxBB5xIQ")
"""size, flags, type, CRC, SnowflakeID of a record."""
MAX_MARKS: Final = 16_384
"""Limit of highest IDs kept in memory: of 4,096 workers in four spans. Policy: all are dropped, and read again when needed."""
SPAN_BITS: Final = 44
"""Bits of a SnowflakeID below the upper part of its time."""
_UPPER: Final = ((1 << 63) - 1) >> SPAN_BITS << SPAN_BITS
_WORKER: Final = 0xFFF << 10
_TIME: Final = 0xFFFF_FC00
"""The lower part of the time, in a place."""
_SEQUENCE: Final = 0x3FF
_LOW: Final = 0xFFFF_FFFF
_RUN: Final = struct.Struct("<QI")
_WORD: Final = struct.Struct("<I")
_OFFSET: Final = struct.Struct("<H")
assert MAX_BLOCK_RECORDS <= 1 << 16, "an offset within an entry has 16 bits"


def place_of(snowflake: int) -> int:
    """Return a SnowflakeID with its worker moved before the lower part of its time."""
    return snowflake & _UPPER | (snowflake & _WORKER) << 22 | (snowflake >> 12 & _TIME) | snowflake & _SEQUENCE


def runs_before(time_ms: int) -> int:
    """The first place of the spans that contain a time, ms since 2020: smaller places are older."""
    return time_ms >> 22 << SPAN_BITS


class Window(NamedTuple):
    """The fields of the head that decide which IDs are looked up."""

    oldest: int
    newest: int
    """Range of accepted SnowflakeIDs, the end excluded."""
    day: int
    """The current day; for derived IDs the day before counts as well."""
    runs_from: int
    forgotten: int
    """See `xiu.state.state.Head`."""


class Reader(Protocol):
    """Interface to written rows."""

    def get_many(self, keys: list[bytes]) -> Sequence[bytes | None]:
        """Return the values of keys. Raises StoreDamaged."""

    def row_before(self, key: bytes) -> Row | None:
        """Return the last row at or before a key. Raises StoreDamaged."""


class WorkerRun:
    """Records of one worker, span and type in an entry, with rising SnowflakeIDs.

    Args:
        span: common to all.
        lows, crcs: of each.
        msg_id: base of the offsets.
        offsets: of each MsgID; while the entry is being decided, the records' indexes in it.
    """

    __slots__ = ("crcs", "lows", "msg_id", "offsets", "span")

    def __init__(self, span: int, lows: list[int], crcs: list[int], msg_id: int, offsets: list[int]) -> None:
        self.span, self.lows, self.crcs, self.msg_id, self.offsets = span, lows, crcs, msg_id, offsets

    def find(self, low: int) -> Known | None:
        """Return MsgID and CRC of the record with an ID, if it is in this run."""
        at = bisect_left(self.lows, low)
        if at == len(self.lows) or self.lows[at] != low:
            return None
        return self.msg_id + self.offsets[at], self.crcs[at]

    def row(self) -> Row:
        """Encode the run as a row."""
        lows, offsets = self.lows, self.offsets
        count, first = len(lows), offsets[0]
        value = struct.pack(f"<QI{2 * count}I", self.msg_id + first, count, *lows, *self.crcs)
        if offsets[-1] - first >= count:
            value += struct.pack(f"<{count}H", *[offset - first for offset in offsets])
        return KEY.pack(RUNS, self.span << 32 | lows[0]), value


class WrittenRun:
    """A run in the form of its row, searched without unpacking: each record of a batch may need another run."""

    __slots__ = ("_count", "_end", "_msg_id", "_value", "first", "last")

    def __init__(self, value: bytes) -> None:
        self._value = value
        self._msg_id, self._count = _RUN.unpack_from(value)
        self._end = _RUN.size + 8 * self._count
        well_formed = bool(self._count) and len(value) in (self._end, self._end + 2 * self._count)
        assert well_formed, "a row that can be read is as it was written"
        self.first, self.last = self._word(0), self._word(self._count - 1)

    def _word(self, index: int) -> int:
        word: int = _WORD.unpack_from(self._value, _RUN.size + 4 * index)[0]
        return word

    def find(self, low: int) -> Known | None:
        """Return MsgID and CRC of the record with an ID, if it is in this run."""
        at = bisect_left(range(self._count), low, key=self._word)
        if at == self._count or self._word(at) != low:
            return None
        offset = _OFFSET.unpack_from(self._value, self._end + 2 * at)[0] if len(self._value) > self._end else at
        return self._msg_id + offset, self._word(self._count + at)


def run_of_row(key: bytes, value: bytes) -> WorkerRun | None:
    """Decode a row of `WorkerRun.row`; None if it is something else."""
    if len(key) != KEY.size or key[:1] != RUNS or len(value) < _RUN.size:
        return None
    msg_id, count = _RUN.unpack_from(value)
    end = _RUN.size + 8 * count
    if not count or len(value) not in (end, end + 2 * count):
        return None
    words = list(struct.unpack_from(f"<{2 * count}I", value, _RUN.size))
    offsets = list(struct.unpack_from(f"<{count}H", value, end)) if len(value) > end else list(range(count))
    run = WorkerRun(_span_of(key), words[:count], words[count:], msg_id, offsets)
    return run if run.lows[0] == int.from_bytes(key[5:], "big") else None


def _run_at(runs: Sequence[WorkerRun] | None, low: int) -> WorkerRun | None:
    """The last of a span's runs that begins at or before an ID."""
    at = bisect_right(runs, low, key=lambda run: run.lows[0]) if runs is not None else 0
    return runs[at - 1] if runs is not None and at else None


def _span_of(key: bytes) -> int:
    return int.from_bytes(key[1:5], "big")


@dataclass(slots=True)
class Single:
    """A record of an entry that belongs to no run."""

    index: int
    type: int
    crc: int
    snowflake: int
    derived: bool
    known: Known | None = None
    """The record written under its ID, if any."""


@dataclass(slots=True)
class Parts:
    """The records of an entry while it is being decided."""

    spans: dict[int, list[WorkerRun]]
    """The runs of each span, in order. Their records are new."""
    singles: list[Single]
    """In order."""

    def find(self, snowflake: int) -> tuple[int, int, int] | None:
        """(index, MsgID, CRC) of the record with an ID, if it is in a run."""
        place = place_of(snowflake)
        run = _run_at(self.spans.get(place >> 32), place & _LOW)
        known = run.find(place & _LOW) if run is not None else None
        return (known[0] - run.msg_id, *known) if run is not None and known is not None else None

    def cut(self, end: int) -> None:
        """Drop runs' records from this index on."""
        for span, runs in list(self.spans.items()):
            for run in runs:
                kept = bisect_left(run.offsets, end)
                del run.lows[kept:], run.crcs[kept:], run.offsets[kept:]
            self.spans[span] = [run for run in runs if run.lows]
            if not self.spans[span]:
                del self.spans[span]

    def leave_out(self, indexes: Sequence[int]) -> None:
        """Drop these records, given in order, from the numbering: later ones move up."""
        for runs in self.spans.values():
            for run in runs:
                run.offsets = [index - bisect_left(indexes, index) for index in run.offsets]


def heads(data: bytes, count: int, offset: int) -> list[tuple[int, bool, int, int]]:
    """(SnowflakeID, True if it is derived, CRC, type) of each record."""
    found: list[tuple[int, bool, int, int]] = []
    unpack, derived = FIELDS.unpack_from, int(Flag.DERIVED_ID)
    for _ in range(count):
        size, flags, type_, crc, snowflake = unpack(data, offset)
        found.append((snowflake, bool(flags & derived), crc, type_))
        offset += SIZE_FIELD + size
    return found


class Dedupe:
    """Finds records by their SnowflakeIDs, and keeps those of new ones.

    Args:
        reader: of written rows.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._rows: dict[bytes, Known] = {}
        self._runs: dict[int, list[WorkerRun]] = {}
        """By span, in order. These and `_rows` belong to decisions not written yet, bounded by replication's limit of uncommitted
        entries."""
        self._marks: dict[int, int] = {}
        """The highest low in runs of a span, -1 if there is none; only spans that were looked up."""

    def forget(self) -> None:
        """Drop everything that is not written."""
        self._rows.clear()
        self._runs.clear()
        self._marks.clear()

    def written(self, puts: Iterable[Row]) -> None:
        """Note that the reader has these rows now."""
        rows, runs = self._rows, self._runs
        for key, _ in puts:
            if key[:1] != RUNS:
                rows.pop(key, None)
                continue
            span = _span_of(key)
            waiting = runs.get(span)
            if waiting is not None:
                del waiting[0]
                if not waiting:
                    del runs[span]

    # --- look-ups

    def find(self, wanted: Sequence[tuple[int, bool]], window: Window, days: int = 2) -> list[Known | None]:
        """Look up written records of SnowflakeIDs, and of derived IDs of the last `days`. Raises StoreDamaged."""
        found: list[Known | None] = [None] * len(wanted)
        keys: list[bytes] = []
        askers: list[int] = []
        runs: dict[int, WrittenRun | None] = {}
        """By span: the run in which the last ID was searched."""
        for at, (snowflake, derived) in enumerate(wanted):
            if derived:
                keys += [DERIVED_KEY.pack(DERIVED, window.day - ago & 0xFFFF, snowflake) for ago in range(days)]
                askers += [at] * days
                continue
            if snowflake >= window.forgotten:
                place = place_of(snowflake)
                span, low = place >> 32, place & _LOW
                if low <= self._mark(span):
                    run = runs.get(span)
                    if run is None or not run.first <= low <= run.last:
                        row = self._run_before(place)
                        run = runs[span] = None if row is None else WrittenRun(row[1])
                    found[at] = run.find(low) if run is not None else None
                elif snowflake >= window.runs_from:
                    continue
            if found[at] is None:
                keys.append(KEY.pack(SNOWFLAKES, snowflake))
                askers.append(at)
        if keys:
            for at, value in zip(askers, self._reader.get_many(keys), strict=True):
                if value is not None and found[at] is None:
                    found[at] = DEDUPE.unpack(value)
        return found

    def decided(self, snowflake: int, derived: bool, window: Window, days: int = 2) -> Known | None:
        """Look up a SnowflakeID in decisions that are not written yet."""
        if derived:
            for ago in range(days):
                known = self._rows.get(DERIVED_KEY.pack(DERIVED, window.day - ago & 0xFFFF, snowflake))
                if known is not None:
                    return known
            return None
        known = self._rows.get(KEY.pack(SNOWFLAKES, snowflake)) if self._rows else None
        place = place_of(snowflake)
        runs = self._runs.get(place >> 32)
        if known is not None or runs is None or snowflake < window.forgotten:
            return known
        run = _run_at(runs, place & _LOW)
        return run.find(place & _LOW) if run is not None else None

    def _mark(self, span: int) -> int:
        found = self._marks.get(span)
        if found is None:
            if len(self._marks) >= MAX_MARKS:
                self._marks.clear()
            waiting = self._runs.get(span)
            if waiting:
                found = waiting[-1].lows[-1]
            else:
                row = self._run_before(span << 32 | _LOW)
                found = -1 if row is None else WrittenRun(row[1]).last
            self._marks[span] = found
        return found

    def _run_before(self, place: int) -> Row | None:
        """The row of the last run of its span that begins at or before a place. Raises StoreDamaged."""
        row = self._reader.row_before(KEY.pack(RUNS, place))
        return row if row is not None and row[0][:1] == RUNS and _span_of(row[0]) == place >> 32 else None

    # --- new records

    def parts(
        self, data: bytes, count: int, offset: int, window: Window, moved: Collection[int], partition: int, first: int
    ) -> Parts:
        """Sort the records of an entry into runs and single ones. Raises StoreDamaged: then nothing has changed.

        Args:
            data: the records begin at `offset`.
            moved: indexes of records that belong to another partition.
            partition, first: the first stored record gets this sequence.
        """
        spans: dict[int, list[WorkerRun]] = {}
        singles: list[Single] = []
        marks = self._marks
        unpack, derived, newest = FIELDS.unpack_from, int(Flag.DERIVED_ID), window.newest
        oldest = max(window.oldest, window.runs_from, window.forgotten)
        last, limit, worker, kind, base, some_moved = 0, 0, 0, -1, 0, bool(moved)
        lows: list[int] = []
        crcs: list[int] = []
        indexes: list[int] = []
        for index in range(count):
            size, flags, type_, crc, snowflake = unpack(data, offset)
            offset += SIZE_FIELD + size
            apart = flags & derived != 0 or (some_moved and index in moved)
            if last < snowflake < limit and snowflake & _WORKER == worker and type_ == kind and not apart:
                last = snowflake
                lows.append(snowflake >> 12 & _TIME | snowflake & _SEQUENCE)
                crcs.append(crc)
                indexes.append(index)
                continue
            if not apart and oldest <= snowflake < newest:
                span = snowflake >> SPAN_BITS << 12 | (snowflake & _WORKER) >> 10
                low = snowflake >> 12 & _TIME | snowflake & _SEQUENCE
                runs = spans.get(span)
                mark = runs[-1].lows[-1] if runs is not None else marks.get(span)
                if low > (mark if mark is not None else self._mark(span)):
                    if type_ != kind:
                        kind, base = type_, msg_id(partition, type_, first)
                    if runs is not None and runs[-1].msg_id == base:
                        run = runs[-1]
                        lows, crcs, indexes = run.lows, run.crcs, run.offsets
                        lows.append(low)
                        crcs.append(crc)
                        indexes.append(index)
                    else:
                        lows, crcs, indexes = [low], [crc], [index]
                        run = WorkerRun(span, lows, crcs, base, indexes)
                        if runs is None:
                            spans[span] = [run]
                        else:
                            runs.append(run)
                    last, worker, limit = snowflake, snowflake & _WORKER, (snowflake >> SPAN_BITS) + 1 << SPAN_BITS
                    if limit > newest:
                        limit = newest
                    continue
            singles.append(Single(index, type_, crc, snowflake, bool(flags & derived)))
        if singles:
            wanted = [(single.snowflake, single.derived) for single in singles]
            for single, known in zip(singles, self.find(wanted, window), strict=True):
                single.known = known
        return Parts(spans, singles)

    def keep_runs(self, parts: Parts, puts: list[Row]) -> None:
        """Store an entry's runs, under their final MsgIDs."""
        for span, runs in parts.spans.items():
            for run in runs:
                puts.append(run.row())
            waiting = self._runs.get(span)
            if waiting is None:
                self._runs[span] = runs
            else:
                waiting += runs
            self._marks[span] = runs[-1].lows[-1]

    def keep(self, snowflake: int, derived: bool, day: int, known: Known, puts: list[Row]) -> None:
        """Store a record that belongs to no run."""
        key = DERIVED_KEY.pack(DERIVED, day & 0xFFFF, snowflake) if derived else KEY.pack(SNOWFLAKES, snowflake)
        self._rows[key] = known
        puts.append((key, DEDUPE.pack(*known)))
