"""An admin's own options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings.options import RoleOptions


@dataclass(frozen=True, kw_only=True)
class Options(RoleOptions):
    """The [admin] table: what every role has. An admin stores nothing; topics are in the registry."""
