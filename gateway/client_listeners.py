"""The listeners of a gateway's clients, and what is behind each: MQTT, MQTT over WebSocket, HTTP.

Source: docs/operations.md, "Balancers in front of gateways"; docs/http.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final, cast

from cluster.access.login_guard import LoginGuard
from cluster.listeners.networks import Networks
from cluster.listeners.origins import Origins
from cluster.metrics.metrics import Sample
from cluster.process.context import Context
from cluster.trust.listener_tls import ListenerTls
from gateway.clients.clients import Clients
from gateway.doors.proxied import ProxyDoor
from gateway.doors.websocket import WebSocketConnection, WebSockets
from gateway.http.api import Api
from gateway.http.bounded import Connections
from gateway.http.logins import Logins
from gateway.http.revoking import Revoker
from gateway.http.server import ApiServer
from gateway.mqtt.connection import MQTTConnection
from gateway.mqtt.listener import Listener
from gateway.mqtt.tls_handshake import TlsHandshake
from gateway.options import Options
from gateway.retained.client import RetainedClient
from gateway.sessions.service import Sessions

API_PROXIES: Final = 8
"""Proxies that clients of the HTTP API are given at first; they learn of the others."""


class ClientListeners:
    """The listeners; the registry knows the first one's port."""

    def __init__(
        self,
        context: Context[Options],
        clients: Clients,
        guard: LoginGuard | None,
        retained: RetainedClient,
        sessions: Sessions | None = None,
    ) -> None:
        options, tls = context.options, context.client_tls
        self._clients, self._sessions = clients, sessions
        self._behind = ProxyDoor(Networks(options.proxy_networks), clients)
        origins = Origins(options.websocket_origins, open_=guard is not None)
        self._websockets = WebSockets(clients, self._mqtt, origins)
        self._listeners = [self._listens(self._mqtt, options, "mqtt_port", tls)]
        if options.mqtt_plain_port:
            self._listeners.append(self._listens(self._mqtt, options, "mqtt_plain_port", None))
        if options.websocket_port:
            self._listeners.append(
                self._listens(lambda: WebSocketConnection(self._websockets), options, "websocket_port", tls)
            )  # fmt: skip
        self._api: ApiServer | None = None
        self._logins = Logins(lambda: self._proxies(context), options.api_logins, options.api_ca)
        self._revoker = Revoker(context.zookeeper, context.root, context.audit)
        if options.api_port:
            api = Api(guard, self._logins, self._revoker.revoke, retained.listing, lambda: clients.draining)
            connections = Connections(options.api_connections, options.address_connections_percent)
            self._api = ApiServer(api, Origins(options.api_origins), connections)
            self._listeners.append(self._listens(self._api.connect, options, "api_port", tls))
            context.metrics.collect_from(self._api_samples)

    async def bind(self) -> int:
        """Take the ports. Returns that of MQTT. Raises `ConfigurationError` or `Unavailable`."""
        port, *_ = [await listener.bind() for listener in self._listeners]
        return port

    async def start(self) -> None:
        """Start to accept clients."""
        if self._api is not None:
            await self._api.start()
            self._logins.start()
        for listener in self._listeners:
            await listener.start()

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        for listener in self._listeners:
            listener.close()

    async def stop(self) -> None:
        """Close the listeners, and the connections to the HTTP API."""
        self.close()
        if self._api is not None:
            await self._api.close()
            await self._logins.close()
            await self._revoker.close()

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            "proxy_headers_refused_total{reason}": dict(self._behind.refused),
            "websockets_refused_total{reason}": dict(self._websockets.refused),
            "connections_without_descriptor_total": sum(listener.refused for listener in self._listeners),
        }

    def _mqtt(self) -> asyncio.Protocol:
        return cast(asyncio.Protocol, MQTTConnection(self._clients, self._sessions))

    def _listens(
        self, connect: Callable[[], asyncio.Protocol], options: Options, option: str, tls: ListenerTls | None
    ) -> Listener:  # fmt: skip
        host = options.api_host if option == "api_port" else options.mqtt_host
        taken = connect if tls is None else (lambda: TlsHandshake(self._clients, tls, connect))
        paced = self._clients.paced
        return Listener(taken, host, getattr(options, option), option, self._behind, lambda: paced.waiting)

    def _api_samples(self) -> list[Sample]:
        assert self._api is not None
        return [*self._api.samples(), *self._logins.samples()]

    def _proxies(self, context: Context[Options]) -> str:
        """Addresses of some proxies that the registry knows."""
        proxies = [node.client_address for node in context.view.running("proxy")]
        random.shuffle(proxies)
        return ",".join(proxies[:API_PROXIES])
