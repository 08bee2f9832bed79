"""Which devices of which users are connected to this gateway, and what the relays must be told of it. Pure.

The first connection of a device connects it, the last one to go disconnects it; one that opens in between gives it a
new connect time, because the user may have been elsewhere meanwhile. Whether a connection takes the user's own messages
is said with the old connect time.

Source: seed 004 §7.2; DESIGN section 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pixiu.devices import connected, connection_of, device_key
from pixiu.hybridclock import HybridClock
from pixiu.softstore import Change


@dataclass(slots=True)
class _Device:
    """A device that is connected here."""

    connect_time: int
    login: bool
    fresh: bool = True
    """It connected, and no relay has confirmed that yet."""
    connections: set[int] = field(default_factory=set)
    chat: set[int] = field(default_factory=set)
    """Those of its connections that take the user's own messages."""


class DeviceIndex:
    """See the module. What its methods return is to be said to the relays.

    Args:
        next_id: gives the next GatewayMsgID; strictly increasing.
    """

    def __init__(self, next_id: Callable[[], int]) -> None:
        self._next_id = next_id
        self._clock = HybridClock()
        self._devices: dict[tuple[int, int], _Device] = {}
        self._of: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Devices that are connected here."""
        return len(self._devices)

    def pairs(self, connection: int) -> list[tuple[int, int]]:
        """The (UIN, device) of a connection that is a device, the device as `pixiu.devices.device_key` has it."""
        return [self._of[connection]] if connection in self._of else []

    def opened(
        self, connection: int, uin: int, device: int, device_class: int, wall_ms: int, *, login: bool = True
    ) -> list[Change]:
        """A connection of a device is there. `wall_ms`: Unix milliseconds. `login`: it counts as a login of the user."""
        pair, time = (uin, device_key(device, device_class)), self._clock.next(wall_ms)
        found = self._devices.get(pair)
        if found is None:
            found = self._devices[pair] = _Device(time, login)
        found.connect_time, found.fresh = time, True
        found.connections.add(connection)
        self._of[connection] = pair
        return [self._say(pair, found)]

    def closed(self, connection: int, reason: int) -> list[Change]:
        """A connection is gone. `reason` is a `Reason` of control.proto."""
        pair = self._of.pop(connection, None)
        if pair is None:
            return []
        found = self._devices[pair]
        found.connections.discard(connection)
        if not found.connections:
            del self._devices[pair]
            return [Change(self._next_id(), *pair, False, reason)]
        return self.chat(connection, False, pair)

    def chat(self, connection: int, wanted: bool, pair: tuple[int, int] | None = None) -> list[Change]:
        """A connection takes the user's own messages from now on, or no longer."""
        pair = pair if pair is not None else self._of.get(connection)
        if pair is None:
            return []
        found = self._devices[pair]
        before = bool(found.chat)
        if wanted:
            found.chat.add(connection)
        else:
            found.chat.discard(connection)
        return [self._say(pair, found)] if bool(found.chat) != before else []

    def overtaken(self, change: Change, time: int) -> list[Change]:
        """A relay knows a higher connect time of the device on another gateway than the one that `change` told.

        If the connection is new here, this gateway's clock was behind: say it once more, above.
        """
        pair = change.room, change.uin
        found = self._devices.get(pair)
        if found is None or not found.fresh or not change.login:
            return []
        self._clock.see(time)
        found.connect_time, found.fresh = self._clock.next(0), False
        return [self._say(pair, found)]

    def replaced(self, uin: int, key: int, connect_time: int) -> list[int]:
        """The connections of a device that connected no later than a time, which a newer login replaces."""
        found = self._devices.get((uin, key))
        return sorted(found.connections) if found is not None and found.connect_time <= connect_time else []

    def confirmed(self, change: Change) -> None:
        """A relay knows a change; what is said of the device from now on repeats its connect time."""
        found = self._devices.get((change.room, change.uin))
        if found is not None and found.connect_time == connection_of(change).connect_time:
            found.fresh = False

    def _say(self, pair: tuple[int, int], found: _Device) -> Change:
        return connected(self._next_id(), *pair, found.connect_time, chat=bool(found.chat), login=found.login)
