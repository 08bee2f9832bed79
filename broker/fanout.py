"""Look-up from a record's room to the gateways that have members: the broker's hot path. Pure.

A batch is walked once, in place; each record is cut out once and added to the list of every gateway that gets it.

Source: PiXiu §2.3 step 10, §5.3 step 12; docs/protocol.md, "Record", docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from broker.groups import Groups, Route
from cluster.core.parcels import Target, discard, take_parcels
from cluster.membership.events import Effect
from pixiu.wire.record import (
    FIRST_LANE_BELOW,
    HEADER_SIZE,
    MIN_SIZE,
    ORIGIN_AT,
    PLAIN_ROOM,
    QOS_SHIFT,
    ROOM,
    SIGNAL,
    SIZE_FIELD,
    WALK,
    Flag,
)
from pixiu.wire.trace import UNTRACED, Tracer

MAX_CACHED_ROOMS: Final = 1_000_000
"""Rooms in the cache. Policy: at the bound it is emptied."""
QOS_0: Final = 1
"""In a record's origin."""


class Routed(Enum):
    """Outcome of a batch."""

    TAKEN = "taken"
    PASSED_ON = "passed on"
    """Some records were for another partition, and go there: the sender's layout is old."""
    UNROUTABLE = "unroutable"
    """Some records were for another partition, and could not be passed on."""
    NOT_KEPT = "not kept"
    """Some records have to be kept for sessions before they are delivered: those were left out."""
    MALFORMED = "malformed"
    """None of it is sent."""


@dataclass(slots=True)
class FanoutCounters:
    """Records, since the start."""

    records_in: int = 0
    copies_out: int = 0
    records_without_members: int = 0
    records_wrong_kind: int = 0
    """Records that are neither to a room nor a signal to a room."""
    records_unroutable: int = 0
    """Records for a room of another partition, too late after a doubling or without a replica there."""
    records_passed_on: int = 0
    """Records for a room of another partition: the sender's layout is old."""
    records_not_kept: int = 0
    """Records left out until they are kept for sessions."""
    batches_malformed: int = 0

    def add(self, records: int, copies: int, empty: int, wrong: int) -> None:
        """Count a routed batch."""
        self.records_in += records
        self.copies_out += copies
        self.records_without_members += empty
        self.records_wrong_kind += wrong

    def passed_on(self, stale: int, lost: int, not_kept: int = 0) -> Routed:
        """Count `stale` records for another partition, `lost` of them not passed on, and those that are to be kept first. Returns
        the outcome of their batch."""
        self.records_passed_on += stale - lost
        self.records_unroutable += lost
        self.records_not_kept += not_kept
        if not stale:
            return Routed.NOT_KEPT
        return Routed.UNROUTABLE if lost or not_kept else Routed.PASSED_ON


class Fanout:
    """Routes records to the gateways with members in their rooms.

    Args:
        gateways: gives the targets of a room that this partition serves; () if it has no members.
        serves: True if this partition serves a room.
        elsewhere: gives the target for records of a room that it does not serve; None: nowhere.
        tracer: stamps traced records.
        routes: gives the route of a room that has groups of shared subscriptions, or kept filters; None: it has neither.
        kept: True if any room is known to have kept filters.
    """

    def __init__(
        self,
        gateways: Callable[[int], tuple[Target, ...]],
        serves: Callable[[int], bool],
        elsewhere: Callable[[int], Target | None],
        tracer: Tracer = UNTRACED,
        routes: Callable[[int], Route | None] = lambda _room: None,
        kept: Callable[[], bool] = lambda: False,
    ) -> None:
        self._gateways = gateways
        self._serves = serves
        self._elsewhere = elsewhere
        self._tracer = tracer
        self._cache: dict[int, tuple[Target, ...]] = {}
        self._find_route, self._kept = routes, kept
        self._routes: dict[int, Route] = {}
        """Routes of rooms that have groups or kept filters; these are not in `_cache`."""
        self.groups = Groups(self._route_of)
        self.counters = FanoutCounters()

    def forget(self, rooms: Iterable[int]) -> None:
        """Forget rooms whose gateways changed."""
        cache = self._cache
        for room in rooms:
            cache.pop(room, None)
            self._routes.pop(room, None)

    def forget_all(self) -> None:
        """Forget all rooms: the gateways themselves, or the partition rule, changed."""
        self._cache.clear()
        self._routes.clear()

    def _route_of(self, room: int) -> Route | None:
        self._look_up(room)
        return self._routes.get(room)

    def route(self, data: bytes, start: int, end: int, count: int, out: list[Effect]) -> Routed:
        """Send a batch's records, one parcel for each destination and lane. One room's records keep their order."""
        cached, unpack, plain = self._cache.get, WALK.unpack_from, PLAIN_ROOM
        touched: list[Target] = []
        position, stale, lost, empty, wrong, not_kept, traced_us = start, 0, 0, 0, 0, 0, 0
        for _ in range(count):
            if position + HEADER_SIZE > end:
                break
            size, what, type_, _, room = unpack(data, position)
            after = position + SIZE_FIELD + size
            if size < MIN_SIZE or after > end:
                break
            if what != plain:
                kind, flags = what & 255, what >> 8
                if kind != ROOM and not (kind == SIGNAL and flags & Flag.TO_ROOM):
                    wrong += 1
                    position = after
                    continue
                if flags & Flag.TRACED:
                    traced_us = traced_us or self._tracer.now_us()
                elif kind == ROOM:
                    plain = what  # as a rule the next record's as well
            targets = cached(room)
            if targets is None:
                targets, served = self._look_up(room)
                if not served:
                    if targets and self._kept() and _is_to_keep(what, data[position + ORIGIN_AT]):
                        targets = ()  # its room may have kept filters there, and nobody would hear of the refusal
                    stale += 1
                    lost += not targets
                elif room in self._routes:
                    route = self._routes[room]
                    if route.kept and _is_to_keep(what, data[position + ORIGIN_AT]):
                        not_kept += 1
                        position = after
                        continue
                    if route.groups:
                        targets = self.groups.give(route, data[position:after], touched)
                else:
                    empty += not targets
            record = data[position:after]
            if type_ >= FIRST_LANE_BELOW:
                for target in targets:
                    if not target.normal:
                        touched.append(target)
                    target.normal.append(record)
            else:
                for target in targets:
                    if not target.first:
                        touched.append(target)
                    target.first.append(record)
            position = after
        else:
            if position == end:
                parcels, copies = take_parcels(touched, self._tracer, traced_us)
                out += parcels
                self.counters.add(count, copies, empty, wrong)
                return self.counters.passed_on(stale, lost, not_kept) if stale or not_kept else Routed.TAKEN
        discard(touched)
        self.counters.batches_malformed += 1
        return Routed.MALFORMED

    def _look_up(self, room: int) -> tuple[tuple[Target, ...], bool]:
        """Look up a room that is not cached. Returns its targets, and whether this partition serves it.

        Only rooms with members are cached, so that invented rooms cannot fill the cache.
        """
        route = self._routes.get(room)
        if route is not None:
            return route.targets, True
        if self._serves(room):
            route = self._find_route(room)
            if route is not None:
                if len(self._routes) >= MAX_CACHED_ROOMS:
                    self._routes.clear()
                self._routes[room] = route
                return route.targets, True
            targets = self._gateways(room)
            if targets:
                if len(self._cache) >= MAX_CACHED_ROOMS:
                    self._cache.clear()
                self._cache[room] = targets
            return targets, True
        target = self._elsewhere(room)
        return () if target is None else (target,), False


def _is_to_keep(what: int, origin: int) -> bool:
    """True if a record has to be kept for sessions with a filter that matches, and is not yet. `what`: as `WALK` reads it."""
    return what & 255 == ROOM and not what >> 8 & Flag.KEPT and origin >> QOS_SHIFT != QOS_0
