"""Driver of aiomqtt. Arguments and output: `tests.clients.script`."""

from __future__ import annotations

import asyncio
from typing import Any

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.clients.script import Message, Where, main


class AioClient:
    """aiomqtt, with a task that reads its messages."""

    def __init__(self, where: Where, name: str) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self._where, self._name = where, name
        self._client: aiomqtt.Client | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, will: Message | None = None, keep: bool = False) -> bool:
        where = self._where
        session: Any = {}
        if keep and where.version == "5":
            expiry: Any = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            expiry.SessionExpiryInterval = 3600
            session = {"clean_start": False, "properties": expiry}
        elif keep:
            session = {"clean_session": False}
        self._client = aiomqtt.Client(
            where.host,
            where.port,
            identifier=self._name,
            protocol=aiomqtt.ProtocolVersion.V5 if where.version == "5" else aiomqtt.ProtocolVersion.V311,
            transport="websockets" if where.transport == "ws" else "tcp",
            websocket_path="/mqtt" if where.transport == "ws" else None,
            tls_params=aiomqtt.TLSParameters(ca_certs=where.ca) if where.transport == "tls" else None,
            will=aiomqtt.Will(will.topic, will.payload, will.qos, will.retain) if will is not None else None,
            **session,
        )
        await self._client.__aenter__()
        self._reading = asyncio.create_task(self._read(self._client))
        return True

    async def _read(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            assert isinstance(message.payload, bytes)
            self.messages.put_nowait(Message(str(message.topic), message.payload, message.qos, message.retain))

    async def subscribe(self, topic: str, qos: int) -> None:
        assert self._client is not None
        codes = await self._client.subscribe(topic, qos)
        if any((code if isinstance(code, int) else code.value) >= 0x80 for code in codes):
            raise ConnectionRefusedError(f"SUBACK {codes}")

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        assert self._client is not None
        await self._client.publish(topic, payload, qos, retain)

    async def cut(self) -> None:
        assert self._client is not None
        assert self._reading is not None
        self._reading.cancel()
        sock = self._client._client.socket()
        assert sock is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)  # another client may get the same descriptor
        loop.remove_writer(sock)
        sock.close()

    async def disconnect(self) -> None:
        assert self._client is not None
        assert self._reading is not None
        self._reading.cancel()
        await self._client.__aexit__(None, None, None)


if __name__ == "__main__":
    main(AioClient)
