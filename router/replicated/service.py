"""A router's side of a replicated table: takes entries from callers, passes them to its peers, compares with them.

    caller ── Put ──▶ replica ──▶ its database, synced   ┐
                          └── Put ──▶ every peer, likewise ┴──▶ the answer
    replica ── digests, every few seconds ──▶ peer ── what differs ──▶ replica

A replica takes what its peers have before it is Running. So whoever asks a Running replica after the answer finds the entry.

Source: docs/subscriptions.md, "Retained messages" and "Kept filters".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from structlog.typing import FilteringBoundLogger

from cluster.membership.replica.store import StoreError
from pixiu.discovery.node import Node
from pixiu.errors import InvalidArgument, Overloaded, PixiuError, Unavailable
from pixiu.placement.partition import is_partition_count
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import Tls, peer_channel
from router.replicated.store import TableStore, merged
from router.replicated.table import DIGESTS, MAX_EXPIRED, REMOVED_MS, E, Stored, Table

SYNC_S: Final = 5.0
"""Interval at which replicas compare their digests."""
SYNC_TIMEOUT_S: Final = 60.0
PEER_TIMEOUT_S: Final = 2.0
"""Time for a peer to take entries in one call; then it is asked again, as long as it is one of the live replicas, ..."""
PUT_TIMEOUT_S: Final = 10.0
"""... and for at most this time, after which the caller gets an error and the entries may be kept or not."""
RETRY_S: Final = 0.1
MAX_ENTRIES: Final = 1_000
"""Entries of one call. Policy: more are refused."""
PAGE_ENTRIES: Final = 1_000
PAGE_BYTES: Final = 256 << 10
"""Entries, and about as many bytes, of one page of an answer to `Sync`."""
STORE_SPARE_BYTES: Final = 64 << 20
TABLE_FAILED: Final = "table_store_failed"
TABLE_SYNC_FAILED: Final = "table_sync_failed"
TABLE_LOADED: Final = "table_loaded"
RETRY_MS: Final = 1_000


@dataclass(frozen=True)
class Form(Generic[E]):
    """A kind of table: its entries as protobuf messages, and its names."""

    name: str
    """In metrics and files: "retained"."""
    what: str
    """In errors: "retained messages"."""
    option: str
    """The option that limits its bytes."""
    wire: Any
    """The module with its messages: `Entry`, `Puts` and so on, each after `prefix`."""
    prefix: str
    stub: Callable[[grpc.aio.Channel], Any]
    read: Callable[[Any], E]
    """Gives the entry of a protobuf message."""
    write: Callable[[E], Any]
    """Gives the protobuf message of an entry."""

    def message(self, name: str) -> Any:
        """The class of a message."""
        return getattr(self.wire, self.prefix + name)


class Replicated(Generic[E]):
    """Serves one table of a router.

    Args:
        form: the kind of table.
        table: the table, empty.
        max_bytes: of the table.
        folder: of the database; None: it is kept in memory only, and lost when all replicas stop together.
        peers: gives the other live replicas of the partition.
        sources: gives the Running replicas to take everything from: the peers, or the parent's while the partition is made.
        rule: gives this partition and the number of partitions that it serves by.
        tls: this process's certificates; None: it has none.
    """

    def __init__(
        self,
        form: Form[E],
        table: Table[E],
        *,
        max_bytes: int,
        folder: Path | None,
        peers: Callable[[], Sequence[Node]],
        sources: Callable[[], Sequence[Node]],
        rule: Callable[[], tuple[int, int]],
        log: FilteringBoundLogger,
        tls: Tls | None = None,
    ) -> None:
        self._form, self._table = form, table
        self._max_bytes, self._folder = max_bytes, folder
        self._peers, self._sources, self._rule, self._tls = peers, sources, rule, tls
        self._log = log.bind(table=form.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"router-{form.name}")
        self._store: TableStore | None = None
        self._waiting: list[list[tuple[bytes, bytes]]] = []
        self._deleted: list[bytes] = []
        self._write: asyncio.Task[None] | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._wake = asyncio.Event()
        self.problem = ""
        self.synced = self.writes = 0
        """Entries that came from peers by comparing digests; transactions."""

    # --- what a kind of table adds

    def _outcome(self, newest: E) -> Any:
        """The outcome of an entry that is kept, or was superseded by a newer one."""
        raise NotImplementedError

    def _misplaced(self, entry: E) -> PixiuError | None:
        """The reason why a caller must not put an entry here."""
        return None

    def _full(self, entry: E) -> str:
        """The text of a refusal for lack of space."""
        raise NotImplementedError

    async def _settled(self, entries: Sequence[E]) -> str:
        """Do what else has to be done before entries are confirmed; runs beside writing. Returns the reason of a failure."""
        return ""

    async def _tend(self, whole: bool) -> None:
        """Do what is due from time to time. `whole`: every source was compared with just now."""

    # --- for the shell

    async def load(self) -> None:
        """Load the database. From then on peers may give entries."""
        if self._folder is not None:
            await self._load(self._folder)

    async def catch_up(self) -> None:
        """Take what Running replicas have. They must know this one already, so that it gets what comes after that, too."""
        for source in self._sources():
            if await self._sync(source):
                break

    async def run(self) -> None:
        """Compare with the peers from time to time, and remove what is over. Ends only by cancellation."""
        layout, since = self._rule(), time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._wake.wait()
            self._wake.clear()
            whole = all([await self._sync(node) for node in self._sources()])
            gone: list[bytes] = []
            while len(part := self._table.expire(now_ms())) == MAX_EXPIRED:
                gone += part
                await asyncio.sleep(0)
            gone += part
            if self._rule() != layout:
                layout, since = self._rule(), time.monotonic()
            elif time.monotonic() - since > 12 * SYNC_S:
                # Callers that have not seen the new layout may still ask the parent.
                gone += self._table.purge(*layout)
            await self._persist([], gone)
            await self._tend(whole)

    def sync_soon(self) -> None:
        """Compare with the peers at once: this replica was out of contact with one, and may have missed something."""
        self._wake.set()

    async def close(self) -> None:
        """Close the database and the channels."""
        if self._write is not None:
            await asyncio.gather(self._write, return_exceptions=True)
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)
        for channel in self._channels.values():
            await channel.close()

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        name, counters = self._form.name, self._table.counters
        return {
            f"{name}_bytes": self._table.bytes,
            f"{name}_synced_total": self.synced,
            f"{name}_transactions_total": self.writes,
            f"{name}_stored_total": counters.stored,
            f"{name}_superseded_total": counters.superseded,
            f"{name}_refused_total": counters.refused,
            f"{name}_expired_total": counters.expired,
        }

    # --- calls

    async def Put(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Keep entries, see the proto."""
        if len(request.entries) > MAX_ENTRIES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_ENTRIES} entries in a call")
        outcomes: list[Any] = []
        taken: list[int] = []
        kept: list[E] = []
        new: list[E] = []
        for wire in request.entries:
            entry = self._form.read(wire)
            if not entry.is_whole:
                outcomes.append(self._refused(InvalidArgument(f"one of the {self._form.what} is incomplete, or makes no sense")))
                continue
            if not request.replica and (misplaced := self._misplaced(entry)) is not None:
                outcomes.append(self._refused(misplaced))
                continue
            stored = self._table.put(entry, now_ms(), limited=not request.replica)
            if stored is Stored.FULL:
                outcomes.append(self._refused(Overloaded(self._full(entry), RETRY_MS)))
                continue
            newest = self._table.get(entry.key) or entry
            taken.append(len(outcomes))
            outcomes.append(self._outcome(newest))
            if stored is not Stored.SUPERSEDED:
                kept.append(entry)
                new += [newest] if stored is Stored.NEW else []
        problem = await self._everywhere(kept, new, request.replica) if kept else ""
        for index in taken if problem else ():
            outcomes[index] = self._refused(Unavailable(problem))
        return self._form.message("Outcomes")(outcomes=outcomes)

    async def Sync(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """Entries that differ, see the proto."""
        partitions = request.partitions or 1
        if len(request.buckets) != DIGESTS.size or not is_partition_count(partitions):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the digests are not whole")
        write, page_of = self._form.write, self._form.message("Page")
        page: list[Any] = []
        size = 0
        for entry in self._table.differing(request.buckets, request.partition, partitions):
            page.append(write(entry))
            size += entry.size
            if len(page) >= PAGE_ENTRIES or size >= PAGE_BYTES:
                yield page_of(entries=page)
                page, size = [], 0
        yield page_of(entries=page)

    # --- inside

    def _refused(self, error: PixiuError) -> Any:
        retry_ms = error.retry_after_ms if isinstance(error, Overloaded) else 0
        return self._form.message("Outcome")(error_code=error.code, error_text=str(error), retry_after_ms=retry_ms)

    async def _everywhere(self, kept: Sequence[E], new: Sequence[E], replica: bool) -> str:
        """Wait until entries are in the database, and at all peers unless one of these gave them. Returns the reason of
        a failure."""
        steps = [self._persist(new, []), self._settled(kept)]
        if not replica:
            steps.append(self._pass_on(kept))
        return next((problem for problem in await asyncio.gather(*steps) if problem), "")

    async def _pass_on(self, entries: Sequence[E]) -> str:
        """Give entries to all peers. Returns the reason why not all have them; empty: they have, or are gone."""
        puts = self._form.message("Puts")(entries=[self._form.write(entry) for entry in entries], replica=True)
        problems = await asyncio.gather(*(self._give(node, puts) for node in self._peers()))
        return next((problem for problem in problems if problem), "")

    async def _give(self, node: Node, puts: Any) -> str:
        limit = time.monotonic() + PUT_TIMEOUT_S
        problem = ""
        while any(peer.endpoint == node.endpoint for peer in self._peers()):
            try:
                answer = await self._form.stub(self._channel(node)).Put(puts, timeout=PEER_TIMEOUT_S)
                problem = next((outcome.error_text for outcome in answer.outcomes if outcome.error_code), "")
                if not problem:
                    return ""
            except grpc.aio.AioRpcError:
                problem = f"not every router of the partition has taken the {self._form.what} in time; try again"
            if time.monotonic() >= limit:
                return problem
            await asyncio.sleep(RETRY_S)
        return ""

    async def _sync(self, node: Node) -> bool:
        """Take what a replica has and this one has not. Returns False if it did not answer to the end."""
        partition, partitions = self._rule()
        request = self._form.message("Digests")(buckets=self._table.digests(), partition=partition, partitions=partitions)
        try:
            async for page in self._form.stub(self._channel(node)).Sync(request, timeout=SYNC_TIMEOUT_S):
                now = now_ms()
                new = [
                    entry
                    for entry in map(self._form.read, page.entries)
                    if entry.is_whole and self._table.put(entry, now, limited=False) is Stored.NEW
                ]
                self.synced += len(new)
                await self._persist(new, [])
        except grpc.aio.AioRpcError as error:
            self._log.warning(TABLE_SYNC_FAILED, source=node.address, text=error.details())
            return False
        return True

    async def _load(self, folder: Path) -> None:
        loop, form = asyncio.get_running_loop(), self._form
        path, most = folder / f"{form.name}.lmdb", 2 * self._max_bytes + STORE_SPARE_BYTES
        try:
            self._store = await loop.run_in_executor(self._thread, TableStore, path, most, form.what, form.option)
            values, alive_ms = await loop.run_in_executor(self._thread, self._store.load)
            now = now_ms()
            if alive_ms and now - alive_ms > REMOVED_MS and self._sources():
                # A replica that was away for longer than marks are remembered must not revive what was removed.
                await loop.run_in_executor(self._thread, self._store.clear)
                values = []
            entries = [form.read(form.message("Entry").FromString(value)) for value in values]
        except (StoreError, DecodeError) as error:
            self._fail(str(error))
            return
        for entry in entries:
            if entry.is_whole:
                self._table.put(entry, now, limited=False)
        self._log.info(TABLE_LOADED, entries=len(self._table))

    async def _persist(self, puts: Sequence[E], deletes: Iterable[bytes]) -> str:
        """Write entries and wait until they are synced, with whatever else waits. Returns the reason of a failure; empty: done."""
        if self._folder is None:
            return ""
        self._waiting.append([(entry.key, self._form.write(entry).SerializeToString()) for entry in puts])
        self._deleted += deletes
        running = self._write
        if running is not None:
            await asyncio.wait([running])  # what it writes may not include ours: the next one does
        if self._write is running or self._write is None:
            self._write = asyncio.create_task(self._write_waiting())
        await asyncio.wait([self._write])
        return self.problem

    async def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        deleted, self._deleted = self._deleted, []
        values = merged(waiting)
        gone = [key for key in deleted if self._table.get(key) is None]
        store = self._store
        try:
            if store is None:
                raise StoreError(self.problem or f"the database of {self._form.what} is not open")
            now = now_ms()
            await asyncio.get_running_loop().run_in_executor(self._thread, lambda: store.write(values, gone, now))
        except StoreError as error:
            self._waiting[:0] = [values]  # they are tried again with the next write
            self._deleted[:0] = gone
            self._fail(str(error))
            return
        self.writes += 1
        self.problem = ""

    def _fail(self, text: str) -> None:
        if text != self.problem:
            effect = f"{self._form.what} are refused, and tried again with the next one"
            self._log.error(TABLE_FAILED, text=text, effect=effect)
        self.problem = text

    def _channel(self, node: Node) -> grpc.aio.Channel:
        channel = self._channels.get(node.address)
        if channel is None:
            channel = self._channels[node.address] = peer_channel(node.address, node.role, self._tls, PEER_CHANNEL)
        return channel


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
