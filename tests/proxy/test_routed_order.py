"""Routes under faults, in a simulation with the real cores of proxies: one order for the log and for clients.

publishers ──▶ proxies (killed) ──▶ log (slow, away) ──▶ deliverer (killed) ──▶ proxies ──▶ broker (loses parcels) ──▶ gateway
"""

from __future__ import annotations

import heapq
import itertools
import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

import pixiu
from bridge.connectors.clients import Clients, ClientsOptions
from cluster.core.contract import TICK, SendRecords, Settled
from cluster.routes.routes import routes_of
from gateway.delivery.dedupe import Dedupe
from pixiu.client.messages.drafts import encode as encode_draft
from pixiu.ids import EndpointID, snowflake, topic_room
from pixiu.wire.record import SENDER_AT, SNOWFLAKE_AT, Flag, Kind, decode, encode, with_topic
from proxy import events as ev
from proxy import routed_events as routed_ev
from proxy.core import Core

ROUTES = routes_of(tomllib.loads('[chat]\nfilter = "chat/#"\ntopic = "log"\nclients = "log"'), "routes.toml")
TOPICS = ("chat/a", "chat/b")
BROKER = EndpointID(1)
MESSAGES = 40
ROUND = 7


@dataclass
class Stored:
    """A message of the log, as the deliverer gets it."""

    body: bytes
    key: bytes | None
    headers: dict[str, bytes]
    position: tuple[int, int]
    topic: str = "log"
    time_us: int = 0
    event_time_us: int | None = None


@dataclass
class Publisher:
    """Sends messages in order, three at a time; what is refused for now, or lost with its proxy, goes again before the rest."""

    number: int
    waiting: list[bytes]
    under_way: list[bytes] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class World:
    """Everything; the same seed gives the same run. `plant` names a fault that the checks must find."""

    def __init__(self, seed: int, plant: str = "") -> None:
        self.rng, self.plant, self.now = random.Random(seed), plant, 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.log: list[Stored] = []
        self.acknowledged = 0
        """Messages of the log that the deliverer has acknowledged."""
        self.away_until = 0.0
        self.dedupe = Dedupe()
        self.delivered: list[tuple[str, int]] = []
        """Topic and original number, as clients get them."""
        self.proxies = [Proxy(self, number) for number in range(3)]
        self.publishers = [self._publisher(number) for number in range(3)]
        self.made = [each for publisher in self.publishers for each in publisher.waiting]
        self.refused = 0
        px = pixiu.connect("127.0.0.1:1")
        (delivery,) = ROUTES.deliveries
        self.clients = Clients("log", ClientsOptions(topic="log", stored=delivery.stored, routes=delivery.routes), px)
        self.life = 0
        """Of the deliverer."""

    def _publisher(self, number: int) -> Publisher:
        made = list[bytes]()
        for index in range(MESSAGES):
            topic, identity = self.rng.choice(TOPICS), snowflake(1_700_000_000_000 + index, number + 1, 0)
            body = with_topic(topic, b"%d" % identity)
            made.append(encode(Kind.ROOM, topic_room(topic), body, identity, flags=Flag.TO_ROOM | Flag.TOPIC))
        return Publisher(number, made)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), call))

    def soon(self, call: Callable[[], None], most: float = 0.05) -> None:
        self.after(self.rng.uniform(0.0, most), call)

    def run(self) -> None:
        for publisher in self.publishers:
            self.publish(publisher)
        self.deliver(self.life)
        for _ in range(6):
            self.after(self.rng.uniform(0.0, 6.0), lambda: self.rng.choice(self.proxies).kill())
            self.after(self.rng.uniform(0.0, 6.0), self.kill_deliverer)
        self.after(self.rng.uniform(0.0, 4.0), lambda: setattr(self, "away_until", self.now + 6.0))
        while self._heap and not self.done():
            self.now, _, call = heapq.heappop(self._heap)
            assert self.now < 500.0, "it does not end"
            call()

    def done(self) -> bool:
        published = all(not each.waiting and not each.under_way for each in self.publishers)
        return published and self.acknowledged == len(self.log) and not any(each.writing for each in self.proxies)

    # --- publishers

    def publish(self, publisher: Publisher) -> None:
        publisher.under_way, publisher.waiting = publisher.waiting[:3], publisher.waiting[3:]
        if publisher.under_way:
            self.rng.choice(self.proxies).take(publisher.under_way, lambda refused: self.answered(publisher, refused))

    def answered(self, publisher: Publisher, refused: Sequence[int] | None) -> None:
        """`refused`: positions; None: the proxy is gone."""
        again = publisher.under_way if refused is None else [publisher.under_way[each - 1] for each in refused]
        self.refused += len(refused or ())
        publisher.accepted += [decode(each).snowflake_id for each in publisher.under_way if each not in again]
        publisher.under_way = []
        publisher.waiting = [*again, *publisher.waiting]
        self.soon(lambda: self.publish(publisher), 0.3)

    # --- the log

    def append(self, message: routed_ev.Storing) -> None:
        self.log.append(Stored(message.body, message.key, dict(message.headers), (1, len(self.log))))

    # --- the deliverer: everything from the floor on, one round at a time, again until all of it is accepted

    def kill_deliverer(self) -> None:
        self.life += 1
        self.soon(lambda life=self.life: self.deliver(life))  # type: ignore[misc]

    def deliver(self, life: int) -> None:
        if life != self.life:
            return
        low, high = self.acknowledged, min(self.acknowledged + ROUND, len(self.log))
        if low == high:
            self.soon(lambda: self.deliver(life), 0.2)
            return
        drafts = [self.clients.draft(each) for each in self.log[low:high]]
        records = []
        for at, draft in enumerate(drafts, low):
            number = draft.derived_id or 0
            if self.plant == "new IDs at each delivery":
                number = self.rng.getrandbits(60) + at
            records.append(encode_draft(draft, number, 0, 1 << 20))

        def accepted(refused: Sequence[int] | None) -> None:
            if life != self.life:
                return
            if self.plant == "passes over what was lost" or (refused is not None and not refused):
                self.acknowledged = high
            self.soon(lambda: self.deliver(life))

        self.rng.choice(self.proxies).take(records, accepted)

    # --- broker and gateway

    def handle(self, parcel: SendRecords) -> bool:
        if self.rng.random() < 0.1:
            return False
        for record in parcel.records:
            identity = record[SNOWFLAKE_AT:SENDER_AT]
            self.dedupe.turn(self.now)
            if identity in self.dedupe.current or identity in self.dedupe.before:
                continue
            self.dedupe.current.add(identity)
            topic, payload = decode(record).topic_and_payload()
            self.delivered.append((str(topic), int(payload)))
        return self.rng.random() > 0.1  # the answer is lost

    # --- what must hold

    def check(self) -> None:
        everything = {decode(each).snowflake_id for each in self.made}
        for publisher in self.publishers:
            assert set(publisher.accepted) <= {int(each.body) for each in self.log}, "accepted, and not in the log"
        assert {int(each.body) for each in self.log} == everything
        for topic in TOPICS:
            order = list(dict.fromkeys(int(each.body) for each in self.log if each.key == topic.encode()))
            got = [number for name, number in self.delivered if name == topic]
            assert len(set(got)) == len(got), "a client got it twice"
            assert got == order, "clients have another order than the log"


class Proxy:
    """A proxy: its real core, and a writer that keeps the order of its own messages of a key."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.writing: dict[int, routed_ev.Storing] = {}
        self.start()

    def start(self) -> None:
        self.core = Core(max_record_bytes=1 << 20)
        self.writing = {}
        self._waits: dict[int, Callable[[Sequence[int] | None], None]] = {}
        self._streams = itertools.count(1)
        self._free_at = 0.0
        self.step(ev.BrokersChanged(1, (ev.Replica(BROKER, 0),)))
        self.step(routed_ev.RoutesChanged(ROUTES))
        self._tick(self.core)

    def _tick(self, core: Core) -> None:
        if core is self.core:
            if core.next_deadline() <= self.world.now:
                self.step(TICK)
            self.world.after(0.5, lambda: self._tick(core))

    def kill(self) -> None:
        """What it writes may still reach the log; nobody is told."""
        for message in self.writing.values():
            if self.world.rng.random() < 0.5:
                self.world.soon(lambda message=message: self.world.append(message), 0.2)  # type: ignore[misc]
        waits = self._waits
        self.start()
        for tell in waits.values():
            self.world.soon(lambda tell=tell: tell(None), 0.2)  # type: ignore[misc]

    def take(self, records: Sequence[bytes], tell: Callable[[Sequence[int] | None], None]) -> None:
        stream = next(self._streams)
        self._waits[stream] = tell
        self.step(ev.PublisherOpened(stream))
        self.step(ev.BatchPublished(stream, b"".join(records), len(records), 1))

    def step(self, event: ev.Event) -> None:
        world, core = self.world, self.core
        for effect in core.step(event, world.now):
            if isinstance(effect, routed_ev.StoreRouted):
                for message in effect.messages:
                    self._write(message)
                    if world.plant == "clients get it from the proxy, too":
                        number = int(message.body)
                        world.soon(lambda m=message, n=number: world.delivered.append((m.key.decode(), n)), 0.2)  # type: ignore[misc]
                    if world.plant == "accepts before it is stored":
                        world.soon(lambda n=message.number: self._tell(core, n), 0.001)  # type: ignore[misc]
            elif isinstance(effect, SendRecords):
                world.soon(lambda parcel=effect: self._arrived(core, parcel), 0.02)  # type: ignore[misc]
            elif isinstance(effect, ev.Reply):
                tell = self._waits.pop(effect.stream, None)
                refused = [at for each in effect.failures for at in range(each.first, each.last + 1)]
                if tell is not None:
                    tell(refused)

    def _arrived(self, core: Core, parcel: SendRecords) -> None:
        handled = self.world.handle(parcel)
        if core is self.core:
            self.step(Settled([(parcel.token, handled)]))

    def _tell(self, core: Core, number: int) -> None:
        if core is self.core:
            self.step(routed_ev.RoutedStored([(number, None)]))

    def _write(self, message: routed_ev.Storing) -> None:
        """One after the other, each after a while of this proxy's own: so proxies overtake one another."""
        world, core = self.world, self.core
        self.writing[message.number] = message
        self._free_at = max(self._free_at, world.now) + world.rng.uniform(0.0, 0.05)

        def lands() -> None:
            if core is not self.core or message.number not in self.writing:
                return
            if world.now < world.away_until:
                world.after(world.away_until - world.now, lands)
                return
            del self.writing[message.number]
            world.append(message)
            world.soon(lambda: self._tell(core, message.number), 0.01)

        world.after(self._free_at - world.now, lands)


def play(seed: int, plant: str = "") -> World:
    world = World(seed, plant)
    world.run()
    return world


def test_clients_get_the_order_of_the_log_once_and_all_of_it() -> None:
    refused = repeated = 0
    for seed in range(6):
        world = play(seed)
        world.check()
        refused += world.refused
        repeated += len(world.log) - len(world.made)
    assert refused, "the log was away for longer than publishers wait"
    assert repeated, "proxies were killed with messages that reached the log, and were sent again"


@pytest.mark.parametrize(
    "plant",
    ["clients get it from the proxy, too", "new IDs at each delivery", "passes over what was lost", "accepts before it is stored"],
)
def test_a_planted_fault_is_found(plant: str) -> None:
    with pytest.raises(AssertionError):
        for seed in range(12):
            play(seed, plant).check()
