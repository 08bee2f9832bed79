"""MQTT sessions that outlive their connections and their gateways, with stock clients (paho) and real processes.

What is sent with QoS 1 or 2 while a client is away, or between its gateways, arrives once and in the order of each publisher.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

import pixiu
from tests.support.cluster import WAIT_S, LocalCluster, running_cluster, wait_for

ARGUMENTS = [
    "--proxies=1", "--gateways=2", "--relays=1", "--relay-replicas=1", "--brokers=1", "--broker-replicas=1", "--routers=1",
    "--router-replicas=1", "--xius=1", "--pis=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two gateways, and one process of every other role."""
    with running_cluster(tmp_path_factory.mktemp("sessions"), *ARGUMENTS, layout="nodes") as running:
        running.wait_healthy()
        yield running


@dataclass
class Phone:
    """A paho client, over its connections."""

    client_id: str
    version: MQTTProtocolVersion = paho.MQTTv311
    expiry_s: int = 3600
    found: list[tuple[str, bytes, int, bool]] = field(default_factory=list)
    """(topic, payload, QoS, DUP)."""
    present: bool = False
    """Session present of the last CONNACK."""
    code: int = 0
    """Of the last CONNACK."""
    may_be_refused: bool = False
    codes: list[int] = field(default_factory=list)
    """Of the last SUBACK."""

    def __post_init__(self) -> None:
        self.lost = threading.Event()
        self._connected, self._subscribed = threading.Event(), threading.Event()
        # One object for all connections: paho keeps the client's half of the session in it.
        clean = None if self.version == paho.MQTTv5 else False
        self.paho = paho.Client(
            CallbackAPIVersion.VERSION2, self.client_id, clean, protocol=self.version, reconnect_on_failure=False
        )  # fmt: skip
        self.paho.on_message = lambda c, d, message: self.found.append(
            (message.topic, bytes(message.payload), message.qos, bool(message.dup))
        )
        self.paho.on_connect = self._on_connect
        self.paho.on_subscribe = self._on_subscribe
        self.paho.on_disconnect = lambda *_: self.lost.set()
        self.paho.max_inflight_messages_set(200)

    def connect(self, port: int, *, clean: bool = False) -> bool:
        """Connect to a gateway. Returns session present."""
        self.lost.clear()
        self._connected.clear()
        if self.version == paho.MQTTv5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = self.expiry_s
            self.paho.connect("127.0.0.1", port, keepalive=20, clean_start=clean, properties=properties)
        else:
            self.paho.connect("127.0.0.1", port, keepalive=20)
        self.paho.loop_start()
        assert self._connected.wait(WAIT_S), "no CONNACK"
        return self.present

    def subscribe(self, *filters: tuple[str, int]) -> list[int]:
        """Subscribe; returns the codes of the SUBACK."""
        self._subscribed.clear()
        self.paho.subscribe(list(filters))
        assert self._subscribed.wait(WAIT_S), "no SUBACK"
        return self.codes

    def disconnect(self) -> None:
        """Go in good order."""
        self.paho.disconnect()
        self.stopped()

    def stopped(self) -> None:
        """Wait until the connection is over."""
        assert self.lost.wait(WAIT_S)
        self.paho.loop_stop()

    def wait(self, topic: str, count: int) -> None:
        """Wait until as many messages of a topic came, repeats not counted."""
        wait_for(lambda: len(set(self.payloads(topic))) >= count, f"{count} messages of {topic}")

    def payloads(self, topic: str = "") -> list[bytes]:
        """Those that came, of one topic or of all."""
        return [payload for where, payload, _, _ in self.found if not topic or where == topic]

    def _on_connect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        assert self.may_be_refused or not code.is_failure, code
        self.code = code.value
        self.present = flags.session_present
        self._connected.set()

    def _on_subscribe(self, client: Any, data: Any, packet_id: int, codes: Any, properties: Any) -> None:
        self.codes = [code.value for code in codes]
        self._subscribed.set()


def publish(phone: Phone, topic: str, numbers: range, qos: int) -> None:
    """Publish numbers, confirmed."""
    sent = [phone.paho.publish(topic, b"%d" % number, qos) for number in numbers]
    for each in sent:
        each.wait_for_publish(WAIT_S)
        assert each.is_published()


def numbers(*ranges: range) -> list[bytes]:
    """Payloads of numbers."""
    return [b"%d" % number for each in ranges for number in each]


async def test_what_came_while_a_client_was_away_arrives_at_another_gateway(cluster: LocalCluster) -> None:
    ports = cluster.mqtt_ports()
    old, new, sender = Phone("away-3"), Phone("away-5", paho.MQTTv5), Phone("away-sender", paho.MQTTv5, expiry_s=0)

    def run() -> None:
        sender.connect(ports[0], clean=True)
        for phone in (old, new):
            assert not phone.connect(ports[0], clean=phone is new)
            assert phone.subscribe(("away/a", 1), ("away/+/deep", 2), ("room/77", 1), ("#", 0)) == [1, 2, 1, 0]
        publish(sender, "away/a", range(5), 1)
        for phone in (old, new):
            phone.wait("away/a", 5)
            phone.disconnect()
        publish(sender, "away/a", range(5, 100), 1)
        publish(sender, "away/x/deep", range(20), 2)
        publish(sender, "away/b", range(3), 1)  # no filter of QoS 1

    await asyncio.to_thread(run)
    async with pixiu.connect(cluster.target, client="sdk") as px:
        for number in range(10):
            await px.room(77).send(b"%d" % number)

    def back() -> None:
        for phone in (old, new):
            assert phone.connect(ports[1]), "session present"
            phone.wait("away/a", 100)
            phone.wait("room/77", 10)
            phone.wait("away/x/deep", 20)
        publish(sender, "away/a", range(100, 110), 1)
        for phone in (old, new):
            phone.wait("away/a", 110)
            phone.disconnect()
        sender.disconnect()

    await asyncio.to_thread(back)
    for phone in (old, new):
        assert phone.payloads("away/x/deep") == numbers(range(20))
        assert phone.payloads("room/77") == numbers(range(10))
        assert phone.payloads("away/a") == numbers(range(110))
        assert not [qos for topic, _, qos, _ in phone.found if topic == "away/b" and qos]


async def test_qos_2_goes_exactly_once_both_ways_through_a_gateways_death(cluster: LocalCluster) -> None:
    ports = cluster.mqtt_ports()
    victim = next(p for p in cluster.processes("gateway") if int(p["mqtt"].rpartition(":")[2]) == ports[1])
    receiver, sender = Phone("twice-receiver", paho.MQTTv5), Phone("twice-sender")
    count = 400

    def run() -> None:
        receiver.connect(ports[1])
        receiver.subscribe(("twice/#", 2))
        sender.connect(ports[1])
        sent = [sender.paho.publish(f"twice/{1 + number % 2}", b"%d" % number, 1 + number % 2) for number in range(count)]
        wait_for(lambda: len(receiver.found) >= 40, "messages that flow")
        os.kill(int(victim["pid"]), signal.SIGKILL)
        receiver.stopped()
        sender.stopped()
        assert receiver.connect(ports[0]), "session present"
        assert sender.connect(ports[0]), "session present"
        for each in sent:
            each.wait_for_publish(WAIT_S)
        receiver.wait("twice/1", count // 2)
        receiver.wait("twice/2", count // 2)
        publish(sender, "twice/over", range(1), 2)
        receiver.wait("twice/over", 1)  # after all others
        receiver.disconnect()
        sender.disconnect()

    await asyncio.to_thread(run)
    once = receiver.payloads("twice/2")
    assert sorted(once, key=int) == numbers(range(1, count, 2)), "each of QoS 2 once"
    assert set(receiver.payloads("twice/1")) == set(numbers(range(0, count, 2)))
    await asyncio.to_thread(cluster.wait_healthy)


async def test_a_session_is_taken_over_ended_and_discarded(cluster: LocalCluster) -> None:
    ports = cluster.mqtt_ports()
    sender = Phone("end-sender", paho.MQTTv5, expiry_s=0)

    def run() -> None:
        sender.connect(ports[0], clean=True)
        first, second = Phone("end-phone", paho.MQTTv5), Phone("end-phone", paho.MQTTv5)
        first.connect(ports[0])
        first.subscribe(("end/a", 1))
        assert second.connect(ports[1]), "the session of the other gateway's connection"
        first.stopped()
        publish(sender, "end/a", range(10), 1)
        second.wait("end/a", 10)
        assert second.payloads() == numbers(range(10))
        second.disconnect()
        publish(sender, "end/a", range(10, 12), 1)
        # A clean start discards it, whether the new connection keeps a session or not.
        third = Phone("end-phone", paho.MQTTv5)
        assert not third.connect(ports[0], clean=True)
        third.subscribe(("end/b", 1))
        publish(sender, "end/a", range(1), 1)
        publish(sender, "end/b", range(2), 1)
        third.wait("end/b", 2)
        assert third.payloads("end/b") == third.payloads() == numbers(range(2))

        def is_ended() -> bool:
            """The client may be at the next gateway before the last one has removed the session: it ends that again."""
            ending = Properties(PacketTypes.DISCONNECT)  # type: ignore[no-untyped-call]
            ending.SessionExpiryInterval = 0
            third.paho.disconnect(properties=ending)
            third.stopped()
            return not third.connect(ports[1])

        wait_for(is_ended, "the end by a session expiry of 0")
        third.disconnect()
        short = Phone("end-short", paho.MQTTv5, expiry_s=1)
        short.connect(ports[0])
        short.disconnect()

        def is_over() -> bool:
            present = short.connect(ports[0])
            if present:
                short.disconnect()
            return not present

        wait_for(is_over, "the end of the session's expiry", pause_s=1.5)
        short.disconnect()
        sender.disconnect()

    await asyncio.to_thread(run)
