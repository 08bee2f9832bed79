"""The router's shell: `pixiu.replicas.service` around its core.

Source: seed 004 §2.4, §5.2.
"""

from __future__ import annotations

from pixiu.replicas.service import ReplicaService
from pixiu.runtime.context import Context
from pixiu.softstore import Change, Membership
from router.codec import CODEC
from router.core import Core
from router.options import Options


class Service(ReplicaService[Change]):
    """Runs one `router.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        options, cluster = context.options, context.cluster
        self._map = Membership(max_entries=options.max_entries)
        core = Core(
            endpoint=context.endpoint_id,
            partition=options.partition,
            heartbeat_s=cluster.heartbeat_interval_ms / 1000,
            dead_after=cluster.dead_after,
            poll_interval_s=options.poll_interval_s,
            gone_gateway_s=options.gone_gateway_s,
            membership=self._map,
        )
        super().__init__(context, core, CODEC, options.store_mb, others=("broker",))

    def health(self) -> dict[str, object]:
        """Also how many rooms have members."""
        return {**super().health(), "rooms": self._map.rooms}

    def _samples(self) -> dict[str, float]:
        return {**super()._samples(), "rooms": self._map.rooms}
