"""Real routers, relays and brokers beside a real ZooKeeper; the test plays a gateway and a proxy over real links."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from cluster.links.api import LinkHandler, Outcome, Peer, PeerState
from cluster.links.endpoint import Endpoint
from cluster.membership.map.updates import Update, encode_messages
from cluster.settings.options import ClusterOptions, RoleOptions, link_options
from cluster.wire.v1 import control_pb2
from onebox.fork_server import Forked
from pixiu.discovery import paths
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import RoleLayout, View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.wire.record import Flag, Kind, encode, split
from registry.layout import ensure_layout
from registry.membership import Membership
from tests.support.forks import fork
from tests.support.shared_zookeeper import own_root, shared_server

LIMIT_S = 60.0
ROLES = ("router", "relay", "broker")
CLUSTER = ClusterOptions(heartbeat_interval_ms=250)


class Played(LinkHandler):
    """A gateway or a proxy that the test plays: what it got, and what became of what it sent."""

    def __init__(self, number: int) -> None:
        self.endpoint_id = EndpointID(number)
        self.records: list[bytes] = []
        self.confirmed: set[int] = set()
        self.settled: dict[int, bool] = {}
        self.endpoint = Endpoint(self.endpoint_id, link_options(CLUSTER, RoleOptions()), self)
        self.port = self.endpoint.bind("127.0.0.1", 0)

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        self.records += split(data[start:end], count)
        return Outcome.TAKEN

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        for data in messages:
            self.confirmed.update(control_pb2.Control.FromString(data).gateway_confirm.ids)
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        self.settled.update(settled)

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        pass

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        return b""

    def node(self, role: str) -> Node:
        """As the registry has it."""
        instance = 1 if role == "gateway" else -1
        return Node(
            role, -1, -1, NodeState.RUNNING, "127.0.0.1", self.port, 0, self.endpoint_id, 0, "test", CLUSTER.wire_hash(), 0,
            instance=instance, generation=instance,
        )  # fmt: skip


class Cluster:
    """Processes, the test's own view of the registry, and the two that the test plays."""

    def __init__(self, registry: str, folder: Path) -> None:
        self.registry, self.folder = registry, folder
        self.processes: dict[str, Forked] = {}
        self.gateway, self.proxy = Played(1001), Played(1002)
        self.view = View()
        self._news = asyncio.Condition()
        self._counter = 0
        self._numbers = 0

    def on_view(self, view: View) -> None:
        """The registry has changed."""
        self.view = view
        nodes = [node for role in ROLES for node in view.of_role(role)]
        for played in (self.gateway, self.proxy):
            played.endpoint.set_peers(Peer(node.endpoint, node.role, node.host, node.port, node.stream_port) for node in nodes)

    async def start(self, name: str, **more: str) -> None:
        """Start a process: role-number, with more settings."""
        role = name.split("-")[0]
        sets = {
            "registry": self.registry,
            "data_dir": str(self.folder / name),
            "session_timeout_ms": "4000",
            "log_format": "json",
            "cluster.heartbeat_interval_ms": str(CLUSTER.heartbeat_interval_ms),
            **more,
        }
        arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        self.processes[name] = fork(role, arguments, self.folder / f"{name}.log")

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """End a process; returns its exit code."""
        process = self.processes.pop(name)
        process.send_signal(number)
        async with asyncio.timeout(LIMIT_S):
            return await process.ended()

    def log(self, name: str) -> str:
        """What a process has logged."""
        return (self.folder / f"{name}.log").read_text()

    async def until(self, what: str, found: Callable[[], object]) -> None:
        """Wait for something."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not found():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logs = "\n".join(f"{name}: {self.log(name)[-3000:]}" for name in self.processes)
            pytest.fail(f"{what} did not happen within {LIMIT_S} s\n{logs}")

    def node(self, name: str) -> Node | None:
        """The Running node of a process."""
        process = self.processes.get(name)
        nodes = self.view.running(name.split("-")[0])
        return next((node for node in nodes if process is not None and node.pid == process.pid), None)

    async def running(self, *names: str) -> None:
        """Wait until these are Running."""
        await self.until(f"{names} Running", lambda: all(self.node(name) is not None for name in names))

    async def join(self, router: str, room: int, *, login: bool = True) -> None:
        """User 7 joins a room, or leaves it."""
        self._counter += 1
        await self.say(router, Update(gateway_msg_id(1, 1, self._counter), room, 7, login))

    async def say(self, name: str, change: Update) -> None:
        """Say it as a gateway does: again every second until it is confirmed."""
        node = self.node(name)
        assert node is not None
        async with asyncio.timeout(LIMIT_S):
            while change.id not in self.gateway.confirmed:
                self.gateway.endpoint.send_control(node.endpoint, encode_messages([change]))
                for _ in range(50):
                    if change.id not in self.gateway.confirmed:
                        await asyncio.sleep(0.02)

    async def reaches_gateway(self, broker: str, room: int) -> bool:
        """Send a record of a room through a broker; once the broker has handed it on, see whether the gateway has it."""
        record, taken = await self.send(broker, room)
        assert taken
        for _ in range(25):
            if record in self.gateway.records:
                break
            await asyncio.sleep(0.02)
        assert self.gateway.records.count(record) <= 1
        return record in self.gateway.records

    async def send(self, broker: str, room: int, flags: int = Flag.TO_ROOM) -> tuple[bytes, bool]:
        """Send a record of a room to a broker. Returns the record, and whether the broker took it."""
        node = self.node(broker)
        assert node is not None
        self._numbers += 1
        number = self._numbers
        record = encode(Kind.ROOM, room, b"hello", number, flags=flags)
        self.proxy.endpoint.send_records(node.endpoint, [record], token=number)
        await self.until("settling", lambda: number in self.proxy.settled)
        return record, self.proxy.settled[number]

    async def served(self, broker: str, *rooms: int) -> None:
        """A broker serves these rooms, at the latest when it has moved to another router."""
        for room in rooms:
            async with asyncio.timeout(LIMIT_S):
                while not await self.reaches_gateway(broker, room):
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """A root in the shared ZooKeeper, the two that the test plays, and no process yet."""
    async with AsyncExitStack() as stack:
        server, root = await asyncio.to_thread(shared_server), own_root()
        zookeeper = ZooKeeper(server.address)
        await zookeeper.connect()
        stack.push_async_callback(zookeeper.close)
        await ensure_layout(zookeeper, root, dict.fromkeys(ROLES, RoleLayout(1, 1, 2)))
        found = Cluster(f"zk://{server.address}{root}", folder)
        for role, played in (("gateway", found.gateway), ("proxy", found.proxy)):
            await played.endpoint.start()
            stack.push_async_callback(played.endpoint.close)
            membership = Membership(zookeeper, root)
            node = played.node(role)
            if node.instance >= 0:
                await zookeeper.ensure_path(paths.instances(root))
                await zookeeper.create(paths.instance(root, node.instance), b'{"generation":%d}' % node.generation)
                holder = paths.instance_holder(root, node.instance)
                await zookeeper.create(holder, f"{node.endpoint:016x}".encode(), ephemeral=True)
            await membership.register(node)
            stack.push_async_callback(membership.unregister)
        discovery = Discovery(zookeeper, root, found.on_view, 1.0)
        await discovery.start()
        stack.push_async_callback(discovery.close)
        try:
            yield found
        finally:
            for name in list(found.processes):
                await found.kill(name)
