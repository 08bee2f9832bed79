"""Connections that come through a balancer: the PROXY header is read from the socket before anything else sees the connection.

    listed network ──▶ header ──▶ socket whose peer is the client ──▶ TLS, WebSocket, MQTT, HTTP
                         │ wrong, missing or late: closed, counted by reason
    others ─────────────────────▶ socket as it is

While the header is awaited the connection counts as not identified: it may be evicted for others.

Source: docs/operations.md, "Balancers in front of gateways".
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any, Final, Protocol

from cluster.core import log
from cluster.listeners.networks import Networks
from gateway.clients.clients import Pending
from gateway.doors.proxy_header import HeaderRefused, Source, read_header

HEADER_TIMEOUT_S: Final = 3.0
"""Time for the header. A balancer sends it first, so that one without it is misconfigured, or no balancer."""
LEFT: Final = 1
PROXY_HEADER_REFUSED: Final = "proxy_header_refused"


class ProxiedSocket(socket.socket):
    """A connection whose peer is the client and not the balancer: limits, logs and rules use the client's address."""

    client: Source

    def getpeername(self) -> Any:
        """Address of the client, in the form of its family."""
        host, port = self.client
        return (host, port, 0, 0) if ":" in host else (host, port)


class PendingConnections(Protocol):
    """Limits connections that are not identified; see `gateway.clients.clients.Clients`."""

    def arrived(self, connection: Pending, address: str) -> int:
        """Number a new, pending connection; an older one may be evicted."""

    def closed(self, connection: Pending, reason: int) -> None:
        """Remove a connection."""


class _Header:
    """A connection whose header is awaited."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.id = 0
        self._task = task

    def evict(self) -> None:
        """End it: too many connections are not identified."""
        self._task.cancel()


class ProxyDoor:
    """Finds the client behind each new connection.

    Args:
        networks: those of the balancers. Connections from them must begin with a header; no other may.
    """

    def __init__(self, networks: Networks, pending: PendingConnections) -> None:
        self._networks, self._pending = networks, pending
        self.refused: Counter[str] = Counter()
        """Reason → connections from listed networks that were closed for it."""

    async def client_of(self, connection: socket.socket) -> socket.socket | None:
        """Return the connection as its client's; None: it was closed, because its header was refused."""
        try:
            peer = str(connection.getpeername()[0])
        except (OSError, IndexError):
            return connection  # gone already
        if not self._networks or not self._networks.have(peer):
            return connection
        try:
            source = await self._read(connection, peer)
        except (HeaderRefused, OSError, asyncio.CancelledError) as error:  # a time-out is an OSError; evicted: the task ends here
            self._refuse(connection, peer, error)
            return None
        if source is None:
            return connection
        proxied = ProxiedSocket(connection.family, connection.type, connection.proto, fileno=connection.detach())
        proxied.client = source
        proxied.setblocking(False)
        return proxied

    async def _read(self, connection: socket.socket, peer: str) -> Source | None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        waiting = _Header(task)
        waiting.id = self._pending.arrived(waiting, peer)
        try:
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                header, data = read_header(), b""
                wanted = next(header)
                while True:
                    while len(data) < wanted:
                        more = await loop.sock_recv(connection, wanted - len(data))
                        if not more:
                            raise HeaderRefused("no header" if not data else "header too short")
                        data += more
                    try:
                        wanted, data = header.send(data), b""
                    except StopIteration as stop:
                        found: Source | None = stop.value
                        return found
        finally:
            self._pending.closed(waiting, LEFT)

    def _refuse(self, connection: socket.socket, peer: str, error: BaseException) -> None:
        reason = str(error) if isinstance(error, HeaderRefused) else "evicted" if isinstance(error, asyncio.CancelledError) else ""
        reason = reason or ("late" if isinstance(error, TimeoutError) else "lost")
        connection.close()
        self.refused[reason] += 1
        if log.once_per(60, PROXY_HEADER_REFUSED):
            text = "this network is in gateway.proxy_networks: its balancers must send the header of the PROXY protocol"
            log.get_logger().warning(PROXY_HEADER_REFUSED, address=peer, reason=reason, text=text)
