"""The router's shell: `cluster.membership.replica.service` around its core.

Source: PiXiu §2.4, §5.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.links.api import PeerState
from cluster.membership import events as ev
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.replica.service import ReplicaService
from cluster.process.context import Context
from cluster.wire.v1 import kept_pb2_grpc, retained_pb2_grpc
from pixiu.discovery.node import Node, NodeState
from pixiu.ids import MAX_ID, EndpointID
from router.core import Core
from router.kept.service import KeptService
from router.options import Options
from router.retained.service import RetainedService


class Service(ReplicaService):
    """The router's shell: runs one `router.core.Core`, with retained messages and kept filters beside it."""

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
        shared: dict[str, Any] = {
            "folder": Path(options.data_dir) if options.data_dir else None,
            "peers": self._live_peers,
            "sources": self._sources,
            "rule": self._rule,
            "log": context.log,
            "tls": context.tls,
        }
        self.retained = RetainedService(max_messages=options.retained_messages, max_bytes=options.retained_mb << 20, **shared)
        self.kept = KeptService(
            max_filters=options.kept_filters,
            max_bytes=options.kept_mb << 20,
            max_sessions=options.kept_sessions_per_room,
            core=core,
            step=self._runner.step,
            lowest=self._lowest,
            **shared,
        )
        self._runner.effects.on(ev.RoomsMarked, self.kept.marks.marked)
        self._runner.effects.on(ev.MarksLost, self.kept.marks.lost)
        retained_pb2_grpc.add_RetainedServicer_to_server(self.retained, context.server)
        kept_pb2_grpc.add_KeptServicer_to_server(self.kept, context.server)

    async def start(self) -> None:
        """Load the membership and the tables: from a Running replica, otherwise from the own databases."""
        tables = self.retained, self.kept
        for table in tables:
            await table.load()
        await super().start()
        for table in tables:
            await table.catch_up()
        await self.kept.mark_all()
        for table in tables:
            self.spawn(table.run())

    async def stop(self) -> None:
        """Stop, and close the databases."""
        await super().stop()
        await self.retained.close()
        await self.kept.close()

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """See `MemberService.on_peer_state`."""
        super().on_peer_state(peer, state)
        if state is PeerState.ALIVE and any(node.endpoint == peer for node in self._sources()):
            for table in (self.retained, self.kept):
                table.sync_soon()

    def health(self) -> dict[str, object]:
        """See `ReplicaService.health`."""
        found = super().health()
        problem = self.retained.problem or self.kept.problem or None
        sizes = {"retained": len(self.retained.map), "kept": len(self.kept.table)}
        return {**found, **sizes, "degraded": found["degraded"] or problem}

    def _samples(self) -> dict[str, object]:
        return {**super()._samples(), **self.retained.samples(), **self.kept.samples()}

    def _live_peers(self) -> list[Node]:
        """The other replicas of the partition that are not dead."""
        context = self._context
        return [
            node
            for node in context.view.of_role("router")
            if node.partition == self._partition
            and node.endpoint != context.endpoint_id
            and context.links.state(node.endpoint) is not PeerState.DEAD
        ]

    def _sources(self) -> list[Node]:
        """Running replicas that have what this one should have: the peers, and those of the parent while the partition is made."""
        partitions = self._context.view.layout.partitions("router")
        found = [node for node in self._live_peers() if node.state is NodeState.RUNNING]
        if self._partition >= partitions:
            parents = [node for node in self._context.view.running("router") if node.partition == self._partition % partitions]
            found += parents[:1]
        return found

    def _lowest(self) -> bool:
        """True if this is the lowest replica of its partition, all of them that the registry has are Running and alive, and no
        doubling is under way."""
        nodes = self._context.view.of_role("router")
        own = [node for node in nodes if node.partition == self._partition]
        others = [node.endpoint for node in own if node.endpoint != self._context.endpoint_id]
        return (
            all(node.state is NodeState.RUNNING for node in own)
            and len(self._live_peers()) == len(others)
            and self._context.endpoint_id < min(others, default=MAX_ID + 1)
            and all(node.partition < self._context.view.layout.partitions("router") for node in nodes)
        )

    def _rule(self) -> tuple[int, int]:
        """This partition, and the number of partitions by which it serves rooms; a child already serves by the next one."""
        partitions = self._context.view.layout.partitions("router")
        while self._partition >= partitions:
            partitions *= 2
        return self._partition, partitions
