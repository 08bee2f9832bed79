"""Clusters of nodes with real processes: what flows, kill -9 of a node, drains, doubling, and an end that leaves nothing.

Source: docs/operations.md, "One machine"; docs/promises.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pixiu
from tests.e2e.test_doubling import together, tool
from tests.e2e.test_secure import run
from tests.e2e.test_signals import subscribed_at
from tests.onebox.test_up_e2e import left_running
from tests.support.cluster import LocalCluster, running_cluster, wait_for
from tests.support.effort import portion
from tests.support.live_traffic import LiveTraffic
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NODES: tuple[str, ...] = ()
SMALL = ("--small",)
ROOM, UIN = 42, 7
PACE_S = 0.01
WAIT_S = 120.0


def cluster_of(folder: Path, *arguments: str) -> Any:
    """A cluster with mail. What is usually in /dev/shm is in the folder."""
    tables = folder / "tables"
    tables.mkdir()
    memory = ("--set", f"xiu.table_dir={tables}", "--set", "xiu.table_mb=8", "--set", f"gateway.signal_table_dir={tables}")
    return running_cluster(folder, "--xius=1", "--pis=1", "--topics=1", *memory, *arguments, layout="nodes")


@pytest.fixture(scope="module", params=portion([NODES, SMALL]), ids=lambda options: "small" if options else "nodes")
def grouped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_of(tmp_path_factory.mktemp("grouped"), *request.param) as running:
        yield running
    assert left_running(running.folder / "run") == []
    assert list((running.folder / "tables").iterdir()) == [], "tables of processes that ended in order"


def processes(cluster: LocalCluster) -> dict[int, list[str]]:
    """The roles of each process, by pid."""
    found: dict[int, list[str]] = {}
    for one in cluster.status()["processes"]:
        found.setdefault(one["pid"], []).append(one["role"])
    return {pid: sorted(roles) for pid, roles in found.items()}


def places(cluster: LocalCluster) -> set[tuple[str, str, str, str]]:
    return {(one["role"], one["address"], one["client_address"], one["mqtt"]) for one in cluster.status()["processes"]}


async def mail_of(cluster: LocalCluster, uin: int, number: int) -> list[bytes]:
    """So much mail, as a device gets it."""
    found: list[bytes] = []
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=uin, device="phone") as inbox, asyncio.timeout(WAIT_S):
        while len(found) < number:
            mail = await anext(aiter(inbox))
            found.append(mail.payload)
            mail.acknowledge()
    return found


async def test_rooms_signals_chat_and_mail_pass(grouped: LocalCluster) -> None:
    shapes = sorted(processes(grouped).values())
    soft = ["admin", "broker", "gateway", "proxy", "relay", "router"]
    assert shapes in ([soft, soft, ["pi", "topic"], ["pi", "topic"], ["xiu"], ["xiu"]], [sorted([*soft, "pi", "topic", "xiu"])])
    async with pixiu.connect(grouped.target) as px, pixiu.connect(grouped.target, uin=UIN) as user:
        async with px.subscribe(room=ROOM) as messages, user.subscribe(chat=True) as chat, asyncio.timeout(WAIT_S):
            for number in range(20):
                await px.room(ROOM).send(b"%d" % number)
                await px.user(UIN).chat(b"%d" % number)
                await px.user(UIN).mail(b"%d" % number)
            expected = [b"%d" % number for number in range(20)]
            for subscription in (messages, chat):
                assert [(await anext(subscription)).payload for _ in range(20)] == expected
            await px.room(ROOM).signal(b"go", receipt=True)
            assert [(one.payload, one.signal) async for one in _some(messages, 1)] == [(b"go", True)]
        assert await mail_of(grouped, UIN, 20) == expected
    grouped.wait_healthy()


async def _some(messages: pixiu.Subscription, number: int) -> Any:
    for _ in range(number):
        yield await anext(messages)


class Load:
    """Rooms, signals and mail from one back end, for a client at one gateway and for a user's inbox."""

    def __init__(self, px: pixiu.Client, messages: pixiu.Subscription) -> None:
        self._px, self._messages = px, messages
        self._receipts: dict[bytes, Any] = {}
        self.stop = False
        self.mailed: list[bytes] = []
        self.got: list[tuple[bytes, bool]] = []

    async def send(self) -> None:
        """Messages and signals, one after another whatever becomes of those before."""
        while not self.stop:
            payload = b"%d" % len(self._receipts)
            room = self._px.room(ROOM)
            self._receipts[payload] = room.signal_soon(payload) if len(self._receipts) % 5 == 0 else room.send_soon(payload)
            await asyncio.sleep(PACE_S)
        await self._px.flush()

    async def mail(self) -> None:
        """Mail, each when the one before is confirmed."""
        while not self.stop:
            payload = b"mail %d" % len(self.mailed)
            await self._px.user(UIN + 1).mail(payload)
            self.mailed.append(payload)
            await asyncio.sleep(PACE_S)

    async def take(self) -> None:
        """What the client gets."""
        async for message in self._messages:
            self.got.append((message.payload, message.signal))

    @property
    def sent(self) -> int:
        """So many messages and signals."""
        return len(self._receipts)

    def missing(self) -> list[bytes]:
        """Accepted, and not there."""
        there = {payload for payload, _ in self.got}
        return [payload for payload, receipt in self._receipts.items() if receipt.error is None and payload not in there]


async def test_a_killed_node_loses_nothing_accepted_and_is_back_on_its_ports(grouped: LocalCluster) -> None:
    """Its own clients excepted, who connect to another gateway. Where there is no other node, what is under way is lost, mail is
    not."""
    before = places(grouped)
    gateways = grouped.processes("gateway")
    alone = len(gateways) == 1
    victim = gateways[0]
    reader, messages = await subscribed_at(grouped.target, gateways[-1]["client_address"], ROOM)
    async with pixiu.connect(grouped.target) as px:
        load = Load(px, messages)
        async with together(load.take()):
            work = [asyncio.create_task(load.send()), asyncio.create_task(load.mail())]
            await until(lambda: load.sent > 100 and len(load.mailed) > 20, "traffic")
            os.kill(victim["pid"], signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: victim["pid"] not in processes(grouped), "the registry to forget it")
            await asyncio.to_thread(grouped.wait_healthy)
            sent, mailed = load.sent, len(load.mailed)
            await until(lambda: load.sent > sent + 100 and len(load.mailed) > mailed + 20, "traffic after the kill")
            load.stop = True
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*work)
            if not alone:
                await until(lambda: not load.missing(), lambda: f"accepted, and not there: {load.missing()}")
    await reader.close()
    assert places(grouped) == before
    assert max(Counter(load.got).values()) == 1, "delivered twice"
    ordered = [int(payload) for payload, is_signal in load.got if not is_signal]
    assert ordered == sorted(ordered)
    found = await mail_of(grouped, UIN + 1, len(load.mailed))
    assert found == load.mailed


def test_with_one_of_its_roles_a_node_drains_and_the_output_names_the_others(grouped: LocalCluster) -> None:
    before = processes(grouped)
    broker = grouped.processes("broker")[-1]
    name = f"broker/0/{broker['replica']}"
    alone = len(grouped.processes("broker")) == 1
    if alone:
        refused = grouped.pixiu("drain", name)
        assert (refused.returncode, "xiu partition 0 would be without any Running process" in refused.stderr) == (2, True)
    drained = grouped.pixiu("drain", name, "--json", *(["--force"] if alone else []))
    assert drained.returncode == 0, drained.stderr
    first, last = (json.loads(line) for line in drained.stdout.splitlines())
    assert (first["event"], last["event"], first["pid"]) == ("drains", "has_left", broker["pid"])
    assert sorted(word.partition("/")[0] for word in (first["process"], *first["with"])) == before[broker["pid"]]

    def is_back() -> bool:
        now = processes(grouped)
        return broker["pid"] not in now and sorted(now.values()) == sorted(before.values())

    wait_for(is_back, "the supervisor to start it again")
    grouped.wait_healthy()


async def test_brokers_double_as_processes_beside_the_nodes(grouped: LocalCluster) -> None:
    before = processes(grouped)
    async with LiveTraffic(grouped.target) as live:
        await until(lambda: live.counts["turns"] > 10, "traffic")
        code, said = await tool(grouped, "broker", "--yes")
        assert (code, said[-1]["event"], said[-1]["partitions"]) == (0, "done", 2), said
        turns = live.counts["turns"]
        await until(lambda: live.counts["turns"] > turns + 10, "traffic after the doubling")
        await live.settle()
        live.check()
    losses = live.losses(0.0)
    assert all((one.lost, one.repeated, one.disordered) == (0, 0, 0) for one in losses.values()), live.where
    assert losses["room"].sent > 100
    await asyncio.to_thread(grouped.wait_healthy)
    now = processes(grouped)
    assert before.items() <= now.items(), "no node was disturbed"
    added = len(now) - len(before)
    assert [roles for pid, roles in now.items() if pid not in before] == [["broker"]] * added
    assert added == len(grouped.processes("gateway"))


def test_a_guarded_cluster_keeps_client_facing_roles_out_of_its_nodes(tmp_path: Path) -> None:
    with cluster_of(tmp_path, *NODES, "--secure") as guarded:
        certificates = tmp_path / "run/tls"
        status = json.loads(run(guarded, certificates, "operator", "status", "--json").stdout)
        assert status["problems"] == []
        found: dict[int, set[str]] = {}
        for process in status["processes"]:
            found.setdefault(process["pid"], set()).add(process["role"])
        together = [roles for roles in found.values() if len(roles) > 1]
        assert together == [{"broker", "router", "relay", "admin"}] * 2
        for words in (("send", "--room", "42", "hello"), ("send", "--mail", "--user", "7", "kept")):
            sent = run(guarded, certificates, "operator", *words)
            assert sent.returncode == 0, sent.stderr
