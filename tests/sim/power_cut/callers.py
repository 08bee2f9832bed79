"""Callers of a partition: what they send, again until it is confirmed, and what a replica has of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from cluster.rpc.methods import EXCHANGE, STORE
from pi.events import NO_DEVICE
from pi.keys import uin_of
from pixiu.errors import PixiuError
from pixiu.ids import msg_sequence, snowflake
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    NOTE,
    USER_DEVICE,
    Acknowledges,
    Appends,
    Note,
    OpenSessions,
    Writer,
    encode,
)
from pixiu.wire.levels import Level
from pixiu.wire.record import Kind, decode, split
from pixiu.wire.record import encode as encode_record
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from tests.sim.power_cut.world import Machine, World

ANSWER_S: Final = 6.0
PAUSE_S: Final = 0.05
LANE: Final = 1
PAGE: Final = 1000
BODY_BYTES: Final = (10, 200, 900)


@dataclass(frozen=True)
class Confirmed:
    """What a caller was told."""

    level: Level
    key: tuple[int, ...]
    """A mail: its user and MsgID in Pi, its SnowflakeID in Xiu. A note: its user and name."""
    place: int
    """InboxSeq in Pi, a note's generation, 0 where the level says none; Partition_Msg_ID in Xiu."""
    copies: int
    counter: int
    """Of the entry that holds it, as this leader proposed it; 0: it was there before."""
    epoch: int


class Stream:
    """One caller's stream to a store: a carrier without a network."""

    serves = True
    peer = role = name = ""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self.read = self._requests.get

    def send(self, request: Any) -> None:
        """Send a request."""
        self._requests.put_nowait(request)

    async def answer(self) -> Any:
        """The next answer. Raises StreamEnded."""
        if (answer := await self._answers.get()) is None:
            raise StreamEnded("the store ended the stream")
        return answer

    async def write(self, message: Any) -> None:
        """What the store answers."""
        self._answers.put_nowait(message)

    async def opened(self, _timeout_s: float) -> None: ...

    async def done_writing(self) -> None: ...

    async def run(self, serve: Callable[[Stream], Awaitable[None]]) -> None:
        """Be served until the stream is over."""
        try:
            with contextlib.suppress(PixiuError):
                await serve(self)
        finally:
            self._answers.put_nowait(None)


@contextlib.contextmanager
def stream_to(machine: Machine, method: str) -> Iterator[Stream]:
    """A stream to the store of a machine."""
    stream = Stream()
    running = asyncio.create_task(stream.run(machine.methods[method]))
    try:
        yield stream
    finally:
        running.cancel()


class Caller:
    """Sends one request after the other, to whoever leads."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self._generation = itertools.count(int(world.loop.now * 1000) + 1)
        self._positions = itertools.count(1, 100)

    async def run(self, every_s: float) -> None:
        """All of its requests, each until it is confirmed, with pauses of so long on the average."""
        world, rng = self.world, self.world.rng
        for _ in range(world.shape.requests // world.shape.users):
            await asyncio.sleep(rng.uniform(0, 2 * every_s))
            level = Level.REPLICATED if rng.random() < 0.6 else Level.PERSISTED
            batch = self._batch(rng.randint(1, 5))
            while not await self._sent(batch, level):
                await asyncio.sleep(PAUSE_S)

    async def send_while(self, machine: Machine, holds: Callable[[], bool]) -> None:
        """To this one, at the level that it can confirm alone, for up to a second."""
        end = self.world.loop.now + 1.0
        while holds() and self.world.loop.now < end:
            with contextlib.suppress(StreamEnded, TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._ask(machine, self._batch(self.world.rng.randint(1, 5)), Level.PERSISTED)
            await asyncio.sleep(0.001)

    def _batch(self, count: int) -> list[Any]:
        raise NotImplementedError

    async def _ask(self, machine: Machine, batch: list[Any], level: Level) -> list[tuple[tuple[int, ...], int]]:
        raise NotImplementedError

    async def _sent(self, batch: list[Any], level: Level) -> bool:
        machine = self.world.leader
        if machine is None:
            return False
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ask(machine, batch, level) != []
        except (StreamEnded, TimeoutError):
            return False

    def _confirm(
        self, machine: Machine, level: Level, what: bytes, key: tuple[int, ...], place: int, copies: int, epoch: int
    ) -> None:
        whose = machine.number, epoch
        own = (each for each in self.world.submitted if (each.machine, each.epoch) == whose)
        counter = next((each.counter for each in own if what in each.payload), 0)
        self.world.note("confirmed", machine.number, Confirmed(level, key, place, copies, counter, epoch))
        self.world.happened[level.name] = self.world.happened.get(level.name, 0) + 1


class PiCaller(Caller):
    """Appends to inboxes, acknowledges, and sets notes."""

    def _batch(self, count: int) -> list[Any]:
        now = int(self.world.loop.now * 10_000)
        self._last = max(getattr(self, "_last", 0) + 1, now)
        first = self._last
        self._last += count
        uins = [self.number + 1 if self.world.rng.random() < 0.8 else 100 + self.world.rng.randrange(50) for _ in range(count)]
        return [(LANE << 54 | (first + index) << 8 | self.number, uin) for index, uin in enumerate(uins)]

    async def _ask(self, machine: Machine, batch: list[Any], level: Level) -> list[Any]:
        with stream_to(machine, EXCHANGE) as stream:
            return await self._append(machine, stream, batch, level)

    async def _append(self, machine: Machine, stream: Stream, batch: list[Any], level: Level) -> list[Any]:
        stream.send(pi_pb2.PiRequest(request=1))
        epoch = (await stream.answer()).epoch
        if not epoch:
            return []
        writer = Writer(self.number + 1, next(self._generation), epoch)
        operations: list[Any] = [Appends(writer, b"".join(APPEND.pack(*pair) for pair in batch))]
        request = pi_pb2.PiRequest(request=2, operations=encode(operations), level=level.value)
        stream.send(request)
        reply = await stream.answer()
        if reply.code or min(reply.results, default=0) < 0:
            return []
        places = list(reply.results) or [0] * len(batch)
        for (msg_id, uin), seq in zip(batch, places, strict=True):
            self._confirm(machine, level, APPEND.pack(msg_id, uin), (uin, msg_id), seq, reply.copies, reply.epoch)
        if self.world.rng.random() < 0.2:
            await self._acknowledge(stream, batch[0][1])
        if self.world.rng.random() < 0.3:
            await self._note(machine, stream, level)
        return batch

    async def _note(self, machine: Machine, stream: Stream, level: Level) -> None:
        """A note of a user of its own."""
        uin, generation = int(self.world.loop.now * 10_000) << 8 | self.number, next(self._generation)
        note = Note(uin, 0, generation, bytes((1,)) * self.world.rng.choice(BODY_BYTES))
        stream.send(pi_pb2.PiRequest(request=5, operations=encode([note]), level=level.value))
        reply = await stream.answer()
        if not reply.code and min(reply.results, default=0) >= 0:
            place = generation if reply.results else 0
            self._confirm(machine, level, NOTE.pack(uin, 0, generation), (uin, 0), place, reply.copies, reply.epoch)

    async def _acknowledge(self, stream: Stream, uin: int) -> None:
        """A cursor, so that something goes; nobody looks what became of it."""
        stream.send(pi_pb2.PiRequest(request=3, operations=encode([OpenSessions(USER_DEVICE.pack(uin, 0))])))
        reply = await stream.answer()
        if not reply.code and reply.results:
            said = ACKNOWLEDGE.pack(uin, 0, LANE, reply.results[0], 1, 0)
            stream.send(pi_pb2.PiRequest(request=4, operations=encode([Acknowledges(said)])))
            await stream.answer()


class XiuCaller(Caller):
    """Stores mail."""

    def _batch(self, count: int) -> list[Any]:
        now_ms = time.time_ns() // 1_000_000
        self._last = max(getattr(self, "_last", 0) + 1, now_ms)
        size = self.world.rng.choice(BODY_BYTES)
        return [
            encode_record(Kind.MAIL, 4 + self.number, b"x" * size, snowflake(self._last, self.number, index))
            for index in range(count)
        ]

    async def _ask(self, machine: Machine, batch: list[Any], level: Level) -> list[Any]:
        position = next(self._positions)
        fates: dict[int, tuple[str, int]] = {}
        copies = epoch = 0
        with stream_to(machine, STORE) as stream:
            stream.send(xiu_pb2.StoreRequest(position=position, level=level.value, batch=b"".join(batch), count=len(batch)))
            while len(fates) < len(batch):
                reply = await stream.answer()
                copies, epoch = reply.copies, reply.epoch
                for result in reply.results:
                    for index in range(result.count):
                        sequence = msg_sequence(result.msg_id) if result.msg_id else result.sequence + index
                        fates[result.position - position + index] = (result.code, sequence)
        for index, (code, sequence) in fates.items():
            if not code:
                self._confirm(machine, level, batch[index], (decode(batch[index]).snowflake_id,), sequence, copies, epoch)
        return batch if not any(code for code, _ in fates.values()) else []


def held(machine: Machine) -> dict[tuple[int, ...], int]:
    """What a replica has: the place of each mail."""
    found: dict[tuple[int, ...], int] = {}
    if machine.world.shape.role == "pi":
        for uin in [*range(1, 10), *range(100, 150)]:
            start, last = 0, 1
            while start < last:
                page = machine.machine.read(uin, NO_DEVICE, LANE, 0, start, PAGE)
                found.update({(uin, msg_id): seq for seq, msg_id in page.entries})
                if not page.entries:
                    break
                start, last = page.entries[-1][0], page.last
        state = machine.machine.state
        for uin in {uin_of(key) or 0 for key in state.table.keys(b"N", b"O", 1 << 20)}:
            found.update({(uin, note.name): note.generation for note in state.notes.of(uin)[0]})
        return found
    for block in machine.machine.store.scan(0):
        for index, record in enumerate(split(block.records, block.count)):
            found[(decode(record).snowflake_id,)] = block.first + index
    return found


CALLERS: Final = {"pi": PiCaller, "xiu": XiuCaller}
