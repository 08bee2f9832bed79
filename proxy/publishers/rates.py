"""Rate limits of publishers and rooms at one proxy: token buckets at the edge. Pure.

A publisher's batch is taken or refused whole; a room's records in a batch are taken or refused together. A refusal has a
retry-after. With a limit of 0 nothing is even counted.

Source: docs/promises.md, "Failure rules" 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.token_bucket import Meter, Meters
from pixiu.wire.record import HEADER_SIZE, MIN_SIZE, ROUTE, SIZE_FIELD

MAX_METERED_ROOMS = 100_000
"""Rooms whose rate is known at one time; see `cluster.core.token_bucket.Meters` for what happens beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Limits; 0 is none."""

    publisher_messages_per_s: float = 0
    publisher_bytes_per_s: float = 0
    room_messages_per_s: float = 0
    room_bytes_per_s: float = 0
    burst_s: float = 1.0

    @property
    def any(self) -> bool:
        """True if there is any limit."""
        return any((self.publisher_messages_per_s, self.publisher_bytes_per_s, self.room_messages_per_s, self.room_bytes_per_s))


class PublisherRates:
    """The meters of one proxy. The owner opens and closes publishers, so there are as many meters as publishers."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._publishers: dict[int, Meter] = {}
        self._rooms: Meters[int] | None = None
        if rates.room_messages_per_s or rates.room_bytes_per_s:
            self._rooms = Meters(rates.room_messages_per_s, rates.room_bytes_per_s, rates.burst_s, MAX_METERED_ROOMS)

    def opened(self, stream: int, now: float) -> None:
        """Add a publisher."""
        rates = self._rates
        if rates.publisher_messages_per_s or rates.publisher_bytes_per_s:
            self._publishers[stream] = Meter(rates.publisher_messages_per_s, rates.publisher_bytes_per_s, rates.burst_s, now)

    def closed(self, stream: int) -> None:
        """Remove a publisher that is gone, or is not limited here."""
        self._publishers.pop(stream, None)

    def publisher(self, stream: int, count: int, size: int, now: float) -> float:
        """Charge a publisher's batch. Returns 0 if it may pass, else the seconds until the next one may."""
        meter = self._publishers.get(stream)
        return meter.take(count, size, now) if meter is not None else 0.0

    def rooms(self, data: bytes, start: int, end: int, count: int, now: float) -> dict[int, float]:
        """Charge a batch to its rooms. Returns those that exceed their rate, with the seconds that each must wait.

        A malformed batch is charged for what can be read of it; the core that routes it finds the fault.
        """
        if self._rooms is None:
            return {}
        charges: dict[int, tuple[int, int]] = {}
        for _ in range(count):
            if start + HEADER_SIZE > end:
                break
            size, _, _, _, _, key = ROUTE.unpack_from(data, start)
            if size < MIN_SIZE or start + SIZE_FIELD + size > end:
                break
            messages, total = charges.get(key, (0, 0))
            charges[key] = messages + 1, total + size + SIZE_FIELD
            start += SIZE_FIELD + size
        waits = {key: self._rooms.take(key, messages, size, now) for key, (messages, size) in charges.items()}
        return {key: wait_s for key, wait_s in waits.items() if wait_s}
