"""A listener for NSQ's clients: its ports, its connections, its place among the others.

Source: docs/nsq.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections import Counter
from typing import Any, Final

from cluster.core import log
from cluster.metrics.metrics import Metrics
from cluster.trust.listener_tls import ListenerTls
from nsqdoor.connection import NsqConnection
from nsqdoor.http import Http
from nsqdoor.logins import Logins
from nsqdoor.options import Options
from nsqdoor.peers import Peer, Peers
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError

ANYWHERE: Final = ("0.0.0.0", "::")
LOOK_S: Final = 0.02
LISTENS: Final = "nsq_listens"


class Service:
    """Runs the listener: `await service.start()`, `await service.stop()`.

    Args:
        options: checked.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.limits = options, options.limits()
        self.logins = Logins(options.target, options.max_logins)
        self.tls = ListenerTls(options.tls_certificate, options.tls_key) if options.tls_certificate else None
        self.refused = 0
        self.peers: Peers | None = None
        self._connections: set[NsqConnection] = set()
        self._addresses: Counter[str] = Counter()
        self._leaving: set[asyncio.Task[None]] = set()
        self._totals: Counter[str] = Counter()
        self._zookeeper: ZooKeeper | None = None
        self._http: Http | None = None
        self._servers: list[asyncio.Server] = []
        self._draining = False

    async def start(self) -> None:
        """Connect to the cluster, listen, and register. Raises `PixiuError`."""
        options, root = self.options, ""
        login = await self.logins.use(None)  # a cluster that cannot be reached is noticed here
        self.logins.leave(login)
        if names_registry(options.target):
            address = parse_address(options.target)
            self._zookeeper, root = ZooKeeper(address, roles=("nsq",)), address.root
            await self._zookeeper.connect()
        metrics = Metrics("nsq")
        metrics.collect_from(self.samples)
        tcp = await self._listen(options.tcp_port, "tcp_port")
        port = tcp.sockets[0].getsockname()[1]
        name = socket.gethostname()
        where = options.broadcast or (name if options.host in ANYWHERE else options.host)
        own = Peer(where, name, port, 0, self.limits.version, f"{where}:{port}")
        peers = self.peers = Peers(self._zookeeper, root, own)
        self._http = Http(options, self.limits, self.logins, peers, metrics)
        try:
            http = await self._http.start()
        except OSError as error:
            raise ConfigurationError(f"http_port = {options.http_port} on {options.host}: {error.strerror}") from None
        peers.own = Peer(where, name, port, http.sockets[0].getsockname()[1], self.limits.version, own.remote_address)
        self._servers = [tcp, http]
        await tcp.start_serving()
        await peers.start()
        log.get_logger().info(LISTENS, address=where, tcp_port=port, http_port=peers.own.http_port)

    async def _listen(self, port: int, option: str) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(lambda: NsqConnection(self), self.options.host, port, start_serving=False)
        except OSError as error:
            raise ConfigurationError(f"{option} = {port} on {self.options.host}: {error.strerror}") from None

    async def stop(self) -> None:
        """Leave: no new clients, publishes that are under way are answered (at most `drain_s`), then all connections end."""
        self._draining = True
        if self._http is not None:
            self._http.draining = True
        if self.peers is not None:
            await self.peers.leave()
        for server in self._servers:
            server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.options.drain_s):
                while not all(connection.idle for connection in self._connections):
                    await asyncio.sleep(LOOK_S)
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        if self.peers is not None:
            await self.peers.close()
        await self.logins.close()
        if self._zookeeper is not None:
            await self._zookeeper.close()

    # --- called by connections

    def opened(self, connection: NsqConnection) -> bool:
        """Note a new connection. False: there are too many."""
        many = len(self._connections) >= self.options.max_connections
        if many or self._draining or self._addresses[connection.address] >= self.options.address_connections:
            self.refused += 1
            return False
        self._connections.add(connection)
        self._addresses[connection.address] += 1
        return True

    def closed(self, connection: NsqConnection) -> None:
        """Note that a connection is over; its messages go to others."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]
        self._totals.update(_counts(connection))
        if connection.consumer is not None:
            task = asyncio.get_running_loop().create_task(connection.leave(), name="nsq-leave")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def samples(self) -> dict[str, Any]:
        """Samples for metrics."""
        totals = Counter(self._totals)
        for connection in self._connections:
            totals.update(_counts(connection))
        return {
            "connections": len(self._connections),
            "connections_refused_total": self.refused,
            "consumers": sum(each.consumer is not None for each in self._connections),
            "in_flight": sum(each.session.in_flight for each in self._connections),
            "logins": len(self.logins),
            "listeners": len(self.peers.known) if self.peers is not None else 0,
            "http_requests_total": self._http.requests if self._http is not None else 0,
            "published_total": totals["published"],
            "sent_total": totals["sent"],
            "finished_total": totals["finished"],
            "requeued_total": totals["requeued"],
        }


def _counts(connection: NsqConnection) -> dict[str, int]:
    session = connection.session
    return {
        "published": session.published_count, "sent": session.sent_count, "finished": session.finished_count,
        "requeued": session.requeued_count,
    }  # fmt: skip


async def serve(options: Options) -> None:
    """Run a listener until SIGTERM or SIGINT. Raises `PixiuError`."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    service = Service(options)
    try:
        await service.start()
        await ended.wait()
    finally:
        await service.stop()
