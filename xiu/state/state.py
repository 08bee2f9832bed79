"""Decisions of a Xiu on its log's entries: from the state alone, in log order, so that replicas agree. Pure.

The state's keys are in `xiu.state.keys`. The clock is the highest time that a leader wrote into an entry; no replica uses its
host's clock. A decision is made once: by a leader when it appends (so that it can answer before the commit), by other replicas
when the entry is committed. Decisions that do not commit are dropped with `forget`.

Source: PiXiu §6.1.1; docs/identifiers.md, docs/stores.md.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from cluster.replication.model import CLOCK, START, Entry, EntryKind, Position
from cluster.store.doubling.phases import DOUBLING_KIND, Command
from pixiu.ids import MAX_MSG_EPOCH, MSG_COUNTER_BITS, SNOWFLAKE_EPOCH_MS, msg_id
from pixiu.wire.record import KEY_AT, SIZE_FIELD
from xiu.records.block import Block
from xiu.records.block import encode as encode_block
from xiu.state import doubling, readers, restoring
from xiu.state.dedupe import Dedupe, Known, Parts, Reader, Single, Window, heads, runs_before
from xiu.state.doubling import DOUBLING_BYTES, NO_RECORD, Record
from xiu.state.keys import BLOCKS, DERIVED, DERIVED_KEY, KEY, MARK, MARKS, RUNS, SNOWFLAKES
from xiu.state.readers import EVERYTHING, Held
from xiu.state.restoring import Step

_HEAD: Final = struct.Struct("<I10Q")
_RESTORE: Final = struct.Struct("<QQ")
"""Part of the head while a restore is in progress."""
_MORE: Final = (0, _RESTORE.size, DOUBLING_BYTES, _RESTORE.size + DOUBLING_BYTES)
_COUNT: Final = struct.Struct("<I")
_TRIM: Final = struct.Struct("<QQ")
_SIZE: Final = struct.Struct("<I")
_USER: Final = struct.Struct("<Q")

NONE_MOVED: Final[frozenset[int]] = frozenset()
LAST_COUNTER: Final = (1 << MSG_COUNTER_BITS) - 1
DEDUPE_WINDOW_MS: Final = 24 * 3_600_000
MAX_AHEAD_MS: Final = 60_000
DAY_US: Final = 24 * 3_600_000_000
MARK_BYTES: Final = 1 << 20
MARK_US: Final = 60_000_000
"""Minimum distance of two marks, in bytes or in time."""


class XiuKind(IntEnum):
    """Kinds of a Xiu's entries; the lower ones are replication's."""

    STORE = 16
    TRIM = 17
    RESTORE = 18
    """See `xiu.state.restoring`."""
    HOLD = 19
    """See `xiu.state.readers`."""


STORE: Final = int(XiuKind.STORE)
"""Compared with every entry's kind: a member of an `IntEnum` takes several times as long."""


class Verdict(IntEnum):
    """Outcome of a record."""

    STORED = 0
    SAME = 1
    """It was stored before under this SnowflakeID."""
    ID_REUSED = 2
    TOO_OLD = 3
    ID_AHEAD = 4
    NO_NUMBERS = 5
    """The leader's epoch has no sequences left: another epoch is needed."""
    MOVED = 6
    """It belongs to another partition, by an entry of the log."""


@dataclass(slots=True)
class Ruling:
    """Outcome of consecutive records of an entry."""

    index: int
    """Index of the first one in the entry."""
    count: int
    verdict: Verdict
    value: int
    """STORED: the sequence of the first one; SAME: the MsgID; else 0."""


@dataclass(slots=True)
class Head:
    """Everything in the state beside the records. There is a new head for every entry; only `State` fills it in."""

    applied: Position = START
    clock_us: int = 0
    last: int = 0
    """The highest sequence assigned; its upper half is the epoch."""
    floor: int = 0
    """Records below this sequence were trimmed."""
    stored_bytes: int = 0
    """Total of all records ever stored."""
    trimmed_bytes: int = 0
    marked_us: int = 0
    marked_bytes: int = 0
    restored: int = 0
    """The highest sequence brought back by the restore in progress."""
    below: int = 0
    """Sequence at which that restore ends: records from here on are stored already. 0: none is in progress."""
    doubling: Record = NO_RECORD
    runs_from: int = 0
    """New runs contain SnowflakeIDs from this one on: lower ones may have been restored, with rows of their own."""
    forgotten: int = 0
    """Run entries below this SnowflakeID no longer count: they were older than the window at a trim."""

    def at(self, applied: Position, clock_us: int) -> Head:
        """Copy, at another position and time. By hand: `dataclasses.replace` takes five times as long."""
        return Head(
            applied, clock_us, self.last, self.floor, self.stored_bytes, self.trimmed_bytes, self.marked_us, self.marked_bytes,
            self.restored, self.below, self.doubling, self.runs_from, self.forgotten,
        )  # fmt: skip

    def encode(self) -> bytes:
        """Encode as the value of `HEAD_KEY`."""
        data = _HEAD.pack(
            self.applied.epoch, self.applied.counter, self.clock_us, self.last, self.floor, self.stored_bytes,
            self.trimmed_bytes, self.marked_us, self.marked_bytes, self.runs_from, self.forgotten,
        )  # fmt: skip
        if self.below:
            data += _RESTORE.pack(self.restored, self.below)
        data += self.doubling.encode()
        return data + zlib.crc32(data).to_bytes(4, "little")

    @classmethod
    def decode(cls, value: bytes) -> Head | None:
        """Decode the head; None if it is broken."""
        end = len(value) - 4
        if zlib.crc32(value[:end]).to_bytes(4, "little") != value[end:]:
            return None
        more = end - _HEAD.size
        if more not in _MORE:
            return None
        epoch, counter, clock, last, floor, stored, trimmed, marked_us, marked, runs_from, forgotten = _HEAD.unpack_from(value)
        restored, below = (0, 0) if more in (0, DOUBLING_BYTES) else _RESTORE.unpack_from(value, _HEAD.size)
        doubled = Record.decode(value[end - DOUBLING_BYTES : end] if more >= DOUBLING_BYTES else b"")
        position = Position(epoch, counter)
        return cls(
            position, clock, last, floor, stored, trimmed, marked_us, marked, restored, below, doubled, runs_from, forgotten,
        )  # fmt: skip

    def window(self) -> Window:
        """The accepted SnowflakeIDs, and the fields for their look-up."""
        now_ms = self.clock_us // 1000 - SNOWFLAKE_EPOCH_MS
        oldest, newest = max(now_ms - DEDUPE_WINDOW_MS, 0) << 22, max(now_ms + MAX_AHEAD_MS + 1, 0) << 22
        return Window(oldest, newest, self.clock_us // DAY_US, self.runs_from, self.forgotten)


@dataclass(slots=True)
class Decision:
    """The changes of one entry, and the answers to its writer."""

    head: Head
    """After the entry."""
    rulings: Sequence[Ruling] = ()
    block: Block | None = None
    puts: list[tuple[bytes, bytes]] = field(default_factory=list)
    deletes: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Ranges of keys, the end excluded."""


class Blocked(Exception):
    """The store accepts no writes now, and nothing was written; the same write works later. `full`: its disk has no space."""

    def __init__(self, text: str, full: bool) -> None:
        super().__init__(text)
        self.full = full


def store_entry(records: bytes, count: int) -> bytes:
    """Encode the payload of an entry that stores records."""
    return _COUNT.pack(count) + records


def trim_entry(up_to: int, bytes_before: int) -> bytes:
    """Encode the payload of an entry that trims records before a mark, and forgets SnowflakeIDs beyond the window."""
    return _TRIM.pack(up_to, bytes_before)


class State:
    """Decides entries one after the other.

    Args:
        partition: of this Xiu.
        reader: of written rows.
        head: of the written state.
    """

    def __init__(self, partition: int, reader: Reader, head: Head) -> None:
        self._partition = partition
        self._dedupe = Dedupe(reader)
        self.head = head
        """After the last decision."""

    def forget(self, head: Head) -> None:
        """Go back to the written state: later decisions are made again from committed entries."""
        self.head = head
        self._dedupe.forget()

    def written(self, decision: Decision) -> None:
        """Note that the reader has a decision's rows now."""
        self._dedupe.written(decision.puts)

    def decide(self, entry: Entry) -> Decision:
        """Decide the next entry. Every entry of the log must be passed, whatever its kind."""
        before = self.head
        position = entry.position
        assert position.counter == before.applied.counter + 1, f"{position} does not follow {before.applied}"
        clock = max(before.clock_us, entry.at_us)
        decision = Decision(before.at(position, clock))
        if entry.kind == STORE:
            self._store(entry, decision)
        elif entry.kind == XiuKind.TRIM:
            self._trim(entry, decision)
        elif entry.kind == XiuKind.RESTORE:
            self._restore(entry, decision)
        elif entry.kind == DOUBLING_KIND:
            command = Command.decode(entry.payload)
            doubled = doubling.after(before.doubling, command, entry.counter, clock)
            decision.head = replace(decision.head, doubling=doubled)
            if doubled is not before.doubling:
                self._hold(doubling.holds_of(command), decision)
        elif entry.kind == XiuKind.HOLD:
            self._hold(entry.payload, decision)
        elif entry.kind == EntryKind.SET_CLOCK and len(entry.payload) == CLOCK.size:
            back = min(clock, CLOCK.unpack(entry.payload)[0])
            decision.head = replace(decision.head, clock_us=back, marked_us=0)  # the next mark has the right time
        self.head = decision.head
        return decision

    @staticmethod
    def _hold(payload: bytes, decision: Decision) -> None:
        clock = decision.head.clock_us
        for name, held in readers.decode(payload):
            key, value = readers.row_of(name, Held(held.position, min(held.since_us or clock, clock)))
            if held.position >= EVERYTHING:
                decision.deletes.append((key, key + b"\0"))
            else:
                decision.puts.append((key, value))

    def _store(self, entry: Entry, decision: Decision) -> None:
        data, head = entry.payload, decision.head
        count: int = _COUNT.unpack_from(data)[0]
        window = head.window()
        moved = self._moved(data, count) if head.doubling.phase else NONE_MOVED
        sequence = max(head.last, entry.epoch << MSG_COUNTER_BITS)
        left = (entry.epoch << MSG_COUNTER_BITS | LAST_COUNTER) - sequence if entry.epoch <= MAX_MSG_EPOCH else 0
        first = sequence + 1
        parts = self._dedupe.parts(data, count, _COUNT.size, window, moved, self._partition, first)
        refused: list[Ruling] = []
        for single in parts.singles:
            rank = single.index - len(refused)
            if single.index in moved:
                verdict, value = Verdict.MOVED, 0
            elif not single.derived and not window.oldest <= single.snowflake < window.newest:
                verdict, value = Verdict.TOO_OLD if single.snowflake < window.oldest else Verdict.ID_AHEAD, 0
            elif (known := self._known(single, window, parts, refused, left)) is not None:
                verdict, value = (Verdict.SAME, known[0]) if known[1] == single.crc else (Verdict.ID_REUSED, 0)
            elif rank >= left:
                verdict, value = Verdict.NO_NUMBERS, 0
            else:
                stored = msg_id(self._partition, single.type, first + rank), single.crc
                self._dedupe.keep(single.snowflake, single.derived, window.day, stored, decision.puts)
                continue
            refused.append(Ruling(single.index, 1, verdict, value))
        if count - len(refused) > left:
            late = _late(refused, count, left)
            parts.cut(late[0].index)
            refused = sorted(refused + late, key=_index_of)
        if refused:
            parts.leave_out([ruling.index for ruling in refused])
        self._dedupe.keep_runs(parts, decision.puts)
        decision.rulings = _rulings(refused, count, first)
        if count > len(refused):
            self._add_block(decision, Block(first, count - len(refused), head.clock_us, _stored(data, decision.rulings)))

    def _known(self, single: Single, window: Window, parts: Parts, refused: Sequence[Ruling], left: int) -> Known | None:
        """The record stored under a record's SnowflakeID, or earlier in the same entry."""
        known = self._dedupe.decided(single.snowflake, single.derived, window, days=1) or single.known
        if known is None and single.derived:  # of yesterday, and restored: one of today that is written comes before it
            return self._dedupe.decided(single.snowflake, True, window)
        if known is None and (earlier := parts.find(single.snowflake)) is not None:
            index, found, crc = earlier
            out = bisect_left(refused, index, key=_index_of)
            known = (found - out, crc) if index - out < left else None
        return known

    def _moved(self, data: bytes, count: int) -> frozenset[int]:
        """Indexes of records that were proposed before the partition was split, but follow the SPLIT."""
        now, partition, offset = self.head.doubling, self._partition, _COUNT.size
        moved: list[int] = []
        for index in range(count):
            if not doubling.takes(now, partition, _USER.unpack_from(data, offset + KEY_AT)[0]):
                moved.append(index)
            offset += SIZE_FIELD + _SIZE.unpack_from(data, offset)[0]
        return frozenset(moved)

    def stored_already(self, payload: bytes) -> list[int | None]:
        """The MsgID of each record of an entry's payload, without a decision: None if it is not stored, 0 if it is decided but not
        written. Raises StoreDamaged."""
        window, records = self.head.window(), heads(payload, _COUNT.unpack_from(payload)[0], _COUNT.size)
        found = self._dedupe.find([(snowflake, derived) for snowflake, derived, _, _ in records], window)
        values: list[int | None] = []
        for (snowflake, derived, crc, _), known in zip(records, found, strict=True):
            if known is not None:
                values.append(known[0] if known[1] == crc else None)
            else:
                values.append(None if self._dedupe.decided(snowflake, derived, window) is None else 0)
        return values

    def unknown(self, records: bytes, count: int) -> list[tuple[int, int, bool, int]]:
        """(index, SnowflakeID, True if derived, CRC) of records that are not known here. Raises StoreDamaged, DiskFailed."""
        window, parsed = self.head.window(), heads(records, count, 0)
        found = self._dedupe.find([(snowflake, derived) for snowflake, derived, _, _ in parsed], window)
        return [
            (index, snowflake, derived, crc)
            for index, (snowflake, derived, crc, _) in enumerate(parsed)
            if found[index] is None and self._dedupe.decided(snowflake, derived, window) is None
        ]

    def known(self, wanted: Sequence[tuple[int, bool]]) -> list[tuple[int, int] | None]:
        """(MsgID, CRC) of each SnowflakeID (and True if derived) that was written here. Raises StoreDamaged, DiskFailed."""
        return self._dedupe.find(wanted, self.head.window())

    @staticmethod
    def _add_block(decision: Decision, block: Block) -> None:
        """Add a block to a new decision, whose head is not shared yet."""
        head, first = decision.head, block.first
        if not head.marked_us or head.stored_bytes - head.marked_bytes >= MARK_BYTES or head.clock_us - head.marked_us >= MARK_US:
            head.marked_us, head.marked_bytes = head.clock_us, head.stored_bytes
            decision.puts.append((KEY.pack(MARKS, first), MARK.pack(head.marked_us, head.marked_bytes)))
        decision.block = block
        decision.puts.append((KEY.pack(BLOCKS, first), encode_block(block)))
        head.last = block.last
        head.stored_bytes += len(block.records)

    def _restore(self, entry: Entry, decision: Decision) -> None:
        """Apply a step of a restore. Unsuitable ones have no effect: the leader that wrote them sees that, and reports it."""
        head = decision.head
        step, below, blocks = restoring.decode(entry.payload)
        if step is Step.BEGIN and not head.below:
            decision.head = replace(head, restored=0, below=below)
        elif step is Step.END:
            decision.head = replace(head, restored=0, below=0)
        elif step is Step.BLOCKS and not restoring.problem_of(blocks, entry.epoch, head):
            for block in blocks:
                self._remember(block, decision)
                decision.puts.append((KEY.pack(BLOCKS, block.first), encode_block(block)))
            # One mark per entry. It counts no bytes: by size, a restored message is trimmed when enough has been stored since.
            mark = MARK.pack(blocks[0].at_us, head.trimmed_bytes)
            decision.puts.append((KEY.pack(MARKS, blocks[0].first), mark))
            last = blocks[-1].last
            floor = blocks[0].first if not head.restored else head.floor
            decision.head = replace(head, restored=last, last=max(head.last, last), floor=max(head.floor, floor))

    def _remember(self, block: Block, decision: Decision) -> None:
        """Keep the SnowflakeIDs of restored records that a writer may send again, except those stored again meanwhile. They have
        rows of their own, below the runs."""
        head, day = decision.head, block.at_us // DAY_US
        window = head.window()
        today, window = window.day, window._replace(day=day)
        records = heads(block.records, block.count, 0)
        found = self._dedupe.find([(snowflake, derived) for snowflake, derived, _, _ in records], window, days=1)
        for place, ((snowflake, derived, crc, type_), known) in enumerate(zip(records, found, strict=True)):
            wanted = day >= today - 1 if derived else snowflake >= window.oldest
            if wanted and known is None and self._dedupe.decided(snowflake, derived, window, days=1) is None:
                known = msg_id(self._partition, type_, block.first + place), crc
                self._dedupe.keep(snowflake, derived, day, known, decision.puts)
                if not derived:
                    head.runs_from = max(head.runs_from, snowflake + 1)

    @staticmethod
    def _trim(entry: Entry, decision: Decision) -> None:
        head = decision.head
        up_to, bytes_before = _TRIM.unpack(entry.payload)
        if up_to > head.floor:
            for space in (BLOCKS, MARKS):
                decision.deletes.append((KEY.pack(space, head.floor), KEY.pack(space, up_to)))
            head = decision.head = replace(head, floor=up_to, trimmed_bytes=bytes_before)
        oldest_ms = head.clock_us // 1000 - SNOWFLAKE_EPOCH_MS - DEDUPE_WINDOW_MS
        if oldest_ms > 0:
            decision.deletes.append((KEY.pack(SNOWFLAKES, 0), KEY.pack(SNOWFLAKES, oldest_ms << 22)))
            decision.deletes.append((KEY.pack(RUNS, 0), KEY.pack(RUNS, runs_before(oldest_ms))))
            head.forgotten = max(head.forgotten, oldest_ms << 22)
        day = head.clock_us // DAY_US & 0xFFFF
        if day > 1:
            decision.deletes.append((DERIVED_KEY.pack(DERIVED, 0, 0), DERIVED_KEY.pack(DERIVED, day - 1, 0)))


def _index_of(ruling: Ruling) -> int:
    return ruling.index


def _late(refused: Sequence[Ruling], count: int, left: int) -> list[Ruling]:
    """Rulings for records that are not refused but for which there are no sequences left."""
    out = {ruling.index for ruling in refused}
    return [Ruling(index, 1, Verdict.NO_NUMBERS, 0) for index in range(count) if index not in out][left:]


def _rulings(refused: Sequence[Ruling], count: int, first: int) -> list[Ruling]:
    """Rulings for all records of an entry, given the refused ones and the sequence of the first stored one."""
    rulings: list[Ruling] = []
    begin = 0
    for ruling in refused:
        if ruling.index > begin:
            rulings.append(Ruling(begin, ruling.index - begin, Verdict.STORED, first))
            first += ruling.index - begin
        rulings.append(ruling)
        begin = ruling.index + 1
    if count > begin:
        rulings.append(Ruling(begin, count - begin, Verdict.STORED, first))
    return rulings


def _stored(data: bytes, rulings: Sequence[Ruling]) -> bytes:
    """The stored records of an entry."""
    if len(rulings) == 1:
        return data[_COUNT.size :]
    kept: list[bytes] = []
    begin = _COUNT.size
    for ruling in rulings:
        end = begin
        for _ in range(ruling.count):
            end += SIZE_FIELD + _SIZE.unpack_from(data, end)[0]
        if ruling.verdict is Verdict.STORED:
            kept.append(data[begin:end])
        begin = end
    return b"".join(kept)
