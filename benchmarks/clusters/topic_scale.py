"""Parts of `topics.py`: a channel with a million holes whose leader is killed, and a process with a thousand parts and channels."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pixiu
from benchmarks.clusters.growth import say
from tests.support.cluster import LocalCluster, running_cluster

CREDIT = 10_000
"""Of each member, the most that it may have; so holes need many members."""
SHAPE = [f"--{name}=1" for name in ("brokers", "broker-replicas", "routers", "router-replicas", "gateways", "proxies")]
SHAPE += ["--relays=0", "--topics=1", "--admins=1"]
WAIT_S = 600.0
IDLE_S = 15.0
AT_ONCE = 4
"""Channels that are made at a time."""
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
            members = [topic.channel("c", credit=CREDIT) for _ in range(-(-total // 2 // CREDIT) + 1)]
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
                await asyncio.gather(*(px.topics.set_channel("wide", name) for name in names))
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


async def _latency(px: pixiu.Client) -> str:
    topic, took = px.durable_topic("wide"), []
    for number in range(300):
        began = time.monotonic()
        await topic.send(bytes(100), key=b"%d" % number)
        took.append(1_000 * (time.monotonic() - began))
    quantiles = statistics.quantiles(took, n=100)
    return f"median {statistics.median(took):.1f} ms, 99 % {quantiles[98]:.1f} ms"
