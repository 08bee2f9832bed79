"""Export of a Pi: inboxes, cursors and devices as Arrow record batches, from the store as it is on the disk, on any replica.

Positions are keys of the store. A reader names the counter up to which entries must be applied: the export waits until a
transaction holds them. Rows that come or go while it reads may be in it or not.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from cluster.process.context import Context
from cluster.store.export.export import PART_ROWS, Breath, Part
from cluster.store.export.service import ExportService
from pi.inboxes.chunk import Chunk
from pi.inboxes.inbox import Head, User
from pi.keys import CHUNK_KEY, CURSOR_KEY, CURSOR_VALUE, EPOCH_S, INBOX_KEY, USER_KEY, unseal
from pi.store.machine import Machine
from pi.store.store import StateStore
from pixiu.errors import NotYet
from pixiu.ids import MAX_ID
from pixiu.wire.export_tables import ACKNOWLEDGEMENTS, DEVICES, HEADS, INBOXES, Columns, tables_of
from pixiu.wire.v1 import export_pb2

if TYPE_CHECKING:
    import pyarrow as pa

PAGE_ROWS: Final = 2048
"""Rows read from the store at a time."""
APPLIED_S: Final = 10.0
"""Time limit of an export's wait for the requested transaction, seconds."""
POLL_S: Final = 0.02
_SIGN: Final = 1 << 63

Row = dict[str, Any]


def _signed(bits: int) -> int:
    """64 bits as a signed number."""
    return bits - (1 << 64) if bits & _SIGN else bits


def _micros(seconds: int) -> int:
    return (seconds + EPOCH_S) * 1_000_000


def _entries(key: bytes, value: bytes) -> Sequence[Row]:
    _, uin, lane, begin = CHUNK_KEY.unpack(key)
    chunk = Chunk.decode(begin, key, value)
    return [
        {"uin": uin, "lane": lane, "inbox_seq": seq, "msg_id": msg_id, "appended_at": _micros(at_s)}
        for seq, (msg_id, at_s) in enumerate(chunk, chunk.first)
    ]


def _head(key: bytes, value: bytes) -> Sequence[Row]:
    _, uin, lane = INBOX_KEY.unpack(key)
    head = Head.decode(unseal(key, value))
    found = {name: getattr(head, name) for name in ("last", "floor", "base", "gap", "dropped")}
    return ({"uin": uin, "lane": lane, **found},)


def _cursor(key: bytes, value: bytes) -> Sequence[Row]:
    _, uin, device, lane = CURSOR_KEY.unpack(key)
    up_to, bits = CURSOR_VALUE.unpack(unseal(key, value))
    return ({"uin": uin, "device": device, "lane": lane, "up_to": up_to, "map": _signed(bits)},)


def _devices(key: bytes, value: bytes) -> Sequence[Row]:
    (_, uin), user = USER_KEY.unpack(key), User.decode(unseal(key, value))
    return [
        {"uin": uin, "device": number, "session": each.session, "seen_at": _micros(each.seen_s), "client_id": each.client_id}
        for number, each in user.devices.items()
    ]


_TABLES: Final[dict[str, tuple[bytes, Callable[[bytes, bytes], Sequence[Row]]]]] = {
    INBOXES: (b"K", _entries),
    HEADS: (b"H", _head),
    ACKNOWLEDGEMENTS: (b"C", _cursor),
    DEVICES: (b"U", _devices),
}
"""The first byte of a table's keys, and a function from a stored value to rows. It raises StateDamaged."""


class Export:
    """Reads the rows of one request, a part at a time. Its methods must be called in one thread.

    Args:
        partition: of the Pi.
        store: returns the current store: a snapshot may replace it.
        table: its name.
        columns: wanted.
        users: whose rows are wanted; none: everybody's.
        after: the key after which to go on; empty: from the start.
    """

    def __init__(
        self, partition: int, store: Callable[[], StateStore], table: str, columns: Columns, users: frozenset[int], after: bytes
    ) -> None:
        self._partition, self._store, self._columns = partition, store, columns
        self._prefix, self._rows_of = _TABLES[table]
        self._after = after
        every = [(self._prefix, bytes([self._prefix[0] + 1]))]
        wanted = [(self._of_user(uin), self._of_user(uin + 1)) for uin in sorted(users) if uin <= MAX_ID]
        self._ranges = [(low, high) for low, high in (wanted if users else every) if high > after]
        """Ranges of keys still to be read."""

    def _of_user(self, uin: int) -> bytes:
        return self._prefix + uin.to_bytes(8, "big")

    def part(self) -> Part:
        """The next rows. Raises StateDamaged, DiskFailed."""
        found: list[Row] = []
        seen, breath = 0, Breath()
        reader = self._store().reader()
        try:
            while self._ranges and max(seen, len(found)) < PART_ROWS:
                low, high = self._ranges[0]
                start = max(low, self._after + b"\0") if self._after else low
                rows, following = reader.rows(start, PAGE_ROWS)
                seen += PAGE_ROWS if len(rows) == PAGE_ROWS else len(rows) + 1
                for key, value in rows:
                    if key >= high or len(found) >= PART_ROWS:
                        break
                    found += self._rows_of(key, value)
                    self._after = key
                    breath.take()
                if len(found) < PART_ROWS and (following is None or rows[-1][0] >= high):
                    self._ranges.pop(0)
        finally:
            reader.close()
        return Part(self._batch(found), after=self._after, last=not self._ranges)

    def _batch(self, rows: list[Row]) -> pa.RecordBatch | None:
        import pyarrow as pa  # a process that exports nothing saves Arrow's 40 MiB

        from cluster.store.export.arrow import schema_of

        if not rows:
            return None
        for row in rows:
            row["pi_partition"] = self._partition
        return pa.RecordBatch.from_pylist(rows, schema=schema_of(self._columns))


class PiExport(ExportService):
    """Serves `pixiu.v1.Export` of a Pi."""

    TABLES = tables_of("pi")

    def __init__(self, context: Context[Any], machine: Machine) -> None:
        super().__init__(context)
        self._machine, self.reading = machine, machine.writing

    @property
    def opened(self) -> bool:
        """True while the state can be read."""
        return self._machine.opened

    def bounds(self, request: export_pb2.BoundsRequest) -> export_pb2.BoundsReply:
        """Report the applied position of the state."""
        return export_pb2.BoundsReply(applied=self._machine.applied)

    async def parts(self, request: export_pb2.RowsOfRequest, columns: Columns, users: frozenset[int]) -> Callable[[], Part]:
        """Wait until the store holds the wanted entries; then read rows in the order of their keys. Raises NotYet."""
        machine, until = self._machine, asyncio.get_running_loop().time() + APPLIED_S
        while machine.flushed < request.applied:
            if asyncio.get_running_loop().time() > until:
                raise NotYet(f"this replica's store holds the log up to {machine.flushed}, and not {request.applied}")
            await asyncio.sleep(POLL_S)
        return Export(self._partition, lambda: machine.store, request.table, columns, users, request.after).part
