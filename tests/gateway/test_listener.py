"""Clients are accepted a few at a time, all of them in the end, and again when the process had no space for one."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from cluster.listeners.server import connections_of_clients, files_for_clients, files_for_mqtt, server_options
from cluster.settings.options import ClusterOptions
from gateway.mqtt import listener as module
from gateway.mqtt.listener import ACCEPTS, Listener
from pixiu.errors import ConfigurationError
from tests.support.waiting import until


class Noted(asyncio.Protocol):
    """A connection that is counted."""

    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)


class Full:
    """A listening socket of a process that may not open more files, once."""

    def __init__(self, real: socket.socket) -> None:
        self._real, self._full = real, True

    def accept(self) -> tuple[socket.socket, Any]:
        if self._full:
            self._full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return self._real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def test_of_those_who_come_together_a_few_are_accepted_at_once_and_all_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rests, made = list[float](), list[asyncio.BaseTransport]()
    listener = Listener(lambda: Noted(made), "127.0.0.1", 0)
    port = await listener.bind()
    await listener.start()
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(seconds: float, *rest: Any) -> asyncio.TimerHandle:
        rests.append(seconds)
        return later(seconds, *rest)

    monkeypatch.setattr(loop, "call_later", call_later)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * ACCEPTS)]
    await until(lambda: len(made) == 3 * ACCEPTS)
    assert rests.count(module.REST_S) >= 3
    listener.close()
    for client in clients:
        client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for transport in made:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def test_nobody_is_accepted_while_many_connects_wait_for_their_turn() -> None:
    waiting, made = [module.MAX_WAITING], list[asyncio.BaseTransport]()
    asked = 0

    def wait() -> int:
        nonlocal asked
        asked += 1
        return waiting[0]

    listener = Listener(lambda: Noted(made), "127.0.0.1", 0, waiting=wait)
    port = await listener.bind()
    await listener.start()
    with socket.create_connection(("127.0.0.1", port)):
        await until(lambda: asked >= 3)
        assert not made
        waiting[0] -= 1
        await until(lambda: made)
    listener.close()
    for transport in made:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def test_a_process_without_room_for_a_connection_says_so_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said, made = list[dict[str, Any]](), list[asyncio.BaseTransport]()
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    listener = Listener(lambda: Noted(made), "127.0.0.1", 0)
    port = await listener.bind()
    listener._sockets = [Full(one) for one in listener._sockets]  # type: ignore[misc]
    await listener.start()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    with socket.create_connection(("127.0.0.1", port)):
        await until(lambda: made)
    assert ["Too many open files" in context["message"] for context in said] == [True]
    listener.close()
    (transport,) = made
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"gateway\.mqtt_port: 127\.0\.0\.1:{port} is taken by another process"):
            await Listener(lambda: Noted([]), "127.0.0.1", port).bind()


async def test_the_last_descriptors_are_not_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[asyncio.BaseTransport]()
    listener = Listener(lambda: Noted(made), "127.0.0.1", 0)
    port = await listener.bind()
    await listener.start()
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "_files", lambda: 0)
    refused = socket.create_connection(("127.0.0.1", port))
    await until(lambda: listener.refused == 1)
    monkeypatch.undo()
    served = socket.create_connection(("127.0.0.1", port))
    await until(lambda: len(made) == 1)
    assert refused.recv(1) == b""
    listener.close()
    made[0].close()
    for client in (refused, served):
        client.close()


def test_some_descriptors_are_kept_back() -> None:
    assert files_for_clients(1200) == 1200 - 256
    assert files_for_clients(300) == 150
    for limit in (64, 300, 1200, 20_000, 1 << 20):  # whichever of them comes first, and whatever both hold
        both = files_for_mqtt(limit) + connections_of_clients(limit, beside_mqtt=True)
        assert both <= files_for_clients(limit)
        assert connections_of_clients(limit, beside_mqtt=False) >= connections_of_clients(limit, beside_mqtt=True) > 0
    options = dict(server_options(ClusterOptions(), of_clients=True))
    assert options["grpc.max_connection_idle_ms"] <= 10_000
    assert options["grpc.max_allowed_incoming_connections"] > 0
    assert options["grpc.http2.bdp_probe"] == 0, "a stream's window would grow to megabytes"
    assert not {"grpc.max_connection_idle_ms", "grpc.http2.bdp_probe"} & dict(server_options(ClusterOptions())).keys()


async def test_a_port_that_the_kernel_chose_is_not_given_to_others_before_it_listens() -> None:
    listener = Listener(asyncio.Protocol, "127.0.0.1", 0)
    port = await listener.bind()
    try:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    finally:
        listener.close()


async def test_a_gateway_that_restarts_has_its_port_again_while_old_connections_end() -> None:
    """The kernel keeps what the gateway closed for a minute (TIME_WAIT)."""
    made = list[asyncio.BaseTransport]()
    listener = Listener(lambda: Noted(made), "127.0.0.1", 0)
    port = await listener.bind()
    await listener.start()
    with socket.create_connection(("127.0.0.1", port)) as client:
        await until(lambda: bool(made))
        made[0].close()
        assert await asyncio.to_thread(client.recv, 1) == b""
    listener.close()
    again = Listener(lambda: Noted(made), "127.0.0.1", port)
    assert await again.bind() == port
    again.close()
