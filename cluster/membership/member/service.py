"""The shell that all members of the shared map have in common: links, snapshots and a timer around the core.

Source: PiXiu §2.3, §2.4, §5; docs/architecture.md, "The contract".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

from google.protobuf.message import DecodeError

from cluster.core.contract import TICK
from cluster.core.role import RoleShell, totals
from cluster.core.runner import Runner
from cluster.links.api import Outcome, PeerState
from cluster.membership import events as ev
from cluster.membership.map.anti_entropy import is_anti_entropy
from cluster.membership.map.digest import ALL_GROUPS
from cluster.membership.map.digest_keys import KEYS_S, DigestKeys
from cluster.membership.map.updates import Chunk, Update, decode_messages
from cluster.membership.member.core import MemberCore
from cluster.membership.member.snapshot_client import SnapshotReader
from cluster.process.context import Context
from cluster.process.restate import Restate
from cluster.wire.v1 import control_pb2
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.ids import EndpointID, hex_id

SNAPSHOT_FAILED: Final = "snapshot_failed"
DRAIN_POLL_S: Final = 0.05
DRAIN_LIMIT_S: Final = 5.0
"""Longest wait of a draining process until others stop sending, seconds."""
QUIET_S: Final = 0.5
MAX_INSTANCES_SHOWN: Final = 256
"""Gateway instances whose members have a metric each, the lowest ones; all are in `members`."""


class MemberService(RoleShell):
    """The shell of a broker, router or relay: runs one `MemberCore`.

    Args:
        core: the role's core.
    """

    def __init__(self, context: Context[Any], core: MemberCore) -> None:
        super().__init__(context.crash)
        self._context = context
        self._member = core
        self._snapshots = SnapshotReader(context.endpoint_id, core.ROLE, self._snapshot_chunk, self._snapshot_finished, context.tls)
        self._ready = asyncio.Event()
        self._digest_keys = DigestKeys(context.cluster)
        self.every(KEYS_S, self.look_at_digest_keys)
        self._restate = Restate(context.membership, context.crash)
        self._runner: Runner[ev.Event, ev.Effect] = self.run(Runner(core, context.now, tick=TICK))
        self._runner.send_by(context.links)
        on = self._runner.effects.on
        on(ev.SetAttachment, lambda effect: context.links.set_attachment(effect.peer, effect.attachment))
        on(ev.TakeSnapshot, self._take_snapshot)
        on(ev.BecomeInit, lambda _: self._become(NodeState.INIT))
        on(ev.BecomeRunning, lambda _: self._become(NodeState.RUNNING))
        context.metrics.collect_from(self._samples)

    def look_at_digest_keys(self) -> None:
        """Digest by the cluster's current keys. Called when the view changes, and from time to time."""
        self._runner.step(ev.DigestKeysChanged(self._digest_keys.newest()))

    async def stop(self) -> None:
        """Stop the core, snapshots and tasks."""
        self.stop_runners()
        await self._restate.close()
        await self._snapshots.close()
        await self.cancel_tasks()

    async def _quiet(self, taken: Callable[[], int], settled: Callable[[], bool]) -> None:
        """Wait until nothing more is taken for a while and everything is settled, or for `DRAIN_LIMIT_S`."""
        loop = asyncio.get_running_loop()
        limit, seen, quiet_since = loop.time() + DRAIN_LIMIT_S, -1, loop.time()
        while loop.time() < limit and (loop.time() - quiet_since < QUIET_S or not settled()):
            count = taken()
            if count != seen:
                seen, quiet_since = count, loop.time()
            await asyncio.sleep(DRAIN_POLL_S)

    def health(self) -> dict[str, object]:
        """The map's size; a role adds to it. `degraded` is a text while an operator is needed."""
        membership = self._member.membership
        return {
            "members": len(membership),
            "members_digest": membership.digest.first.shown(ALL_GROUPS),
            "rooms": membership.groups,
        }

    # Called by the links.

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Handle gateway messages, anti-entropy and notices of a newer layout. Confirmations need no action."""
        step = self._runner.step
        changes: list[Update] = []
        try:
            for data in messages:
                control = control_pb2.Control.FromString(data)
                if control.HasField("gateway_messages"):
                    changes += decode_messages(control.gateway_messages)
                    if control.gateway_messages.gateways:
                        self._introduced(control.gateway_messages.gateways)
                elif control.HasField("absence"):
                    step(ev.AbsenceReceived(peer, control.absence.as_of, list(control.absence.rooms)))
                elif control.HasField("layout_notice"):
                    self._context.layout_noticed(control.layout_notice.version)
                elif is_anti_entropy(control):
                    step(ev.AntiEntropyReceived(peer, control))
                else:
                    self._other_control(peer, control)
        except DecodeError:
            return Outcome.MALFORMED
        return self._runner.take(ev.MessagesReceived(peer, changes)) if changes else Outcome.TAKEN

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Handle the death or the return of a peer."""
        if state is PeerState.DEAD:
            self._runner.step(ev.PeerDead(peer))
        elif state is PeerState.ALIVE:
            self._runner.step(ev.PeerAlive(peer))

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Handle a heartbeat. A source's answer shows if we have missed something, and contains its digest."""
        try:
            if not reply:
                return self._answer(peer, attachment)
            state = control_pb2.SubscriptionState.FromString(attachment)
        except DecodeError:
            self._member.counters.messages_malformed += 1
        else:
            digest = state.digest if state.HasField("digest") else None
            self._runner.step(ev.SubscriptionReply(peer, state.subscribed, digest))
        return b""

    # Internal.

    def _answer(self, peer: EndpointID, attachment: bytes) -> bytes:
        """Answer to the heartbeat of a subscriber. Raises `DecodeError`."""
        return b""

    def _introduced(self, gateways: Iterable[control_pb2.GatewayAddress]) -> None:
        """Take the addresses of gateways from a router, for roles that send to them."""

    def _other_control(self, peer: EndpointID, control: control_pb2.Control) -> None:
        """Handle a message that only some roles get."""

    def _source_view(self) -> View:
        """View in which sources of snapshots are found."""
        return self._context.view

    def _become(self, state: NodeState) -> None:
        """Register as Init when the map is no longer complete, as Running when it is; the first time the runtime registers the
        process."""
        if state is NodeState.INIT or self._ready.is_set():
            self._restate.set(state)
        if state is NodeState.RUNNING:
            self._ready.set()

    def _take_snapshot(self, effect: ev.TakeSnapshot) -> None:
        self._snapshots.take(effect.source, self._source_view(), effect.partition, effect.partitions)

    def _snapshot_chunk(self, source: EndpointID, chunk: Chunk) -> None:
        self._runner.step(ev.SnapshotChunk(source, chunk))

    def _snapshot_finished(self, source: EndpointID, error: str | None) -> None:
        if error is not None:
            self._context.log.warning(SNAPSHOT_FAILED, source=hex_id(source), text=error)
        self._runner.step(ev.SnapshotFinished(source, error))

    def _samples(self) -> dict[str, object]:
        core = self._member
        return {
            **totals(core.counters),
            **totals(core.membership.counters, "membership_"),
            **totals(core.puller.counters),
            "members": len(core.membership),
            "members_by_instance{instance}": dict(islice(core.membership.members_by_instance().items(), MAX_INSTANCES_SHOWN)),
            "gateways_purged_total": core.instance_purge.purged_gateways,
            "rooms": core.membership.groups,
            "tombstones": core.membership.tombstones,
        }


def gateways_of(view: View) -> tuple[ev.Gateway, ...]:
    """The gateways of a view that have leased their instance."""
    return tuple(
        ev.Gateway(node.endpoint, node.instance, node.generation, introduction(node))
        for node in view.of_role("gateway")
        if node.instance >= 0
    )


def introduction(node: Node) -> bytes:
    """Address of a gateway for brokers; empty if its datagrams go to another address than its streams."""
    if node.udp_host or node.udp_port:
        return b""
    address = control_pb2.GatewayAddress(
        instance=node.instance,
        generation=node.generation,
        endpoint=node.endpoint,
        host=node.host,
        port=node.port,
        stream_port=node.stream_port,
    )
    return control_pb2.Control(gateway_messages=control_pb2.GatewayMessages(gateways=[address])).SerializeToString()
