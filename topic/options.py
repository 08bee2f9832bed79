"""A topic replica's own options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.listeners.clients import ClientRoleOptions
from cluster.replication.role_options import ReplicatedOptions
from cluster.settings.fields import bounded


@dataclass(frozen=True, kw_only=True)
class Options(ReplicatedOptions, ClientRoleOptions):
    """The [topic] table. `data_dir` holds the log and the parts; it must be given, and belongs to one process. `partition` is the
    group."""

    memory_mb: int = bounded(256, 16, 1 << 20)
    """MiB of blocks that are kept in memory, just appended or read. The oldest go first."""
    flush_interval_s: float = bounded(2.0, 0.01, 60.0)
    """Seconds between two flushes of blocks and state; the log holds what is not flushed yet."""
    scrub_mb_per_s: int = bounded(4, 0, 10_000)
    """MiB of stored segments whose CRCs are checked in the background, a second; 0: none."""
    writer_window_bytes: int = bounded(8 << 20, 1 << 20, 1 << 28)
    """Bytes of blocks that a writer may have unanswered on one stream; beyond that it is not read."""
    retention_interval_s: float = bounded(60.0, 0.1, 3600.0)
    """Seconds between two searches for segments that retention may drop."""
