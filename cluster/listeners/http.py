"""HTTP pages of a process: /metrics for Prometheus, /health (or /ready) for people and load balancers, /live (or /healthz) for
supervisors, /hot for the rooms and users with the most messages; and what a role adds, as a gateway's /connections.

Read only; never a message's content. At most 64 connections of at most a minute each, and small requests: a slow or hostile reader
costs a process nothing that matters.

Source: docs/operations.md.

"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cluster.core import log
from cluster.listeners.clients import host_of
from cluster.metrics.metrics import CONTENT_TYPE, Metrics
from pixiu.errors import ConfigurationError

MAX_CONNECTIONS: Final = 64
"""Maximum connections; further ones are closed at once."""
MAX_OF_ADDRESS: Final = 48
"""Maximum connections from one address, so that none can take all and keep a supervisor from /live."""
MAX_CONNECTION_S: Final = 60.0
"""Seconds, more or less `SWEEP_S`, after which a connection is closed in any case."""
SWEEP_S: Final = 10.0
MAX_LINE_BYTES: Final = 4096
"""Maximum bytes of a request line or a header."""
MAX_HEADERS: Final = 64
MAX_BODY_BYTES: Final = 1024
SHUTDOWN_S: Final = 1.0


class HttpServer:
    """The HTTP server of one process.

    health: returns (True if the process serves, the JSON of /health). Called in the event loop; must be quick.
    hot: returns the JSON of /hot.

    """

    def __init__(
        self,
        metrics: Metrics,
        health: Callable[[], tuple[bool, dict[str, Any]]],
        hot: Callable[[], dict[str, object]] = dict,
    ) -> None:
        self._metrics = metrics
        self._health = health
        self.pages: dict[str, Callable[[], dict[str, object]]] = {"/hot": hot}
        self.queries: dict[str, Callable[[Mapping[str, str]], Awaitable[dict[str, object]]]] = {}
        """Path → returns its JSON, quickly. A role adds its own."""
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._refused = 0
        self._since: dict[RequestHandler, float] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    async def bind(self, host: str, port: int, *, fallback: bool) -> int:
        """Listen. Returns the port. With `fallback` a free port replaces a taken one.

        Raises ConfigurationError that names the port and the option.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/metrics", self._get_metrics)
        for path in ("/health", "/ready"):
            app.router.add_get(path, self._get_health)
        for path in ("/live", "/healthz"):
            app.router.add_get(path, self._get_live)
        app.router.add_get("/{page}", self._get_page)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=MAX_CONNECTION_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=SHUTDOWN_S,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        self._server = await self._listen(host, port, fallback=fallback)
        self._sweep()
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def stats(self) -> dict[str, int]:
        """Return the server's counters for /metrics."""
        return {"http_refused_total": self._refused}

    async def _listen(self, host: str, port: int, *, fallback: bool) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(self._protocol, host, port, reuse_address=True)
        except OSError as error:
            if not fallback or error.errno != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"port {port} on {host} cannot be used for HTTP: {error.strerror or error}: "
                    "free it, or set http_port to another one"
                ) from None
        try:
            return await loop.create_server(self._protocol, host, 0)
        except OSError as error:
            raise ConfigurationError(f"no port on {host} can be used for HTTP: {error.strerror or error}: set http_port") from None

    def _protocol(self) -> asyncio.Protocol:
        return _Accepting(self._take)

    def _take(self, transport: asyncio.BaseTransport) -> asyncio.Protocol | None:
        """Return the protocol for a new connection; None refuses it."""
        server = self._runner.server if self._runner is not None else None
        if server is not None and len(server.connections) < MAX_CONNECTIONS:
            address = host_of(transport)
            # Few enough to look at all of them; a closing one has no transport any more.
            of_address = sum(1 for handler in server.connections if handler.transport and host_of(handler.transport) == address)
            if of_address < MAX_OF_ADDRESS:
                return server()
        self._refused += 1
        return None

    def _sweep(self) -> None:
        """Close the connections that are too old. A list once in a while keeps no closed one alive, as a timer for each would."""
        if self._runner is None or self._runner.server is None:
            return
        loop = asyncio.get_running_loop()
        since = {handler: self._since.get(handler, loop.time()) for handler in self._runner.server.connections}
        for handler, first_seen in since.items():
            if loop.time() - first_seen >= MAX_CONNECTION_S:
                handler.force_close()
        self._since = since
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_health(self, _request: web.Request) -> web.Response:
        try:
            serving, said = self._health()
            body = json.dumps(said, default=str)
        except Exception as error:  # a bug in a role's health() must not look like a dead process
            if log.once_per(60, log.HEALTH_FAILED):
                log.get_logger().error(log.HEALTH_FAILED, error=repr(error), exc_info=True)
            serving, body = False, json.dumps({"error": "health() failed; see the log"})
        return web.Response(text=body, status=200 if serving else 503, content_type="application/json")

    async def _get_page(self, request: web.Request) -> web.Response:
        query = self.queries.get(request.path)
        if query is not None:
            return web.json_response(await query(request.query))
        page = self.pages.get(request.path)
        if page is None:
            raise web.HTTPNotFound
        return web.json_response(page())

    async def _get_live(self, _request: web.Request) -> web.Response:
        return web.Response(text="live\n")


class _Accepting(asyncio.Protocol):
    """Passes a new connection to the protocol that `take` returns; closes it at once if that is None."""

    def __init__(self, take: Callable[[asyncio.BaseTransport], asyncio.Protocol | None]) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new connection. Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        protocol = self._take(transport)
        if protocol is None:
            transport.close()
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
