"""Snapshots of the state for replicas that lag too far: the files of a folder, sent in parts.

An interrupted transfer is resumed: both sides keep what they have for some minutes. The sender asks, and the receiver reports how
far it has come and the CRC of the current file. The sender checks that CRC against its own file before it continues. If they
differ, another snapshot is made and sent from the beginning.

    sender  ── ResumeSnapshot {id} ──▶  receiver
            ◀── {path, offset, crc} ──
            ── begin {id, path, offset}, data …, end ──▶

Source: docs/replication.md, "Use by a role".
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import grpc.aio
from google.protobuf.message import DecodeError

from cluster.core.log import get_logger, once_per
from cluster.replication.core.events import SnapshotReceived, SnapshotSent
from cluster.replication.machine import StateMachine
from cluster.replication.model import MemberID, Position
from cluster.replication.peers.peers import MAX_MESSAGE_BYTES, Peers
from cluster.replication.storage.folder import DataFolder
from cluster.replication.storage.log import SegmentedLog
from cluster.wire.v1 import replication_pb2 as pb
from pixiu.errors import MalformedData, Overloaded, PixiuError, StorageError, Unavailable
from pixiu.ids import MAX_ID, hex_id

PART_BYTES: Final = 256 << 10
MAX_FILES: Final = 100_000
"""Files in one snapshot. Policy: more are refused."""
MAX_LEVELS: Final = 4
MAX_SENDING: Final = 2
"""Snapshots being sent or kept at one time. Policy: a further one replaces a kept one, or fails and is requested again."""
PART_TIMEOUT_S: Final = 30.0
"""Time after which a sender that sends no part has failed, seconds."""
FAILURE_PAUSE_S: Final = 2.0
"""Pause after a failed snapshot before another one is started, seconds."""
KEPT_S: Final = 300.0
"""Time for which an interrupted snapshot is kept after its last progress, by its sender with the log after it, seconds."""
PIN_S: Final = 60.0
"""Time for which the log after a snapshot is kept for its receiver in any case, seconds."""
SNAPSHOT_FAILED: Final = "replica_snapshot_failed"
SNAPSHOT_SENT: Final = "replica_snapshot_sent"
SNAPSHOT_RESUMED: Final = "replica_snapshot_resumed"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_path(path: str) -> str:
    """Check a relative path of a snapshot and return it. Raises MalformedData."""
    levels = path.split("/")
    if len(levels) > MAX_LEVELS or not all(_NAME.fullmatch(level) for level in levels):
        raise MalformedData(f"{path[:100]!r} is no path of a snapshot")
    return path


def _files(folder: Path) -> list[tuple[str, int]]:
    """The files below a folder, with their sizes."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(check_path(str(path.relative_to(folder))), path.stat().st_size) for path in found]


def crc_before(path: Path, offset: int) -> int | None:
    """CRC-32 of a file's first bytes; None if it is shorter. Blocking. Raises OSError."""
    crc = 0
    with open(path, "rb") as file:
        while offset > 0:
            data = file.read(min(offset, 1 << 20))
            if not data:
                return None
            crc = zlib.crc32(data, crc)
            offset -= len(data)
    return crc


@dataclass(slots=True)
class _Made:
    """A snapshot in its folder, until it has arrived."""

    id: int
    position: Position
    folder: Path
    files: list[tuple[str, int]]
    begin: tuple[int, int] = (0, 0)
    """Start of the latest transfer: index of the file, and offset in it."""
    until: float | None = None
    """Time, by the event loop's clock, at which it is given up unless it makes progress."""

    def head(self, epoch: int) -> pb.SnapshotPart.Begin:
        number, offset = self.begin
        return pb.SnapshotPart.Begin(
            epoch=epoch,
            position=pb.ReplicaMessage.Position(epoch=self.position.epoch, counter=self.position.counter),
            bytes=sum(size for _, size in self.files),
            id=self.id,
            path=self.files[number][0] if self.begin != (0, 0) else "",
            offset=offset,
        )


class SnapshotSender:
    """Sends snapshots of one state.

    Args:
        machine: the state.
        folder: makes the folders of snapshots.
        peers: sends them.
        pin: keeps the log after a counter under a name, or (None) no longer.
        on_sent: called with the outcome of each.
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
        self._made: dict[MemberID, _Made] = {}
        """Snapshots being sent or kept."""
        self._timers: dict[MemberID, asyncio.TimerHandle] = {}
        """Timers that give up a member's kept snapshot, and the log held for it."""
        self._giving_up: dict[MemberID, asyncio.Task[None]] = {}
        self.counts = {
            "snapshots_sent_total": 0,
            "snapshots_failed_total": 0,
            "snapshots_resumed_total": 0,
            "snapshot_bytes_sent_total": 0,
        }

    def start(self, log: SegmentedLog) -> None:
        """Set the log to which the snapshots' positions refer."""
        self._log = log

    def send(self, member: MemberID, epoch: int) -> None:
        """Start a snapshot, or resume an interrupted one. Does nothing if one is under way to this member."""
        if member not in self._tasks:
            self._tasks[member] = asyncio.create_task(self._send(member, epoch))

    async def close(self) -> None:
        """Abort all transfers."""
        for timer in self._timers.values():
            timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._giving_up.values(), return_exceptions=True)
        for member in list(self._made):
            await self._forget(member)

    async def _send(self, member: MemberID, epoch: int) -> None:
        position: Position | None = None
        if (timer := self._timers.pop(member, None)) is not None:
            timer.cancel()
        try:
            made = await self._resumed(member, epoch) or await self._make(member)
            await self._peers.send_snapshot(member, self._parts(made, epoch))
            position = made.position
            await self._forget(member)
            self.counts["snapshots_sent_total"] += 1
            get_logger().info(SNAPSHOT_SENT, to=hex_id(member), position=str(position))
        except (PixiuError, OSError) as error:
            self.counts["snapshots_failed_total"] += 1
            if once_per(10, (SNAPSHOT_FAILED, member)):
                get_logger().warning(SNAPSHOT_FAILED, to=hex_id(member), error=str(error))
            await asyncio.sleep(FAILURE_PAUSE_S)
        finally:
            self._tasks.pop(member, None)
        loop, kept = asyncio.get_running_loop(), self._made.get(member)
        if kept is not None:
            kept.until = kept.until or loop.time() + KEPT_S
        self._timers[member] = loop.call_at(kept.until if kept and kept.until else loop.time() + PIN_S, self._expire, member)
        self._on_sent(SnapshotSent(member, position))

    def _expire(self, member: MemberID) -> None:
        del self._timers[member]
        self._pin(_pin_of(member), None)
        if (made := self._made.pop(member, None)) is not None:
            self._giving_up[member] = task = asyncio.create_task(asyncio.to_thread(shutil.rmtree, made.folder, True))
            task.add_done_callback(lambda _: self._giving_up.pop(member))

    async def _forget(self, member: MemberID) -> None:
        if (made := self._made.pop(member, None)) is not None:
            await asyncio.to_thread(shutil.rmtree, made.folder, True)

    async def _resumed(self, member: MemberID, epoch: int) -> _Made | None:
        """An interrupted snapshot, set to continue after what the receiver has of it; None: a new one must be made."""
        made = self._made.get(member)
        if made is None:
            return None
        assert self._log is not None
        if self._log.epoch_at(made.position.counter) == made.position.epoch:
            held = await self._peers.ask_held(member, made.head(epoch))
            number = next((i for i, (path, _) in enumerate(made.files) if path == held.path), None)
            if number is not None and await asyncio.to_thread(crc_before, made.folder / held.path, held.offset) == held.crc:
                if (number, held.offset) > made.begin:
                    made.until = None  # it has made progress
                made.begin = number, held.offset
                self.counts["snapshots_resumed_total"] += 1
                get_logger().info(SNAPSHOT_RESUMED, to=hex_id(member), path=held.path, offset=held.offset)
                return made
        await self._forget(member)
        return None

    async def _make(self, member: MemberID) -> _Made:
        assert self._log is not None
        if len(self._tasks) > MAX_SENDING:
            raise Unavailable(f"{MAX_SENDING} snapshots are being sent already")
        for other in [other for other in self._made if other not in self._tasks]:
            if len(self._made.keys() | self._tasks.keys()) > MAX_SENDING:
                await self._forget(other)
        self._pin(_pin_of(member), self._machine.applied)
        await asyncio.gather(*(task for other, task in self._giving_up.items() if other == member))
        folder = await asyncio.to_thread(self._folder.outgoing, member)
        try:
            counter = await self._machine.snapshot(folder)
            own_epoch = self._log.epoch_at(counter)
            if own_epoch is None:
                raise StorageError(f"the snapshot is at {counter}, which is not in the log")
            files = await asyncio.to_thread(_files, folder)
            if len(files) > MAX_FILES:
                raise StorageError(f"the snapshot has {len(files)} files: at most {MAX_FILES}")
            self._made[member] = made = _Made(secrets.randbelow(MAX_ID) + 1, Position(own_epoch, counter), folder, files)
            return made
        finally:
            if member not in self._made:
                await asyncio.to_thread(shutil.rmtree, folder, True)

    async def _parts(self, made: _Made, epoch: int) -> AsyncIterator[bytes]:
        number, begin = made.begin
        yield pb.SnapshotPart(begin=made.head(epoch)).SerializeToString()
        for path, size in made.files[number:]:
            with open(made.folder / path, "rb") as file:
                offset = file.seek(begin)
                while data := await asyncio.to_thread(file.read, PART_BYTES):
                    yield _data(path, offset, data)
                    offset += len(data)
                    self.counts["snapshot_bytes_sent_total"] += len(data)
                if size == 0:
                    yield _data(path, 0, b"")
            begin = 0
        size = sum(size for _, size in made.files)
        yield pb.SnapshotPart(end=pb.SnapshotPart.End(files=len(made.files), bytes=size)).SerializeToString()


def _pin_of(member: MemberID) -> str:
    return f"snapshot-{hex_id(member)}"


def _data(path: str, offset: int, data: bytes) -> bytes:
    return pb.SnapshotPart(data=pb.SnapshotPart.Data(path=path, offset=offset, data=data, crc=zlib.crc32(data))).SerializeToString()


class _Writer:
    """Writes the parts of one snapshot into a folder. Blocking. Every method raises MalformedData or OSError."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._path = ""
        self._offset = 0
        self._crc = 0
        self.files = 0
        self.bytes = 0

    def held(self) -> pb.SnapshotHeld:
        """Progress so far. Call it only after `close`."""
        return pb.SnapshotHeld(path=self._path, offset=self._offset, crc=self._crc)

    def write(self, part: pb.SnapshotPart.Data) -> None:
        """Write the next bytes."""
        with self._lock:
            self._write(part)

    def _write(self, part: pb.SnapshotPart.Data) -> None:
        if zlib.crc32(part.data) != part.crc:
            raise MalformedData(f"a part of {part.path[:100]!r} has a wrong CRC")
        if part.path != self._path:
            self._open(check_path(part.path))
        elif self._file is None:
            self._file = os.fdopen(os.open(self._folder / part.path, os.O_WRONLY), "wb")
            self._file.seek(self._offset)
        if part.offset != self._offset:
            raise MalformedData(f"a part of {part.path} at {part.offset} follows {self._offset}")
        self.bytes += len(part.data)
        if self.bytes > self._limit:
            raise MalformedData(f"the snapshot has more than its {self._limit} bytes")
        assert self._file is not None
        self._file.write(part.data)
        self._offset += len(part.data)
        self._crc = zlib.crc32(part.data, self._crc)

    def _open(self, path: str) -> None:
        self._close()
        self.files += 1
        if self.files > MAX_FILES:
            raise MalformedData(f"a snapshot of more than {MAX_FILES} files")
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb")
        self._path, self._offset, self._crc = path, 0, 0

    def close(self) -> None:
        """Close the file for now. Waits for a running write whose caller was cancelled."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


@dataclass(slots=True)
class _Partial:
    """A snapshot that has not arrived completely."""

    sender: MemberID
    id: int
    position: Position
    bytes: int
    writer: _Writer


class SnapshotReceiver:
    """Receives snapshots, one at a time, and keeps one that was interrupted.

    Args:
        machine: the state; it checks a received snapshot before that is used.
        folder: the folder that takes them.
        busy: returns whether one is being loaded.
        on_received: called when one is complete and durable; it is deleted unless `busy` after that.
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
        self._partial: _Partial | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Timer that gives up the partial snapshot."""
        self._giving_up: asyncio.Task[None] | None = None
        self.counts = {"snapshots_received_total": 0, "snapshots_broken_off_total": 0}

    async def held(self, member: MemberID, begin: pb.SnapshotPart.Begin) -> pb.SnapshotHeld:
        """Progress of an interrupted snapshot. Raises Overloaded."""
        self._check_free()
        partial = self._partial
        if partial is None or not begin.id or (partial.sender, partial.id) != (member, begin.id):
            return pb.SnapshotHeld()
        self._keep()
        return partial.writer.held()

    async def receive(self, member: MemberID, parts: AsyncIterator[bytes]) -> None:
        """Receive one snapshot of a peer, or the rest of one. Raises MalformedData, Overloaded, StorageError, Unavailable."""
        self._check_free()
        self._receiving = True
        if self._timer is not None:
            self._timer.cancel()
        keeps = False
        try:
            epoch, partial = await self._begin(member, parts)
            try:
                await self._take(partial, parts)
            finally:
                await asyncio.to_thread(partial.writer.close)
            await self._machine.check(self._folder.incoming)
            self._partial = None
            await asyncio.to_thread(self._folder.accept_incoming, partial.position)
            if self._closed:
                raise Unavailable("the process ends")
            self.counts["snapshots_received_total"] += 1
            self._on_received(SnapshotReceived(epoch, member, partial.position))
            if not self._busy():
                await asyncio.to_thread(self._folder.discard_received)
        except OSError as problem:
            self.counts["snapshots_broken_off_total"] += 1
            raise StorageError(f"{self._folder.path}: {problem.strerror}") from problem
        except (Unavailable, asyncio.CancelledError):  # of the connection
            self.counts["snapshots_broken_off_total"] += 1
            keeps = self._partial is not None and self._partial.id != 0 and not self._closed
            raise
        except PixiuError:
            self.counts["snapshots_broken_off_total"] += 1
            raise
        finally:
            if keeps:
                self._keep()
            elif self._partial is not None:
                self._partial = None
                await asyncio.to_thread(self._folder.discard_incoming)
            self._receiving = False

    async def close(self) -> None:
        """Stop: take no more snapshots."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._giving_up is not None:
            await asyncio.gather(self._giving_up, return_exceptions=True)

    def _check_free(self) -> None:
        if self._receiving or self._busy() or self._closed:
            raise Overloaded("another snapshot is being received or loaded", int(FAILURE_PAUSE_S * 1000))

    def _keep(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._expire)

    def _expire(self) -> None:
        if self._partial is not None and not self._receiving:
            self._partial, self._receiving = None, True
            self._giving_up = asyncio.create_task(self._give_up())

    async def _give_up(self) -> None:
        try:
            await asyncio.to_thread(self._folder.discard_incoming)
        finally:
            self._receiving = False

    async def _begin(self, member: MemberID, parts: AsyncIterator[bytes]) -> tuple[int, _Partial]:
        """Epoch of the sender, and the snapshot that it starts or resumes."""
        first = await _next(parts)
        if first.WhichOneof("body") != "begin":
            raise MalformedData("a snapshot has no beginning")
        begin, partial = first.begin, self._partial
        if not 0 < begin.position.counter <= MAX_ID or begin.epoch == 0 or begin.bytes > MAX_ID:
            raise MalformedData("a snapshot has no position")
        position = Position(begin.position.epoch, begin.position.counter)
        if begin.path:
            if partial is None or (partial.sender, partial.id, partial.position, partial.bytes) != (
                member, begin.id, position, begin.bytes
            ):  # fmt: skip
                raise MalformedData("nothing is here of the snapshot that is to go on")
            held = partial.writer.held()
            if (held.path, held.offset) != (begin.path, begin.offset):
                raise MalformedData(f"the snapshot goes on at {begin.path[:100]!r}, {begin.offset}: here it ends elsewhere")
            return begin.epoch, partial
        self._partial = None
        folder = await asyncio.to_thread(self._folder.begin_incoming, begin.bytes)
        self._partial = partial = _Partial(member, begin.id, position, begin.bytes, _Writer(folder, begin.bytes))
        return begin.epoch, partial

    async def _take(self, partial: _Partial, parts: AsyncIterator[bytes]) -> None:
        writer = partial.writer
        while True:
            part = await _next(parts)
            kind = part.WhichOneof("body")
            if kind == "data":
                await asyncio.to_thread(writer.write, part.data)
            elif kind == "end" and (part.end.files, part.end.bytes) == (writer.files, writer.bytes) and not self._closed:
                return
            else:
                raise MalformedData(f"a snapshot broke off after {writer.bytes} bytes in {writer.files} files")


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
