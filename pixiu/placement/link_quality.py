"""How well a peer answers heartbeats: smoothed, for a choice among several. Pure.

Source: PiXiu, to-do 2; docs/routing.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

GAIN: Final = 1 / 8
"""Of a new measurement: about the last eight heartbeats count."""


class Quality(NamedTuple):
    """How well a peer answered its last heartbeats."""

    round_trip_us: float
    """Of a heartbeat and its answer; 0 before the first."""
    answered: float
    """The share of heartbeats that were answered before the next one, 0 to 1."""


UNMEASURED: Final = Quality(0.0, 1.0)


class Heartbeats:
    """What becomes of the heartbeats to one peer."""

    __slots__ = ("_answered", "_replied", "_round_trip_us", "_sent", "last_us")

    def __init__(self) -> None:
        self.last_us = 0
        """Of the last answer, microseconds; 0 before the first."""
        self._round_trip_us = 0.0
        self._answered = 1.0
        self._sent = self._replied = False

    def sent(self) -> None:
        """A heartbeat leaves: the one before was answered by now, or was not."""
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
