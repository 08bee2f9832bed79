"""The proxy's shell: its gRPC service and its links around the core.

Source: PiXiu §2.2.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from cluster.access.authorities import Authorities
from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.logins import enter, guard_of
from cluster.core.contract import TICK, RecordsReceived, Settled
from cluster.core.role import RoleShell, totals
from cluster.core.runner import Runner
from cluster.links.api import Outcome, Peer, PeerState
from cluster.metrics.histogram import SIZES, OneAtATime
from cluster.process.context import Context
from cluster.process.tracing import tracer_of
from cluster.rpc import methods
from cluster.rpc.served import ServedStreams
from cluster.settings.options import ClusterOptions
from cluster.trust import tickets
from cluster.trust.followed_keys import ProofKeys
from cluster.wire.v1 import control_pb2, tickets_pb2
from pixiu.discovery import paths
from pixiu.discovery.node import NodeState, run_of
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.link_quality import Quality
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.weights import Weights
from pixiu.wire.trace import Hop, Sampler
from pixiu.wire.v1 import mail_pb2_grpc, topic_pb2_grpc, wire_pb2, wire_pb2_grpc
from proxy import events as ev
from proxy import kept_events as kept_ev
from proxy import mail_events as mail_ev
from proxy import routed_events as routed_ev
from proxy.core import Core
from proxy.kept.service import KeptService
from proxy.mail.service import MAX_PUBLISHERS, MailService
from proxy.options import Options
from proxy.presence import PresenceService
from proxy.publishers.message_ids import MessageIDs
from proxy.publishers.rates import Rates
from proxy.publishers.sender_tickets import SenderTickets
from proxy.publishers.ticket_issuer import LOOK_S, TicketIssuer
from proxy.publishers.worker_leases import Lender
from proxy.records.publisher import PublisherService, PublisherStream
from proxy.routed.service import RoutedService
from proxy.topics import TopicsService
from registry.leases import WORKERS_TO_LEND, WorkerLeases, wall_clock_ms
from registry.mailbox import Requests

DRAIN_POLL_S = 0.05
PUBLISH = "Time from taking a publisher's batch until brokers and relays have all of it; one batch at a time is timed."
MAX_BROKERS_SHOWN = 256
"""Most brokers with a metric for their weight; the oldest ones have it."""


def _sampler(cluster: ClusterOptions) -> Sampler | None:
    return Sampler(cluster.trace_fraction, cluster.max_record_bytes) if cluster.trace_fraction else None


def _rates(options: Options) -> Rates:
    return Rates(
        publisher_messages_per_s=options.publisher_messages_per_s,
        publisher_bytes_per_s=options.publisher_bytes_per_s,
        room_messages_per_s=options.room_messages_per_s,
        room_bytes_per_s=options.room_bytes_per_s,
        burst_s=options.limit_burst_s,
    )


class Service(RoleShell):
    """Runs the proxy's cores: records (`proxy.core`), mail (`proxy.mail.pipeline`), notices (`proxy.notices.mail_notices`)."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.crash)
        self.options = context.options
        self._context, self.turn = context, context.turn
        self._guard = guard_of(context.options, context.cluster, context.log, context.audit, context.client_called)
        self._kicks = Requests(context.zookeeper, paths.kicks(context.root), self._kick)
        options, cluster = context.options, context.cluster
        self._sampler = _sampler(cluster)
        self._traced_before = 0
        """Messages marked by earlier samplers with other fractions."""
        self._core = Core(
            max_record_bytes=context.cluster.max_record_bytes,
            barrier_ms=context.cluster.push_back_ms,
            kinds=frozenset(options.kinds),
            vrooms=VRooms(*context.cluster.big_rooms),
            topics=TopicRooms(context.cluster.topic_rooms),
            vrooms_per_s=options.big_room_vrooms_per_s,
            rates=_rates(options),
            receipts=not context.cluster.router_root,
            tracer=tracer_of(context, Hop.PROXY),
            sampler=self._sampler,
        )
        self._records: Runner[ev.Event, ev.Effect] = self.run(Runner(self._core, context.now, tick=TICK))
        self._records.send_by(context.links)
        self._records.effects.on(ev.Reply, self._reply)
        self._records.effects.on(ev.Delivered, self._delivered)
        # Gateways drop a SnowflakeID that they have seen: clusters that share gateways share the worker numbers too.
        holder = f"proxy-{context.endpoint_id:016x}"
        self._leases = WorkerLeases(context.zookeeper, context.router_root, holder, workers=WORKERS_TO_LEND)
        self.lender = Lender(self._acquire_worker, self._held_until_ms, options.max_lent_workers, options.login_lent_workers)
        self.ids = MessageIDs(cluster, self.lender.saw)
        self._publishers: ServedStreams[PublisherStream] = ServedStreams(MAX_PUBLISHERS, "this proxy has %d publishers")
        self._members: tuple[View, wire_pb2.ClusterReply] | None = None
        self._weights = Weights()
        self._presence = PresenceService(lambda: context.view, context.turn, self._guard, context.tls)
        self.senders: SenderTickets | None = None
        self._issuer: TicketIssuer | None = None
        self._ticket_keys = ProofKeys(cluster.ticket_ring, tickets.PURPOSE, keep=True)
        if cluster.ticket_key_dir and self._guard is not None:
            self._serve_tickets(self._guard)
        self.mail = MailService(context, self.ids, self._guard)
        self.run(self.mail.runner)
        self.run(self.mail.notices.runner)
        assert context.client_server is not None
        wire_pb2_grpc.add_PublisherServicer_to_server(PublisherService(self), context.client_server)
        wire_pb2_grpc.add_PresenceServicer_to_server(self._presence, context.client_server)
        mail_pb2_grpc.add_MailerServicer_to_server(self.mail, context.client_server)
        self._kept = KeptService(
            context, self.mail, self._records.step, self.spawn, self._acquire_worker, self._held_until_ms
        )  # fmt: skip
        self.run(self._kept.runner)
        self._records.effects.on(kept_ev.AskKept, self._kept.ask)
        self._records.effects.on(kept_ev.StoreKept, self._kept.store)
        self._routed = RoutedService(context, self._core.routed, self._records.step, self.spawn)
        self._records.effects.on(routed_ev.StoreRouted, self._routed.store)
        self._topics = TopicsService(context, self._guard)
        topic_pb2_grpc.add_TopicsServicer_to_server(self._topics, context.client_server)
        context.metrics.collect_from(self._samples)
        context.metrics.collect_from(self._routed.samples)
        histogram = context.metrics.histogram
        self._batch_records = histogram("pixiu_published_batch_records", "Records in a publisher's batch.", SIZES)
        self._resolving = OneAtATime(histogram("pixiu_publish_seconds", PUBLISH))

    def _serve_tickets(self, guard: LoginGuard) -> None:
        context = self._context
        context.cluster.ticket_ring()  # a process that cannot read the keys does not start
        self.senders = SenderTickets(self._ticket_keys.newest, time.time)
        authorities = Authorities(context.options.client_ca)
        self._issuer = TicketIssuer(guard, self.senders, self._ticket_keys.newest, self._run_of, authorities, self.turn)
        context.streams.serve(methods.TICKETS, tickets_pb2.TicketRequest.FromString, self._issuer.exchange)

    # What the runtime calls.

    def on_settings(self, cluster: ClusterOptions, options: Options) -> None:
        """See `cluster.settings.live_settings.Reconfigurable`."""
        self._traced_before += self._sampler.marked if self._sampler is not None else 0
        self._sampler = _sampler(cluster)
        self._records.step(ev.LimitsChanged(_rates(options), options.big_room_vrooms_per_s, self._sampler))

    async def start(self) -> None:
        """Start without waiting: a proxy without brokers refuses with a clear error."""
        self._leases.start()
        if self._guard is not None:
            self._guard.start()
            self._kicks.start()
        self._routed.start()
        if self._issuer is not None:
            self.every(LOOK_S, self._issuer.look)
        if self._context.cluster.weighted_routing:
            self.every(self._context.cluster.heartbeat_interval_ms / 1000, self._measure)

    async def drain(self) -> None:
        """Ask publishers to use another proxy, and wait until everything in flight is resolved."""
        self._publishers.draining = True
        for publisher in self._publishers.values():
            publisher.say(wire_pb2.PublishReply(draining=True))
        await self.mail.drain()
        while self._core.under_way or self._publishers:
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Stop everything, and give back the worker numbers that are not lent on."""
        self.stop_runners()
        await self.cancel_tasks()
        await self._presence.close()
        await self._topics.close()
        if self._guard is not None:
            await self._kicks.stop()
            await self._guard.close()
        await self._routed.stop()
        await self._kept.stop()
        await self.mail.stop()
        await self._leases.close()
        for worker, free_from_ms in self.lender.resting():
            await self._leases.release(worker, free_from_ms - 1)
        if self._kept.worker >= 0 and self._held_until_ms(self._kept.worker):
            await self._leases.release(self._kept.worker, wall_clock_ms())

    def health(self) -> dict[str, object]:
        """Numbers of publishers, parcels in flight and lent worker numbers. `degraded` is a text while an operator is needed."""
        return {
            "publishers": len(self._publishers),
            "under_way": self._core.under_way,
            "lent_workers": self.lender.lent,
            "routes": self._routed.status(),
            "routes_file": self._routed.file_path,
            "degraded": self._ticket_keys.problem or self._routed.problem or None,
        }

    def on_view(self, view: View) -> None:
        """Heartbeat every broker and relay; route to those that are Running."""
        nodes = (*view.of_role("broker"), *view.of_role("relay"))
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port, node.stream_port) for node in nodes)
        self._replicas_changed()
        self.mail.on_view(view)
        self._kept.on_view(view)

    # What the links call.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Take what a gateway's clients published at QoS 0."""
        if self._context.is_overtaken():
            return Outcome.NOT_TAKEN
        if self.senders is not None and (changed := self.senders.permitted(peer, data, start, end, count)) is not None:
            data, start, end = changed, 0, len(changed)
        return self._records.take(RecordsReceived(peer, data, start, end, count))

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Take control messages: what a gateway's clients published at QoS 1, its delivered signals, a relay's untaken messages, a
        broker's or relay's newer layout."""
        signals: list[int] = []
        offline: list[int] = []
        outcome = Outcome.ANSWERED
        try:
            for message in messages:
                control = control_pb2.Control.FromString(message)
                if control.HasField("publish_batch"):
                    if self._context.is_overtaken():
                        return Outcome.NOT_TAKEN
                    if not self._take_batch(peer, control.publish_batch):
                        return Outcome.MALFORMED
                    continue
                outcome = Outcome.TAKEN
                if control.HasField("signals_delivered"):
                    signals.extend(control.signals_delivered.ids)
                elif control.HasField("chat_offline"):
                    offline.extend(control.chat_offline.snowflake_ids)
                elif control.HasField("layout_notice"):
                    self._context.layout_noticed(control.layout_notice.version)
        except DecodeError:
            return Outcome.MALFORMED
        if signals:
            self._records.step(ev.SignalsDelivered(signals, peer))
        if offline:
            self._records.step(ev.UsersOffline(offline))
        return outcome

    def _take_batch(self, gateway: EndpointID, batch: control_pb2.PublishBatch) -> bool:
        data, count = batch.records, batch.count
        if not count or len(batch.sessions) not in (0, count):
            return False
        if self.senders is not None and (changed := self.senders.permitted(gateway, data, 0, len(data), count)) is not None:
            data = changed
        stream = next(self._publishers.numbers)
        self.begins(stream, count, 1)
        self._records.step(ev.GatewayPublished(stream, gateway, batch.number, data, count, batch.sessions))
        return True

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Note parcels that brokers and relays handled, or lost, and outcomes that gateways have, or not."""
        self._records.step(Settled(settled))

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Note that a broker or a relay is doubted, dead, or back."""
        self._replicas_changed()

    # What the publishers' service calls.

    def admit(self, publisher: PublisherStream) -> int:
        """Number a new publisher. Raises `Overloaded` or `Draining`."""
        number = self._publishers.enter(publisher)
        self._records.step(ev.PublisherOpened(number))
        return number

    async def enter(self, context: Any, end: Callable[[str], None]) -> LoginSession | None:
        """Session of the caller; None: nobody has to log in. Raises `NotAuthenticated`, `NotAllowed` or `Overloaded`."""
        return await enter(self._guard, context, "", end)

    def begins(self, stream: int, count: int, position: int) -> None:
        """Note that a request with `count` records has come on a publisher's stream."""
        self._batch_records.add(count)
        self._resolving.begin((stream, position + count - 1), self._context.now())

    def publish(self, batch: ev.BatchPublished) -> None:
        """Take a batch of a publisher's stream, or a slice of one."""
        self._records.step(batch)

    def left(self, stream: int) -> None:
        """Forget a publisher that is gone."""
        self._publishers.pop(stream, None)
        if self._resolving.mark is not None and self._resolving.mark[0] == stream:
            self._resolving.drop()
        self._records.step(ev.PublisherClosed(stream))

    def members(self) -> wire_pb2.ClusterReply:
        """Addresses of the cluster's proxies and gateways. Built once for each view: the clients of a dead proxy ask together."""
        view = self._context.view
        if self._members is None or self._members[0] is not view:
            self._members = view, self._members_of(view)
        return self._members[1]

    def _members_of(self, view: View) -> wire_pb2.ClusterReply:
        return wire_pb2.ClusterReply(
            members=[
                wire_pb2.ClusterMember(
                    role=node.role,
                    grpc_address=node.client_address,
                    mqtt_address=f"{node.mqtt_host}:{node.mqtt_port}" if node.mqtt_port else "",
                )
                for role in ("proxy", "gateway")
                for node in view.running(role)
            ],
            layout_version=view.layout.version,
            cluster=view.layout.cluster,
        )

    # Inside.

    def _run_of(self, gateway: EndpointID) -> int | None:
        node = self._context.view.by_endpoint(gateway)
        return run_of(node) if node is not None and node.role == "gateway" else None

    def _kick(self, request: str) -> None:
        if self._guard is not None:
            self._guard.kick(request)

    async def _acquire_worker(self) -> tuple[int, int, int]:
        lease = await self._leases.acquire()
        return lease.worker, lease.from_ms, lease.until_ms

    def _held_until_ms(self, worker: int) -> int:
        return next((lease.until_ms for lease in self._leases.leases if lease.worker == worker), 0)

    def _replicas_changed(self) -> None:
        view = self._context.view
        brokers = ev.BrokersChanged(view.layout.partitions("broker"), self._replicas("broker"))
        self._records.step(brokers)
        relays = view.layout.partitions("relay") if "relay" in view.layout.roles else 0
        self._records.step(ev.RelaysChanged(relays, self._replicas("relay") if relays else ()))
        self.mail.notices.runner.step(mail_ev.OwnersChanged(relays, self._owners(relays)))

    def _replicas(self, role: str) -> tuple[ev.Replica, ...]:
        view, links = self._context.view, self._context.links
        replicas: list[ev.Replica] = []
        places = {node.process: ev.Place.BESIDE for node in view.of_role("proxy")}
        if (own := self._context.membership.node) is not None:
            places[own.process] = ev.Place.HERE
        for node in view.of_role(role):
            state = links.state(node.endpoint)
            if node.state is not NodeState.INIT and state is not PeerState.DEAD:
                usable = node.state is NodeState.RUNNING and state is not PeerState.SUSPECT
                place = places.get(node.process, ev.Place.APART)
                replicas.append(ev.Replica(node.endpoint, node.partition, usable, self._weights.weight(node.endpoint), place))
        return tuple(replicas)

    def _owners(self, relays: int) -> dict[int, tuple[EndpointID, ...]]:
        """Partition → relays among which the owner of each of its users is chosen, by the same rule as in the relays."""
        running, links = self._context.view.running("relay"), self._context.links
        live = [node for node in running if links.state(node.endpoint) is not PeerState.DEAD]
        return {
            partition: tuple(sorted(node.endpoint for node in live if node.partition == partition)) for partition in range(relays)
        }

    def _measure(self) -> None:
        """Adjust weights once per heartbeat interval: brokers that answer late or seldom get fewer rooms."""
        partitions: dict[int, dict[EndpointID, Quality]] = {}
        for node in self._context.view.running("broker"):
            quality = self._context.links.quality(node.endpoint)
            partitions.setdefault(node.partition, {})[node.endpoint] = quality
        if self._weights.measure(partitions.values()):
            self._replicas_changed()

    def _reply(self, effect: ev.Reply) -> None:
        mark = self._resolving.mark
        if mark is not None and mark[0] == effect.stream and mark[1] <= effect.up_to:
            self._resolving.end(self._context.now())
        publisher = self._publishers.get(effect.stream)
        if publisher is not None:
            publisher.resolved(effect)

    def _delivered(self, effect: ev.Delivered) -> None:
        publisher = self._publishers.get(effect.stream)
        if publisher is not None:
            publisher.delivered(effect.signals, effect.gateway)

    def _samples(self) -> dict[str, object]:
        samples: dict[str, object] = {
            **totals(self._core.counters),
            "publishers": len(self._publishers),
            "parcels_under_way": self._core.under_way,
            "lent_workers": self.lender.lent,
            "loan_proofs_refused_total": self.ids.proofs_refused,
            "traces_begun_total": self._traced_before + (self._sampler.marked if self._sampler is not None else 0),
        }
        samples |= self.mail.samples() | self._core.kept.samples() | self._kept.samples(self._core.kept.counters)
        samples |= self._guard.samples() if self._guard is not None else {}
        samples |= self._issuer.samples() if self._issuer is not None else {}
        if self._context.cluster.weighted_routing:
            brokers = self._context.view.running("broker")[:MAX_BROKERS_SHOWN]
            samples["broker_weight{peer}"] = {f"broker:{node.address}": self._weights.weight(node.endpoint) for node in brokers}
            samples["broker_weight_changes_total"] = self._weights.changes
        return samples
