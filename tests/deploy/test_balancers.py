"""The shipped configurations of HAProxy and nginx with the real programs: a client finds its gateway again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from cluster.listeners.networks import Networks
from cluster.listeners.origins import Origins
from cluster.mqtt import codec
from cluster.mqtt.packets import Connect, Side
from comparison.processes import free_port
from gateway.doors.proxied import ProxyDoor
from gateway.doors.proxy_header import Source, read_header
from gateway.doors.websocket import WebSocketConnection, WebSockets
from gateway.http.api import Api
from gateway.http.bounded import Connections
from gateway.http.logins import Logins
from gateway.http.server import ApiServer
from gateway.mqtt.connection import MQTTConnection
from gateway.mqtt.listener import Listener
from tests.gateway.world import World
from tests.support.waiting import until

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2] / "deploy"
PATH = "/usr/sbin:/sbin:/usr/local/sbin"
HAPROXY, NGINX = (shutil.which(name) or shutil.which(name, path=PATH) for name in ("haproxy", "nginx"))
MODULES = Path(os.environ.get("NGINX_MODULES", "/usr/lib/nginx/modules"))
GATEWAYS = 3
CONNACK = b"\x20\x02\0\0"


class Gateway:
    """Notes who comes: what the balancer says of the client, and the client's ID."""

    def __init__(self) -> None:
        self.found: list[tuple[Source | None, bytes]] = []
        self.server: asyncio.Server | None = None

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        header = read_header()
        wanted, source = next(header), None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                try:
                    wanted = header.send(await reader.readexactly(wanted))
                except StopIteration as stop:
                    source = stop.value
                    break
            head = await reader.readexactly(2)  # a health check sends nothing
            while head[-1] >= 0x80:
                head += await reader.readexactly(1)
            size = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(head[1:]))
            self.found.append((source, head + await reader.readexactly(size)))
            writer.write(CONNACK)
            await reader.read()
        writer.close()


class Balanced:
    """A balancer with its gateways."""

    def __init__(self, port: int, gateways: list[Gateway]) -> None:
        self.port, self.gateways = port, gateways

    async def connect(self, packet: bytes, number: int) -> int:
        """The number of the gateway that gets this, from a source address of its own; -1: none."""
        source = f"127.0.{1 + number // 200}.{1 + number % 200}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))
        address = writer.get_extra_info("sockname")
        try:
            for at in range(0, len(packet), 7):
                writer.write(packet[at : at + 7])
                if at < 21:
                    await writer.drain()
            answer = await reader.readexactly(4)
        except (asyncio.IncompleteReadError, ConnectionError):
            return -1
        finally:
            writer.close()
        assert answer == CONNACK
        (at,) = (at for at, gateway in enumerate(self.gateways) if (Source(*address), packet) in gateway.found)
        return at

    async def many(self, packets: list[bytes], first: int = 0) -> list[int]:
        """The same for many, some at a time."""
        slots = asyncio.Semaphore(20)

        async def one(number: int, packet: bytes) -> int:
            async with slots:
                return await self.connect(packet, number)

        return await asyncio.gather(*(one(first + number, packet) for number, packet in enumerate(packets)))


def with_ports(text: str, ports: list[int], server: str) -> str:
    """A shipped configuration with the gateways of the test in place of those in it."""
    return re.sub(server, lambda found: f"127.0.0.1:{ports[int(found[1]) - 1]}", text)


@contextlib.asynccontextmanager
async def running(command: list[str], port: int, log: Path) -> AsyncIterator[None]:
    """A balancer that listens at this port."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def listens() -> bool:
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        await until(listens)
        yield
    finally:
        process.terminate()
        process.wait(30)


def haproxy(folder: Path, port: int, ports: list[int]) -> list[str]:
    text = with_ports((ROOT / "haproxy/haproxy.cfg").read_text(), ports, r"10\.0\.0\.(\d):\d+")
    return run_haproxy(
        folder, text.replace("bind :1883", f"bind 127.0.0.1:{port}").replace("bind :8080", f"bind 127.0.0.1:{free_port()}")
    )


def run_haproxy(folder: Path, text: str) -> list[str]:
    (folder / "haproxy.cfg").write_text(text.replace("maxconn 100000", "maxconn 500"))
    assert HAPROXY is not None
    return [HAPROXY, "-db", "-f", str(folder / "haproxy.cfg")]


def nginx(folder: Path, port: int, ports: list[int]) -> list[str]:
    text = with_ports((ROOT / "nginx/nginx.conf").read_text(), ports, r"10\.0\.0\.(\d):1883")
    text = text.replace("listen 1883", f"listen 127.0.0.1:{port}").replace("modules/", f"{MODULES}/")
    text = text.replace("worker_processes auto", "worker_processes 1").replace("worker_connections 65536", "worker_connections 500")
    shutil.copy(ROOT / "nginx/mqtt_client.js", folder)
    (folder / "nginx.conf").write_text(f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\n{text}")
    assert NGINX is not None
    return [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]


@pytest.fixture(
    params=[
        pytest.param(haproxy, marks=pytest.mark.skipif(HAPROXY is None, reason="no haproxy")),
        pytest.param(
            nginx,
            marks=pytest.mark.skipif(
                NGINX is None or not (MODULES / "ngx_stream_js_module.so").exists(), reason="no nginx with stream and njs"
            ),
        ),
    ],
    ids=["haproxy", "nginx"],
)
async def balanced(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Balanced]:
    gateways = [Gateway() for _ in range(GATEWAYS)]
    ports, port = [await gateway.start() for gateway in gateways], free_port()
    async with running(request.param(tmp_path, port, ports), port, tmp_path / "log"):
        yield Balanced(port, gateways)
    for gateway in gateways:
        assert gateway.server is not None
        gateway.server.close()


def connect(client: str, protocol: int = 4, *, will: int = 0) -> bytes:
    """A CONNECT of this version."""
    packet = codec.encode(Connect(client, True, 60, user_name="u" * will if will else None))
    assert next(iter(codec.Decoder(Side.SERVER).feed(packet)))
    if protocol == 4:
        return packet
    body = packet[packet.index(b"\0\x04MQTT") + 6 :]
    body = (b"\0\x06MQIsdp\x03" if protocol == 3 else b"\0\x04MQTT\x05") + body[1:4] + (b"" if protocol == 3 else b"\0") + body[4:]
    size = len(body)
    return b"\x10" + (bytes([size]) if size < 128 else bytes([size % 128 | 128, size // 128])) + body


async def test_clients_come_back_to_their_gateways_and_are_spread(balanced: Balanced) -> None:
    packets = [connect(f"device-{number}", (3, 4, 5)[number % 3], will=number % 2 * 150) for number in range(200)]
    first = await balanced.many(packets)
    assert await balanced.many(packets, first=200) == first, "200 of 200, from other addresses"
    assert -1 not in first


async def test_versions_of_one_client_meet_at_one_gateway(balanced: Balanced) -> None:
    packets = [connect("phone", version, will=will) for version in (3, 4, 5) for will in (0, 200)]
    assert len(set(await balanced.many(packets))) == 1


async def test_the_spread_is_even_with_an_id_and_without(balanced: Balanced) -> None:
    named = Counter(await balanced.many([connect(f"{number:x}") for number in range(1500)]))
    nameless = Counter(await balanced.many([connect("")] * 90))
    assert all(abs(named[at] - 500) <= 0.1 * 500 for at in range(GATEWAYS)), named
    assert len(nameless) == GATEWAYS, nameless


async def test_what_is_no_connect_reaches_no_gateway_of_haproxy(balanced: Balanced, request: pytest.FixtureRequest) -> None:
    if "nginx" in request.node.name:
        pytest.skip("nginx passes it on, and the gateway closes it")
    assert await balanced.connect(b"GET / HTTP/1.1\r\n\r\n", 0) == -1


@pytest.mark.skipif(HAPROXY is None, reason="no haproxy")
async def test_websocket_and_http_of_a_gateway_are_reached_through_haproxy(tmp_path: Path) -> None:
    """The gateway's own listeners behind the real program: the address that counts is the client's."""
    clients, made = World().clients, list[MQTTConnection]()
    door = ProxyDoor(Networks("127.0.0.1/32"), clients)

    def mqtt() -> asyncio.Protocol:
        made.append(MQTTConnection(clients))
        return cast(asyncio.Protocol, made[-1])

    async def unused(*_: object) -> Any:
        raise AssertionError

    sockets = WebSockets(clients, mqtt, Origins(""))
    server = ApiServer(Api(None, Logins(lambda: "", 1, ""), unused, unused, lambda: False), Origins(""), Connections(100, 100))
    listeners = [
        Listener(lambda: WebSocketConnection(sockets), "127.0.0.1", 0, "websocket_port", door),
        Listener(server.connect, "127.0.0.1", 0, "api_port", door),
    ]
    await server.start()
    of_websocket, of_api = [await listener.bind() for listener in listeners]
    for listener in listeners:
        await listener.start()
    port = free_port()
    text = re.sub(r"10\.0\.0\.\d:8083", f"127.0.0.1:{of_websocket}", (ROOT / "haproxy/haproxy.cfg").read_text())
    text = re.sub(r"10\.0\.0\.\d:8084", f"127.0.0.1:{of_api}", text).replace("bind :8080", f"bind 127.0.0.1:{port}")
    command = run_haproxy(tmp_path, text.replace("bind :1883", f"bind 127.0.0.1:{free_port()}"))
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.77", 0))
    async with running(command, port, tmp_path / "log"), aiohttp.ClientSession(connector=connector) as http:
        async with http.get(f"http://127.0.0.1:{port}/v1/health") as answer:
            assert await answer.json() == {"status": "ok"}
        async with http.ws_connect(f"ws://127.0.0.1:{port}/mqtt", protocols=("mqtt",)) as websocket:
            await websocket.send_bytes(connect("phone"))
            assert await websocket.receive_bytes() == CONNACK
            assert [connection._address for connection in made] == ["127.0.0.77"]
    for listener in listeners:
        listener.close()
    await server.close()
    clients.stop()
    assert not door.refused
