"""The relay's shell: `cluster.membership.replica.service` around its core, users' messages, and presence queries.

Source: PiXiu §7.3.
"""

from __future__ import annotations

import time
from typing import Any, Final

import grpc.aio
from google.protobuf.message import DecodeError

from cluster.core.contract import RecordsReceived
from cluster.core.role import totals
from cluster.links.api import Outcome, PeerState
from cluster.membership.events import UnprovenLogins
from cluster.membership.map.devices import LoginPolicy
from cluster.membership.replica.service import ReplicaService
from cluster.membership.replica.state import State
from cluster.process.context import Context
from cluster.process.tracing import tracer_of
from cluster.trust import tickets
from cluster.trust.followed_keys import ProofKeys
from cluster.wire.v1 import control_pb2
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.ids import EndpointID, hex_id
from pixiu.wire.trace import Hop
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from relay.core import MAX_QUERY, Core
from relay.login_proofs import LoginProofs
from relay.mail.devices import TrackedDevices
from relay.mail.service import MailService
from relay.options import Options
from relay.wills.events import ClusterSeen
from relay.wills.service import Wills

WILLS: Final = (
    control_pb2.Control(will_states=control_pb2.WillStates()).SerializeToString()[:2],
    control_pb2.Control(will_published=control_pb2.WillPublished()).SerializeToString()[:2],
)
"""Beginnings of control messages about wills: nearly all others are reports of devices, which are parsed once."""


class Service(ReplicaService):
    """The relay's shell: runs one `relay.core.Core`, and its mail."""

    def __init__(self, context: Context[Options]) -> None:
        options, cluster = context.options, context.cluster
        cluster.ticket_ring()  # a process that cannot read the keys does not start
        self._ticket_keys = ProofKeys(cluster.ticket_ring, tickets.PURPOSE, keep=True)
        devices = TrackedDevices(self._takers_changed, policy=LoginPolicy(cluster.login_policy), max_entries=options.max_entries)
        self._relay = Core(
            endpoint=context.endpoint_id,
            partition=options.partition,
            heartbeat_s=cluster.heartbeat_interval_ms / 1000,
            dead_after=cluster.dead_after,
            poll_interval_s=options.poll_interval_s,
            gone_gateway_s=options.gone_gateway_s,
            devices=devices,
            tracer=tracer_of(context, Hop.RELAY, options.partition),
            guests=cluster.guests,
            proofs=LoginProofs(self._ticket_keys.newest, time.time) if cluster.ticket_key_dir else None,
        )
        super().__init__(context, self._relay, options.store_mb, others=("proxy", "broker"))
        self._runner.effects.on(UnprovenLogins, self._unproven)
        self.mail = MailService(context, self._relay, devices)
        self.wills = Wills(context.endpoint_id, options.gone_gateway_s, devices, context.now)
        self.run(self.wills.runner)
        self.wills.start(context.links)
        self._relay.reported = self.wills.reported
        wire_pb2_grpc.add_PresenceServicer_to_server(PresenceService(self._relay), context.server)

    async def drain(self) -> None:
        """Drain mail first: other replicas take its devices when they see this one Draining."""
        await self.mail.drain()
        await super().drain()

    async def stop(self) -> None:
        """End mail, then as `ReplicaService.stop`."""
        await self.mail.stop()
        await super().stop()

    def health(self) -> dict[str, object]:
        """Report the number of users with a device, and the delivery of mail, too."""
        found = super().health()
        degraded = found["degraded"] or self._ticket_keys.problem or None
        return {**found, "degraded": degraded, "users": self._relay.devices.users, "mail": self.mail.health()}

    def on_view(self, view: View) -> None:
        """Take a view, as `ReplicaService.on_view`; the owners of users' mail may have changed."""
        super().on_view(view)
        self._look_around()

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Take a peer's state, as `MemberService.on_peer_state`."""
        super().on_peer_state(peer, state)
        self._look_around()

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Take control messages: those about wills, and others as `MemberService.on_control`."""
        if not any(message[:2] in WILLS for message in messages):
            return super().on_control(peer, messages)
        run = self._relay.gateway_run_of(peer)
        if run is None and not self._relay.is_relay(peer):
            self._context.look_again()
            return Outcome.NOT_TAKEN
        outcome, others = Outcome.TAKEN, []
        for message in messages:
            if message[:2] not in WILLS:
                others.append(message)
                continue
            try:
                control = control_pb2.Control.FromString(message)
            except DecodeError:
                return Outcome.MALFORMED
            if self.wills.on_control(peer, run, control) is Outcome.MALFORMED:
                outcome = Outcome.MALFORMED
        return super().on_control(peer, others) if others and outcome is Outcome.TAKEN else outcome

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Report settled parcels, as `ReplicaService.on_settled`."""
        super().on_settled(peer, settled)
        self.wills.settled(settled)

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Route a batch of a proxy, or of another relay whose partition the user has left."""
        if self._context.is_overtaken():
            return Outcome.NOT_TAKEN
        return self._runner.take(RecordsReceived(peer, data, start, end, count), timed=False)

    def _become(self, state: NodeState) -> None:
        super()._become(state)
        self._look_around()

    def _look_around(self) -> None:
        self.mail.look_around()
        relay = self._relay
        gateways = relay.gateway_runs()
        reachable = frozenset(EndpointID(endpoint) for endpoint in relay.reachable_gateways())
        self.wills.seen(ClusterSeen(relay.partition, relay.partitions, relay.mail_owners(), gateways, reachable))

    def _unproven(self, effect: UnprovenLogins) -> None:
        endpoint = hex_id(effect.gateway)
        self._context.audit.write_limited("login_without_ticket", endpoint, gateway=endpoint, logins=effect.count)

    def _takers_changed(self) -> None:
        self.mail.changed()

    def _samples(self) -> dict[str, object]:
        own = {"users": self._relay.devices.users, "devices_replaced_total": self._relay.replaced}
        own["logins_without_ticket_total"] = self._relay.unproven
        return {**super()._samples(), **totals(self._relay.chat.counters), **own, **self.wills.samples(), **self.mail.samples()}


class PresenceService(wire_pb2_grpc.PresenceServicer):
    """Serves `pixiu.v1.Presence` for the users of this partition."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Query(self, request: wire_pb2.PresenceRequest, context: grpc.aio.ServicerContext[Any, Any]) -> wire_pb2.PresenceReply:
        """Answer presence of users."""
        if self._core.state is not State.RUNNING:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this relay is {self._core.state.value}; ask a Running one")
        if len(request.uins) > MAX_QUERY:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a query names at most {MAX_QUERY} users; send several")
        found = self._core.presence(request.uins)
        return wire_pb2.PresenceReply(users=[wire_pb2.UserPresence(uin=user.uin, devices=user.devices) for user in found])
