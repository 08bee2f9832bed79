"""Kept filters, as gateways and proxies use them: puts entries to routers, and asks which sessions a message is for.

    put ─▶ every partition that serves the room ─▶ its replica ─▶ the outcome: all replicas and brokers have it
    match ─▶ one call for each partition ─▶ its replica ─▶ the sessions

Source: docs/subscriptions.md, "Kept filters".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar

import grpc
import grpc.aio

from cluster.links.api import PeerState
from cluster.routers.replicas import RouterReplicas
from cluster.wire.v1 import kept_pb2, kept_pb2_grpc
from pixiu.discovery.view import View
from pixiu.errors import Overloaded, PixiuError, Unavailable, error_of_code
from pixiu.ids import EndpointID
from pixiu.rpc.tls import Tls

MAX_ENTRIES: Final = 1_000
"""Entries, or questions, of one call; more go in several."""
MAX_WAITING: Final = 100_000
"""Entries, and questions, that wait for answers. Policy: further ones are refused with `Overloaded`."""
PUT_TIMEOUT_S: Final = 12.0
"""Time for one call: a router waits 10 s for its peers and the brokers."""
MATCH_TIMEOUT_S: Final = 2.0
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
        by_partition: dict[int, list[int]] = {}
        for index, entry in enumerate(entries):
            for partition in self._routers.serving(entry.room):
                by_partition.setdefault(partition, []).append(index)
        found: list[PutOutcome | None] = [None] * len(entries)

        async def put_some(partition: int, indexes: Sequence[int]) -> None:
            outcomes = await self._put(partition, [entries[index] for index in indexes])
            for index, outcome in zip(indexes, outcomes, strict=True):
                before = found[index]
                if before is None or (before.error is None and (outcome.error is not None or outcome.version > before.version)):
                    found[index] = outcome

        with self._waits(len(entries)):
            await asyncio.gather(*(put_some(*part) for part in _parts(by_partition)))
        return [outcome for outcome in found if outcome is not None]

    async def match(self, questions: Sequence[kept_pb2.KeptQuestion]) -> list[list[int]]:
        """Find the sessions that messages are for: for each question those whose kept filters match, in rising order.

        Raises `Unavailable` if a partition does not answer in time, `Overloaded` if too much waits.
        """
        by_partition: dict[int, list[int]] = {}
        partitions = self._routers.partitions
        for index, question in enumerate(questions):
            by_partition.setdefault(question.room % partitions, []).append(index)
        found: list[list[int]] = [[] for _ in questions]

        async def match_some(partition: int, indexes: Sequence[int]) -> None:
            answers = await self._match(partition, [questions[index] for index in indexes])
            for index, answer in zip(indexes, answers, strict=True):
                found[index] = list(answer.sessions)

        with self._waits(len(questions)):
            await asyncio.gather(*(match_some(*part) for part in _parts(by_partition)))
        return found

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

    async def _put(self, partition: int, entries: Sequence[kept_pb2.KeptEntry]) -> list[PutOutcome]:
        puts = kept_pb2.KeptPuts(entries=entries)

        async def ask(channel: grpc.aio.Channel) -> list[kept_pb2.KeptOutcome]:
            return list((await kept_pb2_grpc.KeptStub(channel).Put(puts, timeout=PUT_TIMEOUT_S)).outcomes)

        try:
            outcomes = await self._call(partition, ask, len(entries))
        except Unavailable as error:
            return [PutOutcome(0, error)] * len(entries)
        return [
            PutOutcome(outcome.version, error_of_code(outcome.error_code, outcome.error_text, outcome.retry_after_ms))
            if outcome.error_code
            else PutOutcome(outcome.version)
            for outcome in outcomes
        ]

    async def _match(self, partition: int, questions: Sequence[kept_pb2.KeptQuestion]) -> list[kept_pb2.KeptAnswer]:
        request = kept_pb2.KeptQuestions(questions=questions)

        async def ask(channel: grpc.aio.Channel) -> list[kept_pb2.KeptAnswer]:
            return list((await kept_pb2_grpc.KeptStub(channel).Match(request, timeout=MATCH_TIMEOUT_S)).answers)

        return await self._call(partition, ask, len(questions))

    async def _call(self, partition: int, ask: Callable[[grpc.aio.Channel], Awaitable[list[A]]], count: int) -> list[A]:
        """Ask one replica after the other, until one answers for all. Raises `Unavailable`."""
        until, text = time.monotonic() + self._timeout_s, "no router of the partition is Running"
        attempt = 0
        while True:
            replica = self._routers.replica(partition, attempt)
            if replica is not None:
                self.calls += 1
                try:
                    answers = await ask(self._routers.channel(replica))
                    if len(answers) == count:
                        return answers
                    text = f"{replica.address} answered for another number of entries"
                except grpc.aio.AioRpcError as error:
                    text = f"{replica.address}: {error.details()}"
                attempt += 1
            if time.monotonic() >= until:
                self.failed += 1
                raise Unavailable(f"the kept filters of router partition {partition} cannot be reached: {text}")
            await asyncio.sleep(RETRY_S)


def _parts(by_partition: dict[int, list[int]]) -> Iterable[tuple[int, list[int]]]:
    """The calls to make: a partition, and at most `MAX_ENTRIES` indexes."""
    for partition, indexes in by_partition.items():
        for start in range(0, len(indexes), MAX_ENTRIES):
            yield partition, indexes[start : start + MAX_ENTRIES]
