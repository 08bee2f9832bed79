"""Every process of a cluster is replaced while rooms and mail flow, by this tree's with other settings.

    before     processes of the newest tag `v*`, with its code; of this tree while there is no tag
    upgraded   this tree, machine by machine: another trace fraction, and a second key signs
    back       with a tag: the first machine's of the tag once more, and then this tree's again

A process is told to end (SIGTERM), and its successor starts in its place. A "machine" has one replica of each role; they end
together, and the next machine follows when the cluster is healthy. The SDK is today's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import pixiu
from cluster.trust.key_folder import add_key, use_key
from onebox.grouping import CLIENT_ROLES, NODE
from pixiu.discovery.view import RoleLayout
from registry.layout import ensure_layout
from tests.history.checker import check, counts, report
from tests.history.record import Fault, History
from tests.history.violation import Limits
from tests.support.cluster import LAYOUT
from tests.support.forks import fork
from tests.support.mail_history import Traffic
from tests.support.releases import newest_release
from tests.support.roles import WAIT_S, Roles
from tests.support.waiting import until
from tools.cli.status import read_status

pytestmark = pytest.mark.timeout(300)

STORES, SOFT = ("xiu", "pi"), ("router", "relay", "broker", "gateway", "proxy")
ORDER = (*STORES, *SOFT)
"""In which docs/operations.md, "Upgrade", says it is done."""
PROCESSES = ORDER if LAYOUT == "separate" else (*STORES, NODE)
"""Of a machine."""
REPLICAS = 2
ROOMS = range(1, 5)
PACE_S = 0.04


def machine(number: int) -> list[str]:
    """One replica of each role, by the names of the processes."""
    return [f"{role}-{number}" for role in PROCESSES]


class Rooms:
    """A back end that sends numbered messages to rooms, and subscribers that look at their order."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.sent: Counter[int] = Counter()
        self.got: Counter[tuple[int, int]] = Counter()
        """(subscriber, room) → messages."""
        self.last: Counter[tuple[int, int]] = Counter()
        """(subscriber, room) → the newest number."""
        self.gaps: list[str] = []
        """What the SDK said when messages may have been missed."""
        self._sender: pixiu.Client | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def dropped(self) -> int:
        """How often a message was dropped on the way; `send` has sent it again."""
        return self._sender.stats().failures_by_code.get("DROPPED", 0) if self._sender is not None else 0

    @property
    def lost(self) -> int:
        """How many of the accepted messages did not come, of those before the newest that came."""
        return self.last.total() - self.got.total()

    async def _send(self, px: pixiu.Client, room: int) -> None:
        while True:
            await px.room(room).send(b"%d" % (self.sent[room] + 1), timeout_s=WAIT_S)  # fails only where sending it again did, too
            self.sent[room] += 1
            await asyncio.sleep(PACE_S)

    async def _take(self, number: int, subscription: pixiu.Subscription) -> None:
        async for message in subscription:
            key, said = (number, message.room), int(message.payload)
            assert said > self.last[key], f"subscriber {number}, room {message.room}: {said} after {self.last[key]}"
            self.last[key] = said
            self.got[key] += 1

    def check(self) -> None:
        """Nothing has failed so far. Raises what did."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def flow(self) -> None:
        """What is sent from now on arrives everywhere."""
        from_here = {room: self.sent[room] + 1 for room in ROOMS}

        def arrived() -> bool:
            self.check()
            return all(self.last[number, room] > from_here[room] for number in range(REPLICAS) for room in ROOMS)

        await until(arrived, lambda: f"what is sent after {from_here} at {dict(self.last)}")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send and take while the block lasts."""
        async with contextlib.AsyncExitStack() as stack:
            connecting = pixiu.connect(self._target, client="sender", connect_timeout_s=WAIT_S)
            self._sender = sender = await stack.enter_async_context(connecting)
            for number in range(REPLICAS):
                connecting = pixiu.connect(self._target, client=f"taker-{number}", connect_timeout_s=WAIT_S)
                px = await stack.enter_async_context(connecting)
                taker = px.subscribe(rooms=ROOMS, on_gap=self.gaps.append)
                await taker.ready(timeout_s=WAIT_S)
                self._tasks.append(asyncio.create_task(self._take(number, taker)))
            self._tasks += [asyncio.create_task(self._send(sender, room)) for room in ROOMS]
            stack.push_async_callback(self._end)
            yield
            self.check()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Rolling:
    """The processes of a cluster, and what each of them is started with."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.names = [name for number in range(REPLICAS) for name in machine(number)]
        self.settings: dict[str, Any] = {"drain_timeout_s": 10, "cluster_trace_fraction": 0.01}

    def start(self, name: str) -> None:
        """Start one, of the tree that `roles.fork` stands for."""
        settings, partition = self.settings, -1 if name.startswith(("gateway", "proxy", NODE)) else 0
        if name.startswith("gateway"):
            settings = settings | {"drain_jitter_s": 0.2}
        elif name.startswith(NODE):
            roles = ",".join(role if role in CLIENT_ROLES else f"{role}-0" for role in SOFT)
            settings = settings | {"roles": roles, "gateway.drain_jitter_s": 0.2, "gateway.signal_table_dir": self.roles.folder}
        self.roles.start(name, partition=partition, **settings)

    async def healthy(self) -> None:
        """Until `pixiu status` would say so."""
        problems: list[str] = []

        async def none() -> bool:
            problems[:] = (await read_status(self.roles.target())).problems
            return not problems

        await until(none, lambda: f"a healthy cluster: {problems}")

    async def replace(self, *names: str, history: History, rooms: Rooms) -> None:
        """Some processes, together, by such that have the settings of now."""
        began = time.monotonic()
        for name in names:
            history.fault(Fault("restart", name))
        await asyncio.gather(*map(self.roles.end, names))
        for name in names:
            self.start(name)
        await self.roles.running(*names)
        await self.healthy()
        for name in names:
            history.fault(Fault("restart", name, heals=True))
        await rooms.flow()
        lost = f"lost {rooms.lost}, {rooms.dropped} dropped and sent again, {len(rooms.gaps)} gaps"
        print(f"{', '.join(names)}: {time.monotonic() - began:.1f} s; {lost}", flush=True)


async def test_every_process_is_upgraded_while_rooms_and_mail_flow(roles: Roles, tmp_path: Path) -> None:
    history = History(path=tmp_path / "history.jsonl")
    add_key(tmp_path / "keys")
    use_key(tmp_path / "keys")
    old = newest_release(tmp_path)
    began = time.monotonic()
    try:
        rolling = Rolling(roles)
        rolling.settings["cluster_key_dir"] = tmp_path / "keys"
        await ensure_layout(roles.zookeeper, "/pubsub", {role: RoleLayout(1, 1, REPLICAS) for role in ORDER})
        roles.fork = old.fork if old is not None else fork
        for name in rolling.names:
            rolling.start(name)
        await roles.running(*rolling.names)
        await rolling.healthy()
        rooms = Rooms(roles.target())
        async with rooms.running(), Traffic(roles.target(), history, seed=1, users=4, senders=2, pace_s=0.05) as traffic:
            await traffic.more(50)
            add_key(tmp_path / "keys")
            rolling.settings["cluster_trace_fraction"] = 0.5
            for fork_of, number in ((fork, 0), (fork, 1), *(((old.fork, 0), (fork, 0)) if old is not None else ())):
                roles.fork = fork_of
                await rolling.replace(*machine(number), history=history, rooms=rooms)
                await traffic.more(30)
            use_key(tmp_path / "keys")
            await rooms.flow()
            await traffic.settle()
    finally:
        await asyncio.to_thread(roles.stop)  # before the server that forked some of them ends
        if old is not None:
            old.close()
        history.close()
    failed = {what: number for what, number in traffic.counts.items() if what.startswith("unconfirmed")}
    print(f"{time.monotonic() - began:.1f} s; {dict(traffic.counts)}; {counts(history)}; {rooms.sent.total()} to rooms")
    assert not failed
    found = check(history, Limits(sends=100, deliveries=100, acknowledgements=100, faults=len(rolling.names)))
    assert not found, report(history, found)
