"""What the HTTP API holds at one time: connections, bodies, events; and what late clients get."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.listeners.origins import Origins
from gateway.http import bounded
from gateway.http.api import Api
from gateway.http.bounded import MAX_BODY_BYTES, Connections
from gateway.http.events import MAX_KEPT, MAX_KEPT_BYTES, Event, EventRing
from gateway.http.logins import Logins
from gateway.http.server import ApiServer
from gateway.mqtt.listener import Listener
from tests.support.waiting import until

HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"


class Server:
    """A gateway's API without a cluster."""

    def __init__(self, most: int = 100, percent: int = 100) -> None:
        async def unused(*_: object) -> Any:
            raise AssertionError

        self.logins = Logins(lambda: "", 10, "")
        self.connections = Connections(most, percent)
        self.server = ApiServer(Api(None, self.logins, unused, unused, lambda: False), Origins(""), self.connections)
        self.listener = Listener(self.server.connect, "127.0.0.1", 0, "api_port")
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, data: bytes = b"") -> asyncio.StreamReader:
        """A connection that has sent this."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(data)
        return reader

    def counted(self, name: str) -> float:
        return sum(float(sample.value) for sample in self.server.samples() if sample.name == name)


@pytest.fixture
async def http(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    made = Server(**getattr(request, "param", {}))
    made.port = await made.listener.bind()
    await made.listener.start()
    await made.server.start()
    yield made
    for writer in made.writers:
        writer.close()
    made.listener.close()
    await made.server.close()
    await made.logins.close()
    await until(lambda: not len(made.connections))


async def status(reader: asyncio.StreamReader) -> bytes:
    """The status of an answer; empty: the connection was closed."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        return (await reader.readuntil(b"\r\n"))[9:12]
    return b""


async def test_a_slow_head_and_an_idle_connection_are_closed(http: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, idle = await http.open(b"GET /v1/health HTTP/1.1\r\nX: "), await http.open(HEALTH)
    assert await status(idle) == b"200"
    await until(lambda: len(http.connections) == 2)
    monkeypatch.setattr(bounded, "IDLE_S", 0.0)
    http.connections._look()
    assert await status(slow) == b""
    await until(lambda: not len(http.connections))
    assert http.counted("api_connections_late_total") == 2


@pytest.mark.parametrize("http", [{"most": 2}], indirect=True)
async def test_a_new_connection_takes_the_place_of_the_one_that_was_idle_longest(http: Server) -> None:
    first = await http.open()
    await until(lambda: len(http.connections) == 1)
    second = await http.open(HEALTH)
    assert await status(second) == b"200"
    third = await http.open(HEALTH)
    assert (await status(first), await status(third), len(http.connections)) == (b"", b"200", 2)


@pytest.mark.parametrize("http", [{"most": 4, "percent": 50}], indirect=True)
async def test_one_address_has_a_share_of_the_connections(http: Server) -> None:
    busy = [await http.open(b"POST /v1/publish HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{") for _ in range(2)]
    await until(lambda: http.counted("api_body_bytes") == 2)
    assert await status(await http.open(HEALTH)) == b""
    assert (http.counted("api_connections_refused_total"), len(busy)) == (1, 2)


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"POST /v1/publish HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), b"413"),
        (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 9000), b"400"),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n" % (b"x" * 13_000), b"400"),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\n%s\r\n" % b"".join(b"X%d: x\r\n" % n for n in range(100)), b"400"),
        (b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\r\n\r\n", b"400"),
        (b"POST /v1/publish HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"POST /v1/publish HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde", b"400"),
    ],
    ids=["body", "line", "header", "headers", "MQTT", "smuggled", "compressed"],
)
async def test_what_is_too_large_or_malformed_is_refused_before_it_is_read(http: Server, head: bytes, answer: bytes) -> None:
    assert await status(await http.open(head)) == answer


async def test_a_body_that_does_not_come_is_not_waited_for(http: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "BODY_S", 0.05)
    reader = await http.open(b"POST /v1/publish HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert await status(reader) == b"408"
    await until(lambda: not http.counted("api_body_bytes"))


async def test_bodies_that_are_read_at_one_time_have_a_bound(http: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_BODIES_BYTES", 20_000)
    head = b"POST /v1/publish HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % MAX_BODY_BYTES
    waiting = [await http.open(head + bytes(5000)) for _ in range(4)]
    await until(lambda: http.counted("api_body_bytes") == 20_000)
    assert await status(await http.open(head + b"x")) == b"429"
    for writer in http.writers:
        writer.close()
    await until(lambda: not http.counted("api_body_bytes"))
    assert len(waiting) == 4


async def test_without_a_proxy_the_answer_is_to_try_again(http: Server) -> None:
    body = b'{"topic": "room/42"}'
    head = b"POST /v1/publish HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader = await http.open(head + body)
    assert await status(reader) == b"503"
    assert b"Retry-After: 1\r\n" in await reader.readuntil(b"\r\n\r\n")
    assert http.counted("api_requests_total") == 1


def test_a_stream_remembers_the_last_events_within_bounds() -> None:
    ring = EventRing()
    for number in range(MAX_KEPT + 5):
        ring.put(Event(str(number), b"x"))
    assert (ring.first, ring.next) == (5, MAX_KEPT + 5)
    assert (ring.after("4"), ring.after("5"), ring.after(str(MAX_KEPT + 4))) == (None, 6, MAX_KEPT + 5)
    assert [event.id for event in ring.since(7, 2)] == ["7", "8"]
    assert [event.id for event in ring.since(0, 1)] == ["5"]
    ring.put(Event("large", bytes(MAX_KEPT_BYTES)))
    assert [event.id for event in ring.since(0, 10)] == ["large"]


@pytest.mark.parametrize(
    ("origins", "open_", "origin", "host", "allowed"),
    [
        ("", False, "", "x", True),
        ("", False, "https://a.example", "x", False),
        ("", True, "https://a.example", "x", True),
        ("https://b.example", True, "https://a.example", "x", False),
        ("https://a.example", False, "https://a.example", "x", True),
        ("https://a.example", False, "https://a.example.evil", "x", False),
        ("*", False, "null", "x", True),
        ("", False, "http://127.0.0.1:8083", "127.0.0.1:8083", True),
        ("", False, "http://[::1]:8083", "[::1]:8083", True),
        ("", False, "http://localhost:8083", "localhost:8083", True),
        ("", False, "http://evil.example:8083", "evil.example:8083", False),
        ("", False, "http://localhost:3000", "localhost:8083", False),
    ],
)
def test_web_pages_are_allowed_by_their_origin(origins: str, open_: bool, origin: str, host: str, allowed: bool) -> None:
    assert Origins(origins, open_=open_).allow(origin, host) is allowed
