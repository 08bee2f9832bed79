"""Tells senders that use an old layout about the newest one, once in a while each. Pure.

Source: DESIGN section 8 ("a stale sender is answered, not ignored").
"""

from __future__ import annotations

from typing import Final

from pixiu.ids import EndpointID
from pixiu.wire.v1 import control_pb2

NOTICE_INTERVAL_S: Final = 1.0
MAX_NOTICED: Final = 10_000
"""Senders that are remembered. Policy: the one told longest ago is forgotten, and may be told early."""


class LayoutNotices:
    """Remembers who was told when."""

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
