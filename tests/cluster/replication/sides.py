"""Replicas' ends of streams and snapshots, real ones, with a state of some files, and what they send each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio

from cluster.listeners.refused_calls import RefusedCalls
from cluster.listeners.server import server_options
from cluster.replication.core.events import SnapshotReceived, SnapshotSent
from cluster.replication.core.messages import Message
from cluster.replication.model import Entry, EntryKind, MemberID, Presence
from cluster.replication.options import ReplicationOptions
from cluster.replication.peers.peers import Peers
from cluster.replication.peers.registry import LiveReplica
from cluster.replication.peers.snapshots import SnapshotReceiver, SnapshotSender
from cluster.replication.storage.folder import DataFolder
from cluster.replication.storage.log import SegmentedLog
from cluster.rpc.framed_listener import FramedListener
from cluster.settings.options import ClusterOptions
from cluster.wire.v1 import replication_pb2 as pb
from pixiu.discovery.node import Node, NodeState
from pixiu.errors import NotLeader, StateDamaged
from pixiu.ids import EndpointID
from tests.support.framed import framed_of

A, B = MemberID(0xA), MemberID(0xB)
OPTIONS = ReplicationOptions()


class Machine:
    """A state of some files."""

    applied = flushed = 7
    rotten = False

    def __init__(self) -> None:
        self.files = {"empty": b"", "sub/state": b"x" * 700_000}
        self.snapshots = 0

    def apply(self, entries: Any) -> Any:
        raise AssertionError

    def look_ahead(self, entries: Any) -> None:
        raise AssertionError

    @property
    def clock_us(self) -> int:
        return 0

    async def snapshot(self, folder: Path) -> int:
        self.snapshots += 1
        (folder / "sub").mkdir()
        for path, content in self.files.items():
            (folder / path).write_bytes(content)
        return 7

    async def check(self, folder: Path) -> None:
        if self.rotten:
            raise StateDamaged("a value has a wrong CRC")

    async def load(self, folder: Path) -> None:
        raise AssertionError


class Side:
    """One replica: its streams, its snapshots, and what it heard."""

    def __init__(self, member: MemberID, folder: Path) -> None:
        self.member = member
        self.heard: list[Message] = []
        self.snapshots: list[SnapshotReceived] = []
        self.promotions: list[tuple[str, str]] = []
        self.sent: list[SnapshotSent] = []
        self.pins: dict[str, int] = {}
        self.installing = False
        self.folder = DataFolder(folder, 1 << 20)
        folder.mkdir()
        self.server = grpc.aio.server(options=server_options(ClusterOptions()), interceptors=[RefusedCalls()])
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.listener, self.stream_port = FramedListener(), 0
        self.peers = Peers(self.context(), OPTIONS, self.heard.append, lambda: member)
        self.machine = Machine()
        self.receiver = SnapshotReceiver(self.machine, self.folder, lambda: self.installing, self._received)
        self.sender = SnapshotSender(self.machine, self.folder, self.peers, self._pin, self.sent.append)
        self.peers.serve(self.receiver.receive, self.receiver.held, self._promoted, self._clock_set)

    def context(self) -> Any:
        """Of its process."""
        options = SimpleNamespace(partition=3)
        return SimpleNamespace(
            role="xiu", options=options, server=self.server, streams=self.listener, framed=framed_of("xiu"), tls=None
        )

    async def start(self) -> None:
        """Serve calls and streams."""
        await self.server.start()
        self.stream_port = await self.listener.bind("127.0.0.1", self.stream_port, fallback=False, reuse=True)
        await self.listener.start()

    async def stop(self) -> None:
        """End everything."""
        await self.sender.close()
        await self.peers.close()
        await self.listener.close()
        await self.server.stop(None)

    def _pin(self, name: str, counter: int | None) -> None:
        if counter is None:
            self.pins.pop(name, None)
        else:
            self.pins[name] = counter

    async def _promoted(self, operator: str, reason: str) -> None:
        self.promotions.append((operator, reason))

    async def _clock_set(self, operator: str, reason: str) -> None:
        raise NotLeader("the leader is elsewhere", "")

    def _received(self, event: SnapshotReceived) -> None:
        self.snapshots.append(event)
        self.installing = True

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def registered(self, port: int = 0, stream_port: int = 0) -> LiveReplica:
        """As the registry has it, with other ports if they are given."""
        port, stream_port = port or self.port, stream_port or self.stream_port
        node = Node("xiu", 3, 0, NodeState.RUNNING, "127.0.0.1", port, 0, EndpointID(1), 1, "", "", 0, stream_port=stream_port)
        return LiveReplica(Presence(0, self.member, 1), node)


def log_of(folder: Path) -> SegmentedLog:
    """A log of eight entries of epoch 1."""
    log = SegmentedLog(folder / "log")
    log.append([Entry(1, counter, EntryKind.DATA, 0, b"") for counter in range(1, 9)])
    return log


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def part(**body: Any) -> bytes:
    return pb.SnapshotPart(**body).SerializeToString()


def head(size: int = 3, **more: Any) -> pb.SnapshotPart.Begin:
    position = pb.ReplicaMessage.Position(epoch=1, counter=7)
    return pb.SnapshotPart.Begin(epoch=2, position=position, bytes=size, **more)


def begin(size: int = 3, **more: Any) -> bytes:
    return part(begin=head(size, **more))


def data(path: str = "state", offset: int = 0, content: bytes = b"abc", crc: int = 0x352441C2) -> bytes:
    return part(data=pb.SnapshotPart.Data(path=path, offset=offset, data=content, crc=crc))


def end(files: int = 1, size: int = 3) -> bytes:
    return part(end=pb.SnapshotPart.End(files=files, bytes=size))
