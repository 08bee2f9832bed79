"""Xius and Pis as real processes with a ZooKeeper, without the rest of a cluster, and the callers that load them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from cluster.listeners.server import message_bytes
from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.methods import STORE
from cluster.settings.options import ClusterOptions
from onebox.children import child_environment
from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.operations import NoNode
from pixiu.discovery.paths import DEFAULT_ROOT, node_directory, replica_of
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import Overloaded
from pixiu.wire.inbox_operations import Operation, encode
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc, xiu_pb2
from registry.layout import ensure_layout

WAIT_S = 120.0
AGAIN_S = 0.01
"""Time after which a writer repeats a request that was refused because the store lags."""
SHARED = Path("/dev/shm")


@dataclass
class Stores:
    """The replicas of one partition of one role."""

    role: str
    folder: Path
    shared: Path
    target: str
    zookeeper: ZooKeeper
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def pids(self) -> list[int]:
        """Process IDs of all replicas."""
        return [process.pid for process in self.processes.values()]

    def start(self, name: str) -> None:
        """Start a replica with the data of its former run under this name."""
        wanted = [f"registry={self.target}", f"data_dir={self.folder / name}", "partition=0", "session_timeout_ms=4000"]
        wanted += [f"table_dir={self.shared}"] if self.role == "xiu" else []
        arguments = [part for setting in wanted for part in ("--set", setting)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", self.role, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=child_environment(),
            )  # fmt: skip

    async def running(self, name: str) -> Node:
        """Wait until a replica is Running. Returns its node."""
        directory, process, end = node_directory(DEFAULT_ROOT, self.role, 0), self.processes[name], time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended: {(self.folder / f'{name}.log').read_text()[-2000:]}")
            with contextlib.suppress(NoNode):
                for child in await self.zookeeper.children(directory):
                    replica = replica_of(child)
                    if replica is None:
                        continue
                    node = Node.from_json((await self.zookeeper.get(f"{directory}/{child}"))[0], replica=replica)
                    if node.pid == process.pid and node.state is NodeState.RUNNING:
                        return node
            await asyncio.sleep(0.01)
        raise RuntimeError(f"{name} was not Running within {WAIT_S:.0f} s")

    async def leader(self) -> Node:
        """Wait until every replica is in sync. Returns the leader's node."""
        nodes, end = [await self.running(name) for name in self.processes], time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for node in nodes:
                status = await asyncio.to_thread(replication, node)
                if status.get("state") == "Leading" and len(status["in_sync"]) == len(nodes):
                    return node
            await asyncio.sleep(0.05)
        raise RuntimeError(f"not every {self.role} was in sync within {WAIT_S:.0f} s")

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a replica and wait for it."""
        process = self.processes[name]
        process.send_signal(number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def replication(node: Node) -> dict[str, Any]:
    """Return the state of a process's replica from /health; empty while the process does not answer."""
    try:
        with urllib.request.urlopen(f"http://{node.host}:{node.http_port}/health", timeout=10) as reply:
            said = json.load(reply)["service"]
    except OSError:
        return {}
    found = said.get("replication", said)
    return found if isinstance(found, dict) else {}


@contextlib.asynccontextmanager
async def stores(role: str, replicas: int, data: Path | None = None) -> AsyncIterator[Stores]:
    """Start a number of replicas of a partition, removed afterwards. `data`: a folder on the disk to measure."""
    folder = Path(tempfile.mkdtemp(prefix="pixiu-bench-", dir=data))
    shared = Path(tempfile.mkdtemp(prefix="pixiu-bench-", dir=SHARED if SHARED.is_dir() else data))
    server = EmbeddedZooKeeper(folder / "zookeeper")
    await asyncio.to_thread(server.start)
    zookeeper = ZooKeeper(server.address, session_timeout_s=10.0)
    found = Stores(role, folder, shared, f"zk://{server.address}{DEFAULT_ROOT}", zookeeper)
    try:
        await zookeeper.connect()
        await ensure_layout(zookeeper, DEFAULT_ROOT, {role: RoleLayout(1, 1, replicas)})
        for number in range(replicas):
            found.start(f"{role}-{number}")
        yield found
    finally:
        for name, process in found.processes.items():
            if process.poll() is None:
                await asyncio.to_thread(found.end, name)
        await zookeeper.close()
        await asyncio.to_thread(server.stop)
        for path in (folder, shared):
            shutil.rmtree(path, ignore_errors=True)


class XiuWriter:
    """The stream of one writer."""

    def __init__(self, node: Node) -> None:
        framed = Framed("proxy", 1, lambda _role: None, message_bytes(ClusterOptions()))
        self._call: FramedCall[xiu_pb2.StoreRequest, xiu_pb2.StoreReply]
        self._call = framed.call(node, STORE, xiu_pb2.StoreReply.FromString)
        self._position = 1

    async def store(self, batch: bytes, count: int, level: int) -> int:
        """Store a batch, repeating temporarily refused records, until every record is answered. Returns the sequence of the last
        one."""
        again = False
        while True:
            request = xiu_pb2.StoreRequest(batch=batch, count=count, position=self._position, level=level)  # type: ignore[arg-type]
            self._position += count
            await self._call.write(request)
            answered = last = refused = 0
            while answered < count:
                reply = await self._call.read()
                if reply is None:
                    raise RuntimeError("the stream ended before every answer had come")
                for result in reply.results:
                    if result.code == Overloaded.code:
                        refused += result.count
                    elif result.code or (result.msg_id and not again):
                        raise RuntimeError(f"not stored: {result}")
                    answered += result.count
                    last = result.sequence + result.count - 1
            if not refused:
                return last
            again = True
            await asyncio.sleep(AGAIN_S)

    async def close(self) -> None:
        """End the stream."""
        await self._call.close()


class PiCaller:
    """The stream of one caller; one request at a time."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._call = pi_pb2_grpc.PiStub(self._channel).Exchange()
        self._number = 0

    async def ask(self, operations: bytes = b"", reads: Sequence[pi_pb2.PiRead] = ()) -> pi_pb2.PiReply:
        """Send a request at level replicated. Returns its answer."""
        self._number += 1
        await self._call.write(pi_pb2.PiRequest(request=self._number, operations=operations, reads=reads))
        reply = await self._call.read()
        if not isinstance(reply, pi_pb2.PiReply) or reply.code or any(result < 0 for result in reply.results):
            raise RuntimeError(f"refused: {reply}")
        return reply

    async def do(self, *operations: Operation) -> pi_pb2.PiReply:
        """Encode operations and send them as `ask` does."""
        return await self.ask(encode(operations))

    async def close(self) -> None:
        """End the stream."""
        await self._call.done_writing()
        await self._channel.close()
