"""Senders that use an old layout: who tells them, once in a while each, and when they read the registry again. Pure.

Source: docs/routing.md.
"""

from __future__ import annotations

from typing import Final

from pixiu.ids import EndpointID
from pixiu.wire.v1 import control_pb2

NOTICE_INTERVAL_S: Final = 1.0
FIRST_REFRESH_S: Final = 2.0
LAST_REFRESH_S: Final = 60.0
"""Between two readings of the registry because of notices; doubles while they bring no newer layout."""
REFRESH_SPREAD_S: Final = 0.25
"""Readings come up to so much later, so that processes that were told together do not read together."""
MAX_NOTICED: Final = 10_000
"""Senders that are remembered. Policy: the one told longest ago is forgotten, and may be told early."""


class LayoutNotices:
    """With who tells: remembers who was told when."""

    def __init__(self) -> None:
        self._told: dict[EndpointID, float] = {}

    def due(self, sender: EndpointID, version: int, now: float) -> bytes | None:
        """The serialized `Control` for a stale sender; None when it was told within the last second."""
        if now - self._told.get(sender, -NOTICE_INTERVAL_S) < NOTICE_INTERVAL_S:
            return None
        self._told.pop(sender, None)
        if len(self._told) >= MAX_NOTICED:
            del self._told[next(iter(self._told))]
        self._told[sender] = now
        return control_pb2.Control(layout_notice=control_pb2.LayoutNotice(version=version)).SerializeToString()


class LayoutRefresh:
    """With who is told: when to read the registry because of a notice."""

    def __init__(self) -> None:
        self._known = 0
        self._not_before = 0.0
        self._interval_s = FIRST_REFRESH_S
        self.notices = 0

    def noticed(self, told: int, known: int, spread: float, now: float) -> float | None:
        """Somebody said that there is a layout `told`; the own one is `known`. `spread` is random, in [0, 1).

        Returns in how many seconds to read the registry; None: not because of this notice.
        """
        self.notices += 1
        if known > self._known:
            self._known, self._not_before, self._interval_s = known, now, FIRST_REFRESH_S
        if told <= known or now < self._not_before:
            return None
        self._not_before = now + self._interval_s
        # A ZooKeeper server may be behind, and a notice may be wrong: neither makes everybody read all the time.
        self._interval_s = min(2 * self._interval_s, LAST_REFRESH_S)
        return spread * REFRESH_SPREAD_S
