"""kill -9 of a gateway: its users are gone from every router, broker and relay replica, and nobody else notices. Users who
move between gateways are reached wherever they are."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
import urllib.request
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import pixiu
from tests.support.cluster import LocalCluster, wait_for
from tests.support.fleet import Fleet, Player
from tests.support.waiting import until

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


async def reached(player: Player, wanted: list[bytes]) -> None:
    """Wait until a user has had these, and nothing else or twice."""
    await until(lambda: set(wanted) <= set(player.got), lambda: f"{len(player.got)} of {len(wanted)} came to port {player.port}")
    assert player.got == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize("overlap", [False, True], ids=["leaves_then_comes", "comes_then_leaves"])
async def test_a_user_who_moves_is_reached_at_once_on_either_gateway(cluster: LocalCluster, overlap: bool) -> None:
    """From a higher instance number to a lower one and back: whose messages are compared by their IDs alone would lose one move.

    Each message is sent once, right after the subscription was confirmed.
    """
    fleet = Fleet(cluster)
    high, low = sorted(fleet.of("gateway"), key=lambda process: -int(process["instance"]))[:2]
    assert high["instance"] > low["instance"]
    uin = 600_000 + overlap
    user: Player | None = None
    async with pixiu.connect(cluster.target) as px:
        for process in (high, low, high, low, high):
            before = user
            user = Player(int(process["mqtt"].rpartition(":")[2]), uin, ROOMS, chat=True)
            if before is not None and not overlap:
                await before.client.close()
            await user.come()
            if before is not None and overlap:
                await before.client.close()
            wanted = [b"%d on %d" % (room, process["instance"]) for room in ROOMS]
            for room, payload in zip(ROOMS, wanted, strict=True):
                await px.room(room).send(payload)
            wanted.append(b"chat on %d" % process["instance"])
            await px.user(uin).chat(wanted[-1])
            await reached(user, wanted)
        assert user is not None
        await user.client.close()
    await fleet.until_equal()
