"""The gRPC servers of a process: the cluster's, at one port number with the links' UDP socket, and the clients', at its own.

    port          Membership, Xiu, Pi, Replication, …: single calls    processes and tools of the cluster
    client_port   Publisher, Mailer, Presence of a proxy; Subscriber    clients

Source: docs/operations.md.
"""

from __future__ import annotations

import resource
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Final

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection as grpc_reflection  # type: ignore[import-untyped]

from cluster.links.endpoint import Endpoint
from cluster.listeners.health import Health
from cluster.listeners.refused_calls import RefusedCalls
from cluster.listeners.request_limits import message_bytes_of_client
from cluster.settings.options import ClientListenerOptions, ClusterOptions, RoleOptions
from pixiu.errors import ConfigurationError, PixiuError

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Maximum size of a gRPC message, whatever max_record_bytes is."""
MIN_MESSAGE_BYTES: Final = 4 << 20
MAX_STREAMS: Final = 1024
"""Maximum concurrent calls on one connection of a process."""
MAX_STREAMS_OF_CLIENT: Final = 32
"""The same of a client; the SDK opens another connection for more (`pixiu.rpc.channels`). Each call that begins costs half a
millisecond: 750 that began at once raised an innocent client's p99 threefold."""
MAX_CALLS: Final = 16_384
"""Maximum concurrent calls in all; further ones are refused with RESOURCE_EXHAUSTED."""
MAX_CONNECTIONS: Final = 100_000
"""Maximum gRPC connections of clients, if there are as many descriptors."""
MAX_METADATA_BYTES: Final = 16_384
HANDSHAKE_TIMEOUT_MS: Final = 2000
"""Time after which a connection that has not become HTTP/2 is closed."""
KEEPALIVE_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
MIN_PING_INTERVAL_MS: Final = 5_000
"""Shortest interval of pings; a client that pings more often (beyond a few) is disconnected."""
CLIENT_IDLE_MS: Final = 10_000
"""Time, or a little more, after which a client's connection without a call is closed: before its first call, and between two."""
KEPT_FILES: Final = 256
"""Descriptors that clients cannot have: they are for the registry, peers, health, files, and connections being accepted."""
ANY_PORT_TRIES: Final = 20
"""Tries of finding a port that is free for TCP and UDP."""


def message_bytes(cluster: ClusterOptions) -> int:
    """Return the maximum length of a message of a stream or a call."""
    return min(max(4 * cluster.max_record_bytes, MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)


def files_for_clients(limit: int) -> int:
    """Return the number of a process's descriptors that are for its clients."""
    return max(limit - KEPT_FILES, limit // 2)


def connections_of_clients(limit: int, *, beside_mqtt: bool) -> int:
    """Return the maximum connections of the clients' gRPC listener, with this limit of descriptors: half of the clients' share;
    beside MQTT a quarter, which MQTT leaves free, since gRPC counts only its own connections."""
    return min(files_for_clients(limit) // (4 if beside_mqtt else 2), MAX_CONNECTIONS) if limit > 0 else MAX_CONNECTIONS


def files_for_mqtt(limit: int) -> int:
    """Return the bound of descriptor numbers for MQTT's clients."""
    return files_for_clients(limit) - connections_of_clients(limit, beside_mqtt=True) if limit > 0 else sys.maxsize


def server_options(
    cluster: ClusterOptions, *, of_clients: bool = False, beside_mqtt: bool = False, largest: int = 0
) -> list[tuple[str, int]]:  # fmt: skip
    """Return the channel arguments of a process's server. largest: as of `message_bytes_of_client`."""
    longest, of_client = message_bytes(cluster), message_bytes_of_client(cluster.max_record_bytes, largest)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    clients = [
        ("grpc.http2.bdp_probe", 0),  # its estimate lets each stream fill megabytes before the process reads them
        ("grpc.max_connection_idle_ms", CLIENT_IDLE_MS),
        ("grpc.max_allowed_incoming_connections", connections_of_clients(limit, beside_mqtt=beside_mqtt)),
    ]
    return [
        *(clients if of_clients else ()),
        ("grpc.so_reuseport", 0),  # a taken port is an error, not half of the traffic
        ("grpc.max_receive_message_length", of_client if of_clients else longest),
        ("grpc.max_send_message_length", longest),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS_OF_CLIENT if of_clients else MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ]


def keep_grpc_from_printing() -> None:
    """Keep grpcio from printing. If a caller is gone before its error is reported to it, grpcio logs that and then prints a
    traceback to standard error itself: callers could fill a disk. The log line is enough (`cluster.core.log`)."""
    quiet = {name: value for name, value in vars(traceback).items() if not name.startswith("__")}
    quiet["print_exc"] = lambda *_args, **_more: None
    cygrpc.traceback = SimpleNamespace(**quiet)


class Server:
    """A gRPC server with the health service and, optionally, reflection of everything that is added to it."""

    def __init__(
        self,
        cluster: ClusterOptions,
        reflection: bool = True,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        credentials: grpc.ServerCredentials | None = None,
        *,
        of_clients: bool = False,
        beside_mqtt: bool = False,
        largest: int = 0,
    ) -> None:
        """`credentials`: of TLS; None: callers are not authenticated. `of_clients`: its callers are clients, not processes.
        `beside_mqtt`: this process also has MQTT clients. `largest`: bytes of the largest thing in a client's message, if that is
        no batch of records."""
        keep_grpc_from_printing()
        self._reflection, self._credentials = reflection, credentials
        self.grpc = grpc.aio.server(
            options=server_options(cluster, of_clients=of_clients, beside_mqtt=beside_mqtt, largest=largest),
            maximum_concurrent_rpcs=MAX_CALLS,
            interceptors=[RefusedCalls(), *interceptors],
        )
        self._health = Health()
        self._names: list[str] = []
        self._add = self.grpc.add_generic_rpc_handlers
        # The library cannot list what was added to a server, and reflection has to name it.
        self.grpc.add_generic_rpc_handlers = self._note_and_add  # type: ignore[method-assign, assignment]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def listen(self, address: str) -> int:
        """Listen at an address. Returns the port. Raises RuntimeError when it is taken."""
        if self._credentials is not None:
            return self.grpc.add_secure_port(address, self._credentials)
        return self.grpc.add_insecure_port(address)

    async def start(self) -> None:
        """Answer calls from now on; health is NOT_SERVING at first."""
        if self._reflection:
            grpc_reflection.enable_server_reflection([*self._names, grpc_reflection.SERVICE_NAME], self.grpc)
        await self.set_serving(False)
        await self.grpc.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the health status, for the whole process and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    def _note_and_add(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        for handler in handlers:
            name = handler.service_name() if isinstance(handler, grpc.ServiceRpcHandler) else None
            if name and name not in self._names:
                self._names.append(name)
        self._add(handlers)


def bracketed(host: str) -> str:
    """Format a host for an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


async def bind_both(options: RoleOptions, server: Server, new_endpoint: Callable[[], Endpoint]) -> tuple[Endpoint, int]:
    """Bind UDP and TCP to one port number. Returns the endpoint and the port.

    new_endpoint: makes an unbound endpoint; called once for each port that is tried.

    Raises ConfigurationError that names the port and the option when it is taken, or when none can be found.
    """
    reason: str | None = None
    tries = 1 if options.port else ANY_PORT_TRIES
    for _ in range(tries):
        endpoint = new_endpoint()
        try:
            port = endpoint.bind(options.host, options.port)
        except PixiuError as error:
            raise ConfigurationError(f"{error} (options host and port)") from None
        try:
            # Tried first, because gRPC's own attempt prints lines and does not give the reason of a failure.
            _try_tcp(options.host, port)
            server.listen(f"{bracketed(options.host)}:{port}")
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it was taken just now"
            await endpoint.close()
            continue
        return endpoint, port
    if options.port:
        raise ConfigurationError(
            f"port {options.port} on {options.host} cannot be used for TCP (gRPC): {reason}: "
            "stop what uses it, or set port to another one (0: any)"
        )
    raise ConfigurationError(f"no port on {options.host} is free for TCP and UDP after {tries} tries ({reason}): set port")


def bind_clients(options: ClientListenerOptions, port: int, server: Server) -> int:
    """Bind the clients' gRPC server. Returns its port. port: the cluster's.

    Raises ConfigurationError that names the port and the option when it is taken.
    """
    host, wanted = options.client_listen_host, options.client_port or min(port + 2, 65_535)
    tries = [wanted] if options.port or options.client_port else [wanted, 0]
    for number in tries:
        try:
            _try_tcp(host, number)
            return server.listen(f"{bracketed(host)}:{number}")
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it was taken just now"
    raise ConfigurationError(
        f"port {tries[-1]} on {host} cannot be used for clients (gRPC): {reason}: "
        "stop what uses it, or set client_port to another one"
    )


def _try_tcp(host: str, port: int) -> None:
    """Raise OSError when nobody can listen there now."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
