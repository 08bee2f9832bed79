"""An operator's commands on a cluster of `pixiu up` that carries rooms and mail: more and fewer replicas, drains, restarts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import pixiu
from tests.support.cluster import LocalCluster, running_cluster, wait_for

pytestmark = pytest.mark.e2e
PATIENT_S = 300.0
ROOM, UIN = 42, 7
PROCESSES = 6
"""Two nodes, two Xius, two Pis."""
PACE_S = 0.02
"""Between two messages, which would else take the CPU from those who start again."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two replicas of every role."""
    with running_cluster(tmp_path_factory.mktemp("operating"), "--xius=1", "--pis=1", layout="nodes") as one:
        one.wait_healthy()
        yield one


def pids(cluster: LocalCluster, *roles: str) -> set[int]:
    return {process["pid"] for process in cluster.status()["processes"] if process["role"] in roles}


def names(cluster: LocalCluster, role: str) -> list[str]:
    return [
        f"{role}/{p['replica']}" if p["partition"] < 0 else f"{role}/{p['partition']}/{p['replica']}"
        for p in cluster.processes(role)
    ]


class Traffic:
    """Messages to a room and mail to a user, one after another, until it is told to stop."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stop = asyncio.Event()
        self.sent: list[bytes] = []
        self.mailed: list[bytes] = []

    async def __aenter__(self) -> Traffic:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        """Every send must succeed: the SDK tries again by itself where a process has left."""
        async with (
            pixiu.connect(self._target) as px,
            pixiu.connect(self._target) as reader,
        ):
            reader._uniform = lambda: 0.99  # it leaves a gateway that drains as late as it may
            await self._exchange(px, reader)

    async def _exchange(self, px: pixiu.Client, reader: pixiu.Client) -> None:
        async with reader.subscribe(room=ROOM) as messages:
            while not self._stop.is_set():
                word = b"%d" % len(self.sent)
                await px.room(ROOM).send(word)
                self.sent.append(word)
                await px.user(UIN).mail(word)
                self.mailed.append(word)
                await asyncio.sleep(PACE_S)
            found: list[tuple[bytes, int]] = []
            while not found or found[-1][0] != self.sent[-1]:
                message = await asyncio.wait_for(anext(messages), PATIENT_S)
                found.append((message.payload, message.message_id))
            assert messages.counters.gaps == 0
        shown = Counter(payload for payload, _ in found)
        lost = [payload for payload in self.sent if not shown[payload]]
        repeated = [one for one in found if shown[one[0]] > 1]
        assert (lost, repeated) == ([], []), f"of {len(self.sent)}"
        assert [payload for payload, _ in found] == self.sent

    async def received(self) -> list[bytes]:
        """The mail as the user's device gets it."""
        found: list[bytes] = []
        async with pixiu.connect(self._target) as px, px.inbox(uin=UIN, device="phone") as inbox:
            while len(found) < len(self.mailed):
                mail = await asyncio.wait_for(anext(aiter(inbox)), PATIENT_S)
                found.append(mail.payload)
                mail.acknowledge()
        return found


def test_a_replica_more_is_started_and_one_less_is_ended_by_who_runs_the_cluster(cluster: LocalCluster) -> None:
    before = pids(cluster, "broker")
    more = cluster.pixiu("add-replica", "broker")
    assert more.returncode == 0, more.stderr
    assert "1 partition × 3 replicas wanted" in more.stdout
    assert len(cluster.processes("broker")) == 3
    cluster.wait_healthy()
    less = cluster.pixiu("remove-replica", "broker", "--json")
    assert less.returncode == 0, less.stderr
    assert json.loads(less.stdout)["replicas"] == 2
    wait_for(lambda: pids(cluster, "broker") == before, "the two that were there before")
    cluster.wait_healthy()


def test_a_process_drains_and_who_could_not_be_missed_does_not(cluster: LocalCluster) -> None:
    before = pids(cluster, "proxy")
    first, *_ = names(cluster, "proxy")
    refused = cluster.pixiu("drain", *names(cluster, "proxy"))
    assert (refused.returncode, "proxy would be without any Running process" in refused.stderr) == (2, True)
    unknown = cluster.pixiu("drain", "proxy/4711")
    assert (unknown.returncode, first in unknown.stderr) == (2, True)
    assert pids(cluster, "proxy") == before
    drained = cluster.pixiu("drain", first, "--json")
    assert drained.returncode == 0, drained.stderr
    assert [json.loads(line)["event"] for line in drained.stdout.splitlines()] == ["drains", "has_left"]
    wait_for(lambda: len(cluster.processes("proxy")) == 2, "the supervisor starts it again")
    assert len(pids(cluster, "proxy") & before) == 1
    cluster.wait_healthy()


async def test_every_process_is_restarted_under_rooms_and_mail_without_a_loss(cluster: LocalCluster) -> None:
    roles = ("xiu", "pi", "router", "relay", "broker", "proxy", "gateway")
    before = pids(cluster, *roles)
    assert len(before) == PROCESSES
    async with asyncio.timeout(PATIENT_S), Traffic(cluster.target) as traffic:
        done = await asyncio.to_thread(cluster.pixiu, "rolling-restart", "--yes", "--json", timeout_s=PATIENT_S)
    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["drains", "is_back"] * PROCESSES
    assert pids(cluster, *roles).isdisjoint(before)
    assert await traffic.received() == traffic.mailed
    print(f"{len(traffic.mailed)} messages and mails during a restart of {PROCESSES} processes")
