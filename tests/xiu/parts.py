"""Records, entries, and twins in memory of a Xiu's store, table and log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cluster.replication.model import START, Entry, Position
from pixiu.errors import StoreDamaged
from pixiu.ids import snowflake
from pixiu.wire.record import Kind, encode
from xiu.records import block as blocks
from xiu.records.block import Block
from xiu.state.keys import BLOCKS, HEAD_KEY, KEY, MARK, MARKS
from xiu.state.state import Blocked, Decision, Head, XiuKind, store_entry

NOW_MS = 1_750_000_000_000
NOW_US = NOW_MS * 1000
EMPTY = Head()


def mail(number: int, body: bytes = b"body", *, key: int = 0, at_ms: int = NOW_MS, flags: int = 0, type_: int = 64) -> bytes:
    """A record whose SnowflakeID is made from a number below 1024."""
    return encode(Kind.MAIL, key, body, snowflake(at_ms, 1, number), flags=flags, type=type_)


def store(counter: int, *records: bytes, epoch: int = 1, at_us: int = NOW_US) -> Entry:
    return Entry(epoch, counter, int(XiuKind.STORE), at_us, store_entry(b"".join(records), len(records)))


class MemoryStore:
    """RocksDB's twin: what was flushed survives `crash`. It begins with `head`."""

    def __init__(self, head: Head = EMPTY) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.flushed: dict[bytes, bytes] = {}
        self.head = self._begins = head
        self.blocked: Blocked | None = None
        self.reopened = 0
        self.unreadable: set[bytes] = set()
        self.broken = False
        """Whether it takes no writes, as RocksDB after it met damage by itself."""

    def get_many(self, keys: list[bytes]) -> Sequence[bytes | None]:
        if not self.unreadable.isdisjoint(keys):
            raise StoreDamaged("page")
        return [self.rows.get(key) for key in keys]

    def row_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        found = max((there for there in self.rows if there <= key), default=None)
        if found is not None and found in self.unreadable:
            raise StoreDamaged("page")
        return None if found is None else (found, self.rows[found])

    def write(self, decisions: Iterable[Decision]) -> None:
        if self.blocked is not None:
            raise self.blocked
        if self.broken:
            raise StoreDamaged("closed for writes")
        for decision in decisions:
            self.rows.update(decision.puts)
            for begin, end in decision.deletes:
                for key in [key for key in self.rows if begin <= key < end]:
                    del self.rows[key]
            self.head = decision.head
        self.rows[HEAD_KEY] = self.head.encode()

    def flush(self) -> None:
        self.flushed = dict(self.rows)

    def crash(self) -> None:
        self.rows = dict(self.flushed)
        head = Head.decode(self.rows[HEAD_KEY]) if self.rows else self._begins
        assert head is not None
        self.head = head

    def reopen(self) -> None:
        self.reopened += 1
        self.crash()

    def _space(self, space: bytes, begin: int = 0) -> list[tuple[int, bytes]]:
        found = [(KEY.unpack(key)[1], value) for key, value in self.rows.items() if key[:1] == space]
        return sorted(row for row in found if row[0] >= begin)

    def repaired(self) -> None:
        """The same rows, all readable, in another store."""
        self.unreadable, self.broken = set(), False

    def marks(self, begin: int = 0) -> Iterator[tuple[int, int, int]]:
        if any(key[:1] == MARKS for key in self.unreadable):
            raise StoreDamaged("page")
        for sequence, value in self._space(MARKS):
            if sequence >= begin:
                yield (sequence, *MARK.unpack(value))

    def next_first(self, sequence: int) -> int | None:
        return next((first for first, _ in self._space(BLOCKS, sequence)), None)

    def block_of(self, sequence: int) -> Block | None:
        return next((block for block in self.blocks() if block.first <= sequence <= block.last), None)

    def blocks(self) -> list[Block]:
        found = [blocks.decode(first, value) for first, value in self._space(BLOCKS)]
        assert None not in found
        return [block for block in found if block is not None]


class MemoryLog:
    """As much of a log as a Xiu's core reads."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    @property
    def last(self) -> Position:
        return self.entries[-1].position if self.entries else START

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        return self.entries[after : after + max_entries]


class MemoryTable:
    """As much of a table as a Xiu's core uses."""

    def __init__(self) -> None:
        self.space = True
        self.there: dict[int, bool] = {}

    def has_space(self, records_bytes: int) -> bool:
        return self.space

    def put(self, new: Sequence[tuple[Block, bytes]], persisted: bool) -> bool:
        self.there.update({block.first: persisted for block, _ in new})
        return True

    def persisted(self, firsts: Iterable[int]) -> None:
        self.there.update(dict.fromkeys(firsts, True))

    def dropped(self) -> int:
        before = len(self.there)
        self.there = {first: kept for first, kept in self.there.items() if kept}
        return before - len(self.there)

    def trim(self, floor: int) -> None:
        self.there = {first: kept for first, kept in self.there.items() if first >= floor}


class NoTable:
    """Everything is read from the store."""

    def get(self, sequence: int) -> None:
        return None
