"""Messages that a route takes: they wait here until the durable topic has them. Pure.

    a record in a room that routes may take ─── no route takes it ──▶ on to its broker, in order
                    │
                    └── a route takes it ──▶ store ── replicated ──▶ accepted: clients get it from the durable topic, or not at all
                                               │
                                               └── not in time, or too many wait ──▶ TOPIC_AWAY: try again

Clients never get a message that a route takes from here, only from the log: so there is one order for the log and for them,
whichever proxies carry the publishers of a topic.

What a publisher sent to one room is accepted in the order in which it came. One that is refused for now takes those after it along,
so that its publisher can send it again without overtaking. A repeat of a message that is being stored, or was stored lately, is not
stored again: it has the fate of the first one.

Source: docs/routes.md; Zhihu's gateway ("Publish").
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from cluster.core.contract import NEVER
from cluster.routes.routes import MAX_HOPS, Route, RoutedRoomSet, Routes
from pixiu import errors
from pixiu.errors import PixiuError, Refusal
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.record import SENDER_AT, SNOWFLAKE_AT
from proxy import routed_events as ev
from proxy.kept.messages import room_of
from proxy.records.destinations import NOBODY, Target
from proxy.routed.messages import name_of, published, storing

Owner = TypeVar("Owner")

TIMEOUT_S: Final = 4.0
"""Time for which a publisher waits, seconds. Policy: its message is refused with TOPIC_AWAY. Publishers leave a silent proxy after
5 s."""
MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 64 << 20
"""Messages that are being stored. Policy: further ones are refused with TOPIC_AWAY; so are those for a durable topic that has half
of that, so that the others go on while one is away."""
REMEMBER_S: Final = 60.0
MAX_REMEMBERED: Final = 200_000
"""Stored messages that are remembered, in each of two generations. Policy: the older generation is forgotten early."""
RETRY_MS: Final = 500
NOW: Final = -NEVER
LATE: Final = Refusal(errors.TopicAway.code, "the durable topic of its route does not answer in time; send it again", RETRY_MS)
BUSY: Final = Refusal(errors.TopicAway.code, "too many messages wait for the durable topic of its route; send it again", RETRY_MS)
MALFORMED: Final = Refusal(errors.MalformedData.code, "the record's lengths or its topic are wrong")


@dataclass(slots=True)
class RouteCounters:
    """Messages of one route, since the start of the proxy."""

    stored: int = 0
    repeated: int = 0
    """Repeats that were not stored again."""
    refused: int = 0
    """Times that a message was refused: not stored in time, too many waited, or never to be stored."""
    stopped: int = 0
    """Messages that had taken `MAX_HOPS` routes already; in refused too."""
    waiting: int = 0


class _Message(Generic[Owner]):
    """A message that is being stored."""

    __slots__ = ("identity", "route", "size", "topic", "waiters")

    def __init__(self, identity: bytes, route: str, topic: str, size: int) -> None:
        self.identity, self.route, self.topic, self.size = identity, route, topic, size
        self.waiters: list[_Waiter[Owner]] = []


class _Waiter(Generic[Owner]):
    """A publisher that waits for a message."""

    __slots__ = ("done", "lane", "left", "owner", "record", "refusal", "route", "until")

    def __init__(self, record: bytes, owner: Owner, route: str, lane: tuple[int, int], until: float) -> None:
        self.record, self.owner, self.route, self.lane, self.until = record, owner, route, lane, until
        self.done = False
        self.left = False
        """True if its publisher has been answered."""
        self.refusal: Refusal | None = None


@dataclass(slots=True)
class RoutedDue(Generic[Owner]):
    """Work that is due now."""

    store: list[ev.Storing] = field(default_factory=list)
    send: list[tuple[bytes, Owner | None]] = field(default_factory=list)
    """Records that no route takes, in their order."""
    accepted: list[Owner] = field(default_factory=list)
    """Owners of records that are stored, one for each record."""
    refused: dict[Refusal, list[tuple[bytes, Owner | None]]] = field(default_factory=dict)


class RoutedRooms(Generic[Owner]):
    """The messages of routes. `Owner` is the type of a message's owner.

    Args:
        take: takes the messages of a room that is to be offered.
        publisher: returns a number of an owner's publisher.
        topic_rooms: the rooms of free topics.
    """

    def __init__(
        self, take: Callable[[list[bytes], Owner | None], None], publisher: Callable[[Owner], int], topic_rooms: TopicRooms
    ) -> None:  # fmt: skip
        self.target: Target[Owner] = Target(NOBODY, divert=take)
        """Target of the rooms whose messages come here."""
        self._publisher, self._topic_rooms = publisher, topic_rooms
        self.routes = Routes()
        self.rooms = RoutedRoomSet(self.routes, topic_rooms)
        self.active = False
        """True if there are routes; otherwise nothing comes here."""
        self.deadline = NEVER
        """Time at which `run` has something to do, monotonic seconds."""
        self.counters: dict[str, RouteCounters] = {}
        """By route."""
        self.loops = Counter[str]()
        """Route → messages that it stopped, since this was last looked at."""
        self._new: list[tuple[bytes, Owner | None, bool]] = []
        self._lanes: dict[tuple[int, int], deque[_Waiter[Owner]]] = {}
        self._by_time: deque[_Waiter[Owner]] = deque()
        self._touched: dict[tuple[int, int], None] = {}
        self._storing: dict[int, _Message[Owner]] = {}
        self._by_identity: dict[bytes, _Message[Owner]] = {}
        self._remembered: dict[bytes, None] = {}
        self._before: dict[bytes, None] = {}
        self._remembered_at = 0.0
        self._count_of = Counter[str]()
        self._bytes_of = Counter[str]()
        """By durable topic: messages that are being stored."""
        self._bytes = self._last = 0

    @property
    def under_way(self) -> int:
        """Number of messages that are being stored, or have just come."""
        return len(self._storing) + len(self._new)

    def use(self, routes: Routes) -> None:
        """Use other routes; what is being stored stays on its way."""
        self.routes, self.rooms = routes, routes.rooms(self._topic_rooms)
        self.active = any(each.options.topic for each in routes.routes)
        self.counters = {
            each.name: self.counters.get(each.name) or RouteCounters() for each in routes.routes if each.options.topic
        }  # fmt: skip

    def offer(self, record: bytes, owner: Owner | None, trusted: bool) -> None:
        """Take a message of a room that comes here.

        Args:
            record: the message.
            owner: its owner, who waits for it from now on; None: nobody.
            trusted: its publisher may say which routes it has taken.
        """
        self.deadline = NOW
        self._new.append((record, owner, trusted))

    def on_stored(self, event: ev.RoutedStored, now: float, out: list[Any]) -> None:
        """Note the outcome of messages."""
        for number, why in event.outcomes:
            message = self._storing.pop(number, None)
            if message is None:
                continue
            del self._by_identity[message.identity]
            self._bytes -= message.size
            self._count_of[message.topic] -= 1
            self._bytes_of[message.topic] -= message.size
            counters = self._counters(message.route)
            counters.waiting -= 1
            if why is None:
                counters.stored += 1
                self._remember(message.identity, now)
            elif not message.waiters:
                counters.refused += 1  # of QoS 0: nobody is told
            for waiter in message.waiters:
                if not waiter.left:
                    waiter.done, waiter.refusal = why is None, waiter.refusal or why
                    self._touch(waiter.lane)

    def run(self, now: float) -> RoutedDue[Owner]:
        """Do what can be done."""
        due: RoutedDue[Owner] = RoutedDue()
        new, self._new = self._new, []
        for record, owner, trusted in new:
            self._take(record, owner, trusted, now, due)
        by_time = self._by_time
        while by_time and (by_time[0].left or by_time[0].until <= now):
            waiter = by_time.popleft()
            if not waiter.left:
                waiter.refusal = waiter.refusal or LATE
                self._touch(waiter.lane)
        touched, self._touched = self._touched, {}
        for lane in touched:
            self._advance(lane, due)
        self.deadline = by_time[0].until if by_time else NEVER
        return due

    def _take(self, record: bytes, owner: Owner | None, trusted: bool, now: float, due: RoutedDue[Owner]) -> None:
        name = name_of(record)
        route = None if name is None else self.routes.of(name)
        if name is not None and (route is None or not route.options.topic):
            due.send.append((record, owner))
            return
        if name is None or route is None:
            due.refused.setdefault(MALFORMED, []).append((record, owner))
            return
        identity = record[SNOWFLAKE_AT:SENDER_AT]
        message = self._by_identity.get(identity)
        if message is not None or identity in self._remembered or identity in self._before:
            self._counters(route.name).repeated += 1
            if owner is not None:
                self._wait(record, owner, route.name, message, now)
            return
        try:
            read = published(record, name, trusted)
            if route.name in read.taken:
                due.send.append((record, owner))  # it comes from the durable topic
                return
            self._last += 1
            why = self._why_not(route, len(record), read.taken)
            found = None if why is not None else storing(self._last, route, read)
        except PixiuError as error:
            why, found = Refusal(error.code, str(error)), None
        if found is None:
            assert why is not None
            if owner is None:
                self._counters(route.name).refused += 1
                due.refused.setdefault(why, []).append((record, None))
            else:
                self._wait(record, owner, route.name, None, now, why)
            return
        message = _Message(identity, route.name, found.topic, len(record))
        self._storing[found.number] = self._by_identity[identity] = message
        self._bytes += message.size
        self._count_of[found.topic] += 1
        self._bytes_of[found.topic] += message.size
        self._counters(route.name).waiting += 1
        due.store.append(found)
        if owner is not None:
            self._wait(record, owner, route.name, message, now)

    def _why_not(self, route: Route, size: int, taken: tuple[str, ...]) -> Refusal | None:
        """Why a message may not be stored now, or ever."""
        topic = route.options.topic
        if len(taken) >= MAX_HOPS:
            self._counters(route.name).stopped += 1
            self.loops[route.name] += 1
            way = " → ".join((*taken, route.name))
            return Refusal(
                errors.InvalidArgument.code, f"it has taken {MAX_HOPS} routes, {way}: they form a loop; `pixiu routes check FILE`"
            )
        full = len(self._storing) >= MAX_RECORDS or self._bytes + size > MAX_BYTES
        half = 2 * self._count_of[topic] >= MAX_RECORDS or 2 * (self._bytes_of[topic] + size) > MAX_BYTES
        return BUSY if full or half else None

    def _wait(
        self, record: bytes, owner: Owner, route: str, message: _Message[Owner] | None, now: float, why: Refusal | None = None
    ) -> None:  # fmt: skip
        """Have a publisher wait for a message; None: it is stored, or refused, which is said in its turn as well."""
        lane = room_of(record), self._publisher(owner)
        waiter = _Waiter(record, owner, route, lane, now + TIMEOUT_S)
        self._lanes.setdefault(lane, deque()).append(waiter)
        self._by_time.append(waiter)
        if message is None:
            waiter.done, waiter.refusal = why is None, why
            self._touch(lane)
        else:
            message.waiters.append(waiter)

    def _touch(self, lane: tuple[int, int]) -> None:
        """Note that something may go on in a lane."""
        self._touched[lane] = None
        self.deadline = NOW

    def _advance(self, lane: tuple[int, int], due: RoutedDue[Owner]) -> None:
        """Answer the publishers of a lane that are next."""
        waiting = self._lanes.get(lane)
        if waiting is None:
            return
        while waiting and (waiting[0].done or waiting[0].refusal is not None):
            waiter = waiting.popleft()
            waiter.left = True
            if waiter.refusal is None:
                due.accepted.append(waiter.owner)
                continue
            self._counters(waiter.route).refused += 1
            due.refused.setdefault(waiter.refusal, []).append((waiter.record, waiter.owner))
            if waiter.refusal.code == errors.TopicAway.code:
                # Its publisher sends it again, and what came after it must not be accepted before.
                for later in waiting:
                    later.refusal = later.refusal or waiter.refusal
        if not waiting:
            del self._lanes[lane]

    def _remember(self, identity: bytes, now: float) -> None:
        if now - self._remembered_at >= REMEMBER_S or len(self._remembered) >= MAX_REMEMBERED:
            self._before = self._remembered if now - self._remembered_at < 2 * REMEMBER_S else {}
            self._remembered, self._remembered_at = {}, now
        self._remembered[identity] = None

    def _counters(self, route: str) -> RouteCounters:
        """Those of a route; one that the file no longer has is not shown."""
        found = self.counters.get(route)
        return found if found is not None else RouteCounters()
