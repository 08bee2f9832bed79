"""A caller of a Pi replica: requests on one stream, answers by their numbers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    USER_DEVICE,
    Acknowledges,
    Appends,
    OpenSessions,
    Operation,
    Writer,
    encode,
)
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc
from tests.support.roles import Roles
from tests.support.waiting import until

WAIT_S = 120.0
UIN = 7
"""Whose inbox a `Sender` fills."""
BATCH = 20


class Lost(Exception):
    """The stream ended before the answer came."""


class PiClient:
    """One stream."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._requests: asyncio.Queue[pi_pb2.PiRequest | None] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[pi_pb2.PiReply]] = {}
        self._last = 0
        self._reader = asyncio.create_task(self._read())

    async def _send(self) -> AsyncIterator[pi_pb2.PiRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self) -> None:
        try:
            async for reply in pi_pb2_grpc.PiStub(self._channel).Exchange(self._send()):
                self._waiting.pop(reply.request).set_result(reply)
        except grpc.RpcError:
            pass
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Lost())
            self._waiting.clear()

    def begin(
        self, *operations: Operation, level: int = 0, reads: Sequence[pi_pb2.PiRead] = (), raw: bytes = b""
    ) -> asyncio.Future[pi_pb2.PiReply]:
        """Send a request; its answer."""
        self._last += 1
        future: asyncio.Future[pi_pb2.PiReply] = asyncio.get_running_loop().create_future()
        if self._reader.done():
            future.set_exception(Lost())
            return future
        self._waiting[self._last] = future
        request = pi_pb2.PiRequest(request=self._last, operations=raw or encode(operations), reads=reads)
        request.level = level  # type: ignore[assignment]
        self._requests.put_nowait(request)
        return future

    async def ask(self, *operations: Operation, level: int = 0, reads: Sequence[pi_pb2.PiRead] = ()) -> pi_pb2.PiReply:
        """The same, awaited."""
        async with asyncio.timeout(WAIT_S):
            return await self.begin(*operations, level=level, reads=reads)

    async def session(self, uin: int, device: int = 0) -> int:
        """Open a session."""
        reply = await self.ask(OpenSessions(USER_DEVICE.pack(uin, device)))
        assert not reply.code, reply
        return reply.results[0]

    async def read(self, uin: int, session: int, start: int | None = None, num: int = 1000, lane: int = 1) -> pi_pb2.PiReadReply:
        """One read of device 0."""
        read = pi_pb2.PiRead(uin=uin, lane=lane, session=session, num=num, start=start)
        reply = await self.ask(reads=[read])
        assert not reply.code, reply
        return reply.reads[0]

    async def close(self) -> None:
        """End the stream."""
        self._requests.put_nowait(None)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(10):
                await self._reader
        await self._channel.close()


def message(number: int, lane: int = 1) -> int:
    """A MsgID of Xiu partition 0."""
    return lane << 54 | number


def appends(epoch: int, *pairs: tuple[int, int], worker: int = 1, generation: int = 1) -> Appends:
    """(MsgID, UIN) of each."""
    return Appends(Writer(worker, generation, epoch), b"".join(APPEND.pack(*pair) for pair in pairs))


def acknowledges(uin: int, session: int, up_to: int, bits: int = 0, device: int = 0, lane: int = 1) -> Acknowledges:
    """One cursor."""
    return Acknowledges(ACKNOWLEDGE.pack(uin, device, lane, session, up_to, bits))


class Sender:
    """One writer that appends to one inbox in order, whoever leads, and remembers what was acknowledged."""

    def __init__(self, roles: Roles, alive: set[str]) -> None:
        self._roles, self._alive = roles, alive
        self.known: dict[int, int] = {}
        self.sent = 0
        self.epoch = 0
        """Of the leader that acknowledged last."""
        self._generation = 0
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._stopping:
            for name in sorted(self._alive):
                try:
                    node = await self._roles.node(name)
                except AssertionError:  # it was killed just now
                    continue
                if node is not None:
                    client = PiClient(node.address)
                    try:
                        await self._send(client)
                    finally:
                        await client.close()
            await asyncio.sleep(0.05)

    async def _send(self, client: PiClient) -> None:
        """Everything unconfirmed, then more, until an answer is no acknowledgement."""
        try:
            epoch = (await client.ask()).epoch
            if not epoch:
                return
            self._generation += 1
            while not self._stopping:
                first = len(self.known) + 1
                pairs = [(message(number), UIN) for number in range(first, first + BATCH)]
                self.sent = max(self.sent, first + BATCH - 1)
                reply = await client.ask(appends(epoch, *pairs, generation=self._generation))
                if reply.code or min(reply.results) < 0:
                    return
                self.epoch = reply.epoch
                for (msg_id, _), seq in zip(pairs, reply.results, strict=True):
                    assert self.known.setdefault(msg_id, seq) == seq
        except Lost:
            return

    async def more(self, count: int, epoch: int = 0) -> float:
        """Wait for so many more acknowledgements, the last of a later epoch; seconds."""
        before, began = len(self.known), time.monotonic()

        async def came() -> bool:
            if self._task.done():
                self._task.result()
            return len(self.known) >= before + count and self.epoch > epoch

        await until(came, f"{count} more acknowledgements")
        return time.monotonic() - began

    async def stop(self) -> None:
        self._stopping = True
        await self._task


async def inbox(roles: Roles, name: str) -> list[tuple[int, int]]:
    """The whole inbox as a replica serves it."""
    (node,) = await roles.running(name)
    client = PiClient(node.address)
    session = await client.session(UIN)
    found: list[tuple[int, int]] = []
    while True:
        page = await client.read(UIN, session, start=found[-1][0] if found else 0)
        assert not page.code, page
        found += zip(page.seqs, page.msg_ids, strict=True)
        if found[-1][0] >= page.last:
            await client.close()
            return found
