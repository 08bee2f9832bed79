"""Repair of a Xiu's damage: reads are answered from another replica, and the store is built anew with its rows.

    a read meets damage ──▶ the same read of another replica, its records' CRCs checked ──▶ the answer
                        └─▶ once: a copy of the store, damaged places from that replica ──▶ takes the store's place

Without a replica that has the record: STORE_DAMAGED, as without replicas.

Source: docs/stores.md, docs/replication.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from cluster.process.context import Context
from cluster.replication.replica import Replica
from cluster.store.repair.digests import Digests
from cluster.store.repair.repairer import StoreRepairer
from cluster.wire.v1 import repair_pb2
from pixiu.discovery.node import Node
from pixiu.errors import Overloaded, PixiuError, StoreDamaged, Unavailable
from pixiu.ids import MAX_MSG_SEQUENCE
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import blocking_peer_channel, peer_channel
from pixiu.wire.record import crc_ok, offsets
from pixiu.wire.record import split as split_records
from pixiu.wire.v1 import xiu_pb2
from pixiu.wire.v1.xiu_pb2_grpc import XiuStub
from xiu.store.machine import Machine
from xiu.store.reading import MAX_FETCH_BYTES, Found
from xiu.store.repair import Checked, Row, verify
from xiu.store.store import Store

REPAIR_BEGINS: Final = "store_repair_begins"
REPAIRED: Final = "store_repaired"
NOT_REPAIRED: Final = "store_not_repaired"
READ_ELSEWHERE: Final = "store_read_elsewhere"
CALL_S: Final = 10.0
MAX_CALLS: Final = 16
"""Limit of concurrent reads from another replica. Policy: further ones are STORE_DAMAGED."""
AGAIN_S: Final = 60.0
"""Interval of repairs begun by reads, seconds: a repair that failed would fail again at once."""
BEHIND_S: Final = 10.0
"""Time limit of a repair's wait for another replica, seconds: to be in sync, registered and reachable, and to have applied as much
as this one. Policy: a restarted one is back within seconds; without one the repair raises Unavailable."""
BEHIND_POLL_S: Final = 0.1
REPAIR_TRIES: Final = 3


@dataclass(slots=True)
class Counters:
    """Totals of repairs since the start."""

    reads_repaired: int = 0
    """Records answered from another replica."""
    repairs: int = 0
    repairs_failed: int = 0
    rows_repaired: int = 0


class Repairer(StoreRepairer):
    """Repairs one replica's store with the help of the others.

    Args:
        context: of the process.
        machine: its state.
        replica: its log.
        catch_up, on_adopted: see `Machine.rebuild`.
    """

    RANGES = "Partition_Msg_IDs"

    def __init__(
        self,
        context: Context[Any],
        machine: Machine,
        replica: Replica,
        catch_up: Callable[[Store], bool],
        on_adopted: Callable[[], None],
    ) -> None:
        super().__init__(context, replica)
        self._machine, self._catch_up, self._on_adopted = machine, catch_up, on_adopted
        self.counters = Counters()
        self._calls = 0
        self._busy = asyncio.Lock()
        self._next_s = 0.0
        self._logged = self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def opened(self) -> bool:
        """True while the store can be read."""
        return self._machine.opened

    def _peer(self) -> Node | None:
        return next(iter(self.others()), None)

    # --- reads

    async def fetch(self, msg_ids: Sequence[int], found: list[Found]) -> list[Found]:
        """Return the answers, with another replica's records in place of STORE_DAMAGED."""
        missing = [msg_id for msg_id, each in zip(msg_ids, found, strict=False) if each.code == StoreDamaged.code]
        peer = self._asked()
        if peer is None:
            return found
        self._calls += 1
        try:
            async with peer_channel(peer.address, "xiu", self._context.tls, PEER_CHANNEL) as channel:
                stub: Any = XiuStub(channel)
                reply = await stub.Fetch(xiu_pb2.FetchRequest(msg_ids=missing, local=True), timeout=CALL_S)
                there = dict(zip(missing, _records(reply), strict=False))
        except (grpc.aio.AioRpcError, StoreDamaged):
            return found
        finally:
            self._calls -= 1
        merged = [there.get(msg_id) or each for msg_id, each in zip(msg_ids, found, strict=False)]
        self._repaired(sum(new is not old for new, old in zip(merged, found, strict=True)))
        return _bounded(merged)

    async def scan(self, begin: int, end: int, limit: int) -> AsyncIterator[xiu_pb2.ScanReply]:
        """Continue a scan from another replica. Raises StoreDamaged if there is none, or if it breaks off."""
        peer = self._asked()
        if peer is None:
            raise StoreDamaged(f"the records from sequence {begin:012x} on are damaged, and no other replica is in sync")
        self._calls += 1
        try:
            async with peer_channel(peer.address, "xiu", self._context.tls, PEER_CHANNEL) as channel:
                stub: Any = XiuStub(channel)
                request = xiu_pb2.ScanRequest(begin=begin, end=end if end < MAX_MSG_SEQUENCE else 0, limit=limit, local=True)
                async for part in stub.Scan(request):
                    _check(part.batch, part.count)
                    self._repaired(part.count)
                    yield part
        except grpc.aio.AioRpcError as error:
            raise StoreDamaged(f"damaged here, and the replica {peer.address} breaks off: {error.details()}") from error
        finally:
            self._calls -= 1

    def _asked(self) -> Node | None:
        """The replica that a read with damage may ask; begins a repair if one is due."""
        peer = self._peer() if self._calls < MAX_CALLS else None
        now = time.monotonic()
        if peer is not None and not self._busy.locked() and now >= self._next_s:
            self._next_s = now + AGAIN_S
            self._task = asyncio.create_task(self._repair_by_itself())
        return peer

    def _repaired(self, records: int) -> None:
        self.counters.reads_repaired += records
        if records and not self._logged:
            self._logged = True
            self._context.log.error(READ_ELSEWHERE, text="stored records are damaged; they are read from another replica")

    # --- the store

    async def _repair_by_itself(self) -> None:
        try:
            await self.repair()
        except PixiuError as error:
            self._context.log.error(NOT_REPAIRED, error=str(error), code=error.code)

    async def repair(self) -> int:
        """Build the store anew with another replica's rows in damaged places; return their number. Raises DiskFull (no space
        for another store), Unavailable (no other replica within `BEHIND_S`), Overloaded (another repair is in progress),
        StorageError."""
        if self._busy.locked():
            raise Overloaded("a repair is under way")
        async with self._busy:
            try:
                taken = await self._rebuilt()
            except PixiuError:
                self.counters.repairs_failed += 1
                raise
        self.counters.repairs += 1
        self.counters.rows_repaired += taken
        self._logged = False
        self._context.log.warning(REPAIRED, rows=taken)
        return taken

    async def _rebuilt(self) -> int:
        """Rebuild from any replica available; a restarted one has another address."""
        self._machine.require_space()
        limit, asked = time.monotonic() + BEHIND_S, ""
        while True:
            peer = self._peer()
            try:
                if peer is None:
                    raise Unavailable("no other replica of this partition is in sync")
                if peer.address != asked:
                    asked = peer.address
                    self._context.log.warning(REPAIR_BEGINS, peer=asked)
                with blocking_peer_channel(peer.address, "xiu", self._context.tls, PEER_CHANNEL) as channel:
                    return await self._machine.rebuild(lambda applied: Rows(channel, applied), self._catch_up, self._on_adopted)
            except Unavailable:
                if self._closing or time.monotonic() > limit:
                    raise
            await asyncio.sleep(BEHIND_POLL_S)

    async def idle(self) -> None:
        """Wait until no repair is in progress."""
        async with self._busy:
            pass

    async def check(self, end: int = -1) -> Checked:
        """Read and check everything; `end`: see `verify`. Raises DiskFailed, Unavailable."""
        with closing(self._machine.store.cursor()) as cursor:
            return await asyncio.to_thread(verify, cursor, end)

    async def verify(self, repair: bool) -> repair_pb2.VerifyReply:
        """Check everything stored, and repair it if asked to. Raises DiskFailed, Unavailable."""
        checked = await self.check()
        damaged, before, text = checked.damaged, self.counters.rows_repaired, ""
        if damaged and repair:
            try:
                checked = await self._repaired_now()
            except PixiuError as error:
                text = f"{error.code}: {error}"
        return repair_pb2.VerifyReply(
            checked=checked.records, damaged=damaged, repaired=self.counters.rows_repaired - before, left=checked.damaged, text=text
        )

    async def _repaired_now(self) -> Checked:
        """Repair the store, or wait for a repair begun elsewhere; return the check after it. Raises PixiuError."""
        for _ in range(REPAIR_TRIES):
            await self.idle()
            checked = await self.check()
            if not checked.damaged:
                return checked
            try:
                await self.repair()
            except Overloaded:
                continue
            return await self.check()
        raise Overloaded("this replica keeps repairing itself; look at its log")

    def mark(self) -> int:
        """The highest sequence here."""
        return self._machine.store.head.last

    async def digests(self, mark: int, *, leads: bool) -> Digests:
        """Digest the blocks up to a sequence, which a leader may still be about to apply. Raises DiskFailed, Unavailable."""
        store, limit = self._machine.store, time.monotonic() + BEHIND_S
        while store.head.last < mark:
            if time.monotonic() > limit:
                raise Unavailable(f"this replica has no position {mark} within {BEHIND_S:.0f} s; compare again later")
            await asyncio.sleep(BEHIND_POLL_S)
        floor = store.head.floor
        return Digests(mark, (await self.check(mark)).ranges, floor)

    async def close(self) -> None:
        """Let a repair in progress end first, since it holds the store's files; one that waits for another replica fails."""
        self._closing = True
        await self.idle()
        if self._task is not None:
            await asyncio.wait({self._task})


class Rows:
    """Another replica's rows, page by page. Blocking.

    Args:
        channel: to it.
        applied: counter up to which it must have applied the log.
    """

    def __init__(self, channel: grpc.Channel, applied: int) -> None:
        self._stub: Any = XiuStub(channel)
        self._applied = applied

    def __call__(self, begin: bytes) -> Iterator[Row]:
        """Rows from a key on. Raises Unavailable, StoreDamaged."""
        while True:
            page = self._page(begin)
            if not page.keys:
                return
            if len(page.keys) != len(page.values) or page.keys[0] < begin:
                raise StoreDamaged("the other replica's rows are not in order")
            yield from zip(page.keys, page.values, strict=True)
            begin = page.keys[-1] + b"\0"

    def _page(self, begin: bytes) -> xiu_pb2.RowsReply:
        limit = time.monotonic() + BEHIND_S
        while True:
            try:
                page: xiu_pb2.RowsReply = self._stub.Rows(xiu_pb2.RowsRequest(begin=begin), timeout=CALL_S)
            except grpc.RpcError as error:
                details = getattr(error, "details", str)()
                raise Unavailable(f"the other replica does not give its rows: {details}") from error
            if page.applied >= self._applied:
                return page
            if time.monotonic() > limit:
                raise Unavailable(f"the other replica applied {page.applied} entries, this one {self._applied}")
            time.sleep(BEHIND_POLL_S)


def _records(reply: xiu_pb2.FetchReply) -> list[Found | None]:
    """The records of a fetch from another replica; None where it has none."""
    records = iter(_check(reply.batch, sum(not code for code in reply.codes)))
    return [None if code else Found("", next(records)) for code in reply.codes]


def _check(batch: bytes, count: int) -> list[bytes]:
    """Split a batch into records. Raises StoreDamaged if they are not whole."""
    if offsets(batch, 0, len(batch), count) is None:
        raise StoreDamaged("the other replica's answer is not a batch of records")
    records = split_records(batch, count)
    if not all(map(crc_ok, records)):
        raise StoreDamaged("the other replica's records have wrong CRCs")
    return records


def _bounded(found: list[Found]) -> list[Found]:
    """Cut answers to the size of one reply."""
    took = 0
    for index, each in enumerate(found):
        took += len(each.record)
        if took > MAX_FETCH_BYTES and index:
            return found[:index]
    return found
