"""The listeners of a cluster that asks for logins: HTTP, server-sent events, WebSocket; and revocations at all gateways.

Every answer is compared with what `openapi.json` says of its route.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import pixiu
import pixiu.testing
from gateway.http.api import Api
from tests.support.forks import fork_pixiu
from tests.support.logins import RULES, Logins
from tests.support.openapi import OPENAPI, problem, schema_of_answer, template_of
from tests.support.waiting import until

WAIT_S = 60.0
SERVICE_RULES = """
[quota.groups.slow]
messages_per_s = 5

[[rule]]
allow = ["publish", "subscribe", "mail", "revoke", "topics", "produce", "consume", "channel"]
groups = ["services"]
"""
ORIGIN = "https://app.example.com"
used: set[str] = set()
"""Routes that tests have called."""


@dataclass
class World:
    """A cluster with two gateways, and who may come."""

    cluster: pixiu.testing.Cluster
    logins: Logins
    api: list[str]
    websockets: list[int]

    def token(self, user: str, uin: int | None, group: str) -> str:
        return self.logins.token(user, uin, group)

    def audit(self, event: str) -> list[dict[str, Any]]:
        """Lines of the gateways' audit logs."""
        data = self.cluster.logs.parent
        lines = [line for path in data.glob("gateway-*/audit/audit.log") for line in path.read_text().splitlines()]
        return [found for line in lines if (found := json.loads(line))["kind"] == event]


def two_free_ports() -> int:
    """The first of two free ports in a row."""
    while True:
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            first = int(one.getsockname()[1])
            two.bind(("127.0.0.1", first + 1))
            return first


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    logins = Logins(tmp_path_factory.mktemp("http"))
    logins.write_rules(SERVICE_RULES + RULES)
    api, websocket = two_free_ports(), two_free_ports()
    settings: dict[str, object] = {
        **logins.settings(), "gateway.api_port": api, "gateway.websocket_port": websocket,
        "gateway.api_origins": ORIGIN, "gateway.proxy_networks": "127.0.9.0/24",
    }  # fmt: skip
    with pixiu.testing.cluster(gateways=2, settings=settings) as cluster:
        yield World(cluster, logins, [f"http://127.0.0.1:{api + number}" for number in (0, 1)], [websocket, websocket + 1])
        said = b"".join(path.read_bytes() for path in cluster.logs.rglob("*") if path.is_file())
    assert b"Traceback" not in said


def pixiu_command(*words: str) -> str:
    """What a command prints."""
    done = fork_pixiu(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Http:
    """A client of one gateway's API."""

    def __init__(self, url: str, token: str = "") -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.session = aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(WAIT_S))

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        """The status and JSON of an answer, which must be as described."""
        async with self.session.request(method, path, **more) as answer:
            status, found = answer.status, await answer.json()
            note(method, answer.url.path)
            assert not problem(schema_of_answer(method, answer.url.path, status), found)
            if status in (429, 503) and "error" in found:
                assert int(answer.headers["Retry-After"]) == found["error"]["retry_after_s"] >= 1
            return status, found

    @contextlib.asynccontextmanager
    async def events(self, *topics: str, last: str | None = None) -> AsyncIterator[Events]:
        """A stream of events."""
        headers = {"Last-Event-ID": last} if last is not None else {}
        query = [("topic", topic) for topic in topics]
        note("GET", "/v1/events")
        async with self.session.get("/v1/events", params=query, headers=headers) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            yield Events(answer.content)


class Events:
    """Reads events."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def next(self) -> tuple[str, Any]:
        """Name and data of the next one."""
        found: dict[str, str] = {}
        while line := (await self._content.readline()).decode():
            if line == "\n" and "event" in found:
                return found["event"], json.loads(found["data"])
            name, colon, value = line.rstrip("\n").partition(": ")
            if colon and name:
                found[name] = value
        raise EOFError


def note(method: str, path: str) -> None:
    """Note that a route was called."""
    used.add(f"{method} {template_of(path)}")


async def test_what_is_published_arrives_as_events_and_a_reader_comes_back(world: World) -> None:
    token = world.token("alice", 7, "players")
    async with Http(world.api[0], token) as http, Http(world.api[1], world.token("back", None, "services")) as back:
        async with http.events("room/42", "games/7/score", "user/7") as events:
            status, sent = await back.call("POST", "/v1/publish", json={"topic": "room/42", "payload": "ü", "headers": {"a": "b"}})
            assert status == 200
            name, first = await events.next()
            assert (name, first["id"], first["topic"], first["payload"]) == ("message", sent["id"], "room/42", "ü")
            assert (first["headers"], first["sender"]) == ({"a": "b"}, 0)
            raw = {"data": b"\xff\0", "headers": {"Content-Type": "application/octet-stream"}}
            await back.call("POST", "/v1/publish?topic=games/7/score&type=3", **raw)
            _, second = await events.next()
            assert (second["payload_base64"], second["type"]) == (base64.b64encode(b"\xff\0").decode(), 3)
            await http.call("POST", "/v1/publish", json={"topic": "user/7", "payload": "to me"})
            _, third = await events.next()
            assert (third["topic"], third["sender"]) == ("user/7", 7)
        batch = [{"topic": "room/42", "payload": str(number)} for number in range(900)]
        status, found = await back.call("POST", "/v1/publish", json={"messages": batch})
        assert (status, found["failed"], len(found["results"])) == (200, 0, 900)
        async with http.events("room/42", "games/7/score", "user/7", last=third["id"]) as events:
            assert [(await events.next())[1]["payload"] for _ in range(900)] == [str(number) for number in range(900)]
        async with http.events("room/42", last="00000000000000ff") as events:
            assert (await events.next())[0] == "gap"


async def test_mail_is_taken_until_it_is_acknowledged_and_sent_once(world: World) -> None:
    token = world.token("ann", 8, "players")
    async with Http(world.api[0], world.token("back", None, "services")) as back, Http(world.api[1], token) as http:
        first = asyncio.create_task(http.call("GET", "/v1/inbox?device=phone&wait=30"))
        again = {"json": {"to": [8, 9], "payload": "mail", "level": "persisted"}, "headers": {"Idempotency-Key": "order-1"}}
        sent = [await back.call("POST", "/v1/mail", **again) for _ in range(2)]
        async with Http(world.api[1], world.token("back", None, "services")) as other:
            sent.append(await other.call("POST", "/v1/mail", **again))
        assert sent[0][0] == 200, sent
        assert sent[1] == sent[2] == sent[0], "at both gateways"
        wrong = {"json": {"to": 8, "payload": "other"}, "headers": again["headers"]}
        assert (await back.call("POST", "/v1/mail", **wrong))[0] == 422
        _, found = await first
        (mail,) = found["mails"]
        assert (mail["payload"], mail["message_id"]) == ("mail", sent[0][1]["id"])
        assert (await http.call("GET", "/v1/inbox?device=phone"))[1]["mails"] == [mail], "until it is acknowledged"
        done = {"device": "phone", "ids": [mail["id"], "00000000000000ff"]}
        assert (await http.call("POST", "/v1/inbox/ack", json=done))[1] == {"acknowledged": 1, "unknown": ["00000000000000ff"]}
        assert (await http.call("GET", "/v1/inbox?device=phone&wait=1"))[1]["mails"] == []


async def test_a_channel_is_fetched_and_acknowledged(world: World) -> None:
    token = world.token("back", None, "services")
    async with pixiu.connect(world.cluster.target, token=token) as px:
        await px.topics.create("orders", parts=2)
        await px.topics.set_channel("orders", "billing")
    async with Http(world.api[0], token) as http:
        entries = [{"payload": f"order {number}", "key": "ann"} for number in range(3)]
        status, stored = await http.call("POST", "/v1/topics/orders/messages", json={"messages": entries})
        assert (status, stored["failed"]) == (200, 0)
        found: list[dict[str, Any]] = []
        while len(found) < 3:
            found += (await http.call("POST", "/v1/channels/orders/billing/fetch", json={"wait": 20}))[1]["messages"]
        assert [message["payload"] for message in found] == ["order 0", "order 1", "order 2"]
        tokens = [message["token"] for message in found]
        report = {"acks": tokens[:2], "nacks": tokens[2:]}
        assert (await http.call("POST", "/v1/channels/orders/billing/ack", json=report))[1] == {"reported": 3, "late": []}
        _, back = await http.call("POST", "/v1/channels/orders/billing/fetch", json={"wait": 20, "max": 1})
        assert [(message["payload"], message["attempts"]) for message in back["messages"]] == [("order 2", 2)]
        report = {"acks": [back["messages"][0]["token"], "9-9-9"]}
        assert (await http.call("POST", "/v1/channels/orders/billing/ack", json=report))[1] == {"reported": 1, "late": ["9-9-9"]}


async def test_refusals_have_a_status_and_a_reason(world: World) -> None:
    alice, late = world.token("alice", 7, "players"), world.logins.token("alice", 7, "players", lasts_s=-100)
    publish = {"json": {"topic": "room/42", "payload": "x"}}
    async with Http(world.api[0]) as nobody, Http(world.api[0], late) as expired, Http(world.api[0], alice) as http:
        assert (await nobody.call("POST", "/v1/publish", **publish))[0] == 401
        assert (await expired.call("POST", "/v1/publish", **publish))[0] == 401
        assert (await nobody.call("GET", "/v1/health"))[0] == 200
        assert (await nobody.call("GET", "/v1/openapi.json"))[1] == OPENAPI
        assert (await http.call("POST", "/v1/publish", json={"topic": "room/13"}))[0] == 403
        assert (await http.call("POST", "/v1/publish", json={"topic": "room/42", "playload": "x"}))[0] == 400
        assert (await http.call("POST", "/v1/publish", json={"topic": "user/99"}))[0] == 404
        assert (await http.call("POST", "/v1/publish?topic=room/42", data=bytes(3 << 20)))[0] == 413
        assert (await http.call("POST", "/v1/topics/orders/messages", json={}))[0] in (403, 404)
        assert (await http.call("GET", "/v1/inbox?device=phone&user=8"))[0] == 401
        assert (await http.call("GET", "/v1/events?topic=user/8"))[0] == 403
        assert (await http.call("POST", "/v1/revoke", json={"user": "bob", "filter": "#"}))[0] == 403
        assert (await http.call("POST", "/v1/publish", headers={"Origin": "https://evil.example.com"}, **publish))[0] == 403
        page = {"Sec-Fetch-Site": "same-origin"}
        assert (await http.call("GET", "/v1/inbox?device=phone", headers=page))[0] == 403, "a page whose name leads here"
        async with http.session.get("/v1/nothing") as answer:
            assert answer.status == 404
        async with http.session.options("/v1/publish", headers={"Origin": ORIGIN}) as answer:
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, ORIGIN)
    async with Http(world.api[0], world.token("slow", 11, "slow")) as slow:
        many = {"json": {"messages": [publish["json"]] * 15}}
        assert 429 in {status for status, _ in await asyncio.gather(*(slow.call("POST", "/v1/publish", **many) for _ in range(3)))}


async def test_a_balancer_says_who_the_client_is(world: World) -> None:
    port = int(world.api[0].rpartition(":")[2])
    request = b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for header, answered in ((b"PROXY TCP4 203.0.113.7 127.0.0.1 4000 80\r\n", True), (b"", False)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.9.1", 0))
        writer.write(header + request)
        with contextlib.suppress(ConnectionError):
            assert (b" 200 OK" in await reader.read()) is answered
        writer.close()


class Paho:
    """A stock MQTT client, by WebSocket."""

    def __init__(self, port: int, client: str, token: str) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.subscribed: list[Any] = []
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client, transport="websockets")
        self.client.ws_set_options(path="/mqtt")
        self.client.username_pw_set("any", token)
        self.client.on_message = lambda _client, _data, message: self.got.append((message.topic, bytes(message.payload)))
        self.client.on_subscribe = lambda _client, _data, _id, codes, _properties: self.subscribed.append(codes)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    async def subscribe(self, *topics: str) -> None:
        before = len(self.subscribed)
        self.client.subscribe([(topic, 0) for topic in topics])
        await until(lambda: len(self.subscribed) > before)
        assert not any(code.is_failure for code in self.subscribed[-1])

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


async def test_retained_messages_are_listed_for_those_who_may_subscribe(world: World) -> None:
    alice, bob = world.token("alice", 7, "players"), world.token("bob", 20, "players")
    stock = Paho(world.websockets[0], "status", alice)
    for topic, text in (("games/7/a", "one"), ("games/7/b", "two")):
        published = stock.client.publish(topic, text, 1, retain=True)
        await asyncio.to_thread(published.wait_for_publish, WAIT_S)
    stock.close()
    async with Http(world.api[1], alice) as http, Http(world.api[1], bob) as other:
        asked = "/v1/retained?filter=games/7/%23&limit=1"
        _, first = await http.call("GET", asked)
        assert [(found["topic"], found["payload"], found["sender"]) for found in first["messages"]] == [("games/7/a", "one", 7)]
        _, second = await http.call("GET", f"{asked}&after={first['next']}")
        assert [(found["topic"], found["payload"]) for found in second["messages"]] == [("games/7/b", "two")]
        assert (await http.call("GET", f"{asked}&after=games/7/b"))[1] == {"messages": [], "next": ""}
        assert (await other.call("GET", asked))[0] == 403
        for wrong in ("games/%23/7", "$share/g/games/7/a"):
            assert (await http.call("GET", f"/v1/retained?filter={wrong}"))[0] == 400
    done = await asyncio.to_thread(pixiu_command, "retained", "games/7/+", "--target", world.cluster.target)
    assert "games/7/a" in done
    assert "one" not in done


async def test_a_revocation_ends_subscriptions_at_all_gateways_and_nothing_else(world: World) -> None:
    token, service = world.token("bob", 20, "players"), world.token("back", None, "services")
    stock = Paho(world.websockets[0], "bobs-phone", token)
    await stock.subscribe("room/50", "room/51", "games/20/a", "games/20/+", "$share/readers/games/20/#")
    gaps: list[str] = []
    async with (
        Http(world.api[1], service) as back,
        pixiu.connect(world.cluster.target, token=token) as px,
        px.subscribe(rooms=[50, 51], on_gap=gaps.append) as messages,
        px.subscribe(topics=["games/20/a"]) as games,
    ):
        got: list[bytes] = []

        async def listen() -> None:
            async for message in messages:
                got.append(message.payload)

        listening = asyncio.create_task(listen())
        began = time.monotonic()
        for topics in ("room/50", "games/20/#"):
            asked = {"user": "bob", "filter": topics, "reason": "left the club"}
            assert await back.call("POST", "/v1/revoke", json=asked) == (200, {"revoked": True})
        with pytest.raises(pixiu.NotAllowed, match="games/20/a has ended: left the club"):
            await asyncio.wait_for(games.next_batch(), WAIT_S)
        await until(lambda: gaps and len(world.audit("revoked")) >= 4)
        assert gaps == ["the permission to subscribe to room/50 has ended: left the club"]
        assert time.monotonic() - began < WAIT_S
        for topic in ("room/50", "games/20/a", "room/51"):
            await back.call("POST", "/v1/publish", json={"topic": topic, "payload": topic})
        await until(lambda: stock.got and got)
        assert (stock.got, got) == ([("room/51", b"room/51")], [b"room/51"])
        await stock.subscribe("room/50")  # the rules still allow it
        assert messages.rooms == {51}
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    stock.close()
    assert {line["user"] for line in world.audit("revocation")} == {"back"}


def test_every_route_is_described_and_was_called() -> None:
    routes = {f"{method} {path}" for method, path, _ in Api(None, None, None, None, None).routes()}  # type: ignore[arg-type]
    described = {f"{method.upper()} {path}" for path, methods in OPENAPI["paths"].items() for method in methods}
    assert routes == described
    if used:
        assert used == routes
