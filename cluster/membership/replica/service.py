"""The shell that routers and relays share: adds the snapshot service, the database and forwards to a member's shell.

Source: PiXiu §2.4, §5.2, §7.3.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc.aio

from cluster.core.contract import Settled
from cluster.core.role import totals
from cluster.links.api import Peer
from cluster.membership import events as ev
from cluster.membership.member.service import MemberService, gateways_of
from cluster.membership.replica.core import ReplicaCore
from cluster.membership.replica.store import StoreError
from cluster.membership.replica.store_writer import StoreWriter
from cluster.process.context import Context
from cluster.wire.v1 import control_pb2, membership_pb2, membership_pb2_grpc
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.errors import Unavailable
from pixiu.ids import EndpointID, hex_id
from pixiu.rpc.status import GRPC_STATUS

STORE_FAILED: Final = "db_failed"
STORE_ABSENT: Final = "db_absent"
MAP_READY: Final = "map_ready"


class ReplicaService(MemberService):
    """The shell of a router or relay: runs one `ReplicaCore`.

    Args:
        core: the role's core.
        store_mb: largest size of the database, MiB.
        others: other roles that it communicates with, besides its own and gateways.
    """

    def __init__(self, context: Context[Any], core: ReplicaCore, store_mb: int, others: tuple[str, ...]) -> None:
        super().__init__(context, core)
        self._role = role = core.ROLE
        self._roles = (role, *others, "gateway")
        self._core = core
        self._writer: StoreWriter | None = None
        if context.options.data_dir:
            self._writer = StoreWriter(role, Path(context.options.data_dir) / f"{role}.lmdb", store_mb << 20, self._store_failed)
        self._requests = itertools.count(1)
        self._answers: dict[int, ev.ServeSnapshot | ev.RefuseSnapshot] = {}
        on = self._runner.effects.on
        on(ev.SenderRefused, self._sender_refused)
        on(ev.Persist, self._persist)
        on(ev.RewriteStore, self._rewrite)
        on(ev.LoadStore, lambda _: self.spawn(self._load()))
        on(ev.ServeSnapshot, self._answered)
        on(ev.RefuseSnapshot, self._answered)
        membership_pb2_grpc.add_MembershipServicer_to_server(MembershipService(self), context.server)

    # Called by the runtime.

    async def start(self) -> None:
        """Load the map: from a Running replica, otherwise from the own database. Returns when it is complete."""
        age: float | None = None
        if self._writer is None:
            text = f"{self._role}.data_dir is not set: what gateways report is kept in memory only"
            self._context.log.warning(STORE_ABSENT, text=text)
        else:
            try:
                age = await self._writer.open()
            except StoreError as error:
                self._store_failed(str(error))
            self._writer.start().add_done_callback(self._ended)
        self._runner.step(ev.StoreOpened(age))
        await self._ready.wait()
        self._context.log.info(MAP_READY, entries=len(self._core.membership), keys=self._core.membership.groups)

    async def drain(self) -> None:
        """Wait until gateways use another replica and everything that was passed on is settled."""
        core = self._core
        await self._quiet(lambda: core.counters.messages_from_gateways, lambda: not len(core.forwards))

    async def stop(self) -> None:
        """Stop, and write pending changes to the database."""
        await super().stop()
        if self._writer is not None:
            await self._writer.close()

    def health(self) -> dict[str, object]:
        """The map's size and its condition. `degraded` is a text while an operator is needed."""
        core = self._core
        return {
            "membership": core.state.value,
            **super().health(),
            "peers": len(core.peers),
            "subscribers": len(core.subscribers),
            "forwards_under_way": len(core.forwards),
            "db": "none" if self._writer is None else "failed" if core.store_error else "ok",
            "degraded": core.store_error or (self._full() if core.membership.is_nearly_full() else None),
        }

    def _full(self) -> str:
        return (
            f"the map is full, and new joins are refused: raise {self._role}.max_entries on every replica, "
            f"or add partitions (`pixiu double {self._role}`)"
        )

    def on_view(self, view: View) -> None:
        """Set the peers to heartbeat and send to: the other replicas, subscribers, and gateways."""
        me = self._context.endpoint_id
        nodes = [node for role in self._roles for node in view.of_role(role) if node.endpoint != me]
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port, node.stream_port) for node in nodes)
        own = [node for node in nodes if node.role == self._role]
        replicas = tuple(ev.Replica(node.endpoint, node.partition, node.state is NodeState.RUNNING) for node in own)
        brokers = ev.NO_OTHER
        if "broker" in self._core.SNAPSHOT_ROLES:
            known = tuple(ev.Replica(node.endpoint, node.partition) for node in nodes if node.role == "broker")
            brokers = ev.OtherRole(view.layout.partitions("broker"), replicas=known)
        partitions = view.layout.partitions(self._role)
        self._runner.step(ev.ClusterChanged(view.layout.version, partitions, replicas, brokers, gateways_of(view)))

    # Called by the links.

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Report settled forwards to the core."""
        self._runner.step(Settled(settled))

    # Called by the snapshot service.

    def snapshot(self, request: membership_pb2.SnapshotRequest) -> ev.ServeSnapshot | ev.RefuseSnapshot:
        """The chunks of a snapshot, made on demand; the asking process is subscribed from this call on."""
        number = next(self._requests)
        endpoint = EndpointID(request.endpoint)
        self._runner.step(ev.SnapshotRequested(number, endpoint, request.role, request.partition, request.partitions))
        stopped = ev.RefuseSnapshot(number, Unavailable.code, f"this {self._role} has stopped; ask another one")
        return self._answers.pop(number, stopped)

    # Internal.

    def _answer(self, peer: EndpointID, attachment: bytes) -> bytes:
        if not attachment:
            return b""
        rule = control_pb2.BrokerSubscription.FromString(attachment)
        state = self._core.heartbeat(peer, rule.partition, rule.partitions, self._context.now(), rule.key)
        return state.SerializeToString()

    def _answered(self, effect: ev.ServeSnapshot | ev.RefuseSnapshot) -> None:
        self._answers[effect.request] = effect

    def _sender_refused(self, effect: ev.SenderRefused) -> None:
        if effect.known:
            endpoint = hex_id(effect.peer)
            self._context.audit.write_limited("gateway_spoke_for_another", endpoint, endpoint=endpoint)
        else:
            self._context.look_again()

    def _persist(self, effect: ev.Persist) -> None:
        if self._writer is not None:
            self._writer.persist(effect.puts, effect.deletes)

    def _rewrite(self, effect: ev.RewriteStore) -> None:
        if self._writer is not None:
            self._writer.rewrite(effect.chunks)

    async def _load(self) -> None:
        """Give the database's content to the core, one chunk per turn of the loop."""
        try:
            chunks = await self._writer.load() if self._writer is not None else []
        except StoreError as error:
            self._store_failed(str(error))
            chunks = []
        for chunk in chunks:
            self._runner.step(ev.StoreChunk(chunk))
            await asyncio.sleep(0)
        self._runner.step(ev.StoreLoaded())

    def _store_failed(self, text: str) -> None:
        self._context.log.error(STORE_FAILED, text=text, effect=f"the {self._role} serves from memory and tries again")
        self._runner.step(ev.StoreFailed(text))

    def _samples(self) -> dict[str, object]:
        core, writer = self._core, self._writer
        return {
            **super()._samples(),
            **totals(core.forwards.counters, "forwards_"),
            "listing_pages_sent_total": core.anti_entropy.source.pages_sent,
            "gateways_fenced_total": core.anti_entropy.fenced,
            "subscribers": len(core.subscribers),
            "forwards_under_way": len(core.forwards),
            "messages_waiting": core.queued,
            "db_failed": core.store_error is not None,
            "db_pending": writer.pending if writer is not None else 0,
            "db_transactions_total": writer.transactions if writer is not None else 0,
            "db_written_total": writer.written if writer is not None else 0,
        }


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """The gRPC service of snapshots."""

    def __init__(self, service: ReplicaService) -> None:
        self._service = service

    async def Snapshot(
        self, request: membership_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[membership_pb2.SnapshotChunk]:
        """Stream the present content; the asking process gets live messages from the first moment on."""
        found = self._service.snapshot(request)
        if isinstance(found, ev.RefuseSnapshot):
            await context.abort(GRPC_STATUS[found.code], found.text)
            return
        for chunk in found.chunks:
            yield membership_pb2.SnapshotChunk(entries=chunk.entries, tombstones=chunk.tombstones, values=chunk.values)
        yield membership_pb2.SnapshotChunk(last=True)
