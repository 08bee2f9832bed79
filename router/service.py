"""The router's shell: `cluster.membership.replica.service` around its core.

Source: PiXiu §2.4, §5.2.
"""

from __future__ import annotations

from cluster.membership.map.lww_map import LwwMap
from cluster.membership.replica.service import ReplicaService
from cluster.process.context import Context
from router.core import Core
from router.options import Options


class Service(ReplicaService):
    """The router's shell: runs one `router.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        options, cluster = context.options, context.cluster
        core = Core(
            endpoint=context.endpoint_id,
            partition=options.partition,
            heartbeat_s=cluster.heartbeat_interval_ms / 1000,
            dead_after=cluster.dead_after,
            poll_interval_s=options.poll_interval_s,
            gone_gateway_s=options.gone_gateway_s,
            membership=LwwMap(max_entries=options.max_entries),
            guests=cluster.guests,
        )
        super().__init__(context, core, options.store_mb, others=("broker",))
