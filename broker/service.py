"""The broker's shell: links, snapshots from routers and a timer around the core.

Source: seed 004 §2.3, §5.3.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import islice
from typing import Any, Final

from google.protobuf.message import DecodeError

from broker.core import Core, State
from broker.events import (
    AbsenceReceived,
    AntiEntropyReceived,
    BecomeInit,
    BecomeRunning,
    ClusterChanged,
    Event,
    Gateway,
    MessagesReceived,
    NotTaken,
    PeerAlive,
    PeerDead,
    RecordsReceived,
    Replica,
    SendControl,
    SendRecords,
    SetAttachment,
    SnapshotChunk,
    SnapshotFinished,
    SubscriptionReply,
    TakeSnapshot,
    Tick,
    WaitingForRouters,
)
from broker.feeds import FeedState
from broker.options import Options
from broker.router_root import RouterRoot
from cluster.links.api import Outcome, Peer, PeerState
from cluster.membership.anti_entropy import is_anti_entropy
from cluster.membership.digest import ALL_GROUPS
from cluster.membership.lww_map import Chunk, LwwMap, Update, decode_messages
from cluster.membership.snapshot_client import SnapshotReader
from cluster.runtime.context import Context
from cluster.runtime.restate import Restate
from cluster.runtime.tracing import tracer_of
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.ids import EndpointID, hex_id
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.wire.trace import Hop
from pixiu.wire.v1 import control_pb2

WAITING_FOR_ROUTERS: Final = "waiting_for_routers"
SNAPSHOT_FAILED: Final = "snapshot_failed"
MEMBERSHIP_READY: Final = "membership_ready"
DRAIN_POLL_S: Final = 0.05
DRAIN_LIMIT_S: Final = 5.0
"""A draining broker waits so long for proxies to stop sending."""
QUIET_S: Final = 0.5
MAX_INSTANCES_SHOWN: Final = 256
"""Gateway instances whose members are a metric each, the lowest ones; all are in `members`."""


class Service:
    """Runs one `broker.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        options = context.options
        self._context = context
        self._core = Core(
            endpoint=context.endpoint_id,
            partition=options.partition,
            heartbeat_s=context.cluster.heartbeat_interval_ms / 1000,
            poll_interval_s=options.poll_interval_s,
            gone_gateway_s=options.gone_gateway_s,
            membership=LwwMap(max_entries=options.max_entries),
            through_relays=context.cluster.fanout == "relay",
            tracer=tracer_of(context, Hop.BROKER, options.partition),
        )
        self._snapshots = SnapshotReader(context.endpoint_id, "broker", self._snapshot_chunk, self._snapshot_finished)
        self._ready = asyncio.Event()
        self._router_root = RouterRoot(context, self._take_view) if context.cluster.router_root else None
        self._restate = Restate(context.membership, context.crash)
        self._alarm = DeadlineTimer(self._tick)
        self._stopped = False
        context.metrics.collect_from(self._samples)

    # What the runtime calls.

    async def prepare(self, node: Node) -> Node:
        """Read where the routers are, when that is another root."""
        if self._router_root is not None:
            await self._router_root.start()
        return node

    async def start(self) -> None:
        """Returns when the snapshots of all router partitions that share rooms are merged; waits for routers for ever."""
        self._step(Tick())
        await self._ready.wait()
        membership = self._core.membership
        self._context.log.info(MEMBERSHIP_READY, members=len(membership), rooms=membership.groups)

    async def drain(self) -> None:
        """Serve on until proxies use another replica."""
        loop = asyncio.get_running_loop()
        limit, seen, quiet_since = loop.time() + DRAIN_LIMIT_S, -1, loop.time()
        while loop.time() < limit and loop.time() - quiet_since < QUIET_S:
            taken = self._core.fanout.counters.records_in
            if taken != seen:
                seen, quiet_since = taken, loop.time()
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """End snapshots and the timer."""
        self._stopped = True
        self._alarm.cancel()
        if self._router_root is not None:
            await self._router_root.close()
        await self._restate.close()
        await self._snapshots.close()

    def health(self) -> dict[str, object]:
        """The membership's size and where it comes from. `degraded` is a text while something needs an operator."""
        core = self._core
        lost = sorted(partition for partition, feed in core.feeds.items() if feed.state is FeedState.SEEKING)
        degraded = f"no router of partition {', '.join(map(str, lost))} can be used" if lost else None
        if core.relays is not None and not core.relays.partitions:
            degraded = degraded or "cluster.fanout is relay, and no relay is running: rooms' messages reach nobody"
        return {
            "membership": core.state.value,
            "members": len(core.membership),
            "members_digest": str(core.membership.digest.total(ALL_GROUPS)),
            "rooms": core.membership.groups,
            "feeds": {str(partition): feed.state.value for partition, feed in sorted(core.feeds.items())},
            "degraded": degraded,
        }

    def on_view(self, view: View) -> None:
        """The own root's; with another root's routers, relays and gateways in it, where they are there."""
        if self._router_root is not None:
            self._router_root.set_own(view)
        else:
            self._take_view(view)

    def _take_view(self, view: View) -> None:
        """Heartbeat and reach routers, gateways and the other brokers; relays where records go through them."""
        me = self._context.endpoint_id
        relays = view.running("relay") if self._context.cluster.fanout == "relay" else ()
        others = [node for role in ("router", "gateway", "broker") for node in view.of_role(role) if node.endpoint != me]
        nodes = (*others, *relays)
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port) for node in nodes)
        routers = view.layout.roles.get("router")
        self._step(
            ClusterChanged(
                view.layout.version,
                view.layout.partitions("broker"),
                view.layout.partitions("router"),
                routers.next if routers is not None else 1,
                tuple(Replica(node.endpoint, node.partition) for node in view.running("router")),
                tuple(Replica(node.endpoint, node.partition) for node in view.running("broker") if node.endpoint != me),
                tuple(
                    Gateway(node.endpoint, node.instance, node.generation) for node in view.of_role("gateway") if node.instance >= 0
                ),
                view.layout.partitions("relay") if relays else 0,
                tuple(Replica(node.endpoint, node.partition) for node in relays),
            )
        )

    # What the links call.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """A proxy's batch; or another broker's, whose partition the room has left."""
        send = self._context.links.send_records
        taken = Outcome.TAKEN
        for effect in self._core.step(RecordsReceived(peer, data, start, end, count), self._context.now()):
            if isinstance(effect, SendRecords):
                send(effect.peer, effect.records, effect.lane)
            elif isinstance(effect, SendControl):
                self._context.links.send_control(effect.peer, effect.messages)
            else:
                taken = Outcome.NOT_TAKEN if isinstance(effect, NotTaken) else Outcome.MALFORMED
        return taken

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Gateway messages and what heals them, from a router; or another broker knows a newer layout."""
        changes: list[Update] = []
        try:
            for data in messages:
                control = control_pb2.Control.FromString(data)
                if control.HasField("gateway_messages"):
                    changes += decode_messages(control.gateway_messages)
                elif control.HasField("absence"):
                    self._step(AbsenceReceived(peer, control.absence.as_of, list(control.absence.rooms)))
                elif is_anti_entropy(control):
                    self._step(AntiEntropyReceived(peer, control))
                elif control.HasField("layout_notice"):
                    self._context.layout_noticed(control.layout_notice.version)
        except DecodeError:
            return Outcome.MALFORMED
        if changes:
            self._step(MessagesReceived(peer, changes))
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Nothing is sent with a token: real-time records are not sent again."""

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """A router, gateway or broker died or came back."""
        if self._router_root is not None and state in (PeerState.DEAD, PeerState.ALIVE):
            self._router_root.mark(peer, dead=state is PeerState.DEAD)
        if state is PeerState.DEAD:
            self._step(PeerDead(peer))
        elif state is PeerState.ALIVE:
            self._step(PeerAlive(peer))

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """A router's answer says whether it sends us everything."""
        if reply:
            try:
                state = control_pb2.SubscriptionState.FromString(attachment)
            except DecodeError:
                return b""
            self._step(SubscriptionReply(peer, state.subscribed, state.digest if state.HasField("digest") else None))
        return b""

    # Inside.

    def _step(self, event: Event) -> None:
        if self._stopped:
            return
        now, links = self._context.now(), self._context.links
        for effect in self._core.step(event, now):
            match effect:
                case SendRecords(peer, records, lane):
                    links.send_records(peer, records, lane)
                case SendControl(peer, messages):
                    links.send_control(peer, messages)
                case SetAttachment(peer, attachment):
                    links.set_attachment(peer, attachment)
                case TakeSnapshot(source, partition, partitions):
                    view = self._router_root.view() if self._router_root is not None else self._context.view
                    self._snapshots.take(source, view, partition, partitions)
                case WaitingForRouters(partitions, waited_s):
                    self._context.log.warning(
                        WAITING_FOR_ROUTERS,
                        text="no Running router gives a snapshot yet; start one, or look at why none runs",
                        router_partitions=list(partitions),
                        waited_s=round(waited_s),
                    )
                case BecomeInit():
                    self._restate.set(NodeState.INIT)
                case BecomeRunning():
                    if self._ready.is_set():
                        self._restate.set(NodeState.RUNNING)
                    self._ready.set()
        self._alarm.set(self._core.next_deadline())

    def _tick(self) -> None:
        self._step(Tick())

    def _snapshot_chunk(self, source: EndpointID, chunk: Chunk) -> None:
        self._step(SnapshotChunk(source, chunk))

    def _snapshot_finished(self, source: EndpointID, error: str | None) -> None:
        if error is not None:
            self._context.log.warning(SNAPSHOT_FAILED, router=hex_id(source), text=error)
        self._step(SnapshotFinished(source, error))

    def _samples(self) -> dict[str, object]:
        core = self._core
        samples: dict[str, object] = {}
        counted: list[tuple[str, Any]] = [
            ("", core.counters),
            ("", core.fanout.counters),
            ("membership_", core.membership.counters),
            ("", core.puller.counters),
        ]
        for prefix, counters in counted:
            samples |= {f"{prefix}{name}_total": value for name, value in asdict(counters).items()}
        return samples | {
            "members": len(core.membership),
            "members_by_instance{instance}": dict(islice(core.membership.members_by_instance().items(), MAX_INSTANCES_SHOWN)),
            "gateways_purged_total": core.instance_purge.purged_gateways,
            "rooms": core.membership.groups,
            "tombstones": core.membership.tombstones,
            "membership_complete": core.state is State.RUNNING,
            "feeds_live": sum(feed.state is FeedState.LIVE for feed in core.feeds.values()),
            "feeds_lost": sum(feed.state is FeedState.SEEKING for feed in core.feeds.values()),
        }
