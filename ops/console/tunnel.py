"""A page's MQTT client: the packets of its WebSocket go to a gateway's MQTT port as they are, and back.

The page needs no other host than the console's, and the gateway checks the client's login as any other one's.

Source: docs/console.md, "Try it".
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import WSMsgType, web

from pixiu.discovery.node import Node
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.rpc.client_tls import client_tls

MAX_PACKET_BYTES: Final = 1 << 20
MAX_TUNNELS: Final = 16
CHUNK: Final = 1 << 16
CONNECT_S: Final = 5.0
PROTOCOL: Final = "mqtt"


class Tunnels:
    """The tunnels of a console."""

    def __init__(self) -> None:
        self._open = 0

    async def carry(self, request: web.Request, gateway: Node) -> web.WebSocketResponse:
        """Carry a client's packets until one side ends. Raises `Unavailable`, `InvalidArgument`."""
        if self._open >= MAX_TUNNELS:
            raise InvalidArgument(f"at most {MAX_TUNNELS} clients may be open in pages at one time")
        if not gateway.mqtt_port:
            raise InvalidArgument("this gateway has no MQTT port")
        self._open += 1
        try:
            return await self._carry(request, gateway)
        finally:
            self._open -= 1

    async def _carry(self, request: web.Request, gateway: Node) -> web.WebSocketResponse:
        tls = client_tls()
        try:
            async with asyncio.timeout(CONNECT_S):
                context = tls.context() if tls is not None else None
                reader, writer = await asyncio.open_connection(gateway.mqtt_host, gateway.mqtt_port, ssl=context)
        except OSError as error:
            raise Unavailable(f"the gateway at {gateway.mqtt_host}:{gateway.mqtt_port} cannot be reached: {error}") from None
        try:
            socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=MAX_PACKET_BYTES, heartbeat=30)
            await socket.prepare(request)
            ways = [asyncio.create_task(way) for way in (_up(socket, writer), _down(socket, reader))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            await socket.close()
            return socket
        finally:
            writer.close()


async def _up(socket: web.WebSocketResponse, writer: asyncio.StreamWriter) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY:
            return
        writer.write(message.data)
        await writer.drain()


async def _down(socket: web.WebSocketResponse, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(CHUNK):
        await socket.send_bytes(data)
