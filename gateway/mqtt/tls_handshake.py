"""The connection of an MQTT client until its TLS handshake is over; then an ordinary one takes its place.

A connection in its handshake counts as not identified: the oldest are closed when there are too many.

Source: docs/security.md, "TLS for clients".
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

from cluster.listeners.clients import host_of
from cluster.trust.listener_tls import ListenerTls
from gateway.clients.clients import Clients

HANDSHAKE_TIMEOUT_S: Final = 5.0
SHUTDOWN_TIMEOUT_S: Final = 5.0
"""Time for a client that is being closed to confirm it, seconds."""
LEFT: Final = 1
CERTIFICATE_ERRORS: Final = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")


class _Early(asyncio.Protocol):
    """Keeps what a client sends right after its handshake, until somebody listens."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.lost = False
        self.error: Exception | None = None

    def data_received(self, data: bytes) -> None:
        """Keep a client's bytes."""
        self.data.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the client has gone already."""
        self.lost, self.error = True, exc


class TlsHandshake(asyncio.Protocol):
    """A new connection to the MQTT port that speaks TLS.

    Args:
        tls: its newest files are used.
        connect: makes the protocol that takes over.
    """

    def __init__(self, clients: Clients, tls: ListenerTls, connect: Callable[[], asyncio.Protocol]) -> None:
        self.id = 0
        self._clients, self._tls, self._connect = clients, tls, connect
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the client has connected."""
        assert isinstance(transport, asyncio.Transport)
        # What it does not take at once waits above TLS, where it is counted.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        self.id = self._clients.arrived(self, host_of(transport))
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def evict(self) -> None:
        """Close the connection: too many are not identified, and this is the oldest."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        early = _Early()
        try:
            transport = await asyncio.get_running_loop().start_tls(
                plain, early, self._tls.context(), server_side=True,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S, ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )  # fmt: skip
        except OSError as error:  # ssl.SSLError is one, and so is a time-out
            self._failed(plain, error)
            return
        finally:
            self._clients.closed(self, LEFT)
        if transport is None or early.lost:
            return
        connection = self._connect()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        for data in early.data:
            connection.data_received(data)

    def _failed(self, transport: asyncio.Transport, error: OSError) -> None:
        self._clients.counters.tls_failures += 1
        transport.abort()
        reason = error.reason if isinstance(error, ssl.SSLError) else ""
        if reason in CERTIFICATE_ERRORS and self._clients.guard is not None:
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else "none was shown"
            self._clients.guard.refused_certificate(host_of(transport), f"the client's certificate is refused: {why}")
