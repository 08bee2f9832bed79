"""A router's own options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings.fields import bounded
from cluster.settings.options import PartitionedOptions


@dataclass(frozen=True, kw_only=True)
class Options(PartitionedOptions):
    """The [router] table. `data_dir` holds the Router DB; without one the membership is kept in memory only, and lost
    when all replicas of the partition stop together."""

    store_mb: int = bounded(1024, 1, 1 << 20)
    """MiB that the Router DB may grow to: about 100 bytes for each member of each room."""
    max_entries: int = bounded(4_000_000, 1, 1_000_000_000)
    """Limit of members of rooms; further joins are refused and counted."""
    retained_messages: int = bounded(1_000_000, 0, 100_000_000)
    """Limit of retained messages of the partition; further ones are refused to their publishers. 0: none are kept."""
    retained_mb: int = bounded(512, 1, 1 << 20)
    """MiB that retained messages may take in memory, and in the database about as much."""
    kept_filters: int = bounded(1_000_000, 0, 100_000_000)
    """Limit of filters that the partition keeps for sessions which outlive their connections; further ones are refused to their
    subscribers. 0: none are kept."""
    kept_mb: int = bounded(512, 1, 1 << 20)
    """MiB that kept filters may take in memory, and in the database at most as much."""
    kept_sessions_per_room: int = bounded(1_000, 1, 1_000_000)
    """Limit of sessions with kept filters in one room: a message there is listed in the inbox of each that it matches."""
    gone_gateway_s: float = bounded(10.0, 0.1, 1_000_000.0)
    """Seconds after which the members on a gateway are dropped when its lease is gone and its heartbeats have stopped."""
