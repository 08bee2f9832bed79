"""A client that is not read from says why: each reason, caused on a connection, in the metrics and at /connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from cluster.core.reading_gate import Hold
from cluster.mqtt import codec
from cluster.mqtt.packets import Packet, Publish, Subscribe
from gateway.clients import clients as clients_module
from gateway.grpc.subscriber import MAX_UNREAD_REPLIES, SubscriberService, _Stream
from gateway.mqtt.publishing import MAX_CLIENT_BYTES
from gateway.options import Options
from pixiu.wire.v1 import wire_pb2
from tests.gateway.world import World, mqtt_client

NOW = 1000.0


class Access:
    """The session of a client that has logged in: it owes for what it publishes, or callbacks are asked about it."""

    over = must_ask = False
    tenant = None

    def __init__(self, *, asks: bool = False) -> None:
        self.asks = self.must_ask = asks

    def foresee(self, *_: object) -> None: ...
    def close(self) -> None: ...

    def allows(self, *_: object) -> bool:
        return True

    def spend(self, *_: object) -> float:
        return 5.0

    async def ask(self) -> None:
        await asyncio.sleep(60.0)


def world(**options: Any) -> World:
    return World(Options(**options), now=NOW)


def client(world: World, *packets: Packet, access: Access | None = None, name: str = "phone") -> World:
    connection, _ = mqtt_client(world, name)
    connection.access = cast(Any, access)
    for first in range(0, len(packets), 256):  # as many as one turn takes
        connection.data_received(b"".join(map(codec.encode, packets[first : first + 256])))
    return world


def hello(qos: int, count: int, size: int = 1) -> list[Packet]:
    return [Publish("room/42", bytes(size), qos, packet_id=number if qos else 0) for number in range(1, count + 1)]


def rooms(count: int) -> Subscribe:
    return Subscribe(1, tuple((f"room/{room}", 0) for room in range(1, count + 1)))


def full() -> World:
    """No space for messages of QoS 1."""
    made = world()
    made.room = False
    return made


def storm() -> World:
    made = world()
    connection, _ = mqtt_client(made)
    connection.data_received(b"\xc0\x00" * 5000)
    return made


def crowded() -> World:
    """Unfinished packets take most of the memory."""
    made = world(memory_bytes=4 << 20)
    for number in range(4):
        connection, _ = mqtt_client(made, f"{number}")
        connection.data_received(codec.encode(Publish("room/42", bytes(1_000_000)))[: 990_000 if number < 3 else 300_000])
    return made


def deaf() -> World:
    made = world()
    stream = _Stream(made.clients, "")
    for number in range(MAX_UNREAD_REPLIES):
        stream.reply(wire_pb2.SubscribeReply(request=number))
    return made


CAUSES: dict[Hold, Callable[[], World]] = {
    Hold.LOGIN: lambda: client(client(world(max_connections=1)), name="refused"),
    Hold.TURN: storm,
    Hold.UNANSWERED: lambda: client(world(), *hello(1, 1024)),
    Hold.PUBLISHING: lambda: client(full(), *hello(1, 1)),
    Hold.IN_FLIGHT: lambda: client(world(), *hello(0, 5, MAX_CLIENT_BYTES // 4)),
    Hold.RATE: lambda: client(world(client_messages_per_s=1), *hello(1, 10)),
    Hold.QUOTA: lambda: client(world(), *hello(1, 1), access=Access()),
    Hold.UNROUTABLE: lambda: client(world(), Publish("t" * 65_535, b"x")),
    Hold.JOINS: lambda: client(world(client_joins_per_s=1, client_joins_burst=1), rooms(20)),
    Hold.JOIN_QUEUE: lambda: client(client(world(joins_per_s=10, client_joins_free=10), rooms(30)), rooms(20), name="second"),
    Hold.ACCESS_CHECK: lambda: client(world(), *hello(0, 1), access=Access(asks=True)),
    Hold.MEMORY: crowded,
    Hold.ANSWERS: deaf,
}


@pytest.mark.parametrize("reason", Hold)
async def test_a_client_that_is_not_read_from_says_why(reason: Hold) -> None:
    made = CAUSES[reason]()
    assert made.clients.samples()["connections_held{reason}"] == {each.value: int(each is reason) for each in Hold}
    made.now = NOW + 2.5
    (shown,) = [found for found in json.loads(json.dumps(made.clients.page()))["clients"] if found["held_s"]]
    assert shown["held_s"] == {reason.value: 2.5}
    assert shown["protocol"] == ("grpc" if reason is Hold.ANSWERS else "mqtt")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"client_joins_per_s": 1, "client_joins_burst": 1}, Hold.JOINS),
        ({"joins_per_s": 10, "client_joins_free": 1}, Hold.JOIN_QUEUE),
    ],
)
async def test_a_stream_of_grpc_says_it_alike(options: dict[str, int], reason: Hold) -> None:
    made = world(**options)
    service, stream = SubscriberService(made.clients), _Stream(made.clients, "")
    request = wire_pb2.SubscribeRequest(join_rooms=range(1, 31))
    pauses = [pause for pause in (service._take(stream, request), service._take(stream, request)) if pause is not None]
    tasks = [asyncio.ensure_future(pause) for pause in pauses]
    await asyncio.sleep(0)
    assert set(stream.gate.reasons) == {reason}
    for task in tasks:
        task.cancel()
    made.clients.closed(stream, 1)
    assert made.clients.page()["held"] == 0


async def test_those_that_are_not_read_from_are_shown_first_and_no_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "MAX_SHOWN", 3)
    made = full()
    for number in range(5):
        client(made, name=f"{number}")
    client(made, *hello(1, 1), name="held")
    page: Any = made.clients.page()
    assert (page["connections"], page["held"]) == (6, 1)
    assert [bool(shown["held_s"]) for shown in page["clients"]] == [True, False, False]


async def test_who_is_gone_is_not_held() -> None:
    made = full()
    connection, _ = mqtt_client(made)
    connection.data_received(codec.encode(hello(1, 1)[0]))
    assert made.clients.page()["held"] == 1
    connection.connection_lost(None)
    assert made.clients.page()["held"] == 0
