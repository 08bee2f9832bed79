"""From a record's user to the gateways of the user's devices, and of rooms' messages from the users they are for. Pure.

A batch is walked once, in place; each record is cut out once and put on the list of every gateway that gets it.

Source: seed 004 §7.3 ("forwards Chat Messages … drops them when the user is offline"); DESIGN section 9, "Chat".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pixiu.ids import EndpointID
from pixiu.wire.record import HEADER_SIZE, LEAST_SIZE, SIZE_FIELD, WALK, Flag, Kind
from pixiu.wire.trace import UNTRACED, Tracer
from pixiu.wire.uin_list import take_apart
from relay.events import SendRecords


@dataclass(slots=True, eq=False)
class Target:
    """A gateway, or a relay to pass on to, with the parcel that is being made up for it: by lane."""

    endpoint: EndpointID
    lanes: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))


@dataclass(slots=True)
class ChatCounters:
    """Records, since the start."""

    records_in: int = 0
    copies_out: int = 0
    records_offline: int = 0
    """For a user without a device that takes them."""
    records_wrong_kind: int = 0
    """To a room, mail, or an addressed record that is malformed."""
    addressed_in: int = 0
    """Rooms' messages from brokers."""
    records_unroutable: int = 0
    """For a user of another partition, too late after a doubling or without a replica there."""
    records_passed_on: int = 0
    """For a user of another partition: the sender's layout is old."""
    batches_malformed: int = 0


@dataclass(slots=True)
class Routed:
    """What became of a batch."""

    parcels: list[SendRecords] = field(default_factory=list)
    offline: list[int] = field(default_factory=list)
    """SnowflakeIDs of records that nobody takes."""
    stale: bool = False
    """Some were for users of another partition."""


class ChatFanout:
    """See the module.

    Args:
        gateways: the targets of a user that this partition serves; () where no device takes messages.
        serves: whether this partition serves a user.
        elsewhere: where to pass on the records of a user that it does not serve; None: nowhere.
        connected: the targets of all of a user's connections, for rooms' messages.
        tracer: stamps traced records.
    """

    def __init__(
        self,
        gateways: Callable[[int], tuple[Target, ...]],
        serves: Callable[[int], bool],
        elsewhere: Callable[[int], Target | None],
        connected: Callable[[int], tuple[Target, ...]],
        tracer: Tracer = UNTRACED,
    ) -> None:
        self._connected = connected
        self._gateways = gateways
        self._serves = serves
        self._elsewhere = elsewhere
        self._tracer = tracer
        self.counters = ChatCounters()

    def route(self, data: bytes, start: int, end: int, count: int) -> Routed | None:
        """What to send for a batch, one parcel for each destination and lane. None: the batch is malformed; nothing of it
        is sent. One user's records keep their order."""
        unpack, chat, signal, counters = WALK.unpack_from, int(Kind.CHAT), int(Kind.SIGNAL), self.counters
        touched: dict[Target, None] = {}
        routed = Routed()
        position, plain, traced_us = start, chat, 0
        for _ in range(count):
            if position + HEADER_SIZE > end:
                break
            size, what, type_, snowflake, uin = unpack(data, position)
            after = position + SIZE_FIELD + size
            if size < LEAST_SIZE or after > end:
                break
            if what == plain:
                targets, record = self._targets(uin, snowflake, routed), b""
            else:
                kind, flags = what & 255, what >> 8
                if kind == chat or (kind == signal and not flags & Flag.TO_ROOM):
                    targets, record = self._targets(uin, snowflake, routed), b""
                    if kind == chat and not flags & Flag.TRACED:
                        plain = what  # as a rule the next record's as well
                else:
                    targets, record = self._addressed(kind, data, position, after)
                    flags = record[5] if record else 0
                if flags & Flag.TRACED:
                    traced_us = traced_us or self._tracer.now_us()
            if targets:
                record, lane = record or data[position:after], min(type_ >> 6, 1)
                for target in targets:
                    touched[target] = None
                    target.lanes[lane].append(record)
            position = after
        else:
            if position == end:
                counters.records_in += count
                counters.records_offline += len(routed.offline)
                routed.parcels = self._parcels(touched, traced_us)
                return routed
        for target in touched:
            target.lanes = ([], [])
        counters.batches_malformed += 1
        return None

    def _targets(self, uin: int, snowflake: int, routed: Routed) -> tuple[Target, ...]:
        if self._serves(uin):
            targets = self._gateways(uin)
            if not targets:
                routed.offline.append(snowflake)
            return targets
        routed.stale = True
        elsewhere = self._elsewhere(uin)
        if elsewhere is None:
            self.counters.records_unroutable += 1
            return ()
        self.counters.records_passed_on += 1
        return (elsewhere,)

    def _addressed(self, kind: int, data: bytes, start: int, end: int) -> tuple[tuple[Target, ...], bytes]:
        """A room's message, cut out of its list of users; gateways know which of their clients are in the room.

        Users of another partition are looked up as well: after a doubling they are still known here for a while.
        """
        found = take_apart(data, start, end) if kind == Kind.ADDRESSED else None
        if found is None:
            self.counters.records_wrong_kind += 1
            return (), b""
        self.counters.addressed_in += 1
        uins, record = found
        connected = self._connected
        return tuple({target: None for uin in uins for target in connected(uin)}), record

    def _parcels(self, touched: dict[Target, None], traced_us: int) -> list[SendRecords]:
        parcels: list[SendRecords] = []
        for target in touched:
            for lane, records in enumerate(target.lanes):
                if records:
                    if traced_us:
                        self._tracer.stamp_all(records, traced_us)
                    parcels.append(SendRecords(target.endpoint, records, lane))
                    self.counters.copies_out += len(records)
            target.lanes = ([], [])
        return parcels
