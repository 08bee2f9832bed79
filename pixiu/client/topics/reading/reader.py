"""A reader of a topic: everything from a place on, without a channel. The cluster keeps nothing of it.

    async with topic.reader(start="earliest") as reader:
        async for message in reader:
            ...
        saved = json.dumps(reader.position)             # topic.reader(start=json.loads(saved)) goes on there

Source: docs/topics.md, "Reading".
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from pixiu.client.topics.drafts import micros_of
from pixiu.client.topics.reading.reader_core import PartRead, ReaderCore, Where, slots_of
from pixiu.client.topics.reading.received import Origin, TopicMessage
from pixiu.client.topics.surroundings import TopicContext, ask_leader
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import InvalidArgument, MalformedData, NotConnected, PixiuError, Unavailable, UnknownTopic
from pixiu.rpc.backoff import Backoff
from pixiu.wire.block import HEAD_BYTES, INDEX_BYTES, STAMP, STAMP_BYTES, Flag, parse_stored, stored_size
from pixiu.wire.v1 import topic_pb2

WAIT_MS: Final = 10_000
"""Time for which a leader may wait for the first block."""
READ_BYTES: Final = 1 << 20
"""Bytes of one read. Policy: less when many parts are read at a time, so that all together are not above `UNDER_WAY_BYTES`."""
LEAST_READ_BYTES: Final = 64 << 10
UNDER_WAY_BYTES: Final = 64 << 20
BUFFER_BATCHES: Final = 64
"""Batches that wait for the application. Policy: parts are read no further until it has taken some."""
PLACES: Final = 32
"""Parts whose beginning is asked for at a time."""
UNREADABLE_S: Final = 30.0
"""Time for which nobody may lead a part before the reader ends with that error, seconds."""
Start = Literal["earliest", "latest"] | datetime | int | Mapping[str, int] | Mapping[int, int]
log = logging.getLogger("pixiu.client")


class TopicGap(NamedTuple):
    """Messages that a reader does not get: they are kept no more, or nobody can read them."""

    part: int
    low: int
    high: int
    """Offsets [low, high)."""


class Batch(NamedTuple):
    """Result of one read."""

    part: int
    messages: list[TopicMessage]
    next: int
    """Offset after them."""
    gap: TopicGap | None = None
    finished: bool = False


class TopicReader:
    """Reads a topic: `async for message in reader`, or `async for messages in reader.batches()`. `DurableTopic.reader` makes one.

    Messages of a part come in the order in which they were stored, so those of a slot, or key, do; a part comes after those before
    it.

    Args:
        around: the client.
        topic: the topic's name.
        start: where to begin.
        slots: slots to read; None: all.
        on_gap: called for messages that are missing.
        load_test: which messages of load tests come.
    """

    def __init__(
        self,
        around: TopicContext,
        topic: str,
        start: Start,
        slots: Iterable[int] | None,
        on_gap: Callable[[TopicGap], None] | None,
        load_test: int,
    ) -> None:
        self._around, self._name = around, topic
        self._start, self._slots = where_of(start), slots_of(slots)
        self._on_gap, self._load_test = on_gap, load_test
        self._core: ReaderCore | None = None
        self._batches: deque[Batch] = deque()
        self._current: deque[TopicMessage] = deque()
        self._batch: Batch | None = None
        """The batch of `_current`."""
        self._changed, self._opening = asyncio.Event(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: PixiuError | None = None
        self._closed = False

    async def open(self) -> Self:
        """Find the topic and begin to read. Raises `UnknownTopic`, `NotAllowed`, `Unavailable`, and `NotConnected` if the reader is
        closed meanwhile."""
        async with self._opening:
            if self._core is None:
                await self._find()
        return self

    async def _find(self) -> None:
        topic = await self._around.directory.follow(self._name, self._on_topic, self._fail)
        try:
            core = ReaderCore(topic, self._start, self._slots)
            await self._place(core)
            core.set_topic(await self._around.directory.topic(self._name))
            if self._closed:
                raise NotConnected("the reader is closed: open another one")
        except BaseException:
            self._around.directory.leave(self._name, self._on_topic)
            raise
        self._core = core
        self._around.users.add(self)
        self._begin()

    async def _place(self, core: ReaderCore) -> None:
        """Find the offsets at which parts begin that begin at a time, or at their end."""
        at_a_time = asyncio.Semaphore(PLACES)

        async def place(each: PartRead) -> None:
            async with at_a_time:
                reply = await self._ask(each, each.where, max_bytes=1, wait_ms=0)
            blocks = reply.blocks
            base = STAMP.unpack_from(blocks)[2] if len(blocks) >= STAMP_BYTES and each.where != "end" else reply.next
            each.where = each.next = int(base)

        await asyncio.gather(*(place(each) for each in core.parts.values() if not isinstance(each.where, int)))

    async def close(self) -> None:
        """Stop reading."""
        if self._closed:
            return
        self._closed = True
        self._around.users.discard(self)
        self._around.directory.leave(self._name, self._on_topic)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._changed.set()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def position(self) -> dict[str, int]:
        """{part: offset of the next message}: everything before was returned. JSON can have it; `start` takes it."""
        return {} if self._core is None else self._core.position()

    # --- taking

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicMessage:
        """Wait for the next message. Raises the error that ended the reader."""
        message = await self.next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def next(self) -> TopicMessage | None:
        """Wait for the next message; None once the reader is closed."""
        while not self._current:
            batch = await self._next()
            if batch is None:
                return None
            self._batch = batch
            self._current.extend(batch.messages)
            if not batch.messages:
                self._done(batch)
        message = self._current.popleft()
        assert self._core is not None
        assert self._batch is not None
        self._core.parts[message.part].next = message.offset + 1
        if not self._current:
            self._done(self._batch)
        return message

    async def batches(self) -> AsyncIterator[list[TopicMessage]]:
        """Iterate over messages in lists, each of one part and at most a mebibyte."""
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> list[TopicMessage] | None:
        """Wait for the next list of messages; None once the reader is closed."""
        if self._current:
            rest = list(self._current)
            self._current.clear()
            assert self._batch is not None
            self._done(self._batch)
            return rest
        while (batch := await self._next()) is not None:
            self._done(batch)
            if batch.messages:
                return batch.messages
        return None

    async def _next(self) -> Batch | None:
        if not self._closed:
            await self.open()
        while not self._closed:
            if self._batches:
                batch = self._batches.popleft()
                self._changed.set()  # there is space
                if batch.gap is not None and self._on_gap is not None:
                    try:
                        self._on_gap(batch.gap)
                    except Exception:
                        log.exception("topic_gap_callback_failed")
                return batch
            if self._error is not None:
                raise self._error
            await self._change()
        return None

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _done(self, batch: Batch) -> None:
        """The application has a batch."""
        assert self._core is not None
        self._core.parts[batch.part].next = batch.next
        if batch.finished:
            self._core.finish(batch.part)
            self._begin()

    # --- reading

    def _on_topic(self, topic: TopicMap) -> None:
        if self._core is not None and not self._closed and topic.replaces(self._core.topic):
            self._fail(UnknownTopic(topic.gone_text()))
        elif self._core is not None and not self._closed:
            self._core.set_topic(topic)
            self._begin()

    def _fail(self, error: PixiuError) -> None:
        self._error = self._error or error
        self._changed.set()

    def _begin(self) -> None:
        assert self._core is not None
        for each in self._core.ready():
            task = asyncio.create_task(self._read(each), name=f"pixiu-topic-read-{self._name}-{each.part.number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, each: PartRead) -> None:
        """Read one part until it is finished."""
        try:
            finished, loop = False, asyncio.get_running_loop()
            assert isinstance(each.where, int)
            where = each.where
            backoff = Backoff(self._around.options.backoff_s, 1.0, self._around.uniform)
            while not finished:
                while len(self._batches) >= BUFFER_BATCHES:
                    await self._change()
                began = loop.time()
                limit = min(READ_BYTES, max(LEAST_READ_BYTES, UNDER_WAY_BYTES // max(1, len(self._tasks))))
                following, finished = self._take(each, where, await self._ask(each, where, limit))
                if following == where and not finished and loop.time() < began + WAIT_MS / 2000:
                    await asyncio.sleep(backoff.next_s())  # a leader that does not wait
                where = following
            self._around.directory.refresh(self._name)
        except PixiuError as error:
            self._fail(error)

    async def _ask(
        self, each: PartRead, where: Where, max_bytes: int = READ_BYTES, wait_ms: int = WAIT_MS
    ) -> topic_pb2.TopicReadReply:
        request = topic_pb2.TopicReadRequest(topic=self._name, part=each.part.number, max_bytes=max_bytes, wait_ms=wait_ms)
        if isinstance(where, int):
            request.offset = where
        elif isinstance(where, tuple):
            request.time_us = where[1]
        else:
            request.end = True

        async def call(stub: Any, seconds: float) -> topic_pb2.TopicReadReply:
            reply: topic_pb2.TopicReadReply = await stub.Read(request, timeout=seconds, metadata=self._around.channels.metadata())
            return reply

        group = each.part.group
        return await ask_leader(
            self._around, self._name, group, call, call_s=WAIT_MS / 1000 + 5.0, limit_s=WAIT_MS / 1000 + UNREADABLE_S
        )

    def _take(self, each: PartRead, where: int, reply: topic_pb2.TopicReadReply) -> tuple[int, bool]:
        """Queue what a read found. Returns from where to go on, and whether the part is finished."""
        part, following = each.part.number, max(reply.next, where)
        messages = self._messages(part, reply.blocks, where)
        gap = TopicGap(part, reply.gap_low, reply.gap_high) if reply.gap_high > reply.gap_low else None
        if each.first and gap is not None and gap.high <= reply.first:
            gap = None
        each.first = False
        finished = reply.sealed and following >= reply.committed_end
        if messages or gap is not None or finished or following != where:
            self._batches.append(Batch(part, messages, following, gap, finished))
            self._changed.set()
        return following, finished

    def _messages(self, part: int, data: bytes, low: int) -> list[TopicMessage]:
        found: list[TopicMessage] = []
        at, core = 0, self._core
        assert core is not None
        while at < len(data):
            size = stored_size(data[at : at + STAMP_BYTES])
            if not size or at + size > len(data):
                raise Unavailable(f"blocks of part {part} of {self._name} were damaged on the way; read again")
            try:
                stamp, block = parse_stored(data[at : at + size])
            except MalformedData as problem:
                raise Unavailable(f"a block of part {part} of {self._name} was damaged on the way: {problem}") from None
            if block.flags & Flag.HOLE:
                at += size
                continue
            origin = Origin(self._name, part, stamp.at_us, stamp.sender, block.writer)
            begin = HEAD_BYTES + INDEX_BYTES * block.count
            before = begin
            for number, (end, slot, flags, _) in enumerate(block.index()):
                start, before = before, begin + end
                wanted = core.slots is None or slot in core.slots
                if stamp.base + number >= low and wanted and self._passes(flags):
                    found.append(TopicMessage(origin, stamp.base + number, block.data, start, begin + end, slot, flags))
            at += size
        return found

    def _passes(self, flags: int) -> bool:
        """True if a message comes, by its mark of a load test."""
        if self._load_test == topic_pb2.LOAD_TEST_PASS:
            return True
        return bool(flags & 1) == (self._load_test == topic_pb2.LOAD_TEST_ONLY)


def where_of(start: Start) -> Where | dict[int, int]:
    """Check where a reader begins. Raises `InvalidArgument`."""
    if start == "earliest":
        return 0
    if start == "latest":
        return "end"
    if isinstance(start, Mapping):
        try:
            found = {int(part): int(offset) for part, offset in start.items()}
        except (TypeError, ValueError):
            found = {-1: -1}
        if any(part < 1 or offset < 0 for part, offset in found.items()):
            raise InvalidArgument(f"a position is {{part: offset}}, as `reader.position` gives it, not {start!r}")
        return found
    if isinstance(start, datetime) or (isinstance(start, int) and not isinstance(start, bool)):
        return "time", micros_of(start) or 0
    raise InvalidArgument(f'start is "earliest", "latest", a time, or {{part: offset}}, not {start!r}')
