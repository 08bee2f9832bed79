"""Big rooms, and a cluster at its edges: who sends too fast, reads too slowly or only connects hurts nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import pixiu
from pixiu.errors import InvalidArgument
from pixiu.mqtt.client_io import MQTTClient, SubscriptionRefused
from tests.support.cluster import LocalCluster, running_cluster

WAIT_S = 60.0
BIG = 1000
SETTINGS = ("cluster.big_rooms=[1000,1010]",)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two of everything that clients meet, with limits that a test can reach."""
    arguments = ["--broker-replicas", "1", "--routers", "1", "--router-replicas", "1"]
    for setting in SETTINGS:
        arguments += ["--set", setting]
    with running_cluster(tmp_path_factory.mktemp("edges"), *arguments) as running:
        yield running


class Member:
    """An MQTT client that keeps what it gets."""

    def __init__(self, port: int, uin: int) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.client = MQTTClient("127.0.0.1", port, f"edges-{uin}-{port}", str(uin))
        self.client.on_message = lambda topic, payload: self.messages.append((topic, payload))


@asynccontextmanager
async def members(ports: list[int], topic: str, uins: range) -> AsyncIterator[list[Member]]:
    """Clients on all gateways, subscribed."""
    found = [Member(ports[number % len(ports)], uin) for number, uin in enumerate(uins)]
    try:
        for start in range(0, len(found), 50):
            part = found[start : start + 50]
            await asyncio.gather(*(member.client.connect() for member in part))
            await asyncio.gather(*(member.client.subscribe([topic]) for member in part))
        yield found
    finally:
        await asyncio.gather(*(member.client.close() for member in found))


async def until(condition: object, what: str) -> None:
    """Wait for a condition."""
    assert callable(condition)
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(what) from None


async def test_a_big_room_reaches_every_member_once_and_in_order(cluster: LocalCluster) -> None:
    """Members in all VRooms, on two gateways, by MQTT and by the SDK; publishers of all kinds."""
    ports = cluster.mqtt_ports()
    async with (
        members(ports, f"room/{BIG}", range(10_000, 10_150)) as found,
        pixiu.connect(cluster.target, uin=77) as px,
        px.subscribe(room=BIG) as subscription,
    ):
        await asyncio.wait_for(found[0].client.publish_with_ack(f"room/{BIG}", b"mqtt, acknowledged"), WAIT_S)
        found[1].client.publish(f"room/{BIG}", b"mqtt")
        for number in range(20):
            await px.room(BIG).send(b"sdk %d" % number)
        await px.flush()
        expected = sorted([b"mqtt, acknowledged", b"mqtt", *(b"sdk %d" % number for number in range(20))])
        await until(lambda: all(len(member.messages) >= 22 for member in found), "not everybody got everything")
        for member in found:
            assert sorted(payload for _, payload in member.messages) == expected
            assert {topic for topic, _ in member.messages} == {f"room/{BIG}"}
            assert [payload for _, payload in member.messages if payload.startswith(b"sdk")] == [b"sdk %d" % n for n in range(20)]
        got: list[tuple[int, bytes]] = []
        async with asyncio.timeout(WAIT_S):
            async for message in subscription:
                assert message.room is not None
                got.append((message.room, message.payload))
                if len(got) == 22:
                    break
        assert sorted(got) == [(BIG, payload) for payload in expected]


async def test_a_vrooms_own_number_is_refused_everywhere(cluster: LocalCluster) -> None:
    vroom = BIG * 64 + 5
    async with pixiu.connect(cluster.target, uin=77) as px:
        receipt = await px.room(vroom).send(b"x")
        with pytest.raises(InvalidArgument, match=f"publish to the big room {BIG}"):
            await asyncio.wait_for(receipt, WAIT_S)
        with pytest.raises(InvalidArgument, match=f"join the big room {BIG}"):
            async with px.subscribe(room=vroom):
                pass
    member = Member(cluster.mqtt_ports()[0], 5)
    await member.client.connect()
    with pytest.raises(SubscriptionRefused):
        await member.client.subscribe([f"room/{vroom}"])
    await member.client.close()
