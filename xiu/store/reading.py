"""Reads of stored records: by MsgID, and in order.

    MsgID above the last that is in the state       NOT_YET; committed ones for which the store has no space come from memory
    one that a restore may bring back               NOT_YET
    below the floor, or of an epoch that was cut    GONE
    in the table, else in RocksDB                   the record, its block's CRC checked
    in a damaged block, or in a hole of an epoch    STORE_DAMAGED: never other bytes than were stored

Sequences are dense within an epoch, so a hole before a later block of the same epoch is damage.

Source: PiXiu §6.1.2; docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from pixiu.errors import Gone, NotYet, StoreDamaged, WrongPartition
from pixiu.ids import MAX_MSG_SEQUENCE, MSG_COUNTER_BITS, msg_partition, msg_sequence, msg_type
from xiu.records.block import Block, bounds
from xiu.state.state import Head
from xiu.store.repair import Cursor, Row

TYPE_OFFSET: Final = 6
"""Offset of a record's type in its head."""
MAX_FETCH_BYTES: Final = 2 << 20
MAX_COLD_BLOCKS: Final = 32
"""Limit of blocks that one call of a fetch reads from RocksDB: each may be a read of the disk, in a turn of the event loop in which
nothing is written and no heartbeat leaves. Policy: the answer ends there, and the caller asks again for the rest."""
MAX_PAGE_BYTES: Final = 1 << 20
MAX_PAGE_ROWS: Final = 2048
"""Limits of `rows`: one page is read in one turn of the event loop."""
COUNTER_MASK: Final = (1 << MSG_COUNTER_BITS) - 1


class Found(NamedTuple):
    """The answer for one MsgID: a record, or a code of `pixiu.errors`."""

    code: str
    record: bytes = b""


class StoredBlocks(Protocol):
    """Interface to RocksDB."""

    head: Head

    def block_of(self, sequence: int) -> Block | None:
        """Return the block that contains a sequence."""

    def next_first(self, sequence: int) -> int | None:
        """Return the first sequence of the first block at or after one."""

    def last_before(self, sequence: int) -> int:
        """Return the last sequence of the last block that begins before one; 0: there is none."""

    def marks(self, begin: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, clock µs, bytes before) of every mark from a sequence on."""

    def scan(self, sequence: int) -> Iterator[Block]:
        """Yield blocks from a sequence on."""

    def cursor(self) -> Cursor:
        """Return a cursor over all rows."""


class RecentBlocks(Protocol):
    """Interface to the table."""

    def get(self, sequence: int) -> Block | None:
        """Return the block that contains a sequence, if the table has it."""


class Reading:
    """Serves fetches and scans of one partition.

    Args:
        partition: of this Xiu.
        store: RocksDB.
        table: on /dev/shm.
        owed: returns the block of a sequence that is committed, but for which the store has no space.
    """

    def __init__(
        self, partition: int, store: StoredBlocks, table: RecentBlocks, owed: Callable[[int], Block | None] = lambda _: None
    ) -> None:
        self._partition, self._owed = partition, owed
        self._store = store
        self._table = table
        self.damaged = 0
        """Number of answers STORE_DAMAGED."""

    @property
    def head(self) -> Head:
        """The head of the readable state."""
        return self._store.head

    def fetch(self, msg_ids: Sequence[int], max_bytes: int = MAX_FETCH_BYTES, max_cold: int | None = None) -> list[Found]:
        """Fetch records by MsgID. The answers end before `max_bytes` of records, but have at least one, and before more than
        `max_cold` blocks are read from RocksDB (None: no limit). Raises DiskFailed."""
        took = cold = 0
        found: list[Found] = []
        block: Block | None = None
        for msg_id in msg_ids:
            sequence = msg_sequence(msg_id)
            if msg_partition(msg_id) != self._partition:
                found.append(Found(WrongPartition.code))
                continue
            if block is None or not block.first <= sequence <= block.last:
                try:
                    block = self._recent(sequence)
                    if block is None:
                        if cold == max_cold:
                            break
                        cold += 1
                        block = self._stored(sequence)
                except (NotYet, Gone, StoreDamaged) as refused:
                    self.damaged += isinstance(refused, StoreDamaged)
                    found.append(Found(refused.code))
                    continue
            begin, end = bounds(block, sequence)
            took += end - begin
            if took > max_bytes and took > end - begin:
                break
            record = block.records[begin:end]
            found.append(Found("", record) if record[TYPE_OFFSET] == msg_type(msg_id) else Found(Gone.code))
        return found

    def _recent(self, sequence: int) -> Block | None:
        """Return the block of a committed sequence, if it is in memory. Raises NotYet, Gone."""
        head = self._store.head
        if sequence > head.last:
            owed = self._owed(sequence)
            if owed is None:
                raise NotYet("no such message so far")
            return owed
        if sequence < head.floor:
            raise Gone("trimmed")
        if head.restored < sequence < head.below:
            raise NotYet("the partition is being restored")
        return self._table.get(sequence)

    def _stored(self, sequence: int) -> Block:
        """Return the block of a sequence from RocksDB. Raises StoreDamaged, Gone."""
        block = self._store.block_of(sequence)
        if block is not None:
            return block
        following = self._store.next_first(sequence)
        if following is not None and following >> MSG_COUNTER_BITS == sequence >> MSG_COUNTER_BITS and sequence & COUNTER_MASK:
            raise StoreDamaged("a block is missing")
        raise Gone("cut off before it was committed")

    def rows(self, begin: bytes, max_bytes: int = MAX_PAGE_BYTES, max_rows: int = MAX_PAGE_ROWS) -> list[Row]:
        """Return stored rows from a key on: at least one if there is any. Raises StoreDamaged, DiskFailed."""
        found: list[Row] = []
        cursor = self._store.cursor()
        row, took = cursor.seek(begin), 0
        while row is not None and len(found) < max_rows and took < max_bytes:
            found.append(row)
            took += len(row[0]) + len(row[1])
            row = cursor.next()
        return found

    def scan(self, begin: int, end: int, limit: int) -> Iterator[Block]:
        """Yield blocks with records from one sequence to another, both included, in order, until there are `limit` records.

        The first and the last block may contain more than that. Raises StoreDamaged, DiskFailed.
        """
        expected = 0
        for block in self._store.scan(max(begin, self._store.head.floor)):
            if block.first > min(end, MAX_MSG_SEQUENCE) or limit <= 0:
                return
            if expected and block.first != expected and block.first >> MSG_COUNTER_BITS == expected >> MSG_COUNTER_BITS:
                raise StoreDamaged(f"the blocks from sequence {expected:012x} to {block.first:012x} are missing")
            expected = block.last + 1
            limit -= block.count
            yield block

    def first_at_or_after(self, sequence: int) -> int | None:
        """The first sequence of a record at or after one; None at the end. Raises StoreDamaged, DiskFailed."""
        sequence = max(sequence, self._store.head.floor, 1)
        return sequence if self._store.last_before(sequence + 1) >= sequence else self._store.next_first(sequence)

    def last_before(self, sequence: int) -> int:
        """The last sequence of a record before one; 0: there is none. Raises StoreDamaged, DiskFailed."""
        return min(self._store.last_before(sequence), max(sequence - 1, 0))

    def marks(self, begin: int) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, clock µs, bytes stored before it) of every mark from a sequence on. Raises StoreDamaged, DiskFailed."""
        return self._store.marks(begin)

    def stored_since(self, at_us: int) -> int | None:
        """The first sequence of a record stored at a time or later; None: there is none. Raises StoreDamaged, DiskFailed."""
        begin = self._store.head.floor
        for sequence, marked_us, _ in self._store.marks():
            if marked_us >= at_us:
                break
            begin = max(begin, sequence)
        for block in self._store.scan(begin):
            if block.at_us >= at_us:
                return max(block.first, self._store.head.floor)
        return None
