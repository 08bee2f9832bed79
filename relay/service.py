"""The relay's shell: `pixiu.replicas.service` around its core, users' messages, and presence queries.

Source: seed 004 §7.3.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc.aio

from pixiu.devices import Devices, LoginPolicy
from pixiu.ids import EndpointID
from pixiu.replicas.service import ReplicaService
from pixiu.replicas.state import State
from pixiu.runtime.context import Context
from pixiu.runtime.tracing import tracer_of
from pixiu.trace import Hop
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from relay.core import MAX_QUERY, Core
from relay.events import RecordsReceived
from relay.options import Options


class Service(ReplicaService):
    """Runs one `relay.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        options, cluster = context.options, context.cluster
        self._relay = Core(
            endpoint=context.endpoint_id,
            partition=options.partition,
            heartbeat_s=cluster.heartbeat_interval_ms / 1000,
            dead_after=cluster.dead_after,
            poll_interval_s=options.poll_interval_s,
            gone_gateway_s=options.gone_gateway_s,
            devices=Devices(policy=LoginPolicy(cluster.login_policy), max_entries=options.max_entries),
            tracer=tracer_of(context, Hop.RELAY, options.partition),
        )
        super().__init__(context, "relay", self._relay, options.store_mb, others=("proxy", "broker"))
        wire_pb2_grpc.add_PresenceServicer_to_server(PresenceService(self._relay), context.server)

    def health(self) -> dict[str, object]:
        """Also how many users have a device."""
        return {**super().health(), "users": self._relay.devices.users}

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> bool:
        """A proxy's batch; or another relay's, whose partition the user has left."""
        relayed = self._relay.records_received(RecordsReceived(peer, data, start, end, count), self._context.now())
        if relayed is None:
            return False
        links = self._context.links
        for parcel in relayed.parcels:
            links.send_records(parcel.peer, parcel.records, parcel.lane)
        for control in relayed.controls:
            links.send_control(control.peer, control.messages)
        return True

    def _samples(self) -> dict[str, object]:
        chat = {f"{name}_total": value for name, value in asdict(self._relay.chat.counters).items()}
        return {**super()._samples(), **chat, "users": self._relay.devices.users, "devices_replaced_total": self._relay.replaced}


class PresenceService(wire_pb2_grpc.PresenceServicer):
    """Serves `pixiu.v1.Presence` for the users of this partition."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Query(self, request: wire_pb2.PresenceRequest, context: grpc.aio.ServicerContext[Any, Any]) -> wire_pb2.PresenceReply:
        """Who is online."""
        if self._core.state is not State.RUNNING:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this relay is {self._core.state.value}; ask a Running one")
        if len(request.uins) > MAX_QUERY:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a query names at most {MAX_QUERY} users; send several")
        found = self._core.presence(request.uins)
        return wire_pb2.PresenceReply(users=[wire_pb2.UserPresence(uin=user.uin, devices=user.devices) for user in found])
