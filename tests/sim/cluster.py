"""Gateways, routers and brokers of a cluster: their production cores, each with a shell that is a few lines here.

Processes crash and start again at any time, live ones lose each other for seconds, and maps lose and regain entries as no
message would make them. Links, the registry and gRPC streams are played by the world: datagrams as `Network` has them,
a registry whose news take up to `VIEW_LAG_S`, streams that are in order and without loss, or break.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import broker.core
import broker.events as be
import gateway.core
import gateway.events as ge
import pixiu.replicas.events as re
import router.core
from broker.feeds import FeedState
from pixiu.healing import is_healing
from pixiu.ids import EndpointID, gateway_instance
from pixiu.partition import serves
from pixiu.record import Kind, encode
from pixiu.softstore import Change, Chunk, Key, Membership, decode_messages, encode_messages
from pixiu.wire.v1 import control_pb2
from tests.sim.network import Network
from tests.sim.watched import Watched

ACK_LOST = 0.04
LOSS_NOTICED_S = 0.05
HEARTBEAT_S, DEAD_AFTER = 1.0, 4
VIEW_LAG_S = 0.3
GONE_GATEWAY_S = 3.0
ROOMS, USERS = 6, 4
LOST_WRITES = 3
"""Changes that a crash takes with it, because the Router DB is written behind."""
PROXY = EndpointID(9)


@dataclass(frozen=True)
class Settings:
    """What a test may change: the shape of the cluster, and the faults."""

    routers: int = 1
    """Partitions, of two replicas each."""
    brokers: int = 1
    gateways: int = 2
    membership: type[Watched] = Watched
    digests: bool = True
    serve_before_snapshot: bool = False


@dataclass(eq=False)
class Process:
    """One run of a role on the network."""

    endpoint: EndpointID
    role: str
    partition: int = 0
    alive: bool = True
    running: bool = False
    registered: bool = True
    attachments: dict[EndpointID, bytes] = field(default_factory=dict)
    cut_off: set[EndpointID] = field(default_factory=set)
    """Peers that heartbeats call dead, or soon will: nothing passes."""


@dataclass(eq=False)
class RouterProcess(Process):
    core: router.core.Core = field(kw_only=True)
    disk: list[Change | Key] = field(kw_only=True)
    """What was written, in order; a Key is a delete."""


@dataclass(eq=False)
class BrokerProcess(Process):
    core: broker.core.Core = field(kw_only=True)
    snapshots: dict[EndpointID, list[Change]] = field(default_factory=dict)
    """What came of snapshots that are under way."""
    loaded: list[Change] | None = None
    """What the snapshots that were taken whole contained; None before the first."""


@dataclass(eq=False)
class GatewayProcess(Process):
    core: gateway.core.Core = field(kw_only=True)
    instance: int = field(kw_only=True)
    generation: int = field(kw_only=True)
    dead: set[EndpointID] = field(default_factory=set)


class Cluster(Network):
    """See the module."""

    def __init__(self, seed: int, settings: Settings, drop: float = 0.08, repeat: float = 0.05) -> None:
        super().__init__(seed, drop, repeat)
        self.settings = settings
        self.crashes = self.cuts = self.answered = self.checked = self.scrambled = self.delivered = self.feedbacks = 0
        self._next_endpoint = 100
        self.logins: list[Change] = []
        self.scrambled_keys: set[tuple[EndpointID, int, int]] = set()
        """(process, room, UIN): what it knows of these says nothing about the protocol until the end."""
        self.said: dict[int, Change] = {}
        """GatewayMsgID → what gateways said with it."""
        self.generations: dict[int, int] = {}
        self.processes: dict[EndpointID, Process] = {}
        self.disks: dict[tuple[int, int], list[Change | Key]] = {}
        self.routers: dict[tuple[int, int], RouterProcess] = {}
        self.brokers: dict[tuple[int, int], BrokerProcess] = {}
        self.gateways: list[GatewayProcess] = [self.start_gateway(number + 1) for number in range(settings.gateways)]
        for partition in range(settings.routers):
            for number in range(2):
                self.start_router((partition, number), None)
        for partition in range(settings.brokers):
            for number in range(2):
                self.start_broker((partition, number))
        self.tell_views()
        self.after(0.0, self.beat)

    # --- processes

    def _endpoint(self) -> EndpointID:
        self._next_endpoint += 1
        return EndpointID(self._next_endpoint)

    def is_true(self, key: Key, id_: int) -> bool:
        """Whether the gateway of a key lives and has exactly this login."""
        found = next((g for g in self.gateways if g.alive and g.instance == key.instance), None)
        return found is not None and found.core.rooms.presence.own.get(*key) == (id_, True)

    def start_gateway(self, instance: int) -> GatewayProcess:
        """Lease an instance, with its next generation."""
        generation = self.generations[instance] = self.generations.get(instance, 0) + 1
        core = gateway.core.Core(instance=instance, generation=generation)
        process = GatewayProcess(self._endpoint(), "gateway", running=True, core=core, instance=instance, generation=generation)
        self.processes[process.endpoint] = process
        self.after(0.02, lambda: self.tick(process))
        return process

    def start_router(self, place: tuple[int, int], age_s: float | None) -> None:
        """Start a replica: (partition, number)."""
        core = router.core.Core(
            endpoint=self._endpoint(),
            partition=place[0],
            heartbeat_s=HEARTBEAT_S,
            dead_after=DEAD_AFTER,
            poll_interval_s=60.0,
            gone_gateway_s=GONE_GATEWAY_S,
            membership=self.settings.membership(self.is_true),
        )
        process = RouterProcess(core.endpoint, "router", place[0], core=core, disk=self.disks.setdefault(place, []))
        self.routers[place] = self.processes[core.endpoint] = process
        self.after(0.01, lambda: self.step_router(process, re.StoreOpened(age_s)))
        self.after(0.02, lambda: self.tick(process))

    def start_broker(self, place: tuple[int, int]) -> None:
        """Start a replica: (partition, number)."""
        core = broker.core.Core(
            endpoint=self._endpoint(),
            partition=place[0],
            heartbeat_s=HEARTBEAT_S,
            poll_interval_s=60.0,
            gone_gateway_s=GONE_GATEWAY_S,
            membership=self.settings.membership(self.is_true),
        )
        process = BrokerProcess(core.endpoint, "broker", place[0], core=core)
        self.brokers[place] = self.processes[core.endpoint] = process
        self.after(0.02, lambda: self.tick(process))
        if self.settings.serve_before_snapshot:
            core.state = broker.core.State.RUNNING
            self.after(0.03, lambda: self.become_running(process))

    def crash(self, process: Process) -> None:
        """Kill it; its node goes with its session, heartbeats find it dead, and it starts again."""
        if not process.alive:
            return
        process.alive = process.running = False
        self.crashes += 1
        if isinstance(process, RouterProcess):
            del process.disk[max(0, len(process.disk) - LOST_WRITES) :]
        self.after(DEAD_AFTER * HEARTBEAT_S, lambda: self.vanish(process))
        self.after(self.rng.uniform(0.1, 8.0), lambda: self.restart(process))

    def vanish(self, process: Process) -> None:
        """Heartbeats and the registry agree that it is gone."""
        process.registered = False
        for other in list(self.processes.values()):
            if other.alive:
                self.peer_state(other, process.endpoint, dead=True)
        self.tell_views()

    def restart(self, process: Process) -> None:
        """Another run of the same replica; a gateway gets the same instance again, or another."""
        if isinstance(process, GatewayProcess):
            instance = self.rng.choice([process.instance, max(self.generations) + 1])
            if any(g.alive and g.instance == instance for g in self.gateways):
                instance = max(self.generations) + 1
            self.gateways[self.gateways.index(process)] = self.start_gateway(instance)
        elif isinstance(process, RouterProcess):
            place = next(place for place, found in self.routers.items() if found is process)
            self.start_router(place, self.rng.choice([1.0, 200.0, 400.0]))
        else:
            place = next(place for place, found in self.brokers.items() if found is process)
            self.start_broker(place)
        self.tell_views()

    def peer_state(self, process: Process, peer: EndpointID, *, dead: bool) -> None:
        """Heartbeats of `process` say so."""
        if isinstance(process, RouterProcess):
            self.step_router(process, re.PeerDead(peer) if dead else re.PeerAlive(peer))
        elif isinstance(process, BrokerProcess):
            self.step_broker(process, be.PeerDead(peer) if dead else be.PeerAlive(peer))
        elif isinstance(process, GatewayProcess):
            (process.dead.add if dead else process.dead.discard)(peer)
            self.tell_view(process)

    def cut(self, one: Process, other: Process) -> None:
        """Two live processes lose each other for some seconds."""
        if not one.alive or not other.alive or other.endpoint in one.cut_off:
            return
        self.cuts += 1
        one.cut_off.add(other.endpoint)
        other.cut_off.add(one.endpoint)

        def notice(dead: bool) -> None:
            for me, peer in ((one, other), (other, one)):
                if not dead:
                    me.cut_off.discard(peer.endpoint)
                if me.alive and (dead or peer.alive):
                    self.peer_state(me, peer.endpoint, dead=dead)

        self.after(DEAD_AFTER * HEARTBEAT_S, lambda: notice(True))
        self.after(DEAD_AFTER * HEARTBEAT_S + self.rng.uniform(0.5, 5.0), lambda: notice(False))

    def scramble(self) -> None:
        """A broker lacks an entry that it had; or somebody has a login again that is long over."""
        everybody: list[RouterProcess | BrokerProcess] = [*self.routers.values(), *self.brokers.values()]
        maps = [process for process in everybody if process.alive and process.running]
        if not maps:
            return
        process = self.rng.choice(maps)
        held = process.core.membership
        assert isinstance(held, Watched)
        live = [key for room in range(ROOMS) for key in held.live_keys(room)]
        instances = {g.instance for g in self.gateways if g.alive}
        partitions = self.settings.routers if process.role == "router" else self.settings.brokers
        old = [c for c in self.logins if gateway_instance(c.id) in instances and serves(process.partition, c.room, partitions)]
        old = [c for c in old if c.id >= held.floor(gateway_instance(c.id))]
        if isinstance(process, BrokerProcess) and live and self.rng.random() < 0.5:
            key = self.rng.choice(live)
            held.lose(key)
            room, uin = key.room, key.uin
        elif old:
            change = self.rng.choice(old)
            held.revive(change)
            room, uin = change.room, change.uin
        else:
            return
        self.scrambled += 1
        self.scrambled_keys.add((process.endpoint, room, uin))
        if isinstance(process, BrokerProcess):
            process.core.fanout.forget([room])

    # --- registry

    def tell_views(self) -> None:
        """Everybody hears of the registry's news, each at its own time."""
        for process in list(self.processes.values()):
            self.after(self.rng.uniform(0.0, VIEW_LAG_S), lambda process=process: self.tell_view(process))  # type: ignore[misc]

    def _registered(self, role: str) -> list[Process]:
        return [p for p in self.processes.values() if p.role == role and p.registered]

    def tell_view(self, process: Process) -> None:
        """The registry as it is now."""
        if not process.alive:
            return
        gateways = [(g.endpoint, g.instance, g.generation) for g in self._registered("gateway") if isinstance(g, GatewayProcess)]
        routers = [r for r in self._registered("router") if r is not process]
        brokers = [b for b in self._registered("broker") if b is not process]
        counts = self.settings.routers, self.settings.brokers
        if isinstance(process, RouterProcess):
            replicas = tuple(re.Replica(r.endpoint, r.partition, r.running) for r in routers)
            ends = frozenset(b.endpoint for b in brokers)
            event = re.ClusterChanged(1, counts[0], replicas, ends, tuple(re.Gateway(*g) for g in gateways))
            self.step_router(process, event)
        elif isinstance(process, BrokerProcess):
            sources = tuple(be.Replica(r.endpoint, r.partition) for r in routers if r.running)
            others = tuple(be.Replica(b.endpoint, b.partition) for b in brokers if b.running)
            told = tuple(be.Gateway(*g) for g in gateways)
            self.step_broker(process, be.ClusterChanged(1, counts[1], counts[0], counts[0], sources, others, told))
        elif isinstance(process, GatewayProcess):
            usable = tuple(ge.Replica(r.endpoint, r.partition) for r in routers if r.running and r.endpoint not in process.dead)
            self.step_gateway(process, ge.RoutersChanged(counts[0], usable))

    # --- network

    def send(self, source: Process, peer: EndpointID, messages: list[bytes], token: int) -> None:
        """Control messages over a link: settled as handled, or as lost."""

        def settle(handled: bool) -> None:
            if token and source.alive:
                self.settled(source, token, handled)

        def arrive(first: bool) -> None:
            target = self.processes[peer]
            if not target.alive:
                self.after(LOSS_NOTICED_S, lambda: settle(False))
                return
            self.deliver(target, source.endpoint, messages)
            if first:
                handled = not self.chance(ACK_LOST)
                self.after(self.delay() if handled else LOSS_NOTICED_S, lambda: settle(handled))

        unknown = peer not in self.processes or peer in source.cut_off
        if unknown or not self.datagram(source.endpoint, peer, messages, arrive):
            self.after(LOSS_NOTICED_S, lambda: settle(False))

    def settled(self, process: Process, token: int, handled: bool) -> None:
        """What became of a parcel."""
        if isinstance(process, RouterProcess):
            self.step_router(process, re.Settled([(token, handled)]))
        elif isinstance(process, GatewayProcess):
            self.step_gateway(process, ge.Settled([(token, handled)]))

    def deliver(self, target: Process, source: EndpointID, messages: list[bytes]) -> None:
        """What a shell's `on_control` does."""
        for data in messages:
            control = control_pb2.Control.FromString(data)
            changes = decode_messages(control.gateway_messages)
            absence = control.absence if control.HasField("absence") else None
            if isinstance(target, RouterProcess):
                if changes:
                    self.step_router(target, re.MessagesReceived(source, changes))
                elif absence is not None:
                    self.feedbacks += 1
                    self.step_router(target, re.AbsenceReceived(source, absence.as_of, list(absence.rooms)))
                elif is_healing(control):
                    self.step_router(target, re.HealingReceived(source, control))
            elif isinstance(target, BrokerProcess):
                if changes:
                    self.step_broker(target, be.MessagesReceived(source, changes))
                elif absence is not None:
                    self.step_broker(target, be.AbsenceReceived(source, absence.as_of, list(absence.rooms)))
                elif is_healing(control):
                    self.step_broker(target, be.HealingReceived(source, control))
            elif isinstance(target, GatewayProcess):
                if control.HasField("gateway_confirm"):
                    self.step_gateway(target, ge.Confirmed(source, list(control.gateway_confirm.ids)))
                elif is_healing(control):
                    self.step_gateway(target, ge.HealingReceived(source, control))
                elif control.HasField("fenced"):
                    self.step_gateway(target, ge.FenceReceived(source, control.fenced.floor))

    def beat(self) -> None:
        """Everybody heartbeats those that it has something to say to, and they answer."""
        self.after(HEARTBEAT_S, self.beat)
        for process in list(self.processes.values()):
            for peer, attachment in process.attachments.items() if process.alive else ():
                if attachment and peer not in process.cut_off and peer in self.processes:
                    self.heartbeat(process, self.processes[peer], attachment)

    def heartbeat(self, process: Process, target: Process, attachment: bytes) -> None:
        """One, and its answer."""

        def answered(state: control_pb2.SubscriptionState) -> None:
            digest = state.digest if state.HasField("digest") else None
            if isinstance(process, RouterProcess):
                self.step_router(process, re.SubscriptionReply(target.endpoint, state.subscribed, digest))
            elif isinstance(process, BrokerProcess):
                self.step_broker(process, be.SubscriptionReply(target.endpoint, state.subscribed, digest))

        def arrive(first: bool) -> None:
            if not target.alive or not first:
                return
            rule = control_pb2.BrokerSubscription.FromString(attachment)
            if isinstance(target, RouterProcess):
                state = target.core.heartbeat(process.endpoint, rule.partition, rule.partitions, self.now)
            else:
                assert isinstance(target, GatewayProcess)
                state = target.core.heartbeat(rule.partition, rule.partitions)
            if not self.settings.digests:
                state.ClearField("digest")
            answer = [state.SerializeToString()]
            if target.endpoint not in process.cut_off:
                self.datagram(target.endpoint, process.endpoint, answer, lambda first: answered(state) if first else None)

        self.datagram(process.endpoint, target.endpoint, [attachment], arrive)

    # --- shells

    def tick(self, process: RouterProcess | BrokerProcess | GatewayProcess) -> None:
        """The timer of a shell."""
        if not process.alive:
            return
        if isinstance(process, RouterProcess):
            self.step_router(process, re.Tick())
        elif isinstance(process, BrokerProcess):
            self.step_broker(process, be.Tick())
        else:
            self.step_gateway(process, ge.Tick())
        due = process.core.next_deadline()
        # Looks again often: an event may bring the deadline forward.
        self.after(0.05 if due is None else min(max(due - self.now, 0.001), 0.05), lambda: self.tick(process))

    def step_gateway(self, process: GatewayProcess, event: ge.Event) -> None:
        """An event, and the end of its turn of the loop."""
        if not process.alive:
            return
        for effect in process.core.step(event, self.now) + process.core.step(ge.EndOfTurn(), self.now):
            match effect:
                case ge.SendMembership(peer, messages, token):
                    changes = [Change(m.id, m.room, m.uin, m.login, m.reason) for m in messages]
                    self.said |= {change.id: change for change in changes}
                    self.send(process, peer, encode_messages(changes), token)
                case ge.SendControl(peer, controls):
                    self.send(process, peer, controls, 0)
                case ge.Answer(_, _, known):
                    self.answered += known
                case ge.Deliver():
                    self.delivered += 1
                case ge.Fenced():
                    raise AssertionError("a gateway that lives was taken for dead")

    def step_router(self, process: RouterProcess, event: re.Event) -> None:
        """An event."""
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
                case re.TakeSnapshot(source, partition, partitions):
                    self.take_snapshot(process, source, partition, partitions)
                case re.BecomeInit():
                    process.running = False
                    self.tell_views()
                case re.BecomeRunning():
                    process.running = True
                    self.tell_views()

    def step_broker(self, process: BrokerProcess, event: be.Event) -> None:
        """An event."""
        if not process.alive:
            return
        for effect in process.core.step(event, self.now):
            match effect:
                case be.SendControl(peer, messages):
                    self.send(process, peer, messages, 0)
                case be.SendRecords(peer, records):
                    self.records(process, peer, records)
                case be.SetAttachment(peer, attachment):
                    process.attachments[peer] = attachment
                case be.TakeSnapshot(source, partition, partitions):
                    process.snapshots[source] = []
                    self.take_snapshot(process, source, partition, partitions)
                case be.BecomeInit():
                    process.running = False
                    self.tell_views()
                case be.BecomeRunning():
                    self.become_running(process)

    def become_running(self, process: BrokerProcess) -> None:
        """A broker that serves knows all that its snapshots contained."""
        if not process.alive:
            return
        assert process.loaded is not None, "a broker serves that has taken no snapshot"
        for change in process.loaded:
            instance = gateway_instance(change.id)
            known = process.core.membership.get(change.room, change.uin, instance)
            old = change.id < process.core.membership.floor(instance)
            assert old or (known is not None and known[0] >= change.id), "a broker serves that lacks what its snapshot had"
        process.running = True
        self.tell_views()

    def records(self, source: Process, peer: EndpointID, records: list[bytes]) -> None:
        """A parcel of records to a gateway."""

        def arrive(first: bool) -> None:
            target = self.processes[peer]
            if isinstance(target, GatewayProcess) and target.alive:
                data = b"".join(records)
                assert target.core.records_arrived(ge.RecordsArrived(data, 0, len(data), len(records)))
                self.step_gateway(target, ge.Tick())

        if peer not in source.cut_off:
            self.datagram(source.endpoint, peer, records, arrive)

    def load(self, process: RouterProcess) -> None:
        """Read a Router DB."""
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

    def take_snapshot(self, asker: RouterProcess | BrokerProcess, source: EndpointID, partition: int, partitions: int) -> None:
        """A gRPC stream: in order and without loss, or broken."""

        def finish(error: str | None) -> None:
            if isinstance(asker, RouterProcess):
                self.step_router(asker, re.SnapshotFinished(source, error))
                return
            if error is None:
                asker.loaded = (asker.loaded or []) + asker.snapshots.pop(source, [])
            self.step_broker(asker, be.SnapshotFinished(source, error))

        def begin() -> None:
            target = self.processes.get(source)
            if not isinstance(target, RouterProcess) or not target.alive or source in asker.cut_off or self.chance(0.1):
                self.after(0.2, lambda: finish("unreachable"))
                return
            request = re.SnapshotRequested(1, asker.endpoint, asker.role, partition, partitions)
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
                asker.snapshots.setdefault(source, []).extend(changes_of(chunk))
                self.step_broker(asker, be.SnapshotChunk(source, chunk))
            self.after(self.delay(), lambda: part(target, chunks))

        self.after(self.delay(), begin)

    # --- clients

    def change(self, number: int, again: bool = True) -> None:
        """A user of a gateway joins a room, or leaves it; and often comes back at once."""
        process = self.gateways[number]
        if not process.alive:
            return
        room, uin = self.rng.randrange(ROOMS), self.rng.randrange(1, USERS + 1)
        self.toggle(process, room, uin)
        if again and self.rng.random() < 0.4:
            self.after(self.rng.uniform(0.002, 0.06), lambda: self.toggle(process, room, uin))

    def toggle(self, process: GatewayProcess, room: int, uin: int) -> None:
        """Joins when the user is not there, else leaves."""
        if not process.alive:
            return
        core, own = process.core, process.core.rooms.presence.own
        if uin not in core.index.clients:
            self.step_gateway(process, ge.Opened(uin, uin, True))
        if core.index.present(room, uin):
            self.step_gateway(process, ge.Leave(uin, [(room, None)]))
            return
        self.step_gateway(process, ge.Join(uin, 1, [(room, None)]))
        found = own.get(room, uin, process.instance)
        assert found is not None
        self.logins.append(Change(found[0], room, uin, True))

    def publish(self, number: int) -> None:
        """A message to a room, by any broker that serves it."""
        room = self.rng.randrange(ROOMS)
        serving = [b for b in self.brokers.values() if b.running and b.alive and serves(b.partition, room, self.settings.brokers)]
        if serving:
            record = encode(Kind.ROOM, room, b"hi", number + 1)
            self.step_broker(self.rng.choice(serving), be.RecordsReceived(PROXY, record, 0, len(record), 1))

    def check_confirmations(self, process: RouterProcess, peer: EndpointID, messages: list[bytes]) -> None:
        """At the moment of a confirmation every broker subscribed here knows the change, or a newer one of the key."""
        ids = [i for data in messages for i in control_pb2.Control.FromString(data).gateway_confirm.ids]
        for change in [self.said[i] for i in ids if serves(process.partition, self.said[i].room, self.settings.routers)]:
            for target in self.brokers.values():
                feed = target.core.feeds.get(process.partition)
                if not target.alive or target.endpoint not in process.core.subscribers or feed is None:
                    continue
                if feed.source == process.endpoint and feed.state is FeedState.LIVE and self._wants(target, change.room):
                    known = target.core.membership.get(change.room, change.uin, gateway_instance(change.id))
                    old = change.id < target.core.membership.floor(gateway_instance(change.id))
                    old = old or (target.endpoint, change.room, change.uin) in self.scrambled_keys
                    assert old or (known is not None and known[0] >= change.id), "a broker does not know a confirmed change"
                    self.checked += 1

    def _wants(self, target: BrokerProcess, room: int) -> bool:
        return serves(target.partition, room, self.settings.brokers)

    # --- what must hold in the end

    def truth(self, partition: int, partitions: int) -> list[tuple[int, int, int]]:
        """(GatewayMsgID, room, UIN) of all that is on live gateways, of a partition's rooms."""
        found = [e for g in self.gateways if g.alive for e in entries(g.core.rooms.presence.own)]
        return sorted(e for e in found if serves(partition, e[1], partitions))

    def differences(self) -> list[str]:
        """What routers and brokers have that is not so, or lack."""
        found: list[str] = []
        held: list[tuple[RouterProcess | BrokerProcess, int]] = [(r, self.settings.routers) for r in self.routers.values()]
        held += [(b, self.settings.brokers) for b in self.brokers.values()]
        for process, partitions in held:
            truth, mine = set(self.truth(process.partition, partitions)), set(entries(process.core.membership))
            if not process.running or truth != mine:
                found.append(
                    f"{process.role} {process.partition}/{process.endpoint} {'runs' if process.running else 'does not run'}: "
                    f"lacks {sorted(truth - mine)}, has too much {sorted(mine - truth)}"
                )
        return found


def entries(membership: Membership) -> list[tuple[int, int, int]]:
    """(GatewayMsgID, room, UIN) of all that is live."""
    found: list[tuple[int, int, int]] = []
    for room in range(ROOMS):
        for key in membership.live_keys(room):
            value = membership.get(*key)
            assert value is not None
            found.append((value[0], key.room, key.uin))
    return sorted(found)


def changes_of(chunk: Chunk) -> list[Change]:
    """The logins and logouts of a part of a snapshot."""
    return Membership().merge(chunk, 0.0).changes
