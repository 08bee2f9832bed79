"""The options of a role whose processes are replicas: Xiu's and Pi's tables inherit them.

Source: docs/registry.md, docs/replication.md, docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.replication.options import ReplicationOptions
from cluster.settings.fields import bounded
from cluster.settings.options import PartitionedOptions


@dataclass(frozen=True, kw_only=True)
class ReplicatedOptions(PartitionedOptions):
    """Options common to all replicated roles. `data_dir` must be given."""

    session_timeout_ms: int = bounded(6_000, 1000, 120_000)
    """Milliseconds after which ZooKeeper removes a silent process, and another replica may lead."""
    min_in_sync: int = bounded(1, 1, 16)
    """Replicas that must be in sync for writes at level replicated; with fewer they are refused, or not confirmed if under way."""
    max_uncommitted: int = bounded(100_000, 1, 10_000_000)
    """Entries that may wait to be replicated; further ones are refused with OVERLOADED."""
    segment_mb: int = bounded(64, 1, 4096)
    """MiB of one file of the log; the log is trimmed by whole files."""
    export_share: float = bounded(0.5, 0.01, 1.0)
    """Share of one core that all exports (docs/pipeline.md) of this process may use together."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, requirement) of every option that is wrong."""
        yield from super().problems()
        if not self.data_dir:
            yield "data_dir", "the folder of this replica's data"

    def replication(self) -> ReplicationOptions:
        """Settings of replication."""
        return ReplicationOptions(min_in_sync=self.min_in_sync, max_uncommitted=self.max_uncommitted)
