"""Sessions of tenants' clients that outlive their connections, at a gateway, over the production state of Pi."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.mqtt import codec
from cluster.mqtt.outbound import Delivery as Outbound
from cluster.mqtt.packets import MQTT_3_1_1, MQTT_5, Connack, Connect, Dialect, Disconnect, Publish, Suback, Subscribe
from cluster.mqtt.properties import Property
from cluster.mqtt.properties_in_records import origin_of
from cluster.mqtt.reason_codes import ReasonCode
from cluster.trust.audit import Audit
from cluster.wire.v1 import kept_pb2
from gateway import events as ev
from gateway.mqtt.connection import MQTTConnection
from gateway.mqtt.keeping import Keeping
from gateway.sessions.queue import SessionState
from gateway.sessions.service import Sessions
from gateway.sessions.states import NoteName, SessionNote
from pixiu.errors import Overloaded, PixiuError
from pixiu.ids import session_uin, snowflake
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.envelope import Delivery
from pixiu.wire.inbox_operations import CLEAR, Clears, Note
from pixiu.wire.record import Flag, Kind, encode, with_topic
from router.kept.service import entry_of
from router.kept.table import KeptTable
from router.replicated.service import now_ms
from router.replicated.table import Stored
from tests.gateway.test_tenants import TENANTS, sent
from tests.gateway.world import Wire, World, of, runs_of
from tests.pi.memory import Replica
from tests.support.logins import Logins
from tests.support.waiting import until


class Kept(NamedTuple):
    error: PixiuError | None = None


class Cluster:
    """A gateway with tenants, Pi, and the routers' entries."""

    def __init__(self, world: World, logins: Logins, guard: LoginGuard) -> None:
        self.world, self.logins, self.guard = world, logins, guard
        self.pi = Replica()
        self.entries: list[kept_pb2.KeptEntry] = []
        self.table = KeptTable(1_000, 1 << 24, 100)
        self.now = 1000.0
        self.sessions = self.gateway()
        self.open: list[MQTTConnection] = []

    def gateway(self) -> Sessions:
        """The sessions of one gateway more."""
        return Sessions(
            self, self, serves=lambda: True, max_expiry_s=lambda: 3600, topics=TopicRooms(""), vrooms=VRooms(),
            now=lambda: self.now, log=log.get_logger(),
        )  # fmt: skip

    async def put(self, entries: Sequence[kept_pb2.KeptEntry]) -> list[Kept]:
        self.entries += entries
        stored = [self.table.put(entry_of(entry), now_ms()) for entry in entries]
        return [Kept(Overloaded("it is full") if each is Stored.FULL else None) for each in stored]

    async def read(self, uin: int) -> SessionState:
        notes, generation = self.pi.state.notes.of(uin)
        held = {note.name: (note.generation, note.value) for note in notes}
        return SessionState(held, generation, (), 0, 0, 0 in held)

    async def write(self, uin: int, name: int, generation: int, value: bytes) -> None:
        self.pi.apply(Note(uin, name, generation, value))

    async def clear(self, uin: int, generation: int) -> None:
        self.pi.apply(Clears(CLEAR.pack(uin, generation)))

    def on_view(self) -> None: ...

    async def close(self) -> None: ...

    def samples(self) -> dict[str, object]:
        return {}

    async def stored(self, number: int) -> SessionNote:
        return SessionNote.decode((await self.read(number)).notes[NoteName.SESSION][1])

    async def connect(
        self, tenant: str, *filters: str, uin: int = 7, clean: bool = False, expiry_s: int = 600, dialect: Dialect = MQTT_5
    ) -> tuple[MQTTConnection, Wire]:
        """A client phone with a session, that subscribes with QoS 1."""
        connection, wire = MQTTConnection(self.world.clients, self.sessions), Wire()
        connection.connection_made(wire)
        token = self.logins.token("alice", uin, tenant=tenant).encode()
        terms: dict[int, object] | None = {Property.SESSION_EXPIRY: expiry_s} if dialect is MQTT_5 else None
        first = Connect("phone", clean, 0, password=token, user_name="alice", properties=terms, dialect=dialect)
        connection.data_received(codec.encode(first, dialect))
        self.open.append(connection)
        await until(lambda: bool(wire.writes))
        if filters:
            connection.data_received(codec.encode(Subscribe(1, tuple((name, 1) for name in filters)), MQTT_5))
            join = of(ev.Join, self.world.events)[-1]
            connection.answer(ev.Answer(connection.id, join.request, True))
            await until(lambda: sent(wire, Suback))
        return connection, wire


@pytest.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    logins = Logins(tmp_path)
    logins.write_rules(TENANTS.format(limits=getattr(request, "param", "")))
    world = World(roles=("gateway", "proxy", "router", "broker", "relay", "xiu", "pi"))
    world.clients.guard = guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    found = Cluster(world, logins, guard)
    yield found
    for connection in found.open:
        connection.connection_lost(None)
    await found.sessions.close()
    await guard.close()


def subscriptions(cluster: Cluster) -> int:
    """What acme is charged."""
    return next(used.subscriptions for used in cluster.guard.tenants if used.name == "acme")


def mail(number: int, place: int, topic: str) -> Delivery:
    """A message of QoS 1 in a session's inbox."""
    origin = origin_of(1, retain=False)
    record = encode(Kind.MAIL, 1, with_topic(topic, b"x"), place, flags=Flag.TOPIC, origin=origin)
    return Delivery(place, place, number, 1, 1, 1, 0, record)


def live(number: int, sent_ms: int) -> Outbound:
    """A message of QoS 1 that a broker passed on without the flag KEPT."""
    record = encode(Kind.ROOM, 1, with_topic("acme/a", b"%d" % number), snowflake(sent_ms, 1, number), flags=Flag.TOPIC)
    return Outbound(record, b"acme/a", 1, False, early=True)


async def test_what_came_live_before_its_filter_was_kept_is_left_to_the_inbox(cluster: Cluster) -> None:
    """It came twice: a broker passed it on before it knew the mark, and its proxy stored it after another broker had the mark."""
    long_ago = time.time_ns() // 1_000_000 - 1000
    connection, wire = await cluster.connect("acme", "a")
    connection.deliver_each([live(1, long_ago), live(2, long_ago + 3_600_000), live(3, long_ago)._replace(early=False)])
    connection.data_received(codec.encode(Subscribe(2, (("b", 1),)), MQTT_5))
    connection.deliver_each([live(4, long_ago + 3_600_000)])
    connection.flush()
    assert [packet.payload for packet in sent(wire, Publish)] == [b"2", b"3"]


async def test_an_inbox_is_the_tenants_own_and_says_its_names(cluster: Cluster) -> None:
    inboxes: set[int] = set()
    for tenant, uin in (("acme", 1000007), ("globex", 2000007)):
        connection, wire = await cluster.connect(tenant, "#")
        number = session_uin(uin, "phone")
        assert [each.filter for each in (await cluster.stored(number)).filters] == [f"{tenant}/#"]
        assert {entry.filter for entry in cluster.entries if entry.session == number} == {f"{tenant}/#", f"$tenant/{tenant}"}
        assert of(ev.Opened, cluster.world.events)[-1].session == number
        inboxes.add(number)
        mails = [mail(number, place, f"{tenant}/{name}") for place, name in enumerate(("a", "room/5"), 1)]
        connection.deliver_inbox(runs_of(mails), anew=False)
        connection.flush()
        assert [packet.topic for packet in sent(wire, Publish)] == ["a"], "a room's name inside is another's outside"
        (over,) = of(ev.PacketsAcknowledged, cluster.world.events)
        assert (over.connection, len(over.packet_ids)) == (-connection.id, 1)
        cluster.world.events.clear()
    assert len(inboxes) == 2


@pytest.mark.parametrize("cluster", ["subscriptions = 2"], indirect=True)
async def test_a_session_for_whose_filters_there_is_no_place_stays_as_it_is(cluster: Cluster) -> None:
    first, _ = await cluster.connect("acme", "a", "b")
    assert subscriptions(cluster) == 2
    first.connection_lost(None)
    number = session_uin(1000007, "phone")
    await until(lambda: not cluster.sessions.unfinished)
    other, _ = await cluster.connect("acme", "c", uin=8)
    again, wire = await cluster.connect("acme")
    assert sent(wire, Connack)[0].session_present
    assert [packet.code for packet in sent(wire, Disconnect)] == [ReasonCode.SERVER_BUSY]
    await until(lambda: not cluster.sessions.unfinished)
    assert [each.filter for each in (await cluster.stored(number)).filters] == ["acme/a", "acme/b"]
    other.connection_lost(None)
    again, wire = await cluster.connect("acme")
    assert sent(wire, Connack)[0].session_present
    assert subscriptions(cluster) == 2
    assert not sent(wire, Disconnect)
    assert again.is_open


async def test_what_waits_for_a_filter_that_the_rules_deny_now_is_not_given(cluster: Cluster) -> None:
    first, _ = await cluster.connect("acme", "news/+", "other", "news/a")
    first.connection_lost(None)
    cluster.logins.write_rules('[[rule]]\ndeny = ["subscribe"]\ntopics = ["news/#"]\n' + TENANTS.format(limits=""))
    guard = cluster.world.clients.guard = LoginGuard(str(cluster.logins.file), log.get_logger(), Audit(None))
    again, wire = await cluster.connect("acme")
    assert sent(wire, Connack)[0].session_present
    number = session_uin(1000007, "phone")
    again.deliver_inbox(runs_of([mail(number, place, f"acme/{name}") for place, name in enumerate(("news/a", "other"), 1)]), True)
    again.flush()
    assert [packet.topic for packet in sent(wire, Publish)] == ["other"]
    again.connection_lost(None)
    await guard.close()


async def test_what_comes_before_the_rules_were_asked_waits(cluster: Cluster) -> None:
    connection, wire = await cluster.connect("acme", "a", "b")
    assert connection.keeping is not None
    number = session_uin(1000007, "phone")
    keeping = connection.keeping = Keeping(connection, cluster.sessions, connection.keeping.session, cluster.world.events.append)
    connection.deliver_inbox(runs_of([mail(number, place, f"acme/{name}") for place, name in enumerate("ab", 1)]), anew=True)
    connection.flush()
    assert not sent(wire, Publish)
    keeping.restored(["acme/a"])
    connection.flush()
    assert [packet.topic for packet in sent(wire, Publish)] == ["b"]


@pytest.mark.parametrize("cluster", ["kept_sessions = 2"], indirect=True)
async def test_a_tenant_keeps_as_many_sessions_as_it_may(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.mqtt.connection.REFUSAL_DELAY_S", 0.0)
    used = next(each for each in cluster.guard.tenants if each.name == "acme")
    for uin in (7, 8):
        connection, _ = await cluster.connect("acme", "a", uin=uin)
        connection.connection_lost(None)
    _, wire = await cluster.connect("acme", uin=9)
    assert [packet.code for packet in sent(wire, Connack)] == [ReasonCode.QUOTA_EXCEEDED]
    _, wire = await cluster.connect("acme", uin=9, dialect=MQTT_3_1_1)
    assert wire.writes == [codec.encode(Connack(False, 3), MQTT_3_1_1)]
    assert used.counters.refused_kept == 2
    assert not (await cluster.read(session_uin(1000009, "phone"))).exists
    for tenant, uin, expiry_s in (("acme", 8, 600), ("acme", 9, 0), ("globex", 9, 600)):
        _, wire = await cluster.connect(tenant, uin=uin, expiry_s=expiry_s)
        (answer,) = sent(wire, Connack)
        assert (answer.code, answer.session_present) == (0, uin == 8), "a session that is there, none, and one of another tenant"
    assert await cluster.sessions.forget(1000007, "phone")
    await until(lambda: cluster.table.places(b"$tenant/acme") == 1)
    for clean in (False, True):
        connection, wire = await cluster.connect("acme", uin=9, clean=clean)
        assert [packet.code for packet in sent(wire, Connack)] == [0]
    connection.data_received(codec.encode(Disconnect(0, {Property.SESSION_EXPIRY: 0}), MQTT_5))
    await until(lambda: cluster.table.places(b"$tenant/acme") == 1)


async def test_a_clean_start_is_answered_when_the_session_before_it_is_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = await cluster.connect("acme", "a")
    first.connection_lost(None)
    await until(lambda: not cluster.sessions.unfinished)
    cleared, may_clear = asyncio.Event(), asyncio.Event()
    clear = cluster.clear

    async def slow(uin: int, generation: int) -> None:
        cleared.set()
        await may_clear.wait()
        await clear(uin, generation)

    monkeypatch.setattr(cluster, "clear", slow)
    connecting = asyncio.create_task(cluster.connect("acme", clean=True, expiry_s=0))
    await cleared.wait()
    assert not connecting.done()
    may_clear.set()
    connection, wire = await connecting
    assert not sent(wire, Connack)[0].session_present
    assert connection.keeping is None
    assert not (await cluster.read(session_uin(1000007, "phone"))).exists


async def test_a_session_without_an_expiry_of_its_own_is_resumed_and_ends_with_the_connection(cluster: Cluster) -> None:
    first, _ = await cluster.connect("acme", "a")
    first.connection_lost(None)
    await until(lambda: not cluster.sessions.unfinished)
    again, wire = await cluster.connect("acme", expiry_s=0)
    assert sent(wire, Connack)[0].session_present
    number = session_uin(1000007, "phone")
    again.deliver_inbox(runs_of([mail(number, 1, "acme/a")]), anew=True)
    again.flush()
    assert [packet.topic for packet in sent(wire, Publish)] == ["a"]
    again.connection_lost(None)
    await until(lambda: not cluster.sessions.unfinished)
    assert not (await cluster.read(number)).exists
    assert not len(cluster.table)
    last, wire = await cluster.connect("acme", expiry_s=0)
    assert not sent(wire, Connack)[0].session_present
    assert last.keeping is None
