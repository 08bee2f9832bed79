"""The gRPC side of a Xiu: writers' streams, fetches, scans.

Source: docs/links.md, docs/stores.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Protocol

import grpc.aio

from cluster.store.streams import StoreStreams, Window
from pixiu.errors import InvalidArgument, MalformedData, StorageError, StoreDamaged, Unavailable
from pixiu.ids import MAX_ID, MAX_MSG_SEQUENCE
from pixiu.rpc.duplex import Served
from pixiu.wire.levels import Level
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc
from xiu.core import Core
from xiu.events import Answer, StoreReceived
from xiu.options import Options
from xiu.records.block import Block
from xiu.state.restoring import Step, check_records
from xiu.state.state import Head
from xiu.store.reading import MAX_COLD_BLOCKS, Reading
from xiu.store.repairer import Repairer

MAX_FETCH: Final = 1000
MAX_BATCH_RECORDS: Final = 65_536
WINDOW: Final = Window(requests=4096, size=8 << 20, joined=4096)
"""Limits of one writer's stream. The size is of its records that wait for their answers."""
STEPS: Final = frozenset(map(int, Step))
"""Steps of a restore."""
MAX_TEXT: Final = 512
"""Limit of an operator's name and reason, characters."""

NOT_OPEN: Final = "this Xiu is not open; try again soon"

StoreHandler = Served[xiu_pb2.StoreReply, xiu_pb2.StoreRequest]


class Shell(Protocol):
    """Interface of the service to the streams."""

    reading: Reading | None
    healer: Repairer

    @property
    def core(self) -> Core | None:
        """The core while the partition is open."""

    @property
    def leader_address(self) -> str:
        """Address of the partition's leader; empty if unknown."""

    @property
    def member(self) -> int:
        """This replica's MemberID."""

    def take(self, event: StoreReceived) -> None:
        """Give a batch to the core."""

    async def restore(self, step: Step, blocks: Sequence[Block], operator: str, reason: str) -> Head:
        """Take a step of a restore."""

    async def trim(self, position: int, operator: str, reason: str) -> Head:
        """Trim records before a position."""


class XiuService(xiu_pb2_grpc.XiuServicer):
    """The gRPC service `pixiu.v1.Xiu`."""

    def __init__(self, shell: Shell, options: Options) -> None:
        self._shell = shell
        self._partition = options.partition
        self.streams: StoreStreams[Answer, xiu_pb2.StoreReply, xiu_pb2.StoreRequest] = StoreStreams(
            WINDOW, lambda request: len(request.batch), self._reply
        )

    async def store(self, handler: StoreHandler) -> None:
        """Serve one writer's stream."""
        self._open()
        stream = self.streams.open(handler, self._take)
        await stream.run()
        if stream.problem:
            raise MalformedData(stream.problem)

    def _take(self, number: int, request: xiu_pb2.StoreRequest) -> str:
        """Give a batch to the core; return the problem of a batch as a whole."""
        level = Level.from_wire(request.level)
        if level is None:
            return f"unknown level {request.level}"
        if request.count > MAX_BATCH_RECORDS or request.position > MAX_ID:
            return f"a batch has at most {MAX_BATCH_RECORDS} records, and a position is below 2^63"
        self._shell.take(StoreReceived(number, request.position, level, request.epoch, request.batch, request.count))
        return ""

    def _reply(self, answers: Sequence[Answer]) -> xiu_pb2.StoreReply:
        """Make the reply with these answers."""
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
                    partitions=result.partitions,
                    retry_after_ms=result.retry_after_ms,
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
        """Return messages by MsgID."""
        reading, _ = self._open()
        if len(request.msg_ids) > MAX_FETCH:
            raise InvalidArgument(f"a fetch names at most {MAX_FETCH} MsgIDs; send several")
        # Another replica uses this answer to repair its own, and does not ask twice.
        found = reading.fetch(request.msg_ids, max_cold=None if request.local else MAX_COLD_BLOCKS)
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
        """Stream a partition in order."""
        reading, _ = self._open()
        end = request.end or MAX_MSG_SEQUENCE
        blocks = reading.scan(request.begin, end, request.limit or MAX_ID)
        begin, left = request.begin, request.limit or MAX_ID
        while True:
            try:
                block = next(blocks, None)
            except StoreDamaged:
                if request.local:
                    raise
                break
            if block is None or left <= 0:
                return
            part = _part(block, max(begin, block.first), min(end, block.last, max(begin, block.first) + left - 1))
            left -= part.count
            begin = block.last + 1
            yield part
        try:
            async for part in self._shell.healer.scan(begin, end, left if request.limit else 0):
                yield part
        except StorageError:
            reading.damaged += 1
            raise

    async def Rows(self, request: xiu_pb2.RowsRequest, context: grpc.aio.ServicerContext[Any, Any]) -> xiu_pb2.RowsReply:
        """Return a page of the state's rows, for another replica."""
        reading, _ = self._open()
        rows = reading.rows(request.begin)
        keys, values = [key for key, _ in rows], [value for _, value in rows]
        return xiu_pb2.RowsReply(keys=keys, values=values, applied=reading.head.applied.counter)

    async def Position(
        self, request: xiu_pb2.PositionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> xiu_pb2.PositionReply:
        """Report the partition's position."""
        reading, core = self._open()
        head = reading.head
        return xiu_pb2.PositionReply(
            partition=self._partition,
            layout_version=core.layout_version,
            epoch=core.epoch,
            committed=core.committed,
            last=head.last,
            floor=head.floor,
            leader=self._shell.leader_address,
            member=self._shell.member,
        )

    async def Restore(self, request: xiu_pb2.RestoreRequest, context: grpc.aio.ServicerContext[Any, Any]) -> xiu_pb2.RestoreReply:
        """Take a step of a restore."""
        self._open()
        step, blocks = self._restore_step(request)
        head = await self._shell.restore(step, blocks, request.operator, request.reason)
        return xiu_pb2.RestoreReply(restored=head.restored, below=head.below, floor=head.floor)

    def _restore_step(self, request: xiu_pb2.RestoreRequest) -> tuple[Step, list[Block]]:
        """Decode an operator's request. Raises InvalidArgument, MalformedData."""
        self._check_operator(request)
        number = int(request.step)
        if number not in STEPS or (request.blocks and number != Step.BLOCKS):
            raise InvalidArgument(f"unknown step {number}, or blocks with one that has none")
        step, blocks = Step(number), [Block(each.sequence, each.count, each.at_us, each.batch) for each in request.blocks]
        if step is Step.BLOCKS:
            check_records(blocks, self._partition)
        return step, blocks

    async def Trim(self, request: xiu_pb2.TrimRequest, context: grpc.aio.ServicerContext[Any, Any]) -> xiu_pb2.TrimReply:
        """Trim records that are kept elsewhere."""
        self._open()
        self._check_operator(request)
        head = await self._shell.trim(request.position, request.operator, request.reason)
        return xiu_pb2.TrimReply(floor=head.floor)

    def _check_operator(self, request: xiu_pb2.RestoreRequest | xiu_pb2.TrimRequest) -> None:
        if not (0 < len(request.operator) <= MAX_TEXT and 0 < len(request.reason) <= MAX_TEXT):
            raise InvalidArgument(f"operator and reason have 1 to {MAX_TEXT} characters")
        if request.member != self._shell.member:
            raise InvalidArgument(f"this is the replica {self._shell.member:016x}")

    def _open(self) -> tuple[Reading, Core]:
        reading, core = self._shell.reading, self._shell.core
        if reading is None or core is None:
            raise Unavailable(NOT_OPEN)
        return reading, core


def _part(block: Block, begin: int, end: int) -> xiu_pb2.ScanReply:
    """The records of a block from one sequence to another, both in it."""
    start, stop = block.range_of(begin, end)
    return xiu_pb2.ScanReply(sequence=begin, count=end - begin + 1, at_us=block.at_us, batch=block.records[start:stop])
