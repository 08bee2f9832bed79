"""Which SnowflakeIDs a Xiu has stored, and under which MsgIDs: in written rows, and in decisions that are not written yet. Pure.

    SnowflakeID   0 | upper time 19 | lower time 22 | worker 12     | sequence 10
    place         0 | upper time 19 | worker 12     | lower time 22 | sequence 10
                      └── span: 70 min of a worker ─┘└── low: rises with the ID ┘

    b"w" place of the first      MsgID u64 of the first | records u32 | low u32 of each | CRC u32 of each
                                 and where the MsgIDs are not consecutive: offset u16 of each from the first one's

A writer's SnowflakeIDs rise. New records of one worker, span and type with rising IDs in one entry of the log are a run, which has
one row. An ID goes into a run only when it is above all that runs of its span hold. Therefore no two runs of a span overlap, and
such an ID is new without a look-up. One that is not above them is looked up, and has a row of its own when it is new. So do
derived IDs, which hold no time.

Of the IDs at or above `runs_from` only those have rows of their own that were not above a run's. What is below was stored before
the partition kept runs, or was restored. Runs are deleted by whole spans, when all that they hold is `forgotten`; IDs below that
may be taken again when the clock is set back, and have rows of their own then.

Source: docs/stores.md, docs/identifiers.md.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from pixiu.ids import msg_id
from pixiu.wire.record import SIZE_FIELD, Flag
from xiu.block import MAX_BLOCK_RECORDS
from xiu.keys import DEDUPE, DERIVED, DERIVED_KEY, KEY, RUNS, SNOWFLAKES

Known = tuple[int, int]
"""MsgID and CRC of a record that is stored."""
Row = tuple[bytes, bytes]

FIELDS: Final = struct.Struct("<IxBB5xIQ")
"""size, flags, type, CRC, SnowflakeID of a record."""
MAX_MARKS: Final = 16_384
"""Highest IDs that are held in memory: of 4,096 workers in four spans. Policy: all are forgotten, and read again when asked for."""
SPAN_BITS: Final = 44
"""Of a SnowflakeID, below the upper part of its time."""
_UPPER: Final = ((1 << 63) - 1) >> SPAN_BITS << SPAN_BITS
_WORKER: Final = 0xFFF << 10
_TIME: Final = 0xFFFF_FC00
"""The lower part of the time, in a place."""
_SEQUENCE: Final = 0x3FF
_LOW: Final = 0xFFFF_FFFF
_RUN: Final = struct.Struct("<QI")
_U32: Final = "I"
_U16: Final = "H"
_LAST_KEY: Final = KEY.pack(SNOWFLAKES, (1 << 64) - 1)
assert (array(_U32).itemsize, array(_U16).itemsize) == (4, 2)
assert MAX_BLOCK_RECORDS <= 1 << 16, "an offset within an entry has 16 bits"


def place_of(snowflake: int) -> int:
    """A SnowflakeID with its worker moved before the lower part of its time."""
    return snowflake & _UPPER | (snowflake & _WORKER) << 22 | (snowflake >> 12 & _TIME) | snowflake & _SEQUENCE


def runs_before(time_ms: int) -> int:
    """The place at which the spans begin that hold a time, ms since 2020: what lies below is older."""
    return time_ms >> 22 << SPAN_BITS


class Window(NamedTuple):
    """What of the head says what is looked up."""

    oldest: int
    newest: int
    """SnowflakeIDs that are taken, the end excluded."""
    day: int
    """The current one; of derived IDs the one before counts as well."""
    runs_from: int
    forgotten: int
    """See `xiu.state.Head`."""


class Reader(Protocol):
    """What was decided and written."""

    def get_many(self, keys: list[bytes]) -> Sequence[bytes | None]:
        """The values of keys. Raises StoreDamaged."""

    def row_before(self, key: bytes) -> Row | None:
        """The last row at or before a key. Raises StoreDamaged."""


class Run:
    """Records of one worker, span and type in an entry, whose SnowflakeIDs rise.

    Args:
        span: of all.
        type_: of the records.
    """

    __slots__ = ("crcs", "lows", "msg_id", "offsets", "span", "type")

    def __init__(self, span: int, type_: int) -> None:
        self.span, self.type, self.msg_id = span, type_, 0
        self.lows: list[int] = []
        self.crcs: list[int] = []
        self.offsets: list[int] = []
        """The MsgID of each is `msg_id` and this. While the entry is decided: its index there."""

    def find(self, low: int) -> Known | None:
        """The record with an ID, if it is one of these."""
        at = bisect_left(self.lows, low)
        if at == len(self.lows) or self.lows[at] != low:
            return None
        return self.msg_id + self.offsets[at], self.crcs[at]

    def row(self) -> Row:
        """What is written of it."""
        lows, offsets = self.lows, self.offsets
        count, first = len(lows), offsets[0]
        value = _RUN.pack(self.msg_id + first, count) + array(_U32, lows + self.crcs).tobytes()
        if offsets[-1] - first >= count:
            value += array(_U16, [offset - first for offset in offsets]).tobytes()
        return KEY.pack(RUNS, self.span << 32 | lows[0]), value


def run_of_row(key: bytes, value: bytes) -> Run | None:
    """What `Run.row` wrote; None when it is something else."""
    if len(key) != KEY.size or key[:1] != RUNS or len(value) < _RUN.size:
        return None
    msg_id, count = _RUN.unpack_from(value)
    end = _RUN.size + 8 * count
    if not count or len(value) not in (end, end + 2 * count):
        return None
    words = array(_U32, value[_RUN.size : end]).tolist()
    run = Run(_span_of(key), 0)
    run.lows, run.crcs, run.msg_id = words[:count], words[count:], msg_id
    run.offsets = array(_U16, value[end:]).tolist() or list(range(count))
    return run if run.lows[0] == int.from_bytes(key[5:], "big") else None


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
    """What was written of it."""


@dataclass(slots=True)
class Parts:
    """The records of an entry, as they are decided."""

    spans: dict[int, list[Run]]
    """The runs of each span, in order. Their records are new."""
    singles: list[Single]
    """In order."""

    def number(self, partition: int, first: int) -> None:
        """All get sequences from this one on: a record's MsgID is that of its index."""
        for runs in self.spans.values():
            for run in runs:
                run.msg_id = msg_id(partition, run.type, first)

    def find(self, snowflake: int) -> tuple[int, int, int] | None:
        """(index, MsgID, CRC) of the record of a run that has an ID."""
        place = place_of(snowflake)
        for run in self.spans.get(place >> 32, ()):
            known = run.find(place & _LOW)
            if known is not None:
                return known[0] - run.msg_id, *known
        return None

    def cut(self, end: int) -> None:
        """Nothing at this index or behind it is stored."""
        for span, runs in list(self.spans.items()):
            for run in runs:
                kept = bisect_left(run.offsets, end)
                del run.lows[kept:], run.crcs[kept:], run.offsets[kept:]
            self.spans[span] = [run for run in runs if run.lows]
            if not self.spans[span]:
                del self.spans[span]

    def leave_out(self, indexes: Sequence[int]) -> None:
        """These records, in order, are not stored: those that follow them move up."""
        for runs in self.spans.values():
            for run in runs:
                run.offsets = [index - bisect_left(indexes, index) for index in run.offsets]


def heads(data: bytes, count: int, offset: int) -> list[tuple[int, bool, int, int]]:
    """(SnowflakeID, whether it is derived, CRC, type) of each record."""
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
        reader: what was written.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._rows: dict[bytes, Known] = {}
        self._runs: dict[int, list[Run]] = {}
        """By span, in order. These and `_rows` are of decisions that are not written yet: as many as the replication lets wait for
        their commit."""
        self._marks: dict[int, int] = {}
        """The highest low that runs of a span hold, -1 where there is none; of those spans that were asked for."""

    def forget(self) -> None:
        """Know only what was written."""
        self._rows.clear()
        self._runs.clear()
        self._marks.clear()

    def written(self, puts: Iterable[Row]) -> None:
        """The reader has these rows now."""
        rows, runs = self._rows, self._runs
        if not rows and not runs:
            return
        for key, _ in puts:
            if key[:1] == RUNS:
                waiting = runs.get(_span_of(key))
                if waiting:
                    waiting.pop(0)
                    if not waiting:
                        del runs[_span_of(key)]
            else:
                rows.pop(key, None)

    # --- what is known

    def find(self, wanted: Sequence[tuple[int, bool]], window: Window, days: int = 2) -> list[Known | None]:
        """What was written of SnowflakeIDs (and whether they are derived, of the last `days`). Raises StoreDamaged."""
        found: list[Known | None] = [None] * len(wanted)
        keys: list[bytes] = []
        askers: list[int] = []
        runs: dict[int, Run | None] = {}
        """By span: that in which the last ID was looked for."""
        for at, (snowflake, derived) in enumerate(wanted):
            if derived:
                keys += [DERIVED_KEY.pack(DERIVED, window.day - ago & 0xFFFF, snowflake) for ago in range(days)]
                askers += [at] * days
                continue
            if window.runs_from and snowflake >= window.forgotten:
                place = place_of(snowflake)
                span, low = place >> 32, place & _LOW
                if low <= self._mark(span):
                    run = runs.get(span)
                    if run is None or not run.lows[0] <= low <= run.lows[-1]:
                        run = runs[span] = self._written_run(place)
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
        """What is decided of a SnowflakeID, and not written yet."""
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
        at = bisect_right(runs, place & _LOW, key=lambda run: run.lows[0])
        return runs[at - 1].find(place & _LOW) if at else None

    def end_of_rows(self) -> int:
        """Above the highest SnowflakeID that has a row of its own. Raises StoreDamaged."""
        row = self._reader.row_before(_LAST_KEY)
        keys = list(self._rows)
        if row is not None:
            keys.append(row[0])
        return max((1 + KEY.unpack(key)[1] for key in keys if key[:1] == SNOWFLAKES), default=0)

    def _mark(self, span: int) -> int:
        found = self._marks.get(span)
        if found is None:
            if len(self._marks) >= MAX_MARKS:
                self._marks.clear()
            waiting = self._runs.get(span)
            run = waiting[-1] if waiting else self._written_run(span << 32 | _LOW)
            found = self._marks[span] = -1 if run is None else run.lows[-1]
        return found

    def _written_run(self, place: int) -> Run | None:
        """The last run of its span that begins at or before a place. Raises StoreDamaged."""
        row = self._reader.row_before(KEY.pack(RUNS, place))
        if row is None or row[0][:1] != RUNS or _span_of(row[0]) != place >> 32:
            return None
        run = run_of_row(*row)
        assert run is not None, "a row that can be read is as it was written"
        return run

    # --- what is new

    def parts(self, data: bytes, count: int, offset: int, window: Window, moved: Collection[int]) -> Parts:
        """The records of an entry, as they are decided. Raises StoreDamaged: then nothing has changed.

        Args:
            data: the records begin at `offset`.
            moved: indexes of those that are not taken.
        """
        spans: dict[int, list[Run]] = {}
        singles: list[Single] = []
        unpack, derived, newest = FIELDS.unpack_from, int(Flag.DERIVED_ID), window.newest
        oldest = max(window.oldest, window.runs_from, window.forgotten) if window.runs_from else newest
        last, limit, worker, kind = 0, 0, 0, 0
        lows: list[int] = []
        crcs: list[int] = []
        indexes: list[int] = []
        for index in range(count):
            size, flags, type_, crc, snowflake = unpack(data, offset)
            offset += SIZE_FIELD + size
            apart = flags & derived or index in moved
            if last < snowflake < limit and snowflake & _WORKER == worker and type_ == kind and not apart:
                last = snowflake
                lows.append(snowflake >> 12 & _TIME | snowflake & _SEQUENCE)
                crcs.append(crc)
                indexes.append(index)
                continue
            if not apart and oldest <= snowflake < newest:
                place = place_of(snowflake)
                span, low = place >> 32, place & _LOW
                runs = spans.get(span)
                if low > (runs[-1].lows[-1] if runs else self._mark(span)):
                    if runs is None:
                        runs = spans[span] = []
                    if not runs or runs[-1].type != type_:
                        runs.append(Run(span, type_))
                    run = runs[-1]
                    last, worker, kind = snowflake, snowflake & _WORKER, type_
                    limit = min(newest, (snowflake >> SPAN_BITS) + 1 << SPAN_BITS)
                    lows, crcs, indexes = run.lows, run.crcs, run.offsets
                    lows.append(low)
                    crcs.append(crc)
                    indexes.append(index)
                    continue
            singles.append(Single(index, type_, crc, snowflake, bool(flags & derived)))
        if singles:
            wanted = [(single.snowflake, single.derived) for single in singles]
            for single, known in zip(singles, self.find(wanted, window), strict=True):
                single.known = known
        return Parts(spans, singles)

    def keep_runs(self, parts: Parts, puts: list[Row]) -> None:
        """Runs of an entry are stored under their MsgIDs."""
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
        """A record is stored that belongs to no run."""
        key = DERIVED_KEY.pack(DERIVED, day & 0xFFFF, snowflake) if derived else KEY.pack(SNOWFLAKES, snowflake)
        self._rows[key] = known
        puts.append((key, DEDUPE.pack(*known)))
