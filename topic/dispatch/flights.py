"""Messages of one channel and part that are with members: who has them, until when, and what is being settled. Pure.

    ready ──give──▶ in flight ──acknowledge, refuse, time out, leave──▶ settling ──committed──▶ done, or it comes again
                        ▲                                                  └──refused──▶ in flight

A settlement counts only when its entry is committed. Until then the message is neither given to anybody nor done, so that a leader
that loses its office in between has promised nothing.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.core.contract import NEVER
from topic.entries import Dead, Deferred, Reason, Settlement

MAX_DELAY_S: Final = 365 * 24 * 3600.0
"""Longest delay of a refused message, seconds. Policy: a longer one is cut."""


@dataclass(slots=True)
class Flight:
    """A message that a member has."""

    member: int
    attempts: int
    """Deliveries, this one included."""
    until: float
    """Deadline, monotonic seconds."""


class Flights:
    """The messages that members of one channel have of one part.

    Args:
        channel: its ID.
        part: the part's ID.
        timeout_s: time that a member has.
        max_attempts: deliveries before a message becomes a dead letter.
    """

    def __init__(self, channel: int, part: int, timeout_s: float, max_attempts: int) -> None:
        self._channel, self._part = channel, part
        self._timeout_s, self._max_attempts = timeout_s, max_attempts
        self._flying: dict[int, Flight] = {}
        self._settling: dict[int, Flight] = {}
        self._deadlines: list[tuple[float, int]] = []
        """(deadline, offset); stale ones are passed over."""

    def __contains__(self, offset: int) -> bool:
        return offset in self._flying or offset in self._settling

    def __len__(self) -> int:
        return len(self._flying) + len(self._settling)

    @property
    def in_flight(self) -> int:
        """Number of messages that members have."""
        return len(self._flying)

    def count(self, member: int) -> int:
        """Number of messages that a member has."""
        return sum(flight.member == member for flight in self._flying.values())

    def next_deadline(self) -> float:
        """Time at which a message may be overdue; `NEVER` if no member has any."""
        while self._deadlines:
            due, offset = self._deadlines[0]
            flight = self._flying.get(offset)
            if flight is not None and flight.until <= due:
                return due
            heapq.heappop(self._deadlines)
            if flight is not None:  # it was touched
                heapq.heappush(self._deadlines, (flight.until, offset))
        return NEVER

    def give(self, offset: int, member: int, attempts: int, now: float) -> None:
        """A member gets a message for the `attempts`-th time."""
        until = now + self._timeout_s
        self._flying[offset] = Flight(member, attempts, until)
        heapq.heappush(self._deadlines, (until, offset))

    def touch(self, member: int, offsets: Iterable[int], now: float) -> int:
        """A member needs more time. Returns for how many messages it got it: those that it has."""
        found = [flight for offset in offsets if (flight := self._flying.get(offset)) is not None and flight.member == member]
        for flight in found:
            flight.until = now + self._timeout_s
        return len(found)

    # --- settlements

    def settle(
        self, member: int, acknowledged: Sequence[tuple[int, int]], refused: Sequence[tuple[int, float]]
    ) -> Settlement | None:
        """A member reports what became of messages: ranges [low, high), and (offset, delay in seconds) of those it refuses. What it
        does not have is passed over. Returns the settlement to be committed; None: there is nothing to settle."""
        done = [
            offset for low, high in acknowledged for offset in self._within(low, high) if self._take(offset, member) is not None
        ]
        deferred, dead = list[Deferred](), list[Dead]()
        for offset, delay_s in refused:
            flight = self._take(offset, member)
            if flight is not None:
                self._fail(offset, flight, delay_s, Reason.ATTEMPTS, deferred, dead)
        return self._settlement(ranges(done), deferred, dead)

    def leave(self, member: int) -> Settlement | None:
        """A member is gone: what it had is delivered to others at once, and counts as delivered."""
        gone = [offset for offset, flight in self._flying.items() if flight.member == member]
        return self._give_up([(offset, self._flying.pop(offset)) for offset in gone])

    def time_out(self, now: float) -> Settlement | None:
        """Members kept messages beyond their deadlines."""
        overdue = list[tuple[int, Flight]]()
        while self.next_deadline() <= now:
            _, offset = heapq.heappop(self._deadlines)
            overdue.append((offset, self._flying.pop(offset)))
        return self._give_up(overdue)

    def _give_up(self, flights: Iterable[tuple[int, Flight]]) -> Settlement | None:
        deferred, dead = list[Deferred](), list[Dead]()
        for offset, flight in flights:
            self._settling[offset] = flight
            self._fail(offset, flight, 0.0, Reason.TIMED_OUT, deferred, dead)
        return self._settlement((), deferred, dead)

    def _within(self, low: int, high: int) -> Iterable[int]:
        """The offsets of a range that members may have: a range costs no more than what is in flight."""
        if high - low <= len(self._flying):
            return range(low, high)
        return [offset for offset in self._flying if low <= offset < high]

    def _take(self, offset: int, member: int) -> Flight | None:
        flight = self._flying.get(offset)
        if flight is None or flight.member != member:
            return None
        self._settling[offset] = self._flying.pop(offset)
        return flight

    def _fail(
        self, offset: int, flight: Flight, delay_s: float, reason: Reason, deferred: list[Deferred], dead: list[Dead]
    ) -> None:
        if flight.attempts >= self._max_attempts:
            dead.append(Dead(offset, flight.attempts, reason))
        else:
            delay_us = int(min(max(delay_s, 0.0), MAX_DELAY_S) * 1_000_000)
            deferred.append(Deferred(offset, delay_us, flight.attempts))

    def _settlement(self, acknowledged: Sequence[tuple[int, int]], deferred: list[Deferred], dead: list[Dead]) -> Settlement | None:
        if not acknowledged and not deferred and not dead:
            return None
        return Settlement(self._channel, self._part, acknowledged, deferred, dead)

    # --- what became of them

    def committed(self, settlement: Settlement) -> None:
        """A settlement is in the state: its messages are no longer with anybody."""
        for offset in offsets_of(settlement):
            self._settling.pop(offset, None)
            self._flying.pop(offset, None)

    def refused(self, settlement: Settlement) -> None:
        """A settlement will not be in the log: members have its messages as before."""
        for offset in offsets_of(settlement):
            flight = self._settling.pop(offset, None)
            if flight is not None:
                self._flying[offset] = flight
                heapq.heappush(self._deadlines, (flight.until, offset))


def ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Join offsets to ranges [low, high)."""
    found = list[tuple[int, int]]()
    for offset in sorted(offsets):
        if found and found[-1][1] == offset:
            found[-1] = found[-1][0], offset + 1
        else:
            found.append((offset, offset + 1))
    return found


def offsets_of(settlement: Settlement) -> Iterable[int]:
    """Every offset that a settlement names."""
    for low, high in settlement.acknowledged:
        yield from range(low, high)
    yield from (each.offset for each in settlement.deferred)
    yield from (each.offset for each in settlement.dead)
