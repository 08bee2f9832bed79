"""The gRPC side of a Xiu: writers' streams with a bounded window, fetches, scans.

    requests ──▶ reader ──▶ core          stops while more than the window waits for its answer
    replies  ◀── writer ◀── answers       all that wait leave in one message

Source: DESIGN sections 6 (a stream message costs 0.3 ms however full it is) and 11.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from pixiu.errors import GRPC_STATUS, InvalidArgument, MalformedData, Overloaded, PixiuError, StorageError, StoreDamaged
from pixiu.ids import MAX_ID, MAX_MSG_SEQUENCE
from pixiu.wire.levels import Level
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc
from xiu.block import Block
from xiu.core import Core
from xiu.events import Answer, EndStream, StoreReceived
from xiu.options import Options
from xiu.reading import Reading
from xiu.repair import Checked
from xiu.repairer import Repairer
from xiu.state import Head

MAX_FETCH: Final = 1000
MAX_BATCH_RECORDS: Final = 65_536
MAX_WAITING_BATCHES: Final = 4096
"""Of one stream. Policy: it is not read until some are answered."""
REPAIR_TRIES: Final = 3


class Shell(Protocol):
    """What the streams need of the service."""

    streams: Streams
    reading: Reading | None
    healer: Repairer

    @property
    def core(self) -> Core | None:
        """While the partition is open."""

    @property
    def leader_address(self) -> str:
        """Of the partition's leader; empty where it is not known."""

    def take(self, event: StoreReceived) -> None:
        """Give the core a batch."""


class Stream:
    """One writer's stream: what waits for an answer, and answers that wait to leave."""

    def __init__(self, number: int, window_bytes: int) -> None:
        self.number = number
        self._window = window_bytes
        self._waiting: deque[int] = deque()
        self._bytes = 0
        self.answers: list[Answer] = []
        self.wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.ended = False
        self.problem = ""

    def sent(self, size: int) -> None:
        """A batch went to the core."""
        self._waiting.append(size)
        self._bytes += size
        if self._bytes >= self._window or len(self._waiting) >= MAX_WAITING_BATCHES:
            self._room.clear()

    def answered(self, answer: Answer) -> None:
        """The core answered one batch; each batch is answered once."""
        self.answers.append(answer)
        self.wake.set()
        if self._waiting:
            self._bytes -= self._waiting.popleft()
        if self._bytes < self._window and len(self._waiting) < MAX_WAITING_BATCHES:
            self._room.set()

    def end(self, problem: str = "") -> None:
        """Nothing more comes."""
        self.ended = True
        self.problem = self.problem or problem
        self.wake.set()
        self._room.set()

    @property
    def unanswered(self) -> int:
        """Batches whose answers are still to come."""
        return len(self._waiting)

    async def room(self) -> None:
        """Until another batch may be taken."""
        await self._room.wait()


class Streams:
    """All writers' streams."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, window_bytes: int) -> Stream:
        """A new one. Bounded by the calls that the server allows."""
        self._next += 1
        self._streams[self._next] = stream = Stream(self._next, window_bytes)
        return stream

    def closed(self, stream: Stream) -> None:
        """It is gone: answers find nobody."""
        self._streams.pop(stream.number, None)

    def answer(self, effect: Answer) -> None:
        """The core's answer to one batch of a stream."""
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.answered(effect)

    def end(self, effect: EndStream) -> None:
        """What a stream brought is no batch."""
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.end(effect.text)

    def close(self) -> None:
        """The Xiu goes."""
        for stream in self._streams.values():
            stream.end()


class XiuService(xiu_pb2_grpc.XiuServicer):
    """Serves `pixiu.v1.Xiu`."""

    def __init__(self, shell: Shell, options: Options) -> None:
        self._shell = shell
        self._partition = options.partition
        self._window = options.stream_window_mb << 20
        self._verifying = asyncio.Lock()

    async def Store(
        self, requests: AsyncIterator[xiu_pb2.StoreRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[xiu_pb2.StoreReply]:
        """One writer's stream."""
        await self._open(context)
        stream = self._shell.streams.open(self._window)
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                answers, stream.answers = stream.answers, []
                if answers:
                    yield self._reply(answers)
                if stream.ended and (stream.problem or not stream.unanswered) and not stream.answers:
                    break
            if stream.problem:
                await context.abort(GRPC_STATUS[MalformedData.code], stream.problem)
        finally:
            reader.cancel()
            self._shell.streams.closed(stream)

    async def _read(self, stream: Stream, requests: AsyncIterator[xiu_pb2.StoreRequest]) -> None:
        try:
            async for request in requests:
                await stream.room()
                if stream.ended:
                    return
                problem = self._take(stream, request)
                if problem:
                    stream.end(problem)
                    return
        finally:
            stream.end()

    def _take(self, stream: Stream, request: xiu_pb2.StoreRequest) -> str:
        """Give a batch to the core; what is wrong with it as a whole, if anything."""
        level = Level.from_wire(request.level)
        if level is None:
            return f"unknown level {request.level}"
        if request.count > MAX_BATCH_RECORDS or request.position > MAX_ID:
            return f"a batch has at most {MAX_BATCH_RECORDS} records, and a position is below 2^63"
        stream.sent(len(request.batch))
        now_us = time.time_ns() // 1000
        self._shell.take(StoreReceived(stream.number, request.position, level, request.epoch, request.batch, request.count, now_us))
        return ""

    def _reply(self, answers: list[Answer]) -> xiu_pb2.StoreReply:
        newest = answers[-1]
        return xiu_pb2.StoreReply(
            results=[
                xiu_pb2.StoreResult(
                    position=result.position,
                    count=result.count,
                    sequence=result.sequence,
                    msg_id=result.msg_id,
                    code=result.code,
                    text=result.text,
                )
                for answer in answers
                for result in answer.results
            ],
            layout_version=newest.triple.layout_version,
            epoch=newest.triple.epoch,
            committed=newest.triple.committed,
            copies=newest.copies,
            partition=self._partition,
            leader="" if newest.triple.epoch else self._shell.leader_address,
        )

    async def Fetch(self, request: xiu_pb2.FetchRequest, context: grpc.aio.ServicerContext[Any, Any]) -> xiu_pb2.FetchReply:
        """Messages by MsgID."""
        reading, _ = await self._open(context)
        if len(request.msg_ids) > MAX_FETCH:
            await context.abort(GRPC_STATUS[InvalidArgument.code], f"a fetch names at most {MAX_FETCH} MsgIDs; send several")
        try:
            found = reading.fetch(request.msg_ids)
        except StorageError as error:
            await _refuse(context, error)
            raise
        if not request.local and any(each.code == StoreDamaged.code for each in found):
            found = await self._shell.healer.fetch(request.msg_ids, found)
        return xiu_pb2.FetchReply(
            batch=b"".join(each.record for each in found),
            codes=[each.code for each in found],
            partial=len(found) < len(request.msg_ids),
        )

    async def Scan(
        self, request: xiu_pb2.ScanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[xiu_pb2.ScanReply]:
        """A partition in order."""
        reading, _ = await self._open(context)
        end = request.end or MAX_MSG_SEQUENCE
        blocks = reading.scan(request.begin, end, request.limit or MAX_ID)
        begin, left = request.begin, request.limit or MAX_ID
        while True:
            try:
                block = next(blocks, None)
            except StoreDamaged as damage:
                if request.local:
                    await _refuse(context, damage)
                break
            except StorageError as error:
                await _refuse(context, error)
                return
            if block is None or left <= 0:
                return
            part = _part(block, max(begin, block.first), min(end, block.last, max(begin, block.first) + left - 1))
            left -= part.count
            begin = block.last + 1
            yield part
        try:
            async for part in self._shell.healer.scan(begin, end, left if request.limit else 0):
                yield part
        except StorageError as error:
            reading.damaged += 1
            await _refuse(context, error)

    async def Rows(self, request: xiu_pb2.RowsRequest, context: grpc.aio.ServicerContext[Any, Any]) -> xiu_pb2.RowsReply:
        """A page of the state's rows, for another replica."""
        reading, _ = await self._open(context)
        try:
            rows = reading.rows(request.begin)
        except StorageError as error:
            await _refuse(context, error)
            raise
        keys, values = [key for key, _ in rows], [value for _, value in rows]
        return xiu_pb2.RowsReply(keys=keys, values=values, applied=reading.head.applied.counter)

    async def Verify(self, request: xiu_pb2.VerifyRequest, context: grpc.aio.ServicerContext[Any, Any]) -> xiu_pb2.VerifyReply:
        """Check what is stored, and repair it."""
        await self._open(context)
        if self._verifying.locked():
            await context.abort(GRPC_STATUS[Overloaded.code], "this replica is being checked already; wait for it to end")
        async with self._verifying:
            try:
                return await self._verify(request.end or MAX_MSG_SEQUENCE, request.repair)
            except StorageError as error:
                await _refuse(context, error)
                raise

    async def _verify(self, end: int, repair: bool) -> xiu_pb2.VerifyReply:
        healer = self._shell.healer
        checked = await healer.verify(end)
        damaged, repaired, text = checked.damaged, 0, ""
        if damaged and repair:
            before = healer.counters.rows_repaired
            try:
                checked = await self._repair(end)
            except PixiuError as error:
                text = f"{error.code}: {error}"
            repaired = healer.counters.rows_repaired - before
        reading = self._shell.reading
        head = reading.head if reading is not None else Head()
        return xiu_pb2.VerifyReply(
            blocks=checked.blocks,
            records=checked.records,
            damaged=damaged,
            repaired=repaired,
            left=checked.damaged,
            text=text,
            last=head.last,
            floor=head.floor,
            ranges=[
                xiu_pb2.RangeDigest(range=begin, digest=digest, records=records)
                for begin, (digest, records) in sorted(checked.ranges.items())
            ],
        )

    async def _repair(self, end: int) -> Checked:
        """Repair the store, or let a repair end that something else began; what is left. Raises PixiuError."""
        healer = self._shell.healer
        for _ in range(REPAIR_TRIES):
            await healer.idle()
            checked = await healer.verify(end)
            if not checked.damaged:
                return checked
            try:
                await healer.repair()
            except Overloaded:
                continue
            return await healer.verify(end)
        raise Overloaded("this replica repairs itself again and again; look at its log")

    async def Position(
        self, request: xiu_pb2.PositionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> xiu_pb2.PositionReply:
        """Where the partition stands."""
        reading, core = await self._open(context)
        head = reading.head
        return xiu_pb2.PositionReply(
            partition=self._partition,
            layout_version=core.layout_version,
            epoch=core.epoch,
            committed=core.committed,
            last=head.last,
            floor=head.floor,
            leader=self._shell.leader_address,
        )

    async def _open(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[Reading, Core]:
        reading, core = self._shell.reading, self._shell.core
        if reading is None or core is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this Xiu is not open; try again soon")
            raise AssertionError("abort raises")
        return reading, core


def _part(block: Block, begin: int, end: int) -> xiu_pb2.ScanReply:
    """The records of a block from one sequence to another, both in it."""
    start, stop = block.range_of(begin, end)
    return xiu_pb2.ScanReply(sequence=begin, count=end - begin + 1, at_us=block.at_us, batch=block.records[start:stop])


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: PixiuError) -> None:
    await context.abort(GRPC_STATUS[error.code], f"{error.code}: {error}")
