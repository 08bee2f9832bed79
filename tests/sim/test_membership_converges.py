"""Real cores of 2 routers and 2 brokers on a seeded network that drops, repeats, delays and cuts, while a router dies.

What must hold, whatever happens: when a router confirms a join or leave, every broker that is subscribed to it knows
it; and when the faults are over, every router and every broker knows exactly what the gateways last said.

A failure prints its seed; the same seed gives the same run.

Source: seed 004 §5 (consistency of Gateway Messages), DESIGN sections 9 and 10.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

import broker.core
import broker.events as be
import pixiu.replicas.events as re
import router.core
from broker.feeds import FeedState
from pixiu.ids import EndpointID, gateway_instance, gateway_msg_id
from pixiu.partition import rendezvous
from pixiu.softstore import Change, Chunk, Key, Membership, decode_messages, encode_messages
from pixiu.wire.v1 import control_pb2

DROP, REPEAT, ACK_LOST = 0.08, 0.05, 0.04
DELAY_S = (0.001, 0.03)
LOSS_NOTICED_S = 0.05
HEARTBEAT_S, DEAD_AFTER = 1.0, 4
VIEW_LAG_S = 0.3
FAULTS_S, QUIET_S = 60.0, 40.0
ROOMS, USERS = 5, 4
GATEWAYS = 2
LOST_WRITES = 3
"""Changes that a crash takes with it, because the Router DB is written behind."""


class SmallChunks(Membership):
    """Snapshots of many parts, so that much happens between the first and the last."""

    __slots__ = ()

    def snapshot(self, partition: int = 0, partitions: int = 1, chunk_entries: int = 2) -> Iterator[Chunk]:
        return super().snapshot(partition, partitions, chunk_entries)


@dataclass(eq=False)
class Process:
    """One run of a role on the network."""

    endpoint: EndpointID
    role: str
    alive: bool = True
    running: bool = False
    attachments: dict[EndpointID, bytes] = field(default_factory=dict)
    cut_off: set[EndpointID] = field(default_factory=set)
    """Peers that heartbeats called dead though they live: nothing passes."""


@dataclass(eq=False)
class RouterProcess(Process):
    core: router.core.Core = field(kw_only=True)
    disk: list[Change | Key] = field(kw_only=True)
    """What was written, in order; a Key is a delete."""


@dataclass(eq=False)
class BrokerProcess(Process):
    core: broker.core.Core = field(kw_only=True)


@dataclass(eq=False)
class GatewayProcess(Process):
    instance: int = 0
    counter: int = 0
    pending: dict[tuple[int, int], tuple[Change, float]] = field(default_factory=dict)
    """(room, UIN) → the newest unconfirmed change and when to send it (again)."""
    truth: dict[tuple[int, int], Change] = field(default_factory=dict)
    dead: set[EndpointID] = field(default_factory=set)


class World:
    """The network, the registry and the clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = True
        self.confirmed = 0
        self.crashes = 0
        self.checked = 0
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._next_endpoint = 100
        self.processes: dict[EndpointID, Process] = {}
        self.disks: list[list[Change | Key]] = [[], []]
        self.routers: list[RouterProcess] = []
        self.brokers: list[BrokerProcess] = []
        self.gateways = [GatewayProcess(self.new_endpoint(), "gateway", running=True, instance=i + 1) for i in range(GATEWAYS)]
        for gateway in self.gateways:
            self.processes[gateway.endpoint] = gateway
        for number in range(2):
            self.routers.append(self.start_router(number, None))
        for _ in range(2):
            self.brokers.append(self.start_broker())
        self.tell_views()
        self.after(0.0, self.beat)

    # --- time

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, action))

    def run_until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end

    def chance(self, probability: float) -> bool:
        return self.faults and self.rng.random() < probability

    def delay(self) -> float:
        return self.rng.uniform(*DELAY_S)

    # --- processes

    def new_endpoint(self) -> EndpointID:
        self._next_endpoint += 1
        return EndpointID(self._next_endpoint)

    def start_router(self, number: int, age_s: float | None) -> RouterProcess:
        core = router.core.Core(
            endpoint=self.new_endpoint(),
            partition=0,
            heartbeat_s=HEARTBEAT_S,
            dead_after=DEAD_AFTER,
            poll_interval_s=60.0,
            gone_gateway_s=3600.0,
            membership=SmallChunks(),
        )
        process = RouterProcess(core.endpoint, "router", core=core, disk=self.disks[number])
        self.processes[core.endpoint] = process
        self.after(0.01, lambda: self.step_router(process, re.StoreOpened(age_s)))
        self.after(0.02, lambda: self.tick(process))
        return process

    def start_broker(self) -> BrokerProcess:
        core = broker.core.Core(
            endpoint=self.new_endpoint(),
            partition=0,
            heartbeat_s=HEARTBEAT_S,
            poll_interval_s=60.0,
            gone_gateway_s=3600.0,
            membership=SmallChunks(),
        )
        process = BrokerProcess(core.endpoint, "broker", core=core)
        self.processes[core.endpoint] = process
        self.after(0.02, lambda: self.tick(process))
        return process

    def in_sync(self) -> bool:
        """Whether both routers run, reach each other, and know all that the other knew."""
        one, other = self.routers
        return all(
            me.alive
            and me.running
            and not me.cut_off
            and peer.endpoint in me.core.subscribers
            and me.core.in_sync_with(peer.endpoint)
            for me, peer in ((one, other), (other, one))
        )

    def crash_router(self, number: int) -> None:
        """Kill a router; its view entry goes with its session, heartbeats find it dead, and it starts again."""
        process = self.routers[number]
        process.alive = False
        self.crashes += 1
        del process.disk[max(0, len(process.disk) - LOST_WRITES) :]
        self.after(DEAD_AFTER * HEARTBEAT_S, lambda: self.say_dead(process.endpoint))
        self.after(self.rng.uniform(0.1, 10.0), lambda: self.restart_router(number))

    def restart_router(self, number: int) -> None:
        del self.processes[self.routers[number].endpoint]
        self.routers[number] = self.start_router(number, self.rng.choice([1.0, 200.0, 400.0]))
        self.tell_views()

    def say_dead(self, endpoint: EndpointID) -> None:
        for process in list(self.processes.values()):
            if process.alive and process.endpoint != endpoint:
                self.peer_state(process, endpoint, dead=True)

    def peer_state(self, process: Process, peer: EndpointID, *, dead: bool) -> None:
        if isinstance(process, RouterProcess):
            self.step_router(process, re.PeerDead(peer) if dead else re.PeerAlive(peer))
        elif isinstance(process, BrokerProcess):
            self.step_broker(process, be.PeerDead(peer) if dead else be.PeerAlive(peer))
        elif isinstance(process, GatewayProcess):
            (process.dead.add if dead else process.dead.discard)(peer)

    def cut(self, one: Process, other: Process) -> None:
        """Two live processes lose each other for some seconds."""
        one.cut_off.add(other.endpoint)
        other.cut_off.add(one.endpoint)

        def notice(dead: bool) -> None:
            for me, peer in ((one, other), (other, one)):
                if me.alive and peer.endpoint in me.cut_off:
                    if not dead:
                        me.cut_off.discard(peer.endpoint)
                    self.peer_state(me, peer.endpoint, dead=dead)

        self.after(DEAD_AFTER * HEARTBEAT_S, lambda: notice(True))
        self.after(DEAD_AFTER * HEARTBEAT_S + self.rng.uniform(0.5, 5.0), lambda: notice(False))

    # --- registry

    def tell_views(self) -> None:
        for process in list(self.processes.values()):
            self.after(self.rng.uniform(0.0, VIEW_LAG_S), lambda process=process: self.tell_view(process))  # type: ignore[misc]

    def tell_view(self, process: Process) -> None:
        if not process.alive:
            return
        gateways = [(g.endpoint, g.instance, 1) for g in self.gateways]
        if isinstance(process, RouterProcess):
            replicas = tuple(re.Replica(r.endpoint, 0, r.running) for r in self.routers if r is not process)
            brokers = frozenset(b.endpoint for b in self.brokers)
            self.step_router(process, re.ClusterChanged(1, 1, replicas, brokers, tuple(re.Gateway(*g) for g in gateways)))
        elif isinstance(process, BrokerProcess):
            routers = tuple(be.Replica(r.endpoint, 0) for r in self.routers if r.running)
            self.step_broker(process, be.ClusterChanged(1, 1, 1, 1, routers, (), tuple(be.Gateway(*g) for g in gateways)))

    # --- network

    def send(self, source: Process, peer: EndpointID, messages: list[bytes], token: int) -> None:
        def settle(handled: bool) -> None:
            if token and source.alive:
                self.settled(source, token, handled)

        target = self.processes.get(peer)
        lost = target is None or not target.alive or peer in source.cut_off or self.chance(DROP)
        if lost or target is None:
            self.after(LOSS_NOTICED_S, lambda: settle(False))
            return
        for copy in range(2 if self.chance(REPEAT) else 1):
            first = copy == 0

            def arrive(first: bool = first) -> None:
                if not target.alive:
                    settle(False)
                    return
                self.deliver(target, source.endpoint, messages)
                if first:
                    handled = not self.chance(ACK_LOST)
                    self.after(self.delay() if handled else LOSS_NOTICED_S, lambda: settle(handled))

            self.after(self.delay(), arrive)

    def settled(self, process: Process, token: int, handled: bool) -> None:
        if isinstance(process, RouterProcess):
            self.step_router(process, re.Settled([(token, handled)]))

    def deliver(self, target: Process, source: EndpointID, messages: list[bytes]) -> None:
        for data in messages:
            control = control_pb2.Control.FromString(data)
            changes = decode_messages(control.gateway_messages)
            if isinstance(target, RouterProcess) and changes:
                self.step_router(target, re.MessagesReceived(source, changes))
            elif isinstance(target, BrokerProcess) and changes:
                self.step_broker(target, be.MessagesReceived(source, changes))
            elif isinstance(target, GatewayProcess):
                self.confirm(target, list(control.gateway_confirm.ids))

    def beat(self) -> None:
        """Everybody heartbeats those that it has something to say to, and they answer."""
        self.after(HEARTBEAT_S, self.beat)
        for process in list(self.processes.values()):
            for peer, attachment in process.attachments.items() if process.alive else ():
                if attachment and peer not in process.cut_off and not self.chance(DROP):
                    self.after(self.delay(), lambda p=process, peer=peer, a=attachment: self.heartbeat(p, peer, a))  # type: ignore[misc]

    def heartbeat(self, process: Process, peer: EndpointID, attachment: bytes) -> None:
        target = self.processes.get(peer)
        if not isinstance(target, RouterProcess) or not target.alive:
            return
        rule = control_pb2.BrokerSubscription.FromString(attachment)
        subscribed = target.core.heartbeat(process.endpoint, rule.partition, rule.partitions, self.now)
        if self.chance(DROP):
            return

        def answer() -> None:
            if isinstance(process, RouterProcess):
                self.step_router(process, re.SubscriptionReply(peer, subscribed))
            elif isinstance(process, BrokerProcess):
                self.step_broker(process, be.SubscriptionReply(peer, subscribed))

        self.after(self.delay(), answer)

    # --- effects

    def tick(self, process: RouterProcess | BrokerProcess) -> None:
        if not process.alive:
            return
        if isinstance(process, RouterProcess):
            self.step_router(process, re.Tick())
        else:
            self.step_broker(process, be.Tick())
        due = process.core.next_deadline()
        assert due is not None
        # Looks again often: an event may bring the deadline forward.
        self.after(min(max(due - self.now, 0.001), 0.05), lambda: self.tick(process))

    def step_router(self, process: RouterProcess, event: re.Event) -> None:
        if not process.alive:
            return
        for effect in process.core.step(event, self.now):
            match effect:
                case re.SendControl(peer, messages, token):
                    self.check_confirmations(process, peer, messages)
                    self.send(process, peer, messages, token)
                case re.SetAttachment(peer, attachment):
                    process.attachments[peer] = attachment
                case re.Persist(puts, deletes):
                    process.disk += [*puts, *deletes]
                case re.RewriteStore(chunks):
                    process.disk[:] = [change for chunk in chunks for change in changes_of(chunk)]
                case re.LoadStore():
                    self.after(0.05, lambda: self.load(process))
                case re.TakeSnapshot(source):
                    self.take_snapshot(process, source)
                case re.BecomeRunning():
                    process.running = True
                    self.tell_views()

    def step_broker(self, process: BrokerProcess, event: be.Event) -> None:
        if not process.alive:
            return
        for effect in process.core.step(event, self.now):
            match effect:
                case be.SetAttachment(peer, attachment):
                    process.attachments[peer] = attachment
                case be.TakeSnapshot(source):
                    self.take_snapshot(process, source)
                case be.BecomeRunning():
                    process.running = True

    def load(self, process: RouterProcess) -> None:
        stored: dict[Key, Change] = {}
        for item in process.disk:
            if isinstance(item, Key):
                stored.pop(item, None)
            else:
                stored[Key(item.room, item.uin, gateway_instance(item.id))] = item
        kept = Membership()
        kept.apply(stored.values(), 0.0)
        for chunk in kept.snapshot():
            self.step_router(process, re.StoreChunk(chunk))
        self.step_router(process, re.StoreLoaded())

    def take_snapshot(self, asker: RouterProcess | BrokerProcess, source: EndpointID) -> None:
        """A gRPC stream: in order and without loss, or broken."""

        def finish(error: str | None) -> None:
            if isinstance(asker, RouterProcess):
                self.step_router(asker, re.SnapshotFinished(source, error))
            else:
                self.step_broker(asker, be.SnapshotFinished(source, error))

        def begin() -> None:
            target = self.processes.get(source)
            if not isinstance(target, RouterProcess) or not target.alive or source in asker.cut_off or self.chance(0.1):
                self.after(0.2, lambda: finish("unreachable"))
                return
            request = re.SnapshotRequested(1, asker.endpoint, asker.role, 0, 1)
            (effect,) = target.core.step(request, self.now)
            if isinstance(effect, re.ServeSnapshot):
                self.after(self.delay(), lambda: part(target, effect.chunks))
            else:
                self.after(self.delay(), lambda: finish("refused"))

        def part(target: RouterProcess, chunks: Iterator[Chunk]) -> None:
            if not target.alive or self.chance(0.02):
                self.after(0.2, lambda: finish("broken"))
                return
            chunk = next(chunks, None)
            if chunk is None:
                finish(None)
                return
            if isinstance(asker, RouterProcess):
                self.step_router(asker, re.SnapshotChunk(source, chunk))
            else:
                self.step_broker(asker, be.SnapshotChunk(source, chunk))
            self.after(self.delay(), lambda: part(target, chunks))

        self.after(self.delay(), begin)

    # --- gateways

    def change(self, gateway: GatewayProcess) -> None:
        """A user comes or goes."""
        room, uin = self.rng.randrange(ROOMS), self.rng.randrange(USERS)
        gateway.counter += 1
        before = gateway.truth.get((room, uin))
        change = Change(gateway_msg_id(gateway.instance, 1, gateway.counter), room, uin, before is None or not before.login)
        gateway.truth[room, uin] = change
        gateway.pending[room, uin] = (change, self.now)

    def send_pending(self, gateway: GatewayProcess) -> None:
        self.after(0.1, lambda: self.send_pending(gateway))
        usable = [r.endpoint for r in self.routers if r.running and r.endpoint not in gateway.dead]
        for (room, uin), (change, due) in list(gateway.pending.items()):
            if due <= self.now and usable:
                gateway.pending[room, uin] = (change, self.now + 1.0)
                self.send(gateway, EndpointID(rendezvous(room, usable)), encode_messages([change]), 0)

    def confirm(self, gateway: GatewayProcess, ids: list[int]) -> None:
        for pair, (change, _) in list(gateway.pending.items()):
            if change.id in ids:
                del gateway.pending[pair]
                self.confirmed += 1

    def check_confirmations(self, process: RouterProcess, peer: EndpointID, messages: list[bytes]) -> None:
        """At the moment of a confirmation every broker subscribed here knows the change, or a newer one of the key."""
        ids = [i for data in messages for i in control_pb2.Control.FromString(data).gateway_confirm.ids]
        gateway = next((g for g in self.gateways if g.endpoint == peer), None)
        for change in list(gateway.truth.values()) if ids and gateway is not None else []:
            if change.id not in ids:
                continue
            for target in self.brokers:
                feed = target.core.feeds[0] if target.core.feeds else None
                if target.endpoint not in process.core.subscribers or feed is None:
                    continue
                if feed.source == process.endpoint and feed.state is FeedState.LIVE:
                    known = target.core.membership.get(change.room, change.uin, gateway_instance(change.id))
                    assert known is not None, "a broker does not know a confirmed change"
                    assert known[0] >= change.id, "a broker does not know a confirmed change"
                    self.checked += 1


def changes_of(chunk: Chunk) -> list[Change]:
    kept = Membership()
    return kept.merge(chunk, 0.0).changes


def members(membership: Membership) -> list[Key]:
    return sorted(key for room in range(ROOMS) for key in membership.live_keys(room))


def run(seed: int) -> World:
    world = World(seed)
    rng = world.rng
    for gateway in world.gateways:
        world.after(0.0, lambda gateway=gateway: world.send_pending(gateway))  # type: ignore[misc]
    for _ in range(250):
        gateway = rng.choice(world.gateways)
        world.after(rng.uniform(0.0, FAULTS_S), lambda gateway=gateway: world.change(gateway))  # type: ignore[misc]
    for _ in range(rng.randint(1, 3)):
        number = rng.randrange(2)
        # One fault at a time for what is confirmed: while the replicas are cut off from each other, or have not made
        # up for it, a confirmed change may be in one of them only, and would die with it.
        world.after(
            rng.uniform(2.0, FAULTS_S - 20.0),
            lambda number=number: world.crash_router(number) if world.in_sync() else None,  # type: ignore[misc]
        )
    for _ in range(rng.randint(0, 3)):
        one, other = rng.sample([0, 1, 2, 3], 2)
        world.after(
            rng.uniform(2.0, FAULTS_S - 15.0),
            lambda one=one, other=other: world.cut(  # type: ignore[misc]
                *[([*world.routers, *world.brokers])[number] for number in (one, other)]
            ),
        )
    world.run_until(FAULTS_S)
    world.faults = False
    world.run_until(FAULTS_S + QUIET_S)
    return world


@pytest.mark.parametrize("seed", range(30))
def test_confirmed_joins_and_leaves_reach_every_router_and_every_broker(seed: int) -> None:
    world = run(seed)
    truth = sorted(
        Key(change.room, change.uin, gateway.instance)
        for gateway in world.gateways
        for change in gateway.truth.values()
        if change.login
    )
    assert [len(gateway.pending) for gateway in world.gateways] == [0, 0], seed
    assert world.confirmed > 100, seed
    assert world.checked > 50, seed
    processes: list[RouterProcess | BrokerProcess] = [*world.routers, *world.brokers]
    for process in processes:
        assert process.running, seed
        assert members(process.core.membership) == truth, (seed, process.role, process.endpoint)


def test_the_runs_have_faults_in_them() -> None:
    worlds = [run(seed) for seed in range(6)]
    assert sum(world.crashes for world in worlds) >= 4
    assert sum(b.core.counters.subscriptions_lost for world in worlds for b in world.brokers) > 6
    assert sum(r.core.forwards.counters.resent for world in worlds for r in world.routers) > 50


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = run(7), run(7)
    assert (one.confirmed, one.checked, one._order) == (other.confirmed, other.checked, other._order)
    assert [r.disk for r in one.routers] == [r.disk for r in other.routers]
