"""The listeners of a process besides its datagrams: gRPC for the cluster and for clients, and framed streams.

Source: docs/security.md.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.turn import Turn
from cluster.listeners.call_guard import CallGuard
from cluster.listeners.clients import ClientRoleOptions
from cluster.listeners.handshakes import Handshakes
from cluster.listeners.request_limits import ParseInTurn
from cluster.listeners.server import Server
from cluster.listeners.streams import framed_listener
from cluster.settings.options import ClientListenerOptions, ClusterOptions, RoleOptions
from cluster.trust.audit import Audit
from cluster.trust.key_ring import KeyRing
from pixiu.wire.block import MAX_BLOCK_BYTES


class Listeners:
    """The listeners of one process, with the certificates that they show and ask for.

    Args:
        ring: returns the keys of this moment.
        failed: called with the method and the error when the handler of a stream fails.
    """

    def __init__(
        self,
        role: str,
        cluster: ClusterOptions,
        options: RoleOptions,
        audit: Audit,
        turn: Turn,
        ring: Callable[[], KeyRing | None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.tls = cluster.tls(role)
        self.handshakes = {listener: Handshakes(listener, audit) for listener in ("cluster", "clients")}
        self.client_tls = options.listener_tls()
        parsing = ParseInTurn(turn)
        self.clients = (
            self._new_client_server(role, cluster, options, parsing) if isinstance(options, ClientListenerOptions) else None
        )
        self.client_port = self.stream_port = 0
        handshakes = self.handshakes["cluster"]
        self._guard = CallGuard(role, self.tls, audit, handshakes.called) if self.tls is not None else None
        with handshakes.watching(self.tls is not None):
            self.server = Server(
                cluster,
                options.reflection,
                [self._guard, parsing] if self._guard is not None else [parsing],
                self.tls.server_credentials(handshakes.begins) if self.tls is not None else None,
            )
        self.streams = framed_listener(role, cluster, self.tls, self._guard, ring, failed)

    def _new_client_server(self, role: str, cluster: ClusterOptions, options: RoleOptions, parsing: ParseInTurn) -> Server:
        handshakes = self.handshakes["clients"]
        shown = self.client_tls.server_credentials(handshakes.begins) if self.client_tls is not None else None
        logs_in = isinstance(options, ClientRoleOptions) and bool(options.access_file)
        with handshakes.watching(shown is not None and logs_in):
            return Server(
                cluster, interceptors=[parsing], credentials=shown, of_clients=True, beside_mqtt=role == "gateway",
                largest=MAX_BLOCK_BYTES if role == "topic" else 0,
            )  # fmt: skip

    @property
    def servers(self) -> list[Server]:
        """The gRPC servers."""
        return [self.server] if self.clients is None else [self.server, self.clients]

    async def bind_streams(self, options: RoleOptions, port: int) -> None:
        """Bind the port of streams, by default the third after the main port. Raises ConfigurationError."""
        wanted = options.stream_port or min(port + 3, 65_535)
        chosen = bool(options.stream_port)
        self.stream_port = await self.streams.bind(options.host, wanted, fallback=not chosen, reuse=chosen or bool(options.port))

    def certificate_problem(self) -> str:
        """Return the error in the files of certificates, or of the revoked ones; empty if there is none."""
        return next(
            (found.problem for found in (self.tls, self._guard, self.client_tls) if found is not None and found.problem), ""
        )

    def samples(self) -> dict[str, object]:
        """Return the metrics."""
        return {
            "grpc_handshakes_total{listener}": {listener: found.begun for listener, found in self.handshakes.items()},
            "grpc_handshakes_failed_total{listener}": {listener: found.failed for listener, found in self.handshakes.items()},
            "calls_refused_total": self._guard.refused if self._guard is not None else 0,
            "certificates_unreadable": int(bool(self.certificate_problem())),
        }
