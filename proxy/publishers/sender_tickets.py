"""Senders for which each gateway has shown a login ticket: a proxy passes on what a gateway publishes for these only.

A gateway shows tickets before it publishes for a user. They count until they end, or their key is removed from the ring. Pure.

Source: docs/security.md, "Login tickets".
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.trust.tickets import signer, until_of
from pixiu.ids import EndpointID
from pixiu.wire.record import HEADER_SIZE, KIND_AT, MIN_SIZE, SIZE_FIELD
from proxy.publishers.permits import NOT_SHOWN

MAX_SENDERS: Final = 2_000_000
"""Shown tickets that count, of all gateways. Policy: a further one does not."""
GONE_S: Final = 60.0
"""Time for which a gateway's tickets are kept that is not in the registry, seconds: it may only have a new session there."""
SIZE_AND_SENDER: Final = struct.Struct("<I28xQ")
"""Source: docs/protocol.md, "Record"."""
NOBODY: Final[Mapping[int, object]] = {}


@dataclass(slots=True)
class _Gateway:
    """Senders of one run of a gateway."""

    run: int
    seen_at: float
    """Time at which the registry showed it last, Unix seconds."""
    senders: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """UIN → the time at which the ticket ends, Unix seconds, and its key."""


class SenderTickets:
    """The senders of all gateways.

    Args:
        keys: returns the current keys of tickets.
        unix_s: Unix seconds.
    """

    def __init__(self, keys: Callable[[], tuple[bytes, ...]], unix_s: Callable[[], float]) -> None:
        self._keys, self._unix_s = keys, unix_s
        self._gateways: dict[EndpointID, _Gateway] = {}
        self._senders: dict[EndpointID, dict[int, tuple[int, bytes]]] = {}
        """Senders of each, for the data path."""
        self._ends: list[tuple[int, EndpointID, int]] = []
        """A heap of (time at which a ticket ends, gateway, UIN); a newer ticket of the user may end later."""
        self._checked_by: frozenset[bytes] = frozenset()
        """Keys by which all that count were checked."""
        self.refused = 0
        """Records refused, because their gateway had shown no ticket of their sender."""
        self.void = 0
        """Shown tickets that were not valid."""

    def __len__(self) -> int:
        """Number of tickets that count."""
        return sum(map(len, self._senders.values()))

    def show(self, gateway: EndpointID, run: int, shown: Iterable[tuple[int, bytes]]) -> list[int]:
        """Take tickets that a gateway shows. Returns the users whose tickets are not valid for this run."""
        keys, now, void = self._keys(), self._unix_s(), []
        there = self._gateways.get(gateway)
        if there is None or there.run != run:
            there = self._gateways[gateway] = _Gateway(run, now)
            self._senders[gateway] = there.senders
        self._checked_by |= frozenset(keys)
        room = MAX_SENDERS - len(self)
        for uin, ticket in shown:
            key = signer(keys, ticket, uin, run, now)
            if key is None or (room <= 0 and uin not in there.senders):
                void.append(uin)
                continue
            before = there.senders.get(uin)
            room -= before is None
            if before is None or before[0] < until_of(ticket):
                there.senders[uin] = until_of(ticket), key
                heapq.heappush(self._ends, (until_of(ticket), gateway, uin))
        self.void += len(void)
        return void

    def forget_gone(self, run_of: Callable[[EndpointID], int | None]) -> list[EndpointID]:
        """Forget gateways that the registry has not shown for `GONE_S`; returns them. `run_of`: the run that it shows."""
        now = self._unix_s()
        for gateway, there in self._gateways.items():
            if run_of(gateway) == there.run:
                there.seen_at = now
        gone = [gateway for gateway, there in self._gateways.items() if there.seen_at + GONE_S < now]
        for gateway in gone:
            del self._gateways[gateway], self._senders[gateway]
        return gone

    def look(self) -> dict[EndpointID, list[int]]:
        """Forget tickets that have ended, and those whose key was removed. Returns users of the latter, by gateway."""
        now = self._unix_s()
        while self._ends and self._ends[0][0] <= now:
            _, gateway, uin = heapq.heappop(self._ends)
            senders = self._senders.get(gateway, {})
            if uin in senders and senders[uin][0] <= now:
                del senders[uin]
        keys = frozenset(self._keys())
        found: dict[EndpointID, list[int]] = {}
        if not self._checked_by <= keys:
            for gateway, senders in self._senders.items():
                void = [uin for uin, (_, key) in senders.items() if key not in keys]
                for uin in void:
                    del senders[uin]
                if void:
                    found[gateway] = void
        self._checked_by = keys
        return found

    def permitted(self, gateway: EndpointID, data: bytes, start: int, end: int, count: int) -> bytes | None:
        """Return a gateway's batch with the records of other senders marked `NOT_SHOWN`; None if there are none.

        A malformed rest is left to the core, which refuses the whole batch.
        """
        known: Container[int] = self._senders.get(gateway, NOBODY)
        unpack, at = SIZE_AND_SENDER.unpack_from, start
        changed: bytearray | None = None
        for _ in range(count):
            if at + HEADER_SIZE > end:
                break
            size, sender = unpack(data, at)
            after = at + SIZE_FIELD + size
            if size < MIN_SIZE or after > end:
                break
            if sender not in known:
                if changed is None:
                    changed = bytearray(data[start:end])
                changed[at - start + KIND_AT] = NOT_SHOWN
                self.refused += 1
            at = after
        return None if changed is None else bytes(changed)
