"""The retained messages of a gateway's clients: puts them to routers, and fetches them for subscriptions, in slices.

    PUBLISH with RETAIN ─▶ queue of its partition ─▶ one call at a time ─▶ done: every replica has it
    SUBSCRIBE ─▶ slice after slice, while the client takes them ─▶ RetainedFound … ─▶ RetainedFetched

All gateways ask the same replica of a partition, so a message that follows another one is never put below it.

Source: docs/subscriptions.md, "Retained messages".
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import grpc
import grpc.aio
from structlog.typing import FilteringBoundLogger

from cluster.links.api import PeerState
from cluster.mqtt.properties_in_records import expires_at_ms_of
from cluster.routers.replicas import RouterReplicas
from cluster.wire.v1 import retained_pb2, retained_pb2_grpc
from gateway import events as ev
from gateway.delivery import fan_out
from pixiu.discovery.view import View
from pixiu.errors import Overloaded, PixiuError, Unavailable, error_of_code
from pixiu.ids import EndpointID, RoomID, snowflake_worker
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.topics import has_wildcard, resolve
from pixiu.rpc.tls import Tls
from pixiu.wire.record import FLAGS_AT, KEY_AT, SNOWFLAKE_AT, Flag, body_bounds

PUT_TIMEOUT_S: Final = 12.0
"""Time for one call: a router waits 10 s for its peers."""
LIST_TIMEOUT_S: Final = 5.0
GIVE_UP_S: Final = 20.0
"""Time for which a message, or a slice, is tried at the replicas of its partition."""
RETRY_S: Final = 0.2
MAX_WAITING: Final = 10_000
MAX_WAITING_BYTES: Final = 32 << 20
"""Messages that wait for a partition. Policy: further ones are refused, and may be published again."""
PUTS_A_CALL: Final = 1_000
PUT_BYTES_A_CALL: Final = 1 << 20
SLOW_S: Final = 0.02
"""Interval at which a client that does not take more is looked at again."""
FEW_FILTERS: Final = 32
"""Topics without wildcards of one subscription that are asked for together with those of others."""
NAMES_A_CALL: Final = 1_000
MAX_LISTED_BYTES: Final = 1 << 20
"""Bytes after which a listing takes no more from a partition."""
MAX_FETCHES: Final = 256
"""Fetches at a time; further ones wait in turn."""
CLEAR_MS: Final = 86_400_000
"""Time for which routers remember a cleared topic, ms."""
RETRY_MS: Final = 1_000
NO_ROUTER: Final = "no router of the partition takes retained messages now; publish it again"
BUSY: Final = "too many retained messages wait for the routers; publish it again later"
FETCH_FAILED: Final = "retained_fetch_failed"

Done = Callable[[PixiuError | None], None]


@dataclass(slots=True)
class _Put:
    """A message on its way to the partitions that serve its room."""

    entry: retained_pb2.RetainedEntry
    done: Done
    waits_for: int
    error: PixiuError | None = None
    size: int = 0

    def settled(self, error: PixiuError | None) -> None:
        self.error = self.error or error
        self.waits_for -= 1
        if not self.waits_for:
            self.done(self.error)


@dataclass(slots=True)
class _Queue:
    """Messages for one partition."""

    waiting: deque[_Put] = field(default_factory=deque)
    bytes: int = 0
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Few:
    """A fetch of a few topics, which goes together with others."""

    connection: int
    fetch: int
    left: int
    """Topics that were not asked for yet."""


@dataclass(slots=True)
class _Names:
    """Topics to ask a partition for: one call at a time, so the busier the gateway, the more go together."""

    waiting: deque[tuple[str, _Few]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None


class Listed(NamedTuple):
    """A retained message, as an operator or an HTTP client sees it."""

    topic: str
    record: bytes
    expires_at_ms: int
    """Unix milliseconds; 0: never."""


class RetainedClient:
    """Puts and fetches retained messages.

    Args:
        view: gives the view of the cluster.
        state: gives the state of a router by its heartbeats.
        topics: the rooms of free topics.
        step: gives events to the gateway's core.
        takes_more: returns True if a connection takes more now, False if it must catch up first, None if it is gone.
        tls: this process's certificates; None: it has none.
    """

    def __init__(
        self,
        *,
        view: Callable[[], View],
        state: Callable[[EndpointID], PeerState],
        topics: TopicRooms,
        step: Callable[[ev.Event], None],
        takes_more: Callable[[int], bool | None],
        log: FilteringBoundLogger,
        tls: Tls | None = None,
    ) -> None:
        self._topics, self._step, self._takes_more, self._log = topics, step, takes_more, log
        self._routers = RouterReplicas(view, state, tls)
        self._queues: dict[int, _Queue] = {}
        self._names: dict[int, _Names] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(MAX_FETCHES)
        self.put = self.refused = self.failed = 0

    # --- messages of clients

    def retain(self, record: bytes, topic: str, done: Done) -> None:
        """Retain a published record, or clear its topic if its payload is empty. `done` is called once: every router replica of its
        partition has it, or the error is the reason why not."""
        room = self._room_of(topic)
        bounds = body_bounds(record)
        if room is None or bounds is None:
            done(Unavailable(f"no room carries the topic {topic[:80]!r}"))
            return
        begin, end = bounds
        named = record[FLAGS_AT] & Flag.TOPIC
        payload = end - begin - (2 + (record[begin] << 8 | record[begin + 1]) if named else 0)
        snowflake = int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little")
        expires = [at for at in (expires_at_ms_of(record), fan_out.expires_at_ms_of(record)) if at]
        entry = retained_pb2.RetainedEntry(
            topic=topic,
            version=snowflake,
            snowflake=snowflake,
            record=record if payload else b"",
            expires_at_ms=min(expires, default=0) if payload else time.time_ns() // 1_000_000 + CLEAR_MS,
            room=room,
        )
        partitions = self._routers.serving(room)
        put = _Put(entry, done, len(partitions), size=len(record) + len(topic))
        for partition in partitions:
            self._enqueue(partition, put)

    def _enqueue(self, partition: int, put: _Put) -> None:
        queue = self._queues.setdefault(partition, _Queue())
        if len(queue.waiting) >= MAX_WAITING or queue.bytes + put.size > MAX_WAITING_BYTES:
            self.refused += 1
            put.settled(Overloaded(BUSY, RETRY_MS))
            return
        queue.waiting.append(put)
        queue.bytes += put.size
        if queue.task is None:
            queue.task = asyncio.get_running_loop().create_task(self._run(partition, queue))

    async def _run(self, partition: int, queue: _Queue) -> None:
        """Put what waits for a partition: one call at a time, so that the messages of a topic keep their order."""
        while queue.waiting:
            batch: list[_Put] = []
            size = 0
            while queue.waiting and len(batch) < PUTS_A_CALL and (not batch or size + queue.waiting[0].size <= PUT_BYTES_A_CALL):
                put = queue.waiting.popleft()
                batch.append(put)
                size += put.size
            queue.bytes -= size
            await self._put(partition, batch)
        queue.task = None

    async def _put(self, partition: int, batch: list[_Put]) -> None:
        limit = time.monotonic() + GIVE_UP_S
        while batch:
            replica = self._routers.replica(partition)
            answer: retained_pb2.RetainedOutcomes | None = None
            if replica is not None:
                stub = retained_pb2_grpc.RetainedStub(self._routers.channel(replica))
                try:
                    answer = await stub.Put(retained_pb2.RetainedPuts(entries=[put.entry for put in batch]), timeout=PUT_TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    answer = None
            if answer is None or len(answer.outcomes) != len(batch):
                if time.monotonic() >= limit:
                    self.failed += len(batch)
                    for put in batch:
                        put.settled(Unavailable(NO_ROUTER))
                    return
                await asyncio.sleep(RETRY_S)
                continue
            batch = [put for put, outcome in zip(batch, answer.outcomes, strict=True) if not self._settle(put, outcome)]

    def _settle(self, put: _Put, outcome: retained_pb2.RetainedOutcome) -> bool:
        """Note the outcome of a message. Returns False if it must be put again, above a newer one."""
        entry = put.entry
        if outcome.error_code:
            self.failed += 1
            put.settled(error_of_code(outcome.error_code, outcome.error_text, outcome.retry_after_ms))
            return True
        if (outcome.version, outcome.snowflake) > (entry.version, entry.snowflake):
            newest, own = outcome.snowflake, entry.snowflake
            if not (newest > own and snowflake_worker(newest) == snowflake_worker(own)):
                # Another gateway's clock is ahead: what is published after its message must not stay below it.
                entry.version = outcome.version + 1
                return False
        self.put += 1
        put.settled(None)
        return True

    # --- subscriptions

    def fetch(self, effect: ev.FetchRetained) -> None:
        """Fetch for a connection: a few topics together with those of others, everything else in slices of its own."""
        if len(effect.filters) <= FEW_FILTERS and not any(map(has_wildcard, effect.filters)):
            few = _Few(effect.connection, effect.fetch, len(effect.filters))
            for name in effect.filters:
                self._ask_soon(self._partitions_of([name])[0], name, few)
            return
        task = asyncio.get_running_loop().create_task(self._fetch(effect))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    def _ask_soon(self, partition: int, name: str, few: _Few) -> None:
        names = self._names.setdefault(partition, _Names())
        names.waiting.append((name, few))
        if names.task is None:
            names.task = asyncio.get_running_loop().create_task(self._ask_names(partition, names))

    async def _ask_names(self, partition: int, names: _Names) -> None:
        while names.waiting:
            batch = [names.waiting.popleft() for _ in range(min(len(names.waiting), NAMES_A_CALL))]
            wanted: dict[str, list[_Few]] = {}
            for name, few in batch:
                wanted.setdefault(name, []).append(few)
            try:
                async for found in self._slices_of(partition, list(wanted)):
                    for listed in found:
                        for few in wanted[listed.topic]:
                            self._step(ev.RetainedFound(few.connection, few.fetch, [listed.record]))
            except PixiuError as error:
                self._note_failure(error)
            for _, few in batch:
                few.left -= 1
                if not few.left:
                    self._step(ev.RetainedFetched(few.connection, few.fetch))
        names.task = None

    def _note_failure(self, error: PixiuError) -> None:
        self.failed += 1
        self._log.warning(FETCH_FAILED, text=str(error))

    async def _fetch(self, effect: ev.FetchRetained) -> None:
        try:
            async with self._turn:
                async for records in self._slices(effect.filters):
                    if records:
                        self._step(ev.RetainedFound(effect.connection, effect.fetch, [each.record for each in records]))
                    while not (takes := self._takes_more(effect.connection)):
                        if takes is None:
                            return
                        await asyncio.sleep(SLOW_S)
        except PixiuError as error:
            self._note_failure(error)
        finally:
            self._step(ev.RetainedFetched(effect.connection, effect.fetch))

    async def listing(self, name: str, limit: int, after: str = "") -> tuple[list[Listed], str]:
        """Read up to `limit` retained messages that match a filter, in the order of topics, above `after`; few if they are large.
        Returns the topic above which there may be more, too; empty: there are none. Raises `Unavailable`."""
        found: list[Listed] = []
        ends: list[str] = []
        for partition in self._partitions_of([name]):
            start, left, size = after, limit, 0
            while left > 0 and size < MAX_LISTED_BYTES:
                answer = await self._ask(partition, [name], start, left)
                found += [Listed(entry.topic, entry.record, entry.expires_at_ms) for entry in answer.entries]
                start, left = answer.next, left - len(answer.entries)
                size += sum(len(entry.record) for entry in answer.entries)
                if not start:
                    break
            if start and (left <= 0 or size >= MAX_LISTED_BYTES):
                ends.append(start)
        end = min(ends, key=str.encode, default="")
        shown = sorted(
            (each for each in found if not end or each.topic.encode() <= end.encode()), key=lambda each: each.topic.encode()
        )  # fmt: skip
        return shown[:limit], shown[limit - 1].topic if len(shown) > limit else end

    async def totals(self, name: str) -> tuple[int, int]:
        """Count the retained messages that match a filter, and their bytes. Raises `Unavailable`."""
        messages = size = 0
        for partition in self._partitions_of([name]):
            start, whole = "", False
            while not whole:
                answer = await self._ask(partition, [name], start, 0, totals=True)
                messages, size, start = messages + answer.messages, size + answer.bytes, answer.next
                whole = not start
        return messages, size

    async def _slices(self, filters: Sequence[str]) -> AsyncIterator[list[Listed]]:
        for partition, wanted in self._by_partition(filters).items():
            async for found in self._slices_of(partition, wanted):
                yield found

    async def _slices_of(self, partition: int, filters: Sequence[str]) -> AsyncIterator[list[Listed]]:
        """Slices of one partition; the next one is fetched while the caller uses the last."""
        coming: asyncio.Task[retained_pb2.RetainedList] | None = None
        ask = asyncio.get_running_loop().create_task
        try:
            coming = ask(self._ask(partition, filters, "", 0))
            while coming is not None:
                answer = await coming
                coming = ask(self._ask(partition, filters, answer.next, 0)) if answer.next else None
                yield [Listed(entry.topic, entry.record, entry.expires_at_ms) for entry in answer.entries]
        finally:
            if coming is not None:
                coming.cancel()

    async def _ask(
        self, partition: int, filters: Sequence[str], after: str, limit: int, *, totals: bool = False
    ) -> retained_pb2.RetainedList:
        until, text = time.monotonic() + GIVE_UP_S, "no router of the partition is Running"
        partitions = self._routers.partitions
        request = retained_pb2.RetainedListRequest(
            filters=filters, after=after, limit=limit, partition=partition, partitions=partitions, totals=totals
        )  # fmt: skip
        while True:
            replica = self._routers.replica(partition)
            if replica is not None:
                try:
                    stub = retained_pb2_grpc.RetainedStub(self._routers.channel(replica))
                    return await stub.List(request, timeout=LIST_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    text = f"{replica.address}: {error.details()}"
            if time.monotonic() >= until:
                raise Unavailable(f"the retained messages of router partition {partition} cannot be read: {text}")
            await asyncio.sleep(RETRY_S)

    # --- inside

    def _by_partition(self, filters: Iterable[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in filters:
            for partition in self._partitions_of([name]):
                found.setdefault(partition, []).append(name)
        return found

    def _partitions_of(self, filters: Iterable[str]) -> list[int]:
        """Partitions that keep what filters can match, by the present layout."""
        partitions = self._routers.partitions
        found: dict[int, None] = {}
        for name in filters:
            if has_wildcard(name):
                found.update(dict.fromkeys(room % partitions for room in self._topics.rooms(name)))
            elif (room := self._room_of(name)) is not None:
                found[room % partitions] = None
        return sorted(found)

    def _room_of(self, topic: str) -> RoomID | None:
        room = resolve(topic)
        if not isinstance(room, int):
            return None
        return room if topic.startswith("room/") else self._topics.room(topic)

    async def close(self) -> None:
        """End everything; messages that wait are refused."""
        running = [*(queue.task for queue in self._queues.values()), *(names.task for names in self._names.values())]
        tasks = [*self._fetches, *(task for task in running if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._routers.close()

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            "retained_put_total": self.put,
            "retained_refused_total": self.refused,
            "retained_failed_total": self.failed,
            "retained_waiting": sum(len(queue.waiting) for queue in self._queues.values()),
        }
