"""The router's core: who is in which room, said by gateways, kept equal with its peers, handed to brokers.

All of it is `pixiu.replicas.core`, over `pixiu.softstore.Membership`.

Source: seed 004 §2.4, §5 and §5.2; DESIGN sections 9, 10 and 13.
"""

from __future__ import annotations

from typing import ClassVar

from pixiu.ids import EndpointID
from pixiu.replicas.core import ReplicaCore
from pixiu.softstore import Membership


class Core(ReplicaCore):
    """Decides; arguments as `ReplicaCore` has them. `step` never raises on what comes from the network."""

    SNAPSHOT_ROLES: ClassVar[tuple[str, ...]] = ("broker", "router")

    def __init__(
        self,
        *,
        endpoint: EndpointID,
        partition: int,
        heartbeat_s: float,
        dead_after: int,
        poll_interval_s: float,
        gone_gateway_s: float,
        membership: Membership | None = None,
    ) -> None:
        super().__init__(
            endpoint=endpoint,
            partition=partition,
            heartbeat_s=heartbeat_s,
            dead_after=dead_after,
            poll_interval_s=poll_interval_s,
            gone_gateway_s=gone_gateway_s,
            membership=membership if membership is not None else Membership(),
            role="router",
        )
