"""Groups of shared subscriptions in a broker: which gateway gets a message for a group, and what happens if it does not. Pure.

    record ──▶ one gateway with members of the group: rendezvous by SnowflakeID ── taken ──▶ forgotten
                  └ returned (no member any more), or the gateway is dead ──▶ the next gateway; none: nobody is there

A broker keeps a message whose members acknowledge until the gateway reports that one of them has. So a message outlives the death
of the gateway that had it, but not that of the broker and the gateway together.

Source: docs/subscriptions.md, "Shared subscriptions".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from cluster.core.contract import SendRecords
from cluster.core.parcels import Target
from cluster.membership.events import Effect
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous
from pixiu.wire.record import FIRST_LANE_BELOW, KEY_AT, KIND_AT, ROOM, SENDER_AT, SNOWFLAKE_AT, TYPE_AT
from pixiu.wire.uin_list import MAX_UINS, address, uin_list

OUTCOME: Final = struct.Struct("<QQ")
"""SnowflakeID and number of the group."""
OTHERS: Final = 0
"""In the list before a record: the record is for the gateway's other members, too."""
MEMBERS_ACKNOWLEDGE: Final = 2
"""Value of a group whose members acknowledge; `gateway.membership.shared`."""
MAX_HELD: Final = 200_000
MAX_HELD_BYTES: Final = 64 << 20
"""Messages that wait for acknowledgements. Policy: beyond this the oldest are forgotten, and lost if their gateway dies."""


class Group(NamedTuple):
    """A group that has members for a room."""

    number: int
    acknowledges: bool
    gateways: dict[EndpointID, Target]


class Route(NamedTuple):
    """A room with groups, or with kept filters."""

    targets: tuple[Target, ...]
    """Gateways with other members."""
    groups: tuple[Group, ...]
    kept: bool = False
    """True if sessions keep filters here: messages are kept for these before they are delivered."""


@dataclass(slots=True)
class _Held:
    record: bytes
    gateway: EndpointID
    tried: frozenset[EndpointID] = frozenset()


@dataclass(slots=True)
class GroupCounters:
    """Messages for groups, since the start."""

    shared_records: int = 0
    shared_given_again: int = 0
    """Messages that another gateway got, because the first one had no member or died."""
    shared_nobody: int = 0
    """Messages given back for which no gateway had a member."""
    shared_forgotten: int = 0
    """Messages forgotten before they were acknowledged."""


class Groups:
    """Messages for groups.

    Args:
        route: gives the route of a room; None: it has no groups.
    """

    def __init__(self, route: Callable[[int], Route | None]) -> None:
        self._route = route
        self._held: dict[tuple[int, int], _Held] = {}
        """(SnowflakeID, group) → message."""
        self._bytes = 0
        self.counters = GroupCounters()

    def __len__(self) -> int:
        """Messages that wait for acknowledgements."""
        return len(self._held)

    def give(self, route: Route, record: bytes, touched: list[Target]) -> tuple[Target, ...]:
        """Queue a record for one gateway of each group. Returns the targets that still get it as it is."""
        snowflake = int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little")
        numbers: dict[EndpointID, list[int]] = {}
        targets: dict[EndpointID, Target] = {}
        for group in route.groups:
            gateway = EndpointID(rendezvous(snowflake, group.gateways))
            held = self._held.get((snowflake, group.number))
            if held is not None and held.gateway in group.gateways:
                gateway = held.gateway  # a publisher's repeat: that gateway knows that it has it
            elif held is not None:
                held.gateway = gateway
            numbers.setdefault(gateway, []).append(group.number)
            targets[gateway] = group.gateways[gateway]
            if group.acknowledges and record[KIND_AT] == ROOM:
                self._hold(snowflake, group.number, _Held(record, gateway))
        self.counters.shared_records += 1
        left = tuple(target for target in route.targets if target.endpoint not in numbers)
        others = {target.endpoint for target in route.targets}
        for gateway, found in numbers.items():
            if gateway in others:
                found.append(OTHERS)
            target = targets[gateway]
            touched.append(target)
            lane = target.normal if record[TYPE_AT] >= FIRST_LANE_BELOW else target.first
            lane += [address(record, uin_list(found[at : at + MAX_UINS])) for at in range(0, len(found), MAX_UINS)]
        return left

    def outcome(self, gateway: EndpointID, taken: bytes, returned: bytes, out: list[Effect]) -> None:
        """Note what a gateway reports."""
        for snowflake, number in OUTCOME.iter_unpack(taken):
            held = self._held.get((snowflake, number))
            if held is not None and held.gateway == gateway:
                self._forget((snowflake, number))
        for snowflake, number in OUTCOME.iter_unpack(returned):
            held = self._held.get((snowflake, number))
            if held is not None and held.gateway == gateway:
                self._give_again((snowflake, number), held, out)

    def gone(self, gateways: Iterable[EndpointID], out: list[Effect]) -> None:
        """Give what dead gateways had to others."""
        dead = frozenset(gateways)
        for key, held in [(key, held) for key, held in self._held.items() if held.gateway in dead]:
            self._give_again(key, held, out)

    def gateways(self) -> set[EndpointID]:
        """Gateways that have messages which wait for acknowledgements."""
        return {held.gateway for held in self._held.values()}

    def _give_again(self, key: tuple[int, int], held: _Held, out: list[Effect]) -> None:
        snowflake, number = key
        held.tried |= {held.gateway}
        route = self._route(int.from_bytes(held.record[KEY_AT:SENDER_AT], "little"))
        group = next((group for group in route.groups if group.number == number), None) if route is not None else None
        able = [gateway for gateway in group.gateways if gateway not in held.tried] if group is not None else []
        if not able:
            self.counters.shared_nobody += 1
            self._forget(key)
            return
        self.counters.shared_given_again += 1
        held.gateway = EndpointID(rendezvous(snowflake, able))
        lane = int(held.record[TYPE_AT] >= FIRST_LANE_BELOW)
        out.append(SendRecords(held.gateway, [address(held.record, uin_list([number]))], lane))

    def _hold(self, snowflake: int, number: int, held: _Held) -> None:
        key = snowflake, number
        if key in self._held:
            return
        self._held[key] = held
        self._bytes += len(held.record)
        while len(self._held) > MAX_HELD or self._bytes > MAX_HELD_BYTES:
            self.counters.shared_forgotten += 1
            self._forget(next(iter(self._held)))

    def _forget(self, key: tuple[int, int]) -> None:
        self._bytes -= len(self._held.pop(key).record)
