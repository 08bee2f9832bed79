"""The four cases of routes with real processes: two proxies of which one is killed, a bridge that is killed, a client of MQTT."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pixiu
from cluster.routes.carried import carried
from ops.routes_command import routes
from tests.e2e.test_clients_chat import paho_client
from tests.support.roles import Roles
from tests.support.waiting import until
from tools.cli.http import fetch

pytestmark = pytest.mark.e2e
PATIENT_S = 240.0
ROUTES = """
[reports]
filter = "reports/#"
topic = "reports"

[chat]
filter = "chat/#"
topic = "chat"
clients = "chat"

[news]
clients = "news"

[sensors]
filter = "sensors/#"
topic = "sensors-raw"
clients = "sensors-clean"
"""


async def status_of(roles: Roles, name: str) -> dict[str, Any]:
    """The service's part of a process's /health."""
    (node,) = await roles.running(name)  # a busy machine may end its session: it registers again
    _, body = await fetch(node.host, node.http_port, "/health")
    found: dict[str, Any] = json.loads(body)["service"]
    return found


async def pixiu_routes(*words: str) -> Result:
    """Run `pixiu routes …`."""
    return await asyncio.to_thread(CliRunner().invoke, routes, words)


async def test_the_four_cases_lose_and_repeat_nothing_while_a_proxy_and_the_bridge_are_killed(roles: Roles) -> None:
    file = roles.folder / "routes.toml"
    file.write_text(ROUTES)
    await roles.layout(topic=1, router=1, broker=1)
    for name in ("topic-a", "router-a", "broker-a"):
        roles.start(name, partition=0)
    roles.start("admin-a")
    for name in ("proxy-a", "proxy-b"):
        roles.start(name, routes=str(file))
    roles.start("gateway-a")
    await roles.running("topic-a", "router-a", "broker-a", "admin-a", "proxy-a", "proxy-b")
    (gateway,) = await roles.running("gateway-a")
    async with asyncio.timeout(PATIENT_S), contextlib.AsyncExitStack() as here, pixiu.connect(roles.target()) as px:
        for name in ("reports", "chat", "news", "sensors-raw", "sensors-clean"):
            await px.topics.create(name, parts=2)
        roles.start("bridge-a", routes=str(file))
        await roles.running("bridge-a")
        got: list[tuple[str, bytes]] = []
        client, _, told = here.enter_context(paho_client(gateway.mqtt_port, "7"))
        client.on_message = lambda _client, _data, message: got.append((message.topic, bytes(message.payload)))
        client.subscribe([(f"{first}/#", 1) for first in ("reports", "chat", "news", "sensors")])
        assert "1, 1, 1, 1" in await asyncio.to_thread(told.get, True, PATIENT_S)

        async def stored(topic: str, bodies: list[bytes]) -> list[tuple[bytes | None, bytes]]:
            """What a topic has, in order of its parts, once all of this is there."""
            found, missing = list[tuple[bytes | None, bytes]](), set(bodies)
            async with px.durable_topic(topic).reader() as reader:
                while missing:
                    message = await anext(reader)
                    assert carried(message.headers).message_id
                    found.append((message.key, message.body))
                    missing.discard(message.body)
            return found

        def of(first: str) -> list[bytes]:
            return [payload for topic, payload in got if topic.startswith(first)]

        # 1: stored, and nobody gets it
        reports = [b"%d" % number for number in range(20)]
        published = [client.publish("reports/eu", each, qos=1) for each in reports]
        for each in published:
            await asyncio.to_thread(each.wait_for_publish, 60)
        assert await stored("reports", reports) == [(b"reports/eu", each) for each in reports]
        # 2: one order for the log and for clients, whoever carries the publishers
        sent = [b"%d-%d" % (who, number) for number in range(60) for who in range(3)]

        async def publisher(who: int) -> None:
            async with pixiu.connect(roles.target(), client=f"p{who}") as own:
                for number in range(60):
                    await own.topic(f"chat/{number % 3}").send(b"%d-%d" % (who, number), timeout_s=60)

        publishing = [asyncio.create_task(publisher(who)) for who in range(3)]
        await until(lambda: len(of("chat")) >= 20, "some")
        await roles.kill("proxy-a")
        await until(lambda: len(of("chat")) >= 60, "more")
        await roles.kill("bridge-a")
        roles.start("proxy-a", routes=str(file))
        roles.start("bridge-a", routes=str(file))
        await asyncio.gather(*publishing)
        await until(lambda: len(of("chat")) >= len(sent), "all")
        log = await stored("chat", sent)
        for topic in ("chat/0", "chat/1", "chat/2"):
            order = dict.fromkeys(body for key, body in log if key == topic.encode())
            assert [payload for name, payload in got if name == topic] == list(order)
        assert sorted(of("chat")) == sorted(sent)
        # 3: a back end writes, clients get it
        for number in range(20):
            await px.durable_topic("news").send(b"n%d" % number, key="news/eu")
        await until(lambda: len(of("news")) >= 20, "the news")
        assert of("news") == [b"n%d" % number for number in range(20)]
        # 4: a program between two topics

        async def program() -> None:
            clean = px.durable_topic("sensors-clean")
            async with px.durable_topic("sensors-raw").channel("program", ordered=True) as messages:
                async for message in messages:
                    if int(message.body) % 2 == 0:
                        await clean.send(b"clean " + message.body, key=message.key, headers=message.headers)
                    await message.ack()

        running = asyncio.create_task(program())
        for number in range(20):
            client.publish("sensors/7/heat", b"%d" % number, qos=1)
        await until(lambda: len(of("sensors")) >= 10, "what the program passes")
        running.cancel()
        assert of("sensors") == [b"clean %d" % number for number in range(0, 20, 2)]
        assert not of("reports")
        # what operators see, and a change that counts at once
        await roles.running("proxy-a", "bridge-a")
        counts = [await status_of(roles, name) for name in ("proxy-a", "proxy-b")]
        routed = {each["name"]: each for status in counts for each in status["routes"] if each["stored"]}
        assert routed["sensors"]["stored"] == 20
        assert [each["clients"] for each in counts[0]["routes"]] == ["", "chat", "news", "sensors-clean"]
        file.write_text(ROUTES + '\n[late]\nfilter = "late/#"\ntopic = "nowhere"\n')

        async def both() -> bool:
            return [len((await status_of(roles, name))["routes"]) for name in ("proxy-a", "proxy-b")] == [5, 5]

        await until(both, "the changed file")
        said = await pixiu_routes("check", str(file), "--target", roles.target())
        assert said.exit_code == 1
        assert "! there is no durable topic nowhere: pixiu topic create nowhere" in said.output
        refused = await px.topic("late/a").send_soon(b"x", timeout_s=60).outcome()
        assert isinstance(refused, pixiu.TopicAway)
        assert "pixiu topic create nowhere" in str(refused)
        said = await pixiu_routes("status", "--target", roles.target(), "--json")
        shown = {each["name"]: each for each in json.loads(said.stdout)}
        assert (said.exit_code, shown["late"]["refused"] > 0, shown["late"]["proxies"]) == (1, True, 2)
        assert "pixiu topic create nowhere" in shown["late"]["why"]
        await px.topics.create("nowhere")
        await px.topic("late/a").send(b"x", timeout_s=60)
        assert await stored("nowhere", [b"x"]) == [(b"late/a", b"x")]
