"""The router's core: room membership reported by gateways, kept equal with its peers, and sent to brokers.

All of it is `cluster.membership.replica.core`, over `cluster.membership.map.lww_map.LwwMap`.

Source: PiXiu §2.4, §5 and §5.2; docs/architecture.md, docs/memberships.md, docs/routing.md, "Partitions".
"""

from __future__ import annotations

from typing import ClassVar

from cluster.membership.replica.core import ReplicaCore


class Core(ReplicaCore):
    """Decides; takes the arguments of `ReplicaCore`. `step` never raises on what comes from the network."""

    ROLE: ClassVar[str] = "router"
    SNAPSHOT_ROLES: ClassVar[tuple[str, ...]] = ("broker", "router")
