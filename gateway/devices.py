"""Which devices of which users are connected to this gateway, and what the relays must be told of it. Pure.

The first connection of a device connects it, the last one to go disconnects it; one that opens in between gives it a
new connect time, because the user may have been elsewhere meanwhile. Whether a connection takes the user's own messages
is said with the old connect time.

Source: seed 004 §7.2; DESIGN section 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pixiu.devices import DeviceChange
from pixiu.hybridclock import HybridClock


@dataclass(slots=True)
class _Device:
    """A device that is connected here."""

    device_class: int
    connect_time: int
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

    def pair(self, connection: int) -> tuple[int, int]:
        """The (UIN, DeviceID) of a connection that is open."""
        return self._of[connection]

    def opened(self, connection: int, uin: int, device: int, device_class: int, wall_ms: int) -> list[DeviceChange]:
        """A connection of a device is there. `wall_ms`: Unix milliseconds."""
        pair, time = (uin, device), self._clock.next(wall_ms)
        found = self._devices.get(pair)
        if found is None:
            found = self._devices[pair] = _Device(device_class, time)
        found.device_class, found.connect_time, found.fresh = device_class, time, True
        found.connections.add(connection)
        self._of[connection] = pair
        return [self._say(pair, found)]

    def closed(self, connection: int, reason: int) -> list[DeviceChange]:
        """A connection is gone. `reason` is a `Reason` of control.proto."""
        pair = self._of.pop(connection)
        found = self._devices[pair]
        found.connections.discard(connection)
        if not found.connections:
            del self._devices[pair]
            return [DeviceChange(self._next_id(), *pair, False, reason)]
        return self.chat(connection, False, pair)

    def chat(self, connection: int, wanted: bool, pair: tuple[int, int] | None = None) -> list[DeviceChange]:
        """A connection takes the user's own messages from now on, or no longer."""
        pair = pair if pair is not None else self._of[connection]
        found = self._devices[pair]
        before = bool(found.chat)
        if wanted:
            found.chat.add(connection)
        else:
            found.chat.discard(connection)
        return [self._say(pair, found)] if bool(found.chat) != before else []

    def overtaken(self, change: DeviceChange, time: int) -> list[DeviceChange]:
        """A relay knows a higher connect time of the device on another gateway than the one that `change` told.

        If the connection is new here, this gateway's clock was behind: say it once more, above.
        """
        found = self._devices.get(change.pair)
        if found is None or not found.fresh or not change.online:
            return []
        self._clock.see(time)
        found.connect_time, found.fresh = self._clock.next(0), False
        return [self._say(change.pair, found)]

    def confirmed(self, change: DeviceChange) -> None:
        """A relay knows a change; what is said of the device from now on repeats its connect time."""
        found = self._devices.get(change.pair)
        if found is not None and found.connect_time == change.connect_time:
            found.fresh = False

    def all(self, wanted: Callable[[int], bool]) -> list[DeviceChange]:
        """Everything that is connected, of the users that are wanted, to be said once more with the old connect times."""
        return [self._say(pair, found) for pair, found in self._devices.items() if wanted(pair[0])]

    def _say(self, pair: tuple[int, int], found: _Device) -> DeviceChange:
        uin, device = pair
        return DeviceChange(self._next_id(), uin, device, True, 0, found.connect_time, found.device_class, chat=bool(found.chat))
