"""Counts refused input and warns of it rarely.

Source: docs/protocol.md, "Record", docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_WARNED: Final = 1024
"""Sources whose last warning is remembered; beyond this all are forgotten, so that a flood of sources costs no memory."""
WARN_INTERVAL_S: Final = 60.0
WARNING: Final = "link_input_refused"


def no_warning(event: str, **fields: object) -> None:
    """Ignore the warning: the default if nobody listens."""


class Refusals:
    """Counts refusals by reason; warns at most once a minute for each source."""

    def __init__(self, on_warning: Callable[..., None]) -> None:
        self.counts: dict[str, int] = {}
        self._on_warning = on_warning
        self._warned: dict[str, float] = {}

    def count(self, reason: str) -> None:
        """Count without a warning, for things that networks do by themselves (a duplicate, an old counter)."""
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def refuse(self, reason: str, source: str, now: float, **fields: object) -> None:
        """Count, and warn if there was no warning about the source in the last minute. `source` is an address, never a payload."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        last = self._warned.get(source)
        if last is not None and now - last < WARN_INTERVAL_S:
            return
        if len(self._warned) >= MAX_WARNED:
            self._warned.clear()
        self._warned[source] = now
        self._on_warning(WARNING, reason=reason, source=source, **fields)
