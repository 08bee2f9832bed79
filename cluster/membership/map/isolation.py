"""Detects that a replica was out of contact with the others of its partition for too long. Pure.

Source: docs/memberships.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pixiu.ids import EndpointID

OUT_OF_CONTACT_S: Final = 300.0
"""Half of a tombstone's life: changes missed in this time can still be learned from the others."""


class Isolation:
    """Detects that no Running peer in the registry has answered for too long."""

    def __init__(self) -> None:
        self._alone_since: float | None = None

    def regained_late(self, live: Sequence[EndpointID], running: Sequence[EndpointID], now: float) -> bool:
        """Update the state; call it whenever an argument may have changed. True once, when contact is regained after too long."""
        if not running:
            self._alone_since = None
            return False
        if not live:
            if self._alone_since is None:
                self._alone_since = now
            return False
        since, self._alone_since = self._alone_since, None
        return since is not None and now - since > OUT_OF_CONTACT_S
