"""MQTT over WebSocket: handshakes that are accepted and refused, frames in all forms, and what a client may not do."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from typing import cast

import aiohttp
import pytest
from wsproto import ConnectionType
from wsproto.connection import Connection as WebSocket
from wsproto.events import BytesMessage

from cluster.listeners.origins import Origins
from cluster.mqtt import codec
from cluster.mqtt.packets import Connack, Connect, Disconnect, Packet, Pingreq, Pingresp, Publish, Side, Will
from gateway import events as ev
from gateway.doors import websocket
from gateway.doors.websocket import MAX_HANDSHAKE_BYTES, MAX_IDLE_FRAMES, WebSocketConnection, WebSockets, frame_head
from gateway.mqtt.connection import MQTTConnection
from gateway.mqtt.listener import Listener
from gateway.options import Options
from tests.gateway.world import World, of
from tests.support.waiting import until

CONNECT = codec.encode(Connect("phone", True, 0))
PING = codec.encode(Pingreq())


class Gateway:
    """A listener for WebSockets before the clients of a gateway."""

    def __init__(self, origins: str = "https://app.example.com", **options: int) -> None:
        self.world = World(Options(**options))  # type: ignore[arg-type]
        clients = self.world.clients
        self.made: list[MQTTConnection] = []

        def connect() -> asyncio.Protocol:
            self.made.append(MQTTConnection(clients))
            return cast(asyncio.Protocol, self.made[-1])

        self.shared = WebSockets(clients, connect, Origins(origins))
        self.listener = Listener(lambda: WebSocketConnection(self.shared), "127.0.0.1", 0, "websocket_port")
        self.port = 0

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/mqtt"

    @property
    def pending(self) -> object:
        return self.world.clients.samples()["connections_pending"]


@pytest.fixture
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    made = Gateway(**getattr(request, "param", {}))
    made.port = await made.listener.bind()
    await made.listener.start()
    yield made
    made.listener.close()
    made.world.clients.stop()
    await until(lambda: not len(made.world.clients) and not made.pending)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def packets(socket: aiohttp.ClientWebSocketResponse, number: int) -> list[Packet]:
    """The next packets that the gateway sends, however they are put into frames."""
    decoder, found = codec.Decoder(Side.CLIENT), list[Packet]()
    while len(found) < number:
        found += decoder.feed(await socket.receive_bytes())
    return found


def frame(opcode: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    """A frame as a client sends it."""
    mask, size = os.urandom(4), len(payload)
    length = bytes([0x80 | size]) if size < 126 else struct.pack("!BH", 0xFE, size)
    return bytes([opcode | (0x80 if last else 0)]) + length + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


async def raw(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection after its handshake."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"GET /mqtt HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def closed_with(reader: asyncio.StreamReader) -> int:
    """The code of the closing frame, after whatever comes before it."""
    while True:
        opcode, length = await reader.readexactly(2)
        size = length if length < 126 else struct.unpack("!H", await reader.readexactly(2))[0]
        payload = await reader.readexactly(size)
        if opcode == 0x88:
            return int(struct.unpack("!H", payload[:2])[0])


@pytest.mark.parametrize("name", ["mqtt", "mqttv3.1"])
async def test_a_client_connects_and_closes(gateway: Gateway, http: aiohttp.ClientSession, name: str) -> None:
    """The server selects the subprotocol that the client offers [MQTT-6.0.0-4, MQTT5-6.0.0-4]."""
    async with http.ws_connect(gateway.url, protocols=(name,), origin="https://app.example.com") as socket:
        assert socket.protocol == name
        await socket.send_bytes(CONNECT + PING)
        connack, pong = await packets(socket, 2)
        assert (type(connack), type(pong)) == (Connack, Pingresp)
        assert len(gateway.world.clients) == 1
    await until(lambda: not len(gateway.world.clients))
    assert gateway.world.closed_for == ["connection_lost"]


async def test_packets_may_be_anywhere_in_frames(gateway: Gateway) -> None:
    """They need not begin or end with a frame [MQTT-6.0.0-2, MQTT5-6.0.0-2]."""
    reader, writer = await raw(gateway)
    writer.write(frame(2, CONNECT[:3], last=False) + frame(9, b"are you there?"))
    for byte in CONNECT[3:]:
        writer.write(frame(0, bytes([byte]), last=False))
    writer.write(frame(0, PING * 200))
    found = await reader.readuntil(b"\x20\x02\0\0")
    assert b"\x8a\x0eare you there?" in found
    await reader.readuntil(b"\xd0\0" * 200)
    writer.write(frame(8, struct.pack("!H", 1000)))
    assert await closed_with(reader) == 1000
    assert not await reader.read()
    writer.close()


@pytest.mark.parametrize("messages", [0, 1, 100])
async def test_what_comes_right_before_the_end_is_worked_off(gateway: Gateway, messages: int) -> None:
    """A client that disconnects sends DISCONNECT and the closing frame together; its will must not be published."""
    reader, writer = await raw(gateway)
    writer.write(frame(2, codec.encode(Connect("phone", will=Will("a", b"lost")))))
    await reader.readuntil(b"\x20\x02\0\0")
    publish = frame(2, codec.encode(Publish("room/42", bytes(100))))
    writer.write(publish * messages + frame(2, codec.encode(Disconnect())) + frame(8, struct.pack("!H", 1000)))
    assert await closed_with(reader) == 1000
    await until(lambda: bool(of(ev.EndWill, gateway.world.events)))
    assert [end.publish for end in of(ev.EndWill, gateway.world.events)] == [False]
    assert sum(len(each.records) for each in of(ev.Publish, gateway.world.events)) == messages
    assert not await reader.read()
    writer.close()


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 1 << 20])
def test_frames_are_those_of_the_library(size: int) -> None:
    payload = bytes(size)
    assert frame_head(size) + payload == WebSocket(ConnectionType.SERVER).send(BytesMessage(data=payload))


async def test_the_gateway_closes_with_1000_and_waits_for_the_client(gateway: Gateway) -> None:
    reader, writer = await raw(gateway)
    writer.write(frame(2, CONNECT + b"\xe0\0"))  # DISCONNECT
    assert await closed_with(reader) == 1000
    writer.write(frame(8, struct.pack("!H", 1000)))
    assert not await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("sent", "code", "reason"),
    [
        (frame(1, CONNECT), 1003, "text frame"),
        (b"".join([frame(9)] * (MAX_IDLE_FRAMES + 1)), 1008, "frames without content"),
        (b"".join([frame(2)] * (MAX_IDLE_FRAMES + 1)), 1008, "frames without content"),
        (frame(3), 1002, "malformed"),
        (frame(0, b"no beginning"), 1002, "malformed"),
        (b"\x82\x01x", 1002, "malformed"),
        (b"\x82\xff" + b"\xff" * 12, 1002, "malformed"),
    ],
    ids=["text", "pings", "empty", "opcode", "continuation", "unmasked", "length"],
)
async def test_a_client_that_breaks_the_rules_is_closed(gateway: Gateway, sent: bytes, code: int, reason: str) -> None:
    """Also one that sends text [MQTT-6.0.0-1, MQTT5-6.0.0-1]."""
    reader, writer = await raw(gateway)
    writer.write(frame(2, CONNECT))
    await reader.readuntil(b"\x20\x02\0\0")
    writer.write(sent)
    assert await closed_with(reader) == code
    assert (dict(gateway.shared.refused), len(gateway.world.clients)) == ({reason: 1}, 0)
    writer.close()


@pytest.mark.parametrize(
    ("path", "names", "origin", "status"),
    [
        ("/other", ("mqtt",), None, 404),
        ("/mqtt", ("amqp",), None, 400),
        ("/mqtt", (), None, 400),
        ("/mqtt", ("mqtt",), "https://evil.example.com", 403),
        ("/mqtt", ("mqtt",), "null", 403),
    ],
)
async def test_a_handshake_is_refused(
    gateway: Gateway, http: aiohttp.ClientSession, path: str, names: tuple[str, ...], origin: str | None, status: int
) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await http.ws_connect(f"http://127.0.0.1:{gateway.port}{path}", protocols=names, origin=origin)
    assert refused.value.status == status
    assert not gateway.made


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /mqtt HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"POST /mqtt HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\r\n\r\n", b"400"),
        (b"GET /mqtt HTTP/1.1\r\nHost: " + b"\xff" * 60 + b"\r\n\r\n", b"400"),
        (b"GET /mqtt HTTP/1.1\r\nX: " + b"x" * MAX_HANDSHAKE_BYTES, b"431"),
        (
            b"GET /mqtt HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 8\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
            b"426",
        ),
    ],
    ids=["no upgrade", "POST", "MQTT", "host", "large", "version"],
)
async def test_a_malformed_handshake_ends_the_connection(gateway: Gateway, request_: bytes, status: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request_)
    answer = await reader.read()
    assert answer[9:12] == status
    assert not gateway.made
    writer.close()


@pytest.mark.parametrize("gateway", [{"max_pending_connections": 1}], indirect=True)
async def test_slow_handshakes_are_pending_connections(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /mqtt HTTP/1.1\r\n")
    await until(lambda: gateway.pending == 1)
    monkeypatch.setattr(websocket, "HANDSHAKE_TIMEOUT_S", 0.05)
    late, writer2 = await asyncio.open_connection("127.0.0.1", gateway.port)
    assert [(await reader.read())[9:12] for reader in (slow, late)] == [b"503", b"408"]
    assert dict(gateway.shared.refused) == {"evicted": 1, "late": 1}
    writer.close()
    writer2.close()


async def test_a_client_that_does_not_read_makes_deliveries_wait(gateway: Gateway) -> None:
    reader, writer = await raw(gateway)
    writer.write(frame(2, CONNECT))
    await reader.readuntil(b"\x20\x02\0\0")
    (inside,) = gateway.made
    payload = bytes(64 << 10)
    number = 0
    while not inside._backlog:
        inside.deliver(payload, 1)
        inside.flush()
        number += 1
        await asyncio.sleep(0)
    writer.write(b"".join(frame(9, b"%d" % at) for at in range(MAX_IDLE_FRAMES)))
    read = 0
    while read < number * len(payload):
        read += len(await reader.read(1 << 20))
    await until(lambda: not inside._backlog)
    writer.close()
