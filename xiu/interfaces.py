"""Interfaces of Xiu's core to the log, to RocksDB and to the table of recent blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cluster.replication.model import Entry, Position
from xiu.records.block import Block
from xiu.state.dedupe import Reader
from xiu.state.state import Decision, Head


class Entries(Protocol):
    """The replicated log."""

    @property
    def last(self) -> Position:
        """Position of the last entry."""

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        """Return entries from `after` + 1 on."""


class Store(Reader, Protocol):
    """RocksDB."""

    head: Head

    def write(self, decisions: Iterable[Decision]) -> None:
        """Write decisions and the last one's head, all or none. Raises Blocked."""

    def reopen(self) -> None:
        """Go back to the durable state, and accept writes again, after repeated failures. Raises Blocked, StorageError."""

    def marks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, clock µs, bytes before) of every mark."""

    def next_first(self, sequence: int) -> int | None:
        """Return the first sequence of the first block at or after one."""


class Table(Protocol):
    """The table of recent blocks."""

    def has_space(self, records_bytes: int) -> bool:
        """Return True if unpersisted records of this size fit."""

    def put(self, new: Sequence[tuple[Block, bytes]], persisted: bool) -> bool:
        """Add blocks and their values."""

    def persisted(self, firsts: Iterable[int]) -> None:
        """Mark blocks as stored."""

    def dropped(self) -> int:
        """Drop unpersisted blocks; return their number."""

    def trim(self, floor: int) -> None:
        """Remove blocks below a sequence."""
