"""Bridges with real processes: a webhook that fails, files, a broker of MQTT, Kafka where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import pixiu
from bridge.connectors.once import encode
from bridge.connectors.webhook import key_of, signature
from comparison.processes import free_port
from ops.bridges.commands import bridges_of
from tests.support.kafka import KafkaServer, is_installed
from tests.support.nsqd import NSQD, Nsqd
from tests.support.roles import Roles
from tests.support.waiting import until
from tools.cli.http import fetch

pytestmark = pytest.mark.e2e
PATIENT_S = 240.0
MOSQUITTO = "/usr/sbin/mosquitto"
SECRET = "whsec_" + "a" * 32


class Hook:
    """A webhook that checks signatures, fails as it is told, and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.ids = Counter[str]()
        self.answer: Callable[[list[dict[str, Any]]], web.Response] = lambda _messages: web.Response()
        self.port = 0
        self.answers, self.asked = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Hook:
        app = web.Application()
        app.router.add_post("/hook", self._post)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _post(self, request: web.Request) -> web.Response:
        body, headers = await request.read(), request.headers
        wanted = signature(key_of(SECRET), headers["webhook-id"], headers["webhook-timestamp"], body)
        assert headers["webhook-signature"] == wanted
        self.ids[headers["webhook-id"]] += 1
        self.asked.set()
        if not self.answers.is_set():
            await self.answers.wait()
            return web.Response(status=503)
        messages = json.loads(body)["messages"]
        answer = self.answer(messages)
        if answer.status == 200:
            self.got += messages
        return answer


@pytest.fixture
async def cluster(roles: Roles) -> Roles:
    """A cluster with topics."""
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0)
    roles.start("admin-a")
    roles.start("proxy-a")
    await roles.running("topic-a", "admin-a", "proxy-a")
    return roles


async def bridge(cluster: Roles, bridges: str, name: str = "bridge-a") -> None:
    """Start a process with these bridges."""
    file = cluster.folder / "bridges.toml"
    file.write_text(bridges)
    cluster.start(name, bridges=str(file))
    await cluster.running(name)


async def statuses(cluster: Roles, name: str = "bridge-a") -> dict[str, dict[str, Any]]:
    """The bridges of a process, by name."""
    node = await cluster.node(name)
    assert node is not None
    _, body = await fetch(node.host, node.http_port, "/health")
    return {each["name"]: each for each in json.loads(body)["service"]["bridges"]}


async def pixiu_bridge(cluster: Roles, *words: str, code: int = 0) -> str:
    """Run `pixiu bridge …`, which must end with this code."""
    command = (sys.executable, "-c", "from ops.bridges.commands import bridge; bridge()", *words)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, "--target", cluster.target(), stdout=pipe, stderr=pipe)
    out, errors = await process.communicate()
    assert process.returncode == code, errors.decode()
    return out.decode()


async def test_a_webhook_and_files_get_everything_in_order_through_failures_kills_and_pauses(cluster: Roles) -> None:
    (cluster.folder / "secret").write_text(SECRET)
    files = cluster.folder / "files"
    async with asyncio.timeout(PATIENT_S), Hook() as hook, pixiu.connect(cluster.target()) as px:
        await px.topics.create("orders", parts=2)
        topic = px.durable_topic("orders")
        bridges = f"""
            [shop]
            kind = "to-webhook"
            topic = "orders"
            ordered = true
            url = "http://127.0.0.1:{hook.port}/hook"
            secret_file = "{cluster.folder / "secret"}"
            batch_messages = 20
            max_backoff_s = 0.5
            [archive]
            kind = "to-files"
            topic = "orders"
            url = "{files}"
            linger_ms = 200
        """
        await bridge(cluster, bridges)

        async def send(low: int, high: int) -> None:
            async with topic.writer() as writer:
                for number in range(low, high):
                    await writer.send(b"%d" % number, key=f"k{number % 7}")

        def numbers() -> set[int]:
            return {int(each["body"]) for each in hook.got}

        await send(0, 100)
        await until(lambda: numbers() == set(range(100)), "everything")
        fails = iter([429, 503, 500] * 3)
        hook.answer = lambda _messages: web.Response(status=next(fails, 200), headers={"Retry-After": "0"})
        await send(100, 200)
        await until(lambda: numbers() == set(range(200)), "everything")
        assert max(hook.ids.values()) > 1  # a batch that is repeated has the same ID
        hook.answer = lambda messages: web.Response(status=413 if any(each["body"] == "217" for each in messages) else 200)
        await send(200, 300)
        await until(lambda: numbers() == set(range(300)) - {217}, "everything")

        async def dead() -> bool:
            letters = await px.topics.dead_letters("orders", "bridge-shop")
            return [(each.message.body, "413" in each.reason) for each in letters if each.message] == [(b"217", True)]

        await until(dead, "the dead letter")
        hook.answers.clear()
        hook.asked.clear()
        await send(300, 310)
        await hook.asked.wait()
        await pixiu_bridge(cluster, "pause", "shop")

        async def paused() -> bool:
            return bool((await statuses(cluster))["shop"]["state"] == "paused")

        async def left() -> bool:
            return not any(each.members for each in await px.topics.channel_state("orders", "bridge-shop"))

        await until(paused, "the pause")
        await until(left, "the end of the membership, although the webhook does not answer")
        hook.answers.set()
        await send(310, 320)
        await cluster.kill("bridge-a")
        cluster.start("bridge-a", bridges=str(cluster.folder / "bridges.toml"))
        await cluster.running("bridge-a")
        await until(paused, "the pause, which survives")
        assert not numbers() & set(range(300, 320))
        hook.answer = lambda _messages: web.Response()
        await pixiu_bridge(cluster, "resume", "shop")
        await send(320, 340)
        await until(lambda: numbers() == set(range(340)) - {217}, "everything")
        for key in range(7):
            seen = dict.fromkeys(int(each["body"]) for each in hook.got if each["key"] == f"k{key}")
            assert list(seen) == sorted(seen)

        def archived() -> set[int]:
            lines = [json.loads(line) for path in files.rglob("*.jsonl") for line in path.read_text().splitlines()]
            return {int(each["body"]) for each in lines}

        await until(lambda: archived() == set(range(340)), "everything")
        assert "archive: opens" in await pixiu_bridge(cluster, "check", str(cluster.folder / "bridges.toml"))

        async def alone() -> bool:
            return not (await bridges_of(cluster.target())).silent

        await until(alone, "the end of the killed process's session")
        assert "running" in await pixiu_bridge(cluster, "status")
        await pixiu_bridge(cluster, "replay", "shop", "--to", "start", "--yes")
        await until(lambda: Counter(int(each["body"]) for each in hook.got)[0] > 1, "everything")


@contextlib.asynccontextmanager
async def mosquitto(folder: Path, port: int, closed: int = 0) -> AsyncIterator[asyncio.subprocess.Process]:
    """A broker that keeps its sessions when it is ended. At the port `closed` it wants a login that nobody has."""
    (folder / "mosquitto.conf").write_text(
        f"user root\nper_listener_settings true\nlistener {port} 127.0.0.1\nallow_anonymous true\n"
        f"persistence true\npersistence_location {folder}/\n"
        "max_queued_messages 0\nmax_inflight_messages 100\nmax_packet_size 20000\n"
        + (f"listener {closed} 127.0.0.1\nallow_anonymous false\n" if closed else "")
    )
    process = await asyncio.create_subprocess_exec(
        MOSQUITTO, "-c", str(folder / "mosquitto.conf"), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_missing_topics_loops_and_different_files_are_named(cluster: Roles) -> None:
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target()) as px:
        await cluster.layout(topic=1, router=1)
        cluster.start("router-a", partition=0)
        cluster.start("gateway-a")
        await cluster.running("router-a", "gateway-a")
        gateway = await cluster.node("gateway-a")
        assert gateway is not None
        loop = f'[loop]\nkind = "to-mqtt"\ntopic = "out"\nhost = "localhost"\nbroker_port = {gateway.mqtt_port}\n'
        (cluster.folder / "bridges.toml").write_text(loop)
        said = await pixiu_bridge(cluster, "check", str(cluster.folder / "bridges.toml"), code=1)
        assert "loop: there is no topic out: `pixiu topic create out`" in said
        assert "of this cluster: if a route or a bridge stores in out" in said.replace("\n", " ")
        await px.topics.create("out")
        assert "loop: opens" in await pixiu_bridge(cluster, "check", str(cluster.folder / "bridges.toml"))
        await bridge(cluster, loop)
        (cluster.folder / "other.toml").write_text(loop + 'to = "elsewhere"\n')
        cluster.start("bridge-b", bridges=str(cluster.folder / "other.toml"))
        await cluster.running("bridge-b")

        async def warned() -> bool:
            text = " ".join((await pixiu_bridge(cluster, "status")).split())
            return all(word in text for word in ("! the bridge processes at", "! bridge loop: localhost:"))

        await until(warned, "both warnings in the status")
        logs = {"bridge-a": "", "bridge-b": ""}

        def logged() -> bool:
            logs.update((name, cluster.log(name)) for name in logs)
            return all("bridge_process_with_other_bridges" in log for log in logs.values())

        await until(logged, "the warnings in both logs")
        assert all("bridge_to_own_gateway" in log for log in logs.values())


@pytest.mark.skipif(not Path(MOSQUITTO).exists(), reason="mosquitto is not installed")
async def test_topics_go_through_another_broker_of_mqtt_that_is_restarted(cluster: Roles) -> None:
    port, closed = free_port(), free_port()
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target()) as px:
        for name in ("out", "in", "old"):
            await px.topics.create(name, parts=2)
        bridges = f"""
            [out]
            kind = "to-mqtt"
            topic = "out"
            ordered = true
            host = "127.0.0.1"
            broker_port = {port}
            to = "devices/{{key}}"
            max_backoff_s = 0.5
            [in]
            kind = "from-mqtt"
            topic = "in"
            host = "127.0.0.1"
            broker_port = {port}
            filters = ["devices/#"]
            [old]
            kind = "to-mqtt"
            topic = "old"
            host = "127.0.0.1"
            broker_port = {port}
            to = "old"
            version = 4
            max_backoff_s = 0.1
            [nobody]
            kind = "to-mqtt"
            topic = "old"
            host = "127.0.0.1"
            broker_port = {closed}
        """
        await bridge(cluster, bridges)

        async def away() -> bool:
            return "does not answer" in (await statuses(cluster))["out"]["why"]

        await until(away, "the sentence that the broker is away")
        got, topic = dict[str, list[int]](), px.durable_topic("out")

        async def read() -> None:
            async with px.durable_topic("in").reader() as reader:
                async for message in reader:
                    assert message.key is not None
                    got.setdefault(message.key.decode(), []).append(int(message.body))
                    assert message.headers["kind"] == b"test"

        async def send(low: int, high: int) -> None:
            async with topic.writer() as writer:
                for number in range(low, high):
                    await writer.send(b"%d" % number, key=f"k{number % 5}", headers={"kind": "test"})

        def numbers() -> set[int]:
            return {number for each in got.values() for number in each}

        async def subscribed() -> bool:
            return bool((await statuses(cluster))["in"]["state"] == "running")

        reading = asyncio.create_task(read())
        async with mosquitto(cluster.folder, port):
            await until(subscribed, "the subscription: a broker drops what comes before it")
            await send(0, 200)
            await until(lambda: len(numbers()) >= 150, "most")
            await cluster.kill("bridge-a")
            await send(200, 400)
            cluster.start("bridge-a", bridges=str(cluster.folder / "bridges.toml"))
            await until(lambda: len(numbers()) >= 300, "more")
        await topic.send(b"0" * 30_000, key="k0", headers={"kind": "test"})
        await send(400, 500)
        async with mosquitto(cluster.folder, port, closed):
            await until(lambda: numbers() == set(range(500)), lambda: f"what is missing: {set(range(500)) - numbers()}")
            letters = await px.topics.dead_letters("out", "bridge-out")
            assert ["20000" in each.reason for each in letters] == [True]

            async def refused() -> bool:
                return "check username and password_file" in (await statuses(cluster))["nobody"]["why"]

            await until(refused, "the sentence that a login is needed")
            async with px.durable_topic("old").writer() as writer:
                for number in range(40):
                    await writer.send(b"0" * (30_000 if number == 20 else 10), key=f"k{number % 5}")

            async def alone() -> bool:
                await px.durable_topic("old").send(b"more", key="k9")
                found = await px.topics.dead_letters("old", "bridge-old")
                return [len(each.message.body) for each in found if each.message] == [30_000]

            await until(alone, "the message at which a broker of MQTT 3.1.1 ends the connection, as a dead letter")

            async def carried() -> bool:
                found = (await statuses(cluster))["old"]
                return bool(found["messages"] >= 39 and found["rejected"] == 1)

            await until(carried, "the others")
        reading.cancel()
        for key, each in got.items():
            first = list(dict.fromkeys(each))
            assert first == sorted(first), key


@pytest.mark.skipif(not NSQD.exists(), reason="no nsqd: python -m tests.clients.nsq.matrix --prepare --peer")
async def test_topics_go_through_an_nsqd_that_is_restarted(cluster: Roles) -> None:
    (cluster.folder / "nsqd").mkdir()
    nsqd = Nsqd(cluster.folder / "nsqd", "-max-msg-size", "20000")
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target()) as px:
        for name in ("out", "in"):
            await px.topics.create(name, parts=2)
        await nsqd.with_lookupd()
        bridges = f"""
            [out]
            kind = "to-nsq"
            topic = "out"
            nsqd = ["{nsqd.address}"]
            to = "events"
            delay = "{{header:delay}}"
            max_backoff_s = 0.5
            [in]
            kind = "from-nsq"
            topic = "in"
            lookupd = ["{nsqd.lookupd}"]
            nsq_topic = "events"
        """
        await bridge(cluster, bridges)

        async def away() -> bool:
            found = await statuses(cluster)
            return "does not answer" in found["out"]["why"] and "no nsqd has the topic events" in found["in"]["why"]

        await until(away, "the sentences that nsqd is away, and has no such topic")
        got, ids, topic = Counter[int](), Counter[bytes](), px.durable_topic("out")

        async def read() -> None:
            async with px.durable_topic("in").reader() as reader:
                async for message in reader:
                    got[int(message.body)] += 1
                    ids[message.headers["nsq_id"]] += 1

        async def send(low: int, high: int, **headers: str) -> None:
            async with topic.writer() as writer:
                for number in range(low, high):
                    await writer.send(b"%d" % number, key=f"k{number % 5}", headers=headers)

        async def finished() -> bool:
            channels = await nsqd.stats("events")
            return [each["depth"] + each["in_flight_count"] + each["deferred_count"] for each in channels] == [0]

        reading = asyncio.create_task(read())
        async with nsqd:
            await send(0, 400)
            await until(lambda: len(got) >= 100, "some")
            await cluster.kill("bridge-a")
            await send(400, 600)
            await topic.send(b"0" * 30_000)
            cluster.start("bridge-a", bridges=str(cluster.folder / "bridges.toml"))
            await until(lambda: len(got) >= 500, "more")
            await nsqd.stop()
            await send(600, 700)
            await nsqd.start()
            await send(700, 720, delay="300")
            await until(lambda: got.keys() == set(range(720)), lambda: f"what is missing: {set(range(720)) - got.keys()}")
            await until(finished, "everything is finished at nsqd")
            letters = await px.topics.dead_letters("out", "bridge-out")
            assert ["message too big 30000 > 20000" in each.reason for each in letters] == [True]
        # Into nsqd it is at least once; from there each message, known by its ID, is stored once although the bridge was killed.
        assert set(ids.values()) == {1}
        reading.cancel()


@pytest.mark.skipif(not is_installed(), reason="PIXIU_BENCH_KAFKA names no folder with Kafka, or confluent-kafka is missing")
async def test_topics_go_through_kafka_exactly_once_and_in_order(cluster: Roles) -> None:
    kafka = KafkaServer(cluster.folder / "kafka")
    bridges = f"""
        [out]
        kind = "to-kafka"
        topic = "out"
        ordered = true
        servers = "{kafka.address}"
        kafka_topic = "events"
        exactly_once = true
        batch_messages = 50
        max_backoff_s = 0.5
        [in]
        kind = "from-kafka"
        topic = "in"
        servers = "{kafka.address}"
        kafka_topic = "events"
        [nobody]
        kind = "to-kafka"
        topic = "out"
        servers = "{kafka.address_with_login}"
        kafka_topic = "events"
    """
    async with asyncio.timeout(PATIENT_S), kafka, pixiu.connect(cluster.target()) as px:
        for name in ("out", "in"):
            await px.topics.create(name, parts=2)
        await bridge(cluster, bridges)

        async def told() -> bool:
            return "kafka-topics.sh --create --topic events" in (await statuses(cluster))["out"]["why"]

        await until(told, "the sentence that the topic is missing at Kafka")

        async def refused() -> bool:
            return "give username, password_file" in (await statuses(cluster))["nobody"]["why"]

        await until(refused, "the sentence that Kafka needs a login")
        await cluster.kill("bridge-a")
        await kafka.topic("events", 3, **{"max.message.bytes": "20000"})
        await kafka.note("pixiu-bridge-out", "events", encode((9, 2 * at) for at in range(1_998)))  # no room
        cluster.start("bridge-a", bridges=str(cluster.folder / "bridges.toml"))
        got, topic = dict[str, list[int]](), px.durable_topic("out")

        async def read() -> None:
            async with px.durable_topic("in").reader() as reader:
                async for message in reader:
                    assert message.key is not None
                    assert message.headers["kind"] == b"test"
                    got.setdefault(message.key.decode(), []).append(int(message.body))

        async def send(low: int, high: int) -> None:
            async with topic.writer() as writer:
                for number in range(low, high):
                    await writer.send(b"%d" % number, key=f"k{number % 5}", headers={"kind": "test"})

        def count() -> int:
            return sum(len(each) for each in got.values())

        reading = asyncio.create_task(read())
        await send(0, 500)
        await until(lambda: count() >= 100, "some")
        await cluster.kill("bridge-a")
        await send(500, 700)
        await topic.send(os.urandom(60_000), key="k0", headers={"kind": "test"})
        cluster.start("bridge-a", bridges=str(cluster.folder / "bridges.toml"))
        await until(lambda: count() >= 600, "more")
        await send(700, 800)
        await until(lambda: count() >= 800, "all")

        async def rejected() -> list[bool]:
            return ["max.message.bytes" in each.reason for each in await px.topics.dead_letters("out", "bridge-out")]

        await until(rejected, "the dead letter")
        assert await rejected() == [True]
        assert got == {f"k{key}": list(range(key, 800, 5)) for key in range(5)}
        await pixiu_bridge(cluster, "pause", "out")
        await kafka.remove("events")
        await kafka.topic("events", 3)
        await kafka.write("events", [(b"again", b"%d" % number) for number in range(20)], [("kind", b"test")])
        await until(lambda: got.get("again") == list(range(20)), "the messages of the topic that was made again")
        assert "made again" in (await statuses(cluster))["in"]["before"]
        reading.cancel()
