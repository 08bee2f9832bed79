"""What MQTT clients may publish through one gateway: token buckets for each client and each room. Pure.

A message of QoS 0 that is over the rate is dropped and counted. One of QoS 1 is taken in any case, and the client is not
read from until the debt is paid: MQTT 3.1.1 has no "no", and a client that waits loses nothing.

Source: docs/promises.md, "Failure rules" 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.runtime.token_bucket import Meter, Meters

MAX_METERED_CLIENTS = 100_000
"""Clients whose rate is known at one time, also after they are gone: coming again brings no new burst."""
MAX_METERED_ROOMS = 100_000
MAX_HOLD_S = 10.0
"""A client is not read from for at most so long at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The limits; 0 is none."""

    client_messages_per_s: float = 0
    client_bytes_per_s: float = 0
    room_messages_per_s: float = 0
    room_bytes_per_s: float = 0
    burst_s: float = 1.0


class PublishRates:
    """The meters of one gateway."""

    def __init__(self, rates: Rates) -> None:
        self._clients: Meters[str] | None = None
        self._rooms: Meters[int] | None = None
        self.set_rates(rates)
        self.dropped = 0
        self.held = 0

    def set_rates(self, rates: Rates) -> None:
        """Allow so much from now on; everybody begins with a full burst."""
        self._clients = self._rooms = None
        if rates.client_messages_per_s or rates.client_bytes_per_s:
            self._clients = Meters(rates.client_messages_per_s, rates.client_bytes_per_s, rates.burst_s, MAX_METERED_CLIENTS)
        if rates.room_messages_per_s or rates.room_bytes_per_s:
            self._rooms = Meters(rates.room_messages_per_s, rates.room_bytes_per_s, rates.burst_s, MAX_METERED_ROOMS)

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return self._clients is not None or self._rooms is not None

    def take(self, client: str, room: int, size: int, now: float) -> bool:
        """Whether a message of QoS 0 may pass; else it is counted."""
        meters = self._meters(client, room, now)
        if any(meter.wait_s(now) for meter in meters):
            self.dropped += 1
            return False
        for meter in meters:
            meter.spend(1, size, now)
        return True

    def spend(self, client: str, room: int, size: int, now: float) -> float:
        """A message of QoS 1 passes. Returns the seconds for which the client is not to be read from."""
        wait_s = max((meter.spend(1, size, now) for meter in self._meters(client, room, now)), default=0.0)
        self.held += bool(wait_s)
        return min(wait_s, MAX_HOLD_S)

    def _meters(self, client: str, room: int, now: float) -> list[Meter]:
        found: list[Meter] = []
        if self._clients is not None:
            found.append(self._clients.of(client, now))
        if self._rooms is not None:
            found.append(self._rooms.of(room, now))
        return found
