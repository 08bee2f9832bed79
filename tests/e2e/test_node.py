"""A cluster of two nodes beside a real ZooKeeper: what clients and their messages see of them, and what the end of a node costs."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import pixiu
from cluster.trust.pki import issue, make_authority
from ops.drain_command import drain_process
from pixiu.discovery.node import Node
from pixiu.discovery.paths import DEFAULT_ROOT
from tests.support.cluster import status_of
from tests.support.effort import portion
from tests.support.roles import WAIT_S, Roles

pytestmark = pytest.mark.e2e
FRONT = ("gateway", "proxy", "broker-0", "router-0", "relay-0")
STORES = ("xiu-0", "pi-0")
ROOM, USER = 42, 7


class Phone:
    """A stock MQTT client that keeps its session: of a room and of a user's mail."""

    def __init__(self) -> None:
        self.got: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self._subscribed: queue.Queue[list[int]] = queue.Queue()
        self._client: Any = None
        self._seen: set[bytes] = set()

    async def connect(self, gateway: Node) -> None:
        """Connect and subscribe; returns when that is confirmed."""
        self._client = paho.Client(CallbackAPIVersion.VERSION2, "phone", clean_session=False, reconnect_on_failure=False)
        self._client.username_pw_set(str(USER))
        self._client.on_message = self._came
        self._client.on_subscribe = lambda _client, _data, _id, codes, _properties: self._subscribed.put(
            [code.value for code in codes]
        )
        self._client.on_connect = lambda client, *_: client.subscribe([(f"room/{ROOM}", 0), (f"user/{USER}", 1)])
        self._client.connect(gateway.mqtt_host, gateway.mqtt_port)
        self._client.loop_start()
        assert await asyncio.to_thread(self._subscribed.get, timeout=WAIT_S) == [0, 1]

    def _came(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        """Keep what is new: mail that was acknowledged shortly before its relay was killed comes again."""
        payload = bytes(message.payload)
        if payload not in self._seen:
            self._seen.add(payload)
            self.got.put((message.topic, payload))

    def publish(self, payload: bytes) -> paho.MQTTMessageInfo:
        """Publish to the room."""
        found: paho.MQTTMessageInfo = self._client.publish(f"room/{ROOM}", payload, 1)
        return found

    async def take(self) -> tuple[str, bytes]:
        """The next message."""
        return await asyncio.to_thread(self.got.get, timeout=WAIT_S)

    def leave(self) -> None:
        """Disconnect, whatever the other end does."""
        self._client.disconnect()
        self._client.loop_stop()


@asynccontextmanager
async def nodes(roles: Roles, **settings: object) -> AsyncIterator[Node]:
    """Two nodes, all of whose roles run; gives the gateway."""
    await roles.layout(router=1, broker=1, relay=1, xiu=1, pi=1)
    roles.start_node(*FRONT, **settings)
    roles.start_node(*STORES, **settings)
    (gateway, *_) = await roles.running(*FRONT, *STORES)
    yield gateway


def certified(folder: Path) -> Path:
    """Certificates: each role shows its own, and may call what the others may not."""
    make_authority(folder / "ca")
    for name in (*FRONT, *STORES):
        issue(folder / "ca", name.partition("-")[0], folder / "tls")
    return folder / "tls"


async def sent(px: pixiu.Client, payload: bytes) -> None:
    """Send it to the room and, as mail, to the user; both are accepted."""
    await px.room(ROOM).send(b"room " + payload, timeout_s=WAIT_S)
    await px.user(USER).mail(b"mail " + payload, level="persisted", timeout_s=WAIT_S)


def both(payload: bytes) -> list[tuple[str, bytes]]:
    return [(f"room/{ROOM}", b"room " + payload), (f"user/{USER}", b"mail " + payload)]


@pytest.mark.parametrize("certificates", portion([False, True]))
async def test_messages_and_mail_pass_and_the_registry_shows_every_role(roles: Roles, certificates: bool) -> None:
    settings = {"cluster.tls_dir": str(certified(roles.folder))} if certificates else {}
    async with nodes(roles, **settings) as gateway:
        found = await roles.running(*FRONT, *STORES)
        assert len({node.pid for node in found}) == 2
        assert len({node.endpoint for node in found}) == len({node.port for node in found}) == len(found)
        status = await asyncio.to_thread(status_of, roles.target())
        assert status["healthy"], status
        phone = Phone()
        await phone.connect(gateway)
        async with pixiu.connect(roles.target(), client="backend") as px, px.subscribe(rooms=[ROOM]) as messages:
            await sent(px, b"one")
            assert sorted([await phone.take(), await phone.take()]) == both(b"one")
            await asyncio.to_thread(phone.publish(b"of a phone").wait_for_publish, WAIT_S)
            assert await phone.take() == (f"room/{ROOM}", b"of a phone")
            came = [(await anext(messages)).payload for _ in range(2)]
            assert came == [b"room one", b"of a phone"]
        phone.leave()
        for name in (FRONT[0], STORES[0]):
            await roles.end(name)
        ends = [line for line in roles.log("gateway").splitlines() if '"stopped"' in line]
        assert len(ends) == len(FRONT)
        roles.start_node(*FRONT, **settings)
        roles.start_node(*STORES, **settings)
        (gateway, *_) = await roles.running(*FRONT, *STORES)
        await phone.connect(gateway)
        async with pixiu.connect(roles.target(), client="backend") as px:
            await sent(px, b"two")
        assert sorted([await phone.take(), await phone.take()]) == both(b"two"), "what was acknowledged does not come again"
        phone.leave()


async def test_a_node_that_is_killed_comes_back_and_loses_no_mail(roles: Roles) -> None:
    async with nodes(roles) as gateway:
        phone = Phone()
        await phone.connect(gateway)
        async with pixiu.connect(roles.target(), client="backend") as px:
            await sent(px, b"before")
            assert sorted([await phone.take(), await phone.take()]) == both(b"before")
            await roles.kill(FRONT[0])
            phone.leave()
            roles.start_node(*FRONT)
            (gateway, *_) = await roles.running(*FRONT)
            await px.user(USER).mail(b"mail while away", level="persisted", timeout_s=WAIT_S)
            await phone.connect(gateway)
            assert await phone.take() == (f"user/{USER}", b"mail while away")
            await roles.kill(STORES[0])
            roles.start_node(*STORES)
            await roles.running(*STORES)
            await sent(px, b"after")
            assert sorted([await phone.take(), await phone.take()]) == both(b"after")
        phone.leave()


async def test_a_drain_asked_for_one_role_drains_its_node(roles: Roles) -> None:
    async with nodes(roles):
        (pi,) = await roles.running("pi-0")
        await drain_process(roles.zookeeper, DEFAULT_ROOT, [pi], "ann@desk", WAIT_S)
        assert await roles.ended("pi-0") == 0
        assert "drain_asked" in roles.log("xiu-0")
        processes = (await asyncio.to_thread(status_of, roles.target()))["processes"]
        assert sorted(process["role"] for process in processes) == sorted(name.partition("-")[0] for name in FRONT)
