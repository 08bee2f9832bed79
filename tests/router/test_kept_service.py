"""Kept filters through two router replicas and the client of gateways and proxies, over real calls: confirmed means everywhere, at
the brokers too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
import structlog

from cluster.core.contract import SendControl, Settled
from cluster.links.api import PeerState
from cluster.membership import events as ev
from cluster.routers.kept_client import KeptClient
from cluster.wire.v1 import kept_pb2, kept_pb2_grpc
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import Overloaded, Unavailable
from pixiu.ids import ALL_TOPICS, EndpointID, topic_room
from router.core import Core
from router.kept.service import SWEEP_S, TENANT_FULL, KeptService, entry_of
from tests.router.replicas import ServedReplica

BROKER = EndpointID(20)
DAY_MS = 86_400_000
LOG = structlog.get_logger()


class Replica(ServedReplica):
    """A router's kept filters and its core. What the core sends to a broker is settled as the test says."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.folder, number)
        self.world = world
        self.held: list[int] = []
        """Tokens of what was sent to the broker and is not settled."""

    def all(self) -> Sequence[ServedReplica]:
        return self.world.replicas

    def make(self, server: grpc.aio.Server) -> None:
        self.core = Core(
            endpoint=self.endpoint, partition=self.rule[0], heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=60.0
        )  # fmt: skip
        self.step(ev.StoreOpened(None))
        for brokers in (ev.NO_OTHER, ev.OtherRole(1, replicas=(ev.Replica(BROKER, 0),))):
            self.step(ev.ClusterChanged(1, self.rule[1], (), brokers, ()))
        self.service = KeptService(
            max_filters=1_000,
            max_bytes=1 << 22,
            max_sessions=3,
            core=self.core,
            step=self.step,
            lowest=lambda: self.endpoint == 100,
            folder=self.folder,
            peers=self.peers,
            sources=self.running_sources,
            rule=lambda: self.rule,
            log=LOG,
        )
        kept_pb2_grpc.add_KeptServicer_to_server(self.service, server)

    async def caught_up(self) -> None:
        await super().caught_up()
        await self.service.mark_all()

    def step(self, event: ev.Event) -> None:
        for effect in self.core.step(event, time.monotonic()):
            if isinstance(effect, ev.RoomsMarked):
                self.service.marks.marked(effect)
            elif isinstance(effect, ev.MarksLost):
                self.service.marks.lost(effect)
            elif isinstance(effect, SendControl) and effect.peer == BROKER and effect.token:
                self.held.append(effect.token)
                if self.world.broker_answers:
                    self.settle()

    def settle(self) -> None:
        tokens, self.held = self.held, []
        self.step(Settled([(token, True) for token in tokens]))


class World:
    """Two replicas of one partition, and what gateways and proxies see of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.broker_answers, self.partitions = folder, True, 1
        self.replicas = [Replica(self, number) for number in range(2)]
        self.client = KeptClient(self.view, lambda _endpoint: PeerState.ALIVE, timeout_s=5.0)

    def view(self) -> View:
        nodes = tuple(each.node for each in self.replicas if each.node is not None)
        return View(Layout(1, {"router": RoleLayout(self.partitions, self.partitions, 1)}), nodes)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    found = World(tmp_path)
    for each in found.replicas:
        await each.start()
    yield found
    await found.client.close()
    for each in found.replicas:
        if each.node is not None:
            await each.stop()


def entry(name: str, session: int, version: int = 1, *, room: int = 0, removed: bool = False) -> kept_pb2.KeptEntry:
    until_ms = time.time_ns() // 1_000_000 + DAY_MS
    return kept_pb2.KeptEntry(
        room=room or topic_room(name), session=session, filter=name, version=version, until_ms=until_ms, removed=removed
    )  # fmt: skip


def question(topic: str) -> kept_pb2.KeptQuestion:
    return kept_pb2.KeptQuestion(room=topic_room(topic), topic=topic.encode())


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.01)


async def test_a_confirmed_filter_is_everywhere_and_survives_a_restart_of_all(world: World) -> None:
    put = [entry("a/#", 1), entry("a/b", 2), entry("#", 3, room=ALL_TOPICS), entry("a/b", 4)]
    outcomes = await world.client.put(put)
    assert [outcome.error for outcome in outcomes] == [None, None, None, None]
    assert [outcome.version for outcome in await world.client.put([entry("a/b", 4, 3, removed=True), entry("a/b", 2, 1)])] == [3, 1]
    for _ in range(2):
        for each in world.replicas:
            assert len(each.service.table) == 3
            assert each.core.is_marked(topic_room("a/b"))
            assert each.core.is_marked(ALL_TOPICS)
        assert await world.client.match([question("a/b"), question("z"), question("a")]) == [[1, 2, 3], [3], [1, 3]]
        for each in world.replicas:
            await each.stop()
        for each in world.replicas:
            await each.start()
    assert (await world.client.put([entry("a/b", 4, 2)]))[0].version == 3, "what was removed is not revived"


async def test_it_is_confirmed_when_the_brokers_have_the_mark(world: World) -> None:
    world.broker_answers = False
    waiting = asyncio.create_task(world.client.put([entry("a", 1)]))
    await until(lambda: all(each.held and each.service.writes for each in world.replicas))
    assert not waiting.done()
    world.replicas[0].settle()
    await asyncio.sleep(0)
    assert not waiting.done()
    for each in world.replicas:
        each.settle()
    assert (await waiting)[0].error is None
    held = [list(each.held) for each in world.replicas]
    assert (await world.client.put([entry("a", 2)]))[0].error is None
    assert [each.held for each in world.replicas] == held, "the room is marked already"


async def test_a_room_has_its_limit_and_the_others_are_kept(world: World) -> None:
    outcomes = await world.client.put([entry(f"a/{session}", session) for session in range(1, 6)] + [entry("b", 5)])
    assert [outcome.error and type(outcome.error) for outcome in outcomes] == [None, None, None, Overloaded, Overloaded, None]


async def test_a_tenants_places_are_limited_and_survive_a_restart(world: World) -> None:
    def place(session: int, tenant: str = "acme") -> kept_pb2.KeptEntry:
        found = entry(f"$tenant/{tenant}", session, room=topic_room(tenant))
        found.limit = 2
        return found

    outcomes = await world.client.put([place(1), place(2), place(3), place(1, "globex")])
    assert [outcome.error and str(outcome.error) for outcome in outcomes] == [None, None, TENANT_FULL, None]
    assert await world.client.count(["acme", "globex", "none"]) == {"acme": 2, "globex": 1, "none": 0}
    for each in world.replicas:
        assert not each.core.is_marked(topic_room("acme")), "brokers have nothing to do with it"
        await each.stop()
    for each in world.replicas:
        await each.start()
    assert (await world.client.put([place(3)]))[0].error is not None


async def test_a_mark_goes_when_its_room_has_been_empty_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.kept.service.SWEEP_S", 0.0)
    lowest, other = world.replicas
    room = topic_room("a")
    await world.client.put([entry("a", 1), entry("b", 1)])
    await world.client.put([entry("a", 1, 2, removed=True)])
    await lowest.service._tend(True)
    assert lowest.core.is_marked(room), "it may be in use again"
    await lowest.service._tend(False)
    assert lowest.core.is_marked(room), "not every replica was compared with"
    for _ in range(3):
        await other.service._tend(True)
    assert other.core.is_marked(room), "one replica removes"
    for _ in range(2):
        await lowest.service._tend(True)
    assert not lowest.core.is_marked(room)
    assert lowest.core.is_marked(topic_room("b"))
    # The first one that comes again is confirmed only when the room is marked again, wherever it is put.
    world.broker_answers = False
    waiting = asyncio.create_task(world.client.put([entry("a", 1, 3)]))
    await until(lambda: lowest.held)
    assert not waiting.done()
    world.broker_answers = True
    for each in world.replicas:
        each.settle()
    assert (await waiting)[0].error is None
    assert lowest.core.is_marked(room)
    assert SWEEP_S > 10


async def test_a_room_whose_mark_was_removed_elsewhere_is_marked_before_the_next_filter_is_confirmed(world: World) -> None:
    room = topic_room("a")
    await world.client.put([entry("a", 1)])
    for each in world.replicas:
        each.step(ev.MarkRooms(0, (room,), False, 1))
        assert not each.core.is_marked(room)
    assert (await world.client.put([entry("a", 2)]))[0].error is None
    assert all(each.core.is_marked(room) for each in world.replicas)


async def test_a_broker_that_never_answers_makes_a_put_fail_and_the_next_one_begins_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.kept.service.PUT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("router.replicated.service.PUT_TIMEOUT_S", 0.1)
    impatient = KeptClient(world.view, lambda _endpoint: PeerState.ALIVE, timeout_s=0.1)
    world.broker_answers = False
    assert isinstance((await impatient.put([entry("a", 1)]))[0].error, Unavailable)
    await impatient.close()
    world.broker_answers = True
    assert (await world.client.put([entry("a", 1)]))[0].error is None


async def test_the_child_of_a_doubling_has_its_filters_and_marks(world: World) -> None:
    parent, child = world.replicas
    await child.stop()
    topics = [f"t{number}/x" for number in range(20)]
    assert all(outcome.error is None for outcome in await world.client.put([entry(topic, 1) for topic in topics]))
    child.folder, child.rule = world.folder / "child", (1, 2)
    await child.start(NodeState.INIT)
    odd = {topic_room(topic) for topic in topics if topic_room(topic) % 2}
    assert set(child.service.table.rooms) == odd
    assert all(child.core.is_marked(room) for room in odd)
    await world.client.put([entry(topic, 2) for topic in topics])
    parent.rule, world.partitions = (0, 2), 2
    assert await world.client.match([question(topic) for topic in topics]) == [[1, 2]] * 20
    stale = KeptClient(lambda: replace(world.view(), layout=Layout()), lambda _endpoint: PeerState.ALIVE, timeout_s=0.1)
    moved = next(topic for topic in topics if topic_room(topic) % 2)
    with pytest.raises(Unavailable):
        await stale.match([question(moved)])
    await stale.close()


async def test_what_is_too_much_for_one_call_goes_in_several(world: World) -> None:
    long = "x" * 4_000
    entries = [entry(f"a/{number}/{long}", 1) for number in range(200)]
    assert {outcome.error for outcome in await world.client.put(entries)} == {None}
    found = await world.client.match([question(each.filter) for each in entries] + [question("a")])
    assert found == [[1]] * 200 + [[]]
    assert world.client.calls > 6


async def test_a_replica_that_was_out_of_contact_compares_at_once(world: World) -> None:
    one, other = world.replicas
    missed = entry_of(entry("a", 1))
    other.service.table.put(missed, 0)
    running = asyncio.create_task(one.service.run())
    one.service.sync_soon()
    await until(lambda: one.service.table.get(missed.key))
    await until(lambda: one.core.is_marked(topic_room("a")))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_listings_have_one_session_or_all(world: World) -> None:
    await world.client.put([entry("a", 1), entry("b", 1), entry("a", 2)])
    node = world.replicas[1].node
    assert node is not None
    async with grpc.aio.insecure_channel(node.address) as channel:
        stub = kept_pb2_grpc.KeptStub(channel)
        assert [each.filter for each in (await stub.List(kept_pb2.KeptListRequest(session=2))).entries] == ["a"]
        first = await stub.List(kept_pb2.KeptListRequest(limit=2))
        rest = await stub.List(kept_pb2.KeptListRequest(limit=2, after=first.next))
        found = {(each.session, each.filter) for each in (*first.entries, *rest.entries)}
        assert (found, rest.next) == ({(1, "a"), (1, "b"), (2, "a")}, b"")
