"""What a Xiu decides when it applies an entry of its log: from the state alone, in log order, so that replicas agree. Pure.

    b"h"                                    the head: applied position, clock, last sequence, floor, bytes
    b"r" sequence u64                       a block of records (`xiu.block`)
    b"t" sequence u64                       a mark: clock µs u64, bytes stored before it u64; where the store may be trimmed
    b"s" SnowflakeID u64                    MsgID u64, CRC u32: kept for the dedupe window
    b"d" day u16, derived ID u64            the same for derived IDs, which hold no time: by the day when they were stored

Keys are big-endian, values little-endian. The clock is the highest time that a leader wrote into an entry; no replica asks its
host. A decision is made once: by a leader when it appends (so that it can answer before the commit), by everybody else when
the entry is committed. What was decided and never commits is forgotten with `forget`.

Source: PiXiu §6.1.1; docs/identifiers.md, docs/stores.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, Protocol

from cluster.replication.model import CLOCK, START, Entry, EntryKind, Position
from pixiu.ids import MAX_MSG_EPOCH, MSG_COUNTER_BITS, SNOWFLAKE_EPOCH_MS, msg_id
from pixiu.wire.record import SIZE_FIELD, Flag
from xiu import doubling, restoring
from xiu.block import Block
from xiu.block import encode as encode_block
from xiu.doubling import DOUBLING_BYTES, NO_DOUBLING, Change, Doubling
from xiu.restoring import Step

HEAD_KEY: Final = b"h"
BLOCKS: Final = b"r"
MARKS: Final = b"t"
SNOWFLAKES: Final = b"s"
DERIVED: Final = b"d"

KEY: Final = struct.Struct(">cQ")
DERIVED_KEY: Final = struct.Struct(">cHQ")
DEDUPE: Final = struct.Struct("<QI")
MARK: Final = struct.Struct("<QQ")
_HEAD: Final = struct.Struct("<IQQQQQQQ")
_RESTORE: Final = struct.Struct("<QQ")
"""Of the head, while a restore is under way."""
HEAD_BYTES: Final = _HEAD.size + 12
_MORE: Final = (0, _RESTORE.size, DOUBLING_BYTES, _RESTORE.size + DOUBLING_BYTES)
_COUNT: Final = struct.Struct("<I")
_TRIM: Final = struct.Struct("<QQ")
_FIELDS: Final = struct.Struct("<IBBB5xIQ")
"""size, kind, flags, type, CRC, SnowflakeID of a record."""
_USER: Final = struct.Struct("<Q")
_USER_AT: Final = 24
"""Where a record has its UIN."""

LAST_COUNTER: Final = (1 << MSG_COUNTER_BITS) - 1
DEDUPE_WINDOW_MS: Final = 24 * 3_600_000
MAX_AHEAD_MS: Final = 60_000
DAY_US: Final = 24 * 3_600_000_000
MARK_BYTES: Final = 1 << 20
MARK_US: Final = 60_000_000
"""A mark stands at least so far from the one before, in bytes or in time."""


class Kind(IntEnum):
    """Kinds of a Xiu's entries; the lower ones are replication's."""

    STORE = 16
    TRIM = 17
    RESTORE = 18
    """See `xiu.restoring`."""
    DOUBLING = 19
    """See `xiu.doubling`."""


STORE: Final = int(Kind.STORE)
"""Compared with every entry's kind: a member of an `IntEnum` takes several times as long."""


class Verdict(IntEnum):
    """What became of a record."""

    STORED = 0
    SAME = 1
    """It was stored before under this SnowflakeID."""
    ID_REUSED = 2
    TOO_OLD = 3
    ID_AHEAD = 4
    NO_NUMBERS = 5
    """The leader's epoch has no sequences left: another epoch is needed."""
    MOVED = 6
    """It belongs to another partition since an entry of the log said so."""


@dataclass(slots=True)
class Ruling:
    """What became of some records of an entry, one after the other."""

    index: int
    """Of the first one, in the entry."""
    count: int
    verdict: Verdict
    value: int
    """STORED: the sequence of the first one; SAME: the MsgID; else 0."""


@dataclass(slots=True)
class Head:
    """What stands in the state beside the records. There is a new one for every entry, which only `State` fills in."""

    applied: Position = START
    clock_us: int = 0
    last: int = 0
    """The highest sequence that was given; its upper half is the epoch."""
    floor: int = 0
    """Records below this sequence were trimmed."""
    stored_bytes: int = 0
    """Of all records that were ever stored."""
    trimmed_bytes: int = 0
    marked_us: int = 0
    marked_bytes: int = 0
    restored: int = 0
    """The highest sequence that a restore which is under way has brought back."""
    below: int = 0
    """Where that restore ends: what lies here or behind is stored already. 0: none is under way."""
    doubling: Doubling = NO_DOUBLING

    def at(self, applied: Position, clock_us: int) -> Head:
        """A copy, at another position and time. By hand: `dataclasses.replace` takes five times as long."""
        return Head(
            applied, clock_us, self.last, self.floor, self.stored_bytes, self.trimmed_bytes, self.marked_us, self.marked_bytes,
            self.restored, self.below, self.doubling,
        )  # fmt: skip

    def encode(self) -> bytes:
        """The value of `HEAD_KEY`."""
        data = _HEAD.pack(
            self.applied.epoch, self.applied.counter, self.clock_us, self.last, self.floor, self.stored_bytes,
            self.trimmed_bytes, self.marked_us,
        ) + self.marked_bytes.to_bytes(8, "little")  # fmt: skip
        if self.below:
            data += _RESTORE.pack(self.restored, self.below)
        data += self.doubling.encode()
        return data + zlib.crc32(data).to_bytes(4, "little")

    @classmethod
    def decode(cls, value: bytes) -> Head | None:
        """The head; None when it is broken."""
        more = len(value) - HEAD_BYTES
        if more not in _MORE or zlib.crc32(value[:-4]).to_bytes(4, "little") != value[-4:]:
            return None
        epoch, counter, clock, last, floor, stored, trimmed, marked_us = _HEAD.unpack_from(value)
        marked = int.from_bytes(value[_HEAD.size : _HEAD.size + 8], "little")
        restored, below = (0, 0) if more in (0, DOUBLING_BYTES) else _RESTORE.unpack_from(value, _HEAD.size + 8)
        doubled = Doubling.decode(value[-4 - DOUBLING_BYTES : -4] if more >= DOUBLING_BYTES else b"")
        return cls(Position(epoch, counter), clock, last, floor, stored, trimmed, marked_us, marked, restored, below, doubled)


@dataclass(slots=True)
class Decision:
    """What one entry changes, and the answers to who wrote it."""

    head: Head
    """After it."""
    rulings: Sequence[Ruling] = ()
    block: Block | None = None
    puts: list[tuple[bytes, bytes]] = field(default_factory=list)
    deletes: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Ranges of keys, the end excluded."""


class Blocked(Exception):
    """The store takes nothing now, and nothing was written; the same write works later. `full`: its disk has no space."""

    def __init__(self, text: str, full: bool) -> None:
        super().__init__(text)
        self.full = full


class Reader(Protocol):
    """What was decided and written."""

    def get_many(self, keys: list[bytes]) -> Sequence[bytes | None]:
        """The values of keys."""


def store_entry(records: bytes, count: int) -> bytes:
    """The payload of an entry that stores records."""
    return _COUNT.pack(count) + records


def trim_entry(up_to: int, bytes_before: int) -> bytes:
    """The payload of an entry that trims what lies before a mark, and forgets SnowflakeIDs beyond the window."""
    return _TRIM.pack(up_to, bytes_before)


class State:
    """Decides entry after entry.

    Args:
        partition: of this Xiu.
        reader: what was written.
        head: of what was written.
    """

    def __init__(self, partition: int, reader: Reader, head: Head) -> None:
        self._partition = partition
        self._reader = reader
        self.head = head
        """After the last decision."""
        self._unwritten: dict[bytes, bytes] = {}
        """Dedupe entries of decisions that are not written yet. As many as the replication lets wait for their commit."""

    def forget(self, head: Head) -> None:
        """Go back to what was written: the decisions after it are made anew from what commits."""
        self.head = head
        self._unwritten.clear()

    def written(self, decision: Decision) -> None:
        """The reader has it now."""
        if self._unwritten:
            for key, _ in decision.puts:
                self._unwritten.pop(key, None)

    def decide(self, entry: Entry) -> Decision:
        """The next entry. Every entry of the log comes, whatever its kind."""
        before = self.head
        position = entry.position
        assert position.counter == before.applied.counter + 1, f"{position} does not follow {before.applied}"
        clock = max(before.clock_us, entry.at_us)
        decision = Decision(before.at(position, clock))
        if entry.kind == STORE:
            self._store(entry, decision)
        elif entry.kind == Kind.TRIM:
            self._trim(entry, decision)
        elif entry.kind == Kind.RESTORE:
            self._restore(entry, decision)
        elif entry.kind == Kind.DOUBLING:
            doubled = doubling.after(before.doubling, Change.decode(entry.payload), self._partition, entry.counter, clock)
            decision.head = replace(decision.head, doubling=doubled)
        elif entry.kind == EntryKind.SET_CLOCK and len(entry.payload) == CLOCK.size:
            back = min(clock, CLOCK.unpack(entry.payload)[0])
            decision.head = replace(decision.head, clock_us=back, marked_us=0)  # the next mark has the right time
        self.head = decision.head
        return decision

    def _keys(self, data: bytes, count: int, day: int) -> tuple[list[tuple[int, int, int, int, int]], list[bytes], list[bytes]]:
        """(offset, flags, type, CRC, SnowflakeID) of each record, the keys of their dedupe entries, and of derived IDs those
        under which they stand if they were stored yesterday."""
        parsed: list[tuple[int, int, int, int, int]] = []
        keys: list[bytes] = []
        yesterday: list[bytes] = []
        unpack, pack, offset = _FIELDS.unpack_from, KEY.pack, _COUNT.size
        for _ in range(count):
            size, _, flags, type_, crc, snowflake = unpack(data, offset)
            parsed.append((offset, flags, type_, crc, snowflake))
            if flags & Flag.DERIVED_ID:
                keys.append(DERIVED_KEY.pack(DERIVED, day, snowflake))
                yesterday.append(DERIVED_KEY.pack(DERIVED, day - 1 & 0xFFFF, snowflake))
            else:
                keys.append(pack(SNOWFLAKES, snowflake))
            offset += SIZE_FIELD + size
        return parsed, keys, yesterday

    def stored_already(self, payload: bytes) -> list[bytes | None]:
        """The dedupe entry of each record of an entry's payload, without a decision: None when it is not stored, b"" when it is
        decided and not written yet. Raises StoreDamaged."""
        count: int = _COUNT.unpack_from(payload)[0]
        parsed, keys, old_keys = self._keys(payload, count, self.head.clock_us // DAY_US & 0xFFFF)
        found = self._reader.get_many(keys + old_keys)
        yesterday = iter(zip(old_keys, found[count:], strict=True))
        values: list[bytes | None] = []
        for (_, flags, _, crc, _), key, value in zip(parsed, keys, found, strict=False):
            old_key, old_value = next(yesterday) if flags & Flag.DERIVED_ID else (key, None)
            known = value or old_value
            if known is None:
                values.append(b"" if key in self._unwritten or old_key in self._unwritten else None)
            else:
                values.append(known if DEDUPE.unpack(known)[1] == crc else None)
        return values

    def _store(self, entry: Entry, decision: Decision) -> None:
        data, head = entry.payload, decision.head
        count: int = _COUNT.unpack_from(data)[0]
        day = head.clock_us // DAY_US & 0xFFFF
        parsed, keys, old_keys = self._keys(data, count, day)
        found = self._reader.get_many(keys + old_keys)
        yesterday = zip(old_keys, found[count:], strict=True)
        now_ms = head.clock_us // 1000 - SNOWFLAKE_EPOCH_MS
        oldest, newest = max(now_ms - DEDUPE_WINDOW_MS, 0) << 22, max(now_ms + MAX_AHEAD_MS + 1, 0) << 22
        sequence = max(head.last, entry.epoch << MSG_COUNTER_BITS)
        left = (entry.epoch << MSG_COUNTER_BITS | LAST_COUNTER) - sequence if entry.epoch <= MAX_MSG_EPOCH else 0
        unwritten, puts, pack, partition = self._unwritten, decision.puts, DEDUPE.pack, self._partition
        first = sequence + 1
        moved = self._moved(data, parsed) if head.doubling.phase else ()
        rulings: list[Ruling] = []
        kept: list[bytes] = []
        """Slices of records; only when some are left out."""
        begin = parsed[0][0] if parsed else 0
        run = 0
        for index in range(count):
            offset, flags, type_, crc, snowflake = parsed[index]
            key = keys[index]
            known = unwritten.get(key) or found[index]
            if flags & Flag.DERIVED_ID:
                old_key, old_found = next(yesterday)
                known = known or unwritten.get(old_key) or old_found
            elif not oldest <= snowflake < newest:
                known = b""
            if moved and index in moved:
                known = b""
            if known is None and left:
                left -= 1
                sequence += 1
                value = pack(msg_id(partition, type_, sequence), crc)
                unwritten[key] = value
                puts.append((key, value))
                continue
            if index > run:
                rulings.append(Ruling(run, index - run, Verdict.STORED, sequence - (index - run) + 1))
                kept.append(data[begin:offset])
            verdict = (Verdict.MOVED, 0) if index in moved else _judge(known, crc, snowflake < oldest)
            rulings.append(Ruling(index, 1, *verdict))
            run = index + 1
            begin = parsed[run][0] if run < count else len(data)
        if run < count:
            rulings.append(Ruling(run, count - run, Verdict.STORED, sequence - (count - run) + 1))
            kept.append(data[begin:])
        decision.rulings = rulings
        if sequence >= first:
            self._add_block(decision, Block(first, sequence - first + 1, head.clock_us, b"".join(kept)))

    def _moved(self, data: bytes, parsed: Sequence[tuple[int, int, int, int, int]]) -> frozenset[int]:
        """Indexes of records that were proposed before the partition was split, and come behind that."""
        now, partition, unpack = self.head.doubling, self._partition, _USER.unpack_from
        return frozenset(
            index
            for index, (offset, *_) in enumerate(parsed)
            if not doubling.takes(now, partition, unpack(data, offset + _USER_AT)[0])
        )

    def unknown(self, records: bytes, count: int) -> list[tuple[int, int, bool, int]]:
        """(index, SnowflakeID, whether it is derived, CRC) of those of some records that are not known here. Raises StoreDamaged,
        DiskFailed."""
        parsed, keys, old_keys = self._keys(_COUNT.pack(count) + records, count, self.head.clock_us // DAY_US & 0xFFFF)
        found = self._reader.get_many(keys + old_keys)
        yesterday = zip(old_keys, found[count:], strict=True)
        wanted: list[tuple[int, int, bool, int]] = []
        for index, ((_, flags, _, crc, snowflake), key) in enumerate(zip(parsed, keys, strict=True)):
            known, derived = self._unwritten.get(key) or found[index], bool(flags & Flag.DERIVED_ID)
            if derived:
                old_key, old_found = next(yesterday)
                known = known or self._unwritten.get(old_key) or old_found
            if known is None:
                wanted.append((index, snowflake, derived, crc))
        return wanted

    def known(self, wanted: Sequence[tuple[int, bool]]) -> list[tuple[int, int] | None]:
        """(MsgID, CRC) of each SnowflakeID (and whether it is derived) that was written here. Raises StoreDamaged, DiskFailed."""
        day = self.head.clock_us // DAY_US & 0xFFFF
        keys = [DERIVED_KEY.pack(DERIVED, day, one) if derived else KEY.pack(SNOWFLAKES, one) for one, derived in wanted]
        old = [(at, DERIVED_KEY.pack(DERIVED, day - 1 & 0xFFFF, one)) for at, (one, derived) in enumerate(wanted) if derived]
        values = list(self._reader.get_many(keys + [key for _, key in old]))
        for (at, _), value in zip(old, values[len(keys) :], strict=True):
            values[at] = values[at] or value
        found: list[tuple[int, int] | None] = []
        for value in values[: len(keys)]:
            found.append(DEDUPE.unpack(value) if value else None)
        return found

    @staticmethod
    def _add_block(decision: Decision, block: Block) -> None:
        """Into a decision whose head nobody has seen yet."""
        head, first = decision.head, block.first
        if not head.marked_us or head.stored_bytes - head.marked_bytes >= MARK_BYTES or head.clock_us - head.marked_us >= MARK_US:
            head.marked_us, head.marked_bytes = head.clock_us, head.stored_bytes
            decision.puts.append((KEY.pack(MARKS, first), MARK.pack(head.marked_us, head.marked_bytes)))
        decision.block = block
        decision.puts.append((KEY.pack(BLOCKS, first), encode_block(block)))
        head.last = block.last
        head.stored_bytes += len(block.records)

    def _restore(self, entry: Entry, decision: Decision) -> None:
        """What does not fit the head changes nothing: the leader that wrote it sees that, and says so."""
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
            # One mark an entry. It counts no bytes: by size, a restored message goes when what was stored since is enough.
            mark = MARK.pack(blocks[0].at_us, head.trimmed_bytes)
            decision.puts.append((KEY.pack(MARKS, blocks[0].first), mark))
            last = blocks[-1].last
            floor = blocks[0].first if not head.restored else head.floor
            decision.head = replace(head, restored=last, last=max(head.last, last), floor=max(head.floor, floor))

    def _remember(self, block: Block, decision: Decision) -> None:
        """Of what is restored, the SnowflakeIDs that a writer may send again, but for those that were stored again meanwhile."""
        day = block.at_us // DAY_US
        parsed, keys, _ = self._keys(_COUNT.pack(block.count) + block.records, block.count, day & 0xFFFF)
        now_us = decision.head.clock_us
        oldest = max(now_us // 1000 - SNOWFLAKE_EPOCH_MS - DEDUPE_WINDOW_MS, 0) << 22
        for place, ((_, flags, type_, crc, snowflake), found) in enumerate(zip(parsed, self._reader.get_many(keys), strict=True)):
            wanted = day >= now_us // DAY_US - 1 if flags & Flag.DERIVED_ID else snowflake >= oldest
            if wanted and found is None and keys[place] not in self._unwritten:
                value = DEDUPE.pack(msg_id(self._partition, type_, block.first + place), crc)
                self._unwritten[keys[place]] = value
                decision.puts.append((keys[place], value))

    @staticmethod
    def _trim(entry: Entry, decision: Decision) -> None:
        head = decision.head
        up_to, bytes_before = _TRIM.unpack(entry.payload)
        if up_to > head.floor:
            for space in (BLOCKS, MARKS):
                decision.deletes.append((KEY.pack(space, head.floor), KEY.pack(space, up_to)))
            decision.head = replace(head, floor=up_to, trimmed_bytes=bytes_before)
        oldest_ms = head.clock_us // 1000 - SNOWFLAKE_EPOCH_MS - DEDUPE_WINDOW_MS
        if oldest_ms > 0:
            decision.deletes.append((KEY.pack(SNOWFLAKES, 0), KEY.pack(SNOWFLAKES, oldest_ms << 22)))
        day = head.clock_us // DAY_US & 0xFFFF
        if day > 1:
            decision.deletes.append((DERIVED_KEY.pack(DERIVED, 0, 0), DERIVED_KEY.pack(DERIVED, day - 1, 0)))


def _judge(known: bytes | None, crc: int, old: bool) -> tuple[Verdict, int]:
    """Of a record that is not stored. `known`: its dedupe entry, b"" when its time is out of bounds."""
    if known is None:
        return Verdict.NO_NUMBERS, 0
    if not known:
        return (Verdict.TOO_OLD if old else Verdict.ID_AHEAD), 0
    stored, stored_crc = DEDUPE.unpack(known)
    return (Verdict.SAME, stored) if stored_crc == crc else (Verdict.ID_REUSED, 0)
