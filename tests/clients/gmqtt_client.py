"""Driver of gmqtt. It has no WebSocket. Arguments and output: `tests.clients.script`."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import gmqtt

from tests.clients.script import WAIT_S, Message, Where, main


class GmqttClient:
    """gmqtt, whose callbacks come in the event loop."""

    def __init__(self, where: Where, name: str) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self._where, self._name = where, name
        self._subscribed: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self._client: Any = None

    async def connect(self, will: Message | None = None, keep: bool = False) -> bool:
        where = self._where
        flags: list[int] = []
        expiry = {"session_expiry_interval": 3600} if keep and where.version == "5" else {}
        leaves = None
        if will is not None:
            leaves = gmqtt.Message(will.topic, will.payload, qos=will.qos, retain=will.retain)
        self._client = client = gmqtt.Client(self._name, clean_session=not keep, will_message=leaves, **expiry)
        client.on_connect = lambda _c, said, _r, _p: flags.append(said)
        client.set_config({"reconnect_retries": 0})
        client.on_message = self._message
        client.on_subscribe = lambda _c, _m, codes, _p: self._subscribed.put_nowait(tuple(codes))
        context = ssl.create_default_context(cafile=where.ca) if where.transport == "tls" else False
        version = gmqtt.constants.MQTTv50 if where.version == "5" else gmqtt.constants.MQTTv311
        await client.connect(where.host, where.port, ssl=context, version=version)
        return bool(flags and flags[0] & 1)

    def _message(self, _client: Any, topic: str, payload: bytes, qos: int, properties: dict[str, Any]) -> int:
        self.messages.put_nowait(Message(topic, bytes(payload), qos, bool(properties.get("retain"))))
        return 0

    async def subscribe(self, topic: str, qos: int) -> None:
        self._client.subscribe(topic, qos)
        async with asyncio.timeout(WAIT_S):
            codes = await self._subscribed.get()
        if any(code >= 0x80 for code in codes):
            raise ConnectionRefusedError(f"SUBACK {codes}")

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        self._client.publish(topic, payload, qos=qos, retain=retain)
        await asyncio.sleep(0.05)

    async def cut(self) -> None:
        self._client._connection._transport.abort()

    async def disconnect(self) -> None:
        await self._client.disconnect()


if __name__ == "__main__":
    main(GmqttClient)
