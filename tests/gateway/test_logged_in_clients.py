"""What one MQTT client that has logged in is told by its guard: what it pays for, and what new rules take from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.access.login_guard import MAX_HOLD_S, LoginGuard
from cluster.access.revocations import Revocation
from cluster.core import log
from cluster.core.reading_gate import Hold
from cluster.mqtt import codec
from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import Connect, Publish, Subscribe, Unsubscribe, Will
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials
from gateway import events as ev
from gateway.clients.revoking import revoke
from gateway.grpc.subscriber import _Stream
from gateway.mqtt.connection import MQTTConnection
from tests.gateway.world import Wire, World, of
from tests.support.logins import Logins, all_visited
from tests.support.waiting import until


@pytest.fixture
async def logins(tmp_path: Path) -> Logins:
    return Logins(tmp_path)


@pytest.fixture
async def world(logins: Logins) -> AsyncIterator[World]:
    logins.write_rules("[quota]\nmessages_per_s = 10.0\nbytes_per_s = 1000.0\n" + RULES)
    world = World()
    world.now = 1000.0
    world.clients.guard = guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    yield world
    await guard.close()


RULES = '[[rule]]\nallow = ["publish", "subscribe"]\nrooms = ["42"]\n'


def log_in(world: World, logins: Logins, name: str = "phone", clean: bool = True) -> tuple[MQTTConnection, Wire]:
    connection, wire = MQTTConnection(world.clients), Wire()
    connection.connection_made(wire)
    token = logins.token("alice", 7).encode()
    connection.data_received(codec.encode(Connect(name, clean, 0, user_name="alice", password=token)))
    assert connection.access is not None
    return connection, wire


async def test_what_may_not_be_published_costs_as_much_as_what_may(world: World, logins: Logins) -> None:
    connection, wire = log_in(world, logins)
    assert wire.reading
    connection.data_received(codec.encode(Publish("room/13", b"x")) * 100)
    assert not of(ev.Publish, world.events)
    assert world.clients.counters.denied == 100
    assert not wire.reading
    connection.connection_lost(None)


async def test_who_owes_more_than_one_hold_is_held_again(world: World, logins: Logins) -> None:
    connection, wire = log_in(world, logins)
    connection.data_received(codec.encode(Publish("room/42", b"x")) * 5000)
    await until(lambda: not connection.gate.holds(Hold.TURN))
    assert connection.access is not None
    for _ in range(3):
        assert connection.access.owed() > MAX_HOLD_S
        assert not wire.reading
        assert world.now is not None
        world.now += MAX_HOLD_S + 1
        connection._timeout()
    assert not connection.gate.reads
    assert world.clients.guard is not None
    assert world.now is not None
    world.clients.guard._spent.clear()  # as a new quota does
    world.now += MAX_HOLD_S + 1
    connection._timeout()
    assert not connection.gate.holds(Hold.QUOTA), "the rest of what it sent is worked off"
    connection.connection_lost(None)


async def test_rules_that_deny_the_inbox_end_a_client_that_takes_mail(logins: Logins) -> None:
    logins.write_rules(RULES)
    world = World(roles=("gateway", "proxy", "router", "broker", "relay", "xiu", "pi"))
    world.clients.guard = guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    reads, _ = log_in(world, logins, clean=False)
    reads.data_received(codec.encode(Subscribe(1, (("user/7", 1),))))
    (join,) = of(ev.Join, world.events)
    assert join.mail
    world.clients.answer(ev.Answer(join.connection, join.request, True))
    chats, _ = log_in(world, logins, "tablet")
    chats.data_received(codec.encode(Subscribe(1, (("user/7", 0),))))
    world.clients.answer(ev.Answer(of(ev.Join, world.events)[1].connection, 1, True))
    logins.write_rules('[[rule]]\ndeny = ["inbox"]\n' + RULES)
    await guard.read_again()
    await guard.read_again()
    await all_visited(guard)
    assert (reads.is_open, chats.is_open) == (False, True)
    assert world.closed_for == [CloseReason.NOT_ALLOWED.value]
    chats.connection_lost(None)
    await guard.close()


@pytest.mark.parametrize(("topic", "kept"), [("room/42", True), ("room/13", False)])
async def test_a_will_that_its_client_may_not_publish_is_refused_at_connect(
    world: World, logins: Logins, topic: str, kept: bool
) -> None:
    connection, wire = MQTTConnection(world.clients), Wire()
    connection.connection_made(wire)
    token = logins.token("alice", 7).encode()
    connection.data_received(codec.encode(Connect("phone", True, 0, user_name="alice", password=token, will=Will(topic, b"bye"))))
    await until(lambda: bool(wire.writes))
    assert b"".join(wire.writes)[:4] == bytes((0x20, 2, 0, 0 if kept else 5))
    wills = of(ev.SetWill, world.events)
    assert [(will.uin, will.message.topic) for will in wills] == ([(7, topic)] if kept else [])
    connection.connection_lost(None)
    assert [end.publish for end in of(ev.EndWill, world.events)] == ([True] if kept else [])


REVOKING = """
[callbacks.live]
url = "http://127.0.0.1:1/acl"

[[rule]]
ask = ["subscribe"]
callback = "live"
topics = ["clubs/+/chat"]

[[rule]]
allow = ["subscribe"]
topics = ["clubs/#"]
rooms = ["1-100"]
"""


@pytest.mark.parametrize(
    ("filter_", "ended"),
    [
        ("clubs/7/news", {"clubs/7/news", "$share/g/clubs/7/news"}),  # clubs/+/news is allowed by a rule
        ("clubs/7/chat", {"clubs/7/chat", "clubs/+/chat"}),  # what a callback has allowed is asked again
        ("clubs/7/#", {"clubs/7/chat", "clubs/7/news", "$share/g/clubs/7/news", "clubs/+/chat"}),
        ("room/42", {"room/42"}),
        ("room/4", set()),
    ],
)
@pytest.mark.parametrize("dialect", ["mqtt", "grpc"])
async def test_a_revocation_ends_filters_that_it_covers_and_wider_ones_that_no_rule_allows(
    logins: Logins, filter_: str, ended: set[str], dialect: str
) -> None:
    logins.write_rules(REVOKING)
    world, asked = World(), {"clubs/7/chat", "clubs/+/chat", "clubs/8/chat"}
    filters = [*asked, "clubs/7/news", "clubs/+/news", "$share/g/clubs/7/news", "room/42"]
    world.clients.guard = guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    identity = await guard.check(Credentials("alice", logins.token("alice", 7)))
    if dialect == "mqtt":
        connection, _ = log_in(world, logins)
        access = connection.access
    else:
        stream = _Stream(world.clients, "")
        access = stream.access = guard.open(identity, "", "", stream.close)
        access.filters, access.revoked = stream.filters, stream.revoked
    assert access is not None
    for topic in asked:
        access.permissions._given.add(("live", "subscribe", topic))
    if dialect == "mqtt":
        connection.data_received(codec.encode(Subscribe(1, tuple((name, 0) for name in filters))))
        connection.data_received(codec.encode(Unsubscribe(2, ("clubs/+/news",))))
        connection.data_received(codec.encode(Subscribe(3, (("clubs/+/news", 0),))))
    else:
        stream.channels.update(filters)
    await until(lambda: set(access.filters()) == set(filters))
    leaves = len(of(ev.Leave, world.events))
    request = Revocation("alice", filter_, "left").text()
    assert revoke(guard, Audit(None), request) == len(ended)
    assert set(access.filters()) == set(filters) - ended
    assert {name for leave in of(ev.Leave, world.events)[leaves:] for name in leave.filters} == ended
    assert revoke(guard, Audit(None), request) == 0
    assert revoke(guard, Audit(None), Revocation("bob", "#").text()) == 0
    if dialect == "grpc" and ended:
        reply = stream._replies.popleft()
        assert ({f"room/{room}" for room in reply.revoked_rooms} | set(reply.revoked_topics), reply.error_text) == (ended, "left")
    await guard.close()
