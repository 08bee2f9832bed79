"""The shells of gateway and proxy. Their clients' connections are played by `clients`."""

from __future__ import annotations

from itertools import count
from typing import Any

import gateway.core
import gateway.events as ge
import proxy.core
import proxy.events as pe
from cluster.core.contract import END_OF_TURN, TICK, RecordsReceived, SendControl, SendRecords, Settle, Settled
from cluster.links.api import Outcome, PeerState
from cluster.membership.map.updates import encode_messages
from cluster.wire.v1 import control_pb2
from gateway.delivery.signals import MemoryTable
from gateway.membership.controls import event_of, signals_delivered
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID
from tests.sim.cluster.process import Process

GATEWAYS_BATCHES = 1 << 40
"""The first number of gateways' batches among a proxy's streams."""


class GatewayProcess(Process):
    """A gateway. `place.kept` is its table of signals, which outlives it."""

    core: gateway.core.Core
    instance: int
    generation: int
    outcome: Outcome
    """What became of the last batch."""

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

    def deadline(self) -> float:
        """See `Process`."""
        return self.core.next_deadline()

    def tick(self) -> None:
        """See `Process`."""
        self.step(TICK)

    def take_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """See `Process`."""
        self.world.watch.arrived(self, data[start:end])
        self.outcome = Outcome.TAKEN
        self.step(RecordsReceived(peer, data, start, end, count))
        return self.outcome

    def take_control(self, peer: EndpointID, messages: list[bytes]) -> None:
        """See `Process`."""
        for data in messages:
            control = control_pb2.Control.FromString(data)
            self.world.counts["overtaken"] += len(control.gateway_confirm.newer)
            event = event_of(peer, control, self._is_relay)
            if event is not None:
                self.step(event)

    def take_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """See `Process`."""
        self.step(Settled(settled))

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
        self.step(END_OF_TURN)
        self.world.watch.turn_ended(self)

    def step(self, event: ge.Event) -> None:
        """Give the core an event and do what it asks for."""
        links, now = self.links, self.world.now
        for effect in self.core.step(event, now) if self.alive else ():
            match effect:
                case Settle():
                    self.outcome = effect.outcome
                case ge.SendMembership(peer, messages, token):
                    self.world.watch.say(messages)
                    links.send_control(peer, encode_messages(messages), token, now)
                case SendControl(peer, controls, token):
                    links.send_control(peer, controls, token, now)
                case ge.Resolved(outcomes):
                    for message, error in outcomes:
                        message.resolved(error)
                case SendRecords(peer, records, lane, token):
                    links.send_records(peer, records, lane, token, now)
                case ge.SendDelivered(peers):
                    for proxy_peer in peers:
                        links.send_control(proxy_peer, [signals_delivered(effect)], 0, now)
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
        self._batches = count(GATEWAYS_BATCHES)
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

    def deadline(self) -> float:
        """See `Process`."""
        return self.core.next_deadline()

    def tick(self) -> None:
        """See `Process`."""
        self.step(TICK)

    def take_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """See `Process`."""
        self.step(RecordsReceived(peer, data, start, end, count))
        return Outcome.TAKEN

    def take_control(self, peer: EndpointID, messages: list[bytes]) -> None:
        """See `Process`."""
        signals: list[int] = []
        for data in messages:
            control = control_pb2.Control.FromString(data)
            if control.HasField("layout_notice"):
                self.world.counts["notices"] += 1
            if control.HasField("publish_batch"):
                batch = control.publish_batch
                self.step(pe.GatewayPublished(next(self._batches), peer, batch.number, batch.records, batch.count))
            if control.HasField("chat_offline"):
                self.step(pe.UsersOffline(list(control.chat_offline.snowflake_ids)))
            signals.extend(control.signals_delivered.ids)
        if signals:
            self.step(pe.SignalsDelivered(signals, peer))

    def take_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """See `Process`."""
        self.step(Settled(settled))

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
            case SendRecords(peer, records, lane, token, urgent, more):
                self.links.send_records(peer, records, lane, token, self.world.now, urgent, more)
            case SendControl(peer, controls, token):
                self.links.send_control(peer, controls, token, self.world.now)
            case pe.Reply(stream, up_to, failures):
                assert all(failure.code != MalformedData.code for failure in failures), "a proxy calls a whole batch malformed"
                if stream < GATEWAYS_BATCHES:
                    self.world.clients.replied(self, stream, up_to, failures)
            case pe.Delivered(stream, signals, gateway):
                self.world.clients.told_delivered(self, stream, signals, gateway)
            case Settle():
                raise AssertionError("a proxy calls a whole batch malformed")
