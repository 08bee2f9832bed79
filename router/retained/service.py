"""A router's retained messages: a replicated table, which gateways list.

Source: docs/subscriptions.md, "Retained messages".
"""

from __future__ import annotations

from typing import Any, Final

import grpc
import grpc.aio

from cluster.wire.v1 import retained_pb2, retained_pb2_grpc
from pixiu.placement.partition import is_partition_count
from router.replicated.service import Form, Replicated, now_ms
from router.retained.map import Entry, RetainedMap

MAX_FILTERS: Final = 1_000
FULL: Final = (
    "the routers keep as many retained messages as they may (router.retained_messages, router.retained_mb): clear some, or raise it"
)
RETRY_MS: Final = 1_000
NOT_KEPT: Final = "not every router of the partition has taken the retained message in time; publish it again"


class RetainedService(retained_pb2_grpc.RetainedServicer):
    """Serves the retained messages of one router.

    Args:
        folder: of the database; None: they are kept in memory only, and lost when all replicas stop together.
        peers: gives the other live replicas of the partition.
        sources: gives the Running replicas to take everything from: the peers, or the parent's while the partition is made.
        rule: gives this partition and the number of partitions that it serves by.
        tls: this process's certificates; None: it has none.
    """

    def __init__(
        self,
        *,
        max_messages: int,
        max_bytes: int,
        folder: Path | None,
        peers: Callable[[], Sequence[Node]],
        sources: Callable[[], Sequence[Node]],
        rule: Callable[[], tuple[int, int]],
        log: FilteringBoundLogger,
        tls: Tls | None = None,
    ) -> None:
        self.map = RetainedMap(max_messages, max_bytes)
        self._max_bytes, self._folder = max_bytes, folder
        self._peers, self._sources, self._rule, self._log, self._tls = peers, sources, rule, log, tls
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="router-retained")
        self._store: RetainedStore | None = None
        self._waiting: list[list[Entry]] = []
        self._deleted: list[bytes] = []
        self._write: asyncio.Task[None] | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.problem = ""
        self.synced = self.writes = 0
        """Entries that came from peers by comparing digests; transactions."""

    # --- for the shell

    async def load(self) -> None:
        """Load the database. From then on peers may give messages."""
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
            await asyncio.sleep(SYNC_S)
            for node in self._sources():
                await self._sync(node)
            gone = self.map.expire(_now_ms())
            if self._rule() != layout:
                layout, since = self._rule(), time.monotonic()
            elif time.monotonic() - since > 12 * SYNC_S:
                # Gateways that have not seen the new layout may still ask the parent.
                gone += self.map.purge(*layout)
            await self._persist([], gone)

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
        return {
            "retained_messages": len(self.map),
            "retained_cleared": self.map.cleared,
            "retained_bytes": self.map.bytes,
            "retained_synced_total": self.synced,
            "retained_transactions_total": self.writes,
            "retained_stored_total": self.map.counters.retained_stored,
            "retained_superseded_total": self.map.counters.retained_superseded,
            "retained_refused_total": self.map.counters.retained_refused,
            "retained_expired_total": self.map.counters.retained_expired,
        }

    # --- calls

    async def Put(
        self, request: retained_pb2.RetainedPuts, context: grpc.aio.ServicerContext[Any, Any]
    ) -> retained_pb2.RetainedOutcomes:
        """Keep entries, see the proto."""
        if len(request.entries) > MAX_ENTRIES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_ENTRIES} entries in a call")
        outcomes: list[retained_pb2.RetainedOutcome] = []
        kept: list[Entry] = []
        new: list[Entry] = []
        for wire in request.entries:
            entry = entry_of(wire)
            if not entry.is_whole:
                outcomes.append(_refused(InvalidArgument("the retained message is incomplete")))
                continue
            stored = self.map.put(entry, _now_ms(), limited=not request.replica)
            if stored is Stored.FULL:
                outcomes.append(_refused(Overloaded(FULL, RETRY_MS)))
                continue
            found = self.map.get(entry.topic)
            newest = found if found is not None else entry
            outcomes.append(retained_pb2.RetainedOutcome(version=newest.version, snowflake=newest.snowflake))
            if stored is not Stored.SUPERSEDED:
                kept.append(entry)
                new += [newest] if stored is Stored.NEW else []
        problem = ""
        if kept:
            written = self._persist(new, [])
            if request.replica:
                problem = await written
            else:
                problem, *_ = await asyncio.gather(written, self._pass_on(kept))
                problem = problem or next((each for each in _ if each), "")
        if problem:
            refused = _refused(Unavailable(problem))
            outcomes = [refused if outcome.version else outcome for outcome in outcomes]
        return retained_pb2.RetainedOutcomes(outcomes=outcomes)

    async def List(
        self, request: retained_pb2.RetainedListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> retained_pb2.RetainedList:
        """A slice, see the proto."""
        partitions = request.partitions or 1
        if len(request.filters) > MAX_FILTERS or not is_partition_count(partitions):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_FILTERS} filters, and a number of partitions")
        filters = [name.encode() for name in request.filters]
        found = self.map.listing(filters, request.after.encode(), request.limit, _now_ms(), request.partition, partitions)
        if request.totals:
            size = sum(len(entry.record) for entry in found.entries)
            return retained_pb2.RetainedList(next=found.next.decode(), messages=len(found.entries), bytes=size)
        return retained_pb2.RetainedList(entries=[wire_of(entry) for entry in found.entries], next=found.next.decode())

    async def Sync(
        self, request: retained_pb2.RetainedDigests, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[retained_pb2.RetainedPage]:
        """Entries that differ, see the proto."""
        partitions = request.partitions or 1
        if len(request.buckets) != DIGESTS.size or not is_partition_count(partitions):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the digests are not whole")
        page: list[retained_pb2.RetainedEntry] = []
        size = 0
        for entry in self.map.differing(request.buckets, request.partition, partitions):
            page.append(wire_of(entry))
            size += entry.size
            if len(page) >= MAX_SLICE or size >= MAX_SLICE_BYTES:
                yield retained_pb2.RetainedPage(entries=page)
                page, size = [], 0
        yield retained_pb2.RetainedPage(entries=page)

    # --- inside

    async def _pass_on(self, entries: Sequence[Entry]) -> str:
        """Give entries to all peers. Returns the reason why not all have them; empty: they have, or are gone."""
        puts = retained_pb2.RetainedPuts(entries=[wire_of(entry) for entry in entries], replica=True)
        problems = await asyncio.gather(*(self._give(node, puts) for node in self._peers()))
        return next((problem for problem in problems if problem), "")

    async def _give(self, node: Node, puts: retained_pb2.RetainedPuts) -> str:
        limit = time.monotonic() + PUT_TIMEOUT_S
        problem = ""
        while any(peer.endpoint == node.endpoint for peer in self._peers()):
            try:
                stub = retained_pb2_grpc.RetainedStub(self._channel(node))
                answer = await stub.Put(puts, timeout=PEER_TIMEOUT_S)
                problem = next((outcome.error_text for outcome in answer.outcomes if outcome.error_code), "")
                if not problem:
                    return ""
            except grpc.aio.AioRpcError:
                problem = NOT_KEPT
            if time.monotonic() >= limit:
                return problem
            await asyncio.sleep(RETRY_S)
        return ""

    async def _sync(self, node: Node) -> bool:
        """Take what a replica has and this one has not. Returns False if it did not answer to the end."""
        partition, partitions = self._rule()
        request = retained_pb2.RetainedDigests(buckets=self.map.digests(), partition=partition, partitions=partitions)
        try:
            call = retained_pb2_grpc.RetainedStub(self._channel(node)).Sync(request, timeout=SYNC_TIMEOUT_S)
            async for page in call:
                now_ms = _now_ms()
                new = [
                    entry
                    for entry in map(entry_of, page.entries)
                    if entry.is_whole and self.map.put(entry, now_ms, limited=False) is Stored.NEW
                ]
                self.synced += len(new)
                await self._persist(new, [])
        except grpc.aio.AioRpcError as error:
            self._log.warning(RETAINED_SYNC_FAILED, source=node.address, text=error.details())
            return False
        return True

    async def _load(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._store = await loop.run_in_executor(
                self._thread, RetainedStore, folder / "retained.lmdb", 2 * self._max_bytes + (64 << 20)
            )
            entries, alive_ms = await loop.run_in_executor(self._thread, self._store.load)
            now_ms = _now_ms()
            if alive_ms and now_ms - alive_ms > CLEARED_MS and self._sources():
                # A replica that was away for longer than cleared topics are remembered must not revive one.
                await loop.run_in_executor(self._thread, self._store.clear)
                entries = []
        except StoreError as error:
            self._fail(str(error))
            return
        for entry in entries:
            if entry.is_whole:
                self.map.put(entry, now_ms, limited=False)
        self._log.info(RETAINED_LOADED, messages=len(self.map))

    async def _persist(self, puts: Sequence[Entry], deletes: Iterable[bytes]) -> str:
        """Write entries and wait until they are synced, with whatever else waits. Returns the reason of a failure; empty: done."""
        if self._folder is None:
            return ""
        self._waiting.append(list(puts))
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
        entries = merged(waiting)
        gone = [topic for topic in deleted if self.map.get(topic) is None]
        store = self._store
        try:
            if store is None:
                raise StoreError(self.problem or "the database of retained messages is not open")
            now_ms = _now_ms()
            await asyncio.get_running_loop().run_in_executor(self._thread, lambda: store.write(entries, gone, now_ms))
        except StoreError as error:
            self._waiting[:0] = [entries]  # they are tried again with the next write
            self._deleted[:0] = gone
            self._fail(str(error))
            return
        self.writes += 1
        self.problem = ""

    def _fail(self, text: str) -> None:
        if text != self.problem:
            self._log.error(RETAINED_FAILED, text=text, effect="retained messages are refused, and tried again with the next one")
        self.problem = text

    def _channel(self, node: Node) -> grpc.aio.Channel:
        channel = self._channels.get(node.address)
        if channel is None:
            channel = self._channels[node.address] = peer_channel(node.address, node.role, self._tls, PEER_CHANNEL)
        return channel


def entry_of(wire: retained_pb2.RetainedEntry) -> Entry:
    """An entry as the map has it."""
    return Entry(wire.topic.encode(), wire.version, wire.snowflake, wire.record, wire.expires_at_ms, wire.room)


def wire_of(entry: Entry) -> retained_pb2.RetainedEntry:
    """An entry as it is sent."""
    return retained_pb2.RetainedEntry(
        topic=entry.topic.decode(),
        version=entry.version,
        snowflake=entry.snowflake,
        record=entry.record,
        expires_at_ms=entry.expires_at_ms,
        room=entry.room,
    )


FORM: Final = Form(
    name="retained",
    what="retained messages",
    option="router.retained_mb",
    wire=retained_pb2,
    prefix="Retained",
    stub=retained_pb2_grpc.RetainedStub,
    read=entry_of,
    write=wire_of,
)


class RetainedService(Replicated[Entry], retained_pb2_grpc.RetainedServicer):
    """Serves the retained messages of one router; takes the arguments of `Replicated`.

    Args:
        max_messages: limit of retained messages.
        max_bytes: limit of their bytes.
    """

    def __init__(self, *, max_messages: int, max_bytes: int, **shell: Any) -> None:
        self.map = RetainedMap(max_messages, max_bytes)
        super().__init__(FORM, self.map, max_bytes=max_bytes, **shell)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {**super().samples(), "retained_messages": len(self.map), "retained_cleared": self.map.removed}

    def _outcome(self, newest: Entry) -> retained_pb2.RetainedOutcome:
        return retained_pb2.RetainedOutcome(version=newest.version, snowflake=newest.snowflake)

    def _full(self, entry: Entry) -> str:
        return FULL

    async def List(
        self, request: retained_pb2.RetainedListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> retained_pb2.RetainedList:
        """A slice, see the proto."""
        partitions = request.partitions or 1
        if len(request.filters) > MAX_FILTERS or not is_partition_count(partitions):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_FILTERS} filters, and a number of partitions")
        filters = [name.encode() for name in request.filters]
        found = self.map.listing(filters, request.after.encode(), request.limit, now_ms(), request.partition, partitions)
        return retained_pb2.RetainedList(entries=[wire_of(entry) for entry in found.entries], next=found.next.decode())
