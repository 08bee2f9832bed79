"""Relay data: the gateways of users' devices, and their connect times. Pure.

    (UIN, device, gateway instance) -> GatewayMsgID, connected or a tombstone, connect time and the messages it takes

The registers are those of `cluster.membership.map.lww_map.LwwMap`, with the UIN in place of the room and the device in place of the
user. So whatever repairs memberships (digests, listings, floors) repairs relay data.

    device  15 bits class | 48 bits DeviceID                                    identity
    value   61 bits connect time | takes mail | takes messages | is a login    connect time: see `gateway.membership.hybrid_clock`

A connection that is not a login is neither online nor subject to the login policy. It is a service that reads rooms, reported only
if rooms' messages go through relays; or, if it takes mail, the inbox of a session of MQTT that outlives its connection, whose user
is no person.

Among a device's entries the one with the highest connect time is the *current* one, ties by instance.

Source: PiXiu §7.3; docs/memberships.md, "Devices and logins".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

from cluster.membership.map.lww_map import MAX_ENTRIES, PURGE_SLICE, TOMBSTONE_S, Applied, Key, LwwMap, Purged
from cluster.membership.map.shards import UserCache
from cluster.membership.map.updates import Update
from pixiu.ids import DEVICE_BITS, gateway_instance

DEVICE_MASK: Final = (1 << DEVICE_BITS) - 1
MAX_CACHED_USERS: Final = 1_000_000
"""Users whose gateways are cached. Policy: a 512th of them is forgotten, and looked up anew."""
MAX_TOGETHER: Final = 100_000
"""Users with several entries that wait to be checked. Policy: more are not noted."""


class LoginPolicy(Enum):
    """Rule for a user's devices that may be online together. A device that may not is informed that it was replaced.

    Of one device only the newest connection counts in any case, as in MQTT for a client ID.
    """

    ALL = "all"
    NEWEST = "newest"
    """Only the device that connected last."""
    NEWEST_OF_CLASS = "newest_of_class"
    """In each class the device that connected last; devices without a class form one class."""


class Connection(NamedTuple):
    """One entry: a device on a gateway."""

    key: int
    """Class and DeviceID."""
    instance: int
    """Gateway instance."""
    connect_time: int
    chat: bool
    login: bool = True
    mail: bool = False

    @property
    def device(self) -> int:
        """The DeviceID in the key."""
        return self.key & DEVICE_MASK

    @property
    def rank(self) -> tuple[int, int]:
        """Order among the entries of a device: the highest is current."""
        return self.connect_time, self.instance


def device_key(device: int, device_class: int) -> int:
    """Key of a device in relays. `device`: below 2^48; `device_class`: below 2^15."""
    return device_class << DEVICE_BITS | device


def connected(
    id_: int, uin: int, key: int, connect_time: int, *, chat: bool, login: bool = True, mail: bool = False, name: str = ""
) -> Update:
    """Update for a device that connects to a gateway, or changes its data."""
    return Update(id_, uin, key, True, 0, connect_time << 3 | mail << 2 | chat << 1 | login, name)


def connection_of(change: Update) -> Connection:
    """Connection described by an update."""
    return _connection(change.member, gateway_instance(change.id), change.value)


def _connection(key: int, instance: int, value: int) -> Connection:
    return Connection(key, instance, value >> 3, bool(value & 2), bool(value & 1), bool(value & 4))


class Devices(LwwMap):
    """Gateways of users' devices. Arguments as in `LwwMap`.

    Args:
        policy: which devices may be online together.
    """

    __slots__ = ("_all", "_chat", "_oldest", "_policy", "_reachable", "_together")

    def __init__(
        self, *, policy: LoginPolicy = LoginPolicy.ALL, max_entries: int = MAX_ENTRIES, tombstone_s: float = TOMBSTONE_S
    ) -> None:
        super().__init__(max_entries=max_entries, tombstone_s=tombstone_s)
        self._policy = policy
        self._chat = UserCache(MAX_CACHED_USERS)
        self._all = UserCache(MAX_CACHED_USERS)
        self._reachable: frozenset[int] | None = None
        self._oldest = 0
        self._together: dict[int, None] = {}

    @property
    def users(self) -> int:
        """Number of users with a connected device."""
        return self.groups

    def set_reachable(self, instances: frozenset[int] | None) -> None:
        """Count only connections on these gateway instances as online; None: all.

        Entries of other instances stay: a gateway that returns finds its earlier reports.
        """
        if instances != self._reachable:
            self._reachable = instances
            self._chat.forget_all()
            self._all.forget_all()

    def set_oldest(self, connect_time: int) -> None:
        """Count only connections since this time as online: older ones have outlived the login tickets that they came with."""
        if connect_time != self._oldest:
            self._oldest = connect_time
            self._chat.forget_all()
            self._all.forget_all()

    def is_reachable(self, instance: int) -> bool:
        """True if a gateway instance is reachable."""
        return self._reachable is None or instance in self._reachable

    def entries(self, uin: int) -> list[Connection]:
        """All entries of a user on reachable gateways."""
        found: list[Connection] = []
        for key in self.live_keys(uin):
            if self.is_reachable(key.instance):
                entry = _connection(key.member, key.instance, self.value(*key))
                if entry.connect_time >= self._oldest:
                    found.append(entry)
        return found

    def connections(self, uin: int, *, sessions: bool = False) -> list[Connection]:
        """The current connection of every online device of a user. `sessions`: also of those that take mail without a login."""
        newest: dict[int, Connection] = {}
        for entry in self.entries(uin):
            if not (entry.login or (sessions and entry.mail)):
                continue
            there = newest.get(entry.device)
            if there is None or entry.rank > there.rank:
                newest[entry.device] = entry
        return list(newest.values())

    def chat_gateways(self, uin: int) -> tuple[int, ...]:
        """Gateway instances, ascending, at which a copy of a message to the user reaches a device."""
        found = self._chat.get(uin)
        if found is None:
            found = tuple(sorted({c.instance for c in self.connections(uin) if c.chat}))
            if found:  # only users with entries: invented users cannot fill the cache
                self._chat.put(uin, found)
        return found

    def gateways_of(self, uin: int) -> tuple[int, ...]:
        """Gateway instances with any connection of a user."""
        found = self._all.get(uin)
        if found is None:
            found = tuple(sorted({entry.instance for entry in self.entries(uin)}))
            if found:
                self._all.put(uin, found)
        return found

    def rivals(self, change: Update) -> list[Connection]:
        """Entries that may not be online together with the login in an update."""
        mine = connection_of(change)
        if not mine.login:
            return []
        others = [e for e in self.entries(change.group) if e.login and (e.key, e.instance) != (mine.key, mine.instance)]
        if self._policy is LoginPolicy.NEWEST:
            return others
        if self._policy is LoginPolicy.NEWEST_OF_CLASS:
            return [e for e in others if e.device == mine.device or e.key >> DEVICE_BITS == mine.key >> DEVICE_BITS]
        return [entry for entry in others if entry.device == mine.device]

    def losers(self, uin: int) -> list[tuple[Connection, Connection]]:
        """Logins of a user that must end, on any gateway, each with the newer login that displaces it."""
        logins = [_connection(key.member, key.instance, self.value(*key)) for key in self.live_keys(uin)]
        logins = [entry for entry in logins if entry.login]
        newest: dict[tuple[str, int], Connection] = {}
        for entry in logins:
            for place in self._places(entry):
                if place not in newest or entry.rank > newest[place].rank:
                    newest[place] = entry
        found: list[tuple[Connection, Connection]] = []
        for entry in logins:
            winner = next((newest[place] for place in self._places(entry) if newest[place] is not entry), None)
            if winner is not None:
                found.append((entry, winner))
        return found

    def _places(self, entry: Connection) -> list[tuple[str, int]]:
        """Places that a login occupies; each place is for one login."""
        places = [("device", entry.device)]
        if self._policy is LoginPolicy.NEWEST:
            places.append(("user", 0))
        elif self._policy is LoginPolicy.NEWEST_OF_CLASS:
            places.append(("class", entry.key >> DEVICE_BITS))
        return places

    def take_together(self) -> list[int]:
        """Users who got a login beside another entry since the last call."""
        found, self._together = list(self._together), {}
        return found

    def newer(self, change: Update) -> int:
        """Connect time of a rival that is above a login's; 0 if there is none."""
        mine = connection_of(change)
        highest = max((rival.rank for rival in self.rivals(change)), default=mine.rank)
        return highest[0] if highest > mine.rank else 0

    def apply(self, batch: Iterable[Update], now: float) -> Applied:
        """Apply updates like `LwwMap.apply`, and keep users' devices up to date."""
        applied = super().apply(batch, now)
        for change in applied.changes:
            self._chat.forget(change.group)
            self._all.forget(change.group)
            # A logout in the same batch may have ended it.
            entries = self.members(change.group) if change.login else 0
            if entries > 1 and len(self._together) < MAX_TOGETHER:
                self._together[change.group] = None
        return applied

    def purge_some(self, limit: int = PURGE_SLICE) -> Purged:
        """Continue purges, like `LwwMap.purge_some`."""
        return self._forget(super().purge_some(limit))

    def sweep(self, partition: int, partitions: int, keep: set[Key]) -> Purged:
        """Drop live entries that are not in `keep`, like `LwwMap.sweep`."""
        return self._forget(super().sweep(partition, partitions, keep))

    def _forget(self, purged: Purged) -> Purged:
        for key in purged.keys:
            self._chat.forget(key.group)
            self._all.forget(key.group)
        return purged
