"""Digests of a replica's state, by which replicas are compared without a transfer of rows. Pure.

Source: docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Digests(NamedTuple):
    """Digests of one state."""

    position: int
    """Of the state."""
    sums: Mapping[int, int]
    """Range → digest of its rows."""
    floor: int = 0
    """Ranges below it are removed, or about to be."""

    def differing(self, other: Digests) -> list[int]:
        """The ranges in which another state has other rows. Those that one of them has begun to remove are not compared."""
        floor = max(self.floor, other.floor) if self.floor != other.floor else 0
        places = sorted(self.sums.keys() | other.sums.keys())
        return [place for place in places if place >= floor and self.sums.get(place) != other.sums.get(place)]
