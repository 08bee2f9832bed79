"""The socket on which MQTT clients connect.

It is bound before the gateway registers, because its node says on which port, and listens when the gateway is Running.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Final

from pixiu.errors import ConfigurationError, Unavailable

ACCEPTS_A_TURN: Final = 16
"""About a millisecond, in which nobody else is served."""
LISTEN_BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are accepted."""


class Listener:
    """Listens for MQTT clients.

    Args:
        connect: makes the protocol of a new connection.
        option: which one says the port.
    """

    def __init__(self, connect: Callable[[], asyncio.Protocol], host: str, port: int, option: str = "mqtt_port") -> None:
        self._connect, self._host, self._port, self._option = connect, host, port, option
        self._server: asyncio.Server | None = None

    async def bind(self) -> int:
        """Take the port. Returns its number. Raises `ConfigurationError` or `Unavailable`."""
        try:
            # The backlog is also how many connections asyncio accepts in a turn, while nobody else is served.
            self._server = await asyncio.get_running_loop().create_server(
                self._connect, self._host, self._port, backlog=ACCEPTS_A_TURN, start_serving=False
            )
        except OSError as error:
            where = f"{self._host}:{self._port}"
            if error.errno == errno.EADDRINUSE:
                text = f"gateway.{self._option}: {where} is taken by another process; choose another port, or 0 for any"
                raise ConfigurationError(text) from None
            raise Unavailable(f"gateway.mqtt_host: cannot listen on {where}: {error.strerror}") from None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Start to accept connections."""
        assert self._server is not None
        await self._server.start_serving()
        for listener in self._server.sockets:
            with socket.socket(fileno=os.dup(listener.fileno())) as sock:
                sock.listen(LISTEN_BACKLOG)

    def close(self) -> None:
        """Accept no more; those that are open stay."""
        if self._server is not None:
            self._server.close()
