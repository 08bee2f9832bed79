"""Notifies senders that use an old layout, each at intervals, and decides when they read the registry again. Pure.

Source: docs/routing.md.
"""

from __future__ import annotations

from typing import Final

from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID

NOTICE_INTERVAL_S: Final = 1.0
FIRST_REFRESH_S: Final = 2.0
LAST_REFRESH_S: Final = 60.0
"""Longest interval between two readings of the registry because of notices; it doubles while they bring no newer layout."""
REFRESH_SPREAD_S: Final = 0.25
"""Maximum random delay of a reading, so that processes that were notified together do not read together."""
MAX_NOTICED: Final = 10_000
"""Maximum senders that are remembered. Policy: the one notified longest ago is forgotten, and may be notified early."""


class LayoutNotices:
    """Rate-limits stale-layout notices: one per sender and second."""

    def __init__(self) -> None:
        self._told: dict[EndpointID, float] = {}

    def due(self, sender: EndpointID, version: int, now: float) -> bytes | None:
        """Return the serialized `Control` for a stale sender; None if it was notified within the last second."""
        if now - self._told.get(sender, -NOTICE_INTERVAL_S) < NOTICE_INTERVAL_S:
            return None
        self._told.pop(sender, None)
        if len(self._told) >= MAX_NOTICED:
            del self._told[next(iter(self._told))]
        self._told[sender] = now
        return control_pb2.Control(layout_notice=control_pb2.LayoutNotice(version=version)).SerializeToString()


class LayoutRefresh:
    """Decides when a notified process reads the registry again."""

    def __init__(self) -> None:
        self._known = 0
        self._not_before = 0.0
        self._interval_s = FIRST_REFRESH_S
        self.notices = 0

    def noticed(self, told: int, known: int, spread: float, now: float) -> float | None:
        """Handle a notice that layout version `told` exists; our own one is `known`. `spread` is random, in [0, 1).

        Returns the seconds until the registry is to be read; None: not because of this notice.
        """
        self.notices += 1
        if known > self._known:
            self._known, self._not_before, self._interval_s = known, now, FIRST_REFRESH_S
        if told <= known or now < self._not_before:
            return None
        self._not_before = now + self._interval_s
        # A ZooKeeper server may lag, and a notice may be wrong: neither makes everybody read all the time.
        self._interval_s = min(2 * self._interval_s, LAST_REFRESH_S)
        return spread * REFRESH_SPREAD_S
