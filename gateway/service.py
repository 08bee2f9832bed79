"""The gateway's shell: its listener and streams, its links, and everything else around the core.

Source: PiXiu §2.5, §5.1.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, cast

from google.protobuf.message import DecodeError

from cluster.access.kicks import Kick, kick_of
from cluster.access.logins import guard_of
from cluster.core.contract import END_OF_TURN, TICK, RecordsReceived, Settled
from cluster.core.role import RoleShell, totals
from cluster.core.runner import Runner
from cluster.links.api import Outcome, Peer, PeerState
from cluster.membership.events import DigestKeysChanged
from cluster.membership.map.digest import Digest, DigestRule
from cluster.membership.map.digest_keys import KEYS_S, DigestKeys
from cluster.membership.map.updates import encode_messages
from cluster.process.context import Context
from cluster.process.tracing import tracer_of
from cluster.routers.kept_client import KeptClient
from cluster.rpc.methods import DELIVER
from cluster.settings.options import ClusterOptions
from cluster.wire.v1 import control_pb2, delivery_pb2
from gateway import events as ev
from gateway.client_listeners import ClientListeners
from gateway.clients.clients import Clients
from gateway.clients.publishing import ConfirmedPublishers
from gateway.clients.revoking import revoke
from gateway.clients.sessions import LOAD_S, Load, sessions
from gateway.core import Core
from gateway.delivery.signal_table import SharedTable, folder_name, open_table
from gateway.delivery.signals import SignalTable
from gateway.delivery.trace_files import TraceWriter, open_traces
from gateway.grpc.mail_streams import MailDeliveryService
from gateway.grpc.subscriber import SubscriberService
from gateway.limits import LIMITS_MET, REPORT_S, LimitReport
from gateway.membership.controls import event_of, signals_delivered
from gateway.numbers import GatewayNumbers
from gateway.options import Options
from gateway.retained.client import RetainedClient
from gateway.retained.page import retained
from gateway.sessions.operating import away, forget
from gateway.sessions.service import RENEW_S, Sessions
from gateway.sessions.store import SessionStore
from gateway.tenants.page import counted, system_topics
from gateway.tenants.watch import TenantWatch
from gateway.tickets.client import TicketClient
from gateway.tickets.held import Tickets
from gateway.wills.core import FIRST_TOKEN
from gateway.wills.events import DeviceOpened
from gateway.wills.service import WillPublisher
from pixiu.discovery import paths
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.errors import MalformedData, PixiuError, Unavailable
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.trace import Hop
from pixiu.wire.v1 import wire_pb2_grpc
from registry.mailbox import Requests

DRAIN_POLL_S: Final = 0.05
CLIENT_WAIT: Final = (
    "Time that the oldest message had waited when a client took what was written; of MQTT clients only when they lag."
)
TICKET_KEYS_READABLE: Final = "ticket_keys_readable"
"""Warns that a break-in here gives the keys of login tickets away. On one machine, as by `pixiu up`, that cannot be helped."""
SIGNAL_TABLE_IN_MEMORY: Final = "signal_table_in_memory"


class Service(RoleShell):
    """The gateway's shell: runs one `gateway.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.crash)
        self._context, self._options = context, context.options
        self._core: Core | None = None
        self._reaches_brokers = False
        self._digest_keys = DigestKeys(context.cluster)
        self._guard = guard_of(context.options, context.cluster, context.log, context.audit, context.client_called)
        self._kicks = Requests(context.zookeeper, paths.kicks(context.root), self._kick)
        self._vrooms = VRooms(*context.cluster.big_rooms)
        self._through_relays = context.cluster.fanout == "relay"
        self._numbers = GatewayNumbers(
            context.zookeeper, context.root, f"{context.endpoint_id:016x}", self._instance_lost, context.log
        )
        self._tickets: TicketClient | None = None
        if context.cluster.ticket_key_dir and self._guard is not None and context.framed is not None:
            self._tickets = TicketClient(Tickets(), context.framed, self._guard, self._peers_changed, context.crash)
            if os.access(context.cluster.ticket_key_dir, os.R_OK):
                context.log.warning(TICKET_KEYS_READABLE, path=context.cluster.ticket_key_dir)
        self._runner: Runner[ev.Event, ev.Effect] = self.run(Runner(None, context.now, tick=TICK, end_of_turn=END_OF_TURN))
        self._publishers = ConfirmedPublishers(self._vrooms, self._runner.step)
        self._retained = RetainedClient(
            view=lambda: context.view,
            state=context.links.state,
            topics=TopicRooms(context.cluster.topic_rooms),
            step=self._runner.step,
            takes_more=self._takes_more,
            log=context.log,
            tls=context.tls,
        )
        topics, largest = TopicRooms(context.cluster.topic_rooms), context.cluster.max_record_bytes
        self._wills = WillPublisher(context.now, self._publishers, topics, self._vrooms, largest, self._retained)
        self.run(self._wills.runner)
        self._clients = Clients(
            context.options,
            now=context.now,
            step=self._step,
            next_snowflake=self._numbers.next_snowflake,
            publishers=self._publishers,
            roles=lambda: context.view.layout.roles,
            endpoint=context.endpoint_id,
            max_record_bytes=largest,
            vrooms=self._vrooms,
            through_relays=self._through_relays,
            topics=topics,
            guard=self._guard,
            tickets=self._tickets,
            turn=context.turn,
            retainer=self._retained,
        )
        self._kept = KeptClient(lambda: context.view, context.links.state, context.tls)
        self._sessions = self._sessions_of(context, topics)
        self._tenants = self._watch_tenants()
        self._revocations = Requests(context.zookeeper, paths.revocations(context.root), self._end_revoked)
        self._listeners = ClientListeners(context, self._clients, self._guard, self._retained, self._sessions)
        self._mail = MailDeliveryService(lambda: self._core, self._runner.step, context.log)
        self._signal_table: SharedTable | None = None
        self._signal_problem = ""
        self._traces: TraceWriter | None = None
        self._enter_effects()
        assert context.client_server is not None
        wire_pb2_grpc.add_SubscriberServicer_to_server(SubscriberService(self._clients), context.client_server)
        context.streams.serve(DELIVER, delivery_pb2.DeliveryBatch.FromString, self._mail.deliver)
        context.metrics.collect_from(self._samples)
        context.pages["/connections"] = self._clients.page
        context.queries["/sessions"] = self._sessions_page
        context.queries["/retained"] = partial(retained, self._retained.listing)
        self._clients.slow_consumers.waited = context.metrics.histogram("pixiu_client_wait_seconds", CLIENT_WAIT).add

    def _sessions_of(self, context: Context[Options], topics: TopicRooms) -> Sessions:
        store = SessionStore(context)
        return Sessions(
            store,
            self._kept,
            serves=lambda: store.available and self._clients.serves_mail and not self._through_relays,
            max_expiry_s=lambda: self._options.max_session_expiry_s,
            topics=topics,
            vrooms=self._vrooms,
            important=context.cluster.important_topics,
            now=context.now,
            log=context.log,
        )

    def _watch_tenants(self) -> TenantWatch | None:
        """Watch for tenants what this gateway's clients do; None: nobody logs in."""
        if self._guard is None:
            return None
        memory, options = self._clients.memory, self._options
        found = TenantWatch(
            self._guard.tenants, self._context.now, lambda: memory.bytes / options.memory_bytes, self._retained.totals,
            self._kept.count, self._context.log,
        )  # fmt: skip
        self._context.queries["/tenants"] = partial(counted, self._guard.tenants, found)
        return found

    def _enter_effects(self) -> None:
        effects, clients = self._runner.effects, self._clients
        self._runner.performed = clients.deliveries.flush
        clients.deliveries.follows = lambda: self._runner.performing
        self._runner.send_by(self._context.links)
        effects.on(ev.Deliver, clients.deliveries.deliver)
        effects.on(ev.DeliverEach, clients.deliveries.deliver_each)
        effects.on(ev.WriteMail, clients.write_mail)
        effects.on(ev.Answer, self._answer)
        effects.on(ev.FetchRetained, self._retained.fetch)
        effects.on(ev.Passed, clients.passed)
        effects.on(ev.Resolved, self._publishers.resolved)
        effects.on(ev.Disconnect, clients.replace)
        effects.on(ev.AcknowledgementsDue, self._mail.acknowledgements_due)
        effects.on(ev.EndMailStream, self._mail.end_stream)
        effects.on(ev.SendMembership, self._send_membership)
        effects.on(ev.SendDelivered, self._send_delivered)
        effects.on(ev.KeepTraces, self._keep_traces)
        effects.on(ev.Fenced, self._fenced)

    # What the runtime calls.

    async def prepare(self, node: Node) -> Node:
        """Lease the numbers and bind the MQTT listeners, so that the node can name the port."""
        found = await self._numbers.acquire()
        port = await self._listeners.bind()
        table = self._open_signal_table(port)
        options, name = self._options, f"{self._context.endpoint_id:016x}"
        self._traces = open_traces(options.trace_dir, name, options.trace_file_mb, options.trace_files, options.trace_file_s)
        self._core = self._runner.core = Core(
            instance=found.instance,
            generation=found.generation,
            signals=table,
            vrooms=self._vrooms,
            topics=TopicRooms(self._context.cluster.topic_rooms),
            max_wide_rooms=options.max_wildcard_rooms,
            through_relays=self._through_relays,
            tracer=tracer_of(self._context, Hop.GATEWAY),
            jitter=random.random,
            uniform=random.random,
            is_crowd=self._clients.newcomers.is_crowd,
            unix_ms=lambda: time.time_ns() // 1_000_000,
            ticket_of=self._tickets.of if self._tickets is not None else None,
        )
        if self._guard is not None:
            self._core.system.more = partial(system_topics, self._guard.tenants)
        self._wills.start(found.instance, found.generation, self._context.links)
        return replace(node, instance=found.instance, generation=found.generation, mqtt_host=options.mqtt_host, mqtt_port=port)

    def on_settings(self, _cluster: ClusterOptions, options: Options) -> None:
        """See `cluster.settings.live_settings.Reconfigurable`."""
        self._options = options
        self._clients.set_options(options)

    async def start(self) -> None:
        """Start to accept clients."""
        if self._guard is not None:
            self._guard.start()
            self._revocations.start()
        self._kicks.start()
        if self._tenants is not None:
            self._tenants.start()
        await self._listeners.start()
        self.every(KEYS_S, self._look_at_digest_keys)
        self.every(RENEW_S, self._sessions.sweep)
        limits, load = LimitReport(), Load()
        self._context.metrics.collect_from(load.samples)
        self.every(REPORT_S, lambda: self._report_limits(limits))
        self.every(LOAD_S, lambda: self._sessions.run(load.look(self._clients.everybody())))

    async def drain(self) -> None:
        """Move the clients elsewhere, at a rate, and report to the routers that they left."""
        self._listeners.close()
        self._clients.drain(self._options.drain_spread_s(len(self._clients)), self._options.drain_last_s)
        core, wills = self._core, self._wills
        while (
            self._clients
            or wills.unfinished
            or self._sessions.unfinished
            or (core is not None and (core.unconfirmed or core.confirming.unresolved))
        ):
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Close everything that remains."""
        await self._listeners.stop()
        self._mail.stop()
        self._clients.stop()
        await self._sessions.close()
        await self._sessions.store.close()
        await self._kept.close()
        await self._kicks.stop()
        if self._guard is not None:
            await self._revocations.stop()
            await self._guard.close()
        if self._tenants is not None:
            await self._tenants.close()
        if self._tickets is not None:
            await self._tickets.close()
        await self._retained.close()
        self.stop_runners()
        if self._traces is not None:
            await self._traces.close()
        if self._signal_table is not None:
            # After a drain the clients have moved: delete the table. After a crash keep it: the restarted gateway deduplicates.
            self._signal_table.close(remove=self._clients.draining or not self._signal_table.count())
        await self._numbers.release()

    def health(self) -> dict[str, object]:
        """Numbers of clients and of unconfirmed reports."""
        core = self._core
        return {
            "connections": len(self._clients),
            "presences": core.index.presences if core else 0,
            "devices": len(core.devices) if core else 0,
            "members_digests": self._digests("router"),
            "devices_digests": self._digests("relay") if self._clients.serves_users else {},
            "unconfirmed": core.unconfirmed if core else 0,
            "mail": {"streams": core.mail.streams, "unacknowledged": core.mail.unacknowledged} if core else None,
            "degraded": self._degraded() or None,
        }

    def on_view(self, view: View) -> None:
        """Heartbeat every router, relay and proxy; send to those that are Running."""
        self._reach(view)
        self._sessions.store.on_view()
        if self._tickets is not None:
            self._tickets.set_proxies(node for node in view.of_role("proxy") if node.state is not NodeState.INIT)
        self._peers_changed()
        self._look_at_digest_keys()

    # What the links call.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Take messages from a broker or a relay."""
        return self._runner.take(RecordsReceived(peer, data, start, end, count))

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Take control messages: confirmations, queries, newer layouts, refusals of this generation, logins ended by relays, and
        outcomes of proxies."""
        outcome = Outcome.ANSWERED
        for message in messages:
            control = control_pb2.Control()
            try:
                control.ParseFromString(message)
            except DecodeError:
                return Outcome.MALFORMED
            event = event_of(peer, control, self._is_relay)
            if event is not None:
                if not isinstance(event, ev.BatchResolved):
                    outcome = Outcome.TAKEN
                self._runner.step(event)
            elif control.HasField("publish_will") or control.HasField("will_published"):
                if not self._is_relay(peer):
                    return Outcome.NOT_TAKEN
                try:
                    self._wills.on_control(peer, control)
                except MalformedData:
                    return Outcome.MALFORMED
            else:
                outcome = Outcome.TAKEN
                if control.HasField("layout_notice"):
                    self._context.layout_noticed(control.layout_notice.version)
        return outcome

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Note parcels that routers and proxies handled, or lost."""
        self._runner.step(Settled(settled))
        if max(settled)[0] > FIRST_TOKEN:
            self._wills.runner.step(Settled(settled))

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Note that a router, relay or proxy is doubted, dead, or back."""
        self._peers_changed()

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Answer a router's or relay's heartbeat with the state of this gateway."""
        if reply or not attachment or self._core is None:
            return b""
        try:
            rule = control_pb2.BrokerSubscription.FromString(attachment)
        except DecodeError:
            return b""
        state = self._core.heartbeat(rule.partition, rule.partitions, relay=self._is_relay(peer), key=rule.key)
        return state.SerializeToString()

    # Effects of the core.

    def _answer(self, effect: ev.Answer) -> None:
        self._clients.answer(effect)
        if self._core is not None and bool(self._core.index.groups) is not self._reaches_brokers:
            self._reach(self._context.view)

    def _takes_more(self, connection: int) -> bool | None:
        return self._clients.takes_more(connection)

    def _send_membership(self, effect: ev.SendMembership) -> None:
        self._context.links.send_control(effect.peer, encode_messages(effect.messages), effect.token)

    def _send_delivered(self, effect: ev.SendDelivered) -> None:
        answer = [signals_delivered(effect)]
        for peer in effect.peers:
            self._context.links.send_control(peer, answer)

    def _keep_traces(self, effect: ev.KeepTraces) -> None:
        if self._traces is not None:
            self._traces.put(effect.records)

    def _fenced(self, _: ev.Fenced) -> None:
        text = (
            "a router or relay refuses this gateway's reports: it took the gateway for dead, because its lease was gone "
            "and its heartbeats had stopped, or knows a newer one of its name. This gateway ends, and its clients connect "
            "again; start it again"
        )
        self._context.crash(Unavailable(text))

    # Inside.

    def _reach(self, view: View) -> None:
        """Heartbeat routers, relays and proxies; brokers while they must know which messages of shared subscriptions were taken."""
        self._reaches_brokers = self._core is not None and bool(self._core.index.groups)
        roles = ("router", "relay", "proxy", *(("broker",) if self._reaches_brokers else ()))
        nodes = [node for role in roles for node in view.of_role(role)]
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port, node.stream_port) for node in nodes)

    def _step(self, event: ev.Event | ev.SetWill | ev.EndWill) -> None:
        """Give an event of clients to the core that it is for."""
        kind = type(event)
        if kind is ev.SetWill or kind is ev.EndWill:
            self._wills.runner.step(cast(ev.SetWill | ev.EndWill, event))
            return
        self._runner.step(cast(ev.Event, event))
        if isinstance(event, ev.Opened):
            self._wills.runner.step(DeviceOpened(event.connection, event.uin, event.device))

    def _kick(self, request: str) -> None:
        kick = kick_of(request)
        if self._guard is not None:
            self._guard.kick(request)
        elif kick is not None and kick.client and not kick.user:
            self._clients.client_ids.end(kick.client, "an operator ended the session")
        if kick is not None and kick.forget and self._sessions.serves:
            self._sessions.run(self._forget(kick))

    async def _forget(self, kick: Kick) -> None:
        """Remove a client's sessions, if this gateway is the one that does it for all."""
        if await self._is_first():
            found, problem = await forget(self._sessions, self._kept, self._sessions.store, kick.client, kick.user)
            self._context.audit.write("session_forgotten", client=kick.client, user=kick.user, sessions=found, error=problem)

    async def _is_first(self) -> bool:
        """True if no other gateway registered earlier; also if that cannot be read: twice is better than not at all."""
        node = self._context.membership.node
        try:
            names = await self._context.zookeeper.children(paths.node_directory(self._context.root, "gateway", paths.NO_PARTITION))
        except PixiuError:
            return True
        registered = [replica for name in names if (replica := paths.replica_of(name)) is not None]
        return node is not None and node.replica == min(registered, default=node.replica)

    async def _sessions_page(self, query: Mapping[str, str]) -> dict[str, object]:
        if query.get("away"):
            return await away(self._kept, self._sessions.store, query)
        return await sessions(self._clients.everybody, query)

    def _end_revoked(self, request: str) -> None:
        if self._guard is not None:
            revoke(self._guard, self._context.audit, request)

    def _report_limits(self, limits: LimitReport) -> None:
        if met := limits.met(self._samples()):
            self._context.log.warning(LIMITS_MET, limits=met)

    def _look_at_digest_keys(self) -> None:
        if self._core is not None:
            self._runner.step(DigestKeysChanged(self._digest_keys.newest()))

    def _open_signal_table(self, mqtt_port: int) -> SignalTable:
        options = self._options
        name = options.signal_table_name or folder_name(self._context.root, options.mqtt_host, mqtt_port)
        table, self._signal_problem = open_table(Path(options.signal_table_dir), name, options.signal_table_mb << 20)
        if isinstance(table, SharedTable):
            self._signal_table = table
        else:
            self._context.log.warning(SIGNAL_TABLE_IN_MEMORY, text=self._signal_problem)
        return table

    def _degraded(self) -> str:
        problem = (
            self._numbers.problem or self._signal_problem or (self._signal_table.problem if self._signal_table is not None else "")
        )
        return problem or (self._traces.problem if self._traces is not None else "")

    def _digests(self, role: str) -> dict[str, str]:
        """Partition of routers or relays → digest that their maps, and brokers', show for this gateway if they equal its own."""
        partitions = self._context.view.layout.partitions(role)
        core = self._core
        sums = (core.rooms if role == "router" else core.users).own.digest if core is not None else Digest()
        return {str(partition): sums.first.shown(DigestRule(partition, partitions)) for partition in range(partitions)}

    def _is_relay(self, peer: EndpointID) -> bool | None:
        """True if a peer is a relay; None: the view does not have it, or not yet."""
        node = self._context.view.by_endpoint(peer)
        return node.role == "relay" if node is not None else None

    def _may_send(self, proxy: Node) -> bool:
        """True if a proxy passes on what the clients publish: it has their tickets, or needs none."""
        return self._tickets is None or self._tickets.is_ready(proxy.endpoint)

    def _peers_changed(self) -> None:
        view, step = self._context.view, self._runner.step
        step(ev.RoutersChanged(view.layout.partitions("router"), self._replicas(view, "router")))
        partitions = view.layout.partitions("relay") if self._clients.serves_users else 0
        relays = ev.RelaysChanged(partitions, self._replicas(view, "relay") if partitions else ())
        step(relays)
        self._wills.runner.step(relays)
        step(ev.ProxiesChanged(tuple(replace(proxy, partition=0) for proxy in self._replicas(view, "proxy"))))

    def _replicas(self, view: View, role: str) -> tuple[ev.Replica, ...]:
        """Replicas to send to, in the order of their registration; those that drain, or are doubted, only if there is no other."""
        found: list[ev.Replica] = []
        for node in view.of_role(role):
            state = self._context.links.state(node.endpoint)
            if node.state is not NodeState.INIT and state is not PeerState.DEAD and (role != "proxy" or self._may_send(node)):
                usable = node.state is NodeState.RUNNING and state is not PeerState.SUSPECT
                found.append(ev.Replica(node.endpoint, node.partition, usable))
        return tuple(found)

    def _instance_lost(self) -> None:
        text = "the lease of this gateway instance was lost with the ZooKeeper session; restart the process"
        self._context.crash(Unavailable(text))

    def _samples(self) -> dict[str, object]:
        table, core = self._signal_table, self._core
        samples: dict[str, object] = {"signal_table_shared": int(table is not None and not table.problem)}
        samples |= self._clients.samples()
        samples |= self._listeners.samples()
        samples |= self._guard.samples() if self._guard is not None else {}
        samples |= self._tickets.samples() if self._tickets is not None else {}
        samples |= self._mail.samples()
        samples |= self._retained.samples()
        samples |= self._wills.samples()
        samples |= self._sessions.samples() | self._sessions.store.samples() | self._kept.samples()
        if core is not None:
            samples |= totals(core.counters)
            samples |= totals(core.mail.counters, "mail_")
            samples |= core.samples()
        if self._traces is not None:
            samples |= self._traces.samples()
        return samples
