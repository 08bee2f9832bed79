"""One run of a role in a process, from its first port to the end.

    ports ─ ZooKeeper ─ service made ─ first view ─ prepare ─ gRPC, links, HTTP answer ─ registered Init ─ start
       ─ Running ─ (the process ends) ─ Draining ─ drain ─ unregistered ─ stop

What a process has once, for all of its roles, belongs to the `Host`.

Source: docs/architecture.md, docs/registry.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from cluster.core import log
from cluster.core.compiled import BUILD
from cluster.core.pacing import pacer_of
from cluster.core.turn import Turn
from cluster.links.api import PeerState
from cluster.links.endpoint import Endpoint
from cluster.links.local import LocalSwitch
from cluster.listeners.http import HttpServer
from cluster.listeners.server import bind_both, bind_clients
from cluster.listeners.streams import framed_calls
from cluster.metrics.host import host_samples
from cluster.metrics.metrics import LINK_WAIT, Metrics, link_samples
from cluster.metrics.received_batches import ReceivedBatches
from cluster.process.context import Context, Membership, MembershipFactory, Preparing, Service
from cluster.process.interests import SEES
from cluster.process.listeners import Listeners
from cluster.process.live_options import LiveOptions
from cluster.process.process_links import ProcessLinks
from cluster.process.registry_session import QUIET_S, RegistrySession, SharedSession
from cluster.process.views import Views
from cluster.rpc.local_streams import LocalStreams
from cluster.settings.options import (
    ClientListenerOptions,
    ClusterOptions,
    RoleOptions,
    link_options,
    partition_of,
)
from cluster.trust.audit import Audit
from pixiu.discovery.agreement import MAX_PROTOCOL, MIN_PROTOCOL
from pixiu.discovery.lacks import NO_LAYOUT, waits_for
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import ROLES
from pixiu.errors import ConfigurationError, PixiuError
from pixiu.ids import EndpointID, hex_id
from pixiu.version import __version__

CLOSE_TIMEOUT_S: Final = 10.0
"""Time limit for ending one part; after it the next one is ended."""
CONFLICT_MARGIN_S: Final = 2.0
"""Seconds beyond a session time-out for which the node of a killed process with other settings may stay in the registry."""
REGISTRY_TIMEOUT_S: Final = 5.0
"""Seconds to wait for ZooKeeper while ending; without it the node ends with the session."""
MAX_OPERATOR: Final = 200
"""Maximum length of the name of an operator who asks for a drain, characters."""

OptionsT = TypeVar("OptionsT", bound=RoleOptions)


class Owner(Protocol):
    """The process that a role runs in: `cluster.process.host.Host`."""

    turn: Turn
    """Time budget of the process's clients."""
    switch: LocalSwitch
    """Links between the roles of the process."""
    local_streams: LocalStreams
    """Framed streams between the roles of the process."""
    started_ms: int
    """Start of the process, Unix milliseconds."""

    @property
    def ending(self) -> bool:
        """True once the process ends."""

    def end(self) -> None:
        """End the process: every role of it."""

    def registered(self) -> None:
        """Note that a role has a place in the registry, which a hanging loop must give up."""

    def samples(self) -> dict[str, object]:
        """Return metrics of the process."""


class RoleRun(Generic[OptionsT]):
    """One run of a role. It is made, and `run`, in the context of the role's log identity (`log.act_as`).

    Args:
        identity: see `log.Identity`.
        session: with the registry.
        owner: the process.
    """

    def __init__(
        self,
        role: str,
        cluster: ClusterOptions,
        options: OptionsT,
        identity: log.Identity,
        session: SharedSession,
        owner: Owner,
    ) -> None:
        self._role, self._cluster, self._options, self._identity, self._owner = role, cluster, options, identity, owner
        self._endpoint_id = EndpointID(secrets.randbits(63) or 1)
        self._log = log.get_logger()
        self._metrics = Metrics(role, partition_of(options))
        self._audit = Audit(options.audit_folder, {"role": role, "partition": partition_of(options)}, self._audited)
        self._listeners = Listeners(role, cluster, options, self._audit, owner.turn, lambda: self._links.ring, self._stream_failed)
        self._framed = framed_calls(role, self._endpoint_id, cluster, self._listeners.tls)
        self._framed.local = owner.local_streams
        self._received = received = ReceivedBatches(self._metrics)
        self._http = HttpServer(self._metrics, self._health, received.hot)
        self._registry = RegistrySession(role, options.registry, session, self._audit)
        self._views = Views(role, self._registry.zookeeper, self._registry.address.root, options.poll_interval_s, self._audit)
        self._links = ProcessLinks(role, cluster, self._views, self._audit, received.note)
        self._closers: list[tuple[str, Callable[[], Awaitable[object]]]] = []
        self._leaving = asyncio.Event()
        self._error: BaseException | None = None
        self._state = "Starting"
        self._loop_errors = 0
        self._live = LiveOptions(role, cluster, options, self._audit)
        self._service: Service | None = None
        self._membership: Membership | None = None

    @property
    def running(self) -> bool:
        """True while it serves: it has started, and has not crashed."""
        return self._state == NodeState.RUNNING.value and self._error is None

    def leave(self) -> None:
        """End this run: a start is broken off, a role that serves drains, one that has crashed hands nothing over."""
        self._leaving.set()

    async def run(self, service_factory: Callable[[Context[OptionsT]], Service], membership: MembershipFactory) -> None:
        """Start, serve until `leave`, end. Raises what the start or a crash raised."""
        starting = asyncio.create_task(self._start(service_factory, membership))
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await leaving
                await self._drain()
            else:
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
        finally:
            leaving.cancel()
            await self._close()
        if self._error is not None:
            raise self._error

    async def _start(self, service_factory: Callable[[Context[OptionsT]], Service], membership: MembershipFactory) -> None:
        self._closers.append(("audit", self._close_audit))
        self._audit.write("start", version=__version__, pid=os.getpid(), wire_hash=self._cluster.wire_hash())
        port, http_port = await self._bind()
        await self._registry.connect()
        self._closers.append(("zookeeper", self._registry.close))
        self._closers.append(("streams", self._listeners.streams.close))
        self._membership = membership(
            self._registry.zookeeper,
            self._registry.address.root,
            on_registered=self._registered,
            conflict_wait_s=self._options.session_timeout_ms / 1000 + CONFLICT_MARGIN_S,
            on_drain=self._drain_asked,
            on_settings=lambda data: self._live.change(data, self._service),
        )
        endpoint = self._links.endpoint
        assert endpoint is not None
        self._service = service = service_factory(self._context(endpoint, self._membership))
        self._closers.append(("discovery", self._views.discovery.close))
        self._closers.append(("service", self._stop_service))
        await self._views.discovery.start()
        self._check_partition()
        await self._listeners.bind_streams(self._options, port)
        self._metrics.collect_from(self._listeners.streams.samples)
        node = self._node(port, http_port)
        if isinstance(service, Preparing):
            node = await service.prepare(node)
        self._links.handler.service = service
        for server in self._listeners.servers:
            await server.start()
        await self._listeners.streams.start()
        self._listeners.streams.serve_locally(self._owner.local_streams, self._endpoint_id)
        pacer = pacer_of(asyncio.get_running_loop())
        if pacer is not None:
            endpoint.pace(pacer.be_patient, pacer.hurry)
        await endpoint.start()
        self._closers.append(("membership", self._unregister))
        self._state = NodeState.INIT.value
        node = await self._membership.register(node)
        self._registered(node)
        self._owner.registered()
        self._views.give_to(service)
        says = asyncio.create_task(self._say_what_it_waits_for())
        try:
            await service.start()
        finally:
            says.cancel()
        await endpoint.introduced()
        await self._membership.set_state(NodeState.RUNNING)
        self._state = NodeState.RUNNING.value
        for server in self._listeners.servers:
            await server.set_serving(True)
        self._log.info(
            log.RUNNING,
            build=str(BUILD),
            address=node.address,
            http_port=http_port,
            **({"client_address": node.client_address} if node.client_port else {}),
        )

    async def _say_what_it_waits_for(self) -> None:
        while True:
            await asyncio.sleep(QUIET_S)
            if missing := self._waits_for():
                self._log.warning(log.WAITING, part="members", missing="; ".join(missing))

    def _waits_for(self) -> list[str]:
        """Describe what keeps this process from Running; empty once it runs."""
        node = self._membership.node if self._membership is not None else None
        return (
            waits_for(self._views.discovery.view, node, SEES.get(self._role, ROLES))
            if node is not None and node.state is NodeState.INIT
            else []
        )

    def _check_partition(self) -> None:
        """Check the partition's number. Without a layout any is allowed, because the number of partitions is unknown."""
        if not self._views.discovery.view.layout.version:
            self._log.warning(log.WAITING, part="layout", missing=NO_LAYOUT)
        partition, layout = partition_of(self._options), self._views.discovery.view.layout.roles.get(self._role)
        if layout is not None and partition >= layout.next:
            raise ConfigurationError(
                f"partition = {partition}: the layout at {self._options.registry} has {layout.n} of {self._role}, from 0 on"
            )

    async def _bind(self) -> tuple[int, int]:
        options = self._options
        links = link_options(self._cluster, options)
        self._links.ring = self._cluster.key_ring()
        links.validate()

        def new_endpoint() -> Endpoint:
            return self._links.new_endpoint(self._endpoint_id, links, self._framed, self._owner.switch)

        endpoint, port = await bind_both(options, self._listeners.server, new_endpoint)
        self._links.endpoint = endpoint
        if self._links.ring is not None:
            follows = asyncio.create_task(self._links.follow_keys(endpoint))
            self._closers.append(("keys", lambda: _cancelled(follows)))
        self._closers.append(("links", endpoint.close))
        self._closers.append(("grpc", lambda: self._listeners.server.grpc.stop(1.0)))
        endpoint.attach(self._listeners.streams)
        self._closers.append(("http", self._http.close))
        # If the given port is the last one, validate() has required http_port.
        wanted = options.http_port or min(port + 1, 65_535)
        http_port = await self._http.bind(options.host, wanted, fallback=options.port == 0 and options.http_port == 0)
        if self._listeners.clients is not None and isinstance(options, ClientListenerOptions):
            client_server = self._listeners.clients
            self._listeners.client_port = bind_clients(options, port, client_server)
            self._closers.append(("clients", lambda: client_server.grpc.stop(1.0)))
        for handshakes in self._listeners.handshakes.values():
            handshakes.start()
            self._closers.append(("handshakes", handshakes.close))
        endpoint.tell_waits(self._metrics.histogram("pixiu_link_wait_seconds", LINK_WAIT).add)
        self._metrics.collect_from(lambda: link_samples(*endpoint.stats_by_peer(), self._links.name_of))
        self._metrics.collect_from(self._own_samples)
        self._metrics.collect_from(self._http.stats)
        self._metrics.collect_from(self._owner.samples)
        self._metrics.collect_in_thread(lambda: host_samples(self._options.data_dir))
        return port, http_port

    def _context(self, endpoint: Endpoint, membership: Membership) -> Context[OptionsT]:
        return Context(
            role=self._role,
            options=self._options,
            cluster=self._cluster,
            endpoint_id=self._endpoint_id,
            log=self._log,
            links=endpoint,
            server=self._listeners.server.grpc,
            membership=membership,
            zookeeper=self._registry.zookeeper,
            root=self._registry.address.root,
            metrics=self._metrics,
            current_view=lambda: self._views.discovery.view,
            crash=self._crash,
            layout_noticed=self._views.layout_noticed,
            look_again=self._views.look_again,
            end_session=self._registry.end_soon,
            audit=self._audit,
            client_server=self._listeners.clients.grpc if self._listeners.clients is not None else None,
            streams=self._listeners.streams,
            framed=self._framed,
            client_tls=self._listeners.client_tls,
            client_called=self._listeners.handshakes["clients"].called,
            hot_users=self._received.users,
            pages=self._http.pages,
            queries=self._http.queries,
            turn=self._owner.turn,
            tls=self._listeners.tls,
        )

    def _node(self, port: int, http_port: int) -> Node:
        return Node(
            role=self._role,
            partition=partition_of(self._options),
            replica=-1,
            state=NodeState.INIT,
            host=self._options.address_host,
            port=port,
            http_port=http_port,
            endpoint=self._endpoint_id,
            incarnation=0,
            version=__version__,
            wire_hash=self._cluster.wire_hash(),
            started_ms=self._owner.started_ms,
            pid=os.getpid(),
            udp_host=self._options.advertised_udp_host,
            udp_port=self._options.advertised_udp_port,
            client_host=self._options.client_address_host if isinstance(self._options, ClientListenerOptions) else "",
            client_port=self._listeners.client_port,
            client_tls=self._listeners.client_tls is not None,
            tls=self._listeners.tls is not None,
            protocol_min=MIN_PROTOCOL,
            protocol_max=MAX_PROTOCOL,
            login=self._registry.login,
            stream_port=self._listeners.stream_port,
        )

    async def _drain(self) -> None:
        """Announce that this process leaves, then let the service hand over."""
        self._state = NodeState.DRAINING.value
        for server in self._listeners.servers:
            await server.set_serving(False)
        self._log.info(log.DRAINING, timeout_s=self._options.drain_timeout_s)
        assert self._membership is not None
        assert self._service is not None
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                told = await self._membership.set_state(NodeState.DRAINING)
        except TimeoutError:
            told = False
        if not told:
            self._log.warning(
                log.DRAIN_FAILED, part="registry", error="ZooKeeper did not answer; other processes were not notified"
            )
        if self._error is not None:
            return
        try:
            async with asyncio.timeout(self._options.drain_timeout_s):
                await self._service.drain()
        except TimeoutError:
            self._log.warning(
                log.DRAIN_FAILED, part="service", error=f"not done after drain_timeout_s = {self._options.drain_timeout_s}"
            )
        except Exception as error:  # a failed hand-over must not keep the process from ending
            self._log.error(log.DRAIN_FAILED, part="service", error=repr(error), exc_info=True)

    def _registered(self, node: Node) -> None:
        """Handle a registration of the node: at the start, or again with another replica ID after a lost session."""
        self._identity.bind(replica=node.replica)
        self._log.info(
            log.REGISTERED,
            state=node.state.value,
            address=node.address,
            http_port=node.http_port,
            endpoint=hex_id(node.endpoint),
            incarnation=hex_id(node.incarnation),
        )

    async def _stop_service(self) -> None:
        assert self._service is not None
        try:
            await self._service.stop()
        finally:
            self._links.handler.service = None

    async def _unregister(self) -> None:
        assert self._membership is not None
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                gone = await self._membership.unregister()
        except TimeoutError:
            gone = False
        if not gone:
            self._log.warning(log.STOP_FAILED, part="registry", error="ZooKeeper did not answer; the node goes with the session")

    async def _close(self) -> None:
        """End every part that was started, the last one first; one that fails or hangs does not keep the others."""
        self._views.stop()
        while self._closers:
            part, closer = self._closers.pop()
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await closer()
            except TimeoutError:
                self._log.warning(log.STOP_FAILED, part=part, error=f"not done after {CLOSE_TIMEOUT_S} s")
            except Exception as error:
                self._log.error(log.STOP_FAILED, part=part, error=repr(error), exc_info=not isinstance(error, PixiuError))
        self._state = "Stopped"

    def _audited(self, kind: str, fields: Mapping[str, object]) -> None:
        """Log what is audited if there is no folder for it, and log a failure of the folder's disk."""
        if kind == "audit_failed":
            if log.once_per(60, log.AUDIT):
                self._log.error(log.AUDIT, kind=kind, **fields)
        elif self._options.audit_folder is None:
            self._log.info(log.AUDIT, kind=kind, **fields)

    async def _close_audit(self) -> None:
        self._audit.write("stop", state=self._state)
        await self._audit.flush()
        self._audit.close()

    def _stream_failed(self, method: str, error: Exception) -> None:
        """Log and count the failure of a framed stream's handler."""
        self._loop_errors += 1
        if log.once_per(10, (log.LOOP_ERROR, method)):
            self._log.error(log.LOOP_ERROR, text=method, error=repr(error), exc_info=error)

    def _crash(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._owner.end()

    def _drain_asked(self, request: bytes) -> None:
        """Handle a request to drain, the name of the operator who asks, which acts as SIGTERM; empty: there is none."""
        if request and not self._owner.ending:
            by = request.decode(errors="replace")[:MAX_OPERATOR]
            self._log.info(log.DRAIN_ASKED, by=by)
            self._audit.write("drain", operator=by)
            self._owner.end()

    def note_loop_lag(self, seconds: float) -> None:
        """Count the delay of a turn of the loop."""
        self._metrics.note_loop_lag(seconds)

    def loop_error(self, context: Mapping[str, Any]) -> None:
        """Log and count the failure of a callback or of a task that nobody awaits; as asyncio describes it."""
        self._loop_errors += 1
        if log.once_per(10, (log.LOOP_ERROR, context.get("message"))):
            error = context.get("exception")
            self._log.error(log.LOOP_ERROR, text=context.get("message"), error=repr(error), exc_info=error)

    def _own_samples(self) -> dict[str, object]:
        return {
            "loop_errors_total": self._loop_errors,
            **self._views.samples(),
            **self._links.counts,
            **self._links.handler.counts,
            **self._listeners.samples(),
            "registry_connected": int(self._registry.zookeeper.connected),
            "running": int(self._state == NodeState.RUNNING.value),
            "audit_failures_total": self._audit.failures,
            "settings_version": self._live.settings.version,
            "settings_refused": len(self._live.effective.refused),
        }

    def _health(self) -> tuple[bool, dict[str, Any]]:
        peers = dict.fromkeys((state.value for state in PeerState), 0)
        if self._links.endpoint is not None:
            for state, count in self._links.endpoint.peer_states().items():
                peers[state.value] = count
        node = self._membership.node if self._membership is not None else None
        said: dict[str, Any] = {
            "role": self._role,
            "partition": partition_of(self._options),
            "replica": node.replica if node is not None else -1,
            "endpoint": hex_id(self._endpoint_id),
            "state": self._state,
            "waits_for": self._waits_for(),
            "version": __version__,
            "build": str(BUILD),
            "unix_ms": time.time_ns() // 1_000_000,
            "data_dir": str(Path(self._options.data_dir).absolute()) if self._options.data_dir else "",
            "layout_version": self._views.discovery.view.layout.version,
            "layout_refused": dict(self._views.discovery.refused),
            "settings": {
                "version": self._live.settings.version,
                "taken": dict(self._live.effective.taken),
                "refused": dict(self._live.effective.refused),
            },
            "nodes": len(self._views.discovery.view.nodes),
            "registry_connected": self._registry.zookeeper.connected,
            "keys": self._links.ring.name() if self._links.ring is not None else "none",
            "peers": peers,
            "registry_login": self._registry.zookeeper.says_of_login(),
            "certificates": self._listeners.certificate_problem() or ("used" if self._listeners.tls is not None else "none"),
            "streams": {"port": self._listeners.stream_port, "open": self._listeners.streams.open},
            "client_tls": "used" if self._listeners.client_tls is not None else "none",
            "insecure_listeners": self._options.insecure_listeners(),
            "service": self._service.health() if self._service is not None else {},
        }
        return self._state == NodeState.RUNNING.value, said


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
