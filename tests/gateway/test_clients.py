"""The clients of a gateway: who is evicted, refused, taken over and remembered, and how deliveries reach connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

import pytest

from cluster.mqtt.events import CloseReason
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.clients.client_ids import MAX_REMEMBERED_CLIENTS, REMEMBERED_S
from gateway.clients.clients import ClientSession
from gateway.delivery.dedupe import WINDOW_S
from gateway.mail.run import MailRun
from gateway.options import Options
from pixiu.errors import Draining, Overloaded
from pixiu.ids import SnowflakeID
from tests.gateway.world import World


class Connection(ClientSession):
    """Notes what reaches it."""

    def __init__(self, world: World, *, packets: bool = True) -> None:
        super().__init__(world.clients)
        self.packets = packets
        self.noted: list[object] = []
        self.id = world.clients.arrived(self, "")

    def evict(self) -> None:
        self.noted.append("evicted")

    def deliver(self, data: bytes, count: int) -> None:
        self.noted.append(data)

    def flush(self) -> None:
        self.noted.append("written")

    def deliver_mail(self, runs: Sequence[MailRun], anew: bool) -> None:
        self.noted.append(runs)

    def answer(self, answer: ev.Answer) -> None:
        self.noted.append((answer.request, answer.known))

    def passed(self, size: int) -> None:
        self.noted.append(size)

    def announce(self) -> bool:
        self.noted.append("announced")
        return not self.packets

    def replaced(self, moved: bool) -> None:
        self.noted.append(("replaced", moved))

    def end(self, reason: CloseReason, text: str) -> None:
        self.noted.append(reason)


def opened(world: World, *, packets: bool = True) -> Connection:
    connection = Connection(world, packets=packets)
    world.clients.admit(connection)
    world.clients.opened(connection, 7, 1, 0)
    return connection


async def test_deliveries_of_a_turn_are_written_once_for_each_connection() -> None:
    world = World()
    first, second = opened(world), opened(world)
    world.clients.deliveries.deliver(ev.Deliver((first.id, second.id, 99), b"a", 1))
    world.clients.deliveries.deliver(ev.Deliver((first.id,), b"b", 1))
    world.clients.deliveries.flush()
    world.clients.deliveries.flush()
    assert (first.noted, second.noted) == ([b"a", b"b", "written"], [b"a", "written"])


async def test_the_oldest_pending_connection_goes_for_a_new_one() -> None:
    world = World(Options(max_pending_connections=1))
    first, second = Connection(world), Connection(world)
    assert (first.noted, second.noted) == (["evicted"], [])
    assert world.clients.samples()["connections_evicted_total"] == 1


async def test_a_connection_is_reported_when_it_says_who_it_is_and_when_it_is_gone() -> None:
    world = World()
    silent, connection = Connection(world), opened(world)
    world.clients.closed(silent, 1)
    world.clients.closed(connection, 2)
    world.clients.closed(connection, 2)
    assert [type(event) for event in world.events] == [ev.Opened, ev.Closed]
    assert (len(world.clients), world.events[1]) == (0, ev.Closed(connection.id, 2))


async def test_who_is_no_login_has_no_device_where_only_routers_know_of_it() -> None:
    world = World()
    connection = Connection(world)
    world.clients.opened(connection, 7, 1, 0, login=False)
    (event,) = world.events
    assert isinstance(event, ev.Opened)
    assert event.device == 0


async def test_a_full_gateway_refuses_and_says_when_to_retry() -> None:
    world = World(Options(max_connections=1))
    opened(world)
    with pytest.raises(Overloaded) as caught:
        world.clients.admit(Connection(world))
    assert 500 <= (caught.value.retry_after_ms or 0) <= 1500


async def test_a_draining_gateway_announces_it_admits_nobody_and_keeps_who_moves() -> None:
    world = World()
    connection = opened(world)
    world.clients.drain(1000.0, 1000.0)
    with pytest.raises(Draining):
        world.clients.admit(Connection(world))
    while not connection.noted:
        await asyncio.sleep(0)
    world.clients.replace(ev.Disconnect(connection.id, control_pb2.REASON_MOVED))
    world.clients.replace(ev.Disconnect(connection.id, control_pb2.REASON_KICKED))
    assert connection.noted == ["announced", ("replaced", False)]


async def test_clients_are_moved_evenly_told_first_and_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's; who was told has ten seconds, or until the last moment."""
    world = World()
    for number in range(10):
        opened(world, packets=number % 2 == 0)
    timers: list[tuple[float, int, Callable[[], None]]] = []
    noted: list[tuple[float, str, bool]] = []
    now, numbers = 0.0, count()

    def call_later(delay: float, call: Callable[..., None], *what: object) -> None:
        timer: tuple[float, int, Callable[[], None]] = (now + delay, next(numbers), partial(call, *what))
        heappush(timers, timer)

    def announce(self: Connection) -> bool:
        noted.append((now, "told", self.packets))
        return not self.packets

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    monkeypatch.setattr(Connection, "announce", announce)
    monkeypatch.setattr(Connection, "end", lambda self, *_: noted.append((now, "closed", self.packets)))
    world.clients.drain(10.0, 13.0)
    while timers:
        now, _, call = heappop(timers)
        call()
    monkeypatch.undo()
    told = {(at, packets) for at, what, packets in noted if what == "told"}
    assert sorted(at for at, _ in told) == [0.5 * number for number in range(10)]
    closed = sorted((at, packets) for at, what, packets in noted if what == "closed")
    assert closed == sorted((at + 5.0 if packets else min(at + 10.0, 13.0), packets) for at, packets in told)


async def test_a_client_id_has_one_connection_and_its_unacknowledged_ids_are_remembered() -> None:
    world = World()
    clients, first, second = world.clients.client_ids, opened(world), opened(world)
    assert clients.take_over("phone", first) == {}
    clients.gone("phone", first, {1: SnowflakeID(10)})
    assert clients.take_over("phone", second) == {1: SnowflakeID(10)}
    assert clients.take_over("phone", first) == {}, "once"
    assert second.noted == [CloseReason.TAKEN_OVER]


async def test_what_is_remembered_is_bounded() -> None:
    world = World()
    clients, connection = world.clients.client_ids, opened(world)
    for number in range(MAX_REMEMBERED_CLIENTS + 1):
        clients.gone(str(number), connection, {1: SnowflakeID(number)})
    assert clients.take_over("0", connection) == {}
    assert clients.take_over("1", connection) == {1: SnowflakeID(1)}


async def test_what_is_remembered_is_forgotten_when_repeats_are_not_known_any_more() -> None:
    world = World(now=0.0)
    clients, connection = world.clients.client_ids, opened(world)
    for number in range(1000):
        world.now = 0.1 * number
        clients.gone(str(number), connection, {1: SnowflakeID(number)})
    assert len(clients._remembered) == 10 * REMEMBERED_S
    assert clients.take_over("399", connection) == {}
    assert clients.take_over("400", connection) == {1: SnowflakeID(400)}
    assert REMEMBERED_S > 2 * WINDOW_S


async def test_an_unconfirmed_subscription_is_answered_and_counted() -> None:
    world = World()
    connection = opened(world)
    for known in (True, False):
        world.clients.answer(ev.Answer(connection.id, 5, known))
    assert connection.noted == [(5, True), (5, False)]
    assert world.clients.samples()["subscriptions_unconfirmed_total"] == 1
