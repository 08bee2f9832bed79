"""A network that is cut between two processes, both ways or one way: a `LossyNetwork` for streams, too, and those to ZooKeeper.

    A ──▶ 127.0.0.2:7005 ── the network ── 127.0.0.1:7005, B          datagrams and calls, B's port number for both
    A ──▶ 127.0.0.2:7008 ── the network ── 127.0.0.1:7008, B          streams, at B's stream_port
    A ──▶ 127.0.0.1:N ───── the network ── ZooKeeper

Each process is told `advertised_host=127.0.0.2`. A cut lets no datagram pass. What a stream holds waits until the cut is healed, as
TCP's own repetition makes it do, the end of a connection too; who connects meanwhile is taken and hears nothing. Whose a connection
is says Linux, in /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pixiu.discovery.paths import ROLES
from pixiu.discovery.view import View
from tests.support.lossy import INSIDE, OUTSIDE, START_TIMEOUT_S, LossyNetwork

CHUNK: Final = 64 << 10
CLIENT_ROLES: Final = ("gateway", "proxy")
TOPICS: Final = ("topic", "admin")
"""Roles that these clusters do not have."""
LOOK_S: Final = 1.0
LISTEN: Final = "0A"
"""The state of a listening socket, in /proc/net/tcp."""
Cut = tuple[int, int]
"""The port numbers of who sends and who does not get it."""


@dataclass(slots=True, eq=False)
class _Stream:
    """A connection on its way through."""

    source: int
    """The TCP port of who opened it."""
    server: int
    """The process port of who took it; 0: it cannot be cut off."""
    framed: bool
    """Whether it is a framed stream."""
    client: int = 0
    """The process port of who opened it; 0: not known yet, or no process of the cluster."""
    look_at: float = 0.0
    """When to look for who opened it again, by the loop's time: chunk by chunk that takes all the time that the network has."""


class CutNetwork(LossyNetwork):
    """See the module. `start` it before the cluster, and give that `registry`.

    Args:
        registry: zk://HOST:PORT/ROOT of the cluster, ZooKeeper's own.
        seed: of the losses of datagrams.
        zookeeper: the port of ZooKeeper on 127.0.0.1: as a peer in `cut`, too.
    """

    def __init__(self, registry: str, seed: int, zookeeper: int) -> None:
        super().__init__(registry, seed)
        self._zookeeper = zookeeper
        self._cuts: frozenset[Cut] = frozenset()
        self._moved = asyncio.Event()
        """Set when the cuts change; another one stands here then."""
        self._process_ports: dict[int, int] = {}
        """Process → the port that it is known by."""
        self._listening: dict[int, asyncio.Server] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.registry_port = 0
        """At which processes reach ZooKeeper."""
        self.stopped = {"datagrams": 0, "chunks": 0, "chunks of streams": 0}
        """What cuts have stopped: datagrams for ever; chunks of connections, and those of streams of them, for as long as they
        lasted."""

    @staticmethod
    def settings() -> list[str]:
        """What `pixiu up` has to be told; clients go past the network."""
        wanted = [f"{role}.advertised_host={OUTSIDE}" for role in sorted(ROLES) if role not in (*TOPICS, "bridge")]
        wanted += [f"{role}.advertised_client_host={INSIDE}" for role in CLIENT_ROLES]
        return [part for setting in wanted for part in ("--set", setting)]

    def start(self) -> None:
        """Returns when it watches the registry and passes its connections on."""
        super().start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(INSIDE, 0, self._zookeeper, self._zookeeper), self._loop)
        self.registry_port = listening.result(START_TIMEOUT_S)

    def stop(self) -> None:
        """Close everything."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(START_TIMEOUT_S)
        super().stop()

    def cut(self, cuts: Collection[Cut]) -> None:
        """From now on these are cut, and no others."""
        self._call(lambda: self._set_cuts(frozenset(cuts)))

    def _set_cuts(self, cuts: frozenset[Cut]) -> None:
        self._cuts = cuts
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _on_view(self, view: View) -> None:
        super()._on_view(view)
        for node in view.nodes:
            self._process_ports[node.pid] = node.port
            for port, peer in ((node.port, node.port), (node.stream_port, node.port), (node.http_port, 0)):
                if port and port not in self._listening:
                    self._start(self._listen(OUTSIDE, port, port, peer))

    def _start(self, coroutine: object) -> None:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)  # type: ignore[arg-type]
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _listen(self, host: str, port: int, target: int, peer: int) -> int:
        """`peer`: the port by which who listens there can be cut off; 0: it cannot."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # by `stop`; asyncio would log it
                await self._serve(reader, writer, target, peer)

        server = await asyncio.start_server(serve, host, port)
        self._listening[port or target] = server
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def _close(self) -> None:
        for server in self._listening.values():
            server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _pass_on(self, data: bytes, sender: int, receiver: int) -> None:
        if (sender, receiver) in self._cuts:
            self.stopped["datagrams"] += 1
        else:
            super()._pass_on(data, sender, receiver)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int, peer: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection(INSIDE, target)
        except OSError:
            writer.transport.abort()
            return
        framed = peer not in (0, target)
        stream = _Stream(writer.get_extra_info("peername")[1], peer, framed)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, stream, there=True), self._pump(far_reader, writer, stream, there=False)
            )
        except OSError:
            writer.transport.abort()
            far_writer.transport.abort()
        finally:
            writer.close()
            far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: _Stream, *, there: bool) -> None:
        """One direction, until its end or until it breaks; both are told when nothing is cut."""
        broken = False
        while not broken:
            try:
                data = await reader.read(CHUNK)
            except ConnectionError:
                data, broken = b"", True
            await self._passable(stream, there=there)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        if broken:
            raise ConnectionResetError  # from the other end's point of view, too
        if not writer.transport.is_closing():
            writer.write_eof()

    async def _passable(self, stream: _Stream, *, there: bool) -> None:
        if self._cuts and self._is_cut(stream, there=there):
            self.stopped["chunks"] += 1
            self.stopped["chunks of streams"] += stream.framed
            while self._is_cut(stream, there=there):
                await self._moved.wait()

    def _is_cut(self, stream: _Stream, *, there: bool) -> bool:
        if not stream.server or not self._cuts:
            return False
        if not stream.client and self._loop.time() >= stream.look_at:
            stream.look_at = self._loop.time() + LOOK_S
            pid = owner_of(stream.source, self._process_ports)
            stream.client = self._process_ports.get(pid, 0)
        pair = (stream.client, stream.server) if there else (stream.server, stream.client)
        return pair in self._cuts


def owner_of(port: int, pids: Iterable[int]) -> int:
    """Which of some processes has the connection whose own end is this TCP port of 127.0.0.1; 0: none of them."""
    wanted = (f"0100007F:{port:04X}", f"0000000000000000FFFF00000100007F:{port:04X}")
    inode = ""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # gRPC's sockets are of IPv6, with an address of IPv4 in it
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] in wanted and fields[3] != LISTEN:
                inode = f"socket:[{fields[9]}]"
    for pid in pids if inode else ():
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        if os.readlink(entry.path) == inode:
                            return pid
        except OSError:
            continue
    return 0
