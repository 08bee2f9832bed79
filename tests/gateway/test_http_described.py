"""Every route answers as `openapi.json` says, whatever it is asked: random requests to an API without a cluster."""

from __future__ import annotations

import random
from typing import Any

import aiohttp
import pytest

from cluster.listeners.origins import Origins
from gateway.http.api import Api
from gateway.http.bounded import Connections
from gateway.http.logins import Logins
from gateway.http.server import ApiServer
from gateway.mqtt.listener import Listener
from gateway.retained.client import Listed
from pixiu.ids import topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic
from tests.support.effort import runs
from tests.support.openapi import OPENAPI, problem, schema_of_answer

ROUNDS = runs("PIXIU_HTTP_ROUNDS", local=15, ci=60)
TEXTS = ("room/42", "user/7", "weather/north", "phone", "a/+", "$SYS", "", "7", "-1", "x" * 300, "ü", "\0", "0a1b")
VALUES: tuple[Any, ...] = (*TEXTS, None, True, 0, 1, 7, 2**63, 1.5, [], [1, 2], ["0a1b"], {}, {"a": "b"}, {"a": 1})
NAMES = (
    "topic", "payload", "payload_base64", "headers", "type", "to", "level", "lane", "key", "tag", "device", "ids", "max", "wait",
    "acks", "nacks", "delay_s", "user", "filter", "reason", "limit", "expire_min", "lifetime_min", "other",
)  # fmt: skip
FITTING: dict[str, Any] = {
    "topic": "room/42", "payload": "hello", "to": [7, 8], "device": "phone", "ids": ["0a1b"], "user": "7", "filter": "a/#",
    "max": 3, "wait": 0, "acks": ["1-0-1"], "type": 3, "headers": {"a": "b"},
}  # fmt: skip
KEYS = ("", "ä", "x" * 200, "one", "two", "three")


def body(draw: random.Random, operation: dict[str, Any]) -> dict[str, Any]:
    """A body that fits the operation, or nearly, or not at all."""
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    names: list[str] = list(schema.get("properties", ()))
    if "oneOf" in schema:
        named = schema["oneOf"][0]["$ref"].rpartition("/")[2]
        names = list(OPENAPI["components"]["schemas"][named]["properties"])
    if draw.random() < 0.2:
        return {"messages": [body(draw, operation) for _ in range(draw.randint(0, 3))]}
    found = {name: FITTING[name] for name in names if name in FITTING}
    for _ in range(draw.choice((0, 0, 1, 2))):
        found[draw.choice(NAMES)] = draw.choice(VALUES)
    return found


def request(draw: random.Random, operation: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a request."""
    query = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query" and draw.random() < 0.5}
    params = [(name, str(FITTING.get(name, 1))) for name in query]
    params += [(draw.choice(NAMES), draw.choice(TEXTS)) for _ in range(draw.choice((0, 0, 0, 1)))]
    made: dict[str, Any] = {"params": params, "headers": {}}
    if draw.random() < 0.3:
        made["headers"]["Idempotency-Key"] = draw.choice(KEYS[1:]).encode("utf-8", "surrogateescape").decode("latin-1")
    if draw.random() < 0.7:
        made["json"] = body(draw, operation)
    elif draw.random() < 0.5:
        made["data"] = draw.randbytes(draw.choice((0, 10, 3000)))
    return made


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_random_requests_get_answers_that_are_described(seed: int) -> None:
    async def revoke(*_: object) -> None:
        raise AssertionError("nobody has logged in")

    async def retained(name: str, limit: int, after: str) -> tuple[list[Listed], str]:
        record = encode(Kind.ROOM, topic_room(name), with_topic(name, b"\xff"), seed + 1, flags=Flag.TO_ROOM | Flag.TOPIC)
        return [Listed(name, record, 0)] * min(limit, 2), after

    draw = random.Random(seed)
    logins = Logins(lambda: "", 4, "")
    server = ApiServer(Api(None, logins, revoke, retained, lambda: seed % 10 == 9), Origins(""), Connections(10, 100))
    listener = Listener(server.connect, "127.0.0.1", 0, "api_port")
    await server.start()
    port = await listener.bind()
    await listener.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        for template, methods in OPENAPI["paths"].items():
            path = template.replace("{topic}", draw.choice(("orders", "no topic!", "x" * 300))).replace("{channel}", "billing")
            for method, operation in methods.items():
                made = request(draw, operation)
                async with http.request(method.upper(), path, **made) as answer:
                    found = await answer.json()
                    assert answer.status != 500, (method, path, made, found)
                    schema = schema_of_answer(method, path, answer.status)
                    assert not problem(schema, found), (method, path, made, found)
    assert not len(logins), "nothing stays of a login whose cluster is not there"
    listener.close()
    await server.close()
    await logins.close()
