"""Mail to stock MQTT clients that come and go: paho and mosquitto_sub, QoS 1, clean session off.

Each gets what was sent while it was away, in order; nothing comes again without being marked as a repeat (DUP), and at most a
window is marked for each connection that breaks.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import pixiu
from pixiu.ids import hex_id
from pixiu.placement.partition import rendezvous
from tests.support.cluster import WAIT_S, LocalCluster, running_cluster, wait_for

WINDOW = 64
ARGUMENTS = [
    "--proxies=1", "--gateways=2", "--relays=1", "--relay-replicas=2", "--brokers=1", "--broker-replicas=1", "--routers=1",
    "--router-replicas=1", "--xius=1", "--pis=1",
]  # fmt: skip
PACED = ("proxy", "broker", "gateway")
RECEIVED = re.compile(r"received PUBLISH \(d(\d), q1, r0, m\d+, 'user/\d+'")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two gateways, two relays that share the users, one Xiu, one Pi: their loops are paced."""
    folder = tmp_path_factory.mktemp("mail-mqtt")
    settings = [*(f"{role}.pace_ms=3" for role in PACED)]
    with running_cluster(
        folder, *ARGUMENTS, *(word for setting in settings for word in ("--set", setting)), layout="nodes"
    ) as running:
        running.wait_healthy()
        yield running


@dataclass
class Arrivals:
    """What came: (number in the body, DUP)."""

    found: list[tuple[int, bool]] = field(default_factory=list)

    def first(self) -> list[int]:
        """Numbers in the order in which they first came."""
        return list(dict.fromkeys(number for number, _ in self.found))

    def check(self, sent: int, breaks: int) -> None:
        """Everything came, in order, and what came again is marked.

        Without a break nothing is. With one, what was on its way when the connection broke is: at most a window, of which the
        client had seen a part, and never learns of the rest that a copy went before.
        """
        assert self.first() == list(range(sent))
        seen: set[int] = set()
        for number, dup in self.found:
            assert dup or number not in seen, f"mail {number} came again unmarked"
            seen.add(number)
        assert sum(dup for _, dup in self.found) <= WINDOW * breaks


class Phone(Arrivals):
    """A paho client of one user, over its connections."""

    def __init__(self, uin: int) -> None:
        super().__init__()
        self.uin = uin
        self.lost = threading.Event()
        self._subscribed = threading.Event()
        self._client: paho.Client | None = None

    def connect(self, port: int) -> None:
        """Connect to a gateway and subscribe; returns when the subscription is confirmed."""
        client = paho.Client(CallbackAPIVersion.VERSION2, f"phone-{self.uin}", clean_session=False, reconnect_on_failure=False)
        client.username_pw_set(str(self.uin))
        client.on_message = self._on_message
        client.on_connect = lambda c, *_: c.subscribe(f"user/{self.uin}", 1)
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = lambda *_: self.lost.set()
        self.lost.clear()
        self._subscribed.clear()
        client.connect("127.0.0.1", port, keepalive=20)
        client.loop_start()
        self._client = client
        assert self._subscribed.wait(WAIT_S), "no SUBACK"

    def disconnect(self) -> None:
        """Go in good order."""
        assert self._client is not None
        self._client.disconnect()
        self._client.loop_stop()

    def _on_message(self, client: Any, data: Any, message: paho.MQTTMessage) -> None:
        assert message.qos == 1
        self.found.append((int(message.payload), message.dup))

    def _on_subscribe(self, client: Any, data: Any, packet_id: int, codes: Any, properties: Any) -> None:
        if [code.value for code in codes] == [1]:
            self._subscribed.set()


async def send(cluster: LocalCluster, uin: int, first: int, count: int, pause_s: float = 0.0) -> None:
    """Mail with numbers, confirmed."""
    async with pixiu.connect(cluster.target, client="sender") as px, px.mail_writer() as writer:
        for number in range(first, first + count):
            await writer.space()
            writer.send(uin, b"%d" % number)
            if pause_s:
                await asyncio.sleep(pause_s)
        await writer.wait_finished()
        assert writer.counters.failed == 0


def _user_of_another_node(cluster: LocalCluster, process: Mapping[str, Any]) -> int:
    """A user whose relay outlives a process: a relay that takes a user over cannot know what the one before it has sent."""
    with_it = {each["endpoint"] for each in cluster.together(process)}
    relays = [each["endpoint"] for each in cluster.processes("relay")]
    assert len(relays) > 1
    return next(uin for uin in range(4200, 4300) if hex_id(rendezvous(uin, [int(one, 16) for one in relays])) not in with_it)


async def test_paho_gets_everything_that_was_sent_while_it_was_away_across_a_gateways_death(cluster: LocalCluster) -> None:
    ports = cluster.mqtt_ports()
    victim = next(p for p in cluster.processes("gateway") if int(p["mqtt"].rpartition(":")[2]) == ports[1])
    uin = _user_of_another_node(cluster, victim)
    phone = Phone(uin)
    await asyncio.to_thread(phone.connect, ports[0])
    await send(cluster, uin, 0, 20)
    await asyncio.to_thread(wait_for, lambda: len(phone.first()) == 20, "mail to who is there")
    phone.disconnect()
    await send(cluster, uin, 20, 300)
    await asyncio.to_thread(phone.connect, ports[1])
    await asyncio.to_thread(wait_for, lambda: len(phone.first()) == 320, "mail of the time away")
    phone.check(320, breaks=1)  # it may have gone before it acknowledged the last one

    sending = asyncio.create_task(send(cluster, uin, 320, 400, pause_s=0.002))
    await asyncio.to_thread(wait_for, lambda: len(phone.first()) >= 420, "mail that flows")
    os.kill(int(victim["pid"]), signal.SIGKILL)
    assert await asyncio.to_thread(phone.lost.wait, WAIT_S)
    await asyncio.to_thread(phone.connect, ports[0])
    await sending
    await asyncio.to_thread(wait_for, lambda: len(phone.first()) == 720, "all mail")
    phone.disconnect()
    phone.check(720, breaks=2)
    await asyncio.to_thread(cluster.wait_healthy)


@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="mosquitto-clients are not installed")
async def test_mosquitto_sub_gets_everything_that_was_sent_while_it_was_away(cluster: LocalCluster) -> None:
    uin, arrivals, sent = 4300, Arrivals(), 0
    ports = cluster.mqtt_ports()

    def listen(port: int, count: int) -> None:
        command = ["mosquitto_sub", "-d", "-p", str(port), "-i", "tablet", "-u", str(uin), "-c", "-q", "1", "-t", f"user/{uin}"]
        command += ["-F", "body %p", "-C", str(count), "-W", str(int(WAIT_S))]
        shown = subprocess.run(["stdbuf", "-oL", *command], capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        dup = False
        for line in shown.stdout.splitlines():
            found = RECEIVED.search(line)
            if found:
                dup = found[1] == "1"
            elif line.startswith("body "):
                arrivals.found.append((int(line[5:]), dup))

    async def register() -> None:
        """The first time it has to be there when mail comes: a device that was never there is owed nothing."""
        listening = asyncio.create_task(asyncio.to_thread(listen, ports[0], 1))
        while not listening.done():
            nonlocal sent
            await send(cluster, uin, sent, 1)
            sent += 1
            await asyncio.sleep(0.2)
        await listening

    await register()
    breaks = 1
    for port in ports:
        await send(cluster, uin, sent, 150)
        sent += 150
        while (missing := sent - 1 - max(arrivals.first())) > 0:
            await asyncio.to_thread(listen, port, missing)
            breaks += 1  # it goes before it has acknowledged the last one
    begin = arrivals.found[0][0]
    arrivals.found = [(number - begin, dup) for number, dup in arrivals.found]
    arrivals.check(sent - begin, breaks)
