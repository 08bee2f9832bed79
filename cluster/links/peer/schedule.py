"""The times of heartbeats to all peers, and the bodies of those that are due.

Source: docs/links.md.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from cluster.links.datagrams import heartbeat
from cluster.links.peer.outbox import INFINITY
from cluster.links.peer.peer_link import Link
from pixiu.ids import EndpointID

BEATS_TOGETHER_S: Final = 0.005
"""Heartbeats due within this time leave together, so that a process with a thousand peers is not woken for each, seconds."""


class Schedule:
    """The heartbeats to come."""

    __slots__ = ("_beats", "_interval_s", "_start", "_started_at")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._beats: list[tuple[float, EndpointID]] = []
        """Heap of the times of heartbeats; entries that differ from their link's time are to be skipped."""
        self._start = b""
        """First fields of heartbeats that leave at `_started_at`."""
        self._started_at = -INFINITY

    @property
    def next_at(self) -> float:
        """Time of the next heartbeat; infinity if there is none."""
        return self._beats[0][0] if self._beats else INFINITY

    def put(self, link: Link, at: float) -> None:
        """Set the time of a peer's next heartbeat."""
        link.heartbeat_at = at
        heappush(self._beats, (at, link.id))

    def put_after(self, link: Link, now: float, spread: bool = False) -> None:
        """Set a peer's next heartbeat an interval from now; `spread`: sooner, so that those of peers that were set together are
        spread over the interval."""
        self.put(link, now + (self._interval_s * (0.5 + (link.id & 1023) / 2048) if spread else self._interval_s))

    def due(self, now: float) -> list[tuple[float, EndpointID]]:
        """Take the heartbeats that are due, with those that leave together with them."""
        found: list[tuple[float, EndpointID]] = []
        beats = self._beats
        if beats and beats[0][0] <= now:
            while beats and beats[0][0] <= now + BEATS_TOGETHER_S:
                found.append(heappop(beats))
        return found

    def body(self, link: Link, now: float) -> bytes:
        """Body of a heartbeat to a peer."""
        if now != self._started_at:
            self._started_at = now
            self._start = heartbeat.start(False, int(now * 1e6))
        next_record, next_control = link.sender.datagram.upcoming
        return self._start + heartbeat.rest(next_record, next_control, link.attachment, link.id)
