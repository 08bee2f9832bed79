"""Devices that are connected to this gateway, and the reports of them to the relays. Pure.

The first connection of a device connects it, the last one to close disconnects it. A connection that opens in between gives it a
new connect time, because the user may have been elsewhere meanwhile. Whether a connection takes the user's own messages, or mail,
is reported with the old connect time. But mail goes to one connection of a device, the newest that takes it: when that changes, or
starts over, the device gets a new connect time, so that relays begin a new session with it.

The inbox of an MQTT session that outlives its connection is the mail of a pseudo-user with one device. The connection stands for it
by its number below 0.

Source: PiXiu §7.2; docs/architecture.md, docs/memberships.md; docs/delivery.md, "Rules for gateways".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.membership.map.devices import connected, connection_of, device_key
from cluster.membership.map.updates import Update
from gateway.membership.hybrid_clock import HybridClock
from pixiu.wire.inbox_operations import cut_name


@dataclass(slots=True)
class _Device:
    """A device that is connected here."""

    connect_time: int
    login: bool
    fresh: bool = True
    """True from a connect until a relay has confirmed it."""
    connections: frozenset[int] = frozenset()
    """Frozen, so that empty sets are shared; a mutable set per device takes 216 bytes."""
    chat: frozenset[int] = frozenset()
    """Its connections that take the user's own messages."""
    mail: frozenset[int] = frozenset()
    """Its connections that take mail."""
    name: str = ""
    """Name that its user gave it."""
    mail_told: bool = False
    """True if mail was reported to relays with this connect time: they may have a session based on it."""

    @property
    def target(self) -> int:
        """Connection that gets the device's mail, the newest; 0: none."""
        return max(self.mail, key=abs, default=0)


class DeviceIndex:
    """The connected devices of each user. Its methods return what to report to the relays.

    Args:
        next_id: gives the next GatewayMsgID; strictly increasing.
    """

    def __init__(self, next_id: Callable[[], int]) -> None:
        self._next_id = next_id
        self._clock = HybridClock()
        self._devices: dict[tuple[int, int], _Device] = {}
        self._of: dict[int, tuple[int, int]] = {}
        self.mail_connections = 0
        """Number of connections that take mail, and of inboxes of sessions."""

    def __len__(self) -> int:
        """Number of devices that are connected here."""
        return len(self._devices)

    def pairs(self, connection: int) -> list[tuple[int, int]]:
        """(UIN, device) of a connection that is a device, with the device as in `cluster.membership.map.devices.device_key`."""
        return [self._of[connection]] if connection in self._of else []

    def opened(
        self, connection: int, uin: int, device: int, device_class: int, wall_ms: int, *, login: bool = True, name: str = ""
    ) -> list[Update]:
        """Add a connection of a device. `wall_ms`: Unix milliseconds. `login`: it counts as a login of the user. `name`: of the
        device, reported to relays when it takes mail."""
        pair, time = (uin, device_key(device, device_class)), self._clock.next(wall_ms)
        found = self._devices.get(pair)
        if found is None:
            found = self._devices[pair] = _Device(time, login)
        found.connect_time, found.fresh = time, True
        found.name = cut_name(name)
        found.mail_told = bool(found.mail)
        found.connections |= {connection}
        self._of[connection] = pair
        return [self._say(pair, found)]

    def closed(self, connection: int, reason: int) -> list[Update]:
        """Remove a connection that ended. `reason`: a `Reason` of control.proto."""
        pair = self._of.pop(connection, None)
        if pair is None:
            return []
        found = self._devices[pair]
        found.connections -= {connection}
        if not found.connections:
            self.mail_connections -= len(found.mail)
            del self._devices[pair]
            return [Update(self._next_id(), *pair, False, reason)]
        return self._leave(pair, connection, chat=True, mail=True)

    def join(self, connection: int, *, chat: bool = False, mail: bool = False) -> list[Update]:
        """Let a connection take the user's own messages, or mail, or both."""
        pair = self._of.get(connection)
        if pair is None:
            return []
        found = self._devices[pair]
        before = bool(found.chat), found.target
        if chat:
            found.chat |= {connection}
        if mail and connection not in found.mail:
            found.mail |= {connection}
            self.mail_connections += 1
        return self._changed(pair, found, before)

    def leave(self, connection: int, *, chat: bool = False, mail: bool = False) -> list[Update]:
        """Let a connection take them no longer."""
        pair = self._of.get(connection)
        return [] if pair is None else self._leave(pair, connection, chat=chat, mail=mail)

    def mail_target(self, uin: int, key: int, connect_time: int) -> int:
        """Connection that gets the mail of a device with this connect time; 0: none."""
        found = self._devices.get((uin, key))
        return found.target if found is not None and found.connect_time == connect_time else 0

    def older(self, connection: int) -> list[int]:
        """Other connections of the same device that take mail, which this one replaces."""
        pair = self._of.get(connection)
        return sorted(self._devices[pair].mail - {connection}) if pair is not None else []

    def takes_mail(self, connection: int) -> bool:
        """True if a connection takes mail."""
        pair = self._of.get(connection)
        return pair is not None and connection in self._devices[pair].mail

    def _leave(self, pair: tuple[int, int], connection: int, *, chat: bool, mail: bool) -> list[Update]:
        found = self._devices[pair]
        before = bool(found.chat), found.target
        if chat:
            found.chat -= {connection}
        if mail and connection in found.mail:
            found.mail -= {connection}
            self.mail_connections -= 1
        return self._changed(pair, found, before)

    def _changed(self, pair: tuple[int, int], found: _Device, before: tuple[bool, int]) -> list[Update]:
        after = bool(found.chat), found.target
        if after == before:
            return []
        if after[1] not in (0, before[1]):
            if found.mail_told:
                found.connect_time = self._clock.next(0)
            found.mail_told = True
        return [self._say(pair, found)]

    def overtaken(self, change: Update, time: int) -> list[Update]:
        """Handle a relay's report that it knows a higher connect time of the device on another gateway than `change` has.

        If the connection is new here, this gateway's clock was late: report it again with a higher time.
        """
        pair = change.group, change.member
        found = self._devices.get(pair)
        if found is None or not found.fresh or not change.login:
            return []
        self._clock.see(time)
        found.connect_time, found.fresh = self._clock.next(0), False
        found.mail_told = bool(found.mail)
        return [self._say(pair, found)]

    def replaced(self, uin: int, key: int, connect_time: int) -> list[int]:
        """Connections of a device that connected no later than a time, and that a newer login replaces."""
        found = self._devices.get((uin, key))
        return sorted(found.connections) if found is not None and found.connect_time <= connect_time else []

    def confirmed(self, change: Update) -> None:
        """Note that a relay knows a change; later reports of the device repeat its connect time."""
        found = self._devices.get((change.group, change.member))
        if found is not None and found.connect_time == connection_of(change).connect_time:
            found.fresh = False

    def _say(self, pair: tuple[int, int], found: _Device) -> Update:
        mail = bool(found.mail)
        name = found.name if mail else ""
        return connected(self._next_id(), *pair, found.connect_time, chat=bool(found.chat), login=found.login, mail=mail, name=name)
