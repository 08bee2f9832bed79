"""The console's HTTP server: its page, its API, and who may call it.

    a browser ──▶ Host? ──▶ origin of the page? ──▶ session? ──▶ right? ──▶ read or change ──▶ JSON

Source: docs/console.md.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from cluster.core import log
from cluster.settings.options import is_loopback
from ops.console.changes import CHANGES
from ops.console.cluster import Cluster
from ops.console.inputs import MAX_BODY_BYTES, Inputs, body_of
from ops.console.logins import Logins, Session
from ops.console.reads import CONTENTS, OPEN
from ops.console.tunnel import Tunnels
from pixiu.errors import (
    InvalidArgument,
    LocalError,
    NotAllowed,
    NotAuthenticated,
    NotServed,
    Overloaded,
    PixiuError,
    Unavailable,
    UnknownTopic,
)
from pixiu.version import __version__

PAGE: Final = Path(__file__).parent / "page"
KINDS: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MAX_LINE: Final = 8_190
"""Bytes of a request's first line, and of a header."""
SHUTDOWN_S: Final = 1.0
CHANGED: Final = "console_changed"
REFUSED: Final = "console_refused"
FAILED: Final = "console_failed"
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATUS: Final[Mapping[type[PixiuError], int]] = {
    NotAuthenticated: 401,
    NotAllowed: 403,
    UnknownTopic: 404,
    NotServed: 404,
    Overloaded: 429,
    LocalError: 400,
    PixiuError: 503,
}
"""Error → status: that of its nearest base."""

WORDS: Final = {
    404: "there is no such page",
    405: "this page takes another method: pages are read with GET, and changed with POST",
    413: f"a body has at most {MAX_BODY_BYTES:,} bytes",
}
"""Status of an error of HTTP → its text."""
READ_S: Final = 12.0
"""Time for what a page shows: a peek takes ten seconds at most."""
MAX_EXACT: Final = 2**53
"""Number up to which a browser reads each one exactly; UINs and message IDs beyond it are sent as texts."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Place:
    """Address, names and TLS of a console."""

    host: str
    port: int
    names: tuple[str, ...] = ()
    """Host names of its URL beside the address; a loopback address has `localhost`, too."""
    tls: ssl.SSLContext | None = None


def exact(value: Any) -> Any:
    """JSON values whose numbers a browser reads exactly."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -MAX_EXACT < value < MAX_EXACT else str(value)
    if isinstance(value, Mapping):
        return {name: exact(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [exact(each) for each in value]
    return value


class Console:
    """The server: `await start()`, later `await close()`."""

    def __init__(self, cluster: Cluster, logins: Logins, place: Place) -> None:
        self._cluster, self._logins, self._place = cluster, logins, place
        self._names = {place.host, *place.names} | ({"localhost", "127.0.0.1", "[::1]"} if is_loopback(place.host) else set())
        self._tunnels = Tunnels()
        self._runner: web.AppRunner | None = None
        self.port = 0
        self._cookie = ""
        """Its name has the port: a browser sends a cookie to all ports of a host."""

    async def start(self) -> None:
        """Listen. Raises OSError."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", self._file)
        app.router.add_get("/page/{name:[a-z_]{1,32}[.][a-z]{2,4}}", self._file)
        app.router.add_get("/api/session", self._session)
        app.router.add_post("/api/login", self._log_in)
        app.router.add_post("/api/logout", self._log_out)
        app.router.add_get("/api/mqtt", self._mqtt)
        app.router.add_get("/api/gateways", self._gateways)
        for path in (*OPEN, *CONTENTS):
            app.router.add_get(f"/api/{path}", self._read)
        for path in CHANGES:
            app.router.add_post(f"/api/{path}", self._change)
        self._runner = web.AppRunner(
            app, access_log=None, max_line_size=MAX_LINE, max_field_size=MAX_LINE, shutdown_timeout=SHUTDOWN_S,
            auto_decompress=False,
        )  # fmt: skip
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._place.host, self._place.port, ssl_context=self._place.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._cookie = f"pixiu_console_{self.port}"

    async def close(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    # --- who may call

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request before it is handled; whatever happens is an answer."""
        try:
            self._check_origin(request)
            response = await handler(request)
        except Exception as error:
            response = self._failed(request, error)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _check_origin(self, request: web.Request) -> None:
        """Refuse another site's page, by whatever name it reaches this port. Raises `NotAllowed`."""
        scheme = "https" if self._place.tls is not None else "http"
        if request.headers.get("Host", "").rpartition(":")[0] not in self._names and request.headers.get("Host") not in self._names:
            raise NotAllowed("the console does not serve this host name; --name adds one")
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and request.path.startswith("/api/"):
            raise NotAllowed("pages of other sites may not call the console")
        if origin is not None and origin != f"{scheme}://{request.headers.get('Host')}":
            raise NotAllowed("pages of other sites may not call the console")
        if request.method == "POST" and request.content_type != "application/json":
            raise NotAllowed("changes are sent as application/json")

    def _session_of(self, request: web.Request) -> Session:
        session = self._logins.session(request.cookies.get(self._cookie, ""))
        if session is None:
            raise NotAuthenticated("log in first")
        return session

    def _operator_of(self, request: web.Request) -> Session:
        session = self._session_of(request)
        if not session.may_change:
            why = "this login may look only" if self._logins.required else "without a login the console shows only"
            raise NotAllowed(f"{why}: docs/console.md says how to get the right")
        return session

    def _failed(self, request: web.Request, error: Exception) -> web.StreamResponse:
        if isinstance(error, web.HTTPException):
            text = WORDS.get(error.status, "the request is not one of the console's page")
            return web.json_response({"error": {"code": "NO_ROUTE", "text": text}}, status=error.status)
        if not isinstance(error, PixiuError):
            if log.once_per(60, FAILED):
                log.get_logger().error(FAILED, path=request.path[:128], error=type(error).__name__, exc_info=error)
            return web.json_response({"error": {"code": "INTERNAL", "text": "the console failed; its log says why"}}, status=500)
        status = next(STATUS[base] for base in type(error).__mro__ if base in STATUS)
        return web.json_response({"error": {"code": error.code, "text": str(error)}}, status=status)

    # --- what is served

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = PAGE / request.match_info.get("name", "index.html")
        if not path.is_file():
            raise web.HTTPNotFound
        return web.Response(
            body=path.read_bytes(), content_type=KINDS.get(path.suffix, "application/octet-stream"), charset="utf-8"
        )

    async def _session(self, request: web.Request) -> web.StreamResponse:
        session = self._logins.session(request.cookies.get(self._cookie, ""))
        said: dict[str, Any] = {"version": __version__, "login_required": self._logins.required, "logged_in": session is not None}
        if session is not None:
            said |= {"user": session.user, "may_change": session.may_change, "registry": str(self._cluster.address)}
        return web.json_response(said)

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        token = body_of(await request.read()).text("token", most=MAX_BODY_BYTES)
        try:
            cookie, session = await self._logins.log_in(token, request.remote or "")
        except (NotAllowed, NotAuthenticated):
            log.get_logger().warning(REFUSED, address=request.remote)
            raise
        response = web.json_response({"user": session.user, "may_change": session.may_change})
        secure = self._place.tls is not None
        response.set_cookie(self._cookie, cookie, httponly=True, samesite="Strict", secure=secure, path="/")
        return response

    async def _log_out(self, request: web.Request) -> web.StreamResponse:
        self._logins.log_out(request.cookies.get(self._cookie, ""))
        response = web.json_response({})
        response.del_cookie(self._cookie, path="/")
        return response

    async def _read(self, request: web.Request) -> web.StreamResponse:
        name = request.path.removeprefix("/api/")
        if name in CONTENTS:
            self._operator_of(request)
        self._session_of(request)
        try:
            async with asyncio.timeout(READ_S):
                found = await (CONTENTS.get(name) or OPEN[name])(self._cluster, Inputs(dict(request.query)))
        except TimeoutError:
            raise Unavailable(f"the cluster has not answered within {READ_S:g} s; the map shows who is away") from None
        return web.json_response(exact(found))

    async def _change(self, request: web.Request) -> web.StreamResponse:
        session, name = self._operator_of(request), request.path.removeprefix("/api/")
        (make, fields), inputs = CHANGES[name], body_of(await request.read())
        inputs.only(fields)
        found = await make(self._cluster, inputs, session.user)
        log.get_logger().info(CHANGED, user=session.user, what=name)
        return web.json_response(exact(found))

    async def _gateways(self, request: web.Request) -> web.StreamResponse:
        self._session_of(request)
        found = [{"replica": n.replica, "address": f"{n.mqtt_host}:{n.mqtt_port}"} for n in self._mqtt_gateways()]
        return web.json_response({"gateways": found})

    async def _mqtt(self, request: web.Request) -> web.StreamResponse:
        self._operator_of(request)
        number = Inputs(dict(request.query)).number("gateway")
        gateway = next((node for node in self._mqtt_gateways() if node.replica == number), None)
        if gateway is None:
            raise InvalidArgument(f"there is no gateway {number} with an MQTT port")
        if "Upgrade" not in request.headers:
            raise InvalidArgument("a client of MQTT comes here by WebSocket")
        return await self._tunnels.carry(request, gateway)

    def _mqtt_gateways(self) -> list[Any]:
        return [node for node in self._cluster.view.running("gateway") if node.mqtt_port]
