"""Routers, brokers and relays double while rooms, chat and presence go on; the tool is killed in a phase of each and run again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

import pixiu
from ops.doubling.double_command import STOP_VARIABLE
from ops.doubling.doubling import Phase
from tests.e2e.test_clients_chat import paho_client
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.effort import portion
from tests.support.forks import fork_pixiu
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(300)]

WAIT_S = 60.0
PACE_S = 0.05
"""Between two rounds of messages, two joins, two questions: as fast as they can they leave the doubling itself no CPU."""
ROOMS = range(1, 9)
USERS = range(700, 708)
MQTT_USER = 709
ONE_EACH = [f"--{role}-replicas=1" for role in ("broker", "router", "relay")]


async def tool(cluster: LocalCluster, *arguments: str, killed_after: Phase | None = None) -> tuple[int, list[dict[str, object]]]:
    """One run of `pixiu double`: its exit code, and what it said."""
    environment = {STOP_VARIABLE: killed_after.value if killed_after is not None else ""}
    command = ("double", *arguments, "--target", cluster.target, "--json")
    done = await asyncio.to_thread(fork_pixiu, *command, environment=environment)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


class Traffic:
    """Numbered messages to rooms and users from one back end; who gets them; and users that join, ask and leave meanwhile."""

    def __init__(self, px: pixiu.Client, target: str) -> None:
        self._px = px
        self._target = target
        self.sent = 0
        self.joins = 0
        self.got: dict[object, list[bytes]] = defaultdict(list)
        self.not_online: list[int] = []

    async def go_on(self, messages: int, joins: int) -> None:
        """Until so much more was sent, and so many more have joined."""
        sent, joined = self.sent + messages, self.joins + joins
        await until(lambda: self.sent >= sent and self.joins >= joined, "traffic")

    async def send(self) -> None:
        """One message to every room and every user, again and again."""
        while True:
            payload = b"%d" % self.sent
            for room in ROOMS:
                self._px.room(room).send_soon(payload)
            for uin in (*USERS, MQTT_USER):
                self._px.user(uin).chat_soon(payload)
            await self._px.flush()
            self.sent += 1
            await asyncio.sleep(PACE_S)

    async def take(self, who: object, messages: pixiu.Subscription) -> None:
        """What a client of the SDK gets, by room or user."""
        async for message in messages:
            self.got[who, message.room].append(message.payload)

    async def join(self) -> None:
        """A user joins rooms of every partition, gets what is sent from then on, and leaves."""
        while True:
            room = 1000 + self.joins % 16
            async with self._px.subscribe(room=room) as messages:
                await self._px.room(room).send(b"%d" % self.joins)
                async with asyncio.timeout(WAIT_S):
                    assert (await anext(messages)).payload == b"%d" % self.joins
            self.joins += 1
            await asyncio.sleep(PACE_S)

    async def ask(self) -> None:
        """Whether everybody is online, as they are all the time."""
        while True:
            found = await self._px.presence(USERS)
            self.not_online += [user.uin for user in found if user.devices != 1]
            await asyncio.sleep(PACE_S)


@contextlib.asynccontextmanager
async def together(*work: Awaitable[None]) -> AsyncIterator[None]:
    """Until the block ends; a failure of any of them is the block's."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_roles_double_under_traffic_with_the_tool_killed_in_a_phase_of_each(tmp_path: Path) -> None:
    roles = dict(portion((("router", Phase.BEGIN), ("broker", Phase.START), ("relay", Phase.COMMIT))))
    with running_cluster(tmp_path, *ONE_EACH, "--proxies", "1") as cluster:
        port = cluster.mqtt_ports()[0]
        async with contextlib.AsyncExitStack() as stack:
            px = await stack.enter_async_context(pixiu.connect(cluster.target))
            traffic = Traffic(px, cluster.target)
            rooms = await stack.enter_async_context(px.subscribe(rooms=ROOMS))
            takers = [traffic.take("sdk", rooms)]
            for uin in USERS:
                user = await stack.enter_async_context(pixiu.connect(cluster.target, uin=uin))
                takers.append(traffic.take(uin, await stack.enter_async_context(user.subscribe(chat=True))))
            client, to_mqtt, told = stack.enter_context(paho_client(port, str(MQTT_USER)))
            client.subscribe([(f"room/{room}", 0) for room in ROOMS] + [(f"user/{MQTT_USER}", 0)])
            await asyncio.to_thread(told.get, timeout=WAIT_S)

            await stack.enter_async_context(together(*takers))
            async with together(traffic.send(), traffic.join(), traffic.ask()):
                for role, phase in roles.items():
                    await traffic.go_on(5, 0)
                    code, said = await tool(cluster, role, "--to", "4", "--yes", killed_after=phase)
                    # Where the new replicas ran before it looked, it had nothing to wait for, and was not killed.
                    assert code == -9 or (code, phase) == (0, Phase.START) or said[-1]["event"] == "done", said
                    code, said = await tool(cluster, role, "--to", "4", "--yes")
                    assert (code, said[-1]["event"], said[-1]["partitions"]) == (0, "done", 4), said
                    await traffic.go_on(20, 16)
            async with asyncio.timeout(WAIT_S):
                await px.flush()

            last = b"%d" % (traffic.sent - 1)
            whole = [b"%d" % number for number in range(traffic.sent)]
            owed = [("sdk", room) for room in ROOMS] + [(uin, 0) for uin in USERS]
            await until(lambda: all(last in traffic.got[who][-2:] for who in owed), "the last messages")
            for who in owed:
                assert traffic.got[who][: len(whole)] == whole, who
            mqtt: dict[str, list[bytes]] = defaultdict(list)
            while len(mqtt) < len(ROOMS) + 1 or not all(last in got[-2:] for got in mqtt.values()):
                topic, payload = await asyncio.to_thread(to_mqtt.get, timeout=WAIT_S)
                mqtt[topic].append(payload)
            assert {topic: got[: len(whole)] for topic, got in mqtt.items()} == dict.fromkeys(mqtt, whole)
            assert px.stats().failed == 0
            assert traffic.not_online == []
            assert traffic.joins > 16 * len(roles)

        cluster.wait_healthy()
        layout = cluster.status()["layout"]
        assert {role: (layout[role]["n"], layout[role]["next"]) for role in roles} == dict.fromkeys(roles, (4, 4))
        for role in roles:
            assert sorted(process["partition"] for process in cluster.processes(role)) == [0, 1, 2, 3]


async def test_a_doubling_is_taken_back_and_a_restart_runs_what_the_layout_has(tmp_path: Path) -> None:
    arguments = [*ONE_EACH, "--proxies=1", "--gateways=1", "--relays=0", "--routers=1", "--brokers=1"]
    with running_cluster(tmp_path, *arguments, "--no-grow", layout="nodes") as cluster:
        code, said = await tool(cluster, "broker", "--dry-run")
        assert (code, said[-1]["from"], said[-1]["to"]) == (0, 1, 2)
        code, said = await tool(cluster, "broker", "--yes", "--timeout", "1")
        assert (code, said[-1]["missing"]) == (1, ["broker partition 1: 0 of 1 replicas Running"])
        code, said = await tool(cluster, "router", "--yes")
        assert code == 2
        assert "broker is being doubled" in str(said[-1])
        code, said = await tool(cluster, "broker", "--abort")
        assert (code, said[-1]["event"]) == (0, "taken_back")
        code, said = await tool(cluster, "broker", "--yes", "--timeout", "1")
        assert code == 1
    with running_cluster(tmp_path, *arguments, layout="nodes") as cluster:
        code, said = await tool(cluster, "broker", "--yes")
        assert (code, said[-1]["partitions"]) == (0, 2)
    with running_cluster(tmp_path, *arguments, layout="nodes") as cluster:
        assert sorted(process["partition"] for process in cluster.processes("broker")) == [0, 1]
        async with pixiu.connect(cluster.target) as px, px.subscribe(rooms=[2, 3]) as messages:
            for room in (2, 3):
                await px.room(room).send(b"x")
                assert (await asyncio.wait_for(anext(messages), WAIT_S)).room == room
