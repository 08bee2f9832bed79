"""kill -9 of a gateway: its users are gone from every router, broker and relay replica, and nobody else notices."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
import urllib.request
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.cluster import LocalCluster, wait_for

ROOMS = range(3000, 3040)
"""So that every partition and replica has some."""
MEMBERS = re.compile(r'^pixiu_\w+_members_by_instance\{[^}]*instance="(\d+)"\} (\d+)', re.MULTILINE)


def members(process: dict[str, Any]) -> dict[int, int]:
    """Gateway instance → its members that a router or broker knows, or devices that a relay does."""
    with urllib.request.urlopen(f"{process['http']}/metrics", timeout=30) as reply:
        return {int(instance): int(count) for instance, count in MEMBERS.findall(reply.read().decode())}


class Client:
    """In every room, on one gateway."""

    def __init__(self, gateway: dict[str, Any], name: str) -> None:
        self.messages: queue.Queue[bytes] = queue.Queue()
        subscribed: queue.Queue[bool] = queue.Queue()
        self.mqtt = paho.Client(CallbackAPIVersion.VERSION2, client_id=name)
        self.mqtt.on_message = lambda _c, _u, message: self.messages.put(bytes(message.payload))
        self.mqtt.on_subscribe = lambda *_: subscribed.put(True)
        host, _, port = gateway["mqtt"].rpartition(":")
        self.mqtt.connect(host, int(port))
        self.mqtt.loop_start()
        self.mqtt.subscribe([(f"room/{room}", 0) for room in ROOMS])
        assert subscribed.get(timeout=60)

    def close(self) -> None:
        """Leave."""
        self.mqtt.disconnect()
        self.mqtt.loop_stop()


def test_a_killed_gateways_users_are_gone_everywhere_and_others_do_not_notice(cluster: LocalCluster) -> None:
    victim, other = cluster.processes("gateway")
    everybody = [process for role in ("router", "broker", "relay") for process in cluster.processes(role)]
    clients = [Client(gateway, name) for gateway, name in ((victim, "gone"), (other, "stays"))]
    try:
        known = [members(process) for process in everybody]
        for role in ("router", "broker"):
            counts = [found for process, found in zip(everybody, known, strict=True) if process["role"] == role]
            assert sum(found.get(victim["instance"], 0) for found in counts) == 2 * len(ROOMS), "two replicas of each partition"
        devices = [found for process, found in zip(everybody, known, strict=True) if process["role"] == "relay"]
        assert sum(found.get(victim["instance"], 0) for found in devices) == 2, "one device, two replicas of its partition"
        os.kill(victim["pid"], signal.SIGKILL)
        start = time.monotonic()
        sent: list[bytes] = []

        def gone() -> bool:
            for room in ROOMS:
                sent.append(b"%d" % len(sent))
                clients[1].mqtt.publish(f"room/{room}", sent[-1], qos=1)
            return all(victim["instance"] not in members(process) for process in everybody)

        wait_for(gone, "the end of its members everywhere")
        print(f"\nits users are gone everywhere after {time.monotonic() - start:.1f} s")
        assert [members(process).get(other["instance"]) for process in everybody] == [k.get(other["instance"]) for k in known]
        got = [clients[1].messages.get(timeout=60) for _ in sent]
        assert sorted(got) == sorted(sent)
        assert clients[1].messages.empty()
    finally:
        for client in clients:
            client.close()
    cluster.wait_healthy()
