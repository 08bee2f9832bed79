"""A stock MQTT client, paho, against the server's session: what users of such clients see."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from cluster.mqtt.events import CloseReason, Connected
from cluster.mqtt.packets import SUBACK_FAILURE

if TYPE_CHECKING:
    from tests.cluster.mqtt.conftest import Hub

PATIENCE_S = 30.0


class Stock:
    """A paho client in its own thread, and what it was told."""

    def __init__(self, name: str, protocol: MQTTProtocolVersion = paho.MQTTv311) -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=protocol, reconnect_on_failure=False)
        self.connack: int | None = None
        self.suback: list[int] = []
        self.unsubacks = 0
        self.messages: list[tuple[str, bytes, bool, int]] = []
        self.changed = threading.Condition()
        self.client.on_connect = self._on_connect
        self.client.on_subscribe = self._on_subscribe
        self.client.on_unsubscribe = self._on_unsubscribe
        self.client.on_message = self._on_message

    def _on_connect(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        with self.changed:
            self.connack = reason.value
            self.changed.notify_all()

    def _on_subscribe(self, client: Any, data: Any, packet_id: int, codes: Any, properties: Any) -> None:
        with self.changed:
            self.suback += [code.value for code in codes]
            self.changed.notify_all()

    def _on_unsubscribe(self, client: Any, data: Any, packet_id: int, codes: Any, properties: Any) -> None:
        with self.changed:
            self.unsubacks += 1
            self.changed.notify_all()

    def _on_message(self, client: Any, data: Any, message: paho.MQTTMessage) -> None:
        with self.changed:
            self.messages.append((message.topic, bytes(message.payload), message.retain, message.qos))
            self.changed.notify_all()

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)


def in_full(port: int) -> Stock:
    """Connect, subscribe, publish with QoS 0 and 1, receive, unsubscribe, disconnect."""
    stock = Stock("stock")
    stock.client.username_pw_set("12345", "secret")
    stock.client.connect("127.0.0.1", port, keepalive=30)
    stock.client.loop_start()
    try:
        stock.wait(lambda: stock.connack is not None)
        stock.client.subscribe([("room/5", 1), ("news/#", 0), ("user/012345", 1)])
        stock.wait(lambda: len(stock.suback) == 3)
        stock.client.publish("room/5", b"zero", retain=True)
        confirmed = stock.client.publish("room/5", b"one", qos=1)
        confirmed.wait_for_publish(PATIENCE_S)
        assert confirmed.is_published()
        stock.wait(lambda: len(stock.messages) == 2)
        stock.client.unsubscribe("room/5")
        stock.wait(lambda: stock.unsubacks == 1)
    finally:
        stock.client.disconnect()
        stock.client.loop_stop()
    return stock


def connack_of(stock: Stock, port: int) -> int | None:
    """What the server answers to this client's CONNECT."""
    stock.client.connect("127.0.0.1", port, keepalive=30)
    stock.client.loop_start()
    try:
        stock.wait(lambda: stock.connack is not None)
    finally:
        stock.client.disconnect()
        stock.client.loop_stop()
    return stock.connack


async def test_paho_connects_subscribes_publishes_and_receives(hub: Hub) -> None:
    stock = await asyncio.to_thread(in_full, hub.port)
    assert stock.connack == 0
    assert stock.suback == [0, SUBACK_FAILURE, SUBACK_FAILURE]
    assert stock.messages == [("room/5", b"zero", False, 0), ("room/5", b"one", False, 0)]
    assert hub.connected == [Connected("stock", "12345", True, 30)]
    async with asyncio.timeout(PATIENCE_S):
        while not hub.closed:
            await asyncio.sleep(0.01)
    assert hub.closed == [CloseReason.CLIENT_DISCONNECTED]


async def test_paho_with_a_will_is_told_that_it_is_not_authorised(hub: Hub) -> None:
    stock = Stock("with-a-will")
    stock.client.will_set("gone", b"bye")
    # paho names the reasons of 3.1.1 by the ones of MQTT 5: 0x87 is "Not authorized"
    assert await asyncio.to_thread(connack_of, stock, hub.port) == 0x87
    assert hub.connected == []


async def test_paho_without_a_client_id_is_given_one(hub: Hub) -> None:
    assert await asyncio.to_thread(connack_of, Stock(""), hub.port) == 0
    assert hub.connected[0].client_id


async def test_paho_with_mqtt_3_1_is_told_that_its_protocol_level_is_unacceptable(hub: Hub) -> None:
    stock = Stock("old", paho.MQTTv31)
    # paho names the reasons of 3.1.1 by the ones of MQTT 5: 0x84 is "Unsupported protocol version"
    assert await asyncio.to_thread(connack_of, stock, hub.port) == 0x84
    assert hub.connected == []
