"""The relay's core: locates each user's devices at gateways, and sends users' messages to those gateways.

    proxy ──▶ relay ──▶ the gateways of the user's devices, one copy each
      ▲         ▲ │
      └─────────┼─┘ users who are offline
    gateway ────┘ a device connected or disconnected: passed on to the peers, kept in the Relay DB, confirmed

Messages of gateways are handled by `cluster.membership.replica.core`, over `cluster.membership.map.devices.Devices`.

Source: PiXiu §7.3; docs/architecture.md, "A message to a user", docs/memberships.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

from cluster.core.contract import MALFORMED, NOT_TAKEN, RecordsReceived, SendControl, Tick
from cluster.core.parcels import Target
from cluster.membership.events import Effect, UnprovenLogins
from cluster.membership.map.devices import Connection, Devices, connection_of
from cluster.membership.map.lww_map import Applied
from cluster.membership.map.updates import ENTRY_BYTES, Update
from cluster.membership.replica.core import ReplicaCore
from cluster.membership.replica.forwards import ForwardOutcome, Group
from cluster.membership.replica.state import State
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID
from pixiu.wire.trace import UNTRACED, Tracer
from relay.chat import ChatFanout
from relay.login_conflicts import Contests
from relay.login_proofs import LoginProofs

MAX_NEWER: Final = 100_000
"""Limit of unconfirmed connects below a newer connection. Policy: the oldest is confirmed without mentioning that."""
MAX_QUERY: Final = 1000
"""Limit of UINs in one presence query."""
MAX_OFFLINE: Final = 128
"""Limit of SnowflakeIDs in one notice of offline users, so that it fits a datagram."""


@dataclass(frozen=True, slots=True)
class UserPresence:
    """Number of devices on which a user is online; 0: offline."""

    uin: int
    devices: int


class Core(ReplicaCore):
    """Decides; arguments as in `ReplicaCore`, the devices empty, and a tracer that stamps traced records. `step` never raises on
    input from the network.

    proofs: checks login tickets of gateways; None: their word counts.
    """

    ROLE: ClassVar[str] = "relay"
    SNAPSHOT_ROLES: ClassVar[tuple[str, ...]] = ("relay",)
    MAX_CONFIRMS: ClassVar[int] = 64
    """A connect that is not the newest needs space of its own beside its ID."""

    def __init__(
        self,
        *,
        endpoint: EndpointID,
        partition: int,
        heartbeat_s: float,
        dead_after: int,
        poll_interval_s: float,
        gone_gateway_s: float,
        devices: Devices | None = None,
        tracer: Tracer = UNTRACED,
        guests: bool = False,
        proofs: LoginProofs | None = None,
    ) -> None:
        self._proofs = proofs
        self.unproven = 0
        """Reports of gateways that were refused for want of a login ticket."""
        self.devices = devices if devices is not None else Devices()
        super().__init__(
            endpoint=endpoint,
            partition=partition,
            heartbeat_s=heartbeat_s,
            dead_after=dead_after,
            poll_interval_s=poll_interval_s,
            gone_gateway_s=gone_gateway_s,
            membership=self.devices,
            guests=guests,
        )
        self.chat = ChatFanout(self._gateway_targets, self._serves, self._elsewhere, self._connected_targets, tracer)
        self.contests = Contests(self.devices, heartbeat_s)
        self.replaced = 0
        """Connections whose gateways were notified that a newer login replaced them."""
        self._newer: dict[int, int] = {}
        """GatewayMsgID of an unconfirmed connect → the connect time above it."""
        self.reported: Callable[[list[Update]], None] = lambda changes: None
        """Called with what gateways have reported of devices."""
        self.on(RecordsReceived, self._on_records)

    def presence(self, uins: Iterable[int]) -> list[UserPresence]:
        """Presence of these users, in the order of the query."""
        return [UserPresence(uin, len(self.devices.connections(uin))) for uin in uins]

    # --- users' mail

    @property
    def partitions(self) -> int:
        """Number of relay partitions in the view."""
        return self._view.partitions if self._view is not None else 1

    def mail_owners(self) -> tuple[int, ...]:
        """The relays among which the owner of each of this partition's users is chosen; () while this one is not among them."""
        if self._view is None or self.state is not State.RUNNING or self.partition >= self._view.partitions:
            return ()
        return tuple(sorted((self.endpoint, *self._view.running(self.partition, self._dead))))

    def gateway_run_of(self, endpoint: EndpointID) -> int | None:
        """The run of a gateway in the registry; None: it is none."""
        return self._view.runs.get(endpoint) if self._view is not None else None

    def is_relay(self, endpoint: EndpointID) -> bool:
        """True if the registry has this relay."""
        return self._view is not None and endpoint in self._view.replicas

    def gateway_runs(self) -> dict[int, EndpointID]:
        """Run → gateway in the registry."""
        return {run: endpoint for endpoint, run in self._view.runs.items()} if self._view is not None else {}

    def reachable_gateways(self) -> list[int]:
        """Endpoints of gateways that are in the registry and not silent."""
        return [target.endpoint for target in self._gateways.values() if target.endpoint not in self._dead]

    def gateway_at(self, instance: int) -> int | None:
        """The endpoint of a gateway instance, if it is reachable."""
        target = self._gateways.get(instance)
        return None if target is None or target.endpoint in self._dead else target.endpoint

    # --- users' messages

    def _on_records(self, event: RecordsReceived, now: float, out: list[Effect]) -> None:
        """Send records first, then the notice of offline users, so that both leave before the batch is acknowledged."""
        self._batch_at = now
        routed = self.chat.route(event.data, event.start, event.end, event.count, out)
        if routed is None:
            out.append(MALFORMED)
            return
        for start in range(0, len(routed.offline), MAX_OFFLINE):
            notice = control_pb2.ChatOffline(snowflake_ids=routed.offline[start : start + MAX_OFFLINE])
            out.append(SendControl(event.peer, [control_pb2.Control(chat_offline=notice).SerializeToString()]))
        if routed.stale:
            self._notice(event.peer, now, out)
            if routed.lost:
                out.append(NOT_TAKEN)

    def _gateway_targets(self, uin: int) -> tuple[Target, ...]:
        # Only reachable instances are named, and those are in the map.
        return tuple([self._gateways[instance] for instance in self.devices.chat_gateways(uin)])

    def _connected_targets(self, uin: int) -> tuple[Target, ...]:
        return tuple([self._gateways[instance] for instance in self.devices.gateways_of(uin)])

    # --- the cluster

    def _reach_changed(self, now: float, out: list[Effect]) -> None:
        self._set_reachable()
        super()._reach_changed(now, out)

    def _set_reachable(self) -> None:
        """Treat devices on a gateway that is not in the registry, or silent, as offline."""
        reachable = [instance for instance, target in self._gateways.items() if target.endpoint not in self._dead]
        self.devices.set_reachable(frozenset(reachable))

    # --- messages of gateways

    def _proven(self, gateway: EndpointID, run: int, messages: list[Update], out: list[Effect]) -> list[Update]:
        """Neither confirm nor handle unproven connections: an honest gateway repeats them with a newer ticket, or ends them."""
        if self._proofs is None:
            return messages
        proven = self._proofs.proven(run, messages)
        self._refuse_unproven(gateway, len(messages) - len(proven), out)
        return proven

    def _proven_page(self, gateway: EndpointID, run: int, control: control_pb2.Control, out: list[Effect]) -> control_pb2.Control:
        if self._proofs is None or not control.HasField("listing_page"):
            return control
        page = self._proofs.proven_page(run, control.listing_page)
        if page is None:
            return control
        self._refuse_unproven(gateway, (len(control.listing_page.entries) - len(page.entries)) // ENTRY_BYTES, out)
        return control_pb2.Control(listing_page=page)

    def _refuse_unproven(self, gateway: EndpointID, count: int, out: list[Effect]) -> None:
        if count:
            self.unproven += count
            out.append(UnprovenLogins(gateway, count))

    def _apply(self, messages: list[Update], now: float, out: list[Effect]) -> Applied:
        """Note newer connects for confirmations, and notify the gateways of connections that are replaced.

        Source: docs/memberships.md.
        """
        for change in messages:
            newer = self.devices.newer(change) if change.login else 0
            if newer:
                if len(self._newer) >= MAX_NEWER:
                    del self._newer[next(iter(self._newer))]
                self._newer[change.id] = newer
        applied = super()._apply(messages, now, out)
        self.reported(applied.changes)
        for change in applied.changes:
            if change.login and not self.devices.newer(change):
                self._replace(change, out)
        return applied

    def _tell_stale(self, messages: list[Update], applied: Applied, group: Group, out: list[Effect]) -> list[int]:
        stale = super()._tell_stale(messages, applied, group, out)
        for number in stale:
            self._newer.pop(number, None)
        return stale

    def _replace(self, change: Update, out: list[Effect]) -> None:
        """Notify the gateways of connections that the login policy no longer allows beside the newest one. Every replica does so,
        since one may know the newer login before another; a gateway acts on the first notice."""
        winner = connection_of(change)
        for rival in self.devices.rivals(change):
            gateway = self._gateways.get(rival.instance)
            if gateway is None:
                continue
            data = [_replaced(change.group, rival, winner)]
            self.replaced += 1
            out.append(SendControl(gateway.endpoint, data, self.forwards.send(gateway.endpoint, data, Group(None, []))))

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        super()._on_tick(event, now, out)
        if self._proofs is not None and (oldest := self._proofs.oldest(now)) is not None:
            self.devices.set_oldest(oldest)
        self.contests.note(self.devices.take_together(), now)
        if self.state is State.RUNNING:
            for uin, loser, winner in self.contests.due(now):
                gateway = self._gateways.get(loser.instance)
                if gateway is not None and self._serves(uin):
                    self.replaced += 1
                    out.append(SendControl(gateway.endpoint, [_replaced(uin, loser, winner)]))

    def _confirm(self, outcome: ForwardOutcome, out: list[Effect]) -> None:
        for group in outcome.confirmed:
            if group.gateway is None:
                for number in group.ids:
                    self._newer.pop(number, None)
        super()._confirm(outcome, out)

    def _confirmation(self, ids: list[int]) -> bytes:
        confirm = control_pb2.GatewayConfirm(ids=ids)
        for number in ids:
            newer = self._newer.pop(number, 0)
            if newer:
                confirm.newer.add(id=number, connect_time=newer)
        return control_pb2.Control(gateway_confirm=confirm).SerializeToString()


def _replaced(uin: int, loser: Connection, winner: Connection) -> bytes:
    """Encode the request to a gateway to end a login for a newer one."""
    reason = control_pb2.REASON_MOVED if loser.device == winner.device else control_pb2.REASON_KICKED
    message = control_pb2.DeviceReplaced(uin=uin, device=loser.key, connect_time=loser.connect_time, reason=reason)
    return control_pb2.Control(device_replaced=message).SerializeToString()
