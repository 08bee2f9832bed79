"""Users of whom more logins are known than may stay together, looked at again until the superfluous ones are gone. Pure.

The relay that applies the newest login tells the others' gateways at once. That fails where the login came by comparison
or in a snapshot, where a gateway was out of reach at that moment, and where the word was lost too often. What is still there
some heartbeats after the last change is told again.

Source: docs/memberships.md, "Devices and logins".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.membership.devices import MAX_TOGETHER, Connection, Devices

MAX_CONTESTED: Final = MAX_TOGETHER
"""Users that are looked at again. Policy: the one that waits longest is forgotten, and its logins stay."""
PAUSE_HEARTBEATS: Final = 3
"""A gateway whose clock is behind has said by then that its login is the newer one."""


class Contests:
    """Users with conflicting logins, checked again until the superfluous ones are gone.

    Args:
        devices: relay data.
        heartbeat_s: seconds between heartbeats.
    """

    def __init__(self, devices: Devices, heartbeat_s: float) -> None:
        self._devices = devices
        self._pause_s = PAUSE_HEARTBEATS * heartbeat_s
        self._look_at: dict[int, float] = {}
        """UIN → when to look; ascending, since all pause alike."""

    def __len__(self) -> int:
        return len(self._look_at)

    def note(self, uins: Iterable[int], now: float) -> None:
        """Something changed for these users."""
        for uin in uins:
            self._look_at.pop(uin, None)
            if len(self._look_at) >= MAX_CONTESTED:
                del self._look_at[next(iter(self._look_at))]
            self._look_at[uin] = now + self._pause_s

    def due(self, now: float) -> list[tuple[int, Connection, Connection]]:
        """UIN, a login that must go, and the newest of those that it makes place for."""
        found: list[tuple[int, Connection, Connection]] = []
        again: list[int] = []
        while self._look_at:
            uin = next(iter(self._look_at))
            if self._look_at[uin] > now:
                break
            del self._look_at[uin]
            losers = self._devices.losers(uin)
            if losers:
                again.append(uin)
            # A gateway that is out of reach may be gone, and its logins with it: nobody makes place for them.
            found += [(uin, loser, winner) for loser, winner in losers if self._devices.is_reachable(winner.instance)]
        self.note(again, now)
        return found
