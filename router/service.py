"""The router's shell: `cluster.membership.replica.service` around its core.

Source: PiXiu §2.4, §5.2.
"""

from __future__ import annotations

from pathlib import Path

from cluster.links.api import PeerState
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.replica.service import ReplicaService
from cluster.process.context import Context
from cluster.wire.v1 import retained_pb2_grpc
from pixiu.discovery.node import Node, NodeState
from router.core import Core
from router.options import Options
from router.retained.service import RetainedService


class Service(ReplicaService):
    """The router's shell: runs one `router.core.Core`, and keeps retained messages beside it."""

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
        self._partition = options.partition
        self.retained = RetainedService(
            max_messages=options.retained_messages,
            max_bytes=options.retained_mb << 20,
            folder=Path(options.data_dir) if options.data_dir else None,
            peers=self._retained_peers,
            sources=self._retained_sources,
            rule=self._retained_rule,
            log=context.log,
            tls=context.tls,
        )
        retained_pb2_grpc.add_RetainedServicer_to_server(self.retained, context.server)

    async def start(self) -> None:
        """Load the membership and the retained messages: from a Running replica, otherwise from the own databases."""
        await self.retained.load()
        await super().start()
        await self.retained.catch_up()
        self.spawn(self.retained.run())

    async def stop(self) -> None:
        """Stop, and close the databases."""
        await super().stop()
        await self.retained.close()

    def health(self) -> dict[str, object]:
        """See `ReplicaService.health`."""
        found = super().health()
        return {**found, "retained": len(self.retained.map), "degraded": found["degraded"] or self.retained.problem or None}

    def _samples(self) -> dict[str, object]:
        return {**super()._samples(), **self.retained.samples()}

    def _retained_peers(self) -> list[Node]:
        """The other replicas of the partition that are not dead."""
        context = self._context
        return [
            node
            for node in context.view.of_role("router")
            if node.partition == self._partition
            and node.endpoint != context.endpoint_id
            and context.links.state(node.endpoint) is not PeerState.DEAD
        ]

    def _retained_sources(self) -> list[Node]:
        """Running replicas that have what this one should have: the peers, and those of the parent while the partition is made."""
        partitions = self._context.view.layout.partitions("router")
        found = [node for node in self._retained_peers() if node.state is NodeState.RUNNING]
        if self._partition >= partitions:
            parents = [node for node in self._context.view.running("router") if node.partition == self._partition % partitions]
            found += parents[:1]
        return found

    def _retained_rule(self) -> tuple[int, int]:
        """This partition, and the number of partitions by which it serves rooms; a child already serves by the next one."""
        partitions = self._context.view.layout.partitions("router")
        while self._partition >= partitions:
            partitions *= 2
        return self._partition, partitions
