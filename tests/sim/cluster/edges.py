"""The shells of gateway and proxy. Their clients' connections are played by `clients`."""

from __future__ import annotations

from typing import Any

import gateway.core
import gateway.events as ge
import proxy.core
import proxy.events as pe
from cluster.links.api import Outcome, PeerState
from cluster.membership.anti_entropy import is_anti_entropy
from cluster.membership.lww_map import encode_messages
from gateway.signals import MemoryTable
from pixiu.ids import EndpointID
from pixiu.wire.v1 import control_pb2
from tests.sim.cluster.process import Process


class GatewayProcess(Process):
    """A gateway. `place.kept` is its table of signals, which outlives it."""

    core: gateway.core.Core
    instance: int
    generation: int

    def start_core(self) -> None:
        """See `Process`."""
        leased = self.world.registry.lease()
        assert leased is not None, "the world waits for a free instance"
        self.instance, self.generation = leased
        if self.place.kept is None or not self.world.variant.keep_signals:
            self.place.kept = MemoryTable()
        self.core = self.world.variant.gateway(
            instance=self.instance,
            generation=self.generation,
            signals=self.place.kept,
            vrooms=self.world.vrooms,
            through_relays=self.world.shape.through_relays,
        )
        self.world.wire.after(0.01, lambda: self.do(lambda: self.set_state("Running")))

    def peer_roles(self) -> tuple[str, ...]:
        """See `Process`."""
        return ("router", "relay", "proxy")

    def on_view(self) -> None:
        """See `Process`."""
        self._peers_changed()

    def _peers_changed(self) -> None:
        self.step(ge.RoutersChanged(self.view.count("router"), self._replicas("router")))
        self.step(ge.RelaysChanged(self.view.count("relay"), self._replicas("relay")))
        proxies = tuple(ge.Replica(replica.endpoint, 0, replica.usable) for replica in self._replicas("proxy"))
        self.step(ge.ProxiesChanged(proxies))

    def _replicas(self, role: str) -> tuple[ge.Replica, ...]:
        found = []
        for node in self.view.of_role(role):
            state = self.links.state(node.endpoint)
            if node.state != "Init" and state is not PeerState.DEAD:
                found.append(ge.Replica(node.endpoint, node.partition, node.running and state is not PeerState.SUSPECT))
        return tuple(found)

    def deadline(self) -> float | None:
        """See `Process`."""
        return self.core.next_deadline()

    def tick(self) -> None:
        """See `Process`."""
        self.step(ge.Tick())

    def take_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """See `Process`."""
        self.world.watch.arrived(self, data[start:end])
        taken = self.core.records_arrived(ge.RecordsArrived(data, start, end, count))
        return Outcome.TAKEN if taken else Outcome.MALFORMED

    def take_control(self, peer: EndpointID, messages: list[bytes]) -> None:
        """See `Process`."""
        for data in messages:
            control = control_pb2.Control.FromString(data)
            if control.HasField("gateway_confirm"):
                newer = [(found.id, found.connect_time) for found in control.gateway_confirm.newer]
                self.world.counts["overtaken"] += len(newer)
                self.step(ge.Confirmed(peer, list(control.gateway_confirm.ids), newer))
            elif control.HasField("device_replaced"):
                gone = control.device_replaced
                self.step(ge.Replaced(gone.uin, gone.device, gone.connect_time, gone.reason))
            elif is_anti_entropy(control):
                self.step(ge.HealingReceived(peer, control, self._is_relay(peer)))
            elif control.HasField("fenced"):
                self.step(ge.FenceReceived(peer, control.fenced.floor))

    def take_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """See `Process`."""
        self.step(ge.Settled(settled))

    def take_state(self, peer: EndpointID, state: PeerState) -> None:
        """See `Process`."""
        self._peers_changed()

    def take_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """See `Process`."""
        if reply or not attachment:
            return b""
        rule = control_pb2.BrokerSubscription.FromString(attachment)
        return self.core.heartbeat(rule.partition, rule.partitions, relay=self._is_relay(peer)).SerializeToString()

    def _is_relay(self, peer: EndpointID) -> bool | None:
        return next((node.role == "relay" for node in self.view.nodes if node.endpoint == peer), None)

    def end_of_turn(self) -> None:
        """See `Process`."""
        self.step(ge.EndOfTurn())
        self.world.watch.turn_ended(self)

    def step(self, event: ge.Event) -> None:
        """Give the core an event and do what it asks for."""
        links, now = self.links, self.world.now
        for effect in self.core.step(event, now) if self.alive else ():
            match effect:
                case ge.SendMembership(peer, messages, token):
                    self.world.watch.said.update((message.id, message) for message in messages)
                    links.send_control(peer, encode_messages(messages), token, now)
                case ge.SendControl(peer, controls):
                    links.send_control(peer, controls, 0, now)
                case ge.SendRecords(peer, records, lane, token):
                    links.send_records(peer, records, lane, token, now)
                case ge.SendDelivered(peers, signals):
                    answer = control_pb2.Control(signals_delivered=control_pb2.SignalsDelivered(ids=signals)).SerializeToString()
                    for proxy_peer in peers:
                        links.send_control(proxy_peer, [answer], 0, now)
                case ge.Answer(connection, request, known):
                    self.world.clients.answered(self, connection, request, known)
                case ge.Deliver(connections, data, count):
                    self.world.watch.delivered(self, connections, data, count)
                case ge.Disconnect(connection, reason):
                    self.world.clients.replaced(self, connection, reason)
                case ge.Fenced():
                    raise AssertionError("a gateway that lives was taken for dead")
                case _:
                    self.other(effect)

    def other(self, effect: ge.Effect) -> None:
        """What is said of mail, which is not here."""


class ProxyProcess(Process):
    """A proxy."""

    core: proxy.core.Core

    def start_core(self) -> None:
        """See `Process`."""
        self.core = self.world.variant.proxy(max_record_bytes=1 << 20, vrooms=self.world.vrooms, vrooms_per_s=2_000.0)
        self.world.wire.after(0.01, lambda: self.do(lambda: self.set_state("Running")))

    def peer_roles(self) -> tuple[str, ...]:
        """See `Process`."""
        return ("broker", "relay")

    def on_view(self) -> None:
        """See `Process`."""
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        self.step(pe.BrokersChanged(self.view.count("broker"), self._replicas("broker")))
        self.step(pe.RelaysChanged(self.view.count("relay"), self._replicas("relay")))

    def _replicas(self, role: str) -> tuple[pe.Replica, ...]:
        found = []
        for node in self.view.of_role(role):
            state = self.links.state(node.endpoint)
            if node.state != "Init" and state is not PeerState.DEAD:
                found.append(pe.Replica(node.endpoint, node.partition, node.running and state is not PeerState.SUSPECT))
        return tuple(found)

    def deadline(self) -> float | None:
        """See `Process`."""
        return self.core.next_deadline()

    def tick(self) -> None:
        """See `Process`."""
        self.step(pe.Tick())

    def take_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """See `Process`."""
        self.step(pe.BatchForwarded(data, start, end, count))
        return Outcome.TAKEN

    def take_control(self, peer: EndpointID, messages: list[bytes]) -> None:
        """See `Process`."""
        signals: list[int] = []
        for data in messages:
            control = control_pb2.Control.FromString(data)
            if control.HasField("layout_notice"):
                self.world.counts["notices"] += 1
            if control.HasField("chat_offline"):
                self.step(pe.UsersOffline(list(control.chat_offline.snowflake_ids)))
            signals.extend(control.signals_delivered.ids)
        if signals:
            self.step(pe.SignalsDelivered(signals))

    def take_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """See `Process`."""
        self.step(pe.Settled(settled))

    def take_state(self, peer: EndpointID, state: PeerState) -> None:
        """See `Process`."""
        self._replicas_changed()

    def step(self, event: pe.Event) -> None:
        """Give the core an event and do what it asks for."""
        for effect in self.core.step(event, self.world.now) if self.alive else ():
            self.perform(effect)

    def perform(self, effect: Any) -> None:
        """One effect."""
        match effect:
            case pe.SendRecords(peer, records, lane, token):
                self.links.send_records(peer, records, lane, token, self.world.now)
            case pe.Reply(stream, up_to, failures):
                self.world.clients.replied(self, stream, up_to, failures)
            case pe.Delivered(stream, signals):
                self.world.clients.told_delivered(self, stream, signals)
            case pe.MalformedBatch():
                raise AssertionError("a proxy calls a whole batch malformed")
