"""Export of a Xiu: its messages as Arrow record batches, from any position to any other, on any replica.

Positions are sequences (Partition_Msg_IDs); they are dense within an epoch of leaders.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from cluster.process.context import Context
from cluster.store.export.export import PART_BYTES, PART_ROWS, Breath, Part
from cluster.store.export.service import ExportService
from pixiu.errors import Gone, NotYet, Unavailable
from pixiu.ids import MAX_MSG_SEQUENCE, MSG_COUNTER_BITS
from pixiu.wire.export_tables import Columns, tables_of
from pixiu.wire.record import SIZE_FIELD
from pixiu.wire.v1 import export_pb2
from xiu.core import Core
from xiu.export.holding import Holding
from xiu.records.block import Block
from xiu.state.readers import EVERYTHING
from xiu.state.state import Head

NO_LIMIT: Final = MAX_MSG_SEQUENCE
"""Limit of a scan: it counts whole blocks, including records before the first position."""


class Messages(Protocol):
    """Interface of `xiu.store.reading.Reading` to an export."""

    @property
    def head(self) -> Head:
        """The head of the readable state."""

    def scan(self, begin: int, end: int, limit: int) -> Iterator[Block]:
        """Yield blocks with records from one sequence to another, both included."""

    def first_at_or_after(self, sequence: int) -> int | None:
        """Return the first sequence of a record at or after one; None at the end."""

    def last_before(self, sequence: int) -> int:
        """Return the last sequence of a record before one; 0: there is none."""

    def marks(self, begin: int) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, clock µs, bytes stored before it) of every mark from a sequence on: one in a mebibyte or a minute."""

    def stored_since(self, at_us: int) -> int | None:
        """Return the first sequence of a record stored at a time or later; None: there is none."""


class Export:
    """Reads the rows of one request, a part at a time. Its methods must be called in one thread.

    Args:
        partition: of the Xiu.
        messages: stored ones.
        columns, users: see `Rows`.
        begin: the first position.
        end: after the last one.
    """

    def __init__(self, partition: int, messages: Messages, columns: Columns, users: frozenset[int], begin: int, end: int) -> None:
        self._partition, self._messages, self._columns, self._users = partition, messages, columns, users
        self._next, self._end = begin, end

    def part(self) -> Part:
        """Read the next rows. Raises Gone if they were trimmed meanwhile, StoreDamaged, DiskFailed."""
        check_floor(self._next, self._messages.head)
        from xiu.export.rows import Rows  # a process that exports nothing saves Arrow's 40 MiB

        rows, breath = Rows(self._partition, self._columns, self._users), Breath()
        seen = size = 0
        for block in self._messages.scan(self._next, self._end - 1, NO_LIMIT):
            begin, end = max(block.first, self._next), min(block.last, self._end - 1)
            rows.add(block, begin, end)
            self._next = end + 1
            seen += end - begin + 1
            size += len(block.records)
            if seen >= PART_ROWS or size >= PART_BYTES:
                return Part(rows.batch(), self._next, last=self._next >= self._end)
            breath.take()
        self._next = self._end
        return Part(rows.batch(), self._end, last=True)


def check_floor(position: int, head: Head) -> None:
    """Raise Gone if the record at a position was trimmed."""
    if position < head.floor:
        raise Gone(f"position {position} was trimmed by retention; the first that is stored is {head.floor}")


def check_restored(begin: int, end: int, head: Head) -> None:
    """Raise NotYet if a restore may still bring messages between two positions, the end excluded."""
    if begin < min(end, head.below) and end > head.restored + 1:
        raise NotYet("the partition is being restored: read again when `pixiu pipeline restore` has ended")


def advance(messages: Messages, begin: int, end: int, limit: int) -> tuple[int, int]:
    """Return the position after `limit` rows from `begin` on, at most `end`, and the number of rows between `begin` and it.

    Sequences are dense within an epoch: a few look-ups, however many rows there are.
    """
    position, left = begin, limit
    while left > 0 and position < end:
        first = messages.first_at_or_after(position)
        if first is None or first >= end:
            return end, limit - left
        next_epoch = (first >> MSG_COUNTER_BITS) + 1 << MSG_COUNTER_BITS
        last = messages.last_before(min(next_epoch, end))
        take = min(left, last - first + 1)
        position, left = first + take, left - take
    return position, limit - left


def _scanned(messages: Messages, begin: int, end: int) -> int:
    """Bytes of the records from one position to another, read from their blocks."""
    found = 0
    for block in messages.scan(begin, end - 1, NO_LIMIT) if begin < end else ():
        low, high = block.range_of(max(block.first, begin), min(block.last, end - 1))
        found += high - low
    return found


def size(messages: Messages, begin: int, end: int) -> int:
    """Return the bytes of the records from one position to another, the end excluded: by marks, and of two mebibytes of blocks."""
    first = last = None
    for sequence, _, before in messages.marks(begin):
        if sequence > end:
            break
        last = sequence, before
        first = first or last
    if first is None or last is None:
        return _scanned(messages, begin, end)
    return _scanned(messages, begin, first[0]) + max(0, last[1] - first[1]) + _scanned(messages, last[0], end)


def advance_bytes(messages: Messages, begin: int, end: int, limit: int) -> tuple[int, int]:
    """Return the position after records of at most `limit` bytes from `begin` on, and their bytes; the first record counts,
    whatever its size is. By marks, and of two mebibytes of blocks."""
    position, took, base = begin, 0, None
    for sequence, _, before in messages.marks(begin):
        if sequence > end:
            break
        more = _scanned(messages, begin, sequence) if base is None else max(0, before - base)
        if took + more > limit:
            break
        position, took, base = sequence, took + more, before
    for block in messages.scan(position, end - 1, NO_LIMIT) if position < end else ():
        first, last = max(block.first, position), min(block.last, end - 1)
        at, whole = block.range_of(first, last)
        if took + whole - at <= limit:
            position, took = last + 1, took + whole - at
            continue
        for sequence in range(first, last + 1):
            record = SIZE_FIELD + int.from_bytes(block.records[at : at + SIZE_FIELD], "little")
            if took and took + record > limit:
                break
            position, took, at = sequence + 1, took + record, at + record
        break
    return position, took


def bounds(messages: Messages, request: export_pb2.BoundsRequest) -> export_pb2.BoundsReply:
    """Report bounds of positions. Raises StoreDamaged, DiskFailed."""
    head = messages.head
    end = head.last + 1
    begin, stop = max(request.begin, head.floor), min(request.end or end, end)
    reply = export_pb2.BoundsReply(first=head.floor, end=end, applied=head.applied.counter)
    reply.rows = advance(messages, begin, stop, end)[1]
    if request.limit:
        reply.advanced = advance(messages, begin, stop, request.limit)[0]
    if request.limit_bytes:
        reply.advanced, reply.bytes = advance_bytes(messages, begin, stop, request.limit_bytes)
    elif request.sizes:
        reply.bytes = size(messages, begin, stop)
    if request.at_us:
        found = messages.stored_since(request.at_us)
        reply.at = end if found is None else found
    return reply


class Shell(Protocol):
    """Interface of the role to the service."""

    @property
    def reading(self) -> Messages | None:
        """Readable messages while the partition is open."""

    @property
    def core(self) -> Core | None:
        """The core while the partition is open."""

    @property
    def holding(self) -> Holding:
        """The readers for which retention waits."""


class XiuExport(ExportService):
    """Serves `pixiu.v1.Export` of a Xiu."""

    TABLES = tables_of("xiu")

    def __init__(self, context: Context[Any], shell: Shell) -> None:
        super().__init__(context)
        self._shell = shell

    @property
    def opened(self) -> bool:
        """True while messages can be read."""
        return self._shell.reading is not None

    def bounds(self, request: export_pb2.BoundsRequest) -> export_pb2.BoundsReply:
        """Report bounds of positions. Raises StoreDamaged, DiskFailed."""
        core, reply = self._shell.core, bounds(self._messages(), request)
        reply.leads = core is not None and core.epoch > 0
        return reply

    async def parts(self, request: export_pb2.RowsOfRequest, columns: Columns, users: frozenset[int]) -> Callable[[], Part]:
        """Read messages in order. Raises NotYet."""
        messages = self._messages()
        if request.end > messages.head.last + 1:
            raise NotYet(f"this replica has no position {request.end - 1} so far; its last is {messages.head.last}")
        check_restored(request.begin, request.end, messages.head)
        return Export(self._partition, messages, columns, users, request.begin, max(request.begin, request.end)).part

    def reader_lags(self) -> dict[str, int]:
        """The rows after the position that each reader holds, by its name; of the leader alone. Raises StoreDamaged, DiskFailed."""
        core, messages = self._shell.core, self._shell.reading
        if core is None or messages is None or not core.epoch:
            return {}
        end = messages.head.last + 1
        return {name: advance(messages, held.position, end, end)[1] for name, held in self._shell.holding.readers.items()}

    async def hold(self, reader: str, position: int | None) -> None:
        """Note a reader in the partition's log."""
        await self._shell.holding.hold(reader, EVERYTHING if position is None else position)

    def _messages(self) -> Messages:
        found = self._shell.reading
        if found is None:
            raise Unavailable("this Xiu is not open; try again soon")
        return found
