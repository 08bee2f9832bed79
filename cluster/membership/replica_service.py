"""The shell that routers and relays share: links, the snapshot service, the database and a timer around the core.

Source: seed 004 §2.4, §5.2, §7.3.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

import grpc.aio
from google.protobuf.message import DecodeError

from cluster.links.api import Outcome, Peer, PeerState
from cluster.membership.anti_entropy import is_anti_entropy
from cluster.membership.digest import ALL_GROUPS
from cluster.membership.lww_map import Chunk, Update, decode_messages
from cluster.membership.replica_core import ReplicaCore
from cluster.membership.replica_events import (
    AbsenceReceived,
    AntiEntropyReceived,
    BecomeInit,
    BecomeRunning,
    ClusterChanged,
    Event,
    Gateway,
    LoadStore,
    MessagesReceived,
    PeerAlive,
    PeerDead,
    Persist,
    RefuseSnapshot,
    Replica,
    RewriteStore,
    SendControl,
    ServeSnapshot,
    SetAttachment,
    Settled,
    SnapshotChunk,
    SnapshotFinished,
    SnapshotRequested,
    StoreChunk,
    StoreFailed,
    StoreLoaded,
    StoreOpened,
    SubscriptionReply,
    TakeSnapshot,
    Tick,
)
from cluster.membership.replica_store import StoreError
from cluster.membership.snapshot_client import SnapshotReader
from cluster.membership.store_writer import StoreWriter
from cluster.runtime.context import Context
from cluster.runtime.restate import Restate
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.errors import GRPC_STATUS
from pixiu.ids import EndpointID, hex_id
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.wire.v1 import control_pb2, wire_pb2, wire_pb2_grpc

STORE_FAILED: Final = "db_failed"
STORE_ABSENT: Final = "db_absent"
SNAPSHOT_FAILED: Final = "snapshot_failed"
MAP_READY: Final = "map_ready"
DRAIN_POLL_S: Final = 0.05
DRAIN_LIMIT_S: Final = 5.0
"""A draining replica waits so long for its forwards to settle, and for gateways to stop sending."""
QUIET_S: Final = 0.5
MAX_INSTANCES_SHOWN: Final = 256
"""Gateway instances whose members are a metric each, the lowest ones; all are in `members`."""


class ReplicaService:
    """Runs one `ReplicaCore`.

    Args:
        core: of the role.
        store_mb: MiB that the database may grow to.
        others: roles beside its own and the gateways that it speaks to.
    """

    def __init__(self, context: Context[Any], core: ReplicaCore, store_mb: int, others: tuple[str, ...]) -> None:
        options = context.options
        self._context = context
        self._role = role = core.ROLE
        self._roles = (role, *others, "gateway")
        self._core = core
        self._writer: StoreWriter | None = None
        if options.data_dir:
            self._writer = StoreWriter(role, Path(options.data_dir) / f"{role}.lmdb", store_mb << 20, self._store_failed)
        self._snapshots = SnapshotReader(context.endpoint_id, role, self._snapshot_chunk, self._snapshot_finished)
        self._requests = itertools.count(1)
        self._answers: dict[int, Iterator[Chunk] | RefuseSnapshot] = {}
        self._ready = asyncio.Event()
        self._restate = Restate(context.membership, context.crash)
        self._alarm = DeadlineTimer(self._tick)
        self._loading: asyncio.Task[None] | None = None
        self._stopped = False
        wire_pb2_grpc.add_MembershipServicer_to_server(MembershipService(self), context.server)
        context.metrics.collect_from(self._samples)

    # What the runtime calls.

    async def start(self) -> None:
        """Load the map: from a Running replica, else from the own database. Returns when it is complete."""
        age: float | None = None
        if self._writer is None:
            text = f"{self._role}.data_dir is not set: what gateways say is kept in memory only"
            self._context.log.warning(STORE_ABSENT, text=text)
        else:
            try:
                age = await self._writer.open()
            except StoreError as error:
                self._store_failed(str(error))
            self._writer.start().add_done_callback(self._writer_ended)
        self._step(StoreOpened(age))
        await self._ready.wait()
        self._context.log.info(MAP_READY, entries=len(self._core.membership), keys=self._core.membership.groups)

    async def drain(self) -> None:
        """Wait until gateways use another replica and everything that was passed on is settled."""
        loop = asyncio.get_running_loop()
        limit, seen, quiet_since = loop.time() + DRAIN_LIMIT_S, -1, loop.time()
        while loop.time() < limit:
            taken = self._core.counters.messages_from_gateways
            if taken != seen:
                seen, quiet_since = taken, loop.time()
            if not len(self._core.forwards) and loop.time() - quiet_since >= QUIET_S:
                return
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Write what waits to the database."""
        self._stopped = True
        self._alarm.cancel()
        await self._restate.close()
        await self._snapshots.close()
        if self._loading is not None:
            self._loading.cancel()
        if self._writer is not None:
            await self._writer.close()

    def health(self) -> dict[str, object]:
        """The map's size and how well it is kept. `degraded` is a text while something needs an operator."""
        core = self._core
        return {
            "membership": core.state.value,
            "members": len(core.membership),
            "members_digest": str(core.membership.digest.total(ALL_GROUPS)),
            "rooms": core.membership.groups,
            "peers": len(core.peers),
            "subscribers": len(core.subscribers),
            "forwards_under_way": len(core.forwards),
            "db": "none" if self._writer is None else "failed" if core.store_error else "ok",
            "degraded": core.store_error,
        }

    def on_view(self, view: View) -> None:
        """Heartbeat and reach the other replicas, who subscribes, and gateways."""
        me = self._context.endpoint_id
        nodes = [node for role in self._roles for node in view.of_role(role) if node.endpoint != me]
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port) for node in nodes)
        self._step(
            ClusterChanged(
                view.layout.version,
                view.layout.partitions(self._role),
                tuple(
                    Replica(node.endpoint, node.partition, node.state is NodeState.RUNNING)
                    for node in nodes
                    if node.role == self._role
                ),
                frozenset(node.endpoint for node in nodes if node.role == "broker"),
                tuple(
                    Gateway(node.endpoint, node.instance, node.generation)
                    for node in nodes
                    if node.role == "gateway" and node.instance >= 0
                ),
            )
        )

    # What the links call.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Nobody sends records to a router; relays take them."""
        return Outcome.MALFORMED

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Gateway messages. A confirmation for what was passed on to another partition, and notices, need nothing."""
        changes: list[Update] = []
        try:
            for data in messages:
                control = control_pb2.Control.FromString(data)
                if control.HasField("gateway_messages"):
                    changes += decode_messages(control.gateway_messages)
                elif control.HasField("absence"):
                    self._step(AbsenceReceived(peer, control.absence.as_of, list(control.absence.rooms)))
                elif control.HasField("layout_notice"):
                    self._context.layout_noticed(control.layout_notice.version)
                elif is_anti_entropy(control):
                    self._step(AntiEntropyReceived(peer, control))
        except DecodeError:
            return Outcome.MALFORMED
        if changes:
            self._step(MessagesReceived(peer, changes))
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Forwards arrived, or were lost."""
        self._step(Settled(settled))

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """A peer, broker or gateway died or came back."""
        if state is PeerState.DEAD:
            self._step(PeerDead(peer))
        elif state is PeerState.ALIVE:
            self._step(PeerAlive(peer))

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Subscribers say that they are there; peers answer whether we have missed something, gateways what is on them."""
        try:
            if reply:
                state = control_pb2.SubscriptionState.FromString(attachment)
                self._step(SubscriptionReply(peer, state.subscribed, state.digest if state.HasField("digest") else None))
            elif attachment:
                rule = control_pb2.BrokerSubscription.FromString(attachment)
                return self._core.heartbeat(peer, rule.partition, rule.partitions, self._context.now()).SerializeToString()
        except DecodeError:
            self._core.counters.messages_malformed += 1
        return b""

    # What the snapshot service calls.

    def snapshot(self, request: wire_pb2.SnapshotRequest) -> Iterator[Chunk] | RefuseSnapshot:
        """The chunks of a snapshot, made as they are asked for; the asker is subscribed from this call on."""
        number = next(self._requests)
        endpoint = EndpointID(request.endpoint)
        self._step(SnapshotRequested(number, endpoint, request.role, request.partition, request.partitions))
        return self._answers.pop(number)

    # Inside.

    def _step(self, event: Event) -> None:
        if self._stopped:
            return
        now, links = self._context.now(), self._context.links
        for effect in self._core.step(event, now):
            match effect:
                case SendControl(peer, messages, token):
                    links.send_control(peer, messages, token)
                case Persist(puts, deletes):
                    if self._writer is not None:
                        self._writer.persist(puts, deletes)
                case SetAttachment(peer, attachment):
                    links.set_attachment(peer, attachment)
                case TakeSnapshot(source, partition, partitions):
                    self._snapshots.take(source, self._context.view, partition, partitions)
                case ServeSnapshot(request, chunks):
                    self._answers[request] = chunks
                case RefuseSnapshot(request):
                    self._answers[request] = effect
                case RewriteStore(chunks):
                    if self._writer is not None:
                        self._writer.rewrite(chunks)
                case LoadStore():
                    self._loading = asyncio.create_task(self._load())
                case BecomeInit():
                    self._restate.set(NodeState.INIT)
                case BecomeRunning():
                    if self._ready.is_set():
                        self._restate.set(NodeState.RUNNING)
                    self._ready.set()
        self._alarm.set(self._core.next_deadline())

    def _tick(self) -> None:
        self._step(Tick())

    async def _load(self) -> None:
        """Give the database's content to the core, a chunk a turn of the loop."""
        try:
            chunks = await self._writer.load() if self._writer is not None else []
        except StoreError as error:
            self._store_failed(str(error))
            chunks = []
        for chunk in chunks:
            self._step(StoreChunk(chunk))
            await asyncio.sleep(0)
        self._step(StoreLoaded())

    def _store_failed(self, text: str) -> None:
        self._context.log.error(STORE_FAILED, text=text, effect=f"the {self._role} serves from memory and tries again")
        self._step(StoreFailed(text))

    def _writer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.crash(error)

    def _snapshot_chunk(self, source: EndpointID, chunk: Chunk) -> None:
        self._step(SnapshotChunk(source, chunk))

    def _snapshot_finished(self, source: EndpointID, error: str | None) -> None:
        if error is not None:
            self._context.log.warning(SNAPSHOT_FAILED, source=hex_id(source), text=error)
        self._step(SnapshotFinished(source, error))

    def _samples(self) -> dict[str, object]:
        core, writer = self._core, self._writer
        samples: dict[str, object] = {}
        counted: list[tuple[str, Any]] = [
            ("", core.counters),
            ("forwards_", core.forwards.counters),
            ("membership_", core.membership.counters),
            ("", core.anti_entropy.puller.counters),
        ]
        for prefix, counters in counted:
            samples |= {f"{prefix}{name}_total": value for name, value in asdict(counters).items()}
        return samples | {
            "members": len(core.membership),
            "members_by_instance{instance}": dict(islice(core.membership.members_by_instance().items(), MAX_INSTANCES_SHOWN)),
            "listing_pages_sent_total": core.anti_entropy.source.pages_sent,
            "gateways_purged_total": core.anti_entropy.instance_purge.purged_gateways,
            "gateways_fenced_total": core.anti_entropy.fenced,
            "rooms": core.membership.groups,
            "tombstones": core.membership.tombstones,
            "subscribers": len(core.subscribers),
            "forwards_under_way": len(core.forwards),
            "messages_waiting": core.queued,
            "db_failed": core.store_error is not None,
            "db_pending": writer.pending if writer is not None else 0,
            "db_transactions_total": writer.transactions if writer is not None else 0,
            "db_written_total": writer.written if writer is not None else 0,
        }


class MembershipService(wire_pb2_grpc.MembershipServicer):
    """The gRPC service of snapshots."""

    def __init__(self, service: ReplicaService) -> None:
        self._service = service

    async def Snapshot(
        self, request: wire_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[wire_pb2.SnapshotChunk]:
        """Stream what there is; from the first moment on the asker also gets live messages."""
        found = self._service.snapshot(request)
        if isinstance(found, RefuseSnapshot):
            await context.abort(GRPC_STATUS[found.code], found.text)
            return
        for chunk in found:
            yield wire_pb2.SnapshotChunk(entries=chunk.entries, tombstones=chunk.tombstones, values=chunk.values)
        yield wire_pb2.SnapshotChunk(last=True)
