"""Quality of a peer's answers to heartbeats: smoothed, for a choice among several peers. Pure.

Source: PiXiu, to-do 2; docs/routing.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

GAIN: Final = 1 / 8
"""Weight of a new measurement: about the last eight heartbeats count."""


class Quality(NamedTuple):
    """Quality of a peer's answers to its last heartbeats."""

    round_trip_us: float
    """Round trip of a heartbeat and its answer, microseconds; 0 before the first."""
    answered: float
    """Share of heartbeats that were answered before the next one was sent, 0 to 1."""


UNMEASURED: Final = Quality(0.0, 1.0)


class Heartbeats:
    """Tracks the heartbeats to one peer."""

    __slots__ = ("_answered", "_replied", "_round_trip_us", "_sent", "last_us")

    def __init__(self) -> None:
        self.last_us = 0
        """Round trip of the last answer, microseconds; 0 before the first."""
        self._round_trip_us = 0.0
        self._answered = 1.0
        self._sent = self._replied = False

    def sent(self) -> None:
        """Note that a heartbeat leaves: the previous one is now counted as answered or not."""
        if self._sent:
            self._answered += GAIN * (self._replied - self._answered)
        self._sent, self._replied = True, False

    def replied(self, round_trip_us: int) -> None:
        """Count an answer to a heartbeat."""
        self._replied = True
        if round_trip_us < 0:
            round_trip_us = 0
        self.last_us = round_trip_us
        self._round_trip_us += (GAIN if self._round_trip_us else 1.0) * (round_trip_us - self._round_trip_us)

    @property
    def quality(self) -> Quality:
        """The quality over the last few heartbeats."""
        return Quality(self._round_trip_us, self._answered)
