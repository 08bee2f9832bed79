"""How a child comes to what its parent has: its leader asks the parent's, and writes what it hears into its own log.

    parent's leader   HOLD ─▶ a view, if the child has nothing ─▶ rows ─▶ entries of the log, as they are applied … SPLIT
    child's leader    RESET, DROP … ─▶ ROWS … ─▶ FOLLOW … ─▶ OPEN

Either leader may be killed at any time: what the child has is part of its state, with the parent's position.

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Final

import grpc.aio

from cluster.replication.model import START, Position
from cluster.replication.replica import Replica
from cluster.runtime.context import Context
from cluster.runtime.export import abort
from pi.doubling import (
    DOUBLING_KIND,
    HOLD_S,
    Command,
    Doubling,
    Phase,
    Step,
    follow_body,
    followed,
    hold_body,
    position_body,
    rows_body,
    split_in,
)
from pi.earlier import check_form
from pi.keys import META_VERSION, uin_of, unseal
from pi.machine import Machine
from pixiu.discovery.node import NodeState
from pixiu.errors import InvalidArgument, MalformedData, PixiuError, Unavailable
from pixiu.rpc.channels import MESSAGE_BYTES, PEER_CHANNEL
from pixiu.rpc.tls import peer_channel
from pixiu.wire.v1 import pi_replicas_pb2 as pb
from pixiu.wire.v1 import pi_replicas_pb2_grpc as pb_grpc

SILENT_S: Final = 5.0
"""A parent that says nothing for so long is left."""
BEHIND_POLL_S: Final = 0.05
HEARTBEAT_S: Final = 1.0
"""A parent says something at least so often."""
FOLLOW_ENTRIES: Final = 1024
FOLLOW_BYTES: Final = 1 << 20
"""Of one message, or one entry."""
ROWS_BYTES: Final = 512 << 10
PIN_S: Final = 600.0
"""The log is kept for a child that does not come back for so long."""
_CHANNEL: Final = (*PEER_CHANNEL, ("grpc.max_receive_message_length", MESSAGE_BYTES))
_asked = itertools.count()


class Learner:
    """One try of a child's leader.

    Args:
        context: of the process.
        machine: the child's state.
        replica: its log.
    """

    def __init__(self, context: Context[Any], machine: Machine, replica: Replica) -> None:
        self._context, self._machine, self._replica = context, machine, replica
        self._doubling = machine.state.doubled.record.doubling

    async def run(self) -> None:
        """Learn until this child is open. Raises Unavailable when the parent cannot be heard, or as `Replica.propose`."""
        record = self._machine.state.doubled.record
        if self._machine.state.doubled.whole:
            await self._propose(Step.OPEN)
            return
        nodes = self._context.view.replicas("pi", self._doubling.parent, (NodeState.RUNNING, NodeState.DRAINING))
        if not nodes:
            raise Unavailable(f"no replica of pi partition {self._doubling.parent} is running; `pixiu status` shows which")
        address = nodes[next(_asked) % len(nodes)].address
        request = pb.PiLearnRequest(
            doubling=self._doubling.number, partitions=self._doubling.partitions, partition=self._doubling.partition,
            epoch=record.learned.epoch, counter=record.learned.counter, form=META_VERSION,
        )  # fmt: skip
        async with peer_channel(address, "pi", _CHANNEL) as channel:
            stub: Any = pb_grpc.PiDoublingStub(channel)
            call = stub.Learn(request)
            try:
                while not await self._take(await self._hear(call, address)):
                    pass
            finally:
                call.cancel()

    @staticmethod
    async def _hear(call: Any, address: str) -> pb.PiLearnReply:
        try:
            async with asyncio.timeout(SILENT_S):
                reply = await call.read()
        except TimeoutError as silent:
            raise Unavailable(f"{address} says nothing for {SILENT_S:.0f} s") from silent
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{address}: {error.details()}") from error
        if not isinstance(reply, pb.PiLearnReply):
            raise Unavailable(f"{address} ended the stream")
        return reply

    async def _take(self, reply: pb.PiLearnReply) -> bool:
        """Write what was heard. Whether that was all."""
        doubled = self._machine.state.doubled
        if reply.snapshot:
            check_form(reply.form)
            await self._propose(Step.RESET, position_body(Position(reply.epoch, reply.counter)))
            while not doubled.record.emptied:
                await self._propose(Step.DROP)
        if reply.rows:
            await self._propose(Step.ROWS, reply.rows)
        if reply.entries:
            await self._follow(reply.entries)
            if doubled.record.learned == START:
                raise Unavailable("the parent's sweeps went on without this child; it begins again")
        if doubled.whole:
            await self._propose(Step.OPEN)
        return doubled.record.phase is not Phase.LEARNING

    async def _follow(self, entries: bytes) -> None:
        """What ends with the cut opens this child in the same write: moved users wait for it."""
        try:
            last = split_in(followed(entries)) == self._doubling.partitions
        except (struct.error, MalformedData) as wrong:
            raise Unavailable(f"the parent's entries cannot be read: {wrong}") from wrong
        await self._propose(Step.FOLLOW, entries, *((Step.OPEN,) if last else ()))

    async def _propose(self, step: Step, body: bytes = b"", *then: Step) -> None:
        """Write a step, and in the same write others that need it; what becomes of those the state says."""
        while self._machine.behind:  # LMDB has to catch up
            await asyncio.sleep(BEHIND_POLL_S)
        commands = [Command(step, self._doubling, body), *(Command(each, self._doubling) for each in then)]
        written = await self._replica.propose([(DOUBLING_KIND, command.encode()) for command in commands])
        if written.answers[0] != [[1]]:
            raise Unavailable(f"{step.name} came too late: it is learned from where the log stands")


class Teacher(pb_grpc.PiDoublingServicer):
    """The gRPC service `pixiu.v1.PiDoubling`: what a parent's leader tells.

    Args:
        partition: of this replica.
        machine: its state.
        replica: its log.
    """

    def __init__(self, partition: int, machine: Machine, replica: Replica) -> None:
        self._partition, self._machine, self._replica = partition, machine, replica
        self._unpins: dict[str, asyncio.TimerHandle] = {}

    async def Learn(
        self, request: pb.PiLearnRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PiLearnReply]:
        """All that moves, then the log."""
        doubling = Doubling(request.doubling, request.partitions, request.partition)
        name = f"child {request.partition}"
        try:
            self._check(doubling)
            check_form(request.form)
            await self._hold(doubling)
            learned = Position(request.epoch, request.counter)
            if learned == START or not self._has(learned):
                async with aclosing(self._snapshot(doubling, name)) as replies:
                    async for reply in replies:
                        learned = Position(reply.epoch, reply.counter)
                        yield reply
            async with aclosing(self._follow(doubling, learned.counter, name)) as replies:
                async for reply in replies:
                    yield reply
        except PixiuError as error:
            await abort(context, error)
        finally:
            self._unpin_later(name)

    def _check(self, doubling: Doubling) -> None:
        self._replica.check_leader()
        record = self._machine.state.doubled.record
        if doubling.partitions < 2 or doubling.parent != self._partition:
            raise InvalidArgument(f"partition {self._partition} is not the parent of {doubling.partition} of {doubling.partitions}")
        if record.phase is Phase.CLEANING or (record.phase is Phase.SPLIT and record.doubling != doubling):
            raise Unavailable(f"partition {self._partition} is {record.phase.name} in another doubling")
        if record.phase is Phase.NONE and record.partitions >= doubling.partitions:
            raise InvalidArgument(f"partition {self._partition} was split among {record.partitions} already")

    async def _hold(self, doubling: Doubling) -> None:
        """The sweeps of what moves wait, from an entry on that the child learns, or that is in the view it takes."""
        until_s = self._machine.state.inboxes.now_s + HOLD_S
        command = Command(Step.HOLD, doubling, hold_body(until_s))
        await self._replica.propose([(DOUBLING_KIND, command.encode())])

    def _has(self, learned: Position) -> bool:
        """Whether the log goes on from a position. The child of another history begins again."""
        log = self._replica.log
        kept = log.first.counter <= learned.counter <= self._machine.applied
        return kept and log.epoch_at(learned.counter) == learned.epoch

    # --- the snapshot

    async def _snapshot(self, doubling: Doubling, name: str) -> AsyncGenerator[pb.PiLearnReply, None]:
        view, position = self._machine.view(), self._machine.state.applied
        self._pin(name, position.counter)

        def moved(rows: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
            kept = [row for row in rows if (uin := uin_of(row[0])) is None or doubling.moves(uin)]
            for key, value in kept:
                unseal(key, value)  # what is broken here is not passed on
            return kept

        def reply(rows: list[tuple[bytes, bytes]], *, last: bool = False) -> pb.PiLearnReply:
            return pb.PiLearnReply(epoch=position.epoch, counter=position.counter, rows=rows_body(position, rows, last=last))

        try:
            yield pb.PiLearnReply(snapshot=True, epoch=position.epoch, counter=position.counter, form=META_VERSION)
            while (rows := await self._machine.read_view(view, moved)) is not None:
                for part in _parts(rows):
                    self._replica.check_leader()
                    yield reply(part)
            yield reply([], last=True)
        finally:
            view.close()

    # --- the log

    async def _follow(self, doubling: Doubling, after: int, name: str) -> AsyncGenerator[pb.PiLearnReply, None]:
        machine, held_at = self._machine, time.monotonic()
        while True:
            self._replica.check_leader()
            self._pin(name, after)
            machine.advanced.clear()
            reply = pb.PiLearnReply(committed=self._replica.committed)
            if after < machine.applied:
                if after < self._replica.log.first.counter:
                    raise Unavailable(f"the log no longer has what follows {after}; ask again")
                entries = self._replica.log.read(after, min(FOLLOW_ENTRIES, machine.applied - after), FOLLOW_BYTES)
                after = entries[-1].counter
                reply.entries = follow_body(entries, doubling)
            yield reply
            if time.monotonic() > held_at + HOLD_S / 5:
                held_at = time.monotonic()
                await self._hold(doubling)
            if after >= machine.applied:
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
        """Keep the log for nobody."""
        for timer in self._unpins.values():
            timer.cancel()


def _parts(rows: list[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Rows in parts that fit into a message."""
    part: list[tuple[bytes, bytes]] = []
    size = 0
    for row in rows:
        if part and size + len(row[0]) + len(row[1]) > ROWS_BYTES:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row[0]) + len(row[1])
    if part:
        yield part
