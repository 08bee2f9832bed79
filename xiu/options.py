"""A Xiu's own options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.replication.role_options import ReplicatedOptions
from cluster.settings.fields import bounded


@dataclass(frozen=True, kw_only=True)
class Options(ReplicatedOptions):
    """The [xiu] table. `data_dir` holds the log and the store."""

    table_dir: str = "/dev/shm"  # noqa: S108 (shared memory, not a file of unknown name)
    """Folder on a tmpfs for the table of newest records."""
    table_name: str = ""
    """Folder of the table in table_dir. Empty: named after the registry's root, the partition and data_dir."""
    table_mb: int = bounded(64, 8, 1 << 20)
    """MiB of shared memory, all of it taken at the start. Records that are not persisted yet fill at most 60 percent of it."""
    memtable_mb: int = bounded(32, 1, 4096)
    """MiB that RocksDB collects in memory before it writes a file; it may hold four times as much."""
    cache_mb: int = bounded(32, 1, 1 << 20)
    """MiB of cache for blocks that were read from RocksDB's files."""
    flush_interval_s: float = bounded(10.0, 0.1, 3600.0)
    """Seconds between two flushes of the store; after a crash, the log since the last one is applied again."""
    trim_interval_s: float = bounded(600.0, 0.1, 86_400.0)
    """Seconds between two searches for records and SnowflakeIDs that may be deleted."""
    keep_h: float = bounded(768.0, 0.0, 1_000_000.0)
    """Hours for which messages are kept; 0: for ever. Set it a day above the largest age of inboxes."""
    keep_mb: int = bounded(0, 0, 1 << 40)
    """MiB of messages that are kept at most; the oldest beyond it are deleted, whatever their age. 0: no limit but the disk's."""
    reader_hold_h: float = bounded(168.0, 0.0, 100_000.0)
    """Hours for which retention waits for a named reader (docs/pipeline.md) that does not report."""
    reserve_mb: int = bounded(256, 0, 1 << 30)
    """MiB of free disk below which writes are refused, so that accepted records can be written out."""
    await_restore: bool = False
    """Whether a partition that never stored anything refuses mail until a restore begins (`pixiu pipeline restore`). For processes
    that replace those whose disks are lost, so that no message is reported as gone."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """(key, what it must be) of every option that is wrong."""
        yield from super().problems()
        if "/" in self.table_name or self.table_name in (".", ".."):
            yield "table_name", "the name of a folder, without /"
