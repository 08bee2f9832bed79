"""Which devices of which users are connected to this gateway, and what the relays must be told of it. Pure.

The first connection of a device connects it, the last one to go disconnects it; one that opens in between gives it a
new connect time, because the user may have been elsewhere meanwhile. Whether a connection takes the user's own messages, or
mail, is said with the old connect time. But mail goes to one connection of a device, the newest that takes it: when that
becomes another one, or begins again, the connect time is a new one, so that relays begin a new session with it.

Source: PiXiu §7.2; docs/architecture.md, docs/memberships.md; docs/delivery.md, "Rules for gateways".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.membership.devices import connected, connection_of, device_key
from cluster.membership.lww_map import Update
from gateway.hybrid_clock import HybridClock
from pixiu.wire.inbox_operations import cut_name


@dataclass(slots=True)
class _Device:
    """A device that is connected here."""

    connect_time: int
    login: bool
    fresh: bool = True
    """It connected, and no relay has confirmed that yet."""
    connections: frozenset[int] = frozenset()
    """Frozen: the empty ones are all the same, and a set of each device's own has 216 bytes."""
    chat: frozenset[int] = frozenset()
    """Those of its connections that take the user's own messages."""
    mail: frozenset[int] = frozenset()
    """Those that take mail."""
    name: str = ""
    """What its user calls it."""
    mail_told: bool = False
    """Relays were told of mail with this connect time: they may have a session that goes by it."""

    @property
    def target(self) -> int:
        """The connection that gets its mail; 0: none."""
        return max(self.mail, default=0)


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
        """Connections that take mail."""

    def __len__(self) -> int:
        """Devices that are connected here."""
        return len(self._devices)

    def pairs(self, connection: int) -> list[tuple[int, int]]:
        """The (UIN, device) of a connection that is a device, the device as `cluster.membership.devices.device_key` has it."""
        return [self._of[connection]] if connection in self._of else []

    def opened(
        self, connection: int, uin: int, device: int, device_class: int, wall_ms: int, *, login: bool = True, name: str = ""
    ) -> list[Update]:
        """A connection of a device is there. `wall_ms`: Unix milliseconds. `login`: it counts as a login of the user. `name`: of
        the device, which relays are told when it takes mail."""
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
        """A connection is gone. `reason` is a `Reason` of control.proto."""
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
        """A connection takes the user's own messages from now on, or mail, or both."""
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
        """A connection takes them no longer."""
        pair = self._of.get(connection)
        return [] if pair is None else self._leave(pair, connection, chat=chat, mail=mail)

    def mail_target(self, uin: int, key: int, connect_time: int) -> int:
        """The connection that gets the mail of a device which connected at that time; 0: there is none."""
        found = self._devices.get((uin, key))
        return found.target if found is not None and found.connect_time == connect_time else 0

    def older(self, connection: int) -> list[int]:
        """The other connections of its device that take mail: it replaces them."""
        pair = self._of.get(connection)
        return sorted(self._devices[pair].mail - {connection}) if pair is not None else []

    def takes_mail(self, connection: int) -> bool:
        """Whether a connection does."""
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
        """A relay knows a higher connect time of the device on another gateway than the one that `change` told.

        If the connection is new here, this gateway's clock was behind: say it once more, above.
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
        """The connections of a device that connected no later than a time, which a newer login replaces."""
        found = self._devices.get((uin, key))
        return sorted(found.connections) if found is not None and found.connect_time <= connect_time else []

    def confirmed(self, change: Update) -> None:
        """A relay knows a change; what is said of the device from now on repeats its connect time."""
        found = self._devices.get((change.group, change.member))
        if found is not None and found.connect_time == connection_of(change).connect_time:
            found.fresh = False

    def _say(self, pair: tuple[int, int], found: _Device) -> Update:
        mail = bool(found.mail)
        name = found.name if mail else ""
        return connected(self._next_id(), *pair, found.connect_time, chat=bool(found.chat), login=found.login, mail=mail, name=name)
