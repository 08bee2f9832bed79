"""The shells of router, relay and broker: control messages, heartbeats with digests, snapshots, databases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import broker.core
import cluster.membership.events as ev
import relay.core
from cluster.core.contract import TICK, RecordsReceived, SendControl, SendRecords, Settle, Settled
from cluster.links.api import Outcome, PeerState
from cluster.membership.map.anti_entropy import is_anti_entropy
from cluster.membership.map.lww_map import Key, LwwMap
from cluster.membership.map.updates import Chunk, Update, decode_messages
from cluster.membership.member.core import MemberCore
from cluster.membership.replica.core import ReplicaCore
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_instance
from tests.sim.cluster.process import Process
from tests.sim.cluster.registry import POLL_S, Node

LOST_WRITES = 3
"""Changes that a crash takes with it, because databases are written behind."""
GONE_GATEWAY_S = 3.0
LOAD_S = 0.05
NO_SNAPSHOT_S = 0.2


class StoreProcess(Process):
    """What all of them have in common."""

    core: MemberCore

    def tick(self) -> None:
        """See `Process`."""
        self.step(TICK)

    def deadline(self) -> float:
        """See `Process`."""
        return self.core.next_deadline()

    def step(self, event: ev.Event) -> Outcome:
        """Give the core an event and do what it asks for."""
        outcome = Outcome.TAKEN
        if self.alive:
            effects = self.core.step(event, self.world.now)
            if isinstance(event, RecordsReceived):
                self.watch_records(event, effects)
            elif isinstance(event, Settled):
                self.watch_settled(effects)
            for effect in effects:
                if isinstance(effect, Settle):
                    outcome = effect.outcome
                self.perform(effect)
        return outcome

    def watch_records(self, event: RecordsReceived, effects: list[ev.Effect]) -> None:
        """What a batch of records has brought."""

    def watch_settled(self, effects: list[ev.Effect]) -> None:
        """What leaves because of what was settled."""

    def perform(self, effect: ev.Effect) -> None:
        """One effect."""
        match effect:
            case SendRecords(peer, records, lane, token):
                self.links.send_records(peer, records, lane, token, self.world.now)
            case SendControl(peer, messages, token):
                self.confirming(messages)
                self.links.send_control(peer, messages, token, self.world.now)
            case ev.SetAttachment(peer, attachment):
                self.links.set_attachment(peer, attachment, self.world.now)
            case ev.TakeSnapshot(source, partition, partitions):
                self.world.snapshots.take(self, source, partition, partitions)
            case ev.BecomeInit():
                self.set_state("Init")
            case ev.BecomeRunning():
                self.serve()
            case Settle(outcome):
                assert outcome is not Outcome.MALFORMED, "a whole batch is called malformed"

    def serve(self) -> None:
        """The map is complete."""
        self.set_state("Running")

    def confirming(self, messages: list[bytes]) -> None:
        """Control messages leave, confirmations among them."""

    def take_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """As a shell's `on_control`."""
        changes = list[Update]()
        for data in messages:
            control = control_pb2.Control.FromString(data)
            if control.HasField("gateway_messages"):
                changes += decode_messages(control.gateway_messages)
            elif control.HasField("absence"):
                self.world.counts["feedback"] += 1
                self.step(ev.AbsenceReceived(peer, control.absence.as_of, list(control.absence.rooms)))
            elif is_anti_entropy(control):
                self.step(ev.AntiEntropyReceived(peer, control))
        return self.step(ev.MessagesReceived(peer, changes)) if changes else Outcome.TAKEN

    def take_state(self, peer: EndpointID, state: PeerState) -> None:
        """See `Process`."""
        if state is PeerState.DEAD:
            self.step(ev.PeerDead(peer))
        elif state is PeerState.ALIVE:
            self.step(ev.PeerAlive(peer))

    def take_answer(self, peer: EndpointID, attachment: bytes) -> None:
        """A router or gateway answered our heartbeat."""
        state = control_pb2.SubscriptionState.FromString(attachment)
        digest = state.digest if state.HasField("digest") and self.world.variant.digests else None
        self.step(ev.SubscriptionReply(peer, state.subscribed, digest))


class ReplicaProcess(StoreProcess):
    """A router or relay replica. `place.kept` is its database: what was written, in order; a Key is a delete."""

    core: ReplicaCore

    def make_core(self, **options: Any) -> ReplicaCore:
        """The role's core."""
        raise NotImplementedError

    def start_core(self) -> None:
        """See `Process`."""
        world = self.world
        self.core = self.make_core(
            endpoint=self.endpoint,
            partition=self.place.partition,
            heartbeat_s=world.heartbeat_s,
            dead_after=world.link_options.dead_after,
            poll_interval_s=POLL_S,
            gone_gateway_s=GONE_GATEWAY_S,
        )
        if self.place.kept is None:
            self.place.kept = []
        age = world.rng.choice([1.0, 200.0, 400.0]) if self.place.runs > 1 else None
        world.wire.after(0.01, lambda: self.do(lambda: self.opened(age)))

    def opened(self, age: float | None) -> None:
        """The database is open."""
        self.step(ev.StoreOpened(age))

    def on_view(self) -> None:
        """See `Process`."""
        view, role = self.view, self.place.role
        replicas = tuple(ev.Replica(n.endpoint, n.partition, n.running) for n in view.of_role(role) if n.endpoint != self.endpoint)
        gateways = tuple(ev.Gateway(n.endpoint, n.instance, n.generation) for n in view.of_role("gateway"))
        brokers = ev.NO_OTHER
        if role == "router":
            known = tuple(ev.Replica(node.endpoint, node.partition) for node in view.of_role("broker"))
            brokers = ev.OtherRole(view.count("broker"), replicas=known)
        self.step(ev.ClusterChanged(view.version, view.count(role), replicas, brokers, gateways))

    def take_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """See `Process`."""
        self.step(Settled(settled))

    def take_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """See `Process`."""
        if reply:
            self.take_answer(peer, attachment)
        elif attachment:
            rule = control_pb2.BrokerSubscription.FromString(attachment)
            return self.core.heartbeat(peer, rule.partition, rule.partitions, self.world.now).SerializeToString()
        return b""

    def perform(self, effect: ev.Effect) -> None:
        """See `StoreProcess`."""
        match effect:
            case ev.Persist(puts, deletes):
                self.place.kept += [*puts, *deletes]
            case ev.RewriteStore(chunks):
                self.place.kept[:] = [change for chunk in chunks for change in changes_of(chunk)]
            case ev.LoadStore():
                self.world.wire.after(LOAD_S, lambda: self.do(self._load))
            case _:
                super().perform(effect)

    def _load(self) -> None:
        stored: dict[Key, Update] = {}
        for item in self.place.kept:
            if isinstance(item, Key):
                stored.pop(item, None)
            else:
                stored[Key(item.group, item.member, gateway_instance(item.id))] = item
        kept = LwwMap()
        kept.apply(stored.values(), 0.0)
        for chunk in kept.snapshot():
            self.step(ev.StoreChunk(chunk))
        self.step(ev.StoreLoaded())

    def crash(self) -> None:
        """See `Process`."""
        super().crash()
        del self.place.kept[max(0, len(self.place.kept) - LOST_WRITES) :]


class RouterProcess(ReplicaProcess):
    """A router replica."""

    def make_core(self, **options: Any) -> ReplicaCore:
        """See `ReplicaProcess`."""
        self.revived: dict[EndpointID, float] = {}
        """When those whom it knows came to life, again or for the first time."""
        return self.world.variant.router(membership=self.world.variant.membership(self.world.is_true), **options)

    def take_state(self, peer: EndpointID, state: PeerState) -> None:
        """See `Process`."""
        if state is PeerState.ALIVE:
            self.revived[peer] = self.world.now
        super().take_state(peer, state)

    def peer_roles(self) -> tuple[str, ...]:
        """See `Process`."""
        return ("router", "broker", "gateway")

    def confirming(self, messages: list[bytes]) -> None:
        """See `ReplicaProcess`."""
        self.world.watch.confirmations(self, messages)

    def perform(self, effect: ev.Effect) -> None:
        """See `StoreProcess`."""
        if isinstance(effect, ev.RoomsMarked):
            self.world.watch.marks_confirmed(self, effect.request)
        super().perform(effect)


class RelayProcess(ReplicaProcess):
    """A relay replica."""

    core: relay.core.Core

    def make_core(self, **options: Any) -> ReplicaCore:
        """See `ReplicaProcess`."""
        devices = self.world.variant.devices(self.world.is_true_device, self.world.shape.policy)
        return self.world.variant.relay(devices=devices, **options)

    def peer_roles(self) -> tuple[str, ...]:
        """See `Process`."""
        return ("relay", "proxy", "broker", "gateway")

    def take_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """See `Process`."""
        return self.step(RecordsReceived(peer, data, start, end, count))

    def watch_records(self, event: RecordsReceived, effects: list[ev.Effect]) -> None:
        """See `StoreProcess`."""
        self.world.watch.relayed(self, event.data[event.start : event.end], effects)


class BrokerProcess(StoreProcess):
    """A broker replica."""

    def start_core(self) -> None:
        """See `Process`."""
        world = self.world
        self.core: broker.core.Core = world.variant.broker(
            endpoint=self.endpoint,
            partition=self.place.partition,
            heartbeat_s=world.heartbeat_s,
            poll_interval_s=POLL_S,
            gone_gateway_s=GONE_GATEWAY_S,
            membership=world.variant.membership(world.is_true),
            through_relays=world.shape.through_relays,
        )
        self.taking: dict[EndpointID, list[Update]] = {}
        """What came of snapshots that are under way."""
        self.layout_at = world.now
        """Since when it goes by its view's number of brokers."""
        self._count = 1
        self.loaded: list[Update] | None = None
        """What the snapshots that were taken whole contained; None before the first."""
        world.wire.after(0.01, lambda: self.do(self.tick))
        if world.variant.serve_before_snapshot:
            self.core.state = broker.core.State.RUNNING
            world.wire.after(0.03, lambda: self.do(self.serve))

    def peer_roles(self) -> tuple[str, ...]:
        """See `Process`."""
        return ("router", "gateway", "broker", "relay") if self.world.shape.through_relays else ("router", "gateway", "broker")

    def is_peer(self, node: Node) -> bool:
        """Of relays those that run."""
        return super().is_peer(node) and (node.running or node.role != "relay")

    def on_view(self) -> None:
        """See `Process`."""
        view = self.view
        if view.count("broker") != self._count:
            self._count, self.layout_at = view.count("broker"), self.world.now
        routers, brokers, relays = (view.running(role) for role in ("router", "broker", "relay"))
        through = relays if self.world.shape.through_relays else ()
        self.step(
            ev.ClusterChanged(
                view.version,
                view.count("broker"),
                _replicas(n for n in brokers if n.endpoint != self.endpoint),
                ev.NO_OTHER,
                tuple(ev.Gateway(n.endpoint, n.instance, n.generation) for n in view.of_role("gateway")),
                ev.OtherRole(view.count("router"), view.next("router"), _replicas(routers)),
                ev.OtherRole(view.count("relay"), 0, _replicas(through)) if through else ev.NO_OTHER,
            )
        )

    def take_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """See `Process`."""
        return self.step(RecordsReceived(peer, data, start, end, count))

    def watch_records(self, event: RecordsReceived, effects: list[ev.Effect]) -> None:
        """See `StoreProcess`."""
        self.world.watch.handled(self, event.peer, event.data[event.start : event.end], effects)

    def watch_settled(self, effects: list[ev.Effect]) -> None:
        """See `StoreProcess`."""
        self.world.watch.released(self, effects)

    def take_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """See `Process`."""
        if self.world.shape.through_relays:
            self.step(Settled(settled))

    def take_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """See `Process`."""
        if reply:
            self.take_answer(peer, attachment)
        return b""

    def perform(self, effect: ev.Effect) -> None:
        """See `StoreProcess`."""
        if isinstance(effect, ev.TakeSnapshot):
            self.taking[effect.source] = []
        super().perform(effect)

    def serve(self) -> None:
        """A broker that serves knows all that its snapshots contained."""
        assert self.loaded is not None, "a broker serves that has taken no snapshot"
        for change in self.loaded:
            instance = gateway_instance(change.id)
            known = self.core.membership.get(change.group, change.member, instance)
            old = change.id < self.core.membership.floor(instance)
            assert old or (known is not None and known[0] >= change.id), "a broker serves that lacks what its snapshot had"
        self.set_state("Running")


@dataclass(eq=False)
class _Taking:
    asker: StoreProcess
    source: ReplicaProcess
    chunks: Iterator[Chunk]
    over: bool = False


class Snapshots:
    """Snapshots between processes, by gRPC: in order and without loss, or broken off. A new one ends the one before."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._under_way: dict[tuple[EndpointID, EndpointID], _Taking | None] = {}

    def take(self, asker: StoreProcess, source: EndpointID, partition: int, partitions: int) -> None:
        """Begin."""
        key = (asker.endpoint, source)
        before = self._under_way.get(key)
        if before is not None:
            before.over = True
        self._under_way[key] = None
        wire = self._world.wire

        def begin() -> None:
            found = self._world.by_endpoint.get(source)
            if not asker.alive:
                return
            unreachable = not isinstance(found, ReplicaProcess) or not found.alive or found.paused
            if unreachable or self._apart(asker, found) or wire.chance(0.1):
                wire.after(NO_SNAPSHOT_S, lambda: self._finish(asker, source, "unreachable"))
                return
            request = ev.SnapshotRequested(1, asker.endpoint, asker.place.role, partition, partitions)
            (effect,) = found.core.step(request, self._world.now)
            if isinstance(effect, ev.ServeSnapshot):
                taking = self._under_way[key] = _Taking(asker, found, effect.chunks)
                wire.after(wire.hop(), lambda: self._part(taking))
            else:
                wire.after(wire.hop(), lambda: self._finish(asker, source, "refused"))

        wire.after(wire.hop(), begin)

    def _part(self, taking: _Taking) -> None:
        asker, source, wire = taking.asker, taking.source, self._world.wire
        if taking.over or not asker.alive:
            return
        if not source.alive or self._apart(asker, source) or wire.chance(0.02):
            wire.after(NO_SNAPSHOT_S, lambda: self._finish(asker, source.endpoint, "broken"))
            return
        if source.paused:
            wire.after(NO_SNAPSHOT_S, lambda: self._part(taking))
            return
        chunk = next(taking.chunks, None)
        if chunk is None:
            self._finish(asker, source.endpoint, None)
            return

        def take() -> None:
            if isinstance(asker, BrokerProcess):
                asker.taking.setdefault(source.endpoint, []).extend(changes_of(chunk))
            asker.step(ev.SnapshotChunk(source.endpoint, chunk))

        asker.do(take)
        wire.after(wire.hop(), lambda: self._part(taking))

    def _finish(self, asker: StoreProcess, source: EndpointID, error: str | None) -> None:
        self._under_way.pop((asker.endpoint, source), None)

        def take() -> None:
            if isinstance(asker, BrokerProcess) and error is None:
                asker.loaded = (asker.loaded or []) + asker.taking.pop(source, [])
            asker.step(ev.SnapshotFinished(source, error))

        asker.do(take)

    def _apart(self, one: Process, other: Process) -> bool:
        wire = self._world.wire
        return bool(wire.is_cut(one.address, other.address) or wire.is_cut(other.address, one.address))


def _replicas(nodes: Iterable[Node]) -> tuple[ev.Replica, ...]:
    return tuple(ev.Replica(n.endpoint, n.partition) for n in nodes)


def changes_of(chunk: Chunk) -> list[Update]:
    """The logins and logouts of a part of a snapshot."""
    return LwwMap().merge(chunk, 0.0).changes
