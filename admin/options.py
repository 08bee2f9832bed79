"""An admin's own options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings.fields import bounded
from cluster.settings.options import RoleOptions


@dataclass(frozen=True, kw_only=True)
class Options(RoleOptions):
    """The [admin] table: what every role has, and the pace of moves. An admin stores nothing; topics are in the registry."""

    moves_per_hour: int = bounded(0, 0, 60)
    """Parts of topics that the leading admin moves from loaded groups to others in an hour, without being asked; 0: none."""
