"""What became of the messages of a load: sent, delivered, failed, lost, and how long each took. Pure.

A message is open from its sending until it is delivered, refused, or has been under way for too long; so many may be open.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pixiu.tools.load.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Result:
    """A load of one kind."""

    kind: str
    sent: int
    delivered: int
    """Of those sent, each once."""
    repeated: int
    """Deliveries beyond the first of a message."""
    failed: int
    """Of those sent, that the cluster refused or said to be undelivered; whether they were delivered later is not counted."""
    lost: int
    """Of those sent, that neither came nor failed in time."""
    seconds: float
    """From the first sending until nothing was open."""
    p50_us: int
    p99_us: int
    highest_us: int
    """From `send` until the application has it, of those delivered; 0 without any."""
    failures: dict[str, int]
    """Code → how many."""

    @property
    def whole(self) -> bool:
        """Whether everything came, once."""
        return not (self.failed or self.lost or self.repeated)

    @property
    def per_s(self) -> float:
        """Delivered in a second."""
        return self.delivered / self.seconds if self.seconds else 0.0


class Tally:
    """Counts the load of one kind. Messages have numbers; times are microseconds of one clock.

    Args:
        kind: for the result.
        timeout_us: what `expire` finds open for longer is lost.
        keys: rooms or users that the messages go to in turn; each has an order of its own.
        first: the number of the first message; what comes with a lower one counts as repeated.
    """

    def __init__(self, kind: str = "", timeout_us: int = 0, keys: int = 1, first: int = 0) -> None:
        self._kind, self._timeout_us, self._first = kind, timeout_us, first
        self._open: dict[int, int] = {}
        """Number → when it was sent, the oldest first."""
        self._lost: dict[int, int] = {}
        """Those given up; one that comes after all was late, and is delivered."""
        self._failures: Counter[str] = Counter()
        self._refused: set[int] = set()
        self._newest = [-1] * keys
        """Of each key: the highest number that came."""
        self._histogram = Histogram()
        self._first_us = self._last_us = 0
        self.next = first
        """The number of the next message."""
        self.repeats: Counter[int] = Counter()
        """Number → deliveries beyond the first."""
        self.disordered = 0
        """Deliveries after one with a higher number of the same key."""

    @property
    def open(self) -> int:
        """How many are under way."""
        return len(self._open)

    @property
    def sent(self) -> int:
        """How many left."""
        return self.next - self._first

    @property
    def missing(self) -> dict[int, int]:
        """Number → when it was sent, of those that neither came nor failed."""
        return self._lost | self._open

    def send(self, now_us: int) -> int:
        """A message leaves; returns its number."""
        number = self.next
        self.next += 1
        self._open[number] = now_us
        if number == self._first:
            self._first_us = now_us
        return number

    def delivered(self, number: int, now_us: int) -> int | None:
        """A message came. Returns how long it took, in microseconds; None unless it is a first delivery of what did not fail."""
        sent_us = self._open.pop(number, None)
        if sent_us is None:
            sent_us = self._lost.pop(number, None)
        if sent_us is None:
            if number not in self._refused:
                self.repeats[number] += 1
            return None
        key = number % len(self._newest)
        if number < self._newest[key]:
            self.disordered += 1
        else:
            self._newest[key] = number
        self._histogram.add(now_us - sent_us)
        self._last_us = now_us
        return now_us - sent_us

    def failed(self, number: int, code: str, now_us: int) -> None:
        """The cluster said that a message did not arrive, or may not have. Nothing where it came all the same."""
        if self._open.pop(number, None) is not None or self._lost.pop(number, None) is not None:
            self._failures[code] += 1
            self._refused.add(number)
            self._last_us = now_us

    def expire(self, now_us: int) -> None:
        """Give up what has been open for too long."""
        for number, sent_us in list(self._open.items()):
            if now_us - sent_us < self._timeout_us:
                return
            self._lost[number] = self._open.pop(number)

    def result(self) -> Result:
        """What became of all; call it when nothing is open."""
        found = self._histogram
        return Result(
            self._kind,
            self.sent,
            found.count,
            self.repeats.total(),
            self._failures.total(),
            len(self._lost) + len(self._open),
            max(self._last_us - self._first_us, 0) / 1e6,
            found.percentile(50),
            found.percentile(99),
            found.highest,
            dict(self._failures),
        )
