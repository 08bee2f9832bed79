"""Retained messages of a cluster: how long does one `#` take for all of them, and is one ever stale? `python -m
benchmarks.clusters.retained [--topics 100000] [--races 10000]`.

Estimate, written before the first run: a message costs a slice's part of protobuf in router and gateway, 8 µs, a packet, 10 µs,
and 15 µs in the client: 100,000 take 3.5 s where all share a core. A race
is two round trips to routers and three to gateways, 6 ms.

Starts `pixiu up` with two gateways, two router partitions of two replicas and two brokers. Publishes topics and subscribes to `#`
at the other gateway: each must come once, also after the cluster was restarted. Then, for each race, publishes a new value with
RETAIN and QoS 1 at one gateway, and when it is acknowledged subscribes at the other one: the first message must be that value.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.support.cluster import LocalCluster, wait_for

ARGUMENTS = (
    "--proxies=1", "--gateways=2", "--relays=0", "--brokers=2", "--broker-replicas=1", "--routers=2", "--router-replicas=2",
)  # fmt: skip
OUTSTANDING = 10_000
"""Messages that paho has; with more than it has packet identifiers it drops some."""


class Client:
    """A paho client."""

    def __init__(self, name: str, port: int) -> None:
        self.found: Counter[str] = Counter()
        self.last = b""
        self.came, self.acknowledged, self.granted = threading.Event(), threading.Semaphore(0), threading.Event()
        connected = threading.Event()
        self.paho = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=MQTTProtocolVersion.MQTTv5)
        self.paho.max_inflight_messages_set(1_000)
        self.paho.on_connect = lambda *_: connected.set()
        self.paho.on_message = self._on_message
        self.paho.on_publish = lambda *_: self.acknowledged.release()
        self.paho.on_subscribe = lambda *_: self.granted.set()
        self.paho.connect("127.0.0.1", port)
        self.paho.loop_start()
        assert connected.wait(30)

    def close(self) -> None:
        """End it."""
        self.paho.disconnect()
        self.paho.loop_stop()

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self.found[message.topic] += 1
        self.last = message.payload
        self.came.set()


def everything(port: int, topics: int) -> str:
    """Subscribe to all; returns the figures."""
    client = Client("all", port)
    began = time.monotonic()
    client.paho.subscribe("#")
    wait_for(lambda: len(client.found) >= topics, "what is retained", 120, 0.005)
    took = time.monotonic() - began
    more = sum(client.found.values()) - topics
    client.close()
    return f"{topics} retained in {took:.2f} s, {more} twice"


def race(ports: list[int], races: int) -> str:
    """Publish and subscribe at once; returns the figures."""
    publisher, subscriber = Client("publisher", ports[0]), Client("subscriber", ports[1])
    stale, began = 0, time.monotonic()
    for number in range(races):
        topic, value = f"race/{number % 16}", str(number).encode()
        publisher.paho.publish(topic, value, 1, True)
        assert publisher.acknowledged.acquire(timeout=30)
        subscriber.came.clear()
        subscriber.paho.subscribe(topic)
        assert subscriber.came.wait(30)
        stale += subscriber.last != value
        subscriber.paho.unsubscribe(topic)
    took = time.monotonic() - began
    for client in (publisher, subscriber):
        client.close()
    return f"{races} races, {stale} stale, {took / max(races, 1) * 1e3:.1f} ms each"


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=100_000)
    parser.add_argument("--races", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pixiu-retained-") as folder:
        home = Path(folder) / "c"
        home.mkdir()
        cluster = LocalCluster(home, *ARGUMENTS, layout="separate")
        cluster.start()
        try:
            ports = cluster.mqtt_ports()
            publisher, began = Client("publisher", ports[0]), time.monotonic()
            for number in range(arguments.topics + OUTSTANDING):
                if number < arguments.topics:
                    publisher.paho.publish(f"t{number % 97}/{number}", b"x" * 20, 1, True)
                if number >= OUTSTANDING:
                    assert publisher.acknowledged.acquire(timeout=120)
            print(f"{arguments.topics} published in {time.monotonic() - began:.1f} s", flush=True)
            publisher.close()
            print(everything(ports[1], arguments.topics), flush=True)
            cluster.stop()
            cluster.start()
            print("after a restart:", everything(cluster.mqtt_ports()[0], arguments.topics), flush=True)
            print(race(cluster.mqtt_ports(), arguments.races), flush=True)
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
