"""Tenants at a gateway: the packets of their clients, take-over, wills, limits, and what an overloaded gateway takes from them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cluster.access.login_guard import LoginGuard
from cluster.access.revocations import Revocation
from cluster.access.tenants.use import Stage, TenantUse
from cluster.core import log
from cluster.core.reading_gate import Hold
from cluster.mqtt import codec
from cluster.mqtt.outbound import Delivery
from cluster.mqtt.packets import (
    MQTT_3_1_1,
    MQTT_5,
    Connack,
    Connect,
    Dialect,
    Disconnect,
    Packet,
    Puback,
    Publish,
    Side,
    Suback,
    Subscribe,
    Unsubscribe,
    Will,
)  # fmt: skip
from cluster.mqtt.properties import Property
from cluster.mqtt.reason_codes import ReasonCode
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials
from gateway import events as ev
from gateway.clients.revoking import revoke
from gateway.core import Core
from gateway.http.answers import Refused
from gateway.http.api import Api, Caller
from gateway.http.bodies import mailing_of, publication_of
from gateway.http.logins import Logins as HttpLogins
from gateway.http.tenants import inward, mailing_outward, publication_outward, revocation_outward
from gateway.mqtt.connection import MQTTConnection
from gateway.tenants.page import counted, system_topics
from gateway.tenants.shedding import CALM, STEADY, Offered, Shedding
from gateway.tenants.watch import TENANT_LIMITS, TenantWatch
from pixiu.errors import Unavailable
from pixiu.ids import topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic
from tests.gateway.world import Wire, World, arrive, of, turn
from tests.support.logins import Logins
from tests.support.waiting import until

TENANTS = """
[quota]
messages_per_s = 0
bytes_per_s = 0
[tenant.acme]
uins = "1000001-2000000"
rooms = "5001-6000"
{limits}
[tenant.globex]
uins = "2000001-3000000"
[[rule]]
allow = ["publish", "subscribe"]
"""


class Clients:
    """Clients of a gateway with tenants."""

    def __init__(self, world: World, logins: Logins, guard: LoginGuard) -> None:
        self.world, self.logins, self.guard = world, logins, guard
        self.open: list[MQTTConnection] = []

    def tenant(self, name: str) -> TenantUse:
        return next(used for used in self.guard.tenants if used.name == name)

    async def connect(
        self, tenant: str, *packets: Packet, uin: int = 7, dialect: Dialect = MQTT_5, will: Will | None = None
    ) -> tuple[MQTTConnection, Wire]:
        """A client phone of the user alice, that sends packets in one write with its CONNECT."""
        connection, wire = MQTTConnection(self.world.clients), Wire()
        connection.connection_made(wire)
        token = self.logins.token("alice", uin, tenant=tenant or None).encode()
        first = Connect("phone", True, 0, password=token, user_name="alice", will=will, dialect=dialect)
        connection.data_received(b"".join(codec.encode(packet, dialect) for packet in (first, *packets)))
        self.open.append(connection)
        await until(lambda: bool(wire.writes))
        return connection, wire


def sent(wire: Wire, kind: type[Any], dialect: Dialect = MQTT_5) -> list[Any]:
    """Packets of a kind that a client got."""
    decoder = codec.Decoder(Side.CLIENT, dialect=dialect)
    return [packet for packet in decoder.feed(b"".join(wire.writes)) if isinstance(packet, kind)]


def published(data: bytes, dialect: int) -> list[str]:
    """Topics of PUBLISH packets."""
    decoder = codec.Decoder(Side.CLIENT, dialect=MQTT_5 if dialect == 5 else MQTT_3_1_1)
    packets = decoder.feed(codec.encode(Connack(False, 0), decoder.dialect) + data)
    return [packet.topic for packet in packets if isinstance(packet, Publish)]


def record_of(number: int) -> bytes:
    """A message to acme's topic a/b."""
    return encode(Kind.ROOM, topic_room("acme"), with_topic("acme/a/b", b"x"), number, flags=Flag.TO_ROOM | Flag.TOPIC)


@pytest.fixture
async def clients(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Clients]:
    logins = Logins(tmp_path)
    logins.write_rules(TENANTS.format(limits=getattr(request, "param", "")))
    world = World(roles=("gateway", "proxy", "router", "broker", "relay", "xiu", "pi"))
    world.clients.guard = guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    found = Clients(world, logins, guard)
    yield found
    for connection in found.open:
        connection.connection_lost(None)
    await guard.close()


async def test_clients_of_two_tenants_with_the_same_names_have_nothing_in_common(clients: Clients) -> None:
    names = ("a/b", "#", "$share/g/a/b", "user/7", "room/5", "$SYS/#")
    filters = Subscribe(1, tuple((name, 1) for name in names))
    opened = [await clients.connect(tenant, filters, will=Will("gone", b"")) for tenant in ("acme", "globex")]
    joins = of(ev.Join, clients.world.events)
    outside = [{wanted.filter for wanted in join.channels} for join in joins]
    assert outside[0] == {"acme/a/b", "acme/#", "$share/g/acme/a/b", "room/5005", "$SYS/tenant/acme/#"}
    assert outside[1] == {"globex/a/b", "globex/#", "$share/g/globex/a/b", "$SYS/tenant/globex/#"}, "globex has no rooms"
    assert [join.chat for join in joins] == [True, True]
    assert [event.uin for event in of(ev.Opened, clients.world.events)] == [1000007, 2000007]
    assert [will.message.topic for will in of(ev.SetWill, clients.world.events)] == ["acme/gone", "globex/gone"]
    assert all(connection.is_open for connection, _ in opened), "neither took the other's client ID over"
    again, _ = await clients.connect("acme")
    assert (opened[0][0].is_open, opened[1][0].is_open, again.is_open) == (False, True, True)


async def test_what_a_client_publishes_is_named_outside_and_what_it_gets_inside(clients: Clients) -> None:
    alias: dict[int, object] = {Property.TOPIC_ALIAS: 1}
    published = Publish("a/b", b"1", properties=alias), Publish("", b"2", properties=alias), Publish("room/5", b"3")
    connection, wire = await clients.connect("acme", *published, Publish("user/9", b"4"))
    records = [(key, record) for event in of(ev.Publish, clients.world.events) for key, record in event.records]
    assert [key for key, _ in records][2:] == [5005, 1000009]
    assert [b"acme/a/b" in record for _, record in records] == [True, True, False, False]
    record = encode(Kind.ROOM, 9, with_topic("acme/a/b", b"x"), 1, flags=Flag.TO_ROOM | Flag.TOPIC)
    for topic in (b"acme/a/b", b"user/1000007", b"room/5005", b"$SYS/tenant/acme/broker/uptime", b"acme", b"globex/a/b"):
        connection.deliver_each([ev.Delivery(record, topic, 0, False)])
    connection.flush()
    assert [packet.topic for packet in sent(wire, Publish)] == ["a/b", "user/7", "room/5", "$SYS/broker/uptime"]


@pytest.mark.parametrize("clients", ["messages_out_per_s = 10"], indirect=True)
@pytest.mark.parametrize("filter_", ["a/b", "a/+", "#"])
async def test_the_clients_of_a_tenant_share_bytes_in_its_names(clients: Clients, filter_: str) -> None:
    for uin, dialect in ((7, MQTT_3_1_1), (8, MQTT_5), (9, MQTT_5)):
        await clients.connect("acme", uin=uin, dialect=dialect)
    await clients.connect("", dialect=MQTT_5)
    core, use = Core(instance=1, generation=1), clients.tenant("acme")
    opened = of(ev.Opened, clients.world.events)
    first, second, third, operator = (event.connection for event in opened)
    turn(core, *opened)
    for event in opened:
        name = "#" if event.inside is None else f"acme/{filter_}"
        turn(core, ev.Join(event.connection, 1, [ev.Wanted(name)], False, False))
    found = of(ev.Deliver, arrive(core, record_of(1), record_of(2)))
    topics = {effect.connections: published(effect.data, 3 if effect.connections == (first,) else 5) for effect in found}
    assert topics == {(first,): ["a/b"] * 2, (second, third): ["a/b"] * 2, (operator,): ["acme/a/b"] * 2}
    assert use.counters.messages_out == 6
    for number in range(3, 8):
        found = of(ev.Deliver, arrive(core, record_of(number)))
    assert [effect.connections for effect in found] == [(operator,)], "the tenant is above its rate"
    turn(core, ev.Leave(second, [f"acme/{filter_}"]), ev.Closed(third, 1))
    use.set(use.settings, "acme", 1e9)
    assert {effect.connections for effect in of(ev.Deliver, arrive(core, record_of(9)))} == {(first,), (operator,)}


async def test_unsubscribing_and_revoking_use_the_same_names(clients: Clients) -> None:
    subscribe = Subscribe(1, (("a", 0), ("b", 0)))
    connection, wire = await clients.connect("acme", subscribe)
    other, _ = await clients.connect("globex", subscribe)
    for join in of(ev.Join, clients.world.events):
        clients.world.clients.answer(ev.Answer(join.connection, join.request, True))
    connection.data_received(codec.encode(Unsubscribe(2, ("a",)), MQTT_5))
    assert [leave.filters for leave in of(ev.Leave, clients.world.events)] == [["acme/a"]]
    names = clients.tenant("acme").names
    revocation = revocation_outward(names, Revocation("alice", "#"))
    assert revoke(clients.guard, Audit(None), revocation.text()) == 1
    assert (set(connection.subscriptions or ()), set(other.subscriptions or ())) == (set(), {"globex/a", "globex/b"})
    assert sent(wire, Suback)[0].codes == (0, 0)
    assert revocation_outward(names, Revocation("7", "room/5")) == Revocation("1000007", "room/5005")


@pytest.mark.parametrize("clients", ["connections = 1"], indirect=True)
@pytest.mark.parametrize("dialect", [MQTT_3_1_1, MQTT_5])
async def test_a_connection_above_the_bound_is_told(clients: Clients, dialect: Dialect) -> None:
    await clients.connect("acme", dialect=dialect)
    _, wire = await clients.connect("acme", uin=8, dialect=dialect)
    await clients.connect("globex", dialect=dialect)
    (answer,) = sent(wire, Connack, dialect)
    assert answer.code == (ReasonCode.QUOTA_EXCEEDED if dialect is MQTT_5 else 3)
    assert clients.tenant("acme").counters.refused_sessions == 1


@pytest.mark.parametrize("clients", ["subscriptions = 2"], indirect=True)
async def test_filters_of_all_clients_of_a_tenant_have_a_bound(clients: Clients) -> None:
    one, wire = await clients.connect("acme", Subscribe(1, (("a", 0), ("b", 0))))
    two, refused = await clients.connect("acme", Subscribe(1, (("c", 0),)), uin=8)
    assert [packet.codes for packet in sent(refused, Suback)] == [(ReasonCode.QUOTA_EXCEEDED,)]
    one.data_received(codec.encode(Unsubscribe(2, ("b",)), MQTT_5))
    two.data_received(codec.encode(Subscribe(2, (("c", 0),)), MQTT_5))
    assert [wanted.filter for wanted in of(ev.Join, clients.world.events)[-1].channels] == ["acme/c"]
    assert clients.tenant("acme").subscriptions == 2
    for connection in (one, two):
        connection.connection_lost(None)
    assert clients.tenant("acme").subscriptions == 0
    assert not sent(wire, Disconnect)


@pytest.mark.parametrize("clients", ["messages_in_per_s = 1"], indirect=True)
@pytest.mark.parametrize("dialect", [MQTT_3_1_1, MQTT_5])
async def test_while_a_tenant_owes_qos_0_is_dropped_and_the_rest_refused(clients: Clients, dialect: Dialect) -> None:
    first, _ = await clients.connect("acme", *[Publish("a", b"x")] * 100, dialect=dialect)
    assert first.gate.holds(Hold.QUOTA)
    second, wire = await clients.connect("acme", Publish("a", b"x"), Publish("a", b"x", 1, packet_id=3), uin=8, dialect=dialect)
    other, _ = await clients.connect("globex", Publish("a", b"x"), dialect=dialect)
    assert clients.tenant("acme").counters.dropped_in == 1
    if dialect is MQTT_5:
        assert [(ack.packet_id, ack.code) for ack in sent(wire, Puback)] == [(3, ReasonCode.QUOTA_EXCEEDED)]
        assert not clients.world.published
    else:
        assert len(clients.world.published) == 1, "it cannot be refused"
        assert second.gate.holds(Hold.QUOTA)
    assert not other.gate.holds(Hold.QUOTA)
    assert len(of(ev.Publish, clients.world.events)[-1].records) == 1


@pytest.mark.parametrize("clients", ["messages_out_per_s = 1"], indirect=True)
async def test_messages_of_qos_0_beyond_the_rate_do_not_reach_the_clients(clients: Clients) -> None:
    connection, wire = await clients.connect("acme")
    record = encode(Kind.ROOM, 9, with_topic("acme/a", b"x"), 1, flags=Flag.TO_ROOM | Flag.TOPIC)
    connection.deliver_each([ev.Delivery(record, b"acme/a", qos, False) for qos in (1, 1, 0)])
    connection.deliver_each([Delivery(record, b"acme/a", 0, True)])
    connection.flush()
    assert sorted((packet.qos, packet.retain) for packet in sent(wire, Publish)) == [(0, True), (1, False), (1, False)]


@pytest.mark.parametrize("clients", ["retained_messages = 1"], indirect=True)
async def test_retained_messages_above_the_bound_are_refused(clients: Clients) -> None:
    messages = [Publish(f"a/{number}", b"x", 1, True, packet_id=number) for number in (1, 2)]
    _, wire = await clients.connect("acme", *messages, Publish("a/3", b"", 1, True, packet_id=3))
    assert [message.packet_id for message in clients.world.published] == [1, 3], "clearing a topic is never refused"
    (refused,) = [ack for ack in sent(wire, Puback) if ack.packet_id == 2]
    assert (refused.code, refused.properties[Property.REASON_STRING]) == (
        ReasonCode.QUOTA_EXCEEDED, "the tenant has as many retained messages as it may"
    )  # fmt: skip


async def test_an_overloaded_gateway_refuses_and_says_why(clients: Clients) -> None:
    five, wire = await clients.connect("acme")
    three, plain = await clients.connect("acme", uin=8, dialect=MQTT_3_1_1)
    clients.tenant("acme").stage = Stage.REFUSED
    _, refused = await clients.connect("acme", uin=9)
    assert sent(refused, Connack)[0].code == ReasonCode.QUOTA_EXCEEDED
    five.data_received(codec.encode(Publish("a", b"x", 1, packet_id=1), MQTT_5))
    assert sent(wire, Puback)[0].code == ReasonCode.QUOTA_EXCEEDED
    assert five.gate.holds(Hold.QUOTA)
    five._publishing.publish([(1, Publish("acme/a", b"x"))])
    (bye,) = sent(wire, Disconnect)
    assert bye.code == ReasonCode.MESSAGE_RATE_TOO_HIGH
    assert "more than its share" in bye.properties[Property.REASON_STRING]
    three.data_received(codec.encode(Publish("a", b"x"), MQTT_3_1_1))
    assert three.is_open
    assert not of(ev.Publish, clients.world.events)
    assert not sent(plain, Disconnect, MQTT_3_1_1)


def test_the_tenant_most_above_its_share_is_shed_first_and_refused_last() -> None:
    shedding = Shedding()
    offered = [Offered("small", 1, 10), Offered("greedy", 1, 500), Offered("large", 10, 1000), Offered("idle", 1, 0)]
    steps: list[dict[str, Stage]] = []
    for _ in range(6 * (STEADY + 1)):
        found = shedding.look(2.0, offered)
        if not steps or found != steps[-1]:
            steps.append(found)
    assert steps == [{"greedy": Stage.NO_QOS_0}, {"greedy": Stage.REFUSED}], "the others are below their shares"
    assert shedding.look(0.9, offered) == steps[-1], "neither more nor less between the limits"
    for _ in range(CALM):
        found = shedding.look(0.1, offered)
    assert found == steps[0]
    for _ in range(CALM):
        found = shedding.look(0.1, offered)
    assert found == {}


def test_all_above_their_shares_lose_qos_0_before_any_is_refused() -> None:
    shedding = Shedding()
    offered = [Offered("a", 1, 300), Offered("b", 1, 200), Offered("c", 1, 1), Offered("d", 1, 1)]
    order: list[tuple[str, Stage]] = []
    for _ in range(4 * (STEADY + 1)):
        shedding.look(1.0, offered)
        order += [step for step in shedding.stages.items() if step not in order]
    assert order == [("a", Stage.NO_QOS_0), ("b", Stage.NO_QOS_0), ("a", Stage.REFUSED), ("b", Stage.REFUSED)]
    assert shedding.look(1.0, offered[1:]) == {"b": Stage.REFUSED}, "a tenant that is gone has no stage"
    alone = Shedding()
    for _ in range(STEADY):
        found = alone.look(1.0, [Offered("only", 1, 5)])
    assert found == {"only": Stage.NO_QOS_0}


async def test_the_watch_measures_the_loop_and_counts_what_is_retained(clients: Clients) -> None:
    await clients.connect("acme", *[Publish("a", b"x")] * 50)
    memory = 0.0
    asked: list[str] = []

    async def count(name: str) -> tuple[int, int]:
        asked.append(name)
        if name.startswith("globex"):
            raise Unavailable("no router")
        return 3, 300

    async def count_sessions(names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, 4)

    now = 0.0
    watch = TenantWatch(clients.guard.tenants, lambda: now, lambda: memory, count, count_sessions, log.get_logger())
    watch.look(0.0)
    assert watch.pressure == 0.0
    watch.look(0.5)
    assert watch.pressure < 1.0, "one late look is no overload"
    clients.tenant("acme").spend_in(100, 0, 0.0)
    for _ in range(20):
        watch.look(0.5)
        clients.tenant("acme").spend_in(100, 0, 0.0)
    assert watch.pressure > 1.0
    assert clients.tenant("acme").stage is Stage.REFUSED
    for _ in range(100):
        watch.look(0.0)
    assert clients.tenant("acme").stage is Stage.NONE
    memory = 0.9
    watch.look(0.0)
    assert watch.pressure > 1.0
    for used in clients.guard.tenants:
        used.retained.asked = True
    await watch.count_retained()
    await watch.count_retained()
    assert asked == ["acme/#", "globex/#"]
    page: Any = await counted(clients.guard.tenants, watch, {})
    shown = [(each["tenant"], each["sessions"], each["kept"], each["retained"]) for each in page["tenants"]]
    assert shown == [("acme", 1, 4, 3), ("globex", 0, 4, 0)]
    with capture_logs() as lines:
        for at, refused in ((1.0, 1), (60.0, 1), (119.0, 1), (120.0, 0), (180.0, 0)):
            now = at
            clients.tenant("acme").counters.refused_kept += refused
            watch.report()
    assert [(line["tenant"], line["limits"], line["refused_kept"]) for line in lines if line["event"] == TENANT_LIMITS] == [
        ("acme", ["kept_sessions"], 2), ("acme", ["kept_sessions"], 1),
    ]  # fmt: skip


def test_system_topics_of_a_tenant_say_nothing_of_others() -> None:
    from cluster.access.tenants.book import TenantBook
    from cluster.access.tenants.settings import AllTenants, TenantSettings

    book = TenantBook(lambda: 0.0)
    book.use(AllTenants(), {"acme": TenantSettings(uins="1-9"), "globex": TenantSettings(uins="11-19")}, {})
    for used in book:
        used.sessions = 1 if used.name == "acme" else 5
    core = Core(instance=1, generation=1)
    core.system.more = lambda: system_topics(book)
    turn(core, ev.Opened(1, 7, 5, 0, 0, 0, True, exact=True))
    turn(core, ev.Join(1, 1, [ev.Wanted("$SYS/tenant/acme/#")], False, False))
    found = [each for effect in of(ev.DeliverEach, turn(core, now=50.0)) for each in effect.messages]
    said = {each.topic.decode(): each.record for each in found}
    assert {topic.removeprefix("$SYS/tenant/acme/broker/") for topic in said} == {
        "clients/connected", "messages/sent", "messages/received", "subscriptions/count"
    }  # fmt: skip
    assert b"connected1" in said["$SYS/tenant/acme/broker/clients/connected"]


async def test_the_http_api_refuses_a_tenant_that_owes(clients: Clients) -> None:
    async def nothing(*_: object) -> Any: ...

    logins = HttpLogins(lambda: "", 1, "")
    api = Api(clients.guard, logins, nothing, nothing, lambda: False)
    token = clients.logins.token("alice", 7, tenant="acme")
    identity = await clients.guard.check(Credentials("", token))
    caller = Caller(identity, identity.uin, token)
    api._pay(caller, 1, 1)
    clients.tenant("acme").stage = Stage.REFUSED
    with pytest.raises(Refused, match="more than its share") as refused:
        api._pay(caller, 1, 1)
    assert (refused.value.answer.status, clients.tenant("acme").counters.refused_messages) == (429, 1)


async def test_the_http_api_speaks_the_tenants_names(clients: Clients) -> None:
    names = clients.tenant("acme").names
    sent_ = [publication_outward(names, publication_of({"topic": topic, "payload": "x"})) for topic in ("a", "room/5", "user/9")]
    assert [(each.topic, each.room, each.user) for each in sent_] == [("acme/a", 0, 0), ("", 5005, 0), ("", 0, 1000009)]
    assert mailing_outward(names, mailing_of({"to": [1, 2], "payload": "x"})).to == (1000001, 1000002)
    for wrong in ({"topic": "room/1001"}, {"topic": "user/1000001"}):
        with pytest.raises(Refused, match="the tenant has no such"):
            publication_outward(names, publication_of({**wrong, "payload": ""}))
    assert inward(names, {"topic": "acme/a", "sender": 1000009}) == {"topic": "a", "sender": 9}
    assert inward(names, {"sender": 9}) == {"sender": 0}
    assert inward(None, {"topic": "acme/a", "sender": 9}) == {"topic": "acme/a", "sender": 9}
