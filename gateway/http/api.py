"""Routes of the HTTP API. Each is described in `openapi.json`, which it serves as well.

    request ─▶ origin ─▶ login ─▶ quota ─▶ body ─▶ idempotency ─▶ client of the login ─▶ answer

Source: docs/http.md.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from importlib.resources import files
from typing import Any, Final, NamedTuple

from aiohttp import web

from cluster.access.login_guard import LoginGuard
from cluster.access.logins import credentials_of
from cluster.access.revocations import MAX_FILTER, MAX_REASON, Revocation
from cluster.access.rules import ALL, REVOKE, SUBSCRIBE, name_of
from cluster.access.tenants.names import TenantNames
from cluster.trust.identity import Identity
from gateway.clients.access import target_of_filter
from gateway.http import bodies
from gateway.http.answers import Refused, answer_of, bad, busy
from gateway.http.bodies import JSON, Publication
from gateway.http.bounded import read_body
from gateway.http.events import GAP, MAX_TOPICS, EventStream, fields_of
from gateway.http.idempotency import Idempotency, derived_id, fingerprint_of
from gateway.http.logins import Login, Logins
from gateway.http.receivers import ChannelReceiver, MailReceiver
from gateway.http.tenants import inward, mailing_outward, publication_outward, revocation_outward
from gateway.retained.client import Listed
from pixiu.client.client import Client
from pixiu.client.destination import Destination
from pixiu.client.messages.message import messages_of
from pixiu.errors import NotAllowed, PixiuError
from pixiu.ids import MAX_ID
from pixiu.placement.topics import TopicRefusal, parse_filter

MAX_WAIT_S: Final = 30.0
MAX_FETCH: Final = 100
MAX_MAILS: Final = 200
MAX_RETAINED: Final = 1000
MAX_DEVICE: Final = 128
MAX_DELAY_S: Final = 3600
EVENTS_AT_ONCE: Final = 100
KEEP_ALIVE_S: Final = 15.0
"""Interval of comments in a stream of events, by which both sides see that it lives."""
SLOW_S: Final = 10.0
"""Time in which a reader of events must take what is written."""
DESCRIPTION: Final = files("gateway.http").joinpath("openapi.json").read_bytes()
UNKNOWN_OFFSET: Final = -1
CLIENT: Final = "http"
"""Client ID of the callers, in logs and rules."""
CORS: Final = web.RequestKey("cors", dict[str, str])
"""Headers of a request's answer for a web page."""


class Caller(NamedTuple):
    """Identity of a caller."""

    identity: Identity | None
    """None: nobody has to log in."""
    user: int
    token: str


class Reply(NamedTuple):
    """A JSON answer."""

    status: int
    fields: Mapping[str, Any]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The handlers of the routes.

    Args:
        revoke: passes a revocation on to all gateways. Raises `PixiuError`.
        retained: lists retained messages: those that match a filter, at most a number, above a topic. Raises `PixiuError`.
        draining: True once clients are to use another gateway.
    """

    def __init__(
        self,
        guard: LoginGuard | None,
        logins: Logins,
        revoke: Callable[[Revocation, Identity], Awaitable[None]],
        retained: Callable[[str, int, str], Awaitable[tuple[list[Listed], str]]],
        draining: Callable[[], bool],
    ) -> None:
        self._guard, self._logins, self._revoke, self._retained, self.draining = guard, logins, revoke, retained, draining
        self.idempotency = Idempotency()

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler) of every route."""
        return [
            ("GET", "/v1/health", self.health),
            ("GET", "/v1/openapi.json", self.description),
            ("POST", "/v1/publish", self.publish),
            ("POST", "/v1/mail", self.mail),
            ("GET", "/v1/inbox", self.inbox),
            ("POST", "/v1/inbox/ack", self.inbox_ack),
            ("GET", "/v1/events", self.events),
            ("GET", "/v1/retained", self.retained),
            ("POST", "/v1/topics/{topic}/messages", self.append),
            ("POST", "/v1/channels/{topic}/{channel}/fetch", self.fetch),
            ("POST", "/v1/channels/{topic}/{channel}/ack", self.channel_ack),
            ("POST", "/v1/revoke", self.revoke),
        ]

    # --- without a login

    async def health(self, _request: web.Request) -> web.Response:
        """Report whether this gateway takes requests."""
        return _json(503, {"status": "draining"}) if self.draining() else _json(200, {"status": "ok"})

    async def description(self, _request: web.Request) -> web.Response:
        """Return the description of the API."""
        return web.Response(body=DESCRIPTION, content_type=JSON)

    # --- sending

    async def publish(self, request: web.Request) -> web.StreamResponse:
        """Publish messages to rooms, free topics, and users who are online."""
        caller, body = await self._caller(request), await read_body(request)
        found, batch = _parsed(request, body, bodies.publication_of, ("topic", "type", "lifetime_min"), ("type", "lifetime_min"))
        if (tenant := self._tenant(caller)) is not None:
            found = [publication_outward(tenant, message) for message in found]

        async def send(login: Login, at: int, message: Publication, ids: Callable[[int], int | None]) -> dict[str, Any]:
            receipt = await _destination(login.px, message).send(message.payload, derived_id=ids(at), **message.options)
            return {"id": f"{receipt.message_id:016x}"}

        return await self._send(request, caller, body, found, batch, send)

    async def mail(self, request: web.Request) -> web.StreamResponse:
        """Send mail to users' inboxes."""
        caller, body = await self._caller(request), await read_body(request)
        names = ("to", "type", "lane", "level", "expire_min")
        found, batch = _parsed(request, body, bodies.mailing_of, names, ("to", "type", "lane", "expire_min"))
        if (tenant := self._tenant(caller)) is not None:
            found = [mailing_outward(tenant, mail) for mail in found]

        async def send(login: Login, at: int, mail: bodies.Mailing, ids: Callable[[int], int | None]) -> dict[str, Any]:
            options = dict(mail.options)
            minutes = options.pop("expire_min")
            receipt = await login.px.user(mail.to[0]).mail(
                mail.payload, to=mail.to[1:], expire=timedelta(minutes=minutes) if minutes else None, derived_id=ids(at), **options
            )
            return {"id": f"{receipt.message_id:016x}"}

        return await self._send(request, caller, body, found, batch, send)

    async def append(self, request: web.Request) -> web.StreamResponse:
        """Store messages in a durable topic."""
        caller, body = await self._caller(request), await read_body(request)
        found, batch = _parsed(request, body, bodies.entry_of, ("key", "tag", "level"))
        topic = self._durable(request, caller)

        async def send(login: Login, _at: int, entry: bodies.Entry, _ids: Callable[[int], int | None]) -> dict[str, Any]:
            receipt = await login.px.durable_topic(topic).send(entry.payload, **entry.options)
            part, offset = receipt.position or (receipt.part, UNKNOWN_OFFSET)
            return {"part": part, "offset": offset}

        return await self._send(request, caller, body, found, batch, send)

    async def _send(
        self,
        request: web.Request,
        caller: Caller,
        body: bytes,
        found: list[Any],
        batch: bool,
        send: Callable[[Login, int, Any, Callable[[int], int | None]], Awaitable[dict[str, Any]]],
    ) -> web.Response:
        """Send messages, once for each `Idempotency-Key`. A batch is answered for each message."""
        self._pay(caller, len(found), sum(len(item.payload) for item in found))
        key = request.headers.get("Idempotency-Key")
        name = caller.identity.user if caller.identity is not None else str(caller.user)
        # Only services may derive IDs: everybody else could take an ID that another will use.
        derives = key is not None and (caller.identity is None or not caller.identity.uin)

        def ids(at: int) -> int | None:
            return derived_id(name, str(key), at) if derives else None

        async def carry_out() -> Reply:
            async with self._logins.use(*caller) as login:
                tasks = [_outcome(send(login, at, item, ids)) for at, item in enumerate(found)]
                replies = await asyncio.gather(*tasks)
            if not batch:
                return replies[0]
            results = [reply.fields for reply in replies]
            return Reply(200, {"results": results, "failed": sum(reply.status != 200 for reply in replies)})

        if key is None:
            return _json(*await carry_out())
        fingerprint = fingerprint_of(request.path_qs.encode(), request.content_type.encode(), body)
        kept = self.idempotency.begin(name, key, fingerprint, asyncio.get_running_loop().time())
        if kept is not None:
            return web.Response(status=kept.status, body=kept.body, content_type=JSON, headers={"Idempotency-Replayed": "true"})
        status, answer = 0, b""
        try:
            reply = await carry_out()
            status, answer = reply.status, _encoded(reply.fields)
        finally:
            self.idempotency.end(name, key, status, answer)
        return _json(*reply)

    # --- receiving

    async def inbox(self, request: web.Request) -> web.StreamResponse:
        """Give a device its mail that is not acknowledged, after waiting for some."""
        caller = await self._caller(request, receives=True)
        query = _query(request, ("device", "wait", "limit", "user"))
        device, wait_s = bodies.text_of(query, "device", MAX_DEVICE), _wait_s(query)
        most = bodies.number_of(bodies.from_query(query, ("limit",)), "limit", 100, 1, MAX_MAILS)
        async with self._logins.use(*caller) as login, login.receiver(("mail", device), self._mail_of(login, device)) as receiver:
            mails = await receiver.take(most, wait_s)
            return _json(200, {"mails": [inward(self._tenant(caller), mail) for mail in mails]})

    async def inbox_ack(self, request: web.Request) -> web.StreamResponse:
        """Acknowledge mail of a device."""
        caller = await self._caller(request, receives=True)
        fields = bodies.decoded(await read_body(request))
        bodies.check_names(fields, ("device", "ids"))
        device, ids = bodies.text_of(fields, "device", MAX_DEVICE), bodies.ids_of(fields, "ids")
        async with self._logins.use(*caller) as login, login.receiver(("mail", device), self._mail_of(login, device)) as receiver:
            acknowledged, unknown = await receiver.acknowledge(ids)
        return _json(200, {"acknowledged": acknowledged, "unknown": unknown})

    def _mail_of(self, login: Login, device: str) -> Callable[[], MailReceiver]:
        return lambda: MailReceiver(login.px, login.user, device)

    async def fetch(self, request: web.Request) -> web.StreamResponse:
        """Give a member of a channel messages, after waiting for some."""
        caller = await self._caller(request)
        fields = bodies.decoded(await read_body(request) or b"{}")
        bodies.check_names(fields, ("max", "wait"))
        most = bodies.number_of(fields, "max", MAX_FETCH, 1, MAX_FETCH)
        wait_s = bodies.number_of(fields, "wait", 0, 0, int(MAX_WAIT_S))
        async with self._logins.use(*caller) as login, self._channel(request, caller, login) as receiver:
            return _json(200, {"messages": await receiver.take(most, float(wait_s))})

    async def channel_ack(self, request: web.Request) -> web.StreamResponse:
        """Acknowledge messages of a channel, or give them back."""
        caller = await self._caller(request)
        fields = bodies.decoded(await read_body(request))
        bodies.check_names(fields, ("acks", "nacks", "delay_s"))
        acks, nacks = bodies.texts_of(fields, "acks"), bodies.texts_of(fields, "nacks")
        delay_s = bodies.number_of(fields, "delay_s", 0, 0, MAX_DELAY_S)
        async with self._logins.use(*caller) as login, self._channel(request, caller, login) as receiver:
            reported, late = await receiver.report(acks, nacks, float(delay_s))
        return _json(200, {"reported": reported, "late": late})

    def _channel(self, request: web.Request, caller: Caller, login: Login) -> Any:
        topic, channel = self._durable(request, caller), request.match_info["channel"]
        return login.receiver(("channel", topic, channel), lambda: ChannelReceiver(login.px, topic, channel))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream the messages of topics as server-sent events."""
        caller = await self._caller(request)
        topics = frozenset(request.query.getall("topic", ()))
        if not 1 <= len(topics) <= MAX_TOPICS or not {*request.query} <= {"topic", "user"}:
            raise bad(f"give topic= 1 to {MAX_TOPICS} times")
        if (tenant := self._tenant(caller)) is not None:
            topics = frozenset(map(tenant.outward, topics))
        users = {bodies.topic_of(name)[2] for name in topics} - {0}
        if users - {caller.user}:
            raise NotAllowed("messages to another user cannot be received: the topic user/UIN is for the user's own")
        last = request.headers.get("Last-Event-ID")
        async with self._logins.use(*caller) as login:
            key = ("events", topics)
            async with login.receiver(key, lambda: EventStream(login.px, login.user, topics, tenant), shared=True) as stream:
                return await self._stream(request, caller, stream, last)

    async def _stream(
        self, request: web.Request, caller: Caller, stream: EventStream, last: str | None
    ) -> web.StreamResponse:  # fmt: skip
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        response.headers.update(request.get(CORS, {}))
        at = stream.ring.after(last) if last is not None else stream.ring.next
        await response.prepare(request)
        first, at = (b": connected\n\n", at) if at is not None else (GAP.encode(), stream.ring.next)
        try:
            await response.write(first)
            await self._send_events(response, caller, stream, at)
        except (TimeoutError, ConnectionError):  # the reader is too slow, or gone
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send_events(self, response: web.StreamResponse, caller: Caller, stream: EventStream, at: int) -> None:
        """Send events from a number on, until the stream or the login ends. Raises `TimeoutError` for a reader that is too slow."""
        ends = caller.identity.expires_at if caller.identity is not None else math.inf
        while stream.error is None and not self.draining() and time.time() < ends:
            if at < stream.ring.first:
                at, text = stream.ring.first, GAP.encode()
            else:
                events = stream.ring.since(at, EVENTS_AT_ONCE)
                at, text = at + len(events), b"".join(event.text for event in events)
            if not text:
                try:
                    async with asyncio.timeout(min(KEEP_ALIVE_S, ends - time.time())):
                        await stream.more()
                    continue
                except TimeoutError:
                    text = b": alive\n\n"
            async with asyncio.timeout(SLOW_S):
                await response.write(text)
        if stream.error is not None:
            answer = answer_of(stream.error)
            await response.write(f"event: end\ndata: {json.dumps({'code': answer.code, 'text': answer.text})}\n\n".encode())

    async def retained(self, request: web.Request) -> web.StreamResponse:
        """List the retained messages that match a filter."""
        caller = await self._caller(request)
        query = _query(request, ("filter", "limit", "after", "user"))
        name = bodies.text_of(query, "filter", MAX_FILTER)
        after = bodies.text_of(query, "after", MAX_FILTER) if "after" in query else ""
        most = bodies.number_of(bodies.from_query(query, ("limit",)), "limit", 100, 1, MAX_RETAINED)
        parsed = parse_filter(name)
        if isinstance(parsed, TopicRefusal) or parsed.group or "\0" in name + after:
            raise bad("filter is no topic, and no filter of topics")
        tenant = self._tenant(caller)
        if tenant is not None:
            name, after = tenant.outward(name), tenant.outward(after)
        if caller.identity is not None and self._guard is not None:
            target = target_of_filter(name)
            if not self._guard.may(caller.identity, CLIENT, request.remote or "", SUBSCRIBE, target):
                raise NotAllowed(f"this login has no right to `{SUBSCRIBE}` with {name_of(target)}")
        found, end = await self._retained(name, most, after)
        messages, _ = messages_of(b"".join(each.record for each in found), len(found))
        shown = [fields for message in messages if (fields := inward(tenant, fields_of(message)))["topic"]]
        return _json(200, {"messages": shown, "next": end if tenant is None else tenant.text_inward(end)})

    # --- permissions

    async def revoke(self, request: web.Request) -> web.StreamResponse:
        """End subscriptions of a user at all gateways."""
        caller = await self._caller(request)
        fields = bodies.decoded(await read_body(request))
        if self._guard is None or caller.identity is None:
            raise NotAllowed("nobody logs in to this cluster, so there are no permissions to revoke")
        if not self._guard.may(caller.identity, CLIENT, request.remote or "", REVOKE, ALL):
            raise NotAllowed("this login may not revoke: a rule must allow it the action `revoke`")
        bodies.check_names(fields, ("user", "filter", "reason"))
        reason = bodies.text_of(fields, "reason", MAX_REASON) if "reason" in fields else ""
        revocation = Revocation(bodies.text_of(fields, "user", 256), bodies.text_of(fields, "filter", MAX_FILTER), reason)
        revocation.check()
        if (tenant := self._tenant(caller)) is not None:
            revocation = revocation_outward(tenant, revocation)
        await self._revoke(revocation, caller.identity)
        return _json(200, {"revoked": True})

    # --- inside

    async def _caller(self, request: web.Request, *, receives: bool = False) -> Caller:
        """Identify the caller. Raises `PixiuError`, `Refused`. `receives`: it must be a user."""
        if self.draining():
            raise Refused(503, "DRAINING", "this gateway is ending: use another one", 1)
        named = bodies.integer(request.query.get("user", "0"), "user")
        if named > MAX_ID:
            raise bad("user is a UIN from 1 to 2^63-1")
        caller = Caller(None, named, "")
        if self._guard is not None:
            address = request.remote or ""
            with self._guard.refusing(address, CLIENT):
                credentials = credentials_of(request.headers.get("Authorization", ""), CLIENT, address)
            identity = self._guard.check_now(credentials) or await self._guard.check(credentials)
            tenant = self._guard.tenants.of(identity)
            with self._guard.refusing(address, CLIENT):
                identity.check_uin(named if tenant is None or not named else tenant.names.uin_outward(named) or MAX_ID)
            if credentials.user:
                raise Refused(401, "UNAUTHENTICATED", "the HTTP API takes tokens: Authorization: Bearer TOKEN")
            caller = Caller(identity, identity.uin, credentials.secret)
        if receives and not caller.user:
            raise bad("an inbox belongs to a user: log in as one" if self._guard is not None else "give the user's UIN: user=")
        self._pay(caller, 0, 0)
        return caller

    def _tenant(self, caller: Caller) -> TenantNames | None:
        """Names of the caller's tenant; None: it has none."""
        found = self._guard.tenants.of(caller.identity) if self._guard is not None and caller.identity is not None else None
        return found.names if found is not None else None

    def _durable(self, request: web.Request, caller: Caller) -> str:
        """The durable topic of a route."""
        topic, tenant = request.match_info["topic"], self._tenant(caller)
        return topic if tenant is None else tenant.durable_outward(topic)

    def _pay(self, caller: Caller, messages: int, size: int) -> None:
        """Charge messages to the login's quota. Raises `Refused` while it owes for earlier ones."""
        if self._guard is None or caller.identity is None:
            return
        tenant = self._guard.tenants.of(caller.identity)
        if tenant is not None and (why := tenant.why_over(time.monotonic())):
            tenant.counters.refused_messages += max(messages, 1)
            raise busy(why, 1)
        owed_s = self._guard.spend(caller.identity, 0, 0)
        if owed_s:
            raise busy("the quota of this login is used up", math.ceil(owed_s))
        self._guard.spend(caller.identity, messages, size)


def _parsed(
    request: web.Request,
    body: bytes,
    parse: Callable[[Mapping[str, Any]], Any],
    names: tuple[str, ...],
    numbers: tuple[str, ...] = (),
) -> tuple[list[Any], bool]:
    """Messages of a request, and whether they are a batch."""
    if request.content_type == JSON:
        _query(request, ("user",))
        fields = bodies.decoded(body)
        items = bodies.items_of(fields)
        return ([parse(fields)], False) if items is None else ([parse(item) for item in items], True)
    query = _query(request, ("user", *names))
    query.pop("user", None)
    found = parse(bodies.from_query(query, numbers))
    return [found._replace(payload=body)], False


def _query(request: web.Request, names: tuple[str, ...]) -> dict[str, str]:
    """Query of a request. Raises `Refused` for one that is unknown, or given twice."""
    query = dict(request.query)
    bodies.check_names(query, names)
    if len(query) != len(request.query):
        raise bad("a parameter was given twice")
    return query


def _wait_s(query: Mapping[str, str]) -> float:
    return float(bodies.number_of(bodies.from_query(query, ("wait",)), "wait", 0, 0, int(MAX_WAIT_S)))


def _destination(client: Client, message: Publication) -> Destination:
    if message.user:
        return client.user(message.user).destination
    return client.room(message.room) if message.room else client.topic(message.topic)


async def _outcome(sent: Awaitable[dict[str, Any]]) -> Reply:
    """Reply for one message."""
    try:
        return Reply(200, await sent)
    except PixiuError as error:
        answer = answer_of(error)
        return Reply(answer.status, error_fields(answer.code, answer.text, answer.retry_after_s))


def error_fields(code: str, text: str, retry_after_s: int = 0) -> dict[str, Any]:
    """Body of an error."""
    return {"error": {"code": code, "text": text} | ({"retry_after_s": retry_after_s} if retry_after_s else {})}


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _json(status: int, fields: Mapping[str, Any]) -> web.Response:
    headers = {}
    if status != 200 and (retry_s := fields.get("error", {}).get("retry_after_s")):
        headers["Retry-After"] = str(retry_s)
    return web.Response(status=status, body=_encoded(fields), content_type=JSON, headers=headers)
