"""Messages of one channel and part that are with members: who has them, until when, and what is being settled. Pure.

    ready ──give──▶ with a member ──acknowledge, refuse, time out, leave──▶ pending ──committed──▶ done, or it comes again
                        ▲                                                      └──refused──▶ with the member

A settlement counts only when its entry is committed. Until then the message is neither given to anybody nor done, so that a leader
that loses its office in between has promised nothing. Messages that follow each other are one range, whoever reports them singly.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.core.contract import NEVER
from cluster.topics.entries import Dead, Deferred, Reason, Settlement
from topic.events import Run

MAX_DELAY_S: Final = 365 * 24 * 3600.0
"""Longest delay of a refused message, seconds. Policy: a longer one is cut."""
MAX_SETTLED: Final = 8192
"""Messages that one entry gives up after a time-out or a departure. Policy: the rest are in the next entries."""
SLACK: Final = 64
"""Deadlines beyond those of what members have that are kept. Policy: then those that no longer count are removed."""


class Flight(NamedTuple):
    """Messages [low, high) that a member has."""

    low: int
    high: int
    attempts: int
    """Deliveries of each, this one included."""
    until: float
    """Deadline, monotonic seconds."""


@dataclass(slots=True, eq=False)
class Pending:
    """A settlement on its way into the log, with what it takes from members."""

    settlement: Settlement
    flights: Flights
    taken: list[tuple[int, Flight]] = field(default_factory=list)
    """(member, messages)."""


class Flights:
    """The messages that members of one channel have of one part.

    Args:
        channel: its ID.
        part: the part's ID.
        timeout_s: time that a member has.
        max_attempts: deliveries before a message becomes a dead letter.
    """

    __slots__ = ("_channel", "_deadlines", "_held", "_limit", "_part", "_sorted", "in_flight", "max_attempts", "timeout_s")

    def __init__(self, channel: int, part: int, timeout_s: float, max_attempts: int) -> None:
        self._channel, self._part = channel, part
        self.timeout_s, self.max_attempts = timeout_s, max_attempts
        self._held: dict[int, list[Flight]] = {}
        """By member, by offset."""
        self._deadlines: deque[tuple[float, int, int, int]] | None = None
        """(deadline, member, low, high) of what was given; some no longer count."""
        self._sorted = True
        """They rise: nothing was put among them with a deadline of its own."""
        self._limit = SLACK
        self.in_flight = 0
        """Number of messages that members have."""

    def limit(self, timeout_s: float, max_attempts: int) -> None:
        """The channel's settings are these from now on."""
        self.timeout_s, self.max_attempts = timeout_s, max_attempts

    def count(self, member: int) -> int:
        """Number of messages that a member has."""
        return sum(flight.high - flight.low for flight in self._held.get(member, ()))

    def counts(self) -> dict[int, int]:
        """Number of messages by member, of those that have any."""
        return {member: self.count(member) for member in self._held}

    def next_deadline(self) -> float:
        """Time at which a message may be overdue; `NEVER` if no member has any."""
        if not self._sorted and self._deadlines:
            self._deadlines, self._sorted = deque(sorted(self._deadlines)), True
        deadlines = self._deadlines
        while deadlines:
            due, member, low, high = deadlines[0]
            if any(flight.until <= due for flight in self._between(member, low, high)):
                return due
            deadlines.popleft()
        return NEVER

    def _between(self, member: int, low: int, high: int) -> Iterator[Flight]:
        held = self._held.get(member)
        if held:
            at = _first(held, low)
            while at < len(held) and held[at].low < high:
                yield held[at]
                at += 1

    def give(self, member: int, runs: Sequence[Run], now: float) -> None:
        """A member gets messages, by offset."""
        until, held = now + self.timeout_s, self._held.setdefault(member, [])
        for low, high, attempts in runs:
            flight = Flight(low, high, attempts, until)
            self.in_flight += high - low
            if not held or held[-1].low < low:
                held.append(flight)
            else:
                insort(held, flight)
        self._remind(until, member, runs[0].low, runs[-1].high)

    def _remind(self, until: float, member: int, low: int, high: int) -> None:
        if self._deadlines is None:
            self._deadlines = deque()
        elif len(self._deadlines) > self._limit:
            left = ((each.until, number, each.low, each.high) for number, held in self._held.items() for each in held)
            self._deadlines, self._sorted = deque(sorted(left)), True
            self._limit = SLACK + 2 * len(self._deadlines)
        if self._deadlines and self._deadlines[-1][0] > until:
            self._sorted = False
        self._deadlines.append((until, member, low, high))

    def touch(self, member: int, offsets: Iterable[int], now: float) -> int:
        """A member needs more time. Returns for how many messages it got it: those that it has."""
        until, found = now + self.timeout_s, 0
        for low, high in ranges(offsets):
            taken = self._cut(member, [(low, high)])
            for each in taken:
                self._put(member, each._replace(until=until))
                found += each.high - each.low
            if taken:
                self._remind(until, member, low, high)
        return found

    # --- settlements

    def settle(
        self,
        member: int,
        acknowledged: Sequence[tuple[int, int]],
        refused: Sequence[tuple[int, float]],
        rejected: Sequence[tuple[int, str]] = (),
    ) -> Pending | None:
        """A member reports what became of messages: ranges [low, high), (offset, delay in seconds) of those it refuses, and
        (offset, reason) of those that go to the dead letters at once. What it does not have is passed over. Returns the settlement
        to be committed; None: there is nothing to settle."""
        if member not in self._held:
            return None
        taken = self._cut(member, joined(acknowledged) if len(acknowledged) > 1 else acknowledged)
        done = list[tuple[int, int]]()
        for flight in taken:
            if done and done[-1][1] == flight.low:
                done[-1] = done[-1][0], flight.high
            else:
                done.append((flight.low, flight.high))
        deferred, dead = list[Deferred](), list[Dead]()
        for offset, delay_s in refused:
            for flight in self._cut(member, [(offset, offset + 1)]):
                taken.append(flight)
                self._fail(flight, delay_s, Reason.ATTEMPTS, deferred, dead)
        for offset, text in rejected:
            for flight in self._cut(member, [(offset, offset + 1)]):
                taken.append(flight)
                dead.append(Dead(offset, flight.attempts, Reason.REJECTED, text))
        if not taken:
            return None
        return self._pending([(member, flight) for flight in taken], done, deferred, dead)

    def leave(self, member: int) -> list[Pending]:
        """A member is gone: what it had is delivered to others at once, and counts as delivered."""
        gone = self._held.pop(member, [])
        self.in_flight -= sum(flight.high - flight.low for flight in gone)
        return self._give_up([(member, flight) for flight in gone])

    def time_out(self, now: float) -> list[Pending]:
        """Members kept messages beyond their deadlines."""
        overdue = list[tuple[int, Flight]]()
        while self.next_deadline() <= now:
            assert self._deadlines
            due, member, low, high = self._deadlines.popleft()
            for flight in [each for each in self._between(member, low, high) if each.until <= due]:
                overdue += [(member, each) for each in self._cut(member, [(flight.low, flight.high)])]
        return self._give_up(overdue)

    def _give_up(self, flights: Sequence[tuple[int, Flight]]) -> list[Pending]:
        found, taken, left = list[Pending](), list[tuple[int, Flight]](), MAX_SETTLED
        deferred, dead = list[Deferred](), list[Dead]()
        for member, flight in flights:
            while flight.low < flight.high:
                part = flight._replace(high=min(flight.high, flight.low + left))
                taken.append((member, part))
                self._fail(part, 0.0, Reason.TIMED_OUT, deferred, dead)
                left -= part.high - part.low
                flight = flight._replace(low=part.high)
                if not left:
                    found.append(self._pending(taken, (), deferred, dead))
                    taken, left, deferred, dead = [], MAX_SETTLED, [], []
        if taken:
            found.append(self._pending(taken, (), deferred, dead))
        return found

    def _cut(self, member: int, ranges: Sequence[tuple[int, int]]) -> list[Flight]:
        """Take what a member has of ranges, which rise, from it."""
        held = self._held.get(member)
        if not held or not ranges or ranges[0][0] >= ranges[-1][1]:
            return []
        at, behind = _first(held, ranges[0][0]), bisect_left(held, (ranges[-1][1],))
        if behind - at > 8 * len(ranges) + SLACK:  # far between what it has
            return [flight for each in ranges for flight in self._cut(member, [each])]
        taken, left = list[Flight](), list[Flight]()
        next_range, count = 0, len(ranges)
        for flight in held[at:behind]:
            low, high, attempts, until = flight
            while next_range < count and ranges[next_range][1] <= low:
                next_range += 1
            number = next_range
            while number < count and low < high:
                begin, end = ranges[number]
                if begin >= high:
                    break
                if begin > low:
                    left.append(Flight(low, begin, attempts, until))
                    low = begin
                end = min(end, high)
                taken.append(flight if low == flight.low and end == flight.high else Flight(low, end, attempts, until))
                self.in_flight -= end - low
                low, number = end, number + 1
            if low < high:
                left.append(flight if low == flight.low else Flight(low, high, attempts, until))
        held[at:behind] = left
        if not held:
            del self._held[member]
        return taken

    def _put(self, member: int, flight: Flight) -> None:
        insort(self._held.setdefault(member, []), flight)
        self.in_flight += flight.high - flight.low

    def _fail(self, flight: Flight, delay_s: float, reason: Reason, deferred: list[Deferred], dead: list[Dead]) -> None:
        offsets, attempts = range(flight.low, flight.high), flight.attempts
        if attempts >= self.max_attempts:
            dead += [Dead(offset, attempts, reason) for offset in offsets]
        else:
            delay_us = int(min(max(delay_s, 0.0), MAX_DELAY_S) * 1_000_000)
            deferred += [Deferred(offset, delay_us, attempts) for offset in offsets]

    def _pending(
        self, taken: list[tuple[int, Flight]], acknowledged: Sequence[tuple[int, int]], deferred: list[Deferred], dead: list[Dead]
    ) -> Pending:
        return Pending(Settlement(self._channel, self._part, acknowledged, deferred, dead), self, taken)

    def refused(self, member: int, flight: Flight, until: float) -> None:
        """A settlement will not be in the log: a member has messages of it as before, until a time."""
        self._put(member, flight._replace(until=until))
        self._remind(until, member, flight.low, flight.high)


def _first(held: Sequence[Flight], low: int) -> int:
    """Index of the first flight that ends beyond an offset."""
    at = bisect_left(held, (low,))
    return at - 1 if at and held[at - 1].high > low else at


def joined(found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one, without empty ones."""
    rising = list[tuple[int, int]]()
    for low, high in sorted(found):
        if rising and low <= rising[-1][1]:
            if high > rising[-1][1]:
                rising[-1] = rising[-1][0], high
        elif low < high:
            rising.append((low, high))
    return rising


def ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Join offsets to ranges [low, high)."""
    found = list[tuple[int, int]]()
    for offset in sorted(offsets):
        if found and found[-1][1] == offset:
            found[-1] = found[-1][0], offset + 1
        elif not found or offset >= found[-1][1]:
            found.append((offset, offset + 1))
    return found
