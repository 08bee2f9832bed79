"""The processes of a real cluster seen through their own pages, and clients that count what they get."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pixiu.errors import Unavailable
from tests.support.cluster import LocalCluster
from tests.support.waiting import until
from tools.cli.http import fetch, samples
from tools.load.mqtt import MQTTClient

WAIT_S = 60.0


class Fleet:
    """The processes of a cluster, as they were when this was made."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.target = cluster.target
        self.processes: dict[str, dict[str, Any]] = {}
        """By the name that metrics give a peer."""
        for role in ("gateway", "router", "relay", "broker", "proxy"):
            self.processes |= {f"{role}:{process['address']}": process for process in cluster.processes(role)}

    def of(self, role: str) -> list[dict[str, Any]]:
        """The processes of a role."""
        return [process for process in self.processes.values() if process["role"] == role]

    @property
    def mqtt_ports(self) -> list[int]:
        """Of the gateways."""
        return [int(process["mqtt"].rpartition(":")[2]) for process in self.of("gateway")]

    async def page(self, process: dict[str, Any], path: str) -> bytes:
        """One of a process's HTTP pages."""
        host, _, port = process["http"].removeprefix("http://").rpartition(":")
        return (await fetch(host, int(port), path, WAIT_S))[1]

    async def unequal(self) -> dict[str, str]:
        """Which routers, brokers and relays do not know what the gateways say, and by how many members or devices.

        There are as many partitions of brokers as of routers, or fewer.
        """
        said = await asyncio.gather(*(self.page(process, "/health") for process in self.processes.values()))
        health = {name: json.loads(page)["service"] for name, page in zip(self.processes, said, strict=True)}
        truths: dict[str, dict[int, tuple[int, int]]] = {"members_digests": {}, "devices_digests": {}}
        for name, service in health.items():
            if name.startswith("gateway:"):
                for kind, truth in truths.items():
                    for partition, text in service[kind].items():
                        truth[int(partition)] = added(truth.get(int(partition), (0, 0)), text)
        found = {}
        for name, process in self.processes.items():
            if process["role"] in ("router", "broker", "relay"):
                truth = truths["devices_digests" if process["role"] == "relay" else "members_digests"]
                partitions = 1 + max(other["partition"] for other in self.of(process["role"]))
                wanted = (0, 0)
                for partition, (xor, entries) in truth.items():
                    if partition % partitions == process["partition"]:
                        wanted = (wanted[0] ^ xor, wanted[1] + entries)
                has = added((0, 0), health[name]["members_digest"])
                if has != wanted:
                    found[name] = f"{has[1]} members, {wanted[1]} on the gateways"
        return found

    async def heartbeats(self) -> dict[tuple[str, str], float]:
        """How many each router, broker and relay has sent to each peer."""
        keepers = [name for name, process in self.processes.items() if process["role"] in ("router", "broker", "relay")]
        pages = await asyncio.gather(*(self.page(self.processes[name], "/metrics") for name in keepers))
        return {
            (keeper, labels["peer"]): value
            for keeper, page in zip(keepers, pages, strict=True)
            for name, labels, value in samples(page)
            if name.endswith("_peer_heartbeats_sent_total")
        }

    async def until_equal(self) -> None:
        """Wait until all maps are equal."""
        unequal: dict[str, str] = {}

        async def equal() -> bool:
            nonlocal unequal
            unequal = await self.unequal()
            return not unequal

        await until(equal, lambda: str(unequal), WAIT_S)

    async def links(self) -> dict[tuple[str, str], Counter[str]]:
        """By (sender, receiver): what each side has counted of items."""
        found: dict[tuple[str, str], Counter[str]] = {}
        pages = await asyncio.gather(*(self.page(process, "/metrics") for process in self.processes.values()))
        for own, page in zip(self.processes, pages, strict=True):
            for name, labels, value in samples(page):
                what = name.partition("_peer_")[2]
                if what in ("records_sent_total", "control_sent_total"):
                    found.setdefault((own, labels["peer"]), Counter())["sent"] += int(value)
                elif what in ("records_received_total", "control_received_total"):
                    found.setdefault((labels["peer"], own), Counter())["received"] += int(value)
                elif what == "lost_items":
                    found.setdefault((labels["peer"], own), Counter())["gaps"] += int(value)
        return found


def added(digest: tuple[int, int], text: str) -> tuple[int, int]:
    """The sum of a digest and one in a page."""
    xor, entries = text.split("/")
    return digest[0] ^ int(xor, 16), digest[1] + int(entries)


class Player:
    """An MQTT client that counts what it gets. An MQTT client of a gateway sees what the gateway repeats."""

    def __init__(self, port: int, uin: int, rooms: Sequence[int], *, chat: bool = False) -> None:
        self.uin, self.port, self.rooms, self.chat = uin, port, set(rooms), chat
        self.got: Counter[bytes] = Counter()
        self.client = self._new()

    def _new(self) -> MQTTClient:
        client = MQTTClient("127.0.0.1", self.port, f"lossy-{self.uin}", str(self.uin), keep_alive_s=0)
        client.on_message = lambda _topic, payload: self.got.update((payload,))
        return client

    async def come(self) -> None:
        """Connect, again where the connection is lost before it is answered, as clients do; then subscribe."""
        await until(self._connected, lambda: f"user {self.uin}'s connection", WAIT_S)
        if self.rooms:
            await self.join(*sorted(self.rooms))
        if self.chat:
            await self.client.subscribe([f"user/{self.uin}"])

    async def _connected(self) -> bool:
        try:
            await self.client.connect()
        except Unavailable:
            self.client = self._new()
            return False
        return True

    async def join(self, *rooms: int) -> None:
        self.rooms |= set(rooms)
        await self.client.subscribe([f"room/{room}" for room in rooms])

    async def leave(self, *rooms: int) -> None:
        self.rooms -= set(rooms)
        await self.client.unsubscribe([f"room/{room}" for room in rooms])

    async def move(self, port: int) -> None:
        await self.client.close()
        self.port = port
        self.client = self._new()
        await self.come()

    async def go(self) -> None:
        self.rooms = set()
        await self.client.close()
