"""Does a cluster keep its promises to MQTT clients that do anything, while every kind of its processes dies, and is its memory
flat?

Clients of MQTT 3.1, 3.1.1 and 5 at three gateways publish with every QoS, with and without RETAIN, subscribe to topics,
wildcards and shared filters, unsubscribe, leave in order or not, connect again elsewhere, take over their own connections,
leave wills, and send packets that are none. Every few seconds a process of the next kind is killed (SIGKILL) or stopped for
some seconds (SIGSTOP). What the clients saw is judged by `tests/history/mqtt/judge.py`. With `--persistent` a third of the
clients have sessions that outlive their connections: they stay away for a while, and get everything of QoS 1 and 2 in the end.
With `--fuzz` so many strangers send packets that were mutated, all the time.

Estimate, written before the first run: nothing that was accepted is lost but near a kill or stop of a broker or gateway,
nothing comes twice, no retained value is old, every will comes; with sessions nothing at all is lost. Memory of a process grows
by less than 1 MiB a minute after its first minute.

    python -m benchmarks.clients.random_clients [--minutes 5] [--clients 30] [--pace 4] [--every 10] [--kinds broker,gateway,…]
        [--persistent] [--fuzz 4] [--seed 1] [--keep DIR] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.clients.connection import FAILURE, Connection, Lost, Refused, Session, connect
from benchmarks.clients.strangers import strangers
from benchmarks.clients.watching import Memory, Victims
from benchmarks.clusters.growth import play, say
from cluster.mqtt.packets import MQTT_5, Dialect, Publish, Will
from tests.history.mqtt import judge as history
from tests.history.mqtt.judge import Fault, Note, judge
from tests.support.cluster import LocalCluster, running_cluster

SHAPE = [
    "--proxies=2", "--gateways=3", "--brokers=2", "--broker-replicas=1", "--routers=1", "--router-replicas=2", "--relays=1",
    "--relay-replicas=2",
]  # fmt: skip
STORES = ["--xius=1", "--xiu-replicas=2", "--pis=1", "--pi-replicas=2"]
KINDS = ("gateway", "proxy", "broker", "router", "relay")
KINDS_OF_STORES = ("xiu", "pi", "xiu-leader", "pi-leader")
TOPICS = [f"rc/{first}/{second}" for first in "abcdef" for second in range(3)]
FILTERS = [*TOPICS, *(f"rc/{first}/+" for first in "abcdef"), *(f"rc/+/{second}" for second in range(3)), "rc/#"]
SHARED = ["$share/one/rc/a/#", "$share/two/rc/+/1", "$share/one/rc/b/0"]
RETAINED = [f"kept/{number}" for number in range(8)]
WILLS = "wills"
EXPIRY_S = 3600
LATE_S, SETTLE_S = 40.0, 45.0
QUIET_S, DRAIN_S = 10.0, 180.0
AWAY_S = (1.0, 15.0)
MAX_OPEN = 40
"""Publications of a client without an answer."""
RUBBISH = (b"\xf0\x00", b"\x30\x03\x00\x05a", b"\x82\x02\x00\x01", b"\x36\x05\x00\x01a\x00\x01", b"\x10\x00", b"\x00" * 40)


class World:
    """What all clients share."""

    def __init__(self, cluster: LocalCluster, seed: int, pace: float) -> None:
        self.cluster, self.seed, self.pace = cluster, seed, pace
        self.ports = cluster.mqtt_ports()
        self.notes: list[Note] = []
        self.counts: Counter[str] = Counter()
        self.ending = asyncio.Event()
        self.numbers, self.connections = itertools.count(1), itertools.count(1)
        self.last_got = time.monotonic()

    def note(self, kind: str, who: str, connection: int, **more: Any) -> None:
        """Add a note of now."""
        self.notes.append(Note(time.monotonic(), kind, who, connection, **more))


class Visit:
    """One connection of a person."""

    def __init__(self, world: World, who: str, will: Will | None) -> None:
        self._world, self._who, self._will = world, who, will
        self.number = next(world.connections)
        self._there = False
        """CONNACK has come, and the end has not."""

    def note(self, kind: str, **more: Any) -> None:
        """Add a note of this connection."""
        self._world.note(kind, self._who, self.number, **more)

    def connected(self, connection: Connection) -> None:
        """At CONNACK."""
        self._there = True
        self.note(history.CONNECTED, flag=connection.session_present)
        if self._will is not None:
            self.note(history.WILL, topic=self._will.topic, number=int(self._will.payload), qos=self._will.qos)

    def got(self, _: Connection, message: Publish) -> None:
        """At each message."""
        self._world.last_got = time.monotonic()
        number = int(message.payload.split(b" ")[0] or b"0")
        self.note(history.GOT, topic=message.topic, number=number, qos=message.qos, flag=message.retain)

    def ends(self, how: str) -> None:
        """The connection ends, or has ended."""
        if self._there:
            self._there = False
            self.note(history.ENDED, how=how)


class Person:
    """A client, over all its connections. `who` begins with p: a persistent session, s: only shared filters, w: a watcher, which
    never leaves by itself, c: any other."""

    def __init__(self, world: World, kind: str, number: int) -> None:
        self.who, self._kind, self._world = f"{kind}{number}", kind, world
        self._rolls = random.Random(f"{world.seed} {number}")
        self._dialect = Dialect((3, 4, 5)[number % 3])
        self._session = Session(self.who, str(2_000_000 + number))
        self._connection: Connection | None = None
        self._visit: Visit | None = None
        self._clean = True
        self._open = 0
        self._filters: set[str] = set()

    @property
    def _persistent(self) -> bool:
        return self._kind == "p"

    async def live(self) -> None:
        """Do things until the world ends; then come and stay."""
        world = self._world
        if self._persistent:
            self._clean = self._dialect is MQTT_5
        while not world.ending.is_set():
            try:
                if self._connection is None or self._connection.ended.done():
                    await self._come()
                else:
                    await self._act()
            except (Lost, Refused, TimeoutError, OSError) as error:
                world.counts[f"{type(error).__name__} {getattr(error, 'code', '')}".strip()] += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rolls.uniform(0.5, 1.5) / world.pace):
                    await world.ending.wait()
        await self.stay()

    async def stay(self) -> None:
        """Come again whenever the connection is lost."""
        while True:
            with contextlib.suppress(Lost, Refused, TimeoutError, OSError):
                if self._connection is None or self._connection.ended.done():
                    await self._come()
                assert self._connection is not None
                await asyncio.shield(self._connection.ended)
            await asyncio.sleep(0.5)

    @property
    def here(self) -> bool:
        """Whether it is connected."""
        return self._connection is not None and not self._connection.ended.done()

    # --- coming and going

    async def _come(self) -> None:
        will = None
        if self._kind != "w" and self._rolls.random() < 0.5:
            will = Will(f"{WILLS}/{self.who}", b"%d" % next(self._world.numbers), 1)
        visit = Visit(self._world, self.who, will)
        visit.note(history.STARTING, flag=self._clean)
        for each in self._session.sent.values():
            if each.packet.payload and not self._clean:
                visit.note(history.AGAIN, number=int(each.packet.payload.split(b" ")[0]))

        def ended(connection: Connection) -> None:
            visit.ends(history.LOST)
            if not self._persistent and self._connection is connection:
                connection.abandon()

        connection = await connect(
            ("127.0.0.1", self._rolls.choice(self._world.ports)), self._session, dialect=self._dialect, clean=self._clean,
            expiry_s=EXPIRY_S * self._persistent, will=will, keep_alive_s=30,
            on_message=visit.got, on_end=ended, on_connected=visit.connected,
        )  # fmt: skip
        self._connection, self._visit = connection, visit
        self._clean = not self._persistent
        connection.ack_delay_s = self._rolls.choice((0.0, 0.0, 0.05))
        if not connection.session_present:
            self._filters.clear()
        if not self._filters:
            wanted = [f"{WILLS}/#", "rc/#"] if self._kind == "w" else [self._choose() for _ in range(3)]
            for name in wanted:
                await self._subscribe(name)

    async def _leave(self, roll: float) -> None:
        assert self._connection is not None
        assert self._visit is not None
        connection, visit = self._connection, self._visit
        if roll < 0.2:  # takes its own connection over
            self._world.counts["take-overs"] += 1
            await self._come()
            await asyncio.shield(connection.ended)
            return
        if roll < 0.4:
            self._world.counts["rubbish"] += 1
            connection.write(self._rolls.choice(RUBBISH))
            await asyncio.wait({connection.ended}, timeout=30.0)
            if not connection.ended.done():
                self._world.counts["rubbish that ended nothing"] += 1
        elif roll < 0.7:
            visit.ends(history.CUT)
            connection.cut()
        else:
            visit.ends(history.CLEAN)
            await connection.disconnect()
        if self._persistent:
            if self._dialect is MQTT_5 and self._rolls.random() < 0.05:
                self._clean = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rolls.uniform(*AWAY_S)):
                    await self._world.ending.wait()

    # --- what it does while it is there

    async def _act(self) -> None:
        roll = self._rolls.random()
        if roll < 0.85:
            self._publish()
        elif self._kind == "w":
            return
        elif roll < 0.92:
            await self._subscribe(self._choose())
        elif roll < 0.95 and self._filters:
            name = self._rolls.choice(sorted(self._filters))
            self._filters.discard(name)
            assert self._connection is not None
            assert self._visit is not None
            self._visit.note(history.UNSUBSCRIBING, topic=name)
            await self._connection.unsubscribe([name])
        elif roll > 0.97:
            await self._leave(self._rolls.random())

    def _choose(self) -> str:
        if self._kind == "s":
            return self._rolls.choice(SHARED)
        return self._rolls.choice(RETAINED if self._rolls.random() < 0.3 and not self._persistent else FILTERS)

    def _qos(self, name: str) -> int:
        """The same for the same filter, each time."""
        if self._kind == "w":
            return 2
        return random.Random(f"{self.who} {name}").choice((1, 2) if self._persistent else (0, 1, 1, 2, 2))

    async def _subscribe(self, name: str) -> None:
        if name in self._filters and name not in RETAINED:
            return
        connection, visit = self._connection, self._visit
        assert connection is not None
        assert visit is not None
        visit.note(history.SUBSCRIBING, topic=name)
        (code,) = await connection.subscribe([(name, self._qos(name))])
        if code < FAILURE:
            visit.note(history.SUBSCRIBED, topic=name, qos=code)
            self._filters.add(name)
        else:
            self._world.counts[f"SUBACK {code:#x}"] += 1

    def _publish(self) -> None:
        if self._open >= MAX_OPEN:
            self._world.counts["too many without an answer"] += 1
            return
        connection, visit, number = self._connection, self._visit, next(self._world.numbers)
        assert connection is not None
        assert visit is not None
        topic, retain = self._rolls.choice(TOPICS), self._rolls.random() < 0.15
        qos = self._rolls.choice((0, 1, 1, 2, 2))
        payload = b"%d %s" % (number, b"x" * self._rolls.choice((0, 20, 200, 2000)))
        if retain:
            topic, payload = self._rolls.choice(RETAINED), payload if self._rolls.random() < 0.8 else b""
            number = number if payload else -number
        visit.note(history.SENDING, topic=topic, number=number, qos=qos, flag=retain)

        def done(published: asyncio.Future[None]) -> None:
            self._open -= 1
            if published.exception() is None and qos:
                visit.note(history.ACCEPTED, topic=topic, number=number)
            elif qos:
                self._world.counts["not accepted"] += 1

        self._open += 1
        connection.publish(topic, payload, qos, retain=retain).add_done_callback(done)


async def run(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Run it. Returns figures and what is wrong."""
    shape = [*SHAPE, *(STORES if arguments.persistent else []), "--set=cluster.topic_rooms=rc=2:8"]
    faults: list[Fault] = []
    with running_cluster(folder, *shape, layout="separate") as cluster:
        await asyncio.to_thread(cluster.wait_healthy)
        world = World(cluster, arguments.seed, arguments.pace)
        kinds = (["w"] * 2 + ["s"] * (arguments.clients // 5) + ["p"] * (arguments.clients // 3 * arguments.persistent))[
            : arguments.clients
        ]
        kinds += ["c"] * (arguments.clients - len(kinds))
        people = [Person(world, kind, number) for number, kind in enumerate(kinds)]
        victims = Victims(cluster, arguments.kinds, arguments.seed, lambda *fault: faults.append(Fault(*fault)))
        memory, mutated = Memory(cluster), Counter[str]()
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(person.live()) for person in people]
            beside = [tasks.create_task(memory.run())]
            beside += [tasks.create_task(strangers(world.ports, f"{arguments.seed} {n}", mutated)) for n in range(arguments.fuzz)]
            end = time.monotonic() + arguments.minutes * 60.0
            while time.monotonic() < end:
                await asyncio.sleep(random.uniform(0.5, 1.5) * arguments.every)
                await victims.strike()
                say(f"{dict(victims.counts)}; {len(world.notes)} notes")
            await asyncio.to_thread(cluster.wait_healthy)
            world.ending.set()
            await _settle(world, people)
            for task in (*lives, *beside):
                task.cancel()
        verdict = judge(world.notes, [person.who for person in people if person.who[0] == "p"], faults, LATE_S)
        gone = [name for name in logs_with_tracebacks(folder) if name]
    if arguments.keep:
        (folder / "notes.json").write_text(json.dumps([world.notes, faults]))
    figures = {
        "judged": dict(verdict.counts), "clients": dict(world.counts), "faults": dict(victims.counts), "strangers": dict(mutated),
        "memory": memory.slopes(), "tracebacks": gone, "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    return figures, verdict.violations + [f"a traceback in {name}" for name in gone]


async def _settle(world: World, people: list[Person]) -> None:
    """Wait until all are there and nothing more comes."""
    began = time.monotonic()
    while time.monotonic() < began + DRAIN_S:
        await asyncio.sleep(1.0)
        quiet = time.monotonic() - world.last_got
        if time.monotonic() > began + SETTLE_S and quiet > QUIET_S and all(person.here for person in people):
            return
    say(f"not all are there: {[person.who for person in people if not person.here]}")


def logs_with_tracebacks(folder: Path) -> list[str]:
    """Names of the processes' logs with tracebacks, and the error's line."""
    found = []
    for path in sorted((folder / "run" / "logs").glob("*.log")):
        _, there, rest = path.read_text(errors="replace").partition("Traceback (most recent call last)")
        if there:
            lines = [line for line in rest.splitlines()[1:] if line and not line.startswith(" ")]
            found.append(f"{path.name}: {lines[0][:200] if lines else ''}")
    return found


def main() -> int:
    """Run, and print the results. Returns 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--pace", type=float, default=4.0, help="things that a client does in a second")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), help="processes to strike")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--fuzz", type=int, default=0, help="strangers that send mutated packets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="keep logs and notes in this folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.kinds = arguments.kinds or KINDS + KINDS_OF_STORES * arguments.persistent
    return play(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
