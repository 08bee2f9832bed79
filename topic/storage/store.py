"""The state of a group on its disk: rows in a table, blocks in segments, both behind the group's log.

    apply ──▶ State ──▶ tails of the parts           in memory; the log has it
    freeze ──▶ Flush ──write, in a thread──▶ finish
               1. segments written and synced        2. rows and `applied` in one transaction        3. the log may be trimmed

A crash between any two steps leaves a table that is older than the segments; the log is applied from the table's position again,
and blocks that are there already keep their offsets. Folders of parts that the table does not have are removed at the start: the
log has all of their blocks, or an entry that dropped them.

Source: docs/topics.md, "How it is stored", docs/replication.md, "Use by a role".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

from cluster.replication.model import Entry
from cluster.topics.entries import number_of, part_id, topic_of
from pixiu.wire.block import Block, Flag, Stamp
from topic.state.state import State
from topic.storage.cache import Blocks
from topic.storage.compacting import REMOVED_KEY, Compacting, Job, remove_copies, take_copy
from topic.storage.files import Files
from topic.storage.keys import KeyIndex, Rows
from topic.storage.part_log import SEGMENT_BYTES, Last, PartLog, Writing, sync_part, write_part
from topic.storage.segment import Gap, Stored

ROOT: Final = ""
FOLDER: Final = "parts"
PARTS_IN_LINE: Final = 32
"""Number of parts in a flush from which on several are synced at once: the file system joins what it has to wait for."""
SYNCS_AT_ONCE: Final = 8
READ_AHEAD_BYTES: Final = 256 << 10
CACHE_BYTES: Final = 64 << 20
NO_FILE: Final = Last(-1, 0)
LAST_KEY: Final = b"\1"
"""First byte of the keys of rows that are not the state's: u64 part → `Last` of it."""
_U64: Final = struct.Struct(">Q")
_LAST: Final = struct.Struct("<QQ")


class Table(Rows, Protocol):
    """Rows with the position that they are of."""

    def read(self) -> tuple[Mapping[bytes, bytes], int, int]:
        """All rows but those of the index of keys, `applied` and the log's clock; of an empty table 0 and 0."""

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], applied: int, clock_us: int) -> None:
        """Put and delete rows in one transaction, durable when this returns. Raises DiskFull, DiskFailed: nothing has changed."""


@dataclass(slots=True)
class Flush:
    """Everything that a flush makes durable, as it was at one moment."""

    applied: int
    clock_us: int
    rows: Sequence[tuple[bytes, bytes | None]]
    """Those of the state first."""
    unsaved: int
    """Number of these."""
    lasts: Sequence[tuple[bytes, bytes | None]]
    """Rows of the last files of parts."""
    parts: Mapping[int, Writing]
    firsts: Mapping[int, int]
    """Part → lowest offset that is kept in files, of all parts."""
    stored: Mapping[int, int]
    """Part → offset up to which the object store has it."""
    dropped: Sequence[int]
    """Parts that are no more."""
    swept: Mapping[int, int]
    """Compacted part → lowest offset that is kept, of those that were trimmed."""


@dataclass(slots=True)
class Gone:
    """Files that nobody needs any more."""

    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


class Store:
    """The state of a group with its files.

    Args:
        files: of the group.
        table: of the group.
        segment_bytes: size at which a part begins a new segment.
        cache_bytes: limit of the blocks that are kept in memory.
    """

    def __init__(
        self, files: Files, table: Table, segment_bytes: int = SEGMENT_BYTES, cache_bytes: int = CACHE_BYTES
    ) -> None:  # fmt: skip
        self.files, self._table, self._segment_bytes = files, table, segment_bytes
        self.state = State(self)
        self.logs: dict[int, PartLog] = {}
        """By part."""
        self.cache = Blocks(cache_bytes)
        self.on_away: Callable[[int, int], None] = lambda _part, _offset: None
        """Called with a part and an offset that is wanted, and that only the object store has."""
        self.flushed = 0
        """Counter up to which a power cut leaves everything: the group's log may be trimmed up to here."""
        self.stored: Mapping[int, int] = {}
        """Part → offset up to which the object store has it, as of `flushed`."""
        self.tail_bytes = 0
        """Bytes of blocks that are not written yet."""
        self._unsaved: list[tuple[bytes, bytes | None]] = []
        """Rows that are not in the table yet."""
        self.local_firsts: dict[int, int] = {}
        """Part → offset below which the object store has what the files here need not have."""
        self._dropped: list[int] = []
        """Parts whose files go when the table no longer has them."""
        self.keys = KeyIndex(table)
        self.compacting = Compacting()
        self._swept: dict[int, int] = {}
        """Compacted part → offset below which its keys are out of the index."""

    def open(self) -> None:
        """Read what is there. Raises StateDamaged, DiskFull, DiskFailed."""
        self.files.make_folder(FOLDER)
        lasts = self.load()
        self.flushed = self.state.applied
        for name in self.files.names(FOLDER):
            if _part_in(name) not in self.state.parts:
                self.files.remove_folder(f"{FOLDER}/{name}")
        self._swept = {part.part: part.first for part in self.state.parts.values()}
        for part in self.state.parts.values():
            remove_copies(self.files, self.log_of(part.part).folder)
            self.log_of(part.part).open(max(part.first, part.stored), part.end, lasts.get(part.part, NO_FILE))
        for folder in (ROOT, FOLDER):  # a killed process may have made some in them and synced none
            self.files.sync_folder(folder)

    def load(self) -> dict[int, Last]:
        """Read the table into the state. Returns the last file of each part that has any. Raises StateDamaged."""
        found, applied, clock_us = self._table.read()
        lasts = {_U64.unpack_from(key, 1)[0]: Last(*_LAST.unpack(value)) for key, value in found.items() if key[:1] == LAST_KEY}
        self.compacting.load({key: value for key, value in found.items() if key[:1] == REMOVED_KEY})
        rows = {key: value for key, value in found.items() if key[:1] not in (LAST_KEY, REMOVED_KEY)}
        self.state.load(rows, applied, clock_us)
        return lasts

    def log_of(self, part: int) -> PartLog:
        """The blocks of a part; made if they are not there yet."""
        log = self.logs.get(part)
        if log is None:
            log = PartLog(self.files, _folder_of(part), self._segment_bytes)
            self.logs[part] = log
        return log

    # --- as `Blocks`

    def append(self, part: int, stamp: Stamp, block: bytes, count: int) -> None:
        """See `Blocks`."""
        checked = Block.checked(block)
        if checked.flags & Flag.KEY and self.is_compacted(part):
            self.keys.note(part, stamp.base, checked)
        if self.log_of(part).append(stamp, block, count):
            self.cache.put(part, stamp, checked)
            self.tail_bytes += len(block)

    def trim(self, part: int, first: int) -> None:
        """See `Blocks`. Segments go at the next flush, when the table has the new beginning."""
        if self.compacting.of(part):
            self.compacting.forget(part, 0, first)

    def compact(self, part: int, ranges: list[tuple[int, int]], digests: Sequence[bytes]) -> None:
        """See `Blocks`. Files are copied without them after the next flush."""
        self.keys.forget(part, digests, ranges)
        self.compacting.add(part, ranges)

    def _is_swept(self, part: int) -> bool:
        """True if keys whose messages were trimmed go from the index. In a part with parents they say that those of the parents do
        not count."""
        return self.is_compacted(part) and not self.state.parts[part].parents

    def is_compacted(self, part: int) -> bool:
        """True if the last message of each key of a part is known."""
        topic = self.state.topics.get(topic_of(part))
        return topic is not None and topic.compact > 0

    def drop(self, part: int) -> None:
        """See `Blocks`."""
        self.keys.drop(part)
        self.compacting.forget(part)
        self._swept.pop(part, None)
        log = self.logs.pop(part, None)
        self.local_firsts.pop(part, None)
        if log is not None:
            self.tail_bytes -= log.tail_bytes
            self.cache.drop(part)
        self._dropped.append(part)

    # --- as a state machine

    def apply(self, entries: Sequence[Entry]) -> list[object]:
        """Apply the entries that follow `state.applied`. Returns one answer for each."""
        return [self.state.apply(entry) for entry in entries]

    def flush(self) -> int:
        """Make everything that is applied durable, in this thread; returns the counter. Raises DiskFull, DiskFailed: the log keeps
        what is missing."""
        flush = self.freeze()
        self.write(flush)
        self.remove(self.finish(flush))
        return self.flushed

    def freeze(self) -> Flush:
        """Return everything that is to be made durable now."""
        self._unsaved += self.state.changes()
        firsts = {
            part.part: max(part.first, min(part.stored, self.local_firsts.get(part.part, 0))) for part in self.state.parts.values()
        }
        parts = {part: writing for part, log in self.logs.items() if (writing := log.freeze())}
        lasts = [(_last_key(part), _LAST.pack(*writing.last)) for part, writing in parts.items() if writing.runs]
        gone = [(_last_key(part), None) for part in self._dropped if part not in self.logs]
        self._unsaved += self.compacting.rows()
        rows = [*self._unsaved, *self.keys.freeze()]
        swept = {part: first for part, first in firsts.items() if self._swept.get(part, 0) < first and self._is_swept(part)}
        return Flush(
            self.state.applied,
            self.state.clock_us,
            rows,
            len(self._unsaved),
            [*lasts, *gone],
            parts,
            firsts,
            {part.part: part.stored for part in self.state.parts.values()},
            list(self._dropped),
            swept,
        )

    def write(self, flush: Flush) -> None:
        """Make it durable; may be called in a thread. Raises DiskFull, DiskFailed: it can be done again, with what came since."""
        for writing in flush.parts.values():
            write_part(self.files, writing)
        self._sync(list(flush.parts.values()))
        for part, first in {**flush.swept, **dict.fromkeys(flush.dropped, 1 << 62)}.items():
            self.keys.sweep(part, first)  # a crash leaves a table that still has the entry to apply
        self._table.write([*flush.rows, *flush.lasts], flush.applied, flush.clock_us)

    def _sync(self, parts: Sequence[Writing]) -> None:
        if len(parts) < PARTS_IN_LINE:
            for writing in parts:
                sync_part(self.files, writing)
        else:
            with ThreadPoolExecutor(SYNCS_AT_ONCE, "topic-sync") as pool:
                for synced in [pool.submit(sync_part, self.files, writing) for writing in parts]:
                    synced.result()
        if any(writing.new_folder for writing in parts):
            self.files.sync_folder(FOLDER)

    def finish(self, flush: Flush) -> Gone:
        """Take over what is durable. Returns the files that can go."""
        del self._unsaved[: flush.unsaved]
        self.keys.written(flush.dropped)
        self._swept |= {part: first for part, first in flush.swept.items() if part in self.logs}
        self.flushed, self.stored = flush.applied, flush.stored
        gone = Gone()
        for part, writing in flush.parts.items():
            if part in self.logs:  # else it was dropped meanwhile
                self.logs[part].written(writing)
        for part, first in flush.firsts.items():
            if part in self.logs:
                gone.files += self.logs[part].trim(first)
        gone.folders += [_folder_of(part) for part in flush.dropped if part not in self.logs]
        del self._dropped[: len(flush.dropped)]
        self.tail_bytes = sum(log.tail_bytes for log in self.logs.values())
        return gone

    def remove(self, gone: Gone) -> None:
        """Remove files; may be called in a thread."""
        for path in gone.files:
            self.files.remove(path)
        for folder in gone.folders:
            self.files.remove_folder(folder)

    def take_copy(self, job: Job, size: int) -> bool:
        """Have the copy of a file in its place, and nothing of the old one in memory; see `take_copy`."""
        if self.logs.get(job.part) is not job.log or not take_copy(self.files, job, size):
            return False
        self.cache.drop(job.part)
        return True

    # --- reading

    def find(self, part: int, offset: int) -> tuple[Stamp, Block] | None:
        """The block with an offset, if it is in memory."""
        found = self.cache.find(part, offset)
        if found is not None:
            return found
        log = self.logs.get(part)
        for each in log.read_tail(offset, 1) if log else ():
            return each.stamp, each.block
        return None

    def keep(self, part: int, found: Sequence[Stored | Gap]) -> None:
        """Keep blocks that were read."""
        if part in self.logs:
            for each in found:
                if isinstance(each, Stored):
                    self.cache.put(part, each.stamp, each.block)

    def blocks(self, part: int, low: int, high: int) -> list[tuple[Stamp, Block]]:
        """The blocks that hold the messages [low, high) of a part, or the first of them; none if the first cannot be read. What is
        not in memory is read now, once."""
        blocks, may_read = list[tuple[Stamp, Block]](), True
        while low < high:
            found = self.find(part, low)
            if found is None and may_read:
                found, may_read = self._read(part, low), False
            if found is None:
                break
            blocks.append(found)
            low = found[0].base + found[1].count
        return blocks

    def _read(self, part: int, offset: int) -> tuple[Stamp, Block] | None:
        """Read ahead from the disk, now. Offsets beyond the end are not there; those in the object store alone come later."""
        log = self.logs.get(part)
        if log is not None and offset < log.first:
            self.on_away(part, offset)
            return None
        self.keep(part, found := log.read(offset, READ_AHEAD_BYTES) if log else ())
        first = found[0] if found else None
        return (first.stamp, first.block) if isinstance(first, Stored) else None


def _last_key(part: int) -> bytes:
    return LAST_KEY + _U64.pack(part)


def _folder_of(part: int) -> str:
    return f"{FOLDER}/{topic_of(part)}-{number_of(part)}"


def _part_in(name: str) -> int:
    """The part whose folder has this name; -1 for other names."""
    topic, _, number = name.partition("-")
    return part_id(int(topic), int(number)) if topic.isdecimal() and number.isdecimal() else -1
