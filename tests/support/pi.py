"""A caller of a Pi replica: requests on one stream, answers by their numbers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from pi.operations import ACKNOWLEDGE, APPEND, USER_DEVICE, Acknowledges, Appends, OpenSessions, Operation, Writer, encode
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc

WAIT_S = 120.0


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
