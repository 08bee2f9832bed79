"""A stock MQTT client, paho, against the server's session: what users of such clients see."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.subscribeoptions import SubscribeOptions

from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import SUBACK_FAILURE
from cluster.mqtt.reason_codes import ReasonCode

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


def in_full(port: int, protocol: MQTTProtocolVersion) -> Stock:
    """Connect, subscribe, publish with QoS 0, 1 and 2, receive, unsubscribe, disconnect."""
    stock = Stock("stock", protocol)
    stock.client.username_pw_set("12345", "secret")
    stock.client.connect("127.0.0.1", port, keepalive=30)
    stock.client.loop_start()
    try:
        stock.wait(lambda: stock.connack is not None)
        wanted = [("room/5", 2), ("news/#", 0), ("user/012345", 1)]
        stock.client.subscribe([(name, SubscribeOptions(qos)) for name, qos in wanted] if protocol == paho.MQTTv5 else wanted)
        stock.wait(lambda: len(stock.suback) == 3)
        stock.client.publish("room/5", b"zero", retain=True)
        for qos, payload in ((1, b"one"), (2, b"two")):
            confirmed = stock.client.publish("room/5", payload, qos=qos)
            confirmed.wait_for_publish(PATIENCE_S)
            assert confirmed.is_published()
        stock.wait(lambda: len(stock.messages) == 3)
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


@pytest.mark.parametrize("protocol", [paho.MQTTv31, paho.MQTTv311, paho.MQTTv5])
async def test_paho_connects_subscribes_publishes_and_receives(hub: Hub, protocol: MQTTProtocolVersion) -> None:
    stock = await asyncio.to_thread(in_full, hub.port, protocol)
    assert stock.connack == 0
    refused = ReasonCode.TOPIC_FILTER_INVALID if protocol == paho.MQTTv5 else SUBACK_FAILURE
    assert stock.suback == [2, 0, refused]
    assert stock.messages == [("room/5", payload, False, qos) for qos, payload in enumerate((b"zero", b"one", b"two"))]
    assert [connected.connect.user_name for connected in hub.connected] == ["12345"]
    async with asyncio.timeout(PATIENCE_S):
        while not hub.closed:
            await asyncio.sleep(0.01)
    assert hub.closed == [CloseReason.CLIENT_DISCONNECTED]


async def test_paho_without_a_client_id_is_given_one(hub: Hub) -> None:
    assert await asyncio.to_thread(connack_of, Stock(""), hub.port) == 0
    assert hub.connected[0].client_id
