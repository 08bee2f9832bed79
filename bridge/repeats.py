"""IDs of messages that a topic has stored lately: what a source gives again is not stored again. Pure.

    a topic's tail, read when the bridge begins ──▶ IDs ◀── each record that is stored
                                                     │
    a record whose ID is there is confirmed, and not stored

Source: docs/bridges.md, "To and from NSQ".
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_IDS: Final = 200_000
"""IDs that are remembered. Policy: the oldest one is forgotten."""


class Repeats:
    """Remembers IDs."""

    def __init__(self, most: int = MAX_IDS) -> None:
        self._most = most
        self._ids: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def note(self, found: bytes) -> bool:
        """Remember an ID. False: it was known."""
        known = found in self._ids
        self._ids[found] = None
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)
        return not known
