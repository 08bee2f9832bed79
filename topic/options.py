"""A topic replica's own options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.listeners.clients import ClientRoleOptions
from cluster.replication.role_options import ReplicatedOptions


@dataclass(frozen=True, kw_only=True)
class Options(ReplicatedOptions, ClientRoleOptions):
    """The [topic] table. `data_dir` holds the log and the parts; it must be given, and belongs to one process. `partition` is the
    group."""
