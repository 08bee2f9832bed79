"""Retained messages through two router replicas and gateways' clients of them, over real calls: confirmed means everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import structlog

from cluster.links.api import PeerState
from cluster.wire.v1 import retained_pb2_grpc
from gateway import events as ev
from gateway.retained.client import Listed, RetainedClient
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.errors import Overloaded, PixiuError
from pixiu.ids import snowflake, topic_room
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.record import Flag, Kind, encode, with_topic
from router.retained.service import RetainedService
from tests.router.replicas import ServedReplica

LOG = structlog.get_logger()


class Replica(ServedReplica):
    """A router's retained messages."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.folder, number)
        self.world = world

    def all(self) -> Sequence[ServedReplica]:
        return self.world.replicas

    def make(self, server: grpc.aio.Server) -> None:
        self.service = RetainedService(
            max_messages=self.world.max_messages,
            max_bytes=1 << 20,
            folder=self.folder,
            peers=self.peers,
            sources=self.running_sources,
            rule=lambda: self.rule,
            log=LOG,
        )
        retained_pb2_grpc.add_RetainedServicer_to_server(self.service, server)


class World:
    """Two replicas of one partition, and what gateways see of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.max_messages = folder, 1_000
        self.replicas = [Replica(self, number) for number in range(2)]
        self.clients: list[RetainedClient] = []
        self.events: list[ev.Event] = []

    def client(self, **takes: Any) -> RetainedClient:
        client = RetainedClient(
            view=lambda: View(nodes=tuple(each.node for each in self.replicas if each.node is not None)),
            state=lambda _endpoint: PeerState.ALIVE,
            topics=TopicRooms(),
            step=self.events.append,
            takes_more=takes.get("takes_more", lambda _connection: True),
            log=LOG,
        )
        self.clients.append(client)
        return client


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    found = World(tmp_path)
    for each in found.replicas:
        await each.start()
    yield found
    for client in found.clients:
        await client.close()
    for each in found.replicas:
        if each.node is not None:
            await each.stop()


def message(topic: str, payload: bytes, number: int, worker: int = 1) -> bytes:
    identity = snowflake(1_700_000_000_000 + number, worker, 0)
    return encode(Kind.ROOM, topic_room(topic), with_topic(topic, payload), identity, flags=Flag.TO_ROOM | Flag.TOPIC)


async def retain(client: RetainedClient, topic: str, payload: bytes, number: int, worker: int = 1) -> PixiuError | None:
    done: asyncio.Future[PixiuError | None] = asyncio.get_running_loop().create_future()
    client.retain(message(topic, payload, number, worker), topic, done.set_result)
    async with asyncio.timeout(30):
        return await done


def shown(found: tuple[list[Listed], str]) -> dict[str, bytes]:
    listed, end = found
    assert not end
    return {each.topic: each.record[each.record.index(each.topic.encode()) + len(each.topic) :] for each in listed}


async def test_a_confirmed_message_is_at_every_replica_and_survives_a_restart_of_all(world: World) -> None:
    client = world.client()
    assert await retain(client, "a/b", b"one", 1) is None
    assert await retain(client, "a/c", b"two", 2) is None
    assert await retain(client, "a/b", b"", 3) is None
    for each in world.replicas:
        assert (len(each.service.map), each.service.map.removed) == (1, 1)
    for each in world.replicas:
        await each.stop()
    for each in world.replicas:
        await each.start()
        assert (len(each.service.map), each.service.map.removed) == (1, 1)
    assert shown(await world.client().listing("#", 10)) == {"a/c": b"two"}


async def test_a_replica_takes_what_it_missed_before_it_is_running(world: World) -> None:
    client, late = world.client(), world.replicas[1]
    await late.stop()
    assert [await retain(client, f"t/{number}", b"x", number) for number in range(20)] == [None] * 20
    await late.start(NodeState.INIT)
    assert late.service.map.digests() == world.replicas[0].service.map.digests()
    assert late.service.synced == 20


async def test_a_publisher_waits_for_a_replica_that_is_there_and_does_not_answer(world: World) -> None:
    client, hung = world.client(), world.replicas[1]
    if client._routers.replica(0) == hung.node:  # the one that gateways ask is the one that answers here
        hung = world.replicas[0]
    await hung.stop(forget=False)
    waiting = asyncio.create_task(retain(client, "a", b"x", 1))
    there = next(each for each in world.replicas if each.node is not hung.node)
    async with asyncio.timeout(30):
        while not there.service.writes:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    hung.node = None  # heartbeats find it dead
    assert await waiting is None


async def test_a_message_behind_another_gateways_clock_still_takes_its_place(world: World) -> None:
    ahead, behind = world.client(), world.client()
    assert await retain(ahead, "a", b"first", 1_000_000, worker=1) is None
    assert await retain(behind, "a", b"second", 5, worker=2) is None
    assert shown(await ahead.listing("a", 1)) == {"a": b"second"}
    assert await retain(behind, "a", b"third", 6, worker=2) is None
    assert shown(await ahead.listing("a", 1)) == {"a": b"third"}
    assert await retain(behind, "a", b"second", 5, worker=2) is None, "a repeat of its own older message"
    assert shown(await ahead.listing("a", 1)) == {"a": b"third"}


async def test_what_has_no_space_is_refused(world: World) -> None:
    for each in world.replicas:
        each.service.map._max_entries = 1
    client = world.client()
    assert await retain(client, "a", b"x", 1) is None
    assert isinstance(await retain(client, "b", b"x", 2), Overloaded)


async def test_a_fetch_comes_in_slices_while_the_client_takes_them(world: World) -> None:
    client = world.client()
    results = [retain(client, f"t/{number:04}", bytes(2_000), number) for number in range(300)]
    assert await asyncio.gather(*results) == [None] * 300
    takes = [False, False, True]
    slow = world.client(takes_more=lambda _connection: takes.pop(0) if takes else True)
    slow.fetch(ev.FetchRetained(7, 3, ["t/#", "t/0005"]))
    async with asyncio.timeout(30):
        while not world.events or not isinstance(world.events[-1], ev.RetainedFetched):
            await asyncio.sleep(0.01)
    assert not takes
    found = [each for each in world.events if isinstance(each, ev.RetainedFound)]
    assert len(found) > 2
    assert sum(len(each.records) for each in found) == 300
    assert {(each.connection, each.fetch) for each in found} == {(7, 3)}


async def test_subscriptions_to_topics_are_fetched_together(world: World) -> None:
    client = world.client()
    assert await asyncio.gather(*(retain(client, f"t/{number}", b"x", number) for number in range(4))) == [None] * 4
    for connection in range(1, 9):
        client.fetch(ev.FetchRetained(connection, connection, [f"t/{connection % 4}", "nothing"]))
    async with asyncio.timeout(30):
        while sum(isinstance(each, ev.RetainedFetched) for each in world.events) < 8:
            await asyncio.sleep(0.01)
    found = {each.connection: each.records for each in world.events if isinstance(each, ev.RetainedFound)}
    assert {connection: records[0][-1:] for connection, records in found.items()} == dict.fromkeys(range(1, 9), b"x")


async def test_the_child_of_a_doubling_takes_its_half_and_gets_what_comes_meanwhile(world: World) -> None:
    parent, child = world.replicas
    await child.stop()
    client = world.client()
    topics = [f"t{number}/x" for number in range(40)]
    assert await asyncio.gather(*(retain(client, topic, b"x", number) for number, topic in enumerate(topics))) == [None] * 40
    child.folder, child.rule = world.folder / "child", (1, 2)
    await child.start(NodeState.INIT)
    odd = [topic for topic in topics if topic_room(topic) % 2]
    assert sorted(child.service.map._topics) == sorted(topic.encode() for topic in odd)
    assert await asyncio.gather(*(retain(client, topic, b"y", number + 100) for number, topic in enumerate(topics))) == [None] * 40
    assert len(parent.service.map) == 40
    assert shown(await client.listing("#", 100)) == dict.fromkeys(topics, b"y"), "the parent serves until the layout changes"
    found = child.service.map.listing([b"#"], b"", 0, 0).entries
    assert [each.record[-1:] for each in found] == [b"y"] * len(odd)


async def test_a_listing_is_taken_piece_by_piece(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client()
    topics = [f"many/{number:02}" for number in range(20)]
    for number, topic in enumerate(topics, 1):
        assert await retain(client, topic, bytes(100), number) is None
    for limit, most_bytes in ((3, 1 << 20), (20, 300), (100, 1)):
        monkeypatch.setattr("gateway.retained.client.MAX_LISTED_BYTES", most_bytes)
        found: list[str] = []
        after = ""
        while True:
            listed, after = await client.listing("many/#", limit, after)
            found += [each.topic for each in listed]
            if not after:
                break
            assert 0 < len(listed) <= limit
            assert found[-1] <= after
        assert found == topics
