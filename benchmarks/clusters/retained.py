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
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from cluster.mqtt.codec import encode_publish
from tests.support.cluster import LocalCluster
from tests.support.shared_zookeeper import end_shared_server

ARGUMENTS = (
    "--proxies=1", "--gateways=2", "--relays=0", "--brokers=2", "--broker-replicas=1", "--routers=2", "--router-replicas=2",
)  # fmt: skip
CONNECT = b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x00\x00\x03all"
SUBSCRIBE = b"\x82\x06\x00\x01\x00\x01#\x00"
"""To `#`, with QoS 0."""
OUTSTANDING = 1_000
"""Messages that are published together, before their PUBACKs are read."""


class Client:
    """A paho client."""

    def __init__(self, name: str, port: int) -> None:
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
        self.last = bytes(message.payload)
        self.came.set()


def cpu_s(cluster: LocalCluster) -> float:
    """CPU seconds of all server processes so far: the clock shows what else the machine does."""
    pids = {process["pid"] for process in cluster.status()["processes"]}
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return sum(int(each) for pair in ticks for each in pair) / os.sysconf("SC_CLK_TCK")


def publish(port: int, topics: int) -> str:
    """Publish all topics with QoS 1; returns the figures."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(CONNECT)
        client.recv(4096)
        for first in range(0, topics, OUTSTANDING):
            numbers = range(first, min(first + OUTSTANDING, topics))
            client.sendall(
                b"".join(encode_publish(f"t{n % 97}/{n}", b"x" * 20, 1, n - first + 1, retain=True) for n in numbers)
            )  # fmt: skip
            left = 4 * len(numbers)
            while left:
                left -= len(client.recv(left))
    return f"{topics} published in {time.monotonic() - began:.1f} s"


def everything(cluster: LocalCluster, port: int, topics: int) -> str:
    """Subscribe to all, by a socket that only splits packets; returns the figures."""
    found: Counter[bytes] = Counter()
    before = cpu_s(cluster)
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(CONNECT)
        client.recv(4096)
        began = time.monotonic()
        client.sendall(SUBSCRIBE)
        left = b""
        while len(found) < topics:
            left += client.recv(1 << 20)
            at = 0
            while at + 5 < len(left):
                size, begin = left[at + 1], at + 2
                if size >= 128:
                    size, begin = size - 128 + 128 * left[at + 2], at + 3
                if begin + size > len(left):
                    break
                if left[at] >> 4 == 3:
                    found[left[begin + 2 : begin + 2 + (left[begin] << 8 | left[begin + 1])]] += 1
                at = begin + size
            left = left[at:]
        took = time.monotonic() - began
    more = sum(found.values()) - topics
    return f"{topics} retained in {took:.2f} s, {more} twice; {cpu_s(cluster) - before:.2f} s of CPU in all servers"


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
            print(publish(ports[0], arguments.topics), flush=True)
            print(everything(cluster, ports[1], arguments.topics), flush=True)
            cluster.stop()
            cluster.start()
            print("after a restart:", everything(cluster, cluster.mqtt_ports()[0], arguments.topics), flush=True)
            print(race(cluster.mqtt_ports(), arguments.races), flush=True)
        finally:
            cluster.stop()
            end_shared_server()


if __name__ == "__main__":
    main()
