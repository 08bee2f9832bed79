"""Wildcards, retained messages and shared subscriptions of stock MQTT clients at two gateways, through kills and a restart."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.support.cluster import WAIT_S, LocalCluster, wait_for

ARGUMENTS = (
    "--proxies=1", "--gateways=2", "--relays=0", "--brokers=2", "--broker-replicas=1", "--routers=2", "--router-replicas=2",
)  # fmt: skip
TOPICS = 300
RACES = 25
JOBS = 60


class Client:
    """A paho client of MQTT 5."""

    def __init__(self, name: str, port: int, *, acknowledges: bool = True, will: str = "") -> None:
        self.messages: list[paho.MQTTMessage] = []
        self._granted: dict[int, Any] = {}
        self._published: set[int] = set()
        connected = threading.Event()
        self.paho = client = paho.Client(
            CallbackAPIVersion.VERSION2, name, protocol=MQTTProtocolVersion.MQTTv5, manual_ack=not acknowledges
        )
        if will:
            client.will_set(will, "gone", 1, True)
        client.on_message = lambda _c, _u, message: self.messages.append(message)
        client.on_connect = lambda *_: connected.set()
        client.on_subscribe = lambda _c, _u, number, codes, _p: self._granted.__setitem__(number, codes)
        client.on_publish = lambda _c, _u, number, code, _p: self._published.add(number)
        client.connect("127.0.0.1", port)
        client.loop_start()
        assert connected.wait(WAIT_S), name

    def subscribe(self, name: str, qos: int = 0, *, retained: bool = True) -> None:
        """Subscribe, with or without what is retained; returns when the cluster has granted it."""
        _, number = self.paho.subscribe(name, options=SubscribeOptions(qos, retainHandling=0 if retained else 2))
        assert number is not None
        granted = wait_for(lambda: self._granted.get(number), f"SUBACK of {name}", pause_s=0.001)
        assert granted is not None
        (code,) = granted
        assert code.value == qos, code

    def publish(self, topic: str, payload: str, *, retain: bool = False) -> None:
        """Publish with QoS 1; returns when it is acknowledged."""
        number = self.paho.publish(topic, payload, 1, retain).mid
        wait_for(lambda: number in self._published, f"PUBACK of {topic}", pause_s=0.001)

    def close(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()

    def texts(self) -> list[str]:
        return [message.payload.decode() for message in self.messages]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    running = LocalCluster(tmp_path / "c", *ARGUMENTS, layout="separate")
    running.folder.mkdir()
    running.start()
    yield running
    assert running.stop() == 0


def check_retained(port: int, name: str, expected: set[str]) -> None:
    """A subscription gets each retained message once."""
    client = Client(name, port)
    client.subscribe("#")
    wait_for(lambda: len(client.messages) >= len(expected), "what is retained")
    found = Counter(message.topic for message in client.messages if message.retain)
    client.close()
    assert found == Counter(expected)


def test_filters_of_stock_clients(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    publisher, watcher = Client("publisher", first), Client("watcher", second)
    watcher.subscribe("races/#", 1, retained=False)
    watcher.subscribe("races/+/value")

    # Retained: whoever subscribes after the PUBACK, anywhere, gets the new value.
    for number in range(RACES):
        publisher.publish("races/7/value", str(number), retain=True)
        late = Client(f"late-{number}", second)
        late.subscribe("races/7/value")
        wait_for(lambda late=late: late.messages, "the retained message")  # type: ignore[misc]
        assert (late.texts()[0], late.messages[0].retain) == (str(number), True)
        late.close()
    wait_for(lambda: len(watcher.messages) == RACES, "one copy of each for filters that overlap")
    assert [(message.payload.decode(), message.qos) for message in watcher.messages] == [(str(n), 1) for n in range(RACES)]
    publisher.publish("races/7/value", "", retain=True)

    # A will that is to be retained.
    dying = Client("dying", second, will="wills/dying")
    dying.paho.loop_stop()
    wire = dying.paho.socket()
    assert wire is not None
    wire.close()
    heir = Client("heir", first)
    heir.subscribe("wills/+")
    wait_for(lambda: heir.texts() == ["gone"], "the will")
    late = Client("late", second)
    late.subscribe("wills/dying")
    wait_for(lambda: late.texts() == ["gone"], "the retained will")
    assert late.messages[0].retain
    for client in (heir, late):
        client.close()
    publisher.publish("wills/dying", "", retain=True)

    # Wildcards over everything, and a restart of the cluster.
    topics = {f"t{number % 7}/{number}" for number in range(TOPICS)}
    for topic in topics:
        publisher.paho.publish(topic, topic, 1, True)
    publisher.publish("t0/last", "x", retain=True)
    topics.add("t0/last")
    check_retained(second, "all", topics)

    # A group: one member gets each, and a member's death gives what it has not acknowledged to others.
    idle, busy = Client("idle", first, acknowledges=False), Client("busy", second)
    for member in (idle, busy):
        member.subscribe("$share/g/jobs/#", 1)
    for number in range(JOBS):
        publisher.publish(f"jobs/{number}", str(number))
    wait_for(lambda: len(idle.messages) + len(busy.messages) >= JOBS, "each job at one member")
    assert sorted(map(int, idle.texts() + busy.texts())) == list(range(JOBS))
    assert idle.messages
    assert busy.messages
    gateway = next(process for process in cluster.processes("gateway") if process["mqtt"].endswith(f":{first}"))
    os.kill(gateway["pid"], signal.SIGKILL)
    idle.paho.loop_stop()
    wait_for(lambda: set(busy.texts()) == {str(number) for number in range(JOBS)}, "the jobs of the dead gateway's member")
    for client in (publisher, watcher, busy):
        client.close()

    cluster.stop()
    cluster.start()
    cluster.wait_healthy()
    check_retained(cluster.mqtt_ports()[0], "again", topics)
