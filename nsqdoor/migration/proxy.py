"""The migration proxy: nsqlookupd's HTTP, whose answers come from the old cluster, the new one, or both, by each topic's phase.

Source: docs/nsq.md, "Moving from NSQ".
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from cluster.core import log
from cluster.nsq.frames import is_name
from nsqdoor.migration.phases import READ, SIDES, WRITE
from nsqdoor.migration.states import States
from nsqdoor.migration.upstream import Upstream
from pixiu.errors import PixiuError
from pixiu.version import __version__

HEADERS: Final = {"X-NSQ-Content-Type": "nsq; version=1.0"}
PROXIES: Final = "nsq_proxy_listens"


class Proxy:
    """Serves look-ups; see the module.

    Args:
        upstream: both clusters.
        states: phases of topics.
    """

    def __init__(self, upstream: Upstream, states: States) -> None:
        self._upstream, self._states = upstream, states
        self._runner: web.AppRunner | None = None
        self.requests: Counter[str] = Counter()

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port. Raises `OSError`."""
        app = web.Application(client_max_size=1024, middlewares=[self._serve])
        for path, handler in (
            ("/lookup", self._lookup), ("/topics", self._topics), ("/channels", self._channels), ("/nodes", self._nodes),
            ("/ping", self._ping), ("/info", self._info),
        ):  # fmt: skip
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=15.0, max_line_size=8_192, max_field_size=12_288, max_headers=64,
            shutdown_timeout=1.0, auto_decompress=False,
        )  # fmt: skip
        await self._runner.setup()
        assert self._runner.server is not None
        server = await asyncio.get_running_loop().create_server(self._runner.server, host, port)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _serve(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.requests[request.path if request.match_info.route.resource is not None else "other"] += 1
        try:
            return await handler(request)
        except PixiuError as error:
            return _json({"message": f"SERVICE_UNAVAILABLE: {error}"}, 503)

    async def _lookup(self, request: web.Request) -> web.Response:
        topic, access = request.query.get("topic", ""), request.query.get("access", READ)
        if not topic or not is_name(topic):
            return _json({"message": "INVALID_ARG_TOPIC" if topic else "MISSING_ARG_TOPIC"}, 400)
        if access not in (READ, WRITE):
            return _json({"message": "INVALID_ARG_ACCESS: r or w"}, 400)
        found = await self._upstream.lookup(SIDES[self._states.of(topic), access], topic)
        if found is None:
            return _json({"message": "TOPIC_NOT_FOUND"}, 404)
        return _json({"channels": list(found.channels), "producers": [dict(each) for each in found.producers]})

    async def _topics(self, _request: web.Request) -> web.Response:
        return _json({"topics": sorted(str(each) for each in await self._upstream.names("/topics", "topics"))})

    async def _channels(self, request: web.Request) -> web.Response:
        topic = request.query.get("topic", "")
        if not is_name(topic):
            return _json({"message": "MISSING_ARG_TOPIC"}, 400)
        sides = SIDES[self._states.of(topic), READ]
        found = await self._upstream.names(f"/channels?topic={topic.replace('#', '%23')}", "channels", sides)
        return _json({"channels": sorted(str(each) for each in found)})

    async def _nodes(self, _request: web.Request) -> web.Response:
        return _json({"producers": await self._upstream.names("/nodes", "producers")})

    async def _ping(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK", headers=HEADERS)

    async def _info(self, _request: web.Request) -> web.Response:
        phases = Counter(f"phase_{int(phase)}" for phase in self._states.phases.values())
        return _json({"version": f"1.3.0-pixiu-{__version__}", "requests": dict(self.requests), **phases})


def _json(found: Any, status: int = 200) -> web.Response:
    return web.json_response(found, status=status, headers=HEADERS)


async def serve(states: States, old: list[str], new: list[str], host: str, port: int) -> None:
    """Run a proxy until SIGTERM or SIGINT. Raises `PixiuError`, `OSError`."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with Upstream(old, new) as upstream, contextlib.AsyncExitStack() as stack:
        await states.start()
        stack.push_async_callback(states.close)
        proxy = Proxy(upstream, states)
        stack.push_async_callback(proxy.close)
        bound = await proxy.start(host, port)
        log.get_logger().info(PROXIES, address=host, http_port=bound, old=",".join(old), new=",".join(new))
        await ended.wait()
