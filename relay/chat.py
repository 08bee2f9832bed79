"""Routing of a record from its user to the gateways of the user's devices, and of rooms' messages by their lists of users. Pure.

A batch is walked once, in place; each record is copied once and added to the list of every gateway that gets it.

Source: PiXiu §7.3 ("forwards Chat Messages … drops them when the user is offline"); docs/architecture.md, "A message to a user".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.core.parcels import Target, discard, take_parcels
from cluster.membership.events import Effect
from pixiu.wire.record import ADDRESSED, CHAT, FIRST_LANE_BELOW, FLAGS_AT, HEADER_SIZE, MIN_SIZE, SIGNAL, SIZE_FIELD, WALK, Flag
from pixiu.wire.trace import UNTRACED, Tracer
from pixiu.wire.uin_list import take_apart


@dataclass(slots=True)
class ChatCounters:
    """Numbers of records, since the start."""

    records_in: int = 0
    copies_out: int = 0
    records_offline: int = 0
    """For a user without a device that accepts them."""
    records_wrong_kind: int = 0
    """Sent to a room, mail, or a malformed addressed record."""
    addressed_in: int = 0
    """Rooms' messages from brokers."""
    records_unroutable: int = 0
    """For a user of another partition, too late after a doubling or without a replica there."""
    records_passed_on: int = 0
    """For a user of another partition: the sender's layout is old."""
    batches_malformed: int = 0


@dataclass(slots=True)
class Routed:
    """Outcome of a batch beside the parcels."""

    offline: list[int] = field(default_factory=list)
    """SnowflakeIDs of records without a receiver."""
    stale: int = 0
    """Records for users of another partition."""
    lost: int = 0
    """Those of them that could not be passed on."""


class ChatFanout:
    """Routes records to the gateways of their users' devices.

    Args:
        gateways: returns the targets of a user that this partition serves; () if no device accepts messages.
        serves: returns True if this partition serves a user.
        elsewhere: returns the target for records of a user that it does not serve; None: there is none.
        connected: returns the targets of all of a user's connections, for rooms' messages.
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

    def route(self, data: bytes, start: int, end: int, count: int, out: list[Effect]) -> Routed | None:
        """Send a batch's records, one parcel for each destination and lane. None: the batch is malformed, and nothing of it is
        sent. One user's records keep their order."""
        unpack, touched, routed = WALK.unpack_from, dict[Target, None](), Routed()
        position, plain, traced_us = start, CHAT, 0
        for _ in range(count):
            if position + HEADER_SIZE > end:
                break
            size, what, type_, snowflake, uin = unpack(data, position)
            after = position + SIZE_FIELD + size
            if size < MIN_SIZE or after > end:
                break
            if what == plain:
                targets, record = self._targets(uin, snowflake, routed), b""
            else:
                kind, flags = what & 255, what >> 8
                if kind == CHAT or (kind == SIGNAL and not flags & Flag.TO_ROOM):
                    targets, record = self._targets(uin, snowflake, routed), b""
                    if kind == CHAT and not flags & Flag.TRACED:
                        plain = what  # usually the next record's as well
                else:
                    targets, record = self._addressed(kind, data, position, after)
                    flags = record[FLAGS_AT] if record else 0
                if flags & Flag.TRACED:
                    traced_us = traced_us or self._tracer.now_us()
            if targets:
                record = record or data[position:after]
                for target in targets:
                    touched[target] = None
                    (target.normal if type_ >= FIRST_LANE_BELOW else target.first).append(record)
            position = after
        else:
            if position == end:
                parcels, copies = take_parcels(touched, self._tracer, traced_us)
                out += parcels
                self._count(count, copies, routed)
                return routed
        discard(touched)
        self.counters.batches_malformed += 1
        return None

    def _count(self, records: int, copies: int, routed: Routed) -> None:
        counters = self.counters
        counters.records_in += records
        counters.copies_out += copies
        counters.records_offline += len(routed.offline)
        counters.records_passed_on += routed.stale - routed.lost
        counters.records_unroutable += routed.lost

    def _targets(self, uin: int, snowflake: int, routed: Routed) -> tuple[Target, ...]:
        if self._serves(uin):
            targets = self._gateways(uin)
            if not targets:
                routed.offline.append(snowflake)
            return targets
        routed.stale += 1
        elsewhere = self._elsewhere(uin)
        if elsewhere is None:
            routed.lost += 1
            return ()
        return (elsewhere,)

    def _addressed(self, kind: int, data: bytes, start: int, end: int) -> tuple[tuple[Target, ...], bytes]:
        """Cut a room's message out of its list of users; gateways know which of their clients are in the room.

        Users of another partition are looked up as well: after a doubling they are still known here for a while.
        """
        found = take_apart(data, start, end) if kind == ADDRESSED else None
        if found is None:
            self.counters.records_wrong_kind += 1
            return (), b""
        self.counters.addressed_in += 1
        uins, record = found
        connected = self._connected
        return tuple({target: None for uin in uins for target in connected(uin)}), record
