"""Outcomes of the messages of a load: sent, delivered, failed, lost, and their latencies. Pure.

A message is open from its sending until it is delivered, refused, or has been under way for too long.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tools.load.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a load of one kind."""

    kind: str
    sent: int
    delivered: int
    """Sent messages that were delivered, each counted once."""
    repeated: int
    """Deliveries beyond the first of a message."""
    failed: int
    """Sent messages that the cluster refused or reported as undelivered, even if they were delivered later."""
    lost: int
    """Sent messages that neither arrived nor failed in time."""
    seconds: float
    """Time from the first sending until nothing was open."""
    p50_us: int
    p99_us: int
    highest_us: int
    """Highest latency of the delivered messages, from `send` until the application has it; 0 without any."""
    failures: dict[str, int]
    """Error code → number."""

    @property
    def whole(self) -> bool:
        """True if everything arrived exactly once."""
        return not (self.failed or self.lost or self.repeated)

    @property
    def per_s(self) -> float:
        """Deliveries per second."""
        return self.delivered / self.seconds if self.seconds else 0.0


class Tally:
    """Counts the load of one kind. Messages have numbers; times are microseconds of one clock.

    Args:
        kind: for the result.
        timeout_us: time after which `expire` counts an open message as lost.
        keys: number of rooms or users that get messages in turn; each has an order of its own.
        first: the number of the first message; arrivals with a lower one count as repeated.
    """

    def __init__(self, kind: str = "", timeout_us: int = 0, keys: int = 1, first: int = 0) -> None:
        self._kind, self._timeout_us, self._first = kind, timeout_us, first
        self._open: dict[int, int] = {}
        """Number → time of sending, the oldest first."""
        self._lost: dict[int, int] = {}
        """Messages given up; one that still arrives was late, and is delivered."""
        self._failures: Counter[str] = Counter()
        self._refused: set[int] = set()
        self._newest = [-1] * keys
        """The highest number that arrived, for each key."""
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
        """Number of messages under way."""
        return len(self._open)

    @property
    def sent(self) -> int:
        """Number of messages sent."""
        return self.next - self._first

    @property
    def missing(self) -> dict[int, int]:
        """Number → time of sending, of messages that neither arrived nor failed."""
        return self._lost | self._open

    def send(self, now_us: int) -> int:
        """Note that a message leaves; returns its number."""
        number = self.next
        self.next += 1
        self._open[number] = now_us
        if number == self._first:
            self._first_us = now_us
        return number

    def delivered(self, number: int, now_us: int) -> int | None:
        """Note that a message arrived. Returns its latency in microseconds; None unless it is the first delivery of a message that
        did not fail."""
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
        """Note that the cluster reported a message as lost, or possibly lost. No effect if it has arrived."""
        if self._open.pop(number, None) is not None or self._lost.pop(number, None) is not None:
            self._failures[code] += 1
            self._refused.add(number)
            self._last_us = now_us

    def expire(self, now_us: int) -> None:
        """Give up messages that have been open for too long."""
        for number, sent_us in list(self._open.items()):
            if now_us - sent_us < self._timeout_us:
                return
            self._lost[number] = self._open.pop(number)

    def result(self) -> Result:
        """The outcomes of all messages; call it when nothing is open."""
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
