"""Snapshots of the state for replicas that are too far behind: a folder's files in parts, begun again when it breaks off.

Source: docs/replication.md.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Final

import grpc.aio
from google.protobuf.message import DecodeError

from cluster.replication.events import SnapshotReceived, SnapshotSent
from cluster.replication.folder import DataFolder
from cluster.replication.log import SegmentedLog
from cluster.replication.machine import StateMachine
from cluster.replication.model import MemberID, Position
from cluster.replication.peers import MAX_MESSAGE_BYTES, Peers
from cluster.runtime.log import get_logger, once_per
from pixiu.errors import MalformedData, Overloaded, PixiuError, StorageError, Unavailable
from pixiu.ids import MAX_ID, hex_id
from pixiu.wire.v1 import replication_pb2 as pb

PART_BYTES: Final = 256 << 10
MAX_FILES: Final = 100_000
"""In one snapshot. Policy: more are refused."""
MAX_LEVELS: Final = 4
MAX_SENDING: Final = 2
"""Snapshots being sent at one time. Policy: a further one fails, and is asked for again."""
PART_TIMEOUT_S: Final = 30.0
"""A sender that sends no part for so long has failed."""
FAILURE_PAUSE_S: Final = 2.0
"""After a snapshot that failed another one is not begun at once."""
PIN_S: Final = 60.0
"""For so long after a snapshot its receiver has the log behind it kept for it, whatever else becomes of it."""
SNAPSHOT_FAILED: Final = "replica_snapshot_failed"
SNAPSHOT_SENT: Final = "replica_snapshot_sent"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_path(path: str) -> str:
    """A relative path that a snapshot may have. Raises MalformedData."""
    levels = path.split("/")
    if len(levels) > MAX_LEVELS or not all(_NAME.fullmatch(level) for level in levels):
        raise MalformedData(f"{path[:100]!r} is no path of a snapshot")
    return path


def _files(folder: Path) -> list[tuple[str, int]]:
    """The files below a folder, with their sizes."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(check_path(str(path.relative_to(folder))), path.stat().st_size) for path in found]


class SnapshotSender:
    """Sends snapshots of one state.

    Args:
        machine: the state.
        folder: where snapshots are made.
        peers: by whom they are sent.
        pin: keeps the log behind a counter under a name, or (None) no longer.
        on_sent: called with what became of each.
    """

    def __init__(
        self,
        machine: StateMachine,
        folder: DataFolder,
        peers: Peers,
        pin: Callable[[str, int | None], None],
        on_sent: Callable[[SnapshotSent], None],
    ) -> None:
        self._machine, self._folder, self._peers, self._pin, self._on_sent = machine, folder, peers, pin, on_sent
        self._log: SegmentedLog | None = None
        self._tasks: dict[MemberID, asyncio.Task[None]] = {}
        self._pins: dict[str, asyncio.TimerHandle] = {}
        self.counts = {"snapshots_sent_total": 0, "snapshots_failed_total": 0, "snapshot_bytes_sent_total": 0}

    def start(self, log: SegmentedLog) -> None:
        """Snapshots are positions of this log."""
        self._log = log

    def send(self, member: MemberID, epoch: int) -> None:
        """Begin; one that is under way to this member goes on instead."""
        if member not in self._tasks:
            self._tasks[member] = asyncio.create_task(self._send(member, epoch))

    async def close(self) -> None:
        """Break off what is under way."""
        for timer in self._pins.values():
            timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, member: MemberID, epoch: int) -> None:
        name = f"snapshot-{hex_id(member)}"
        position: Position | None = None
        if (timer := self._pins.pop(name, None)) is not None:
            timer.cancel()
        self._pin(name, self._machine.applied)
        try:
            if len(self._tasks) > MAX_SENDING:
                raise Unavailable(f"{MAX_SENDING} snapshots are being sent already")
            position = await self._make_and_send(member, epoch)
            self.counts["snapshots_sent_total"] += 1
            get_logger().info(SNAPSHOT_SENT, to=hex_id(member), position=str(position))
        except (PixiuError, OSError) as error:
            self.counts["snapshots_failed_total"] += 1
            if once_per(10, (SNAPSHOT_FAILED, member)):
                get_logger().warning(SNAPSHOT_FAILED, to=hex_id(member), error=str(error))
            await asyncio.sleep(FAILURE_PAUSE_S)
        finally:
            self._tasks.pop(member, None)
        self._pins[name] = asyncio.get_running_loop().call_later(PIN_S, self._unpin, name)
        self._on_sent(SnapshotSent(member, position))

    def _unpin(self, name: str) -> None:
        self._pins.pop(name, None)
        self._pin(name, None)

    async def _make_and_send(self, member: MemberID, epoch: int) -> Position:
        assert self._log is not None
        folder = await asyncio.to_thread(self._folder.outgoing, member)
        try:
            counter = await self._machine.snapshot(folder)
            own_epoch = self._log.epoch_at(counter)
            if own_epoch is None:
                raise StorageError(f"the snapshot is at {counter}, which is not in the log")
            position = Position(own_epoch, counter)
            await self._peers.send_snapshot(member, self._parts(folder, epoch, position))
            return position
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _parts(self, folder: Path, epoch: int, position: Position) -> AsyncIterator[bytes]:
        files = await asyncio.to_thread(_files, folder)
        size = sum(each for _, each in files)
        begin = pb.SnapshotPart.Begin(
            epoch=epoch, position=pb.ReplicaMessage.Position(epoch=position.epoch, counter=position.counter), bytes=size
        )
        yield pb.SnapshotPart(begin=begin).SerializeToString()
        for path, _ in files:
            with open(folder / path, "rb") as file:
                offset = 0
                while data := await asyncio.to_thread(file.read, PART_BYTES):
                    yield _data(path, offset, data)
                    offset += len(data)
                    self.counts["snapshot_bytes_sent_total"] += len(data)
                if offset == 0:
                    yield _data(path, 0, b"")
        yield pb.SnapshotPart(end=pb.SnapshotPart.End(files=len(files), bytes=size)).SerializeToString()


def _data(path: str, offset: int, data: bytes) -> bytes:
    return pb.SnapshotPart(data=pb.SnapshotPart.Data(path=path, offset=offset, data=data, crc=zlib.crc32(data))).SerializeToString()


class _Writer:
    """Writes the parts of one snapshot into a folder. Blocking. Every method raises MalformedData or OSError."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._file: IO[bytes] | None = None
        self._path = ""
        self._offset = 0
        self.files = 0
        self.bytes = 0

    def write(self, part: pb.SnapshotPart.Data) -> None:
        """The next bytes."""
        if zlib.crc32(part.data) != part.crc:
            raise MalformedData(f"a part of {part.path[:100]!r} has a wrong CRC")
        if part.path != self._path:
            self._open(check_path(part.path))
        if part.offset != self._offset:
            raise MalformedData(f"a part of {part.path} at {part.offset} follows {self._offset}")
        self.bytes += len(part.data)
        if self.bytes > self._limit:
            raise MalformedData(f"the snapshot has more than its {self._limit} bytes")
        assert self._file is not None
        self._file.write(part.data)
        self._offset += len(part.data)

    def _open(self, path: str) -> None:
        self.close()
        self.files += 1
        if self.files > MAX_FILES:
            raise MalformedData(f"a snapshot of more than {MAX_FILES} files")
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb")
        self._path, self._offset = path, 0

    def close(self) -> None:
        """Nothing more of this file comes."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SnapshotReceiver:
    """Receives snapshots, one at a time.

    Args:
        machine: the state; it looks at what was received before that is taken.
        folder: where they go.
        busy: whether one is being loaded.
        on_received: called when one is whole and durable; it is removed again unless `busy` after that.
    """

    def __init__(
        self,
        machine: StateMachine,
        folder: DataFolder,
        busy: Callable[[], bool],
        on_received: Callable[[SnapshotReceived], None],
    ) -> None:
        self._machine, self._folder, self._busy, self._on_received = machine, folder, busy, on_received
        self._receiving = False
        self._closed = False
        self.counts = {"snapshots_received_total": 0, "snapshots_broken_off_total": 0}

    async def receive(self, member: MemberID, parts: AsyncIterator[bytes]) -> None:
        """One snapshot of a peer. Raises MalformedData, Overloaded, StorageError, Unavailable."""
        if self._receiving or self._busy() or self._closed:
            raise Overloaded("another snapshot is being received or loaded", int(FAILURE_PAUSE_S * 1000))
        self._receiving = True
        try:
            epoch, position = await self._receive(parts)
            await self._machine.check(self._folder.incoming)
            await asyncio.to_thread(self._folder.accept_incoming, position)
            if self._closed:
                raise Unavailable("the process ends")
            self.counts["snapshots_received_total"] += 1
            self._on_received(SnapshotReceived(epoch, member, position))
            if not self._busy():
                await asyncio.to_thread(self._folder.discard_received)
        except OSError as problem:
            self.counts["snapshots_broken_off_total"] += 1
            raise StorageError(f"{self._folder.path}: {problem.strerror}") from problem
        except PixiuError:
            self.counts["snapshots_broken_off_total"] += 1
            raise
        finally:
            self._receiving = False

    async def close(self) -> None:
        """Stop: take no more snapshots."""
        self._closed = True

    async def _receive(self, parts: AsyncIterator[bytes]) -> tuple[int, Position]:
        first = await _next(parts)
        if first.WhichOneof("body") != "begin":
            raise MalformedData("a snapshot has no beginning")
        begin = first.begin
        if not 0 < begin.position.counter <= MAX_ID or begin.epoch == 0 or begin.bytes > MAX_ID:
            raise MalformedData("a snapshot has no position")
        folder = await asyncio.to_thread(self._folder.begin_incoming, begin.bytes)
        writer = _Writer(folder, begin.bytes)
        try:
            while True:
                part = await _next(parts)
                kind = part.WhichOneof("body")
                if kind == "data":
                    await asyncio.to_thread(writer.write, part.data)
                elif kind == "end" and (part.end.files, part.end.bytes) == (writer.files, writer.bytes) and not self._closed:
                    return begin.epoch, Position(begin.position.epoch, begin.position.counter)
                else:
                    raise MalformedData(f"a snapshot broke off after {writer.bytes} bytes in {writer.files} files")
        finally:
            writer.close()


async def _next(parts: AsyncIterator[bytes]) -> pb.SnapshotPart:
    try:
        async with asyncio.timeout(PART_TIMEOUT_S):
            data = await anext(parts)
        if len(data) > MAX_MESSAGE_BYTES:
            raise MalformedData(f"a part of {len(data)} bytes")
        return pb.SnapshotPart.FromString(data)
    except (StopAsyncIteration, TimeoutError, grpc.aio.AioRpcError, grpc.aio.UsageError):
        raise Unavailable("the sender of a snapshot went silent") from None
    except DecodeError as problem:
        raise MalformedData(f"a part of a snapshot cannot be read: {problem}") from problem
