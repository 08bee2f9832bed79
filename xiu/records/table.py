"""The newest and the most read blocks of records in shared memory: read without RocksDB, and kept across a restart.

    key    sequence u64 of a block's first record, big-endian     value  the block (`xiu.records.block`), with its CRC-32 and time
    key    b"m"                                                   MemberID u64: the owner of these blocks

See `cluster.process.shared_memory`. The persisted blocks (in the state, not only in the log) that were read or written longest ago
are evicted. Unpersisted blocks stay; when they alone fill the table, writers are pushed back. The order of use is kept in the
process; after a start it is by sequence.

Source: PiXiu §6.1.1 step 5; docs/stores.md.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb

from cluster.process import shared_memory
from cluster.replication.model import MemberID
from pixiu.errors import ConfigurationError
from xiu.records import block as blocks
from xiu.records.block import HEAD_BYTES, KEY, MAX_BLOCK_BYTES, Block

MEMBER_KEY: Final = b"m"
PAGE: Final = 4096
INLINE_BYTES: Final = 1900
"""A larger value takes whole pages of its own."""
USED_PERCENT: Final = 60
"""Percentage of the memory that blocks may take: pages freed by a transaction are usable by the next but one, and large blocks need
contiguous pages."""
MIN_BYTES: Final = 16 * MAX_BLOCK_BYTES
FULL_TRIES: Final = 6
"""Each evicts an eighth before it writes again."""
RECOVER_CHUNK: Final = 64


TRIES: Final = 2
"""A damaged table is removed, and a new one made: the log has its content."""


def charged(records_bytes: int) -> int:
    """Bytes of the table that a block takes."""
    value = records_bytes + HEAD_BYTES
    return (value + 40) * 2 if value <= INLINE_BYTES else (value + 16 + PAGE - 1) // PAGE * PAGE + 64


@dataclass(slots=True)
class TableCounters:
    """Totals of the table since the start."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    damaged: int = 0
    """Blocks with a wrong CRC: they are removed and read from RocksDB."""
    not_kept: int = 0
    """Persisted blocks for which there was no space."""


class Table:
    """The table of recent blocks of one partition, in shared memory.

    Args:
        folder: on a tmpfs; created if missing.
        size_bytes: total size.
        member: owner of its blocks; another member's are removed.

    Raises ConfigurationError if another process has it, OSError or lmdb.Error if it cannot be opened.
    """

    def __init__(self, folder: Path, size_bytes: int, member: MemberID) -> None:
        self.folder = folder
        self.counters = TableCounters()
        self.capacity = max(size_bytes * USED_PERCENT // 100, MIN_BYTES // 2)
        advice = "give every Xiu its own xiu.table_name"
        self._lock = shared_memory.lock_folder(folder, f"the table {folder} is in use; {advice}")
        try:
            self._db = shared_memory.open_environment(folder, size_bytes)
            try:
                self._check_member(member)
            except BaseException:
                self._db.close()
                raise
        except BaseException:
            self._lock.close()
            raise
        self._persisted: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """First sequence → (last sequence, bytes), the least recently used one first."""
        self._unpersisted: dict[int, tuple[int, int]] = {}
        self._bytes = 0
        self._unpersisted_bytes = 0

    def _check_member(self, member: MemberID) -> None:
        mine = int(member).to_bytes(8, "little")
        with self._db.begin(write=True) as transaction:
            if transaction.get(MEMBER_KEY) != mine:
                transaction.drop(self._db.open_db(txn=transaction), delete=False)
                transaction.put(MEMBER_KEY, mine)

    def recover(self, written: Callable[[Sequence[int]], Sequence[bool]]) -> list[Block]:
        """Take over blocks of an earlier process. Returns the unpersisted ones, which stay until they are `dropped` or `persisted`;
        damaged ones are removed.

        Args:
            written: checks by first sequences which blocks are in RocksDB.
        """
        left: list[Block] = []
        bad: list[bytes] = []
        chunk: list[Block] = []
        with self._db.begin() as transaction:
            for key, value in transaction.cursor():
                if len(key) != KEY.size:
                    continue
                block = blocks.decode(KEY.unpack(key)[0], value)
                if block is None:
                    bad.append(key)
                    continue
                chunk.append(block)
                if len(chunk) == RECOVER_CHUNK:
                    left += self._take_over(chunk, written)
                    chunk = []
        left += self._take_over(chunk, written)
        self.counters.damaged += len(bad)
        with self._db.begin(write=True) as transaction:
            for key in bad:
                transaction.delete(key)
        return left

    def _take_over(self, chunk: list[Block], written: Callable[[Sequence[int]], Sequence[bool]]) -> list[Block]:
        left: list[Block] = []
        for block, is_written in zip(chunk, written([block.first for block in chunk]), strict=True):
            size = charged(len(block.records))
            self._bytes += size
            if is_written:
                self._persisted[block.first] = block.last, size
            else:
                left.append(block)
                self._unpersisted[block.first] = block.last, size
                self._unpersisted_bytes += size
        return left

    @property
    def used_bytes(self) -> int:
        """Bytes that the blocks take."""
        return self._bytes

    @property
    def unpersisted(self) -> int:
        """Number of blocks that are not in the state yet."""
        return len(self._unpersisted)

    def has_space(self, records_bytes: int) -> bool:
        """True if unpersisted records of this size fit beside those that are there."""
        return self._unpersisted_bytes + charged(records_bytes) <= self.capacity

    def put(self, new: Sequence[tuple[Block, bytes]], persisted: bool) -> bool:
        """Add blocks and their values. False: there is no space; persisted ones are then only in RocksDB."""
        sizes = [charged(len(block.records)) for block, _ in new]
        for block, _ in new:
            self._forget(block.first)
        self._evict(self._bytes + sum(sizes) - self.capacity)
        for _ in range(FULL_TRIES):
            try:
                with self._db.begin(write=True) as transaction:
                    for block, value in new:
                        transaction.put(KEY.pack(block.first), value)
            except lmdb.MapFullError:
                if not self._evict(max(self._bytes // 8, 1)):
                    break
                continue
            for (block, _), size in zip(new, sizes, strict=True):
                self._bytes += size
                if persisted:
                    self._persisted[block.first] = block.last, size
                else:
                    self._unpersisted[block.first] = block.last, size
                    self._unpersisted_bytes += size
            return True
        self.counters.not_kept += len(new)
        self._delete([block.first for block, _ in new])
        return False

    def persisted(self, firsts: Iterable[int]) -> None:
        """Mark blocks as stored in the state: they may be evicted from here on."""
        for first in firsts:
            known = self._unpersisted.pop(first, None)
            if known is not None:
                self._unpersisted_bytes -= known[1]
                self._persisted[first] = known

    def dropped(self) -> int:
        """Drop unpersisted blocks, whose entries were cut off. Returns their number."""
        firsts = list(self._unpersisted)
        for first in firsts:
            self._forget(first)
        self._delete(firsts)
        return len(firsts)

    def clear(self) -> None:
        """Remove all blocks: another state replaced theirs."""
        self._persisted.clear()
        self._unpersisted.clear()
        self._bytes = self._unpersisted_bytes = 0
        with self._db.begin(write=True) as transaction:
            member = transaction.get(MEMBER_KEY) or b""
            transaction.drop(self._db.open_db(txn=transaction), delete=False)
            transaction.put(MEMBER_KEY, member)

    def trim(self, floor: int) -> None:
        """Remove blocks below a sequence."""
        gone = [first for first, (last, _) in self._persisted.items() if last < floor]
        for first in gone:
            self._forget(first)
        self._delete(gone)

    def get(self, sequence: int) -> Block | None:
        """Return the persisted block that contains a sequence, its CRC checked."""
        with self._db.begin() as transaction, transaction.cursor() as cursor:
            found = cursor.set_range(KEY.pack(sequence))
            if not found:
                found = cursor.last()
            if found and (len(cursor.key()) != KEY.size or KEY.unpack(cursor.key())[0] > sequence):
                found = cursor.prev()
            if not found or len(cursor.key()) != KEY.size:
                self.counters.misses += 1
                return None
            first: int = KEY.unpack(cursor.key())[0]
            known = self._persisted.get(first)
            if known is None or known[0] < sequence:
                self.counters.misses += 1
                return None
            block = blocks.decode(first, cursor.value())
        if block is None:
            self.counters.damaged += 1
            self._forget(first)
            self._delete([first])
            return None
        self._persisted.move_to_end(first)
        self.counters.hits += 1
        return block

    def _forget(self, first: int) -> None:
        known = self._persisted.pop(first, None)
        if known is None:
            known = self._unpersisted.pop(first, None)
            if known is None:
                return
            self._unpersisted_bytes -= known[1]
        self._bytes -= known[1]

    def _evict(self, wanted: int) -> bool:
        """Evict persisted blocks of this size, the least recently used first. False if there is none."""
        firsts: list[int] = []
        while wanted > 0 and self._persisted:
            first, (_, size) = self._persisted.popitem(last=False)
            self._bytes -= size
            wanted -= size
            firsts.append(first)
        self.counters.evicted += len(firsts)
        self._delete(firsts)
        return bool(firsts)

    def _delete(self, firsts: Sequence[int]) -> None:
        if not firsts:
            return
        with contextlib.suppress(lmdb.MapFullError), self._db.begin(write=True) as transaction:
            for first in firsts:
                transaction.delete(KEY.pack(first))

    def close(self, remove: bool = False) -> None:
        """Close the table; with `remove` delete it."""
        self._db.close()
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def open_table(folder: Path, size_bytes: int, member: MemberID) -> Table:
    """Open the table in a folder, a new one if it is unreadable. Raises ConfigurationError."""
    why = ""
    for _ in range(TRIES):
        try:
            return Table(folder, size_bytes, member)
        except (OSError, lmdb.Error) as error:
            shutil.rmtree(folder, ignore_errors=True)
            why = str(error)
    raise ConfigurationError(
        f"no table of {size_bytes >> 20} MiB in {folder}: {why}; set xiu.table_dir to a folder on a tmpfs that has space for "
        "xiu.table_mb"
    )
