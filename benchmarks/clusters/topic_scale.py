"""Parts of `topics.py`: a channel with a million holes whose leader is killed, a process with a thousand parts and channels, ten
million messages that are not due, and a filter that one message in a hundred matches."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

import pixiu
from benchmarks.clusters.growth import say
from pixiu.wire.block import Encoded, Flag, join
from pixiu.wire.v1 import topic_pb2, topic_pb2_grpc
from tests.support.cluster import LocalCluster, running_cluster

BODY = 100
CREDIT = 10_000
"""Of each member, the most that it may have; so holes need many members."""
SHAPE = [f"--{name}=1" for name in ("brokers", "broker-replicas", "routers", "router-replicas", "gateways", "proxies")]
SHAPE += ["--relays=0", "--topics=1", "--admins=1"]
WAIT_S = 1_200.0
IDLE_S = 15.0
AT_ONCE = 4
"""Channels that are made at a time."""
FAR_S = 30 * 24 * 3600, 360 * 24 * 3600
"""What is not due is due so many seconds later."""
FILLER, FILL_BLOCK, FILL_WINDOW = 1 << 40, 5_000, 16
"""Writer, messages of a block, and blocks under way of what is written for a start."""
SOON, SOON_S = 1_000, (5.0, 25.0)
"""Messages by which punctuality is measured, and when they are due."""
MATCHING = 100
"""One message of so many has what the filter asks for."""
TICKS = os.sysconf("SC_CLK_TCK")


def leader(cluster: LocalCluster) -> int:
    """The process that leads the only group; 0 if none does."""
    found = [each for each in cluster.processes("topic") if each["replication"]["member"] == each["replication"]["leader"]]
    return int(found[0]["pid"]) if len(found) == 1 else 0


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def holes(arguments: argparse.Namespace, folder: Path, findings: Any) -> None:
    """Every second message is acknowledged, then the leader is killed: exactly the others come again."""
    total, figures = arguments.messages, {}
    with running_cluster(folder, *SHAPE, "--topic-replicas=2", layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with asyncio.timeout(WAIT_S), pixiu.connect(cluster.target) as px:
            await px.topics.create("holes", parts=1)
            await px.topics.set_channel("holes", "c", max_attempts=100, timeout_s=3_600.0)
            topic = px.durable_topic("holes")
            began = time.monotonic()
            async with topic.writer() as writer:
                for number in range(total):
                    await writer.send(b"%d" % number, slot=0)
            say(f"{total} written")
            figures["written a second"] = round(total / (time.monotonic() - began))
            began = time.monotonic()
            members = [await topic.channel("c", credit=CREDIT).open() for _ in range(-(-total // 2 // CREDIT) + 1)]
            got = 0

            async def take(member: Any) -> None:
                nonlocal got
                while (message := await member.next()) is not None:
                    got += 1
                    if message.offset % 2:
                        message.ack_soon()

            tasks = [asyncio.create_task(take(member)) for member in members]
            while got < total:
                await asyncio.sleep(0.2)
            for member in members:
                await member.flush(timeout_s=60.0)
            figures["taken a second"] = round(total / (time.monotonic() - began))
            (state,) = await px.topics.channel_state("holes", "c")
            figures["holes"] = state.unacknowledged
            pid = await asyncio.to_thread(leader, cluster)
            figures["leader, MB"] = round(memory_mb(pid))
            say(f"{state.unacknowledged} holes; the leader is killed")
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*(member.close() for member in members))
            await asyncio.gather(*tasks)
            again, repeated, left = bytearray(total), 0, (total + 1) // 2
            async with topic.channel("c", credit=CREDIT) as member:
                first = 0.0
                while left > 0:
                    message = await member.next()
                    assert message is not None
                    first = first or time.monotonic() - began
                    repeated += again[message.offset]
                    if message.offset % 2:
                        findings.problems.append(f"acknowledged, and came again: {message.offset}")
                    left -= not again[message.offset] and not message.offset % 2
                    again[message.offset] = 1
                    message.ack_soon()
                await member.flush(timeout_s=60.0)
            figures |= {"first again after s": round(first, 1), "all again after s": round(time.monotonic() - began, 1)}
            figures |= {"came again": sum(again), "of these twice": repeated}
            (state,) = await px.topics.channel_state("holes", "c")
            if state.unacknowledged:
                findings.problems.append(f"never came again: {state}")
    findings.figures["holes"] = figures


async def scale(arguments: argparse.Namespace, folder: Path, findings: Any) -> None:
    """Many parts and channels in one process."""
    figures: dict[str, Any] = {"parts": arguments.parts, "channels": arguments.channels}
    with running_cluster(folder, *SHAPE, "--topic-replicas=1", layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with asyncio.timeout(WAIT_S), pixiu.connect(cluster.target) as px:
            pid = await asyncio.to_thread(leader, cluster)
            figures["MB, empty"] = round(memory_mb(pid))
            began = time.monotonic()
            await px.topics.create("wide", parts=arguments.parts)
            figures["create s"] = round(time.monotonic() - began, 1)
            figures["MB, parts"] = round(memory_mb(pid))
            say(f"{figures}")
            began = time.monotonic()
            for first in range(0, arguments.channels, AT_ONCE):
                names = [f"channel-{number}" for number in range(first, min(first + AT_ONCE, arguments.channels))]
                await asyncio.gather(*(_made(px, name) for name in names))
                if first % 100 == 0:
                    say(f"{first + AT_ONCE} channels")
            figures["channels s"] = round(time.monotonic() - began, 1)
            figures["MB, parts and channels"] = round(memory_mb(pid))
            say(f"{figures}")
            async with px.durable_topic("wide").writer() as writer:
                for number in range(10 * arguments.parts):
                    await writer.send(bytes(100), slot=number * 65_536 // arguments.parts % 65_536)
            figures["write"] = await _latency(px)
            figures["MB, written"] = round(memory_mb(pid))
            await asyncio.sleep(5.0)
            before = cpu_s(pid)
            await asyncio.sleep(IDLE_S)
            figures["idle CPU %"] = round(100 * (cpu_s(pid) - before) / IDLE_S, 1)
            say(f"{figures}")
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await px.durable_topic("wide").send(b"x", key="a")
            figures["s from its kill to a write"] = round(time.monotonic() - began, 1)
            pid = await asyncio.to_thread(leader, cluster)
            figures["CPU s of its start"] = round(cpu_s(pid), 1)
            figures["MB, started again"] = round(memory_mb(pid))
    findings.figures["scale"] = figures


async def _made(px: pixiu.Client, channel: str) -> None:
    """Make a channel, however long it takes."""
    while True:
        try:
            await px.topics.set_channel("wide", channel)
        except pixiu.OutcomeUnknown:
            continue
        return


async def delays(arguments: argparse.Namespace, folder: Path, findings: Any) -> None:
    """Messages behind any number that are not due: what the index takes, and how punctual they are, also after a kill."""
    total, figures, rolls = arguments.delayed, dict[str, Any](), random.Random(arguments.seed)
    with running_cluster(folder, *SHAPE, "--topic-replicas=1", layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with asyncio.timeout(WAIT_S * 3), pixiu.connect(cluster.target) as px:
            await px.topics.create("late", parts=1)
            await px.topics.set_channel("late", "c", max_attempts=100, timeout_s=3_600.0)
            topic, number, began = px.durable_topic("late"), (await px.topics.describe("late")).id, time.monotonic()
            (address,) = [each["client_address"] for each in cluster.processes("topic")]
            await asyncio.to_thread(_fill, address, number, total, rolls)
            figures["not due"], figures["written a second"] = total, round(total / (time.monotonic() - began))
            pid = await asyncio.to_thread(leader, cluster)
            figures["MB, no member"] = round(memory_mb(pid))
            say(f"{figures}")
            for what in ("", "again, after its kill: "):
                await topic.send(b"now", slot=0)
                if what:
                    os.kill(pid, signal.SIGKILL)
                began, used = time.monotonic(), 0.0 if what else cpu_s(pid)
                async with topic.channel("c", credit=CREDIT) as member:
                    with contextlib.suppress(pixiu.PixiuError):
                        await _soon(topic, rolls)
                    late = await _lateness(member, figures, what, began)
                    pid = await asyncio.to_thread(leader, cluster)
                    figures[f"{what}MB"] = round(memory_mb(pid))
                    figures[f"{what}CPU s"] = round(cpu_s(pid) - used, 1)
                    hundredths = statistics.quantiles(late, n=100)
                    figures[f"{what}late"] = (
                        f"median {hundredths[49]:.0f} ms, 99 % {hundredths[98]:.0f} ms, most {max(late):.0f} ms"
                    )
                    say(f"{figures}")
                    if min(late) < 0:
                        findings.problems.append(f"given {min(late)} ms before its time")
    findings.figures["delays"] = figures


def _fill(address: str, topic: int, total: int, rolls: random.Random) -> None:
    """Write what is not due, by blocks that are made here: with the SDK it would take most of the time."""
    window, now_us = threading.Semaphore(FILL_WINDOW), time.time_ns() // 1000

    def requests() -> Iterator[topic_pb2.TopicWriteRequest]:
        yield topic_pb2.TopicWriteRequest(client="fill")
        for first in range(1, total + 1, FILL_BLOCK):
            dues = (now_us + int(rolls.uniform(*FAR_S) * 1e6) for _ in range(min(FILL_BLOCK, total + 1 - first)))
            messages = (Encoded(0, Flag.DELIVER_AT, due.to_bytes(8, "little") + b"far") for due in dues)
            data = join(messages, topic=topic, part=1, writer=FILLER, first=first)
            window.acquire()
            yield topic_pb2.TopicWriteRequest(request=first, block=data)

    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        left = -(-total // FILL_BLOCK)
        for reply in topic_pb2_grpc.TopicLogStub(channel).Write(requests()):
            for result in reply.results:
                assert result.verdict == topic_pb2.WRITE_STORED, result
                window.release()
                left -= 1
            if not left:
                return


async def _soon(topic: Any, rolls: random.Random) -> None:
    """Write messages that are due soon, with the time in each."""
    async with topic.writer() as writer:
        for _ in range(SOON):
            due_us = time.time_ns() // 1000 + int(rolls.uniform(*SOON_S) * 1e6)
            await writer.send(b"%d" % due_us, slot=0, deliver_at=due_us)
        await writer.wait_finished()


async def _lateness(member: Any, figures: dict[str, Any], what: str, began: float) -> list[float]:
    """Take all of these and the one that was due at once; returns by how much each was late, ms."""
    late, first = list[float](), False
    while len(late) < SOON or not first:
        message = await member.next()
        if message.body == b"now":
            first = True
            figures[f"{what}s to the first one behind them"] = round(time.monotonic() - began, 1)
        elif message.body != b"far":
            late.append((time.time_ns() / 1000 - int(message.body)) / 1000)
        message.ack_soon()
    await member.flush(timeout_s=60.0)
    return late


async def filters(arguments: argparse.Namespace, folder: Path, findings: Any) -> None:
    """A channel of which a filter wants one message in a hundred, beside one that takes everything."""
    total, figures = arguments.filtered, dict[str, Any]()
    with running_cluster(folder, *SHAPE, "--topic-replicas=1", layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        async with asyncio.timeout(WAIT_S), pixiu.connect(cluster.target) as px:
            await px.topics.create("mixed", parts=1)
            await px.topics.set_channel("mixed", "all")
            await px.topics.set_channel("mixed", "some", filter=[{"header": "region", "equal": "eu"}])
            topic = px.durable_topic("mixed")
            async with topic.writer() as writer:
                for number in range(total):
                    headers = {"region": "us" if number % MATCHING else "eu"}
                    await writer.send(bytes(BODY), key=b"%d" % (number % 1_000), headers=headers)
            pid = await asyncio.to_thread(leader, cluster)
            for name, wanted in (("all", total), ("some", -(-total // MATCHING))):
                began, used, seen = time.monotonic(), cpu_s(pid), set[int]()
                async with topic.channel(name, credit=CREDIT) as member:
                    while len(seen) < wanted:
                        message = await member.next()
                        assert message is not None
                        seen.add(message.offset)
                        message.ack_soon()
                    await member.flush(timeout_s=60.0)
                while (await px.topics.channel_state("mixed", name))[0].unacknowledged:
                    await asyncio.sleep(0.1)
                took, cpu = time.monotonic() - began, cpu_s(pid) - used
                figures[f"{name}, messages passed a second"] = round(total / took)
                figures[f"{name}, a CPU second of the group"] = round(total / cpu)
                if name == "some" and any(offset % MATCHING for offset in seen):
                    findings.problems.append("a message came that the filter does not want")
                say(f"{figures}")
    findings.figures["filters"] = figures


async def _latency(px: pixiu.Client) -> str:
    topic, took = px.durable_topic("wide"), []
    for number in range(300):
        began = time.monotonic()
        await topic.send(bytes(100), key=b"%d" % number)
        took.append(1_000 * (time.monotonic() - began))
    quantiles = statistics.quantiles(took, n=100)
    return f"median {statistics.median(took):.1f} ms, 99 % {quantiles[98]:.1f} ms"
