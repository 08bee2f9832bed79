"""The state of a group on its disk: rows in a table, blocks in segments, both behind the group's log.

    apply ──▶ State ──▶ tails of the parts           in memory; the log has it
    flush     1. segments written and synced      2. rows and `applied` in one transaction      3. the log may be trimmed

A crash between any two steps leaves a table that is older than the segments; the log is applied from the table's position again,
and blocks that are there already keep their offsets.

Source: docs/topics.md, "How it is stored", docs/replication.md, "Use by a role".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from cluster.replication.model import Entry
from pixiu.wire.block import Stamp
from topic.entries import number_of, topic_of
from topic.state.state import State
from topic.storage.files import Files
from topic.storage.part_log import SEGMENT_BYTES, PartLog
from topic.storage.segment import Stored

FOLDER: Final = "parts"
SLOTS_READ_BYTES: Final = 256 << 10


class Table(Protocol):
    """Rows with the position that they are of."""

    def read(self) -> tuple[Mapping[bytes, bytes], int, int]:
        """All rows, `applied` and the log's clock; of an empty table 0 and 0."""

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], applied: int, clock_us: int) -> None:
        """Put and delete rows in one transaction, durable when this returns. Raises DiskFull, DiskFailed: nothing has changed."""


class Store:
    """The state of a group with its files.

    Args:
        files: of the group.
        table: of the group.
        segment_bytes: size at which a part begins a new segment.
    """

    def __init__(self, files: Files, table: Table, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._files, self._table, self._segment_bytes = files, table, segment_bytes
        self.state = State(self)
        self.logs: dict[int, PartLog] = {}
        """By part."""
        self.flushed = 0
        """Counter up to which a power cut leaves everything: the group's log may be trimmed up to here."""
        self._unsaved: list[tuple[bytes, bytes | None]] = []
        """Rows whose transaction failed."""
        self._dropped: list[int] = []
        """Parts whose files go at the next flush, when the table no longer has them."""

    def open(self) -> None:
        """Read what is there."""
        self._files.make_folder(FOLDER)
        found, applied, clock_us = self._table.read()
        self.state.load(found, applied, clock_us)
        self.flushed = applied
        for part in self.state.parts.values():
            self._log_of(part.part).open(part.first, part.end)
        kept = {_folder(part) for part in self.state.parts}
        for folder in self._files.names(FOLDER):
            if f"{FOLDER}/{folder}" not in kept:  # a dropped part, and the process ended before its files went
                self._remove(f"{FOLDER}/{folder}")

    def _remove(self, folder: str) -> None:
        for name in self._files.names(folder):
            self._files.remove(f"{folder}/{name}")
        self._files.sync_folder(folder)

    def _log_of(self, part: int) -> PartLog:
        log = self.logs.get(part)
        if log is None:
            log = PartLog(self._files, _folder(part), self._segment_bytes)
            self.logs[part] = log
        return log

    # --- as `Blocks`

    def append(self, part: int, stamp: Stamp, block: bytes, count: int) -> None:
        """See `Blocks`."""
        log = self.logs.get(part)
        if log is None:
            log = self._log_of(part)
            log.open(0, 0)
        log.append(stamp, block, count)

    def trim(self, part: int, first: int) -> None:
        """See `Blocks`. Segments go at the next flush, when the table has the new beginning."""

    def drop(self, part: int) -> None:
        """See `Blocks`."""
        self.logs.pop(part, None)
        self._dropped.append(part)

    # --- as a state machine

    def apply(self, entries: Sequence[Entry]) -> list[object]:
        """Apply the entries that follow `state.applied`. Returns one answer for each."""
        return [self.state.apply(entry) for entry in entries]

    def flush(self) -> int:
        """Make everything that is applied durable; returns the counter. Raises DiskFull, DiskFailed: the log keeps what is
        missing."""
        applied, clock_us = self.state.applied, self.state.clock_us
        self._sync_segments()
        self._unsaved += self.state.changes()
        self._table.write(self._unsaved, applied, clock_us)
        self._unsaved = []
        self.flushed = applied
        for part in self.state.parts.values():
            if part.part in self.logs:
                self.logs[part.part].trim(part.first)
        while self._dropped:
            folder = _folder(self._dropped.pop())
            if self._files.names(folder):
                self._remove(folder)
        return applied

    def _sync_segments(self) -> None:
        for log in self.logs.values():
            log.write()
            log.sync()

    # --- reading

    def slots(self, part: int, low: int, high: int) -> list[int]:
        """The slots of the messages [low, high) of a part, or of the first of them; none if the first cannot be read."""
        log = self.logs.get(part)
        found = list[int]()
        for each in log.read(low, SLOTS_READ_BYTES) if log else ():
            if not isinstance(each, Stored):
                break
            found += each.block.slots()[max(low - each.stamp.base, 0) :]
            if len(found) >= high - low:
                break
        return found[: high - low]


def _folder(part: int) -> str:
    return f"{FOLDER}/{topic_of(part)}-{number_of(part)}"
