"""Messages for kept sessions in a real cluster: asked for, stored, listed in the sessions' inboxes, then delivered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import grpc.aio
import pytest

import pixiu
from cluster.wire.v1 import kept_pb2, kept_pb2_grpc
from pixiu.ids import topic_room
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.waiting import until
from tools.cli.inbox import read_inbox

pytestmark = pytest.mark.e2e
ARGUMENTS = [
    "--proxies=1", "--gateways=1", "--relays=1", "--relay-replicas=1", "--brokers=1", "--broker-replicas=2", "--routers=1",
    "--router-replicas=1", "--xius=1", "--xiu-replicas=1", "--pis=1", "--pi-replicas=1",
]  # fmt: skip
FOR_EVER_MS = 1 << 50


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two brokers of one partition, and one process of every other role."""
    with running_cluster(tmp_path_factory.mktemp("kept"), *ARGUMENTS, layout="separate") as running:
        running.wait_healthy()
        yield running


async def put(cluster: LocalCluster, name: str, *sessions: int) -> None:
    """Put filters for a topic, as gateways do."""
    (router,) = cluster.processes("router")
    room = int(name.removeprefix("room/")) if name.startswith("room/") else topic_room(name)
    entries = [kept_pb2.KeptEntry(room=room, session=each, filter=name, version=1, until_ms=FOR_EVER_MS) for each in sessions]
    async with grpc.aio.insecure_channel(router["address"]) as channel:
        stub = kept_pb2_grpc.KeptStub(channel)
        for begin in range(0, len(entries), 1000):
            answer = await stub.Put(kept_pb2.KeptPuts(entries=entries[begin : begin + 1000]), timeout=30)
            assert {outcome.error_code for outcome in answer.outcomes} == {""}


async def payloads(cluster: LocalCluster, session: int) -> list[tuple[str | None, bytes]]:
    """Topic and payload of what a session's inbox lists."""
    (page,) = await read_inbox(cluster.target, session, (1,), 0, 1000, peek=True)
    messages = [entry.message for entry in page.entries]
    return [(each.topic, each.payload) for each in messages if each is not None]


async def test_what_is_accepted_is_in_the_inbox_of_each_session_once_and_in_order(cluster: LocalCluster) -> None:
    async with pixiu.connect(cluster.target) as px, px.subscribe(topics=["plant/heat"]) as live:
        await px.topic("plant/heat").send(b"before")
        await put(cluster, "plant/heat", 501, 502)
        await put(cluster, "room/77", 502)
        for number in range(50):
            await asyncio.gather(px.topic("plant/heat").send(b"%d" % number), px.room(77).send(b"r%d" % number))
        heat = [("plant/heat", b"%d" % number) for number in range(50)]
        assert await payloads(cluster, 501) == heat
        both = await payloads(cluster, 502)
        assert [each for each in both if each[0] == "plant/heat"] == heat
        assert [each for each in both if each[0] == "room/77"] == [("room/77", b"r%d" % number) for number in range(50)]
        async with asyncio.timeout(60):
            seen = [(await anext(live)).payload for _ in range(51)]
        assert seen == [b"before", *(b"%d" % number for number in range(50))], "those who are there get each once, too"


async def test_a_thousand_sessions_of_a_topic_all_have_it(cluster: LocalCluster) -> None:
    sessions = range(10_000, 11_000)
    await put(cluster, "wide/a", *sessions)
    async with pixiu.connect(cluster.target) as px:
        await px.topic("wide/a").send(b"all")
        for session in (sessions[0], sessions[500], sessions[-1]):
            assert await payloads(cluster, session) == [("wide/a", b"all")]


async def test_a_broker_and_a_store_that_die_lose_nothing_that_was_accepted(cluster: LocalCluster) -> None:
    name = "faults/a"
    await put(cluster, name, 901)
    accepted: list[bytes] = []
    async with pixiu.connect(cluster.target) as px:
        for number in range(120):
            if number == 40:
                os.kill(cluster.processes("broker")[0]["pid"], signal.SIGKILL)
            if number == 80:
                os.kill(cluster.processes("pi")[0]["pid"], signal.SIGKILL)
            try:
                await px.topic(name).send(b"%d" % number)
            except pixiu.PixiuError:
                continue
            accepted.append(b"%d" % number)

        async def stored() -> bool:
            return await _has(cluster, 901, accepted)

        await until(stored, "the inbox is read again")
        found = [payload for _, payload in await payloads(cluster, 901)]
        assert len(found) == len(set(found))
        assert [each for each in found if each in set(accepted)] == accepted
        assert len(accepted) > 60


async def _has(cluster: LocalCluster, session: int, wanted: list[bytes]) -> bool:
    try:
        return {payload for _, payload in await payloads(cluster, session)} >= set(wanted)
    except pixiu.PixiuError:
        return False
