"""What became of the messages of a load: sent, delivered, failed, lost, and how long each took. Pure.

A message is open from its sending until it is delivered, refused, or has been under way for too long; so many may be open.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pixiu.tools.replay.histogram import Histogram


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
        timeout_us: what is open for longer is lost.
    """

    def __init__(self, kind: str, timeout_us: int) -> None:
        self._kind, self._timeout_us = kind, timeout_us
        self._open: dict[int, int] = {}
        """Number → when it was sent, the oldest first."""
        self._lost: dict[int, int] = {}
        """Those given up; one that comes after all was late, and is delivered."""
        self._failures: Counter[str] = Counter()
        self._refused: set[int] = set()
        self._histogram = Histogram()
        self._first_us = self._last_us = 0
        self.sent = 0
        self._repeated = 0

    @property
    def open(self) -> int:
        """How many are under way."""
        return len(self._open)

    def send(self, now_us: int) -> int:
        """A message leaves; returns its number."""
        number = self.sent
        self.sent += 1
        self._open[number] = now_us
        if not number:
            self._first_us = now_us
        return number

    def delivered(self, number: int, now_us: int) -> None:
        """A message came."""
        sent_us = self._open.pop(number, None)
        if sent_us is None:
            sent_us = self._lost.pop(number, None)
        if sent_us is None:
            self._repeated += number not in self._refused
            return
        self._histogram.add(now_us - sent_us)
        self._last_us = now_us

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
            self._repeated,
            self._failures.total(),
            len(self._lost) + len(self._open),
            max(self._last_us - self._first_us, 0) / 1e6,
            found.percentile(50),
            found.percentile(99),
            found.highest,
            dict(self._failures),
        )
