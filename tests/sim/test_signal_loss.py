"""Signals through the production cores on a seeded network in which every hop loses with the same probability p.

    sender ─▶ 3 proxies ─p─▶ 3 brokers ─p─▶ gateway ─▶ client
       ▲          ▲                            │
       └──────────┴────────── receipts ─p──────┘

Without receipts the loss is that of three independent ways of two hops, (1-(1-p)²)³; with receipts it is the fourth power of
that, because three repeats follow. No copy, repeat or restart of the gateway delivers a signal twice.
Where a proxy and a broker share a node, the loss of one node takes no signal.

A failure prints its seed; the same seed gives the same run. Source: docs/promises.md, docs/architecture.md, "A signal to a room".
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import count
from math import sqrt

import pytest

import broker.core
import cluster.membership.events as me
import gateway.core
import gateway.events as ge
import proxy.core
import proxy.events as pe
from cluster.core.contract import END_OF_TURN, RecordsReceived, SendRecords, Settled
from cluster.membership.map.updates import Update
from gateway.delivery.signals import MemoryTable
from pixiu.client.send.events import Failure
from pixiu.client.send.signals import SendCopies, Signal, SignalCore
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.rpc.deadline_timer import NEVER
from pixiu.wire.record import Flag, Kind, encode
from tests.support.filters import wants

ROOM, UIN = 42, 7
ROUTER, GATEWAY = EndpointID(900), EndpointID(800)
PROXIES = [EndpointID(101), EndpointID(102), EndpointID(103)]
BROKERS = [EndpointID(201), EndpointID(202), EndpointID(203)]
TRY_S = 0.2


def make_broker(endpoint: EndpointID) -> broker.core.Core:
    core = broker.core.Core(endpoint=endpoint, partition=0, heartbeat_s=1.0, poll_interval_s=60.0, gone_gateway_s=3600.0)
    gateways = (me.Gateway(GATEWAY, 1, 1),)
    routers = me.OtherRole(1, 1, (me.Replica(ROUTER, 0),))
    core.step(me.ClusterChanged(1, 1, (), me.NO_OTHER, gateways, routers), 0.0)
    core.step(me.SnapshotFinished(ROUTER, None), 0.0)
    core.step(me.MessagesReceived(ROUTER, [Update(gateway_msg_id(1, 1, 1), ROOM, UIN, True)]), 0.0)
    return core


def make_proxy(brokers: tuple[pe.Replica, ...]) -> proxy.core.Core:
    core = proxy.core.Core(max_record_bytes=1 << 20)
    core.step(pe.BrokersChanged(1, brokers), 0.0)
    core.step(pe.PublisherOpened(1), 0.0)
    return core


def seen_from(node: int, nodes: int) -> tuple[pe.Replica, ...]:
    """The brokers as the proxy of a node sees them; the others' proxies and brokers are apart."""
    places = [pe.Place.BESIDE] * nodes + [pe.Place.APART] * (len(BROKERS) - nodes)
    if node < nodes:
        places[node] = pe.Place.HERE
    return tuple(pe.Replica(endpoint, 0, place=place) for endpoint, place in zip(BROKERS, places, strict=True))


class World:
    """One sender, the three roles, and a network without delay."""

    def __init__(
        self, seed: int, loss: float, *, receipts: bool = False, restarts: float = 0.0, nodes: int = 0, proxies: int = 3
    ) -> None:
        self.chance = random.Random(seed)
        self.loss, self.receipts, self.restarts = loss, receipts, restarts
        self.now = 0.0
        self.sender = SignalCore()
        self.proxies = {endpoint: make_proxy(seen_from(number, nodes)) for number, endpoint in enumerate(PROXIES[:proxies])}
        self.brokers = {endpoint: make_broker(endpoint) for endpoint in BROKERS}
        self.table = MemoryTable()
        self.gateway = self.make_gateway()
        self.delivered: Counter[int] = Counter()
        self.resolved: dict[int, bool] = {}
        self.signals: dict[tuple[EndpointID, int], Signal] = {}
        self.positions = {endpoint: count(1) for endpoint in PROXIES}
        self.dead: set[EndpointID] = set()

    def make_gateway(self) -> gateway.core.Core:
        core = gateway.core.Core(instance=1, generation=1, signals=self.table)
        core.step(ge.ProxiesChanged(tuple(ge.Replica(endpoint, 0) for endpoint in self.proxies)), 0.0)
        core.step(ge.Opened(1, UIN, 0), 0.0)
        core.step(ge.Join(1, 1, wants(ROOM)), 0.0)
        core.step(END_OF_TURN, 0.0)
        return core

    def lost(self) -> bool:
        return self.chance.random() < self.loss

    def run(self, signals: int) -> None:
        """Send one signal after the other, each until its outcome is known."""
        for number in range(1, signals + 1):
            record = encode(Kind.SIGNAL, ROOM, b"go", number, flags=Flag.TO_ROOM)
            self.do(self.sender.offer(Signal(record, number, 1, self.receipts), self.now))
            while (due := self.sender.next_deadline()) < NEVER:
                if self.chance.random() < self.restarts:
                    self.gateway = self.make_gateway()
                self.now = due
                self.do(self.sender.tick(self.now))
            self.now += TRY_S

    def do(self, effects: Iterable[object]) -> None:
        for effect in effects:
            if isinstance(effect, SendCopies):
                record = effect.signal.record
                for copy in range(len(PROXIES)):
                    endpoint = PROXIES[copy % len(self.proxies)]
                    if endpoint in self.dead:
                        self.do(self.sender.copy_done(effect.signal, Failure("UNAVAILABLE", "the proxy is dead")))
                        continue
                    position = next(self.positions[endpoint])
                    self.signals[endpoint, position] = effect.signal
                    self.at_proxy(endpoint, pe.BatchPublished(1, record, 1, position, copy, self.receipts))
            else:
                signal = effect.signal  # type: ignore[attr-defined]
                self.resolved[signal.message_id] = signal.failure is None

    def at_proxy(self, endpoint: EndpointID, event: pe.Event) -> None:
        for effect in self.proxies[endpoint].step(event, self.now):
            match effect:
                case SendRecords(peer, records, _, token):
                    arrived = peer not in self.dead and not self.lost()
                    if arrived:
                        self.at_broker(peer, records)
                    self.at_proxy(endpoint, Settled([(token, arrived)]))
                case pe.Reply(_, up_to, failures):
                    failure = Failure(failures[0].code, failures[0].text) if failures else None
                    self.do(self.sender.copy_done(self.signals.pop((endpoint, up_to)), failure))
                case pe.Delivered(_, ids, gateway):
                    self.do(self.sender.delivered(ids, gateway))

    def at_broker(self, endpoint: EndpointID, records: list[bytes]) -> None:
        data = b"".join(records)
        received = RecordsReceived(PROXIES[0], data, 0, len(data), len(records))
        for effect in self.brokers[endpoint].step(received, self.now):
            assert isinstance(effect, SendRecords)
            if not self.lost():
                self.at_gateway(effect.records)

    def at_gateway(self, records: list[bytes]) -> None:
        data = b"".join(records)
        assert not self.gateway.step(RecordsReceived(BROKERS[0], data, 0, len(data), len(records)), self.now)
        for effect in self.gateway.step(END_OF_TURN, self.now):
            match effect:
                case ge.Deliver(_, written, number):
                    assert number == 1
                    self.delivered[int.from_bytes(written[16:24], "little")] += 1
                case ge.SendDelivered(peers, ids):
                    for peer in peers:
                        if not self.lost():
                            self.at_proxy(peer, pe.SignalsDelivered(ids, GATEWAY))


@pytest.mark.parametrize("loss", [0.1, 0.3, 0.5])
def test_without_receipts_the_loss_is_that_of_three_independent_ways(loss: float) -> None:
    seed, signals = 4, 4000
    world = World(seed, loss)
    world.run(signals)
    expected = (1 - (1 - loss) ** 2) ** 3
    error = sqrt(expected * (1 - expected) / signals)
    measured = 1 - len(world.delivered) / signals
    assert abs(measured - expected) < 4 * error, f"seed {seed}: lost {measured:.4f}, expected {expected:.4f} ± {error:.4f}"
    assert set(world.delivered.values()) == {1}


def test_one_copy_alone_would_lose_more() -> None:
    """The figure above is the work of the copies: without them it is far outside of it."""
    seed, signals = 4, 4000
    world = World(seed, 0.3)
    for number in range(1, signals + 1):
        record = encode(Kind.SIGNAL, ROOM, b"go", number, flags=Flag.TO_ROOM)
        if not world.lost():
            world.at_broker(BROKERS[0], [record])
    alone = signals - len(world.delivered)
    assert alone / signals > 3 * (1 - (1 - 0.3) ** 2) ** 3, f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_with_receipts_repeats_bring_it_or_the_sender_knows(seed: int) -> None:
    signals = 1000
    world = World(seed, 0.3, receipts=True, restarts=0.2)
    world.run(signals)
    assert len(world.resolved) == signals, f"seed {seed}"
    told = {number for number, delivered in world.resolved.items() if delivered}
    assert told <= set(world.delivered), f"seed {seed}: a receipt for what was not delivered"
    assert set(world.delivered.values()) == {1}, f"seed {seed}: delivered twice"
    # (1-(1-p)²)³ to the fourth is 0.0003: more than 5 of 1000 has a chance below one in a million.
    assert signals - len(world.delivered) <= 5, f"seed {seed}"
    assert world.sender.counters.repeated > 100


@pytest.mark.parametrize(("nodes", "proxies"), [(3, 3), (2, 2), (2, 3), (1, 2), (0, 3)])
def test_the_loss_of_one_node_takes_no_signal(nodes: int, proxies: int) -> None:
    """Nodes of a proxy and a broker; every other one is a process of its own, which may be lost as well."""
    alone = [{one} for one in (*PROXIES[nodes:proxies], *BROKERS[nodes:])]
    for lost in [*({PROXIES[node], BROKERS[node]} for node in range(nodes)), *alone]:
        world = World(3, 0.0, nodes=nodes, proxies=proxies)
        world.dead = lost
        world.run(300)
        assert len(world.delivered) == 300, f"without {lost}"


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        world = World(11, 0.3, receipts=True, restarts=0.1)
        world.run(300)
        runs.append((world.delivered, world.resolved, world.now, world.sender.counters))
    assert runs[0] == runs[1]
