"""Driver of paho for Python. Arguments and output: `tests.clients.script`."""

from __future__ import annotations

import asyncio
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.clients.script import WAIT_S, Message, Where, main


class PahoClient:
    """paho's network thread, with its callbacks in the event loop."""

    def __init__(self, where: Where, name: str) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self._where, self._loop = where, asyncio.get_running_loop()
        self._waits: dict[object, asyncio.Future[list[int]]] = {}
        self._name, self._present = name, False
        self._client = self._new(clean=True)

    def _new(self, *, clean: bool) -> paho.Client:
        where = self._where
        five = where.version == "5"
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._name,
            clean_session=None if five else clean,
            protocol=MQTTProtocolVersion.MQTTv5 if five else MQTTProtocolVersion.MQTTv311,
            transport="websockets" if where.transport == "ws" else "tcp",
            reconnect_on_failure=False,
        )
        if where.transport == "ws":
            client.ws_set_options(path="/mqtt")
        if where.transport == "tls":
            client.tls_set(where.ca)
        client.on_connect = self._connected
        client.on_subscribe = lambda _c, _u, number, codes, _p: self._done(number, [code.value for code in codes])
        client.on_message = self._message
        return client

    def _connected(self, _client: paho.Client, _data: Any, flags: paho.ConnectFlags, code: Any, _properties: Any) -> None:
        self._present = flags.session_present
        self._done("connect", [code.value])

    def _message(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        got = Message(message.topic, bytes(message.payload), message.qos, bool(message.retain))
        self._loop.call_soon_threadsafe(self.messages.put_nowait, got)

    def _done(self, what: object, codes: list[int]) -> None:
        self._loop.call_soon_threadsafe(lambda: self._wait(what).set_result(codes))

    def _wait(self, what: object) -> asyncio.Future[list[int]]:
        return self._waits.setdefault(what, self._loop.create_future())

    async def _codes(self, what: object) -> list[int]:
        async with asyncio.timeout(WAIT_S):
            codes = await self._wait(what)
        del self._waits[what]
        if any(code >= 0x80 for code in codes):
            raise ConnectionRefusedError(f"{what}: {codes}")
        return codes

    async def connect(self, will: Message | None = None, keep: bool = False) -> bool:
        session: Any = {}
        if keep:
            self._client = self._new(clean=False)
            if self._where.version == "5":
                expiry: Any = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
                expiry.SessionExpiryInterval = 3600
                session = {"clean_start": False, "properties": expiry}
        if will is not None:
            self._client.will_set(will.topic, will.payload, will.qos, will.retain)
        await asyncio.to_thread(self._client.connect, self._where.host, self._where.port, 30, **session)
        self._client.loop_start()
        await self._codes("connect")
        return self._present

    async def subscribe(self, topic: str, qos: int) -> None:
        _, number = self._client.subscribe(topic, qos)
        await self._codes(number)

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        info = self._client.publish(topic, payload, qos, retain)
        await asyncio.to_thread(info.wait_for_publish, WAIT_S)
        if not info.is_published():
            raise TimeoutError(f"no acknowledgement of QoS {qos}")

    async def cut(self) -> None:
        self._client.loop_stop()
        sock = self._client.socket()
        assert sock is not None
        sock.close()

    async def disconnect(self) -> None:
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)


if __name__ == "__main__":
    main(PahoClient)
