"""A sender's flow control for one carrier to one peer: the data in flight, and its limit.

    time ──►   ack       last ack        +100 ms                       +3 s
               │  window open  │  window  │  one datagram per 100 ms   │ void: all data in flight is given up

Source: docs/links.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from cluster.links.datagrams.acknowledgement import Told
from cluster.links.datagrams.sequence import MAX_JUMP
from cluster.links.peer.outbox import Settlement, close

OVERHEAD_BYTES: Final = 768
"""Bytes that the kernel charges to a receive buffer for each datagram in addition to its own (measured)."""
INITIAL_BYTES: Final = 65_536
"""Window before the first acknowledgement."""
SILENCE_S: Final = 0.1
VOID_S: Final = 3.0

_Flight = tuple[int, int, int, tuple[Settlement, ...]]
"""First sequence, sequence after the last, cost, and the parcels with a token that have items in it."""


class Window:
    """Data in flight on one carrier to one peer. `upcoming[kind]` is the next sequence of records (0) and control (1)."""

    __slots__ = ("_flights", "_probe_at", "_quiet_since", "cost", "limit", "upcoming")

    def __init__(self, first_sequence: int = 1) -> None:
        self.upcoming = [first_sequence, first_sequence]
        self.limit = INITIAL_BYTES
        self.cost = 0
        self._flights: tuple[deque[_Flight], deque[_Flight]] = (deque(), deque())
        self._quiet_since = 0.0
        self._probe_at = 0.0

    def in_flight(self, kind: int) -> int:
        """Number of unacknowledged datagrams with items of this kind."""
        return len(self._flights[kind])

    def first_in_flight(self, kind: int) -> float:
        """Sequence of the oldest unacknowledged item of this kind; infinity if there is none."""
        flights = self._flights[kind]
        return flights[0][0] if flights else float("inf")

    def may_send(self, size: int, now: float) -> bool:
        """True if a datagram of `size` bytes may leave. With nothing in flight one always may, whatever the window."""
        if not self.cost:
            return True
        if now - self._quiet_since >= SILENCE_S:
            return now >= self._probe_at
        return self.cost + size + OVERHEAD_BYTES <= self.limit

    def sent(self, kind: int, count: int, size: int, settlements: Sequence[Settlement], now: float) -> None:
        """Note that a datagram of `size` bytes with `count` items leaves."""
        cost = size + OVERHEAD_BYTES
        if not self.cost:
            self._quiet_since = now
        # In silence this was the probe: the next one may follow after the same time.
        self._probe_at = now + SILENCE_S
        first = self.upcoming[kind]
        self.upcoming[kind] = first + count
        self.cost += cost
        self._flights[kind].append((first, first + count, cost, tuple(settlements)))

    def acknowledge(self, told: Sequence[Told], window: int, settled: list[tuple[int, bool]], now: float) -> int:
        """Settle the datagrams that an acknowledgement decides. Returns the number of lost items."""
        self.limit = window
        self._quiet_since = now
        self._probe_at = now + SILENCE_S
        lost = 0
        for kind, one in enumerate(told):
            lost += self._settle(kind, one, settled)
        return lost

    def _settle(self, kind: int, told: Told, settled: list[tuple[int, bool]]) -> int:
        upcoming, known_from, missing = told
        flights = self._flights[kind]
        lost = 0
        if upcoming > self.upcoming[kind] + MAX_JUMP:
            return 0  # nobody counts so far ahead: not believed
        if upcoming > self.upcoming[kind]:
            # The receiver counts a sequence that this sender did not send: nothing in flight is certain. Continuing from there
            # makes the link work again.
            lost = self._give_up(kind, settled)
            self.upcoming[kind] = upcoming
            return lost
        at = 0
        while flights and flights[0][1] <= upcoming:
            first, after, cost, settlements = flights.popleft()
            while at < len(missing) and missing[at][1] < first:
                at += 1
            handled = first >= known_from and not (at < len(missing) and missing[at][0] < after)
            self.cost -= cost
            if not handled:
                lost += after - first
            for settlement in settlements:
                close(settlement, handled, settled)
        return lost

    def _give_up(self, kind: int, settled: list[tuple[int, bool]]) -> int:
        lost = 0
        flights = self._flights[kind]
        while flights:
            first, after, cost, settlements = flights.popleft()
            self.cost -= cost
            lost += after - first
            for settlement in settlements:
                close(settlement, False, settled)
        return lost

    def void(self, settled: list[tuple[int, bool]]) -> int:
        """Give up everything in flight; the window is the initial one again. Returns the number of items."""
        lost = self._give_up(0, settled) + self._give_up(1, settled)
        self.limit = INITIAL_BYTES
        return lost

    def silent(self, now: float) -> bool:
        """True if something in flight has waited 100 ms for any acknowledgement."""
        return self.cost > 0 and now - self._quiet_since >= SILENCE_S

    def probe_due(self, now: float) -> bool:
        """True if a probe is due; the next one is due 100 ms after `probed`."""
        return self.silent(now) and now >= self._probe_at

    def probed(self, now: float) -> None:
        """Note that a heartbeat was sent in place of a probe, because no datagram waits."""
        self._probe_at = now + SILENCE_S

    def expired(self, now: float) -> bool:
        """True if something in flight has waited 3 s for any acknowledgement."""
        return self.cost > 0 and now - self._quiet_since >= VOID_S

    def deadline(self, probes: bool) -> float:
        """Time at which `probe_due` or `expired` may become true; infinity if nothing is in flight."""
        if not self.cost:
            return float("inf")
        void_at = self._quiet_since + VOID_S
        return min(void_at, max(self._quiet_since + SILENCE_S, self._probe_at)) if probes else void_at
