"""The sockets on which clients connect by MQTT, WebSocket and HTTP.

It is bound before the gateway registers, because the gateway's node names the port; it listens when the gateway is Running.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import Final

from cluster.listeners.server import files_for_mqtt
from gateway.doors.proxied import ProxyDoor
from pixiu.errors import ConfigurationError, Unavailable

ACCEPTS: Final = 8
"""Connections accepted at once: about a millisecond, in which nobody else is served."""
REST_S: Final = 0.004
"""Pause after these until the next ones, seconds."""
RETRY_S: Final = 1.0
"""Retry interval, seconds, of a process that cannot open more files or has no memory."""
MAX_WAITING: Final = 500
"""CONNECTs that wait for their turn, above which no more connections are accepted: about a second's. Those that wait for longer
than a CONNECT may take would be closed and come again, so that the gateway would work for clients that have gone."""
LISTEN_BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are accepted."""


class Listener:
    """Listens for clients.

    Of clients that connect together a few are accepted at a time, and the kernel keeps the others: nobody else is served meanwhile.

    Args:
        connect: makes the protocol of a new connection.
        option: name of the option for the port.
        behind: finds the client behind a balancer; None: connections are the clients' own.
        waiting: number of CONNECTs that wait for their turn.
    """

    def __init__(
        self,
        connect: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        option: str = "mqtt_port",
        behind: ProxyDoor | None = None,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self._waiting = waiting
        self._connect, self._host, self._port, self._option, self._behind = connect, host, port, option, behind
        self._sockets: list[socket.socket] = []
        self.refused = 0
        """Connections closed at once, because the remaining descriptors are not for clients."""
        self._opening: set[asyncio.Task[object]] = set()

    async def bind(self) -> int:
        """Take the port. Returns its number. Raises `ConfigurationError` or `Unavailable`."""
        loop = asyncio.get_running_loop()
        try:
            # With SO_REUSEADDR the kernel would give a port that it chose to another process until it is listened on.
            reuse = None if self._port else False
            server = await loop.create_server(self._connect, self._host, self._port, start_serving=False, reuse_address=reuse)
        except OSError as error:
            where = f"{self._host}:{self._port}"
            if error.errno == errno.EADDRINUSE:
                text = f"gateway.{self._option}: {where} is taken by another process; choose another port, or 0 for any"
                raise ConfigurationError(text) from None
            raise Unavailable(f"gateway.{self._option}: cannot listen on {where}: {error.strerror}") from None
        self._sockets = [socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets]
        server.close()  # it has bound all addresses of the host; they are accepted from here
        return int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Start to accept connections."""
        for listener in self._sockets:
            listener.setblocking(False)
            # Connections inherit this. Without it those in TIME_WAIT would block a restarted gateway from its port for a minute.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.listen(LISTEN_BACKLOG)
            self._listen(listener)

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        for listener in self._sockets:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._sockets = []

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop, rest_s, files = asyncio.get_running_loop(), REST_S, _files()
        try:
            for _ in range(ACCEPTS if self._waiting() < MAX_WAITING else 0):
                connection, _ = listener.accept()
                if connection.fileno() >= files:
                    # The kernel gives the lowest free number: all below are taken, and those above are not for clients.
                    connection.close()
                    self.refused += 1
                    rest_s = RETRY_S
                    break
                task = loop.create_task(self._open(connection))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            rest_s = RETRY_S
            loop.call_exception_handler(
                {"message": f"clients cannot be accepted for {RETRY_S:g} s: {error.strerror}", "exception": error}
            )
        loop.remove_reader(listener)
        loop.call_later(rest_s, self._listen, listener)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        client = connection if self._behind is None else await self._behind.client_of(connection)
        if client is not None:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(self._connect, client)


def _files() -> int:
    """Upper bound of clients' descriptors; theirs are below it."""
    return files_for_mqtt(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
