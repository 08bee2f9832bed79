"""The relay's core: on which gateways each user's devices are, and users' messages to those gateways.

    proxy ──▶ relay ──▶ the gateways of the user's devices, one copy each
      ▲         ▲ │
      └─────────┼─┘ who was offline
    gateway ────┘ a device connected or went: passed on to the peers, kept in the Relay DB, confirmed

What a gateway says is handled by `cluster.membership.replica_core`, over `cluster.membership.devices.Devices`.

Source: PiXiu §7.3; docs/architecture.md, "A message to a user", docs/memberships.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

from cluster.membership.devices import Connection, Devices, connection_of
from cluster.membership.events import Effect
from cluster.membership.forwards import Group, Outcome
from cluster.membership.lww_map import Applied, Update
from cluster.membership.replica_core import ReplicaCore
from cluster.membership.replica_state import State
from cluster.runtime.contract import MALFORMED, NOT_TAKEN, RecordsReceived, SendControl, Tick
from cluster.runtime.parcels import Target
from pixiu.ids import EndpointID
from pixiu.wire.trace import UNTRACED, Tracer
from pixiu.wire.v1 import control_pb2
from relay.chat import ChatFanout
from relay.login_conflicts import Contests

MAX_NEWER: Final = 100_000
"""Unconfirmed connects that another connection is above. Policy: the oldest is confirmed without a word of it."""
MAX_QUERY: Final = 1000
"""UINs in one presence query."""
MAX_OFFLINE: Final = 128
"""SnowflakeIDs in one notice of who is offline, so that it fits a datagram."""


@dataclass(frozen=True, slots=True)
class UserPresence:
    """Whether a user is online, and on how many devices."""

    uin: int
    devices: int


class Core(ReplicaCore):
    """Decides; arguments as `ReplicaCore` has them, the devices empty, and what
    stamps traced records. `step` never raises on what comes from the network."""

    ROLE: ClassVar[str] = "relay"
    SNAPSHOT_ROLES: ClassVar[tuple[str, ...]] = ("relay",)
    MAX_CONFIRMS: ClassVar[int] = 64
    """A connect that is not the newest takes a place of its own beside its ID."""

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
    ) -> None:
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
        """Connections whose gateways were told that a newer login took their place."""
        self._newer: dict[int, int] = {}
        """GatewayMsgID of a connect that is not confirmed yet → the connect time above it."""
        self.table.on(RecordsReceived, self._on_records)

    def presence(self, uins: Iterable[int]) -> list[UserPresence]:
        """Who of these users is online, on how many devices, in the order asked for."""
        return [UserPresence(uin, len(self.devices.connections(uin))) for uin in uins]

    # --- users' mail

    @property
    def partitions(self) -> int:
        """How many partitions of relays the view has."""
        return self._view.partitions if self._view is not None else 1

    def mail_owners(self) -> tuple[int, ...]:
        """The relays among which the owner of each of this partition's users is chosen; () while this one is none of them."""
        if self._view is None or self.state is not State.RUNNING or self.partition >= self._view.partitions:
            return ()
        return tuple(sorted((self.endpoint, *self._view.running(self.partition, self._dead))))

    def reachable_gateways(self) -> list[int]:
        """Endpoints of gateways that are in the registry and not silent."""
        return [target.endpoint for target in self._gateways.values() if target.endpoint not in self._dead]

    def gateway_at(self, instance: int) -> int | None:
        """The endpoint of a gateway instance, if it can be reached."""
        target = self._gateways.get(instance)
        return None if target is None or target.endpoint in self._dead else target.endpoint

    # --- users' messages

    def _on_records(self, event: RecordsReceived, now: float, out: list[Effect]) -> None:
        """Records out first, then who is offline, so that the notice leaves before the acknowledgement of the batch."""
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
        """Devices on a gateway that is out of the registry, or silent, are offline."""
        reachable = [instance for instance, target in self._gateways.items() if target.endpoint not in self._dead]
        self.devices.set_reachable(frozenset(reachable))

    # --- what gateways say

    def _apply(self, messages: list[Update], now: float, out: list[Effect]) -> Applied:
        """Tell a connect that is not the newest by its confirmation, and those that it replaces by their gateways.

        Source: docs/memberships.md.
        """
        for change in messages:
            newer = self.devices.newer(change) if change.login else 0
            if newer:
                if len(self._newer) >= MAX_NEWER:
                    del self._newer[next(iter(self._newer))]
                self._newer[change.id] = newer
        applied = super()._apply(messages, now, out)
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
        """The login policy allows the rivals of the newest connection no longer. Every replica says so: what one of
        them knows too late the other one knew; a gateway takes it once."""
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
        self.contests.note(self.devices.take_together(), now)
        if self.state is State.RUNNING:
            for uin, loser, winner in self.contests.due(now):
                gateway = self._gateways.get(loser.instance)
                if gateway is not None and self._serves(uin):
                    self.replaced += 1
                    out.append(SendControl(gateway.endpoint, [_replaced(uin, loser, winner)]))

    def _confirm(self, outcome: Outcome, out: list[Effect]) -> None:
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
    """Tells a gateway to end a login for a newer one."""
    reason = control_pb2.REASON_MOVED if loser.device == winner.device else control_pb2.REASON_KICKED
    message = control_pb2.DeviceReplaced(uin=uin, device=loser.key, connect_time=loser.connect_time, reason=reason)
    return control_pb2.Control(device_replaced=message).SerializeToString()
