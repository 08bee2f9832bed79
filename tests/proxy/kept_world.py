"""Publishers, whole proxies, brokers, routers and the models of stores, for messages that are kept for sessions.

A proxy has its real cores: that of records, the writer of kept messages, and the mail pipeline. Brokers refuse parcels with
unmarked messages to kept rooms, as real ones do; links lose parcels, and settle the others in any order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cluster.core.contract import TICK, SendRecords, Settled
from pixiu.errors import Refusal
from pixiu.ids import EndpointID, snowflake
from pixiu.wire.record import KEY_AT, SENDER_AT, SNOWFLAKE_AT, Flag, Kind, encode
from proxy import events as ev
from proxy import kept_events as kept_ev
from proxy import mail_events as mail_ev
from proxy.core import Core
from proxy.kept.messages import to_be_kept
from proxy.kept.writer import KeptWriter
from tests.proxy.mail_world import START_MS, Pipe, ProxyModel, World

BROKERS = (EndpointID(1), EndpointID(2))
WINDOW = 30
TRIES = 4


def number_of(record: bytes) -> int:
    """A record's SnowflakeID."""
    return int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little")


def room_of(record: bytes) -> int:
    """A record's room."""
    return int.from_bytes(record[KEY_AT:SENDER_AT], "little")


class KeptWorld(World):
    """Everything; the same seed gives the same run."""

    def __init__(
        self, seed: int, rooms: int, publishers: int = 2, lossy: float = 0.02,
        core: Callable[[], Core] = lambda: Core(max_record_bytes=1 << 20),
    ) -> None:  # fmt: skip
        self.core_of = core
        self.filters: dict[int, list[int]] = {}
        """Room → sessions with a filter that is put, in rising order."""
        self.marked: set[int] = set()
        """Rooms that brokers know to be kept: a moment before the filter is put."""
        self.router_up = True
        self.brokers = set(BROKERS)
        self.delivered: list[int] = []
        """SnowflakeIDs that brokers handled."""
        self.late: list[int] = []
        """Messages that a broker delivered before they were stored: there must be none."""
        self.loss = lossy
        self.workers = itertools.count(100)
        super().__init__(seed, proxies=0, senders=0)
        self.proxies = [KeptProxy(self, number) for number in range(2)]
        self.rooms = [100 + number for number in range(rooms)]
        self.publishers = [PublisherModel(self, number) for number in range(publishers)]

    def keep(self, room: int, sessions: list[int]) -> None:
        """Put filters: brokers know of the room before the routers answer so."""
        self.marked.add(room)
        self.after(0.05, lambda: self.filters.__setitem__(room, sorted(set(self.filters.get(room, []) + sessions))))

    def lose_broker(self) -> None:
        """A broker is gone for a while; what is under way to it is lost."""
        if len(self.brokers) == len(BROKERS):
            lost = self.rng.choice(BROKERS)
            self.brokers.discard(lost)
            for proxy in self.proxies:
                self.soon(partial(_look, proxy))
            self.after(self.rng.uniform(0.2, 2.0), self._broker_back, lost)

    def _broker_back(self, broker: EndpointID) -> None:
        self.brokers.add(broker)
        for proxy in self.proxies:
            self.soon(partial(_look, proxy))

    def handle(self, broker: EndpointID, parcel: SendRecords) -> bool:
        """A broker gets a parcel. Returns True if it handled all of it."""
        whole = True
        for record in parcel.records:
            room, number = room_of(record), number_of(record)
            marked = bool(record[5] & Flag.KEPT)
            if room in self.marked and to_be_kept(record) and not marked:
                whole = False
                continue
            self.delivered.append(number)
            if marked and any(number not in self.inbox(uin) for uin in self.wanted.get(number, ())):
                self.late.append(number)
        return whole

    @property
    def wanted(self) -> dict[int, list[int]]:
        """SnowflakeID → sessions whose filters were put before it was published."""
        return {number: found for publisher in self.publishers for number, found in publisher.wanted.items()}

    def resolved(self) -> bool:
        """Whether every publisher knows what became of its messages."""
        return all(not publisher.unresolved and not publisher.waiting for publisher in self.publishers)


def _look(proxy: ProxyModel) -> None:
    assert isinstance(proxy, KeptProxy)
    proxy.look_at_brokers()


class KeptProxy(ProxyModel):
    """A proxy with all its cores."""

    _world: KeptWorld

    def start(self) -> None:
        """A new process."""
        self._streams = 0
        self.publishers: dict[int, PublisherModel] = {}
        self.writer = KeptWriter(self._next_stream)
        self.records = self._world.core_of()
        self._lent = False
        self._worker = next(self._world.workers)  # another one in each life
        super().start()
        self.look_at_brokers()
        self.step_records(kept_ev.KeptAvailable(True))
        self._tick(self.records)

    def _next_stream(self) -> int:
        self._streams -= 1  # those of clients are positive
        return self._streams

    def look_at_brokers(self) -> None:
        """Who is there."""
        if self.alive:
            self.step_records(ev.BrokersChanged(1, tuple(ev.Replica(each, 0) for each in sorted(self._world.brokers))))

    def kill(self) -> None:
        """As kill -9 does."""
        super().kill()
        for stream, publisher in self.publishers.items():
            self._world.soon(partial(publisher.died, stream))
        self.publishers = {}

    def open(self, publisher: PublisherModel) -> int:  # type: ignore[override]
        """A publisher opens a stream."""
        self._numbers += 1
        self.publishers[self._numbers] = publisher
        self.step_records(ev.PublisherOpened(self._numbers))
        return self._numbers

    def _tick(self, core: Core) -> None:
        """Timers ring a little late."""
        if core is self.records and self.alive:
            if core.next_deadline() <= self._world.now:
                self.step_records(TICK)
            if self.writer.next_deadline() <= self._world.now:
                self._step_writer(TICK)
            self._world.after(0.01, self._tick, core)

    def step_records(self, event: ev.Event) -> None:
        """Give the core of records an event."""
        for effect in self.records.step(event, self._world.now):
            if isinstance(effect, SendRecords):
                self._send(effect, self.records)
            elif isinstance(effect, ev.Reply):
                if effect.stream in self.publishers:
                    self.publishers[effect.stream].back.put(effect)
            elif isinstance(effect, kept_ev.AskKept):
                self._world.soon(partial(self._match, effect, self.records))
            elif isinstance(effect, kept_ev.StoreKept):
                if not self._lent:
                    self._lent = True
                    self._world.soon(partial(self._step_writer, kept_ev.WriterLent(self._worker, int(self._world.now))))
                self._step_writer(effect)

    def _step_writer(self, event: kept_ev.WriterEvent) -> None:
        for effect in self.writer.step(event, self._world.now):
            if isinstance(effect, kept_ev.KeptStored):
                self.step_records(effect)
            else:
                self.step(effect)

    def _perform(self, effects: list[mail_ev.Effect]) -> None:
        own = [each for each in effects if isinstance(each, mail_ev.Answer | mail_ev.EndWriter) and each.stream < 0]
        super()._perform([each for each in effects if each not in own])
        for each in own:
            self._step_writer(each)

    def _match(self, effect: kept_ev.AskKept, core: Core) -> None:
        if core is not self.records or not self.alive:
            return
        event: ev.Event
        if self._world.router_up:
            event = kept_ev.KeptMatched([(each.number, self._world.filters.get(each.room, [])) for each in effect.questions])
        else:
            event = kept_ev.KeptRefused([each.number for each in effect.questions], Refusal("UNAVAILABLE", "no router", 100))
        self._world.soon(lambda: self.step_records(event) if core is self.records and self.alive else None)

    def _send(self, parcel: SendRecords, core: Core) -> None:
        world = self._world
        broker = parcel.peer

        def arrived() -> None:
            lost = broker not in world.brokers or world.rng.random() < world.loss
            handled = not lost and world.handle(broker, parcel)
            world.soon(partial(settled, handled), 0.2 if lost else 0.0005)

        def settled(handled: bool) -> None:
            if core is self.records and self.alive:
                self.step_records(Settled([(parcel.token, handled)]))

        world.soon(arrived)


@dataclass
class PublisherModel:
    """A publisher: it tries again what is refused, and goes to another proxy when its own is gone."""

    world: KeptWorld
    number: int
    made: list[bytes] = field(default_factory=list)
    waiting: deque[bytes] = field(default_factory=deque)
    unresolved: dict[int, bytes] = field(default_factory=dict)
    """Position → record."""
    accepted: list[int] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)
    """SnowflakeID → how often."""
    given_up: set[int] = field(default_factory=set)
    wanted: dict[int, list[int]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._proxy: KeptProxy | None = None
        self._stream = 0
        self._position = 1

    def publish(self) -> None:
        """Make a message to a random room."""
        identity = snowflake(START_MS + len(self.made) + 1, self.number + 1, 0)
        room = self.world.rng.choice(self.world.rooms)
        record = encode(Kind.ROOM, room, b"%d" % len(self.made), identity, flags=Flag.TO_ROOM)
        self.wanted[identity] = list(self.world.filters.get(room, []))
        self.made.append(record)
        self.waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Send what may leave."""
        if not self.waiting or len(self.unresolved) >= WINDOW:
            return
        proxy = self._proxy
        if proxy is None or not proxy.alive:
            alive = [each for each in self.world.proxies if each.alive]
            if not alive:
                self.world.after(0.1, self.flush)
                return
            proxy = self.world.rng.choice(alive)  # type: ignore[assignment]
            assert isinstance(proxy, KeptProxy)
            self._proxy, self._position = proxy, 1
            self._stream = proxy.open(self)
            self.there = Pipe(self.world, partial(self._arrived, proxy, proxy.records))
            self.back = Pipe(self.world, self.heard)
        count = min(len(self.waiting), self.world.rng.randrange(1, 6))
        records = [self.waiting.popleft() for _ in range(count)]
        first = self._position
        self._position += count
        self.unresolved.update(enumerate(records, first))
        self.there.put(ev.BatchPublished(self._stream, b"".join(records), count, first))
        self.flush()

    @staticmethod
    def _arrived(proxy: KeptProxy, core: Core, batch: object) -> None:
        assert isinstance(batch, ev.BatchPublished)
        if core is proxy.records and proxy.alive:
            proxy.step_records(batch)

    def died(self, stream: int) -> None:
        """The stream's proxy is gone: everything unresolved goes to another one, in order."""
        if stream == self._stream:
            self._proxy, self._stream = None, 0
            self.there.cut()
            self.waiting.extendleft(reversed(self.unresolved.values()))
            self.unresolved = {}
            self.flush()

    def heard(self, reply: object) -> None:
        """A reply."""
        assert isinstance(reply, ev.Reply)
        if reply.stream != self._stream:
            return
        failed = {position: each.code for each in reply.failures for position in range(each.first, each.last + 1)}
        for position in [each for each in self.unresolved if each <= reply.up_to]:
            record = self.unresolved.pop(position)
            number = number_of(record)
            code = failed.get(position)
            if code is None:
                self.accepted.append(number)
                continue
            self.codes[code] = self.codes.get(code, 0) + 1
            self.refused[number] = self.refused.get(number, 0) + 1
            if self.refused[number] < TRIES:
                self.waiting.append(record)
            else:
                self.given_up.add(number)
        self.flush()
