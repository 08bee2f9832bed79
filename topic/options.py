"""A topic replica's own options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.listeners.clients import ClientRoleOptions
from cluster.replication.role_options import ReplicatedOptions
from cluster.settings.fields import bounded
from pixiu.errors import InvalidArgument
from pixiu.objects.manifest import check_url


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
    store: str = ""
    """Object store of topics that name none: an absolute folder, or a URL that fsspec opens (s3://…, hdfs://…); empty: none. All
    replicas of a group need the same. Credentials come from fsspec's configuration."""
    store_segment_mb: int = bounded(16, 1, 256)
    """MiB of one object in the store. A part is uploaded as soon as it has as many that the store has not."""
    store_idle_s: float = bounded(10.0, 0.1, 86_400.0)
    """Seconds without a new block after which the rest of a part is uploaded, too."""
    store_interval_ms: int = bounded(1000, 1, 60_000)
    """Milliseconds between two uploads of a part for writers of level stored, at least."""
    store_cache_mb: int = bounded(256, 16, 1 << 20)
    """MiB of objects that were read from the store and are kept on the disk, beside `data_dir`'s state."""
    local_retention_s: float = bounded(600.0, 0.0, 31_536_000.0)
    """Seconds for which uploaded segments are kept here, too. Short space lets them go earlier."""
    local_mb: int = bounded(0, 0, 1 << 30)
    """MiB of topics on this replica from which on writers of topics with a store are held while something waits to be uploaded; 0:
    none. They are also held from 90 % of the file system on."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, requirement) of every option that is wrong."""
        yield from super().problems()
        try:
            check_url(self.store)
        except InvalidArgument as problem:
            yield "store", str(problem)

    def read_files(self) -> None:
        """See `RoleOptions`."""
        super().read_files()
        if self.access_file:
            from cluster.access.files import Files  # most processes do not need it

            Files(Path(self.access_file)).read()
