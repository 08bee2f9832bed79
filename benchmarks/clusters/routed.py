"""Prove that routes lose nothing while proxies, bridges and durable topics are killed (SIGKILL).

Each of the four cases of docs/routes.md: messages with 50 keys, the durable topic's process killed twice, what carries the messages
killed three times (a proxy for case 1, the bridge for the others), and a proxy once more for the cases that publish through it. The
judge knows what five clients of MQTT published with QoS 1, or a back end wrote, what the log has, and what another client got:
nothing is missing, and order by key. It counts what is twice in the log, and at the client.

Estimate: 100,000 messages in one to two minutes a case.

    python -m benchmarks.clusters.routed [--messages 100000] [--case 1 2 3 4] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

import pixiu
from benchmarks.clusters.bridging.judge import Arrived, Promise, judge
from benchmarks.clusters.growth import say
from cluster.routes.carried import carried
from onebox.embedded import EmbeddedZooKeeper
from tests.support.roles import Roles
from tests.support.waiting import until
from tests.support.zookeeper import connected
from tools.cli.http import fetch

ROUTES: Final = {
    1: '[case]\nfilter = "case/#"\ntopic = "log"\n',
    2: '[case]\nfilter = "case/#"\ntopic = "log"\nclients = "log"\n',
    3: '[case]\nclients = "log"\n',
    4: '[case]\nfilter = "case/#"\ntopic = "raw"\nclients = "log"\n',
}
TITLES: Final = {1: "stored", 2: "stored, then delivered", 3: "written by a back end, delivered", 4: "through a program"}
PROXY, BRIDGE, TOPIC = "proxy-a", "bridge-a", "topic-a"
KEYS: Final = 50
PUBLISHERS: Final = 5
IN_FLIGHT: Final = 200
"""Messages that a client of MQTT has sent without a PUBACK."""
AHEAD: Final = 5_000
"""Messages that the load is ahead of what arrived: so kills hit a path at work."""
WAIT_S: Final = 900.0


def kills(case: int) -> Sequence[tuple[float, str]]:
    """Share of the messages that have arrived, and what is killed then."""
    carrier = PROXY if case == 1 else BRIDGE
    more = [] if case in (1, 3) else [(0.5, PROXY)]
    return sorted([(0.1, carrier), (0.25, TOPIC), (0.4, carrier), (0.6, TOPIC), (0.8, carrier), *more])


class Connection:
    """A client of MQTT whose session outlives its connection.

    Args:
        port: of the gateway.
        name: its client ID.
        user: its user.
    """

    def __init__(self, port: int, name: str, user: int) -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, name, clean_session=False)
        self.client.username_pw_set(str(user))
        self.client.reconnect_delay_set(1, 1)
        self.client.max_inflight_messages_set(IN_FLIGHT)
        self._port = port

    def begin(self) -> None:
        """Connect."""
        self.client.connect("127.0.0.1", self._port)
        self.client.loop_start()

    def end(self) -> None:
        """Disconnect."""
        self.client.disconnect()
        self.client.loop_stop()


class Publisher(Connection):
    """Publishes with QoS 1."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(port, f"publisher-{number}", 100 + number)
        self._open = deque[paho.MQTTMessageInfo]()
        self.begin()

    async def publish(self, topic: str, body: bytes) -> None:
        """Publish, with a window."""
        self._open.append(self.client.publish(topic, body, qos=1))
        if len(self._open) >= 2 * IN_FLIGHT:
            await self.confirmed(IN_FLIGHT)

    async def confirmed(self, most: int = 0) -> None:
        """Wait for the PUBACKs of all but so many messages."""
        while len(self._open) > most:
            await until(self._open.popleft().is_published, "a PUBACK", WAIT_S)


class Listener(Connection):
    """Subscribes, and notes what it gets."""

    def __init__(self, port: int) -> None:
        super().__init__(port, "listener", 7)
        self.got: list[Arrived] = []
        self.client.on_message = lambda _client, _data, message: self.got.append(
            (message.topic.rpartition("/")[2], int(message.payload))
        )
        self._told = asyncio.Event()
        loop = asyncio.get_running_loop()

        def told(*_: Any) -> None:
            loop.call_soon_threadsafe(self._told.set)

        self.client.on_subscribe = told
        self.begin()

    async def subscribe(self) -> None:
        """Subscribe to the case's topics."""
        self.client.subscribe("case/#", 1)
        await self._told.wait()


class Case:
    """One case, and what was sent and arrived.

    Args:
        case: its number.
        roles: the cluster.
        messages: to send.
    """

    def __init__(self, case: int, roles: Roles, messages: int) -> None:
        self._case, self._roles, self._messages = case, roles, messages
        self._file = roles.folder / "routes.toml"
        self._file.write_text(ROUTES[case])
        self.sent: dict[str, list[int]] = {}
        self.log: list[Arrived] = []
        self.ids: dict[int, Arrived] = {}
        self.violations: list[str] = []
        self._listener: Listener | None = None
        self._publishers: list[Publisher] = []

    def _start(self, name: str) -> None:
        if name == TOPIC:
            self._roles.start(name, partition=0)
        else:
            self._roles.start(name, routes=str(self._file))

    async def run(self) -> dict[str, Any]:
        """Run it. Returns what the judge found."""
        roles = self._roles
        await roles.layout(topic=1, router=1, broker=1)
        for name in (TOPIC, "router-a", "broker-a"):
            roles.start(name, partition=0)
        roles.start("admin-a")
        for name in (PROXY, "proxy-b"):
            self._start(name)
        roles.start("gateway-a")
        await roles.running(TOPIC, "router-a", "broker-a", "admin-a", PROXY, "proxy-b")
        (gateway,) = await roles.running("gateway-a")
        async with contextlib.AsyncExitStack() as here:
            px = await here.enter_async_context(pixiu.connect(roles.target()))
            for name in ("raw", "log"):
                await px.topics.create(name, parts=4)
            self._start(BRIDGE)
            await roles.running(BRIDGE)
            self._listener = Listener(gateway.mqtt_port)
            here.callback(self._listener.end)
            await self._listener.subscribe()
            for number in range(PUBLISHERS if self._case != 3 else 0):
                self._publishers.append(Publisher(gateway.mqtt_port, number))
                here.callback(self._publishers[-1].end)
            began = time.monotonic()
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(self._read(px))]
                if self._case == 4:
                    others.append(tasks.create_task(self._program(px)))
                sending = tasks.create_task(self._write(px) if self._case == 3 else self._publish())
                await self._kill_in_turn()
                await sending
                await until(lambda: self._arrived() >= self._messages, lambda: f"all: {self._arrived():,}", WAIT_S)
                if self._case > 1:
                    await until(partial(self._no_lag, px), "no lag", 60.0)
                for each in others:
                    each.cancel()
        return self._judged(time.monotonic() - began)

    def _arrived(self) -> int:
        assert self._listener is not None
        return len(set(self.log if self._case == 1 else self._listener.got))

    async def _kill_in_turn(self) -> None:
        for share, name in kills(self._case):
            await until(lambda share=share: self._arrived() >= share * self._messages, f"{share:.0%}", WAIT_S)  # type: ignore[misc]
            say(f"case {self._case}: {self._arrived():,} arrived: {name} is killed")
            await self._roles.kill(name)
            self._start(name)
            await self._roles.running(name)

    async def _no_lag(self, px: pixiu.Client) -> bool:
        node = await self._roles.node(BRIDGE)
        if node is None:
            return False
        _, body = await fetch(node.host, node.http_port, "/health")
        (found,) = json.loads(body)["service"]["bridges"]
        return not sum(each.unacknowledged for each in await px.topics.channel_state("log", found["channel"]))

    async def _space(self, number: int) -> None:
        while number > self._arrived() + AHEAD:
            await asyncio.sleep(0.02)

    async def _publish(self) -> None:
        """Publish by MQTT; each message is confirmed in the end. A key is one publisher's."""
        for number in range(self._messages):
            if number % 100 == 0:
                await self._space(number)
            key = number % KEYS
            self.sent.setdefault(f"k{key}", []).append(number)
            await self._publishers[key % PUBLISHERS].publish(f"case/k{key}", b"%d" % number)
        for each in self._publishers:
            await each.confirmed()

    async def _write(self, px: pixiu.Client) -> None:
        """Write the durable topic, as a back end does."""
        async with px.durable_topic("log").writer() as writer:
            for number in range(self._messages):
                if number % 100 == 0:
                    await self._space(number)
                key = f"k{number % KEYS}"
                await writer.send(b"%d" % number, key=f"case/{key}")
                self.sent.setdefault(key, []).append(number)

    async def _program(self, px: pixiu.Client) -> None:
        """Pass everything on, from one topic to the other."""
        async with (
            px.durable_topic("log").writer() as writer,
            px.durable_topic("raw").channel("program", ordered=True) as messages,
            asyncio.TaskGroup() as tasks,
        ):
            async for message in messages:
                receipt = await writer.send(message.body, key=message.key, headers=message.headers)
                tasks.create_task(self._acknowledge(receipt, message))

    async def _acknowledge(self, receipt: Any, message: Any) -> None:
        await receipt
        await message.ack()

    async def _read(self, px: pixiu.Client) -> None:
        """Read the log, and compare the IDs of what comes twice."""
        async with px.durable_topic("log").reader() as reader:
            async for message in reader:
                assert message.key is not None
                arrived = message.key.decode().rpartition("/")[2], int(message.body)
                number = carried(message.headers).message_id
                if self._case != 3 and self.ids.setdefault(number, arrived) != arrived:
                    self.violations.append(f"two messages have the ID {number}")
                self.log.append(arrived)

    def _judged(self, seconds: float) -> dict[str, Any]:
        assert self._listener is not None
        log = judge(self.sent, self.log, Promise(), 0)
        self.violations += [f"log: {each}" for each in log.violations]
        if self._case != 3 and len(self.ids) > len(set(self.log)):
            self.violations.append(f"{len(self.ids) - len(set(self.log))} messages are in the log with two IDs")
        got = self._listener.got
        clients = judge(self.sent if self._case > 1 else {}, got, Promise(), 0)
        self.violations += [f"clients: {each}" for each in clients.violations]
        found = {
            "case": self._case, "what": TITLES[self._case], "messages": self._messages, "a second": round(self._messages / seconds),
            "kills": len(kills(self._case)), "twice in the log": log.repeats, "twice at the client": clients.repeats,
            "violations": self.violations,
        }  # fmt: skip
        say("  ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in found.items()))
        return found


async def play(case: int, messages: int, folder: Path) -> dict[str, Any]:
    """Play a case on a cluster of its own."""
    with EmbeddedZooKeeper(folder / "zookeeper") as server:
        zookeeper = await connected(server)
        roles = Roles(folder, server, zookeeper)
        try:
            return await Case(case, roles, messages).run()
        finally:
            await asyncio.to_thread(roles.stop)
            await zookeeper.close()


def main() -> int:
    """Run it; exit code 1 if something is lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--case", nargs="+", type=int, choices=list(ROUTES), default=list(ROUTES))
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    found = []
    for case in wanted.case:
        with tempfile.TemporaryDirectory() as folder:
            found.append(asyncio.run(play(case, wanted.messages, Path(folder))))
    if wanted.json:
        print(json.dumps(found))
    return int(any(each["violations"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
