"""Rate limits of MQTT publishing through one gateway: token buckets for each client and each room. Pure.

A message of QoS 0 over the rate is dropped and counted. One of QoS 1 is always taken, and the client is not read from until the
debt is paid: MQTT 3.1.1 cannot refuse a message, and a client that waits loses nothing.

Source: docs/promises.md, "Failure rules" 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.token_bucket import Meter, Meters

MAX_METERED_CLIENTS = 100_000
"""Clients whose rate is remembered at one time, departed ones included: reconnecting brings no new burst."""
MAX_METERED_ROOMS = 100_000
MAX_HOLD_S = 10.0
"""Longest time at once for which a client is not read from, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Limits; 0 is none."""

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
        """Use these rates from now on; everybody begins with a full burst."""
        self._clients = self._rooms = None
        if rates.client_messages_per_s or rates.client_bytes_per_s:
            self._clients = Meters(rates.client_messages_per_s, rates.client_bytes_per_s, rates.burst_s, MAX_METERED_CLIENTS)
        if rates.room_messages_per_s or rates.room_bytes_per_s:
            self._rooms = Meters(rates.room_messages_per_s, rates.room_bytes_per_s, rates.burst_s, MAX_METERED_ROOMS)
        self.any = self._clients is not None or self._rooms is not None

    def take(self, client: str, room: int, size: int, now: float) -> bool:
        """Charge a message of QoS 0. Returns True if it may pass; otherwise it is counted as dropped."""
        meters = self._meters(client, room, now)
        if any(meter.wait_s(now) for meter in meters):
            self.dropped += 1
            return False
        for meter in meters:
            meter.spend(1, size, now)
        return True

    def spend(self, client: str, room: int, size: int, now: float) -> float:
        """Charge a message of QoS 1, which always passes. Returns the seconds for which not to read from the client."""
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
