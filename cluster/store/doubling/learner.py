"""Transfer of a parent's state to a child: the child's leader asks the parent's, and writes the replies into its own log.

    parent's leader   HOLD ─▶ a view, if the child has nothing ─▶ rows ─▶ entries of the log, as they are applied … SPLIT
    child's leader    RESET, DROP … ─▶ ROWS … ─▶ FOLLOW … ─▶ OPEN

Either leader may be killed at any time: the child's progress is part of its state, as the parent's position.

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Final

import grpc.aio

from cluster.process.context import Context
from cluster.replication.model import Position
from cluster.replication.replica import Replica
from cluster.store.doubling.copied import HOLD_S, rows_body
from cluster.store.doubling.learning import Learning, Lesson, check_pupil, hold_of_sweeps, request_of
from cluster.store.doubling.machine import CopiedMachine, Rows
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling
from cluster.wire.v1 import doubling_pb2 as pb
from cluster.wire.v1 import doubling_pb2_grpc as pb_grpc
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import RoleLayout
from pixiu.errors import Unavailable
from pixiu.rpc.channels import MESSAGE_BYTES, PEER_CHANNEL
from pixiu.rpc.tls import peer_channel

SILENT_S: Final = 5.0
"""Time without a message after which a child leaves its parent, seconds."""
BEHIND_POLL_S: Final = 0.05
HEARTBEAT_S: Final = 1.0
"""Longest interval between messages of a parent, seconds."""
ROWS_BYTES: Final = 512 << 10
PIN_S: Final = 600.0
"""Time for which a parent keeps its log for a child that has disconnected, seconds."""
_CHANNEL: Final = (*PEER_CHANNEL, ("grpc.max_receive_message_length", MESSAGE_BYTES))
_asked = itertools.count()


class Learner:
    """One attempt of a child's leader to learn.

    Args:
        context: of the process.
        machine: the child's state.
        replica: its log.
    """

    def __init__(self, context: Context[Any], machine: CopiedMachine[Any], replica: Replica) -> None:
        self._context, self._role, self._machine, self._replica = context, context.role, machine, replica

    async def run(self) -> None:
        """Learn until this child is open. Raises Unavailable when the parent does not answer, or as `Replica.propose`."""
        doubled = self._machine.copying
        learning, parent = Learning(doubled), doubled.record.doubling.parent
        if doubled.whole:
            await self._take(learning, pb.LearnReply())
            return
        nodes = self._context.view.replicas(self._role, parent, (NodeState.RUNNING, NodeState.DRAINING))
        if not nodes:
            raise Unavailable(f"no replica of {self._role} partition {parent} is running; `pixiu status` shows which")
        address = nodes[next(_asked) % len(nodes)].address
        async with peer_channel(address, self._role, self._context.tls, _CHANNEL) as channel:
            stub: Any = pb_grpc.CopyingStub(channel)
            call = stub.Learn(request_of(doubled.record))
            try:
                while not learning.over:
                    await self._take(learning, await self._hear(call, address))
            finally:
                call.cancel()

    @staticmethod
    async def _hear(call: Any, address: str) -> pb.LearnReply:
        try:
            async with asyncio.timeout(SILENT_S):
                reply = await call.read()
        except TimeoutError as silent:
            raise Unavailable(f"{address} sent nothing for {SILENT_S:.0f} s") from silent
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{address}: {error.details()}") from error
        if not isinstance(reply, pb.LearnReply):
            raise Unavailable(f"{address} ended the stream")
        return reply

    async def _take(self, learning: Learning, reply: pb.LearnReply) -> None:
        """Write a reply into the log."""
        writes = learning.take(reply)
        with contextlib.suppress(StopIteration):
            commands = next(writes)
            while True:
                commands = writes.send(await self._write(commands))

    async def _write(self, commands: list[Command]) -> bool:
        while self._machine.behind:  # the disk has to catch up
            await asyncio.sleep(BEHIND_POLL_S)
        answers = await self._replica.propose([(DOUBLING_KIND, command.encode()) for command in commands])
        return answers[0] == [[1]]


class Teacher(pb_grpc.CopyingServicer):
    """The gRPC service `pixiu.v1.Copying` of a parent's leader.

    Args:
        context: of the process; the role's options have `partition`.
        machine: its state.
        replica: its log.
    """

    def __init__(self, context: Context[Any], machine: CopiedMachine[Any], replica: Replica) -> None:
        self._context, self._machine, self._replica = context, machine, replica
        self._role, self._partition = context.role, context.options.partition
        self._unpins: dict[str, asyncio.TimerHandle] = {}
        pb_grpc.add_CopyingServicer_to_server(self, context.server)

    async def Learn(self, request: pb.LearnRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.LearnReply]:
        """Send everything that moves, then the log."""
        doubling = Doubling(request.doubling, request.partitions, request.partition)
        name = f"child {request.partition}"
        try:
            self._check(doubling)
            await self._hold(doubling)
            lesson = Lesson(doubling, self._replica.log, Position(request.epoch, request.counter), self._machine.copying.of_child)
            if not lesson.goes_on(self._machine.applied):
                async with aclosing(self._snapshot(doubling, name)) as replies:
                    async for reply in replies:
                        lesson.after = reply.counter
                        yield reply
            async with aclosing(self._follow(lesson, name)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self._unpin_later(name)

    def _check(self, doubling: Doubling) -> None:
        self._replica.check_leader()
        layout = self._context.view.layout.roles.get(self._role, RoleLayout(1, 1))
        check_pupil(self._role, self._partition, self._machine.copying.record, layout, doubling)

    async def _hold(self, doubling: Doubling) -> None:
        command = hold_of_sweeps(doubling, self._machine.copying.now_s)
        await self._replica.propose([(DOUBLING_KIND, command.encode())])

    # --- the snapshot

    async def _snapshot(self, doubling: Doubling, name: str) -> AsyncGenerator[pb.LearnReply, None]:
        view, position = self._machine.view(), self._machine.position
        self._pin(name, position.counter)

        copying = self._machine.copying

        def moved(rows: Rows) -> Rows:
            kept = [row for row in rows if (user := copying.user_of(row[0])) is None or doubling.moves(user)]
            for key, value in kept:
                copying.body_of(key, value)  # broken values are not passed on
            return kept

        def reply(rows: Rows, *, last: bool = False) -> pb.LearnReply:
            return pb.LearnReply(epoch=position.epoch, counter=position.counter, rows=rows_body(position, rows, last=last))

        try:
            yield pb.LearnReply(snapshot=True, epoch=position.epoch, counter=position.counter)
            while (rows := await self._machine.read_view(view, moved)) is not None:
                for part in _parts(rows):
                    self._replica.check_leader()
                    yield reply(part)
            yield reply([], last=True)
        finally:
            view.close()

    # --- the log

    async def _follow(self, lesson: Lesson, name: str) -> AsyncGenerator[pb.LearnReply, None]:
        machine, held_at = self._machine, time.monotonic()
        while True:
            self._replica.check_leader()
            self._pin(name, lesson.after)
            machine.advanced.clear()
            yield lesson.next(machine.applied, self._replica.committed)
            if time.monotonic() > held_at + HOLD_S / 5:
                held_at = time.monotonic()
                self._check(lesson.doubling)
                await self._hold(lesson.doubling)
            if lesson.after >= machine.applied:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await machine.advanced.wait()
                except TimeoutError:
                    continue

    # --- the pin

    def _pin(self, name: str, counter: int) -> None:
        if (timer := self._unpins.pop(name, None)) is not None:
            timer.cancel()
        self._replica.pin(name, counter)

    def _unpin_later(self, name: str) -> None:
        if name in self._unpins:
            return
        self._unpins[name] = asyncio.get_running_loop().call_later(PIN_S, self._unpin, name)

    def _unpin(self, name: str) -> None:
        self._unpins.pop(name, None)
        self._replica.pin(name, None)

    def close(self) -> None:
        """Cancel the timers that release the log."""
        for timer in self._unpins.values():
            timer.cancel()


def _parts(rows: Rows) -> Iterator[Rows]:
    """Split rows into parts that fit into a message."""
    part: Rows = []
    size = 0
    for row in rows:
        if part and size + len(row[0]) + len(row[1]) > ROWS_BYTES:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row[0]) + len(row[1])
    if part:
        yield part
