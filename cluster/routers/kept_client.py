"""Kept filters, as gateways and proxies use them: puts entries to routers, and asks which sessions a message is for.

    put ─▶ every partition that serves the room ─▶ its replica ─▶ the outcome: all replicas and brokers have it
    match ─▶ one call for each partition ─▶ its replica ─▶ the sessions
    count ─▶ the partition of a tenant's places ─▶ its replica ─▶ their number

Source: docs/subscriptions.md, "Kept filters".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar

import grpc
import grpc.aio

from cluster.links.api import PeerState
from cluster.routers.places import place_of
from cluster.routers.replicas import RouterReplicas
from cluster.wire.v1 import kept_pb2, kept_pb2_grpc
from pixiu.discovery.view import View
from pixiu.errors import Overloaded, PixiuError, Unavailable, WrongPartition, error_of_code
from pixiu.ids import EndpointID
from pixiu.rpc.tls import Tls

MAX_ENTRIES: Final = 1_000
"""Entries, or questions, of one call; more go in several."""
MAX_BYTES: Final = 256 << 10
"""Bytes of filters, or topics, of one call that has more than one; more go in several."""
MAX_WAITING: Final = 100_000
"""Entries, and questions, that wait for answers. Policy: further ones are refused with `Overloaded`."""
PUT_TIMEOUT_S: Final = 12.0
"""Time for one call: a router waits 10 s for its peers and the brokers."""
MATCH_TIMEOUT_S: Final = 2.0
LIST_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 0.1
RETRY_MS: Final = 1_000
BUSY: Final = "too many kept filters wait for the routers; try again later"

A = TypeVar("A")


class PutOutcome(NamedTuple):
    """Outcome of one entry."""

    version: int
    """Version of what is kept for this room, session and filter: above the entry's if a newer one was there. 0: see the error."""
    error: PixiuError | None = None
    """The reason why it is not kept, or may not be everywhere: `Overloaded` at a limit, `Unavailable`, `InvalidArgument`."""


class KeptClient:
    """Puts kept filters, and matches messages with them.

    Args:
        view: gives the view of the cluster.
        state: gives the state of a router by its heartbeats.
        tls: this process's certificates; None: it has none.
        timeout_s: time for which a call is tried at the replicas of its partition.
    """

    def __init__(
        self,
        view: Callable[[], View],
        state: Callable[[EndpointID], PeerState],
        tls: Tls | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._routers = RouterReplicas(view, state, tls)
        self._timeout_s = timeout_s
        self._waiting = 0
        self.calls = self.failed = 0

    async def put(self, entries: Sequence[kept_pb2.KeptEntry]) -> list[PutOutcome]:
        """Put entries of any rooms, to keep or to remove filters. The outcomes are in the order of the entries; each says whether
        every router replica has the entry and every broker knows the room. Of two puts of the same room, session and filter the
        one with the higher version counts.

        Raises `Overloaded` if too much waits; nothing was put then.
        """
        with self._waits(len(entries)):
            until, attempt = time.monotonic() + self._timeout_s, 0
            done: dict[tuple[int, int], PutOutcome] = {}
            while True:
                left = [
                    (partition, index)
                    for index, entry in enumerate(entries)
                    for partition in self._routers.serving(entry.room)
                    if _again(done.get((partition, index)))
                ]
                if not left or (attempt and time.monotonic() >= until):
                    break
                if attempt:
                    await asyncio.sleep(RETRY_S)
                parts = list(_parts(left, [len(entry.filter) for entry in entries]))
                found = await asyncio.gather(*(self._put(p, [entries[i] for i in indexes], attempt) for p, indexes in parts))
                for (partition, indexes), outcomes in zip(parts, found, strict=True):
                    done.update({(partition, index): outcome for index, outcome in zip(indexes, outcomes, strict=True)})
                attempt += 1
        return [
            _joined([done[partition, index] for partition in self._routers.serving(entry.room) if (partition, index) in done])
            for index, entry in enumerate(entries)
        ]

    async def match(self, questions: Sequence[kept_pb2.KeptQuestion]) -> list[list[int]]:
        """Find the sessions that messages are for: for each question those whose kept filters match, in rising order.

        Raises `Unavailable` if a partition does not answer in time, `Overloaded` if too much waits.
        """
        with self._waits(len(questions)):
            until, attempt = time.monotonic() + self._timeout_s, 0
            done: dict[int, list[int]] = {}
            while len(done) < len(questions):
                if attempt:
                    await asyncio.sleep(RETRY_S)
                partitions = self._routers.partitions
                left = [(each.room % partitions, index) for index, each in enumerate(questions) if index not in done]
                parts = list(_parts(left, [len(question.topic) for question in questions]))
                found = await asyncio.gather(*(self._match(p, [questions[i] for i in indexes], attempt) for p, indexes in parts))
                problem = next((each for each in found if isinstance(each, Unavailable)), None)
                if problem is not None and time.monotonic() >= until:
                    raise problem
                for (_, indexes), answers in zip(parts, found, strict=True):
                    if not isinstance(answers, Unavailable):
                        done.update({index: list(answer.sessions) for index, answer in zip(indexes, answers, strict=True)})
                attempt += 1
            return [done[index] for index in range(len(questions))]

    async def count(self, tenants: Iterable[str]) -> dict[str, int]:
        """Count the sessions that outlive their connections of tenants, at most 1,000. Raises `Unavailable`."""
        partitions, found = max(self._routers.partitions, 1), dict[str, int]()
        parts: dict[int, list[str]] = {}
        for tenant in tenants:
            parts.setdefault(place_of(tenant)[1] % partitions, []).append(tenant)
        for partition, names in parts.items():
            request = kept_pb2.KeptCountRequest(places=[place_of(name)[0] for name in names])

            async def ask(channel: grpc.aio.Channel, request: kept_pb2.KeptCountRequest = request) -> list[int]:
                return list((await kept_pb2_grpc.KeptStub(channel).Count(request, timeout=MATCH_TIMEOUT_S)).sessions)

            counts = await self._call(partition, ask, len(names), 0)
            if isinstance(counts, Unavailable):
                raise counts
            found.update(zip(names, counts, strict=True))
        return found

    async def listed(self) -> AsyncIterator[list[kept_pb2.KeptEntry]]:
        """Yield what is kept, partition by partition, in slices; removed entries, too. Raises `Unavailable`."""
        for partition in range(self._routers.partitions):
            after = b""
            while True:
                found = await self._list(partition, after)
                yield list(found.entries)
                after = found.next
                if not after:
                    break

    async def close(self) -> None:
        """Close the channels. Calls that wait fail."""
        await self._routers.close()

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            "kept_calls_total": self.calls,
            "kept_failed_total": self.failed,
            "kept_waiting": self._waiting,
        }

    # --- inside

    @contextmanager
    def _waits(self, count: int) -> Iterator[None]:
        if self._waiting + count > MAX_WAITING:
            raise Overloaded(BUSY, RETRY_MS)
        self._waiting += count
        try:
            yield
        finally:
            self._waiting -= count

    async def _put(self, partition: int, entries: list[kept_pb2.KeptEntry], attempt: int) -> list[PutOutcome]:
        puts = kept_pb2.KeptPuts(entries=entries)

        async def ask(channel: grpc.aio.Channel) -> list[kept_pb2.KeptOutcome]:
            return list((await kept_pb2_grpc.KeptStub(channel).Put(puts, timeout=PUT_TIMEOUT_S)).outcomes)

        outcomes = await self._call(partition, ask, len(entries), attempt)
        if isinstance(outcomes, Unavailable):
            return [PutOutcome(0, outcomes)] * len(entries)
        return [
            PutOutcome(outcome.version, error_of_code(outcome.error_code, outcome.error_text, outcome.retry_after_ms))
            if outcome.error_code
            else PutOutcome(outcome.version)
            for outcome in outcomes
        ]

    async def _match(
        self, partition: int, questions: list[kept_pb2.KeptQuestion], attempt: int
    ) -> list[kept_pb2.KeptAnswer] | Unavailable:
        request = kept_pb2.KeptQuestions(questions=questions)

        async def ask(channel: grpc.aio.Channel) -> list[kept_pb2.KeptAnswer]:
            return list((await kept_pb2_grpc.KeptStub(channel).Match(request, timeout=MATCH_TIMEOUT_S)).answers)

        return await self._call(partition, ask, len(questions), attempt)

    async def _list(self, partition: int, after: bytes) -> kept_pb2.KeptList:
        request, until, attempt = kept_pb2.KeptListRequest(after=after), time.monotonic() + self._timeout_s, 0

        async def ask(channel: grpc.aio.Channel) -> list[kept_pb2.KeptList]:
            return [await kept_pb2_grpc.KeptStub(channel).List(request, timeout=LIST_TIMEOUT_S)]

        while True:
            found = await self._call(partition, ask, 1, attempt)
            if not isinstance(found, Unavailable):
                return found[0]
            if time.monotonic() >= until:
                raise found
            await asyncio.sleep(RETRY_S)
            attempt += 1

    async def _call(
        self, partition: int, ask: Callable[[grpc.aio.Channel], Awaitable[list[A]]], count: int, attempt: int
    ) -> list[A] | Unavailable:
        """Ask one replica of a partition, at each attempt another one. Returns `count` answers, or why there are none."""
        replica, text = self._routers.replica(partition, attempt), "none is Running"
        if replica is not None:
            self.calls += 1
            try:
                answers = await ask(self._routers.channel(replica))
            except grpc.aio.AioRpcError as error:
                text = f"{replica.address}: {error.details()}"
            else:
                if len(answers) == count:
                    return answers
                text = f"{replica.address} answered for another number"
            self.failed += 1
        return Unavailable(f"the kept filters of router partition {partition} cannot be reached: {text}")


def _again(outcome: PutOutcome | None) -> bool:
    """True if an entry has to be put (again): no router took it so far."""
    return outcome is None or isinstance(outcome.error, Unavailable | WrongPartition)


def _joined(outcomes: Sequence[PutOutcome]) -> PutOutcome:
    """The outcome of an entry at all partitions that serve its room: an error of one of them counts."""
    failed = next((outcome for outcome in outcomes if outcome.error is not None), None)
    return failed or max(outcomes, default=PutOutcome(0, Unavailable("no router serves the room")), key=lambda each: each.version)


def _parts(pairs: Iterable[tuple[int, int]], sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The calls to make for pairs of a partition and an index, each for a partition and within the limits of one call."""
    by_partition: dict[int, list[int]] = {}
    for partition, index in pairs:
        by_partition.setdefault(partition, []).append(index)
    for partition, indexes in by_partition.items():
        part: list[int] = []
        size = 0
        for index in indexes:
            if part and (len(part) == MAX_ENTRIES or size + sizes[index] > MAX_BYTES):
                yield partition, part
                part, size = [], 0
            part.append(index)
            size += sizes[index]
        yield partition, part
