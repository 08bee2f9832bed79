"""Does a persistent session get everything that came while it was away, whatever died meanwhile?

So many sessions of MQTT 3.1.1 and 5 subscribe at three gateways and go, half of them without a DISCONNECT: each to its device's
topics, to a group's, a tenth of them to a wildcard over all groups, and all to one broadcast topic. Four publishers, which have
sessions themselves and send again what was not acknowledged, publish with QoS 1 and 2, while gateways, relays, routers,
brokers, proxies and the leaders of Xiu and Pi are killed or stopped in turn. Then all sessions come back at other gateways.
`tests/history/mqtt/backlog.py` judges what they got.

Beforehand, while nothing is killed, some broadcasts of 8 KiB are published: Xiu's counter of stored bytes says how often each
is there.

Estimate, written before the first run: nothing is missing, QoS 2 comes once, each topic is in order; a broadcast is stored once
in each replica of Xiu. A message costs 0.3 ms in gateway, proxy, router, Xiu and Pi together (two replicas each) and an entry
of an inbox 10 µs, a broadcast 12 ms: 110,000 messages take 50 s of CPU in all servers. The return is 400,000 deliveries at 40
µs: 16 s.

    python -m benchmarks.clients.sessions [--sessions 1000] [--messages 100000] [--exactly 10000] [--rate 1500] [--every 8]
        [--kinds gateway,…; none] [--seed 1] [--keep DIR] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients.connection import FAILURE, Connection, Lost, Refused, Session, connect
from benchmarks.clients.random_clients import STORES, logs_with_tracebacks
from benchmarks.clients.watching import Memory, Victims, counters, cpu_s
from benchmarks.clusters.growth import play, say
from cluster.mqtt.packets import MQTT_3_1_1, MQTT_5, Publish
from tests.history.mqtt.backlog import Came, Wanted, judge_backlog
from tests.history.mqtt.judge import matches
from tests.support.cluster import LocalCluster, running_cluster

SHAPE = [
    "--proxies=2", "--gateways=3", "--brokers=2", "--broker-replicas=1", "--routers=1", "--router-replicas=2", "--relays=1",
    "--relay-replicas=2", *STORES, "--set=cluster.topic_rooms=dev=2:64", "--set=router.kept_sessions_per_room=2000",
]  # fmt: skip
KINDS = ("gateway", "relay", "router", "broker", "proxy", "xiu-leader", "pi-leader")
GROUPS, PUBLISHERS, WINDOW = 50, 4, 200
BROADCAST = "all/news"
EXPIRY_S = 3600
TOGETHER = 50
"""Sessions that come at one time."""
LARGE, LARGES = 8 << 10, 20
PUBLISH_S, RETURN_S, QUIET_S = 900.0, 300.0, 20.0
"""Limits; and the silence after which nothing more is expected."""
PAUSE_S = 0.5
ERRORS = (Lost, Refused, TimeoutError, OSError)


def filters(number: int) -> list[tuple[str, int]]:
    """What a session subscribes to."""
    found = [(f"dev/{number}/#", 2), (f"grp/{number % GROUPS}/+", 2), (BROADCAST, 2)]
    return found + [("grp/+/alarm", 2)] * (number % 10 == 0)


class Traveller:
    """A session that goes and comes back."""

    def __init__(self, number: int, ports: Sequence[int]) -> None:
        self.who, self.number, self._ports = f"traveller-{number}", number, ports
        self._session = Session(self.who, str(3_000_000 + number))
        self._dialect = MQTT_5 if number % 2 else MQTT_3_1_1
        self._connections = itertools.count(1)
        self.came: list[Came] = []
        self.last = 0.0
        """When something came, monotonic seconds."""
        self.connection: Connection | None = None

    async def come(self, place: int) -> Connection:
        """Connect at a gateway. Raises one of ERRORS."""
        number = next(self._connections)

        def got(_: Connection, message: Publish) -> None:
            self.last = time.monotonic()
            self.came.append(Came(int(message.payload.split(b" ")[0]), message.topic, message.qos, number))

        self.connection = await connect(
            ("127.0.0.1", self._ports[(self.number + place) % len(self._ports)]), self._session, dialect=self._dialect, clean=False,
            expiry_s=EXPIRY_S, keep_alive_s=60, on_message=got,
        )  # fmt: skip
        return self.connection

    async def begin(self) -> str:
        """Subscribe, and go. Returns what is wrong."""
        connection = await self.come(0)
        codes = await connection.subscribe(filters(self.number))
        if self.number % 4 < 2:
            await connection.disconnect()
        else:
            connection.cut()
            await connection.ended
        return f"SUBACK {codes}" if any(code >= FAILURE or not code for code in codes) else ""

    async def stay(self, end: asyncio.Event, counts: Counter[str]) -> None:
        """Come back, again if the connection is lost, until the end."""
        place = 1
        while not end.is_set():
            try:
                connection = await self.come(place)
            except ERRORS as error:
                counts[f"return: {type(error).__name__} {getattr(error, 'code', '')}".strip()] += 1
                await asyncio.sleep(random.uniform(0.5, 1.5))
                place += 1
                continue
            counts["session present" if connection.session_present else "session gone"] += 1
            await asyncio.shield(connection.ended)  # the end cuts it
            place += 1


class Publisher:
    """Publishes its topics' messages, with a session of its own."""

    def __init__(self, number: int, ports: Sequence[int], accepted: dict[int, float]) -> None:
        self._session, self._ports, self._accepted = Session(f"publisher-{number}", str(4_000_000 + number)), ports, accepted
        self._rolls = random.Random(number)
        self.connection: Connection | None = None
        self.waiting = 0
        self.counts: Counter[str] = Counter()
        self.resent: set[int] = set()
        """Messages that were sent again with a new connection."""

    async def stay(self) -> None:
        """Be connected, until it is cancelled."""
        while True:
            try:
                self.resent |= {int(each.packet.payload.split(b" ")[0]) for each in self._session.sent.values()}
                self.connection = await connect(
                    ("127.0.0.1", self._rolls.choice(self._ports)), self._session, dialect=MQTT_5, clean=False, expiry_s=EXPIRY_S,
                    keep_alive_s=60,
                )  # fmt: skip
                self.counts["session present" if self.connection.session_present else "session new"] += 1
                await self.connection.ended
            except ERRORS as error:
                self.counts[f"{type(error).__name__} {getattr(error, 'code', '')}".strip()] += 1
            self.connection = None
            await asyncio.sleep(PAUSE_S)

    async def publish(self, number: int, topic: str, qos: int, size: int = 0) -> None:
        """Publish when there is a connection and a place in the window."""
        while self.connection is None or self.connection.ended.done() or self.waiting >= WINDOW:
            await asyncio.sleep(0.01)

        def done(published: asyncio.Future[None]) -> None:
            self.waiting -= 1
            if published.exception() is None:
                self._accepted[number] = time.monotonic()
            else:
                self.counts[f"not accepted: {published.exception()}"] += 1

        self.waiting += 1
        self.connection.publish(topic, b"%d %s" % (number, b"x" * max(size, 20)), qos).add_done_callback(done)


class Plan:
    """The messages of a run: number → topic and QoS; each topic has one publisher."""

    def __init__(self, sessions: int, messages: int, exactly: int, seed: int) -> None:
        rolls = random.Random(seed)
        qos = [1] * messages + [2] * exactly
        rolls.shuffle(qos)
        self.messages = [(number, self._topic(rolls, sessions), each) for number, each in enumerate(qos, 1)]

    @staticmethod
    def _topic(rolls: random.Random, sessions: int) -> str:
        roll = rolls.random()
        if roll < 0.001:
            return BROADCAST
        if roll < 0.1:
            return f"grp/{rolls.randrange(GROUPS)}/{rolls.choice(('alarm', 'state', 'state'))}"
        return f"dev/{rolls.randrange(sessions)}/heat"

    def wanted(self, sessions: int, accepted: Container[int], resent: Container[int] = ()) -> dict[str, list[Wanted]]:
        """What each session must get."""
        by_topic: dict[str, list[Wanted]] = defaultdict(list)
        for number, topic, qos in self.messages:
            by_topic[topic].append(Wanted(number, topic, qos, number in accepted, number in resent))
        found = {}
        for session in range(sessions):
            names = filters(session)
            own = [topic for topic in (f"dev/{session}/heat", BROADCAST) if topic in by_topic]
            own += [topic for topic in by_topic if topic[:4] == "grp/" and any(matches(name, topic) for name, _ in names)]
            found[f"traveller-{session}"] = sorted(each for topic in own for each in by_topic[topic])
        return found


async def each_of(work: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
    """Do it all, a few at one time."""
    gate = asyncio.Semaphore(TOGETHER)

    async def one(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async with gate:
            for _ in range(20):
                try:
                    return await call()
                except ERRORS as error:
                    said = repr(error)
                    await asyncio.sleep(PAUSE_S)
            return said

    return await asyncio.gather(*(one(call) for call in work))


class Run:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, cluster: LocalCluster) -> None:
        self._arguments, self._cluster = arguments, cluster
        self.figures: dict[str, Any] = {}
        self.problems: list[str] = []
        self._accepted: dict[int, float] = {}
        self._faults: list[tuple[str, float, float]] = []
        ports = cluster.mqtt_ports()
        self._travellers = [Traveller(number, ports) for number in range(arguments.sessions)]
        self._publishers = [Publisher(number, ports, self._accepted) for number in range(PUBLISHERS)]
        self._victims = Victims(cluster, arguments.kinds, arguments.seed, lambda *fault: self._faults.append(fault))

    async def all(self) -> None:
        """Do all of it."""
        arguments, memory = self._arguments, Memory(self._cluster)
        plan = Plan(arguments.sessions, arguments.messages, arguments.exactly, arguments.seed)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(each.stay()) for each in self._publishers]
            beside.append(tasks.create_task(memory.run()))
            try:
                await self._begin()
                await self._broadcast()
                await self._publish(plan)
                await self._return(plan)
            finally:
                for task in beside:
                    task.cancel()
        self.figures["memory"] = memory.slopes()
        resent = frozenset[int]().union(*(each.resent for each in self._publishers))
        wanted = plan.wanted(arguments.sessions, self._accepted, resent)
        verdict = judge_backlog(wanted, {each.who: each.came for each in self._travellers})
        self.figures["judged"] = dict(verdict.counts)
        self.figures["missing after"] = self._blamed(wanted)
        self.problems += verdict.violations

    def _blamed(self, wanted: Mapping[str, Sequence[Wanted]]) -> dict[str, int]:
        """What is missing, by the last fault before its acknowledgement, and how many seconds before it began."""
        found: Counter[str] = Counter()
        for traveller in self._travellers:
            came = {each.number for each in traveller.came}
            for each in wanted[traveller.who]:
                if each.accepted and each.number not in came:
                    at = self._accepted[each.number]
                    kind, began, _ = max(
                        (fault for fault in self._faults if fault[1] <= at), default=("none", at, at), key=lambda f: f[1]
                    )
                    found[f"{kind}, {at - began:.0f} s"] += 1
        return dict(found)

    async def _begin(self) -> None:
        began = time.monotonic()
        said = Counter(await each_of([each.begin for each in self._travellers]))
        self.figures["subscribed_s"] = round(time.monotonic() - began, 1)
        del said[""]
        self.problems += [f"{number} sessions at the beginning: {what}" for what, number in said.items()]
        say(f"{self._arguments.sessions} sessions have subscribed and are away")

    async def _stored(self) -> list[int]:
        leaders = [each for each in await asyncio.to_thread(self._cluster.processes, "xiu") if each.get("replication")]
        leaders = [each for each in leaders if each["replication"]["member"] == each["replication"]["leader"]]
        pages = [await counters(each, lambda name: name == "pixiu_xiu_stored_bytes") for each in leaders]
        return [page["pixiu_xiu_stored_bytes"] for page in pages]

    async def _broadcast(self) -> None:
        before = sum(await self._stored())
        for number in range(LARGES):
            await self._publishers[0].publish(-1 - number, BROADCAST, 1, LARGE)
        await self._until_accepted("the large broadcasts", 120.0)
        per = (sum(await self._stored()) - before) / LARGES
        self.figures["bytes stored for a broadcast of 8 KiB"] = round(per)
        if not 0 < per < 2 * LARGE:
            self.problems.append(f"a broadcast of {LARGE} bytes takes {per:.0f} bytes in Xiu")

    async def _publish(self, plan: Plan) -> None:
        arguments, began = self._arguments, time.monotonic()
        cpu = await asyncio.to_thread(cpu_s, self._cluster)
        async with asyncio.TaskGroup() as tasks:
            striking = tasks.create_task(self._strike())
            async with asyncio.timeout(PUBLISH_S), asyncio.TaskGroup() as sending:
                for mine in range(PUBLISHERS):
                    sending.create_task(self._send(mine, [each for each in plan.messages if hash_of(each[1]) == mine]))
            await self._until_accepted("all messages", 180.0)
            striking.cancel()
        took = time.monotonic() - began
        now = await asyncio.to_thread(cpu_s, self._cluster)
        self.figures["publishing"] = {
            "s": round(took, 1), "accepted": len(self._accepted), "of": len(plan.messages),
            "server_cpu_s": round(sum(used - cpu[pid] for pid, used in now.items() if pid in cpu), 1),
            "faults": dict(self._victims.counts), "publishers": [dict(each.counts) for each in self._publishers],
        }  # fmt: skip
        say(f"published: {self.figures['publishing']}")
        if arguments.kinds:
            await asyncio.to_thread(self._cluster.wait_healthy)

    async def _send(self, mine: int, messages: Sequence[tuple[int, str, int]]) -> None:
        began, publisher = time.monotonic(), self._publishers[mine]
        for place, (number, topic, qos) in enumerate(messages):
            ahead = place / (self._arguments.rate / PUBLISHERS) - (time.monotonic() - began)
            if ahead > 0.01:
                await asyncio.sleep(ahead)
            await publisher.publish(number, topic, qos)

    async def _strike(self) -> None:
        while self._arguments.kinds:
            await asyncio.sleep(self._arguments.every)
            await self._victims.strike()
            say(f"{dict(self._victims.counts)}; {len(self._accepted)} accepted")

    async def _until_accepted(self, what: str, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while any(each.waiting for each in self._publishers):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.problems.append(f"{what}: {sum(each.waiting for each in self._publishers)} without an answer")

    async def _return(self, plan: Plan) -> None:
        wanted = plan.wanted(self._arguments.sessions, self._accepted)
        total = sum(each.accepted for mine in wanted.values() for each in mine)
        began, end, counts = time.monotonic(), asyncio.Event(), Counter[str]()
        cpu = await asyncio.to_thread(cpu_s, self._cluster)
        lives = [asyncio.create_task(each.stay(end, counts)) for each in self._travellers]
        while (now := time.monotonic()) < began + RETURN_S:
            await asyncio.sleep(0.5)
            last = max(each.last for each in self._travellers)
            if now - max(last, began) > QUIET_S:
                break
        used = await asyncio.to_thread(cpu_s, self._cluster)
        end.set()
        for each in self._travellers:
            if each.connection is not None:
                each.connection.cut()
        await asyncio.gather(*lives)
        last = max(each.last for each in self._travellers)
        self.figures["return"] = {
            "to get": total, "got": sum(each.number > 0 for mine in self._travellers for each in mine.came),
            "s": round(max(last - began, 0.0), 1), "connections": dict(counts),
            "server_cpu_s": round(sum(spent - cpu.get(pid, 0.0) for pid, spent in used.items()), 1),
        }  # fmt: skip
        if counts["session gone"]:
            self.problems.append(f"{counts['session gone']} sessions are gone")


def hash_of(topic: str) -> int:
    """The publisher of a topic."""
    return random.Random(topic).randrange(PUBLISHERS)


async def run(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Run it. Returns figures and what is wrong."""
    with running_cluster(folder, *SHAPE, layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        work = Run(arguments, cluster)
        with contextlib.suppress(TimeoutError):
            await work.all()
    work.figures["load"] = round(os.getloadavg()[0], 1)
    return work.figures, work.problems + [f"a traceback in {name}" for name in logs_with_tracebacks(folder)]


def main() -> int:
    """Run, and print the results. Returns 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=100_000, help="of QoS 1")
    parser.add_argument("--exactly", type=int, default=10_000, help="of QoS 2")
    parser.add_argument("--rate", type=float, default=1500.0, help="messages a second of all publishers")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between faults")
    parser.add_argument("--kinds", default=",".join(KINDS), help="processes to strike; none: no faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="keep logs in this folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.kinds = () if arguments.kinds == "none" else tuple(arguments.kinds.split(","))
    return play(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
