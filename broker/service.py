"""The broker's shell: `cluster.membership.member.service` around its core, and rooms' messages.

Source: PiXiu §2.3, §5.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from broker.core import Core, State
from broker.fanout import Fanout
from broker.feeds import FeedState
from broker.groups import OUTCOME
from broker.introductions import Introductions
from broker.options import Options
from broker.router_root import RouterRoot
from cluster.core.contract import TICK, RecordsReceived, Settled
from cluster.core.role import totals
from cluster.links.api import Outcome, Peer, PeerState
from cluster.membership import events as ev
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.member.service import MemberService, gateways_of
from cluster.process.context import Context
from cluster.process.tracing import tracer_of
from cluster.wire.v1 import control_pb2
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from pixiu.wire.trace import Hop

WAITING_FOR_ROUTERS: Final = "waiting_for_routers"
MEMBERSHIP_READY: Final = "membership_ready"


class Service(MemberService):
    """The broker's shell: runs one `broker.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        options = context.options
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
        super().__init__(context, self._core)
        self._introductions = Introductions()
        self._router_root = RouterRoot(context, self._take_view) if context.cluster.router_root else None
        self._runner.effects.on(ev.WaitingForRouters, self._say_waiting)

    # What the runtime calls.

    async def prepare(self, node: Node) -> Node:
        """Read the other root, if the routers are there."""
        if self._router_root is not None:
            await self._router_root.start(node)
        return node

    async def start(self) -> None:
        """Wait until the snapshots of all router partitions that share rooms are merged; waits for routers for ever."""
        self._runner.step(TICK)
        await self._ready.wait()
        membership = self._core.membership
        self._context.log.info(MEMBERSHIP_READY, members=len(membership), rooms=membership.groups)

    async def drain(self) -> None:
        """Serve until proxies use another replica."""
        await self._quiet(lambda: self._core.fanout.counters.records_in, lambda: True)

    async def stop(self) -> None:
        """End snapshots and the timer."""
        if self._router_root is not None:
            await self._router_root.close()
        await super().stop()

    def health(self) -> dict[str, object]:
        """Size and sources of the membership. `degraded` is a text while something needs an operator."""
        core = self._core
        lost = sorted(partition for partition, feed in core.feeds.items() if feed.state is FeedState.SEEKING)
        degraded = f"no router of partition {', '.join(map(str, lost))} can be used" if lost else None
        if core.relays is not None and not core.relays.partitions:
            degraded = degraded or "cluster.fanout is relay, and no relay is running: rooms' messages reach nobody"
        if core.membership.counters.refused:
            degraded = degraded or "the map is full, and some members of rooms are not in it: raise broker.max_entries"
        return {
            "membership": core.state.value,
            **super().health(),
            "feeds": {str(partition): feed.state.value for partition, feed in sorted(core.feeds.items())},
            "degraded": degraded,
        }

    def on_view(self, view: View) -> None:
        """Take a view of the own root; routers, relays and gateways come from the other root if they are there."""
        if self._router_root is not None:
            self._router_root.set_own(view)
        else:
            self._take_view(view)

    def _take_view(self, view: View) -> None:
        """Heartbeat and reach routers, gateways and the other brokers; relays if records go through them."""
        me = self._context.endpoint_id
        relays = view.running("relay") if self._context.cluster.fanout == "relay" else ()
        others = [node for role in ("router", "gateway", "broker") for node in view.of_role(role) if node.endpoint != me]
        self._introductions.view_changed(view)
        peers = [Peer(node.endpoint, node.role, node.host, node.port, node.stream_port) for node in (*others, *relays)]
        self._context.links.set_peers([*peers, *self._introductions.peers])
        layout, routers, brokers = view.layout, view.running("router"), view.running("broker")
        coming = layout.roles.get("router")
        self._runner.step(
            ev.ClusterChanged(
                layout.version,
                layout.partitions("broker"),
                _replicas(node for node in brokers if node.endpoint != me),
                ev.NO_OTHER,
                (*gateways_of(view), *self._introductions.gateways),
                ev.OtherRole(layout.partitions("router"), coming.next if coming is not None else 1, _replicas(routers)),
                ev.OtherRole(layout.partitions("relay"), 0, _replicas(relays)) if relays else ev.NO_OTHER,
            )
        )

    # What the links call.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Take a proxy's batch, or another broker's, whose partition the room has left."""
        if self._context.is_overtaken():
            return Outcome.NOT_TAKEN
        return self._runner.take(RecordsReceived(peer, data, start, end, count), timed=False)

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Note parcels that relays handled, or lost."""
        self._runner.step(Settled(settled))

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Note that a router, gateway or broker died or came back."""
        if self._router_root is not None and state in (PeerState.DEAD, PeerState.ALIVE):
            self._router_root.mark(peer, dead=state is PeerState.DEAD)
        super().on_peer_state(peer, state)
        if state is PeerState.DEAD and self._introductions.died(peer):
            self._take_view(self._source_view())

    # Inside.

    def _introduced(self, gateways: Iterable[control_pb2.GatewayAddress]) -> None:
        if self._introductions.take(gateways, self._source_view()):
            self._take_view(self._source_view())

    def _other_control(self, peer: EndpointID, control: control_pb2.Control) -> None:
        if control.HasField("shared_outcome"):
            taken, returned = control.shared_outcome.taken, control.shared_outcome.returned
            if not len(taken) % OUTCOME.size and not len(returned) % OUTCOME.size:
                self._runner.step(ev.SharedOutcome(peer, taken, returned))

    def _source_view(self) -> View:
        return self._router_root.view() if self._router_root is not None else super()._source_view()

    def _say_waiting(self, effect: ev.WaitingForRouters) -> None:
        self._context.log.warning(
            WAITING_FOR_ROUTERS,
            text="no Running router gives a snapshot yet; start one, or look at why none runs",
            router_partitions=list(effect.partitions),
            waited_s=round(effect.waited_s),
        )

    def _samples(self) -> dict[str, object]:
        core = self._core
        return {
            **super()._samples(),
            **totals(core.fanout.counters),
            **(totals(core.fanout.groups.counters) if isinstance(core.fanout, Fanout) else {}),
            "shared_held": len(core.fanout.groups) if isinstance(core.fanout, Fanout) else 0,
            "membership_complete": core.state is State.RUNNING,
            "feeds_live": sum(feed.state is FeedState.LIVE for feed in core.feeds.values()),
            "feeds_lost": sum(feed.state is FeedState.SEEKING for feed in core.feeds.values()),
        }


def _replicas(nodes: Iterable[Node]) -> tuple[ev.Replica, ...]:
    return tuple(ev.Replica(node.endpoint, node.partition) for node in nodes)
