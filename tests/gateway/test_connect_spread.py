"""Connections that never say who they are do not end all in one turn of the loop."""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any

from gateway.mqtt import CONNECT_SPREAD_S, MQTTConnection
from gateway.slow_consumers import SlowConsumers
from pixiu.mqtt.server import SessionLimits
from pixiu.placement.big_rooms import VRooms


class Options:
    connection_buffer_bytes = 1 << 20
    slow_consumer_timeout_s = 10.0
    socket_send_buffer_bytes = 64 << 10


class Hub:
    endpoint = 7
    """As much of the service as a connection needs before its CONNECT."""

    def __init__(self) -> None:
        self.options = Options()
        self.limits = SessionLimits()
        self.vrooms = VRooms(0, 0)
        self.slow = SlowConsumers(self.now)
        self._numbers = itertools.count(1)

    def now(self) -> float:
        return 100.0

    def arrived(self, _connection: object) -> int:
        return next(self._numbers)


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
    hub: Any = Hub()
    loop: Any = Loop()
    for _ in range(100):
        connection, transport = MQTTConnection(hub), Transport()
        connection._loop = loop
        connection.connection_made(transport)
        transport.socket.close()
    first, last = hub.limits.connect_timeout_s, hub.limits.connect_timeout_s + CONNECT_SPREAD_S
    assert all(first <= delay <= last for delay in loop.delays)
    in_tenths = {int((delay - first) * 10) for delay in loop.delays}
    assert len(in_tenths) > 5, "most tenths of a second have some"
