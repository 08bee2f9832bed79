"""A whole cluster in one process, with its own clock and its own chance: everything that happens follows from the seed.

users ─▶ gateways ─▶ routers ─▶ brokers                 the production cores,
users ─▶ gateways ─▶ relays                             joined by the production core of the links
publishers ─▶ proxies ─▶ brokers or relays ─▶ gateways
publishers ─▶ proxies ─▶ brokers ─▶ relays ─▶ gateways  where `Shape.through_relays` says so
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

from cluster.links.datagrams.head import HEAD
from cluster.links.options import LinkOptions
from cluster.membership.map.devices import LoginPolicy
from cluster.membership.map.lww_map import Key
from pixiu.ids import EndpointID, gateway_instance
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.partition import serves
from tests.sim.cluster.clients import BIG_ROOM, ROOMS, Clients
from tests.sim.cluster.edges import GatewayProcess, ProxyProcess
from tests.sim.cluster.faults import Variant
from tests.sim.cluster.nodes import Node as Machine
from tests.sim.cluster.nodes import node_of
from tests.sim.cluster.process import Place, Process
from tests.sim.cluster.registry import Node, Registry, View
from tests.sim.cluster.stores import BrokerProcess, RelayProcess, RouterProcess, Snapshots
from tests.sim.cluster.watch import Watch
from tests.sim.cluster.watched import Watched
from tests.sim.cluster.wire import Wire

Role = TypeVar("Role", bound=Process)

HEARTBEAT_S: Final = 1.0
SESSION_S: Final = 5.0
"""How long the registry keeps the node of a process that is gone."""
RECOVERY_S: Final = 6.0
"""After a fault nobody is asked for so long why a message went astray."""
GATEWAYS, PROXIES, REPLICAS = 2, 3, 2
ROLES: dict[str, type[Process]] = {
    "router": RouterProcess,
    "relay": RelayProcess,
    "broker": BrokerProcess,
    "gateway": GatewayProcess,
    "proxy": ProxyProcess,
}


@dataclass(frozen=True)
class Shape:
    """What differs from run to run besides chance."""

    routers: int = 1
    """Partitions, of two replicas each."""
    brokers: int = 1
    relays: int = 1
    doubles: str = ""
    """The role that doubles meanwhile."""
    reorder: bool = True
    lossless: bool = False
    """Whether only faults lose datagrams. Else no message to a big room, whose copies go to all its VRooms, would be accepted."""
    through_relays: bool = False
    """Whether rooms' messages go through relays."""
    policy: LoginPolicy = LoginPolicy.ALL
    nodes: str = ""
    """Which roles share a process, see `tests.sim.cluster.nodes`."""


class World:
    """See the module.

    Args:
        seed: of everything.
        shape: of the cluster and its network.
        variant: the cores, with what a test put back.
    """

    roles: ClassVar[dict[str, type[Process]]] = ROLES
    gateways, proxies = GATEWAYS, PROXIES

    def __init__(self, seed: int, shape: Shape, variant: Variant) -> None:
        self.seed, self.shape, self.variant = seed, shape, variant
        self.wire = Wire(seed, 0.0 if shape.lossless else 0.06, 0.04, shape.reorder)
        self.rng: random.Random = self.wire.rng
        self.heartbeat_s, self.recovery_s = HEARTBEAT_S, RECOVERY_S
        self.link_options = LinkOptions()
        self.vrooms = VRooms(BIG_ROOM, BIG_ROOM + 1)
        self.counts: Counter[str] = Counter()
        self.raised: list[Exception] = []
        self.warnings: list[tuple[str, str, str]] = []
        self.scrambled: set[tuple[EndpointID, int, int]] = set()
        """(process, room, UIN): what it knows of these says nothing about the protocol until the end."""
        self.pauses: list[tuple[float, float]] = []
        self.by_endpoint: dict[EndpointID, Process] = {}
        self._by_word: dict[int, EndpointID] = {}
        self.places: list[Place] = []
        self._nodes: dict[int, Machine] = {}
        self.registry = Registry(self.rng, self.wire.after, self._tell, self.gateways + 2)
        self.snapshots = Snapshots(self)
        self.clients = Clients(self)
        self.watch = Watch(self)
        for role, partitions in (("router", shape.routers), ("broker", shape.brokers), ("relay", shape.relays)):
            self.registry.layout(role, partitions, partitions)
            for partition in range(partitions):
                self.add(role, partition, REPLICAS)
        self.add("proxy", 0, self.proxies)
        self.add("gateway", 0, self.gateways)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.wire.now

    def new_endpoint(self) -> EndpointID:
        """For a process that starts."""
        endpoint = EndpointID(self.rng.getrandbits(62) | 1)
        self._by_word[endpoint & 0xFFFFFFFF] = endpoint
        return endpoint

    def receiver_of(self, sender: Process, data: bytes, address: object) -> EndpointID:
        """Whom a datagram with items is for: its head has the lower half."""
        return self._by_word[HEAD.unpack_from(data)[9]]

    # --- processes

    def add(self, role: str, partition: int, number: int) -> None:
        """New places, and what runs there."""
        for index in range(number):
            shared = node_of(self.shape.nodes, role, partition, index)
            node = self._nodes.get(shared) if shared is not None else None
            if node is None:
                node = Machine(f"10.0.{len(self.places)}.1", self.variant.switch)
                if shared is not None:
                    self._nodes[shared] = node
            place = Place(role, partition, index, node)
            node.places.append(place)
            self.places.append(place)
            self.start(place, node.runs)

    def places_of(self, role: str) -> list[Place]:
        """All of a role."""
        return [place for place in self.places if place.role == role]

    def processes(self) -> list[Process]:
        """All that live."""
        return [place.process for place in self.places if place.process is not None and place.process.alive]

    def alive(self, role: type[Role]) -> list[Role]:
        """All of a role that live."""
        return [process for process in self.processes() if isinstance(process, role)]

    def running(self, role: type[Role]) -> list[Role]:
        """All of a role that live and are Running."""
        return [process for process in self.alive(role) if process.state == "Running"]

    def start(self, place: Place, run: int) -> None:
        """A new run, unless its node has been killed again; a gateway waits until an instance is free."""
        if place.node.runs != run:
            return
        held = {node.instance for node in self.registry.view.nodes}
        if place.role == "gateway" and held.issuperset(self.registry.generations):
            self.wire.after(1.0, lambda: self.start(place, run))
            return
        process = self.roles[place.role](self, place)
        place.process = self.by_endpoint[process.endpoint] = process
        self.wire.hosts[process.address] = process
        instance, generation = (process.instance, process.generation) if isinstance(process, GatewayProcess) else (-1, 0)
        node = Node(process.endpoint, place.role, place.partition, process.address, "Init", instance, generation)
        self.registry.register(node)

    def _tell(self, endpoint: EndpointID, view: View) -> None:
        process = self.by_endpoint.get(endpoint)
        if process is not None:
            process.tell_view(view)

    def is_true(self, key: Key, id_: int) -> bool:
        """Whether the gateway of a key lives and has exactly this login."""
        found = next((g for g in self.alive(GatewayProcess) if g.instance == key.instance), None)
        return found is not None and found.core.rooms.own.get(*key) == (id_, True)

    # --- faults

    def crash(self, place: Place) -> None:
        """Kill what runs there, with all roles of its node; the registry hears it when the session ends; something runs there again
        after a while."""
        if place.process is None or not place.process.alive:
            return
        self.counts["crashes"] += 1
        self.counts["nodes killed"] += len(place.node.places) > 1
        place.node.killed()
        for each in place.node.places:
            self.end(each)
            if each.process is not None:
                self.wire.after(SESSION_S, lambda gone=each.process.endpoint: self.registry.remove(gone))
        self.start_again(place, self.rng.choice([0.1, self.rng.uniform(0.5, 6.0)]))

    def end(self, place: Place) -> None:
        """The process there is gone, and so are its clients' connections."""
        process = place.process
        place.troubled_until = float("inf")
        if process is None or not process.alive:
            return
        process.crash()
        if isinstance(process, GatewayProcess):
            self.clients.gateway_gone(process)
        if isinstance(process, ProxyProcess):
            self.clients.proxy_gone(process)

    def start_again(self, place: Place, delay: float) -> None:
        """Something runs there again, with all roles of its node."""
        run = place.node.runs
        for each in place.node.places:
            self.wire.after(delay, lambda each=each: self.start(each, run))

    def pause(self, place: Place) -> None:
        """Stop it for some seconds, shorter than its session, with all roles of its node."""
        process = place.process
        if process is None or not process.alive or process.paused:
            return
        self.counts["pauses"] += 1
        self.counts["nodes paused"] += len(place.node.places) > 1
        length = self.rng.choice([0.3, self.rng.uniform(1.0, 4.5)])
        self.pauses.append((self.now, self.now + length))
        self.trouble(place, self.now + length)
        stopped = [each.process for each in place.node.places if each.process is not None and each.process.alive]
        for each in stopped:
            each.pause()

        def resume() -> None:
            going = [each for each in stopped if each.alive]
            for each in going:
                each.paused = False
            for each in going:
                each.resume()

        self.wire.after(length, resume)

    def cut(self, one: Place, other: Place, both: bool, length: float = 0.0) -> None:
        """For some seconds nothing passes from one host to the other, or neither way."""
        self.counts["cuts" if both else "one-way cuts"] += 1
        length = length or self.rng.choice([0.5, self.rng.uniform(3.0, 8.0)])
        ways = [(one.host, other.host), (other.host, one.host)][: 2 if both else 1]
        self.wire.cut_ways.update(ways)
        for place in (one, other):
            # Whoever called the other dead meets it again by the next heartbeat.
            self.trouble(place, self.now + length + 2 * HEARTBEAT_S)
        self.wire.after(length, lambda: self.wire.cut_ways.subtract(ways))

    def is_true_device(self, key: Key, id_: int) -> bool:
        """The same for a device."""
        found = next((g for g in self.alive(GatewayProcess) if g.instance == key.instance), None)
        return found is not None and found.core.users.own.get(*key) == (id_, True)

    def trouble(self, place: Place, end: float) -> None:
        """Until a while after a time nobody is asked why a message went astray there."""
        for each in place.node.places:
            each.troubled_until = max(each.troubled_until, end + self.recovery_s)

    def double(self, role: str) -> None:
        """The new partitions start and load; when all of them run, the number changes."""
        count = self.registry.view.count(role)
        self.counts["doublings"] += 1
        self.registry.layout(role, count, 2 * count)
        first = len(self.places)
        for partition in range(count, 2 * count):
            self.add(role, partition, REPLICAS)

        def flip() -> None:
            running = [place.process is not None and place.process.state == "Running" for place in self.places[first:]]
            if all(running):
                self.registry.layout(role, 2 * count, 2 * count)
                for place in self.places_of(role):
                    self.trouble(place, self.now)
            else:
                self.wire.after(0.5, flip)

        self.wire.after(1.0, flip)

    def scramble(self) -> None:
        """A broker lacks an entry that it had; or somebody has a login again that is long over."""
        maps: list[RouterProcess | BrokerProcess] = [*self.running(RouterProcess), *self.running(BrokerProcess)]
        if not maps:
            return
        process = self.rng.choice(maps)
        held = process.core.membership
        assert isinstance(held, Watched)
        live = [key for room in range(1, ROOMS + 1) for key in held.live_keys(room)]
        instances = {g.instance for g in self.alive(GatewayProcess)}
        count = process.view.count(process.place.role)
        old = [
            c for c in self.watch.logins if gateway_instance(c.id) in instances and serves(process.place.partition, c.group, count)
        ]
        old = [c for c in old if c.id >= held.floor(gateway_instance(c.id))]
        if isinstance(process, BrokerProcess) and live and self.rng.random() < 0.5:
            key = self.rng.choice(live)
            held.lose(key)
            room, uin = key.group, key.member
        elif old:
            change = self.rng.choice(old)
            held.revive(change)
            room, uin = change.group, change.member
        else:
            return
        self.counts["scrambled"] += 1
        self.scrambled.add((process.endpoint, room, uin))
        self.trouble(process.place, self.now)
        if isinstance(process, BrokerProcess):
            process.core.fanout.forget([room])

    def is_quiet(self, *places: Place) -> bool:
        """Whether nothing has happened to these for a while."""
        return all(place.troubled_until <= self.now for place in places)

    def keeps_order(self, since: float) -> bool:
        """Whether a message that was sent then may not be late: the network keeps order, and nobody was stopped meanwhile."""
        return not self.wire.reorder and not any(end >= since for _, end in self.pauses)

    # --- a run

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a time of the run."""
        self.wire.after(when - self.now, action)

    def pairs(self) -> Iterator[tuple[str, int]]:
        """What was counted, for a test that asks whether the runs have faults in them."""
        yield from sorted((self.counts + self.watch.checked + self.clients.logins.checked).items())
