"""Runs one role as a process: from the command line to the exit code.

    options ─ log ─ ports ─ ZooKeeper ─ service made ─ first view ─ prepare ─ gRPC, links, HTTP answer ─ registered Init ─ start
       ─ Running ─ (SIGTERM, SIGINT or `pixiu drain`) ─ Draining ─ drain ─ unregistered ─ stop ─ exit
                └ a second signal: exit at once

Exit codes: 0 in order, 1 a crash (a traceback in the log only when it is a bug), 2 wrong options or a missing environment (a taken
port, no ZooKeeper), 128 + the signal's number at a second signal.

Source: docs/architecture.md, docs/registry.md, docs/promises.md, "Failure rules" 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from cluster.core import log
from cluster.core.compiled import BUILD
from cluster.core.layout_notices import LayoutRefresh
from cluster.core.pacing import new_loop, pacer_of
from cluster.core.turn import Turn
from cluster.links.api import PeerState
from cluster.links.endpoint import Endpoint
from cluster.listeners.call_guard import CallGuard
from cluster.listeners.clients import ClientRoleOptions
from cluster.listeners.handler import Handler
from cluster.listeners.handshakes import Handshakes
from cluster.listeners.http import HttpServer
from cluster.listeners.link_table import may_say
from cluster.listeners.request_limits import ParseInTurn
from cluster.listeners.server import Server, bind_both, bind_clients
from cluster.listeners.streams import framed_calls, framed_listener
from cluster.metrics.host import host_samples
from cluster.metrics.metrics import LINK_WAIT, Metrics, link_samples
from cluster.metrics.received_batches import ReceivedBatches
from cluster.process.collector import Collector
from cluster.process.context import Context, Membership, MembershipFactory, Preparing, Service
from cluster.process.interests import SEES
from cluster.process.watchdog import Watchdog
from cluster.settings import command
from cluster.settings.live_settings import Effective, Reconfigurable, Settings, changed, effective
from cluster.settings.options import (
    ClientListenerOptions,
    ClusterOptions,
    PacedOptions,
    PartitionedOptions,
    RoleOptions,
    example_toml,
    is_loopback,
    link_options,
    load_options,
)
from cluster.trust.audit import Audit
from cluster.trust.key_ring import KeyRing
from pixiu.discovery import login as logins
from pixiu.discovery.agreement import MAX_PROTOCOL, MIN_PROTOCOL
from pixiu.discovery.lacks import NO_LAYOUT, waits_for
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import NO_PARTITION, ROLES
from pixiu.discovery.target import RegistryAddress, parse_address
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, MalformedData, PixiuError, RegistryUnavailable, RemoteError
from pixiu.ids import EndpointID, hex_id
from pixiu.rpc import tls
from pixiu.version import __version__

EXIT_OK: Final = 0
EXIT_CRASH: Final = 1
EXIT_ENVIRONMENT: Final = 2
PRIVATE_UMASK: Final = 0o077
"""Only the owner may read the files of a process with a data folder."""
CLOSE_TIMEOUT_S: Final = 10.0
"""Time limit for ending one part; after it the next one is ended."""
QUIET_S: Final = 3.0
"""Time after which a start that waits for the registry, or for members of the cluster, logs it; for members repeatedly."""
CONFLICT_MARGIN_S: Final = 2.0
"""Seconds beyond a session time-out for which the node of a killed process with other settings may stay in the registry."""
KEYS_S: Final = 1.0
"""Interval of checking the keys of datagrams."""
STRANGER_S: Final = 1.0
"""Interval between two readings of the registry because of unknown senders."""
STRANGER_POLL_S: Final = 0.05
REGISTRY_TIMEOUT_S: Final = 5.0
"""Seconds to wait for ZooKeeper while ending; without it the node ends with the session."""
MAX_OPERATOR: Final = 200
"""Maximum length of the name of an operator who asks for a drain, characters."""

OptionsT = TypeVar("OptionsT", bound=RoleOptions)


class Process(Generic[OptionsT]):
    """One run of a role."""

    def __init__(
        self,
        role: str,
        cluster: ClusterOptions,
        options: OptionsT,
        service_factory: Callable[[Context[OptionsT]], Service],
        membership: MembershipFactory,
    ) -> None:
        self._role, self._cluster, self._options = role, cluster, options
        self._service_factory, self._membership_factory = service_factory, membership
        self._endpoint_id = EndpointID(secrets.randbits(63) or 1)
        self._log = log.get_logger()
        self._metrics = Metrics(role, _partition(options))
        self._tls = cluster.tls(role)
        tls.use(self._tls)
        self._audit = Audit(options.audit_folder, {"role": role, "partition": _partition(options)}, self._audited)
        self._handshakes = {listener: Handshakes(listener, self._audit) for listener in ("cluster", "clients")}
        self._listener_tls = options.listener_tls()
        self._turn = Turn(time.monotonic, asyncio.get_running_loop().call_soon)
        parsing = ParseInTurn(self._turn)
        self._client_server = self._new_client_server(parsing) if isinstance(options, ClientListenerOptions) else None
        self._client_port = self._stream_port = 0
        self._layout_audited = -1
        self._ring: KeyRing | None = None
        cluster_listener = self._handshakes["cluster"]
        self._guard = CallGuard(role, self._tls, self._audit, cluster_listener.called) if self._tls is not None else None
        with cluster_listener.watching(self._tls is not None):
            self._server = Server(
                cluster,
                options.reflection,
                [self._guard, parsing] if self._guard is not None else [parsing],
                self._tls.server_credentials(cluster_listener.begins) if self._tls is not None else None,
            )
        self._streams = framed_listener(role, cluster, self._tls, self._guard, lambda: self._ring, self._stream_failed)
        self._framed = framed_calls(role, self._endpoint_id, cluster)
        self._received = received = ReceivedBatches(self._metrics)
        self._http = HttpServer(self._metrics, self._health, received.hot)
        self._handler = Handler(received.note, self._refuses)
        self._address = parse_address(options.registry)
        logins.use(cluster.login(role), role)
        self._zookeeper = ZooKeeper(
            self._address,
            session_timeout_s=options.session_timeout_ms / 1000,
            connect_timeout_s=options.connect_timeout_s,
            further_roots=(cluster.router_root,) if cluster.router_root else (),
        )
        self._discovery = Discovery(
            self._zookeeper, self._address.root, self._new_view, options.poll_interval_s, roles=SEES.get(role, ROLES)
        )
        self._handler.on_dead, self._handler.on_alive = self._discovery.mark_dead, self._discovery.mark_alive
        self._watchdog = Watchdog(options.session_timeout_ms / 2000, self._stalled, self._turns_again, self._metrics.note_loop_lag)
        self._closers: list[tuple[str, Callable[[], Awaitable[object]]]] = []
        self._stopping = asyncio.Event()
        self._error: BaseException | None = None
        self._state = "Starting"
        self._collector = Collector()
        self._takes_views = False
        self._refresh = LayoutRefresh()
        self._counts = {
            "view_failures_total": 0,
            "loop_errors_total": 0,
            "layout_refreshes_total": 0,
            "links_strangers_total": 0,
            "links_role_refused_total": 0,
        }
        self._settings = Settings()
        self._effective = Effective(cluster, options, {}, {})
        self._endpoint: Endpoint | None = None
        self._service: Service | None = None
        self._membership: Membership | None = None

    def _new_client_server(self, parsing: ParseInTurn) -> Server:
        handshakes = self._handshakes["clients"]
        shown = self._listener_tls.server_credentials(handshakes.begins) if self._listener_tls is not None else None
        logs_in = isinstance(self._options, ClientRoleOptions) and bool(self._options.access_file)
        with handshakes.watching(shown is not None and logs_in):
            return Server(
                self._cluster, interceptors=[parsing], credentials=shown, of_clients=True, beside_mqtt=self._role == "gateway"
            )

    async def run(self) -> int:
        """Start, serve until a signal or a crash, end. Returns the exit code; raises what the start or a crash raised."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_error)
        self._collector.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await stopping
                await self._drain()
            else:
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
        finally:
            stopping.cancel()
            await self._close()
            self._collector.stop()
        if self._error is not None:
            raise self._error
        self._log.info(log.STOPPED)
        return EXIT_OK

    async def _start(self) -> None:
        self._closers.append(("audit", self._close_audit))
        self._audit.write("start", version=__version__, pid=os.getpid(), wire_hash=self._cluster.wire_hash())
        port, http_port = await self._bind()
        await self._connect()
        self._closers.append(("zookeeper", self._zookeeper.close))
        self._closers.append(("streams", self._streams.close))
        follows = asyncio.create_task(self._follow_login())
        self._closers.append(("registry credentials", lambda: _cancelled(follows)))
        self._membership = self._membership_factory(
            self._zookeeper,
            self._address.root,
            on_registered=self._registered,
            conflict_wait_s=self._options.session_timeout_ms / 1000 + CONFLICT_MARGIN_S,
            on_drain=self._drain_asked,
            on_settings=self._settings_changed,
        )
        assert self._endpoint is not None
        self._service = service = self._service_factory(self._context(self._endpoint, self._membership))
        self._closers.append(("discovery", self._discovery.close))
        self._closers.append(("service", self._stop_service))
        await self._discovery.start()
        self._check_partition()
        await self._bind_streams(port)
        node = self._node(port, http_port)
        if isinstance(service, Preparing):
            node = await service.prepare(node)
        self._handler.service = service
        for server in self._servers():
            await server.start()
        await self._streams.start()
        pacer = pacer_of(asyncio.get_running_loop())
        if pacer is not None:
            self._endpoint.pace(pacer.be_patient, pacer.hurry)
            self._metrics.collect_from(lambda: {"loop_rests_total": pacer.rests})
        await self._endpoint.start()
        self._closers.append(("membership", self._unregister))
        self._state = NodeState.INIT.value
        node = await self._membership.register(node)
        self._registered(node)
        self._watchdog.start()
        self._takes_views = True
        self._give_view(self._discovery.view)
        says = asyncio.create_task(self._say_what_it_waits_for())
        try:
            await service.start()
        finally:
            says.cancel()
        await self._endpoint.introduced()
        await self._membership.set_state(NodeState.RUNNING)
        self._state = NodeState.RUNNING.value
        for server in self._servers():
            await server.set_serving(True)
        self._log.info(
            log.RUNNING,
            build=str(BUILD),
            address=node.address,
            http_port=http_port,
            **({"client_address": node.client_address} if node.client_port else {}),
        )

    def _servers(self) -> list[Server]:
        return [self._server] if self._client_server is None else [self._server, self._client_server]

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        waits = loop.call_later(QUIET_S, lambda: self._log.info(log.WAITING, part="registry", registry=self._options.registry))
        try:
            await self._zookeeper.connect()
        finally:
            waits.cancel()
        if self._zookeeper.logged_in_as and await self._zookeeper.access(self._address.root) is None:
            self._log.warning(
                log.LISTENER_OPEN_TO_ALL, listener=f"the registry at {self._address}: `pixiu registry secure` guards it"
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
            waits_for(self._discovery.view, node, SEES.get(self._role, ROLES))
            if node is not None and node.state is NodeState.INIT
            else []
        )

    def _check_partition(self) -> None:
        """Check the partition's number. Without a layout any is allowed, because the number of partitions is unknown."""
        if not self._discovery.view.layout.version:
            self._log.warning(log.WAITING, part="layout", missing=NO_LAYOUT)
        partition, layout = _partition(self._options), self._discovery.view.layout.roles.get(self._role)
        if layout is not None and partition >= layout.next:
            raise ConfigurationError(
                f"partition = {partition}: the layout at {self._options.registry} has {layout.n} of {self._role}, from 0 on"
            )

    async def _bind(self) -> tuple[int, int]:
        options = self._options
        links = link_options(self._cluster, options)
        self._ring = self._cluster.key_ring()
        links.validate()

        def new_endpoint() -> Endpoint:
            return Endpoint(
                self._endpoint_id,
                links,
                self._handler,
                layout_version=self._layout_version,
                on_warning=self._link_warning,
                udp_address_of=self._udp_address_of,
                knows=self._knows,
                ring=self._ring,
                role=self._role,
                framed=self._framed,
            )

        self._endpoint, port = await bind_both(options, self._server, new_endpoint)
        if self._ring is not None:
            follows = asyncio.create_task(self._follow_keys(self._endpoint))
            self._closers.append(("keys", lambda: _cancelled(follows)))
        self._closers.append(("links", self._endpoint.close))
        self._closers.append(("grpc", lambda: self._server.grpc.stop(1.0)))
        self._endpoint.attach(self._streams)
        self._closers.append(("http", self._http.close))
        # If the given port is the last one, validate() has required http_port.
        wanted = options.http_port or min(port + 1, 65_535)
        http_port = await self._http.bind(options.host, wanted, fallback=options.port == 0 and options.http_port == 0)
        if self._client_server is not None and isinstance(options, ClientListenerOptions):
            client_server = self._client_server
            self._client_port = bind_clients(options, port, client_server)
            self._closers.append(("clients", lambda: client_server.grpc.stop(1.0)))
        for handshakes in self._handshakes.values():
            handshakes.start()
            self._closers.append(("handshakes", handshakes.close))
        endpoint = self._endpoint
        endpoint.tell_waits(self._metrics.histogram("pixiu_link_wait_seconds", LINK_WAIT).add)
        self._metrics.collect_from(lambda: link_samples(*endpoint.stats_by_peer(), self._peer_name))
        self._metrics.collect_from(self._own_samples)
        self._metrics.collect_from(self._http.stats)
        self._metrics.collect_from(self._collector.samples)
        self._metrics.collect_in_thread(lambda: host_samples(self._options.data_dir))
        return port, http_port

    async def _bind_streams(self, port: int) -> None:
        options = self._options
        wanted = options.stream_port or min(port + 3, 65_535)
        chosen = bool(options.stream_port)
        self._stream_port = await self._streams.bind(options.host, wanted, fallback=not chosen, reuse=chosen or bool(options.port))
        self._metrics.collect_from(self._streams.samples)

    def _context(self, endpoint: Endpoint, membership: Membership) -> Context[OptionsT]:
        return Context(
            role=self._role,
            options=self._options,
            cluster=self._cluster,
            endpoint_id=self._endpoint_id,
            log=self._log,
            links=endpoint,
            server=self._server.grpc,
            membership=membership,
            zookeeper=self._zookeeper,
            root=self._address.root,
            metrics=self._metrics,
            current_view=lambda: self._discovery.view,
            crash=self._crash,
            layout_noticed=self._layout_noticed,
            look_again=self._look_again,
            end_session=self._end_session_soon,
            audit=self._audit,
            client_server=self._client_server.grpc if self._client_server is not None else None,
            streams=self._streams,
            framed=self._framed,
            client_tls=self._listener_tls,
            client_called=self._handshakes["clients"].called,
            hot_users=self._received.users,
            turn=self._turn,
        )

    def _node(self, port: int, http_port: int) -> Node:
        return Node(
            role=self._role,
            partition=_partition(self._options),
            replica=-1,
            state=NodeState.INIT,
            host=self._options.address_host,
            port=port,
            http_port=http_port,
            endpoint=self._endpoint_id,
            incarnation=0,
            version=__version__,
            wire_hash=self._cluster.wire_hash(),
            started_ms=time.time_ns() // 1_000_000,
            pid=os.getpid(),
            udp_host=self._options.advertised_udp_host,
            udp_port=self._options.advertised_udp_port,
            client_host=self._options.client_address_host if isinstance(self._options, ClientListenerOptions) else "",
            client_port=self._client_port,
            client_tls=self._listener_tls is not None,
            tls=self._tls is not None,
            protocol_min=MIN_PROTOCOL,
            protocol_max=MAX_PROTOCOL,
            login=" ".join(self._zookeeper.logged_in_as),
            stream_port=self._stream_port,
        )

    async def _drain(self) -> None:
        """Announce that this process leaves, then let the service hand over."""
        self._state = NodeState.DRAINING.value
        for server in self._servers():
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
        log.bind_identity(replica=node.replica)
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
            self._handler.service = None

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
        self._takes_views = False
        self._watchdog.stop()
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

    def _new_view(self, view: View) -> None:
        if self._takes_views:
            self._give_view(view)

    def _give_view(self, view: View) -> None:
        assert self._service is not None
        if view.layout.version != self._layout_audited:
            self._layout_audited = view.layout.version
            roles = {role: [found.n, found.next, found.replicas] for role, found in sorted(view.layout.roles.items())}
            self._audit.write("layout", version=view.layout.version, roles=roles)
        for text in self._discovery.refused.values():
            if log.once_per(3600, (log.LAYOUT_REFUSED, text)):
                self._log.error(log.LAYOUT_REFUSED, text=text)
                self._audit.write("layout_refused", text=text)
        try:
            self._service.on_view(view)
        except Exception as error:  # the next view is another chance; the last good one stays
            self._counts["view_failures_total"] += 1
            if log.once_per(60, log.VIEW_FAILED):
                self._log.error(log.VIEW_FAILED, error=repr(error), exc_info=True)

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

    def _link_warning(self, event: str, **fields: Any) -> None:
        if log.once_per(60, (event, fields.get("peer"))):
            self._log.warning(event, **fields)

    def _layout_version(self) -> int:
        return self._discovery.view.layout.version

    def _layout_noticed(self, version: int) -> None:
        delay = self._refresh.noticed(version, self._layout_version(), random.random(), time.monotonic())
        if delay is not None:
            self._counts["layout_refreshes_total"] += 1
            self._discovery.poll_within(delay)

    def _udp_address_of(self, endpoint: EndpointID) -> tuple[str, int] | None:
        node = self._discovery.view.by_endpoint(endpoint)
        return node.udp_address if node is not None else None

    async def _follow_keys(self, endpoint: Endpoint) -> None:
        """Take new keys when they are in the folder; if it is unreadable, the former ones stay in use."""
        while True:
            await asyncio.sleep(KEYS_S)
            try:
                found = await asyncio.to_thread(self._cluster.key_ring)
            except ConfigurationError as error:
                if log.once_per(60, log.KEYS):
                    self._log.error(log.KEYS, error=str(error))
                continue
            if found is not None and self._ring is not None and not found.same_as(self._ring):
                self._ring = found
                endpoint.set_ring(found)
                self._log.info(log.KEYS, ring=found.name())
                self._audit.write("keys", ring=found.name())

    async def _follow_login(self) -> None:
        """Log in with new credentials when they are in the file; if it is unusable, the former ones stay in use."""
        while True:
            await asyncio.sleep(KEYS_S)
            try:
                if await self._zookeeper.log_in_again():
                    self._log.info(log.LOGIN)
                    self._audit.write("registry_login")
            except (ConfigurationError, RemoteError) as error:
                if log.once_per(60, log.LOGIN):
                    self._log.error(log.LOGIN, error=str(error))

    def _role_of(self, endpoint: EndpointID) -> str:
        """Return the role of a process, from its link or from the view; empty for a stranger."""
        role = self._endpoint.role_of(endpoint) if self._endpoint is not None else ""
        if role:
            return role
        node = self._discovery.view.by_endpoint(endpoint)
        return node.role if node is not None else ""

    def _knows(self, endpoint: EndpointID) -> bool:
        """Return True if a sender belongs to the cluster. A stranger may have just arrived: the registry is read again soon."""
        if self._cluster.guests or self._role_of(endpoint):
            return True
        self._counts["links_strangers_total"] += 1
        self._look_again()
        return False

    def _look_again(self) -> None:
        if self._takes_views and log.once_per(STRANGER_S, "stranger"):
            self._discovery.poll_within(STRANGER_POLL_S)

    def _refuses(self, endpoint: EndpointID, what: str) -> bool:
        role = self._role_of(endpoint)
        if may_say(what, role, self._role) or (not role and self._cluster.guests):
            return False
        self._counts["links_role_refused_total"] += 1
        self._audit.write_limited("link_refused", f"{what} {role}", what=what, sender=role, endpoint=hex_id(endpoint))
        return True

    def _stream_failed(self, method: str, error: Exception) -> None:
        """Log and count the failure of a framed stream's handler."""
        self._counts["loop_errors_total"] += 1
        if log.once_per(10, (log.LOOP_ERROR, method)):
            self._log.error(log.LOOP_ERROR, text=method, error=repr(error), exc_info=error)

    def _crash(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._stopping.set()

    def _signalled(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            self._log.warning(log.STOPPED_AT_ONCE, signal=number.name)
            os._exit(128 + number)
        self._stopping.set()

    def _drain_asked(self, request: bytes) -> None:
        """Handle a request to drain, the name of the operator who asks, which acts as SIGTERM; empty: there is none."""
        if request and not self._stopping.is_set():
            by = request.decode(errors="replace")[:MAX_OPERATOR]
            self._log.info(log.DRAIN_ASKED, by=by)
            self._audit.write("drain", operator=by)
            self._stopping.set()

    def _settings_changed(self, data: bytes) -> None:
        """Apply new settings from the registry; empty: none. Unreadable ones change nothing."""
        try:
            settings = Settings.from_json(data) if data else Settings()
        except MalformedData as error:
            self._log.error(log.SETTINGS_REFUSED, error=str(error))
            return
        if settings.version != self._settings.version:
            what = changed(self._settings.values, settings.values)
            self._audit.write("settings", version=settings.version, operator=settings.operator, settings=what)
        before = self._effective
        self._settings = settings
        self._effective = now = effective(self._role, self._cluster, self._options, settings)
        if now.refused and now.refused != before.refused:
            self._log.error(log.SETTINGS_REFUSED, version=settings.version, settings=dict(now.refused))
        if now.options == before.options and now.cluster == before.cluster:
            return
        log.set_level(now.options.log_level)
        if isinstance(self._service, Reconfigurable):
            self._service.on_settings(now.cluster, now.options)
        self._log.info(log.SETTINGS_TAKEN, version=settings.version, settings=changed(before.taken, now.taken))

    def _loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log and count the failure of a callback or of a task that nobody awaits."""
        self._counts["loop_errors_total"] += 1
        if log.once_per(10, (log.LOOP_ERROR, context.get("message"))):
            error = context.get("exception")
            self._log.error(log.LOOP_ERROR, text=context.get("message"), error=repr(error), exc_info=error)

    def _stalled(self, seconds: float, stack: str) -> None:
        """Give up the place in the registry, which kazoo's thread would hold for ever. Runs in the watchdog's thread."""
        self._log.error(log.LOOP_STALLED, seconds=round(seconds, 3), stack=stack)
        self._end_session()

    def _end_session(self) -> None:
        session = self._zookeeper.session
        if session is None or not session[0]:
            return
        try:
            asyncio.run(_end_session(self._address, session, self._options.session_timeout_ms / 1000))
        except Exception as error:  # the watchdog must survive; without a ZooKeeper the session ends by itself
            self._log.error(log.STALL_NOT_ENDED, error=str(error) or repr(error))

    def _end_session_soon(self) -> None:
        """End the session in a thread, because the loop's own session must not be waited for."""
        threading.Thread(target=self._end_session, name="end-session", daemon=True).start()

    def _turns_again(self) -> None:
        self._log.warning(log.LOOP_BACK, stalls=self._watchdog.stalls)

    def _own_samples(self) -> dict[str, object]:
        view = self._discovery.view
        return {
            **self._counts,
            **self._handler.counts,
            "watchdog_stalls_total": self._watchdog.stalls,
            "registry_connected": int(self._zookeeper.connected),
            "running": int(self._state == NodeState.RUNNING.value),
            "view_nodes": len(view.nodes),
            "view_held_nodes": self._discovery.held,
            "view_malformed_total": self._discovery.malformed,
            "layout_version": view.layout.version,
            "layout_refused": len(self._discovery.refused),
            "audit_failures_total": self._audit.failures,
            "grpc_handshakes_total{listener}": {listener: found.begun for listener, found in self._handshakes.items()},
            "grpc_handshakes_failed_total{listener}": {listener: found.failed for listener, found in self._handshakes.items()},
            "calls_refused_total": self._guard.refused if self._guard is not None else 0,
            "certificates_unreadable": int(bool(self._certificate_problem())),
            "settings_version": self._settings.version,
            "settings_refused": len(self._effective.refused),
            "layout_doubling{of}": {role: int(found.next > found.n) for role, found in view.layout.roles.items()},
            "layout_notices_heard_total": self._refresh.notices,
        }

    def _peer_name(self, endpoint: EndpointID) -> str:
        node = self._discovery.view.by_endpoint(endpoint)
        return f"{node.role}:{node.address}" if node is not None else f"unknown:{hex_id(endpoint)}"

    def _certificate_problem(self) -> str:
        """Return the error in the files of certificates, or of the revoked ones; empty if there is none."""
        return next(
            (found.problem for found in (self._tls, self._guard, self._listener_tls) if found is not None and found.problem), ""
        )

    def _health(self) -> tuple[bool, dict[str, Any]]:
        peers = dict.fromkeys((state.value for state in PeerState), 0)
        if self._endpoint is not None:
            for state, count in self._endpoint.peer_states().items():
                peers[state.value] = count
        node = self._membership.node if self._membership is not None else None
        said: dict[str, Any] = {
            "role": self._role,
            "partition": _partition(self._options),
            "replica": node.replica if node is not None else -1,
            "endpoint": hex_id(self._endpoint_id),
            "state": self._state,
            "waits_for": self._waits_for(),
            "version": __version__,
            "build": str(BUILD),
            "unix_ms": time.time_ns() // 1_000_000,
            "data_dir": str(Path(self._options.data_dir).absolute()) if self._options.data_dir else "",
            "layout_version": self._discovery.view.layout.version,
            "layout_refused": dict(self._discovery.refused),
            "settings": {
                "version": self._settings.version,
                "taken": dict(self._effective.taken),
                "refused": dict(self._effective.refused),
            },
            "nodes": len(self._discovery.view.nodes),
            "registry_connected": self._zookeeper.connected,
            "keys": self._ring.name() if self._ring is not None else "none",
            "peers": peers,
            "registry_login": self._zookeeper.says_of_login(),
            "certificates": self._certificate_problem() or ("used" if self._tls is not None else "none"),
            "streams": {"port": self._stream_port, "open": self._streams.open},
            "client_tls": "used" if self._listener_tls is not None else "none",
            "insecure_listeners": self._options.insecure_listeners(),
            "service": self._service.health() if self._service is not None else {},
        }
        return self._state == NodeState.RUNNING.value, said


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _end_session(address: RegistryAddress, session: tuple[int, bytes], timeout_s: float) -> None:
    """End a session by taking it over. Raises RegistryUnavailable."""
    zookeeper = ZooKeeper(address, session_timeout_s=timeout_s, connect_timeout_s=timeout_s, session=session)
    await zookeeper.connect()
    await zookeeper.close()


def is_open_to_all(path: Path) -> bool:
    """Return True if every user of this machine may read a file. A missing file is reported by its reader."""
    try:
        return bool(os.stat(path).st_mode & stat.S_IROTH)
    except OSError:
        return False


def is_private(folder: Path) -> bool:
    """Return True if a data folder belongs to its owner alone, or does not exist."""
    try:
        return not os.stat(folder).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError:
        return True


def _partition(options: RoleOptions) -> int:
    return options.partition if isinstance(options, PartitionedOptions) else NO_PARTITION


def run_role(
    role: str,
    options_type: type[OptionsT],
    service_factory: Callable[[Context[OptionsT]], Service],
    argv: Sequence[str],
    *,
    membership: MembershipFactory,
) -> int:
    """Run a role until it is asked to end. Returns the exit code.

    argv: the arguments without the program's name. membership: `registry.membership.Membership`.

    Source: docs/operations.md.
    """
    try:
        wanted = command.parse(role, options_type, argv)
        if wanted.show_example:
            print(example_toml(role, options_type))
            return EXIT_OK
        cluster, options = load_options(role, options_type, wanted.config, os.environ, wanted.overrides, names_registry=True)
    except ConfigurationError as error:
        print(f"{role}: wrong options:\n{error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    log.configure(options.log_format, options.log_level)
    log.bind_identity(role=role, partition=_partition(options))
    logger = log.get_logger()
    logger.info(log.STARTING, version=__version__, pid=os.getpid(), registry=options.registry, config=wanted.config)
    for path in (*cluster.files_with_keys(role), *options.files_with_keys()):
        if is_open_to_all(path):
            logger.warning(log.FILE_OPEN_TO_ALL, path=str(path))
    if options.data_dir:
        os.umask(PRIVATE_UMASK)
        if not is_private(Path(options.data_dir)):
            logger.warning(log.FILE_OPEN_TO_ALL, path=options.data_dir)
    for listener in options.insecure_listeners():
        logger.warning(log.LISTENER_OPEN_TO_ALL, listener=listener)
    for text in options.doubtful_settings():
        logger.warning(log.SETTING_DOUBTFUL, text=text)

    if options.cluster_insecure and not cluster.tls_dir and not is_loopback(options.host):
        logger.warning(
            log.LISTENER_OPEN_TO_ALL,
            listener=f"cluster_insecure = true: everybody who reaches {options.host} can act as any process",
        )

    async def main() -> int:
        return await Process(role, cluster, options, service_factory, membership).run()

    pace_s = options.pace_ms / 1000 if isinstance(options, PacedOptions) else 0.0
    try:
        with asyncio.Runner(loop_factory=lambda: new_loop(pace_s)) as runner:
            return runner.run(main())
    except (ConfigurationError, RegistryUnavailable) as error:
        logger.error(log.START_FAILED, error=str(error))
        return EXIT_ENVIRONMENT
    except PixiuError as error:
        logger.error(log.CRASHED, error=str(error), code=error.code)
        return EXIT_CRASH
    except Exception as error:
        logger.error(log.CRASHED, error=repr(error), exc_info=True)
        return EXIT_CRASH
