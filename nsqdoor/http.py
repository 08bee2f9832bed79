"""The HTTP of nsqd and of nsqlookupd, at one port: their paths differ, but for those that mean the same.

| nsqd | `/pub /mpub /stats /topic/… /channel/…` | nsqlookupd | `/lookup /topics /channels /nodes` | both | `/ping /info` |

Source: https://nsq.io/components/nsqd.html, https://nsq.io/components/nsqlookupd.html; docs/nsq.md, "HTTP".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from cluster.metrics.metrics import CONTENT_TYPE, Metrics
from cluster.nsq.frames import is_name
from nsqdoor.logins import Login, Logins
from nsqdoor.options import Options
from nsqdoor.peers import Peers
from nsqdoor.protocol.commands import Refused, messages_of, number_of
from nsqdoor.protocol.events import Limits, Publish
from nsqdoor.protocol.session import MAX_MESSAGES
from nsqdoor.publisher import Outcomes, Publisher
from nsqdoor.stats import stats_of
from nsqdoor.topics import channel_name
from pixiu.errors import InvalidArgument, NotAllowed, NotAuthenticated, PixiuError, TopicInUse, UnknownTopic

REQUEST_S: Final = 30.0
"""Time for a request, seconds."""
HEADERS: Final = {"X-NSQ-Content-Type": "nsq; version=1.0"}
ANSWER: Final = Callable[[web.Request], Awaitable[web.Response]]
NOT_THERE: Final = "this cluster has no such operation; see docs/nsq.md"
PUBLISHED: Final = "OK"


class HttpError(Exception):
    """An answer that is no success.

    Args:
        status: of HTTP.
        message: as nsqd says it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """Serves HTTP; see the module. What uses a topic does so with the login of `Authorization: Bearer`, else the listener's own."""

    def __init__(self, options: Options, limits: Limits, logins: Logins, peers: Peers, metrics: Metrics) -> None:
        self._options, self._limits, self._logins, self._peers, self._metrics = options, limits, logins, peers, metrics
        self._started = int(time.time())
        self._runner: web.AppRunner | None = None
        self.requests = 0
        self.draining = False

    async def start(self) -> asyncio.Server:
        """Listen."""
        app = web.Application(client_max_size=self._limits.max_body, middlewares=[self._serve])
        for method, path, handler in (
            ("POST", "/pub", self._pub), ("POST", "/put", self._pub), ("POST", "/mpub", self._mpub), ("POST", "/mput", self._mpub),
            ("GET", "/stats", self._stats), ("GET", "/ping", self._ping), ("GET", "/info", self._info),
            ("POST", "/topic/create", self._topic_create), ("POST", "/topic/delete", self._topic_delete),
            ("POST", "/topic/empty", self._topic_empty), ("POST", "/channel/create", self._channel_create),
            ("POST", "/channel/delete", self._channel_delete), ("POST", "/channel/empty", self._channel_empty),
            ("GET", "/lookup", self._lookup), ("GET", "/topics", self._topics), ("GET", "/channels", self._channels),
            ("GET", "/nodes", self._nodes), ("GET", "/metrics", self._get_metrics),
        ):  # fmt: skip
            app.router.add_route(method, path, handler)
        for path in ("/topic/pause", "/topic/unpause", "/channel/pause", "/channel/unpause", "/topic/tombstone"):
            app.router.add_post(path, self._not_there)
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=15.0, max_line_size=8_192, max_field_size=12_288, max_headers=64,
            lingering_time=1.0, shutdown_timeout=1.0, auto_decompress=False,
        )  # fmt: skip
        await self._runner.setup()
        assert self._runner.server is not None
        return await asyncio.get_running_loop().create_server(self._runner.server, self._options.host, self._options.http_port)

    async def close(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _serve(self, request: web.Request, handler: ANSWER) -> web.StreamResponse:  # type: ignore[valid-type]
        self.requests += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                return await handler(request)  # type: ignore[no-any-return, misc]
        except HttpError as error:
            return _json({"message": str(error)}, error.status)
        except Refused as error:
            return _json({"message": error.code.removeprefix("E_")}, 413 if "too big" in str(error) else 400)
        except (NotAuthenticated, NotAllowed):
            return _json({"message": "UNAUTHORIZED"}, 403)
        except UnknownTopic:
            return _json({"message": "TOPIC_NOT_FOUND"}, 404)
        except TopicInUse as error:
            return _json({"message": str(error)}, 409)
        except InvalidArgument as error:
            return _json({"message": str(error)}, 400)
        except (PixiuError, TimeoutError) as error:
            return _json({"message": f"SERVICE_UNAVAILABLE: {error}"}, 503)

    # --- arguments

    @contextlib.asynccontextmanager
    async def _login(self, request: web.Request, *, names: bool = False) -> AsyncIterator[Login]:
        """The login of a request. `names`: look-ups, which clients make without one."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip() if self._options.auth and kind.lower() == "bearer" else None
        if self._options.auth and not given and not names:
            raise HttpError(401, "UNAUTHORIZED: `Authorization: Bearer TOKEN` is missing")
        login = await self._logins.use(given or None)
        try:
            yield login
        finally:
            self._logins.leave(login)

    def _topic(self, request: web.Request) -> str:
        return _name(request.query, "topic", "MISSING_ARG_TOPIC", "INVALID_TOPIC")

    def _channel(self, request: web.Request) -> tuple[str, str]:
        topic = self._topic(request)
        return topic, channel_name(_name(request.query, "channel", "MISSING_ARG_CHANNEL", "INVALID_CHANNEL"))

    # --- nsqd

    async def _pub(self, request: web.Request) -> web.Response:
        topic, text = self._topic(request), request.query.get("defer", "0")
        delay = number_of(text.encode())
        if delay is None or delay > self._limits.max_delay_ms:
            raise HttpError(400, "INVALID_DEFER")
        body = await _body(request, self._limits.max_message, "MSG_TOO_BIG")
        if not body:
            raise HttpError(400, "MSG_EMPTY")
        return await self._publish(request, Publish("PUB", topic, (body,), delay))

    async def _mpub(self, request: web.Request) -> web.Response:
        topic = self._topic(request)
        body = await _body(request, self._limits.max_body, "BODY_TOO_BIG")
        if request.query.get("binary", "false") in ("true", "1"):
            bodies = messages_of(body, self._limits.max_message, MAX_MESSAGES)
        else:
            bodies = [line for line in body.split(b"\n") if line]
        if len(bodies) > MAX_MESSAGES or any(len(each) > self._limits.max_message for each in bodies):
            raise HttpError(413, "MSG_TOO_BIG")
        return await self._publish(request, Publish("MPUB", topic, bodies))

    async def _publish(self, request: web.Request, found: Publish) -> web.Response:
        answered: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()

        def published(outcomes: Outcomes) -> None:
            if not answered.done():
                answered.set_result(outcomes[0][1])

        async with self._login(request) as login:
            if found.bodies:
                publisher = Publisher(login.topics, self._options, published)
                publisher.offer(found)
                try:
                    why = await answered
                finally:
                    publisher.close()
                if why is not None:
                    status = 403 if why.code == "E_UNAUTHORIZED" else 400 if why.code.startswith("E_BAD") else 503
                    raise HttpError(status, str(why).removeprefix("E_"))
        return web.Response(text=PUBLISHED, headers=HEADERS)

    async def _stats(self, request: web.Request) -> web.Response:
        async with self._login(request, names=True) as login:
            found = await stats_of(login, request.query.get("topic", ""), request.query.get("channel", ""))
        found |= {"version": self._limits.version, "health": "OK", "start_time": self._started}
        if request.query.get("format") == "json":
            return _json(found)
        lines = [f"{self._limits.version}", f"start_time {self._started}", ""]
        for topic in found["topics"]:
            lines.append(f"[{topic['topic_name']}] depth: {topic['depth']} msgs: {topic['message_count']}")
            lines += [
                f"    [{each['channel_name']}] depth: {each['depth']} inflt: {each['in_flight_count']} "
                f"def: {each['deferred_count']} clients: {each['client_count']}"
                for each in topic["channels"]
            ]
        return web.Response(text="\n".join(lines) + "\n", headers=HEADERS)

    async def _ping(self, _request: web.Request) -> web.Response:
        if self.draining:
            return web.Response(status=503, text="draining")
        return web.Response(text="OK", headers=HEADERS)

    async def _info(self, _request: web.Request) -> web.Response:
        own = self._peers.own
        return _json(
            {
                "version": own.version, "broadcast_address": own.broadcast_address, "hostname": own.hostname,
                "http_port": own.http_port, "tcp_port": own.tcp_port, "start_time": self._started, "topology_zone": "",
                "topology_region": "", "max_heartbeat_interval": self._limits.max_heartbeat_ms * 1_000_000,
            }
        )  # fmt: skip

    async def _topic_create(self, request: web.Request) -> web.Response:
        topic = self._topic(request)
        async with self._login(request) as login:
            await login.topics.ensure(topic, self._options)
        return _json({})

    async def _topic_delete(self, request: web.Request) -> web.Response:
        topic = self._topic(request)
        async with self._login(request) as login:
            await login.px.topics.delete(topic)
            login.topics.forget(topic)
        return _json({})

    async def _topic_empty(self, request: web.Request) -> web.Response:
        topic = self._topic(request)
        async with self._login(request) as login:
            for channel in (await login.px.topics.describe(topic)).channels:
                await login.px.topics.seek(topic, channel, "end", force=True)
        return _json({})

    async def _channel_create(self, request: web.Request) -> web.Response:
        topic, channel = self._channel(request)
        async with self._login(request) as login:
            await login.topics.make_channel(topic, channel, self._options)
        return _json({})

    async def _channel_delete(self, request: web.Request) -> web.Response:
        topic, channel = self._channel(request)
        async with self._login(request) as login:
            await self._known(login, topic, channel)
            await login.px.topics.remove_channel(topic, channel)
        return _json({})

    async def _channel_empty(self, request: web.Request) -> web.Response:
        topic, channel = self._channel(request)
        async with self._login(request) as login:
            await self._known(login, topic, channel)
            await login.px.topics.seek(topic, channel, "end", force=True)
        return _json({})

    async def _known(self, login: Login, topic: str, channel: str) -> None:
        if channel not in (await login.px.topics.describe(topic)).channels:
            raise HttpError(404, "CHANNEL_NOT_FOUND")

    async def _not_there(self, _request: web.Request) -> web.Response:
        raise HttpError(501, NOT_THERE)

    # --- nsqlookupd

    def _producers(self) -> list[dict[str, Any]]:
        return [vars(each) | {"topology_zone": "", "topology_region": ""} for each in self._peers.known]

    async def _lookup(self, request: web.Request) -> web.Response:
        topic = self._topic(request)
        async with self._login(request, names=True) as login:
            found = await login.px.topics.describe(topic)
        return _json({"channels": sorted(found.channels), "producers": self._producers()})

    async def _topics(self, request: web.Request) -> web.Response:
        async with self._login(request, names=True) as login:
            return _json({"topics": [each.name for each in await login.px.topics.list()]})

    async def _channels(self, request: web.Request) -> web.Response:
        topic = self._topic(request)
        async with self._login(request, names=True) as login:
            try:
                found = sorted((await login.px.topics.describe(topic)).channels)
            except UnknownTopic:
                found = []
        return _json({"channels": found})

    async def _nodes(self, request: web.Request) -> web.Response:
        async with self._login(request, names=True) as login:
            topics = [each.name for each in await login.px.topics.list()]
        each_one = {"tombstones": [False] * len(topics), "topics": topics}
        return _json({"producers": [each | each_one for each in self._producers()]})

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _name(query: Mapping[str, str], which: str, missing: str, wrong: str) -> str:
    found = query.get(which, "")
    if not found:
        raise HttpError(400, missing)
    if not is_name(found):
        raise HttpError(400, wrong)
    return found


async def _body(request: web.Request, most: int, too_big: str) -> bytes:
    if (request.content_length or 0) > most:
        raise HttpError(413, too_big)
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise HttpError(413, too_big) from None
    if len(body) > most:
        raise HttpError(413, too_big)
    return body


def _json(found: object, status: int = 200) -> web.Response:
    return web.json_response(found, status=status, headers=HEADERS)
