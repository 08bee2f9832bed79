"""A writer of a Xiu for tests: batches on one stream, and what became of each record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

import grpc.aio

from pixiu.discovery.node import Node
from pixiu.ids import msg_id, snowflake
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.levels import Level
from pixiu.wire.record import Kind, encode, split
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc
from tests.support.framed import store_call


def mails(begin: int, count: int, *, key: int = 4, body: bytes = b"body", worker: int = 1) -> list[bytes]:
    """Records with fresh SnowflakeIDs, numbered in their bodies."""
    now = time.time_ns() // 1_000_000
    return [
        encode(Kind.MAIL, key, b"%d %s" % (number, body), snowflake(now, worker, number % 1024))
        for number in range(begin, begin + count)
    ]


class Writer:
    """One stream to one Xiu. `fates[position]`: (code, MsgID)."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.channel = grpc.aio.insecure_channel(node.address)
        self.stub = xiu_pb2_grpc.XiuStub(self.channel)  # type: ignore[no-untyped-call, unused-ignore]
        self.fates: dict[int, tuple[str, int]] = {}
        self.replies: list[xiu_pb2.StoreReply] = []
        self.texts: dict[int, str] = {}
        self.problem = ""
        self._queue: asyncio.Queue[xiu_pb2.StoreRequest | None] = asyncio.Queue()
        self._position = 0
        self._sent: dict[int, bytes] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Writer:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._queue.put_nowait(None)
        assert self._task is not None
        try:
            await asyncio.wait_for(self._task, 30)
        finally:
            await self.channel.close()

    async def _run(self) -> None:
        async with store_call(self._node) as call:

            async def write() -> None:
                while (request := await self._queue.get()) is not None:
                    await call.write(request)
                await call.done_writing()

            writing = asyncio.create_task(write())
            try:
                while (reply := await call.read()) is not None:
                    self._note(reply)
            except StreamEnded as ended:
                self.problem = str(ended)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                self._changed.set()

    def _note(self, reply: xiu_pb2.StoreReply) -> None:
        self.replies.append(reply)
        for result in reply.results:
            for index in range(result.count):
                position = result.position + index
                assert position not in self.fates, "a record is answered once"
                made = msg_id(reply.partition, self._sent[position][6], result.sequence + index)
                self.fates[position] = result.code, 0 if result.code else result.msg_id or made
                self.texts[position] = result.text
        self._changed.set()

    def send(self, records: Sequence[bytes], level: Level = Level.REPLICATED, epoch: int = 0) -> list[int]:
        """Their positions."""
        first, self._position = self._position + 1, self._position + len(records)
        positions = list(range(first, first + len(records)))
        self._sent.update(zip(positions, records, strict=True))
        self.send_raw(b"".join(records), len(records), first, level, epoch)
        return positions

    def send_raw(self, batch: bytes, count: int, position: int, level: Level = Level.REPLICATED, epoch: int = 0) -> None:
        self._queue.put_nowait(xiu_pb2.StoreRequest(batch=batch, count=count, position=position, level=level.value, epoch=epoch))

    async def answers(self, positions: Sequence[int]) -> list[tuple[str, int]]:
        """The fates of positions, when all are there, or the stream has ended."""
        async with asyncio.timeout(60):
            while not all(position in self.fates for position in positions) and self._task is not None and not self._task.done():
                self._changed.clear()
                await self._changed.wait()
        return [self.fates[position] for position in positions if position in self.fates]

    async def store(self, records: Sequence[bytes], level: Level = Level.REPLICATED) -> list[tuple[str, int]]:
        return await self.answers(self.send(records, level))

    async def fetch(self, msg_ids: Sequence[int]) -> list[tuple[str, bytes]]:
        """(code, record) of each."""
        found: list[tuple[str, bytes]] = []
        while len(found) < len(msg_ids):
            reply = await self.stub.Fetch(xiu_pb2.FetchRequest(msg_ids=msg_ids[len(found) : len(found) + 1000]))
            records = iter(split(reply.batch, sum(not code for code in reply.codes)))
            found += [(code, b"" if code else next(records)) for code in reply.codes]
        return found

    async def scan(self, begin: int = 0, end: int = 0, limit: int = 0) -> list[tuple[int, bytes]]:
        """(sequence, record) in order."""
        found: list[tuple[int, bytes]] = []
        async for reply in self.stub.Scan(xiu_pb2.ScanRequest(begin=begin, end=end, limit=limit)):
            found += enumerate(split(reply.batch, reply.count), reply.sequence)
        return found
