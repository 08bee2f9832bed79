"""A broker's own options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings.fields import bounded
from cluster.settings.options import PacedOptions, PartitionedOptions


@dataclass(frozen=True, kw_only=True)
class Options(PartitionedOptions, PacedOptions):
    """The [broker] table."""

    max_entries: int = bounded(4_000_000, 1, 1_000_000_000)
    """Limit of members of rooms; further joins are refused and counted."""
    gone_gateway_s: float = bounded(10.0, 0.1, 1_000_000.0)
    """Seconds after which the members on a gateway are dropped when its lease is gone and its heartbeats have stopped."""
