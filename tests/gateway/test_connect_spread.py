"""Connections that never say who they are do not end all in one turn of the loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from gateway.mqtt.connection import CONNECT_SPREAD_S, MQTTConnection
from tests.gateway.world import World


class Transport(asyncio.Transport):
    """Of a socket that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = socket.socket()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is written."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket


class Loop:
    """Notes for when timers are set."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    def call_later(self, delay: float, *_: object) -> object:
        self.delays.append(delay)
        return object()


async def test_those_that_came_together_time_out_one_after_the_other() -> None:
    clients = World(now=100.0).clients
    loop: Any = Loop()
    for _ in range(100):
        connection, transport = MQTTConnection(clients), Transport()
        connection._loop = loop
        connection.connection_made(transport)
        transport.socket.close()
    first, last = clients.limits.connect_timeout_s, clients.limits.connect_timeout_s + CONNECT_SPREAD_S
    assert all(first <= delay <= last for delay in loop.delays)
    in_tenths = {int((delay - first) * 10) for delay in loop.delays}
    assert len(in_tenths) > 5, "most tenths of a second have some"
