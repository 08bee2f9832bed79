"""From a record's room to the gateways that have members: the broker's hot path. Pure.

A batch is walked once, in place; each record is cut out once and put on the list of every gateway that gets it.

Source: seed 004 §2.3 step 10, §5.3 step 12; DESIGN sections 5 and 9, "Room message".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from broker.events import SendRecords
from pixiu.ids import EndpointID
from pixiu.wire.record import HEADER_SIZE, LEAST_SIZE, PLAIN_ROOM, SIZE_FIELD, WALK, Flag, Kind
from pixiu.wire.trace import UNTRACED, Tracer

FIRST_LANE_BELOW: Final = 64
"""A record type below this is in lane 0 (its top two bits are the lane)."""
ROOM: Final = int(Kind.ROOM)
SIGNAL: Final = int(Kind.SIGNAL)
MAX_CACHED_ROOMS: Final = 1_000_000
"""Policy: the cache starts anew."""


@dataclass(slots=True, eq=False)
class Target:
    """A gateway, or a broker to pass on to, with the parcel that is being made up for it."""

    endpoint: EndpointID
    normal: list[bytes] = field(default_factory=list)
    first: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class FanoutCounters:
    """Records, since the start."""

    records_in: int = 0
    copies_out: int = 0
    records_without_members: int = 0
    records_wrong_kind: int = 0
    """Neither to a room nor a signal to a room."""
    records_unroutable: int = 0
    """For a room of another partition, too late after a doubling or without a replica there."""
    records_passed_on: int = 0
    """For a room of another partition: the sender's layout is old."""
    batches_malformed: int = 0


class Fanout:
    """See the module.

    Args:
        gateways: the targets of a room that this partition serves; () where it has no members.
        serves: whether this partition serves a room.
        elsewhere: where to pass on the records of a room that it does not serve; None: nowhere.
        tracer: stamps traced records.
    """

    def __init__(
        self,
        gateways: Callable[[int], tuple[Target, ...]],
        serves: Callable[[int], bool],
        elsewhere: Callable[[int], Target | None],
        tracer: Tracer = UNTRACED,
    ) -> None:
        self._gateways = gateways
        self._serves = serves
        self._elsewhere = elsewhere
        self._tracer = tracer
        self._cache: dict[int, tuple[Target, ...]] = {}
        self.counters = FanoutCounters()

    def forget(self, rooms: Iterable[int]) -> None:
        """The gateways of these rooms changed."""
        cache = self._cache
        for room in rooms:
            cache.pop(room, None)

    def forget_all(self) -> None:
        """The gateways themselves, or the partition rule, changed."""
        self._cache.clear()

    def route(self, data: bytes, start: int, end: int, count: int) -> tuple[list[SendRecords], bool] | None:
        """What to send for a batch, one parcel for each destination and lane, and whether some records were for
        another partition. None: the batch is malformed; nothing of it is sent.

        One room's records keep their order.
        """
        cached, unpack, plain = self._cache.get, WALK.unpack_from, PLAIN_ROOM
        touched: list[Target] = []
        stale, position, empty, wrong, traced_us = 0, start, 0, 0, 0
        for _ in range(count):
            if position + HEADER_SIZE > end:
                break
            size, what, type_, _, room = unpack(data, position)
            after = position + SIZE_FIELD + size
            if size < LEAST_SIZE or after > end:
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
                stale += not served
                empty += served and not targets
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
                self.counters.records_in += count
                self.counters.records_without_members += empty
                self.counters.records_wrong_kind += wrong
                return self._parcels(touched, traced_us), bool(stale)
        for target in touched:
            target.normal, target.first = [], []
        self.counters.batches_malformed += 1
        return None

    def _parcels(self, touched: list[Target], traced_us: int) -> list[SendRecords]:
        parcels: list[SendRecords] = []
        copies = 0
        for target in touched:
            if traced_us:
                self._tracer.stamp_all(target.first, traced_us)
                self._tracer.stamp_all(target.normal, traced_us)
            # Lane 0 stands first; a target touched in both lanes is in the list twice.
            if target.first:
                parcels.append(SendRecords(target.endpoint, target.first, 0))
                copies += len(target.first)
                target.first = []
            if target.normal:
                parcels.append(SendRecords(target.endpoint, target.normal, 1))
                copies += len(target.normal)
                target.normal = []
        self.counters.copies_out += copies
        return parcels

    def _look_up(self, room: int) -> tuple[tuple[Target, ...], bool]:
        """The targets of a room that is not cached, and whether this partition serves it.

        Only rooms with members are cached: what anybody may invent cannot fill the cache.
        """
        if self._serves(room):
            targets = self._gateways(room)
            if targets:
                if len(self._cache) >= MAX_CACHED_ROOMS:
                    self._cache.clear()
                self._cache[room] = targets
            return targets, True
        target = self._elsewhere(room)
        if target is None:
            self.counters.records_unroutable += 1
            return (), False
        self.counters.records_passed_on += 1
        return (target,), False
