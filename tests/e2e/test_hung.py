"""Processes that stand still or are killed in the default cluster: what `pixiu top` shows, and that nobody else is hurt.

A process that hangs is there, its socket takes datagrams, and heartbeats find that nobody handles them. Others go on without it;
then it comes back with ten seconds of old datagrams in its socket, and must do no harm. What was measured is printed
(`pytest -s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import pixiu
from tests.support.cluster import LocalCluster, wait_for
from tests.support.effort import portion
from tests.support.fleet import WAIT_S, Fleet, Player
from tests.support.waiting import until
from tools.cli.http import samples

HOT, COLD = 4711, 4712
ROOMS = range(2000, 2040)
"""So that every partition and replica has some."""
MEMBERS = re.compile(r'^pixiu_\w+_members_by_instance\{[^}]*instance="(\d+)"\} (\d+)', re.MULTILINE)
STOPPED_S = 10.0
APART_S = 0.01
ROUND_S = 3.0
"""Time for a round to arrive, on a loaded machine too. What the process that stands still would have carried never does."""


def top(cluster: LocalCluster, *arguments: str) -> dict[str, Any]:
    result = cluster.pixiu("top", "--once", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def read_into(lines: queue.Queue[str], output: Iterable[str]) -> None:
    for line in output:
        lines.put(line)


async def test_what_flows_and_what_is_hot_is_shown_by_role_and_partition(cluster: LocalCluster) -> None:
    async with pixiu.connect(cluster.target, connect_timeout_s=WAIT_S) as px, px.subscribe(rooms=[HOT, COLD]) as subscription:
        watching = cluster.start_pixiu("top", "--json", "--interval", "1")
        try:
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=read_into, args=(lines, watching.stdout), daemon=True).start()
            rooms: set[int] = set()
            delivered = 0.0
            latency: dict[str, float | None] = {}
            while not (HOT in rooms and delivered and latency.get("broker") and latency.get("proxy")):
                for number in range(100):
                    await px.room(HOT if number % 10 else COLD).send(b"%d" % number)
                    await anext(subscription)
                while not lines.empty():
                    said = json.loads(lines.get())
                    rooms |= {hot["room"] for hot in said["hot_rooms"][:1]}
                    by_role = {row["role"]: row for row in said["roles"]}
                    delivered = max(delivered, by_role["gateway"]["out_per_s"])
                    latency |= {role: row["p99_s"] for role, row in by_role.items() if row["p99_s"] is not None}
        finally:
            watching.send_signal(signal.SIGINT)
            watching.wait(WAIT_S)
    assert watching.returncode == 0
    places = {(row["role"], row["partition"]): row["alive"] for row in said["roles"]}
    assert places == {
        ("proxy", -1): 2, ("gateway", -1): 2, ("router", 0): 2, ("router", 1): 2, ("broker", 0): 2, ("broker", 1): 2
    } | {key: alive for key, alive in places.items() if key[0] == "relay"}  # fmt: skip
    assert (said["dead"], said["problems"]) == ([], [])


def test_a_process_that_stands_still_is_shown_as_dead(cluster: LocalCluster) -> None:
    victim = cluster.processes("broker")[0]
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        said = top(cluster, "--interval", "0.2")
        shown = cluster.pixiu("top", "--once", "--interval", "0.2")
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    assert [text for text in said["dead"] if victim["address"] in text]
    [row] = [row for row in said["roles"] if (row["role"], row["partition"]) == ("broker", victim["partition"])]
    assert (row["alive"], row["dead"]) == (1, 1)
    # On a machine that is busy its session may be over by then.
    assert f"at {victim['address']} does not answer" in shown.stdout or "1 of 2 Running" in shown.stdout
    cluster.wait_healthy()


def test_without_a_registry_it_says_what_to_do(cluster: LocalCluster) -> None:
    assert "no cluster" in cluster.pixiu("top", "--once", "--target", "zk://127.0.0.1:1/pubsub").stderr
    wrong = cluster.pixiu("top", "--once", "--target", "127.0.0.1:7000")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "give zk://" in wrong.stderr


def members(process: dict[str, Any]) -> dict[int, int]:
    """Gateway instance → its members that a router or broker knows, or devices that a relay does."""
    with urllib.request.urlopen(f"{process['http']}/metrics", timeout=30) as reply:
        return {int(instance): int(count) for instance, count in MEMBERS.findall(reply.read().decode())}


class Everywhere:
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
    clients = [Everywhere(gateway, name) for gateway, name in ((victim, "gone"), (other, "stays"))]
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


class Traffic:
    """One publisher who goes on sending to every room in turn, and who knows what everybody has had."""

    def __init__(self, publisher: Player, listeners: list[Player], *, chat: bool) -> None:
        self._publisher, self.listeners = publisher, listeners
        self._chat = chat
        """Send to every listener as well."""
        self.sent = 0

    async def go_on(self) -> None:
        """Send until cancelled."""
        while True:
            topics = [f"room/{room}" for room in ROOMS]
            for topic in topics + [f"user/{one.uin}" for one in self.listeners if self._chat]:
                self.say(topic)
                await asyncio.sleep(APART_S)

    def say(self, topic: str) -> bytes:
        """One message."""
        self.sent += 1
        payload = b"%d to %s" % (self.sent, topic.encode())
        self._publisher.client.publish_with_ack(topic, payload)
        return payload

    def round_of(self) -> dict[Player, Counter[bytes]]:
        """One message to every room, and to every listener where those are sent to; returns what each listener is to get."""
        rooms = Counter(self.say(f"room/{room}") for room in ROOMS)
        own = {one: [self.say(f"user/{one.uin}")] if self._chat else [] for one in self.listeners}
        return {one: rooms + Counter(payloads) for one, payloads in own.items()}

    async def reaches_everybody(self) -> None:
        """Send to everybody until a whole round has arrived."""

        async def one_round() -> bool:
            wanted = self.round_of()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    while not all(some <= listener.got for listener, some in wanted.items()):
                        await asyncio.sleep(0.01)
                    return True
            return False

        async with asyncio.timeout(WAIT_S):
            while not await one_round():
                pass


@contextlib.asynccontextmanager
async def stopped(process: dict[str, Any]) -> AsyncIterator[None]:
    """A process that does nothing inside the block, which takes ten seconds at least."""
    os.kill(process["pid"], signal.SIGSTOP)
    end = time.monotonic() + STOPPED_S
    try:
        yield
        await asyncio.sleep(max(end - time.monotonic(), 0.0))
    finally:
        os.kill(process["pid"], signal.SIGCONT)


async def who_hears(fleet: Fleet, name: str) -> dict[str, bool]:
    """The processes that heartbeat this one, and whether it answers."""
    others = [own for own in fleet.processes if own != name]
    pages = await asyncio.gather(*(fleet.page(fleet.processes[own], "/metrics") for own in others))
    found: dict[str, bool] = {}
    for own, page in zip(others, pages, strict=True):
        values = {sample.partition("_peer_")[2]: value for sample, labels, value in samples(page) if labels.get("peer") == name}
        if values.get("heartbeats_sent_total"):
            found[own] = bool(values["up"])
    return found


@pytest.mark.parametrize("role", portion(["broker", "relay"]))
async def test_a_hung_process_is_found_and_comes_back_clean(cluster: LocalCluster, role: str) -> None:
    await asyncio.to_thread(cluster.wait_healthy)
    fleet = await asyncio.to_thread(Fleet, cluster)
    name, victim = next((name, process) for name, process in fleet.processes.items() if process["role"] == role)
    ports = fleet.mqtt_ports
    # Of users so many that every relay has some.
    listeners = [
        Player(port, 500_000 + number, ROOMS, chat=role == "relay")
        for number, port in enumerate(ports * (6 if role == "relay" else 1))
    ]
    moving = [Player(ports[number % len(ports)], 510_000 + number, ROOMS) for number in range(20)]
    publisher, late = Player(ports[0], 520_000, []), Player(ports[-1], 530_000, ROOMS, chat=role == "relay")
    everybody = [*listeners, *moving, publisher, late]
    sending: asyncio.Task[None] | None = None
    heard: dict[str, bool] = {}

    async def heard_by(*, nobody: bool) -> bool:
        heard.clear()
        heard.update(await who_hears(fleet, name))
        return not any(heard.values()) if nobody else all(heard.values())

    try:
        await publisher.client.connect()
        await asyncio.gather(*(player.come() for player in (*listeners, *moving)))
        await fleet.until_equal()
        assert all((await who_hears(fleet, name)).values())
        traffic = Traffic(publisher, [*listeners], chat=role == "relay")
        sending = asyncio.create_task(traffic.go_on())
        async with stopped(victim):
            start = time.monotonic()
            await until(lambda: heard_by(nobody=True), lambda: f"silence for all others: {heard}", WAIT_S)
            found_s = time.monotonic() - start
            await traffic.reaches_everybody()
            goes_on_s = time.monotonic() - start
            # Some leave, some move, one comes: its subscription must be confirmed by those who are left.
            await asyncio.gather(*(player.leave(*ROOMS[::2]) for player in moving[::2]), *(player.go() for player in moving[1::2]))
            async with asyncio.timeout(WAIT_S):
                await late.come()
            traffic.listeners.append(late)
            await traffic.reaches_everybody()
        back = time.monotonic()
        await asyncio.to_thread(cluster.wait_healthy)
        await until(lambda: heard_by(nobody=False), lambda: f"an answer to all others: {heard}", WAIT_S)
        await fleet.until_equal()
        clean_s = time.monotonic() - back
        print(f"\n{role}: dead for all of {len(heard)} others after {found_s:.1f} s, all rooms go on after {goes_on_s:.1f} s")
        print(f"{role}: clean {clean_s:.1f} s after its return")
        assert [process["pid"] for process in cluster.processes(role) if process["address"] == victim["address"]] == [victim["pid"]]
        sending.cancel()
        for wanted in [traffic.round_of() for _ in range(5)]:
            await until(
                lambda wanted=wanted: all(some <= one.got for one, some in wanted.items()),  # type: ignore[misc]
                lambda: "something was lost after it came back",
            )
        assert {count for player in everybody for count in player.got.values()} == {1}, "something came twice"
    finally:
        if sending is not None:
            sending.cancel()
        await asyncio.gather(*(player.client.close() for player in everybody))
