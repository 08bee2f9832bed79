"""Streams from a proxy to the leaders of Xiu and Pi: found, opened, and opened again elsewhere.

A replica that does not lead says so, and who does, in its answer to an empty request; so the first one asked is any Running one.

Source: DESIGN sections 6 (mail goes by streams) and 9 ("Mail").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from pixiu.client.channels import STREAM_ERRORS, Channels, reason_of
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.errors import Unavailable
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc, xiu_pb2, xiu_pb2_grpc
from proxy.mail_events import Appended, Event, LinkDown, LinkUp, SendAppend, SendStore, Store, Stored, StoredRun, Triple

ASK_TIMEOUT_S: Final = 3.0
"""For the answer to the empty request."""
BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0
STATES: Final = (NodeState.RUNNING, NodeState.DRAINING)

Request = xiu_pb2.StoreRequest | pi_pb2.PiRequest
Reply = xiu_pb2.StoreReply | pi_pb2.PiReply


class StoreLink:
    """Keeps a stream to the leader of one partition.

    Args:
        store: the partition.
        view: gives the newest view of the cluster.
        channels: gRPC channels by address.
        numbers: gives a new number for each stream.
        take: called with what happens.
        crash: called with an error that is a bug here: without its link a partition would get no mail, and nobody know why.
    """

    def __init__(
        self,
        store: Store,
        view: Callable[[], View],
        channels: Channels,
        numbers: Callable[[], int],
        take: Callable[[Event], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        self.store = store
        self._view = view
        self._channels = channels
        self._numbers = numbers
        self._take = take
        self._crash = crash
        self._number = 0
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
        """As many as the core lets be under way."""
        self._leave = asyncio.Event()
        self._asked = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-mail-{store.role}-{store.partition}")
        self._task.add_done_callback(self._ended)

    def send(self, effect: SendStore | SendAppend) -> None:
        """A request of the stream that is open."""
        if effect.link != self._number:
            return
        if isinstance(effect, SendStore):
            level = xiu_pb2.StoreLevel.ValueType(int(effect.level))
            self._outbox.put_nowait(
                xiu_pb2.StoreRequest(
                    batch=effect.data, count=effect.count, position=effect.position, level=level, epoch=effect.epoch
                )
            )
        else:
            wanted = pi_pb2.PiLevel.ValueType(int(effect.level))
            self._outbox.put_nowait(pi_pb2.PiRequest(request=effect.request, operations=effect.operations, level=wanted))

    def leave(self, number: int) -> None:
        """End a stream; the next one is opened by itself."""
        if number == self._number:
            self._number = 0
            self._leave.set()

    async def close(self) -> None:
        """End."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    async def _run(self) -> None:
        failures, hint = 0, ""
        while True:
            address = hint or self._candidate()
            reason: str = f"no {self.store.role} of it is running; `pixiu status` shows which are missing"
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
            number, self._number = self._number, 0
            self._take(LinkDown(self.store, number, reason))
            failures = 0 if served or (hint and not failures) else failures + 1
            if failures:
                await asyncio.sleep(min(BACKOFF_S * 2 ** min(failures, 8), MAX_BACKOFF_S))

    def _candidate(self) -> str:
        """The next replica to ask."""
        nodes = self._view().replicas(self.store.role, self.store.partition, STATES)
        self._asked += 1
        return nodes[self._asked % len(nodes)].address if nodes else ""

    async def _serve(self, address: str) -> tuple[str, bool]:
        """One stream to its end. Returns who leads, as far as this replica knows, and whether it led itself."""
        channel = self._channels.acquire(address)
        call: Any = None
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                call = pi_pb2_grpc.PiStub(channel).Exchange() if self.store.pi else xiu_pb2_grpc.XiuStub(channel).Store()
                await call.write(pi_pb2.PiRequest() if self.store.pi else xiu_pb2.StoreRequest())
                reply = await call.read()
            if not isinstance(reply, Reply):
                raise Unavailable(await self._why_ended(call))
            if not reply.epoch:
                return (reply.server.address if isinstance(reply, pi_pb2.PiReply) else reply.leader), False
            self._outbox = asyncio.Queue()
            self._leave.clear()
            self._number = self._numbers()
            self._take(LinkUp(self.store, self._number, reply.epoch))
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
        number = self._number
        while isinstance(reply := await call.read(), Reply):
            self._take(self._event(number, reply))
        raise Unavailable(await self._why_ended(call))

    def _event(self, number: int, reply: Reply) -> Event:
        partition, triple = self.store.partition, Triple(reply.layout_version, reply.epoch, reply.committed)
        if isinstance(reply, pi_pb2.PiReply):
            return Appended(partition, number, reply.request, list(reply.results), reply.code, reply.text, triple, reply.copies)
        runs = [StoredRun(run.position, run.count, run.sequence, run.msg_id, run.code, run.text) for run in reply.results]
        return Stored(partition, number, runs, triple, reply.copies)

    @staticmethod
    async def _why_ended(call: Any) -> str:
        return f"the stream ended: {await call.details() or 'the other side closed it'}"
