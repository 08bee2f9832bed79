"""Look-up from a record's room to its members' relays, each with the list of its users. Pure.

The cost is per member, while the path by gateways costs per gateway; brokers need not know gateways then, and relays decide where a
user is.

Source: PiXiu §7.4; docs/architecture.md, "Through relays".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from broker.barriers import Barriers
from broker.fanout import FanoutCounters, Routed
from cluster.core.parcels import Target, discard, take_parcels
from cluster.membership.events import Effect
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous
from pixiu.wire.record import FIRST_LANE_BELOW, HEADER_SIZE, MIN_SIZE, ROOM, ROUTE, SIGNAL, SIZE_FIELD, Flag
from pixiu.wire.trace import UNTRACED, Tracer
from pixiu.wire.uin_list import MAX_UINS, address, uin_list

MAX_CACHED_MEMBERS: Final = 4_000_000
"""Members in the cached lists. Policy: at the bound all are built again."""

Way = tuple[Target, bytes]
"""A relay and the list of users before the record; an empty list: a broker that gets the record unchanged."""


class Relays:
    """Relays that get rooms' messages."""

    def __init__(self) -> None:
        self.partitions = 0
        self._targets: dict[EndpointID, Target] = {}
        self._by_partition: dict[int, list[EndpointID]] = {}
        self.lacking = 0
        """Lists of users whose partition had no relay when they were made."""

    def change(self, partitions: int, replicas: Iterable[tuple[EndpointID, int]]) -> None:
        """Use these replicas: endpoint and partition."""
        self.partitions = partitions
        self._by_partition = {}
        for endpoint, partition in replicas:
            self._by_partition.setdefault(partition, []).append(endpoint)
        known = [endpoint for group in self._by_partition.values() for endpoint in group]
        self._targets = {endpoint: self._targets.get(endpoint) or Target(endpoint) for endpoint in known}

    def ways(self, room: int, uins: Iterable[int]) -> tuple[Way, ...]:
        """One relay for each partition of a room's members; always the same for a room, which keeps order."""
        users: dict[int, list[int]] = {}
        for uin in dict.fromkeys(uins):
            users.setdefault(uin % self.partitions if self.partitions else 0, []).append(uin)
        ways: list[Way] = []
        for partition, found in sorted(users.items()):
            replicas = self._by_partition.get(partition)
            if not replicas:
                self.lacking += 1
                continue
            target = self._targets[EndpointID(rendezvous(room, replicas))]
            ways += [(target, uin_list(found[at : at + MAX_UINS])) for at in range(0, len(found), MAX_UINS)]
        return tuple(ways)


class AddressedFanout:
    """Routes records through relays; the interface is that of `broker.fanout.Fanout`.

    Args:
        ways: gives the destinations for records of a room that this partition serves.
        serves: True if this partition serves a room.
        elsewhere: gives the target for records of a room that it does not serve; None: nowhere.
        tracer: stamps traced records.
    """

    def __init__(
        self,
        ways: Callable[[int], tuple[Way, ...]],
        serves: Callable[[int], bool],
        elsewhere: Callable[[int], Target | None],
        tracer: Tracer = UNTRACED,
    ) -> None:
        self._ways = ways
        self._serves = serves
        self._elsewhere = elsewhere
        self._tracer = tracer
        self._cache: dict[int, tuple[Way, ...]] = {}
        self._cached_members = 0
        self._barriers = Barriers()
        self.counters = FanoutCounters()

    def forget(self, rooms: Iterable[int]) -> None:
        """Forget rooms whose members changed."""
        for room in rooms:
            ways = self._cache.pop(room, ())
            if ways:
                self._cached_members -= sum(len(listed) // 8 for _, listed in ways)
                self._barriers.changed(room)

    def forget_all(self) -> None:
        """Forget all rooms: the relays, or the partition rule, changed."""
        self._clear()
        self._barriers.all_changed()

    def _clear(self) -> None:
        self._cache.clear()
        self._cached_members = 0

    def route(self, data: bytes, start: int, end: int, count: int, out: list[Effect]) -> Routed:
        """Route a batch through relays; the contract is that of `broker.fanout.Fanout.route`."""
        routed = self._route(data, start, end, count, out)
        if routed is not Routed.MALFORMED:
            self.counters.records_in += count
            if self._barriers.full:
                self._go_on(self._barriers.give_up(), out)
        return routed

    def settled(self, parcels: Iterable[tuple[int, bool]], out: list[Effect]) -> None:
        """Note parcels that were handled or lost: (token, whether handled). Records that waited for them are sent."""
        self._go_on(self._barriers.settled(parcels), out)

    def waits(self, room: int) -> bool:
        """True if a record for a room would wait now."""
        return self._barriers.holds(room)

    def _go_on(self, records: list[bytes], out: list[Effect]) -> None:
        if records:
            data = b"".join(records)
            self._route(data, 0, len(data), len(records), out)

    def _route(self, data: bytes, start: int, end: int, count: int, out: list[Effect]) -> Routed:
        position, stale, lost, empty, wrong = start, 0, 0, 0, 0
        touched: dict[Target, None] = {}
        held: list[int] = []
        barriers = self._barriers if self._barriers.up else None
        for _ in range(count):
            if position + HEADER_SIZE > end:
                break
            size, kind, flags, type_, _, room = ROUTE.unpack_from(data, position)
            after = position + SIZE_FIELD + size
            if size < MIN_SIZE or after > end:
                break
            if kind != ROOM and not (kind == SIGNAL and flags & Flag.TO_ROOM):
                wrong += 1
                position = after
                continue
            if barriers is not None and kind == ROOM and barriers.hold(room, data[position:after]):
                held.append(room)
                position = after
                continue
            ways = self._cache.get(room)
            if ways is None:
                ways, served = self._look_up(room)
                if served:
                    empty += not ways
                else:
                    stale += 1
                    lost += not ways
            record = data[position:after]
            if flags & Flag.TRACED:
                # Stamped before the list is put in front: the traced record is the one inside.
                now_us = self._tracer.now_us()
                record = self._tracer.stamp(record, now_us, now_us)
            for target, listed in ways:
                touched[target] = None
                lane = target.normal if type_ >= FIRST_LANE_BELOW else target.first
                lane.append(address(record, listed) if listed else record)
            position = after
        else:
            if position == end:
                parcels, copies = take_parcels(touched, self._tracer, 0)
                self._barriers.sent(parcels)
                out += parcels
                self.counters.add(0, copies, empty, wrong)
                return self.counters.passed_on(stale, lost) if stale else Routed.TAKEN
        for room in reversed(held):
            self._barriers.take_back(room)
        discard(touched)
        self.counters.batches_malformed += 1
        return Routed.MALFORMED

    def _look_up(self, room: int) -> tuple[tuple[Way, ...], bool]:
        if not self._serves(room):
            target = self._elsewhere(room)
            return () if target is None else ((target, b""),), False
        ways = self._ways(room)
        if ways:
            if self._cached_members >= MAX_CACHED_MEMBERS:
                self._clear()
            self._cache[room] = ways
            self._cached_members += sum(len(listed) // 8 for _, listed in ways)
        return ways, True
