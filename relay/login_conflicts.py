"""Track users with more logins than the policy allows until the extra ones are gone. Pure.

The relay that applies the newest login notifies the others' gateways at once. That fails if the login came by comparison or in a
snapshot, if a gateway was unreachable at that moment, or if the notice was lost too often. Logins still there some heartbeats after
the last change are reported again.

Source: docs/memberships.md, "Devices and logins".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.membership.map.devices import MAX_TOGETHER, Connection, Devices

MAX_CONTESTED: Final = MAX_TOGETHER
"""Limit of tracked users. Policy: the one that waits longest is dropped, and its logins stay."""
PAUSE_HEARTBEATS: Final = 3
"""Heartbeats before a check: by then a gateway whose clock is behind has reported that its login is the newer one."""


class Contests:
    """Users with conflicting logins, checked again until the extra ones are gone.

    Args:
        devices: relay data.
        heartbeat_s: seconds between heartbeats.
    """

    def __init__(self, devices: Devices, heartbeat_s: float) -> None:
        self._devices = devices
        self._pause_s = PAUSE_HEARTBEATS * heartbeat_s
        self._look_at: dict[int, float] = {}
        """UIN → time of the next check; ascending, since all intervals are equal."""

    def __len__(self) -> int:
        return len(self._look_at)

    def note(self, uins: Iterable[int], now: float) -> None:
        """Track users whose logins changed."""
        for uin in uins:
            self._look_at.pop(uin, None)
            if len(self._look_at) >= MAX_CONTESTED:
                del self._look_at[next(iter(self._look_at))]
            self._look_at[uin] = now + self._pause_s

    def due(self, now: float) -> list[tuple[int, Connection, Connection]]:
        """(UIN, a login that must end, the newest of those that replace it) of users that are due."""
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
            # An unreachable gateway may be gone, and its logins with it: they replace no other login.
            found += [(uin, loser, winner) for loser, winner in losers if self._devices.is_reachable(winner.instance)]
        self.note(again, now)
        return found
