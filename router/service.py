"""The router's shell: `pixiu.replicas.service` around its core.

Source: seed 004 §2.4, §5.2.
"""

from __future__ import annotations

from pixiu.replicas.service import ReplicaService
from pixiu.runtime.context import Context
from pixiu.softstore import Membership
from router.core import Core
from router.options import Options


class Service(ReplicaService):
    """Runs one `router.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        options, cluster = context.options, context.cluster
        core = Core(
            endpoint=context.endpoint_id,
            partition=options.partition,
            heartbeat_s=cluster.heartbeat_interval_ms / 1000,
            dead_after=cluster.dead_after,
            poll_interval_s=options.poll_interval_s,
            gone_gateway_s=options.gone_gateway_s,
            membership=Membership(max_entries=options.max_entries),
        )
        super().__init__(context, "router", core, options.store_mb, others=("broker",))
