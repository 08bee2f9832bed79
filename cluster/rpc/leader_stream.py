"""Streams to the leaders of Xiu and Pi: found, opened, and opened again elsewhere.

A replica that does not lead says so, and who does, in its answer to an empty request; so the first one asked is any Running one.

Source: DESIGN sections 6 (mail goes by streams) and 9 ("Mail").
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.errors import Unavailable
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.channels import STREAM_ERRORS, Channels, reason_of
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc, xiu_pb2, xiu_pb2_grpc

ASK_TIMEOUT_S: Final = 3.0
"""For the answer to the empty request."""
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0
STATES: Final = (NodeState.RUNNING, NodeState.DRAINING)

Request = xiu_pb2.StoreRequest | pi_pb2.PiRequest
Reply = xiu_pb2.StoreReply | pi_pb2.PiReply


class LeaderStream:
    """Keeps a stream to the leader of one partition: of Pi (`Exchange`) or of Xiu (`Store`).

    Args:
        role: "pi" or "xiu".
        partition: of it.
        view: gives the newest view of the cluster.
        channels: gRPC channels by address.
        up: called with the leader's epoch when a stream is open.
        reply: called with each reply.
        down: called with the reason when the stream is gone, or could not be opened.
        crash: called with an error that is a bug here: without its stream nobody would know why a partition does nothing.
    """

    def __init__(
        self,
        role: str,
        partition: int,
        view: Callable[[], View],
        channels: Channels,
        *,
        up: Callable[[int], None],
        reply: Callable[[Reply], None],
        down: Callable[[str], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        self.role, self.partition = role, partition
        self._view, self._channels = view, channels
        self._up, self._reply, self._down, self._crash = up, reply, down, crash
        self.open = False
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
        """As many as the owner lets be under way."""
        self._leave = asyncio.Event()
        self._asked = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-{role}-{partition}")
        self._task.add_done_callback(self._ended)

    def send(self, request: Request) -> None:
        """On the stream that is open; on none it is lost, as `down` has said."""
        if self.open:
            self._outbox.put_nowait(request)

    def leave(self) -> None:
        """End the stream; the next one is opened by itself."""
        self.open = False
        self._leave.set()

    async def close(self) -> None:
        """End."""
        self.open = False
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    async def _run(self) -> None:
        backoff, hint = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random), ""
        while True:
            address = hint or self._candidate()
            reason: str = f"no {self.role} of it is running; `pixiu status` shows which are missing"
            hint, served = "", False
            if address:
                try:
                    hint, served = await self._serve(address)
                    reason = f"{address} does not lead" if not served else "the stream ended"
                except (TimeoutError, Unavailable, *STREAM_ERRORS) as error:
                    reason = f"{address}: {reason_of(error)}"
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    reason = f"{address}: the call was cancelled"  # gRPC's own doing, and not ours
            self.open = False
            self._down(reason)
            if served:
                backoff.reset()
            elif not hint or backoff.failures:
                await asyncio.sleep(backoff.next_s())

    def _candidate(self) -> str:
        """The next replica to ask."""
        nodes = self._view().replicas(self.role, self.partition, STATES)
        self._asked += 1
        return nodes[self._asked % len(nodes)].address if nodes else ""

    async def _serve(self, address: str) -> tuple[str, bool]:
        """One stream to its end. Returns who leads, as far as this replica knows, and whether it led itself."""
        channel = self._channels.acquire(address)
        call: Any = None
        pi = self.role == "pi"
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                call = pi_pb2_grpc.PiStub(channel).Exchange() if pi else xiu_pb2_grpc.XiuStub(channel).Store()
                await call.write(pi_pb2.PiRequest() if pi else xiu_pb2.StoreRequest())
                reply = await call.read()
            if not isinstance(reply, Reply):
                raise Unavailable(await self._why_ended(call))
            if not reply.epoch:
                return (reply.server.address if isinstance(reply, pi_pb2.PiReply) else reply.leader), False
            self._outbox = asyncio.Queue()
            self._leave.clear()
            self.open = True
            self._up(reply.epoch)
            await self._exchange(call)
            return "", True
        finally:
            if call is not None:
                call.cancel()
            await self._channels.release(address)

    async def _exchange(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._write(call)), loop.create_task(self._read(call)), loop.create_task(self._leave.wait())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _read(self, call: Any) -> None:
        while isinstance(reply := await call.read(), Reply):
            if self.open:
                self._reply(reply)
        raise Unavailable(await self._why_ended(call))

    @staticmethod
    async def _why_ended(call: Any) -> str:
        return f"the stream ended: {await call.details() or 'the other side closed it'}"
