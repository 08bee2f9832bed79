"""Durable topics with the SDK against whole clusters: stored once, delivered until acknowledged, in order, whoever leads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import xxhash

import pixiu
from pixiu.client.messages.load_test import LoadTest
from pixiu.client.topics.writing.writer import positions
from tests.support.cluster import LocalCluster, running_cluster

pytestmark = pytest.mark.e2e
PATIENT_S = 90.0
ROLES = [f"--{name}=1" for name in ("proxies", "brokers", "broker-replicas", "routers", "router-replicas", "gateways")]
TOPICS = ["--relays=0", "--topics=2", "--topic-replicas=2", "--admins=2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two groups of topics with two replicas each, in processes of their own."""
    with running_cluster(tmp_path_factory.mktemp("topics"), *ROLES, *TOPICS, layout="separate") as found:
        found.wait_healthy()
        yield found


async def test_everything_sent_is_read_and_delivered_to_each_channel(cluster: LocalCluster) -> None:
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target, uin=7) as px:
        info = await px.topics.create("orders", parts=3)
        assert [part.sealed for part in info.parts] == [False] * 3
        topic = px.durable_topic("orders")
        receipt = await topic.send(b"first", key="a", headers={"kind": "new"})
        assert receipt.position is not None
        async with topic.writer() as writer:
            for number in range(200):
                await writer.send(b"%d" % number, key=f"customer-{number % 10}")

        await topic.send_many([b"x", b"y"], slot=1)

        async with topic.reader() as reader:
            read = [await anext(reader) for _ in range(203)]
            assert {message.position for message in read} >= {receipt.position}
            (first,) = [message for message in read if message.position == receipt.position]
            assert (first.body, first.key, first.headers, first.sender) == (b"first", b"a", {"kind": b"new"}, 0)
            position = reader.position
        for customer in range(10):
            mine = [int(message.body) for message in read if message.key == b"customer-%d" % customer]
            assert mine == list(range(customer, 200, 10))

        await topic.send(b"later", key="a")
        async with topic.reader(position) as reader:
            assert (await anext(reader)).body == b"later"

        for name in ("billing", "shipping"):
            async with topic.channel(name) as messages:
                got = [await anext(messages) for _ in range(64)]
                assert all(await asyncio.gather(*(message.ack() for message in got)))
                more: list[pixiu.ChannelMessage] = []
                while len(got) + len(more) < 204:
                    more.append(await anext(messages))
                    more[-1].ack_soon()
                await messages.flush()
            assert {message.position for message in (*got, *more)} >= {message.position for message in read}
            state = await px.topics.channel_state("orders", name)
            assert sum(part.unacknowledged for part in state) == 0
            known = {(message.part, message.offset) for message in read}
            ends = {(part.part, part.end) for part in state}
            assert await px.topics.acknowledged("orders", name, {*known, *ends, (99, 7)}) == {*known, (99, 7)}


async def test_marked_messages_come_to_members_and_readers_that_ask_for_them(cluster: LocalCluster) -> None:
    wanted: dict[LoadTest, list[bytes]] = {"block": [b"real"], "pass": [b"load", b"real"], "only": [b"load"]}
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        await px.topics.create("tested", parts=1)
        topic = px.durable_topic("tested")
        await topic.send(b"load", key="k", load_test=True)
        await topic.send(b"real", key="k")
        for load_test, bodies in wanted.items():
            async with topic.reader(load_test=load_test) as reader:
                assert [(await anext(reader)).body for _ in bodies] == bodies
            async with topic.channel(load_test, load_test=load_test, ordered=True) as messages:
                for body in bodies:
                    message = await anext(messages)
                    assert (message.body, message.load_test) == (body, body == b"load")
                    assert await message.ack()

        await px.topics.create("derived", parts=1)

        async def hand_on(message: pixiu.ChannelMessage) -> None:
            await px.durable_topic("derived").send(b"from " + message.body)

        member = topic.channel("handled", load_test="pass")
        handling = asyncio.create_task(member.run(hand_on))
        derived: list[tuple[LoadTest, bytes]] = [("only", b"from load"), ("block", b"from real")]
        for load_test, body in derived:
            async with px.durable_topic("derived").reader(load_test=load_test) as reader:
                assert (await anext(reader)).body == body
        await member.close()
        await handling


async def test_the_last_message_of_a_key_is_found_through_resizes_and_a_new_leader(cluster: LocalCluster) -> None:
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        await px.topics.create("profiles", parts=2, compact=timedelta(hours=1))
        topic = px.durable_topic("profiles")
        model = dict[str, bytes]()

        async def say(*keys: str, body: bytes) -> None:
            for key in keys:
                await topic.send(body, key=key)
                model[key] = body

        async def check() -> None:
            for key, body in model.items():
                found = await topic.last(key)
                assert (None if found is None else found.body) == (body or None)
            assert await topic.last("nobody") is None

        keys = [f"user-{number}" for number in range(12)]
        await say(*keys, body=b"1")
        await say(*keys[:4], body=b"2")
        await say(keys[4], body=b"")
        await check()
        await px.topics.resize("profiles", [1], bounds=[16_384])
        await say(*keys[::3], body=b"3")
        await say(keys[5], body=b"")
        await check()
        await px.topics.resize("profiles", [2, 4], groups=[0])
        await say(*keys[::5], body=b"4")
        await check()
        part = (await topic.describe()).open_parts[0]
        leader = await asyncio.to_thread(leader_of, cluster, part.group)
        os.kill(int(leader["pid"]), signal.SIGKILL)
        await check()
        with pytest.raises(pixiu.InvalidArgument, match="not compacted"):
            await px.topics.create("plain")
            await px.durable_topic("plain").last("a")


async def test_a_topic_that_is_not_there_names_the_command_that_creates_it(cluster: LocalCluster) -> None:
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        with pytest.raises(pixiu.UnknownTopic, match="pixiu topic create nothing"):
            await px.durable_topic("nothing").send(b"x")
        with pytest.raises(pixiu.UnknownTopic, match="pixiu topic create nothing"):
            await px.durable_topic("nothing").send_soon(b"x")
        await px.topics.create("there")
        with pytest.raises(pixiu.UnknownTopic, match="set_channel"):
            await px.durable_topic("there").channel("no", create=False).open()
        with pytest.raises(pixiu.TopicExists):
            await px.topics.create("there")
        assert "there" in [topic.name for topic in await px.topics.list()]


async def test_a_failing_message_comes_again_and_then_is_a_dead_letter(cluster: LocalCluster) -> None:
    handled: list[tuple[bytes, int]] = []
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        await px.topics.create("failing")
        topic = px.durable_topic("failing")
        await topic.send_many([b"good", b"bad", b"good"], key="k")
        member = topic.channel("c", ordered=True, max_attempts=2)

        async def handler(message: pixiu.ChannelMessage) -> None:
            handled.append((message.body, message.attempts))
            if message.body == b"bad":
                raise RuntimeError
            if handled.count((b"bad", 2)) and message.body == b"good":
                message.ack_soon()
                await member.close()

        await member.run(handler, workers=3, backoff_s=0.01, max_backoff_s=0.01)
        assert [body for body, _ in handled] == [b"good", b"bad", b"bad", b"good"]
        (dead,) = await px.topics.dead_letters("failing", "c")
        assert dead.message is not None
        assert (dead.message.body, dead.attempts) == (b"bad", 2)
        assert await px.topics.resend("failing", "c") == 1
        async with topic.channel("c") as messages:
            async for message in messages:
                assert await message.ack()
                if message.body == b"bad":
                    break


async def test_a_resize_keeps_the_order_of_each_key_for_writers_members_and_readers(cluster: LocalCluster) -> None:
    keys, each = 8, 60
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        await px.topics.create("growing", parts=2)
        topic = px.durable_topic("growing")
        delivered: dict[bytes, list[int]] = {}
        read: dict[bytes, list[int]] = {}

        async def consume() -> None:
            async with topic.channel("c", ordered=True) as messages:
                for _ in range(keys * each):
                    message = await anext(messages)
                    assert message.key is not None
                    delivered.setdefault(message.key, []).append(int(message.body))
                    message.ack_soon()
                await messages.flush()

        async def follow() -> None:
            async with topic.reader() as reader:
                for _ in range(keys * each):
                    message = await anext(reader)
                    assert message.key is not None
                    read.setdefault(message.key, []).append(int(message.body))

        async def write() -> None:
            async with topic.writer() as writer:
                for number in range(each):
                    for key in range(keys):
                        await writer.send(b"%d" % number, key=b"%d" % key)
                    await writer.flush()
                    if number == each // 3:
                        await px.topics.resize("growing", [1], bounds=[16_384])
                    if number == 2 * each // 3:
                        await px.topics.resize("growing", [2, 4], groups=[0])

        await asyncio.gather(consume(), follow(), write())
        expected = {b"%d" % key: list(range(each)) for key in range(keys)}
        assert read == expected
        assert delivered == expected


LOADER = """
import asyncio, sys
import pixiu
from pixiu.client.messages.load_test import LoadTest

async def main(target):
    async with pixiu.connect(target, client="loader") as px, px.durable_topic("rows").writer("loader") as writer:
        for number in range(writer.progress + 1, 10_000_000):
            await writer.send(b"%d" % number, progress=number)
            if number % 100 == 0:
                print(number, flush=True)
                await asyncio.sleep(0.001)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_loader_that_is_killed_and_starts_again_stores_every_row_once(cluster: LocalCluster) -> None:
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        await px.topics.create("rows", parts=4)
        topic = px.durable_topic("rows")
        last = 0
        for _ in range(3):
            first, loader = last, await load(cluster.target)
            while last < first + 500:
                assert loader.stdout is not None
                last = int(await loader.stdout.readline())
            loader.kill()
            await loader.wait()
        last += 2_000  # more than it sent after what it told: of that, some parts may have their rows and others not
        writer = await topic.writer("loader").open()
        assert writer.progress > 0
        for number in range(writer.progress + 1, last + 1):
            await writer.send(b"%d" % number, progress=number)
        await writer.wait_finished()
        async with topic.writer("loader") as later:  # as in another process
            await later.send(b"%d" % (last + 1), progress=last + 1)
        with pytest.raises(pixiu.PixiuError, match="another process opened this writer's name later"):
            async with writer:
                await writer.send(b"not stored", progress=10**9)  # beyond all that loaders sent before they were killed
        stored = sum(part.end for part in await ends(px, "rows"))
        async with topic.reader() as reader:
            read = [int((await anext(reader)).body) for _ in range(stored)]
        assert sorted(read) == list(range(1, max(read) + 1))
        assert max(read) >= last


async def test_of_two_that_open_a_writer_at_once_the_earlier_is_refused(cluster: LocalCluster) -> None:
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        await px.topics.create("together", parts=2)
        async with px.durable_topic("together").writer("loader"):
            around, writer = px.topics.context, xxhash.xxh3_64_intdigest(b"loader")
            with pytest.raises(pixiu.StaleWriter, match="has been opened"):
                await positions(around, await around.directory.describe("together"), writer, 1)


async def load(target: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", LOADER, target, stdout=PIPE)


async def ends(px: pixiu.Client, name: str) -> Sequence[pixiu.ChannelPartInfo]:
    """How much each part of a topic has, as a channel sees it."""
    await px.topics.set_channel(name, "seen")
    return await px.topics.channel_state(name, "seen")


def leader_of(cluster: LocalCluster, group: int) -> dict[str, Any]:
    """The process that leads a group of topics."""
    replicas = [each for each in cluster.processes("topic") if each["partition"] == group]
    (found,) = [each for each in replicas if each["replication"]["member"] == each["replication"]["leader"]]
    return found


async def test_a_leader_that_is_killed_loses_nothing_and_repeats_no_acknowledged_message(cluster: LocalCluster) -> None:
    async with asyncio.timeout(PATIENT_S), pixiu.connect(cluster.target) as px:
        info = await px.topics.create("safe", parts=2)
        topic = px.durable_topic("safe")
        acknowledged: set[tuple[int, int]] = set()
        got: dict[bytes, int] = {}

        async def consume() -> None:
            async with topic.channel("c", timeout_s=5.0) as messages:
                while len(got) < 600:
                    message = await anext(messages)
                    assert message.position not in acknowledged
                    got[message.body] = got.get(message.body, 0) + 1
                    if await message.ack():
                        acknowledged.add(message.position)

        consuming = asyncio.create_task(consume())
        async with topic.writer() as writer:
            for number in range(600):
                await writer.send(b"%d" % number, key=b"%d" % (number % 7))
                if number == 200:
                    await writer.flush()
                    leader = await asyncio.to_thread(leader_of, cluster, info.parts[0].group)
                    os.kill(int(leader["pid"]), signal.SIGKILL)
                if number % 20 == 0:
                    await asyncio.sleep(0)
        await consuming
        assert sorted(got, key=int) == [b"%d" % number for number in range(600)]
        async with topic.reader() as reader:
            read = [(await anext(reader)).body for _ in range(600)]
        assert sorted(read, key=int) == sorted(got, key=int)


def test_threads_use_topics(cluster: LocalCluster, tmp_path: Path) -> None:
    with pixiu.connect_sync(cluster.target) as px:
        px.topics.create("threads")
        topic = px.durable_topic("threads")
        assert topic.send(b"one", key="k").position is not None
        with topic.writer() as writer:
            receipt = writer.send(b"two", key="k")
        receipt.wait(1.0)
        with topic.reader() as reader:
            assert [next(reader).body for _ in range(2)] == [b"one", b"two"]
        with topic.channel("c") as messages:
            for message in messages:
                assert message.ack()
                if message.body == b"two":
                    break
        topic.send(b"three")
        handled: list[bytes] = []
        member = topic.channel("c")

        def handler(message: pixiu.SyncChannelMessage) -> None:
            handled.append(message.body)
            assert message.ack()
            member.close()

        member.run(handler, workers=2)
        assert handled == [b"three"]
