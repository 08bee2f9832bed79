"""The login tickets that a gateway holds, one for each of its users. Pure.

A ticket is shown to every proxy, and goes with each report of the user's devices to relays. A later login of the user brings a
newer one. The gateway does not have the keys, and cannot check a ticket; a proxy reports those that are not valid any more.

Source: docs/security.md, "Login tickets".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

from cluster.trust.tickets import GRACE_S, MAX_TICKET_S, SHOWN, TICKET_BYTES, until_of

NONE: Final = bytes(TICKET_BYTES)
"""In place of a ticket that is not there; never valid."""


class Tickets:
    """Tickets by user."""

    def __init__(self) -> None:
        self._held: dict[int, bytes] = {}
        self._ends: list[tuple[int, int]] = []
        """A heap of (until, UIN); a newer ticket of the user may end later."""

    def __len__(self) -> int:
        return len(self._held)

    def of(self, uin: int) -> bytes:
        """A user's ticket; `NONE` if there is none."""
        return self._held.get(uin, NONE)

    def usable(self, uin: int, expires_at: float, now: float) -> bytes | None:
        """A ticket that a further login of a user may use: it lasts for half of what a new one could."""
        ticket = self._held.get(uin)
        if ticket is None or until_of(ticket) - now < min(expires_at - now, MAX_TICKET_S) / 2:
            return None
        return ticket

    def put(self, uin: int, ticket: bytes, now: float) -> None:
        """Hold a ticket, unless the one held ends later. Forgets those that have ended."""
        held = self._held.get(uin)
        if held is None or until_of(held) <= until_of(ticket):
            self._held[uin] = ticket
            heapq.heappush(self._ends, (until_of(ticket), uin))
        while self._ends and self._ends[0][0] <= now:
            _, gone = heapq.heappop(self._ends)
            if until_of(self.of(gone)) <= now:
                self._held.pop(gone, None)

    def drop(self, uins: Iterable[int]) -> None:
        """Forget tickets that are void."""
        for uin in uins:
            self._held.pop(uin, None)

    def shown(self, size: int) -> list[bytes]:
        """All tickets, as they are shown to a proxy, at most `size` in each part."""
        held = [SHOWN.pack(uin, ticket) for uin, ticket in self._held.items()]
        return [b"".join(held[start : start + size]) for start in range(0, len(held), size)]


def session_end(ticket: bytes, expires_at: float) -> float:
    """Unix seconds at which a session with this ticket ends, before the ticket does; `expires_at`: of the login."""
    return min(expires_at, float(until_of(ticket) - GRACE_S))
