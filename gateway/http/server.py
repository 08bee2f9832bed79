"""The HTTP server of a gateway's clients: what is the same for every route.

Source: docs/http.md; docs/security.md, "The HTTP API".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cluster.core import log
from cluster.listeners.origins import Origins
from cluster.metrics.metrics import Sample
from gateway.http.answers import Answer, Refused, answer_of
from gateway.http.api import CORS, Api, error_fields
from gateway.http.bounded import BODIES, IDLE_S, Bodies, Connections
from pixiu.errors import PixiuError

MAX_LINE_BYTES: Final = 8192
MAX_FIELD_BYTES: Final = 12_288
"""Bytes of one header: a token has at most 8,192."""
MAX_HEADERS: Final = 64
REQUEST_S: Final = 60.0
"""Time for a request that is no stream, seconds."""
LINGER_S: Final = 1.0
SHUTDOWN_S: Final = 1.0
STREAMS: Final = ("/v1/events",)
METHODS: Final = "GET, POST"
HEADERS: Final = "Authorization, Content-Type, Idempotency-Key, Last-Event-ID"
ANSWERED_HEADERS: Final = "Retry-After, Idempotency-Replayed"
GONE: Final = 499
"""Status in metrics of a request whose client did not wait for the answer."""
API_FAILED: Final = "api_failed"


class ApiServer:
    """Serves the API at the connections that a listener gives it."""

    def __init__(self, api: Api, origins: Origins, connections: Connections) -> None:
        self._api, self._origins, self.connections = api, origins, connections
        self._runner: web.AppRunner | None = None
        self._requests: Counter[tuple[str, int]] = Counter()
        self._bodies = Bodies()

    async def start(self) -> None:
        """Make the server ready."""
        app = web.Application(middlewares=[self._serve])
        app[BODIES] = self._bodies
        for method, path, handler in self._api.routes():
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=IDLE_S, max_line_size=MAX_LINE_BYTES, max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_HEADERS, lingering_time=LINGER_S, shutdown_timeout=SHUTDOWN_S, auto_decompress=False,
        )  # fmt: skip
        await self._runner.setup()
        self.connections.start()

    async def close(self) -> None:
        """Close all connections."""
        self.connections.stop()
        if self._runner is not None:
            await self._runner.cleanup()

    def connect(self) -> asyncio.Protocol:
        """Protocol of a new connection."""
        return _Connection(self)

    def handler(self) -> RequestHandler | None:
        """Aiohttp's protocol; None: the server has not started, or has ended."""
        server = self._runner.server if self._runner is not None else None
        return server() if server is not None else None

    def samples(self) -> Iterator[Sample]:
        """Samples for metrics."""
        yield Sample("api_connections", len(self.connections))
        yield Sample("api_connections_refused_total", self.connections.refused)
        yield Sample("api_connections_late_total", self.connections.closed)
        yield Sample("api_body_bytes", self._bodies.bytes)
        yield Sample("api_repeated_total", self._api.idempotency.repeated)
        for (route, code), number in list(self._requests.items()):
            yield Sample("api_requests_total", number, {"route": route, "code": str(code)})

    @web.middleware
    async def _serve(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Carry out a request; whatever happens is an answer in JSON."""
        self.connections.begins(request.protocol)
        response: web.StreamResponse | None = None
        try:
            cors = self._cors(request)
            request[CORS] = cors
            if request.method == "OPTIONS" and cors:
                response = web.Response(status=204)
            elif request.path in STREAMS:
                response = await handler(request)
            else:
                async with asyncio.timeout(REQUEST_S):
                    response = await handler(request)
        except Exception as error:
            gone = isinstance(error, ConnectionError) and not isinstance(error, PixiuError)
            response = web.Response(status=GONE) if gone else self._failed(request, error)
        finally:
            self._bodies.give_back(request)
            self.connections.ends(request.protocol)
            resource = request.match_info.route.resource
            code = response.status if response is not None else GONE
            self._requests[resource.canonical if resource is not None else "other", code] += 1
        if not response.prepared:
            response.headers.update(request.get(CORS, {}))
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.headers["Cache-Control"] = "no-store"
        return response

    def _cors(self, request: web.Request) -> dict[str, str]:
        """Headers for a web page. Raises `Refused` for a page that may not call: its user may have opened it unaware."""
        origin = request.headers.get("Origin", "")
        # Browsers leave the origin out of simple requests, and say that a page made them.
        of_page = not origin and request.headers.get("Sec-Fetch-Site", "none") != "none"
        if of_page or not self._origins.allow(origin):
            raise Refused(403, "ORIGIN", "web pages of this origin may not call here (gateway.api_origins)")
        if not origin:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": HEADERS,
            "Access-Control-Expose-Headers": ANSWERED_HEADERS,
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        }

    def _failed(self, request: web.Request, error: Exception) -> web.StreamResponse:
        answer = _answer(error)
        if answer.status == 500 and log.once_per(60, API_FAILED):
            log.get_logger().error(API_FAILED, method=request.method, error=type(error).__name__, exc_info=error)
        response = web.json_response(error_fields(answer.code, answer.text, answer.retry_after_s), status=answer.status)
        if answer.retry_after_s:
            response.headers["Retry-After"] = str(answer.retry_after_s)
        if answer.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if answer.status == 405:
            response.headers["Allow"] = METHODS
        if answer.status in (408, 413):
            response.force_close()  # the rest of its body is not read
        return response


def _answer(error: Exception) -> Answer:
    if isinstance(error, Refused):
        return error.answer
    if isinstance(error, PixiuError):
        return answer_of(error)
    if isinstance(error, web.HTTPException) and error.status in (404, 405):
        return Answer(error.status, "NO_ROUTE", "there is no such route; /v1/openapi.json has them")
    if isinstance(error, web.HTTPException) and 400 <= error.status < 500:
        return Answer(error.status, "INVALID_ARGUMENT", "the request is malformed")
    if isinstance(error, TimeoutError):
        return Answer(504, "OUTCOME_UNKNOWN", "nobody confirmed it in time: it may have happened or not")
    return Answer(500, "INTERNAL", "the request failed inside the cluster")


class _Connection(asyncio.Protocol):
    """A connection that is counted, around aiohttp's protocol."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._handler: RequestHandler | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the client has connected."""
        assert isinstance(transport, asyncio.Transport)
        handler = self._server.handler()
        if handler is None or not self._server.connections.take(transport, handler):
            transport.abort()
            return
        self._handler = handler
        handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass on a client's bytes."""
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> None:
        """Pass on the end of what the client sends."""
        if self._handler is not None:
            self._handler.eof_received()

    def pause_writing(self) -> None:
        """Let the answer wait."""
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Let the answer go on."""
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        handler, self._handler = self._handler, None
        if handler is not None:
            self._server.connections.gone(handler)
            handler.connection_lost(exc)
