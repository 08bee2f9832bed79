"""The shell of a bridge from a source to a topic: it reads, stores under the source's positions, and confirms to the source.

    source ──read──▶ writer of the stream, progress = position ──stored──▶ confirm
       ▲                                                                     │
       └── opened again after a failure, from what the topic has ◀───────────┘

The topic itself keeps the positions: a stream's writer has a name, and the topic its progress. So a record that is read again after
a crash is not stored again, and of two processes that run the bridge by mistake the later one goes on.

Source: docs/bridges.md, "How a bridge works"; docs/topics.md, "Writing".
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, cast

import xxhash
from structlog.typing import FilteringBoundLogger

from bridge.connector import Record, Source, said
from bridge.options import SourceOptions
from bridge.repeats import Repeats
from bridge.target_run import BRIDGE_FAILED, BRIDGE_REJECTED, wait_of
from bridge.unconfirmed import Kept, Ticket, Unconfirmed
from pixiu.client.client import Client
from pixiu.client.topics.drafts import MAX_NAME, TopicLevelName
from pixiu.client.topics.durable_topic import DurableTopic
from pixiu.client.topics.writing.writer import TopicWriter
from pixiu.errors import InvalidArgument, PixiuError, RecordTooLarge
from pixiu.rpc.backoff import Backoff

FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 60.0
CONFIRMED_AT_ONCE: Final = 1_000
CLOSE_S: Final = 10.0
"""Time in which a source has to close, seconds."""
TAIL_S: Final = 10.0
"""Time for reading the end of the topic for the IDs that it has, seconds. Policy: what is not read by then may be stored twice."""
DEAD_PIECE: Final = 900_000
"""Bytes of a record that one message of the dead topic has: a larger record is several messages."""


class SourceState(Enum):
    """State of a bridge from a source."""

    IDLE = "paused"
    OPENING = "opening"
    RUNNING = "running"
    WAITING = "waiting for the source or the topic"


@dataclass(slots=True)
class SourceCounters:
    """Totals of a bridge from a source."""

    messages: int = 0
    """Records that are stored, and confirmed to the source."""
    bytes: int = 0
    rejected: int = 0
    """Records that the topic cannot take; they are in the dead topic."""
    failures: int = 0
    """Times that the source or the topic failed, after which the source was opened again."""


class SourceRun:
    """One bridge from a source, in this process.

    Args:
        name: of the bridge.
        options: of it.
        make: makes the source.
        client: connected to the cluster.
        log: for what an operator has to see.
    """

    def __init__(
        self, name: str, options: SourceOptions, make: Callable[[], Source], client: Client, log: FilteringBoundLogger
    ) -> None:
        self.name, self.options = name, options
        self._make, self._client, self._log = make, client, log
        self.counters = SourceCounters()
        self.state = SourceState.IDLE
        self.why = self.before = ""
        self._unconfirmed = Unconfirmed()
        self._repeats: Repeats | None = None
        self._streams = frozenset[str]()
        """Those of the source when it was opened last."""
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._changed, self._read_some = asyncio.Event(), asyncio.Event()
        self._failure: Exception | None = None

    @property
    def running(self) -> bool:
        """True while it does anything."""
        return self._task is not None

    def begin(self) -> None:
        """Run. Does nothing if it runs."""
        if self._task is None:
            self._ending = False
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-bridge-{self.name}")

    async def end(self) -> None:
        """Read no more, and confirm what is stored."""
        self._ending = True
        self._changed.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def stop(self) -> None:
        """End at once."""
        if self._task is not None:
            self._task.cancel()
        await self.end()

    def status(self) -> dict[str, object]:
        """State for `/health` and `pixiu bridge status`."""
        return {
            "name": self.name, "kind": self.options.kind, "topic": self.options.topic, "channel": "", "state": self.state.value,
            "why": self.why, "messages": self.counters.messages, "bytes": self.counters.bytes, "rejected": self.counters.rejected,
            "retries": self.counters.failures, "waiting": len(self._unconfirmed), "before": self.before,
        }  # fmt: skip

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.Random().random)
        while not self._ending:
            before = self.counters.messages
            try:
                await self._once()
            except Exception as error:
                self.counters.failures += 1
                self.why = str(error) if isinstance(error, PixiuError) else f"{type(error).__name__}: {said(error)}"
                self.before = self.why
                self.state = SourceState.WAITING
                self._log.warning(BRIDGE_FAILED, bridge=self.name, text=self.why)
                if self.counters.messages > before:
                    backoff.reset()
                await self._rest(max(backoff.next_s(), wait_of(error)))
        self.state, self.why = SourceState.IDLE, ""

    def _note(self, text: str) -> None:
        """Say something that stays in the status while the bridge runs."""
        self.before = text
        self._log.warning(BRIDGE_FAILED, bridge=self.name, text=text)

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._ending:
                    self._changed.clear()
                    await self._changed.wait()

    async def _once(self) -> None:
        """Run until it is to end, or something fails."""
        self.state = SourceState.OPENING
        self._unconfirmed, self._failure, self._repeats = Unconfirmed(), None, None
        source = self._make()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(_closed, source)
            streams = await source.open()
            if self._streams and not self._streams.intersection(streams):
                self._note("the source was deleted and made again: the bridge has begun with the new one")
            self._streams = frozenset(streams)
            topic = self._client.durable_topic(self.options.topic)
            writers = {each: topic.writer(name=writer_name(self.name, each)) for each in streams}
            for writer in writers.values():
                await writer.open()
                stack.push_async_callback(_ended, writer)
            await source.resume({each: writer.progress for each, writer in writers.items()})
            if note := getattr(source, "note", ""):  # what the source lost before it was read
                self._note(note)
            plain = await topic.writer().open()
            confirms = asyncio.get_running_loop().create_task(self._confirm(source))
            stack.push_async_callback(_cancelled, confirms)
            self.state, self.why = SourceState.RUNNING, ""
            await self._read(source, writers, plain)

    async def _read(self, source: Source, writers: Mapping[str, TopicWriter], plain: TopicWriter) -> None:
        while not self._ending:
            records = await source.read()
            for record in records:
                await self._store(record, writers.get(record.stream, plain))
            self._raise()
            while self._full() and not self._ending:
                await self._wait()
        while len(self._unconfirmed):
            await self._wait()

    def _full(self) -> bool:
        options, found = self.options, self._unconfirmed
        return len(found) >= options.max_unconfirmed or found.bytes >= options.max_unconfirmed_bytes

    async def _wait(self) -> None:
        self._changed.clear()
        self._raise()
        await self._changed.wait()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _store(self, record: Record, writer: TopicWriter) -> None:
        options: dict[str, Any] = {"progress": record.progress} if record.progress else {}
        ticket: Ticket
        if record.id_header and await self._is_repeated(record):
            self._unconfirmed.add(record, Kept())  # confirmed after the first one, which was read before it
            self._read_some.set()
            return
        try:
            ticket = await writer.send(
                record.body, key=record.key, headers=record.headers or None, event_time=record.event_time_us,
                level=cast(TopicLevelName, self.options.level), **options,
            )  # fmt: skip
        except (InvalidArgument, RecordTooLarge) as error:
            await self._reject(record, str(error))
            ticket = Kept()
        self._unconfirmed.add(record, ticket)
        self._read_some.set()

    async def _is_repeated(self, record: Record) -> bool:
        """True if the topic has stored a record with this ID lately. The first question reads the topic's end."""
        if self._repeats is None:
            topic = self._client.durable_topic(self.options.topic)
            self._repeats = await ids_in(topic, record.id_header, self.options.max_unconfirmed)
        return not self._repeats.note(record.headers[record.id_header])

    async def _confirm(self, source: Source) -> None:
        """Confirm to the source what is stored."""
        try:
            while True:
                first = self._unconfirmed.first
                if first is None:
                    self._read_some.clear()
                    await self._read_some.wait()
                    continue
                await first.outcome()
                found = self._unconfirmed.take(CONFIRMED_AT_ONCE)
                await source.confirm(found)
                self.counters.messages += len(found)
                self.counters.bytes += sum(len(record.body) for record in found)
                self._changed.set()
        except Exception as error:
            self._failure = error
            self._changed.set()

    async def _reject(self, record: Record, why: str) -> None:
        """Store what the topic cannot take in the dead topic, in pieces if it is large."""
        name = self.options.dead_topic or f"{self.options.topic}.dead"
        await self._client.topics.create(name, if_missing=True)
        self._log.warning(BRIDGE_REJECTED, bridge=self.name, stream=record.stream, position=record.progress, why=why)
        pieces = [record.body[at : at + DEAD_PIECE] for at in range(0, len(record.body), DEAD_PIECE)] or [b""]
        about = {"bridge": self.name, "reason": why[:1000], "stream": record.stream, "position": str(record.progress)}
        key = (record.key or b"")[:1000]
        for number, piece in enumerate(pieces, 1):
            headers = {**about, "piece": f"{number}/{len(pieces)}"}
            await self._client.durable_topic(name).send(piece, key=key or None, slot=0, headers=headers)
        self.counters.rejected += 1


async def ids_in(topic: DurableTopic, header: str, most: int) -> Repeats:
    """The values of a header in the last messages of each part, `most` at most. Raises `NotAllowed`, `Unavailable`."""
    found = Repeats()
    async with topic.reader("latest", load_test="pass") as reader:
        ends = {int(part): end for part, end in reader.position.items()}
    low = {part: max(0, end - most) for part, end in ends.items()}
    left = {part for part, end in ends.items() if low[part] < end}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TAIL_S), topic.reader(low, load_test="pass") as reader:
            while left:
                messages = await reader.next_batch() or ()
                for message in messages:
                    if (value := message.headers.get(header)) is not None:
                        found.note(value)
                left -= {each.part for each in messages if each.offset + 1 >= ends.get(each.part, 0)}
    return found


def writer_name(bridge: str, stream: str) -> str:
    """The name of the writer of a stream, which keeps its position. A long one is cut, and made unique."""
    name = "".join(each if each.isascii() and (each.isalnum() or each in "._-") else "_" for each in f"bridge.{bridge}.{stream}")
    if name == f"bridge.{bridge}.{stream}" and len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 17]}.{xxhash.xxh3_64_hexdigest(f'{bridge}/{stream}'.encode())}"


async def _closed(source: Source) -> None:
    with contextlib.suppress(TimeoutError, PixiuError):
        async with asyncio.timeout(CLOSE_S):
            await source.close()


async def _ended(writer: TopicWriter) -> None:
    with contextlib.suppress(PixiuError):
        await writer.close()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
