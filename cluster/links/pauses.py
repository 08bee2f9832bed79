"""Pauses of this process in which its peers suspected it. Pure.

Source: docs/routing.md, "Order across a change of routes".
"""

from __future__ import annotations

from typing import Final

from cluster.links.options import LinkOptions

LEAST_DOUBT_S: Final = 2.0
"""Shortest pause after which what came meanwhile is late, seconds."""


class Pauses:
    """The last turn of the event loop. Where there are peers to heartbeat, a turn is due every second at least."""

    __slots__ = ("_doubt_s", "_turn_at")

    def __init__(self, options: LinkOptions) -> None:
        self._doubt_s = max(LEAST_DOUBT_S, options.suspect_after * options.heartbeat_interval_ms / 1000)
        self._turn_at = float("inf")

    def is_over(self, now: float, due: float) -> bool:
        """True if the turn at `now` is the first one after a pause; the next turn was `due`; monotonic seconds."""
        return due <= now and now - self._turn_at >= self._doubt_s

    def turn(self, now: float) -> None:
        """Note a turn."""
        self._turn_at = now
