"""`pixiu probe` against a proxy and a gateway that do what a test says, and what its tables say."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.ids import PROBE_ROOM, PROBE_UIN, EndpointID
from pixiu.wire.record import Kind, decode, encode
from pixiu.wire.trace import Hop, Stamp, with_stamp
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tools.probe import run as probe_run
from tools.probe.command import findings_json, render, result_json
from tools.probe.paths import Finding, Prober
from tools.probe.run import ProbeOptions, ProbeRun

BROKER = EndpointID(500)


def stamped(record: bytes) -> list[bytes]:
    """As a broker or relay stamps it."""
    is_chat = decode(record).kind == Kind.CHAT
    return [with_stamp(record, Stamp(Hop.RELAY, 0, 5, 1, 2) if is_chat else Stamp(Hop.BROKER, 0, 4, 1, 2))]


class FakeCluster(wire_pb2_grpc.PublisherServicer, wire_pb2_grpc.SubscriberServicer):
    """A proxy, a broker and a gateway in one: what is published comes out as `passes` says."""

    def __init__(self) -> None:
        self.passes: Callable[[bytes], list[bytes]] = stamped
        self.refusal = ""
        self.takes_chat = True
        self.ends = 0
        """Publishing streams to end at the next batch."""
        self.published: list[bytes] = []
        self.joined: set[int] = set()
        self.uins: set[int] = set()
        self.users: set[int] = set()
        """Who takes messages to itself."""
        self._out: list[tuple[int, asyncio.Queue[bytes]]] = []

    async def Cluster(self, request: wire_pb2.ClusterRequest, context: Any) -> wire_pb2.ClusterReply:
        return wire_pb2.ClusterReply()

    async def Publish(self, request_iterator: AsyncIterator[wire_pb2.PublishRequest], context: Any) -> Any:
        async for request in request_iterator:
            if not request.count:
                yield wire_pb2.PublishReply(window_bytes=1 << 20)
                continue
            if self.ends:
                self.ends -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "this proxy is gone")
            self.published.append(request.batch)
            failures = []
            at, is_chat = request.position, decode(request.batch).kind == Kind.CHAT
            if self.refusal:
                failures = [wire_pb2.PublishFailure(first=at, last=at, code="x", text=self.refusal)]
            elif is_chat and not self.takes_chat:
                failures = [wire_pb2.PublishFailure(first=at, last=at, code=InvalidArgument.code, text="this proxy does not")]
            else:
                for record in self.passes(request.batch):
                    for user, out in self._out:
                        if user == (decode(request.batch).key if is_chat else 0):
                            out.put_nowait(record)
            yield wire_pb2.PublishReply(up_to=request.position, failures=failures)

    async def Subscribe(self, request_iterator: AsyncIterator[wire_pb2.SubscribeRequest], context: Any) -> Any:
        first = await anext(request_iterator)
        yield wire_pb2.SubscribeReply(uin=first.hello.uin)
        if first.hello.chat:
            self.users.add(first.hello.uin)
            request = first
        else:
            self.uins.add(first.hello.uin)
            request = await anext(request_iterator)
            self.joined |= set(request.join_rooms)
        out: asyncio.Queue[bytes] = asyncio.Queue()
        self._out.append((first.hello.uin if first.hello.chat else 0, out))
        yield wire_pb2.SubscribeReply(request=request.request)
        while True:
            record = await out.get()
            yield wire_pb2.SubscribeReply(batch=record, count=1)


class FakeZooKeeper:
    """Is there."""

    def __init__(self, hosts: str, **_: object) -> None:
        self.hosts = hosts

    async def connect(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""


def view(port: int, *roles: str) -> View:
    def node(role: str) -> Node:
        places = {"broker": (0, 4, BROKER), "relay": (0, 5, EndpointID(501))}
        partition, replica, endpoint = places.get(role, (-1, 1, EndpointID(600 + len(role))))
        return Node(role, partition, replica, NodeState.RUNNING, "127.0.0.1", port, 0, endpoint, 1, "", "", 0)

    return View(Layout(1, {"broker": RoleLayout(1, 1, 1)}), tuple(node(role) for role in roles))


@asynccontextmanager
async def fake_cluster(
    monkeypatch: pytest.MonkeyPatch, roles: tuple[str, ...] = ("proxy", "broker", "gateway")
) -> AsyncIterator[FakeCluster]:
    served = FakeCluster()
    server = grpc.aio.server()
    wire_pb2_grpc.add_PublisherServicer_to_server(served, server)
    wire_pb2_grpc.add_SubscriberServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    class FakeDiscovery:
        def __init__(self, zookeeper: object, root: str, on_view: Callable[[View], None], **_: object) -> None:
            self._on_view = on_view

        async def start(self) -> None:
            self._on_view(view(port, *roles))

        async def close(self) -> None:
            """Nothing to do."""

    monkeypatch.setattr(probe_run, "ZooKeeper", FakeZooKeeper)
    monkeypatch.setattr(probe_run, "Discovery", FakeDiscovery)
    try:
        yield served
    finally:
        await server.stop(0)


def options(count: int = 3, timeout_s: float = 30.0, failures: int = 2, interval_s: float = 0.05) -> ProbeOptions:
    return ProbeOptions(count, interval_s, timeout_s, failures, join_timeout_s=30.0)


async def run_probes(wanted: ProbeOptions) -> tuple[ProbeRun, list[list[Finding]]]:
    told: list[list[Finding]] = []
    async with ProbeRun("zk://127.0.0.1:1/pubsub", wanted, told.append) as run:
        assert run.unjoined == []
        await run.rounds(lambda: None)
    return run, told


async def test_probes_go_round_and_their_hops_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(monkeypatch) as served:
        run, told = await run_probes(options())
    assert (told, run.alarms, run.prober.pending) == ([], 0, 0)
    (state,) = run.prober.paths.values()
    assert (state.sent, state.arrived, state.failed) == (3, 3, 0)
    assert [row.hop for row in run.prober.table()] == ["publisher → broker", "broker", "broker → subscriber", "total"]
    records = [decode(record) for record in served.published]
    assert {record.key for record in records} == served.joined == {PROBE_ROOM}
    assert {record.sender for record in records} == served.uins
    assert min(served.uins) >= PROBE_UIN
    assert len({record.snowflake_id for record in records}) == 3


async def test_relays_are_probed_by_messages_to_pseudo_users(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(monkeypatch, ("proxy", "broker", "relay", "gateway")) as served:
        run, told = await run_probes(options())
    assert (told, run.prober.pending) == ([], 0)
    assert {path.middle.role: (s.sent, s.arrived, s.failed) for path, s in run.prober.paths.items()} == {
        "broker": (3, 3, 0),
        "relay": (3, 3, 0),
    }
    hops = {row.hop: row.count for row in run.prober.table()}
    assert (hops["broker"], hops["relay"], hops["total"]) == (3, 3, 6)
    (user,) = served.users
    assert user >= PROBE_UIN
    assert {r.key for r in map(decode, served.published) if r.kind == Kind.CHAT} == served.users
    assert {role: entry["arrived"] for entry in paths_of(run) for role in ("broker", "relay") if role in entry} == {
        "broker": 3,
        "relay": 3,
    }


async def test_a_proxy_that_takes_rooms_alone_is_not_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(monkeypatch, ("proxy", "broker", "relay", "gateway")) as served:
        served.takes_chat = False
        run, told = await run_probes(options())
    assert told == []
    assert [path.middle.role for path in run.prober.paths] == ["broker"]
    assert "takes no messages to users: not probed" in shown(run.prober)


def paths_of(run: ProbeRun) -> list[dict[str, Any]]:
    found: Any = result_json(run.prober)["paths"]
    return list(found)


async def test_what_a_proxy_refuses_has_failed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(monkeypatch) as served:
        served.refusal = "no broker of partition 0 is running"
        run, told = await run_probes(options())
    assert [len(findings) for findings in told] == [1]
    (state,) = run.prober.paths.values()
    assert state.reason == "refused by the proxy: no broker of partition 0 is running"


async def test_what_does_not_arrive_has_failed_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(monkeypatch) as served:
        served.passes = lambda _: []
        run, told = await run_probes(options(timeout_s=0.05))
    assert run.alarms == 1
    assert told[0][0].text.startswith("all 1 paths fail")


async def test_others_messages_and_damaged_ones_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(monkeypatch) as served:
        right = served.passes
        other = encode(1, PROBE_ROOM, b"x" * 16, 1)
        served.passes = lambda record: [other, encode(1, PROBE_ROOM, b"hi", 2), record[:-9] + b"x" * 9, *right(record)]
        run, told = await run_probes(options())
    assert told == []
    (state,) = run.prober.paths.values()
    assert state.arrived == 3


async def test_a_proxys_stream_that_ends_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_run, "RECONNECT_S", 0.0)
    async with fake_cluster(monkeypatch) as served:
        served.ends = 1
        told: list[list[Finding]] = []
        async with ProbeRun("zk://127.0.0.1:1/pubsub", options(count=0, failures=1), told.append) as run:
            rounds = asyncio.create_task(run.rounds(lambda: None))
            while len(told) < 2:
                await asyncio.sleep(0.01)
            rounds.cancel()
            await asyncio.wait({rounds})
    assert [len(findings) for findings in told[:2]] == [1, 0]
    (state,) = run.prober.paths.values()
    assert "this proxy is gone" in state.reason or "not sent" in state.reason


async def test_a_cluster_without_a_path_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(monkeypatch, ("proxy", "gateway")):
        with pytest.raises(Unavailable, match="no path to probe"):
            await run_probes(options())


def shown(prober: Prober) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render(prober))
    return out.getvalue()


def test_the_tables_and_the_json_say_the_same() -> None:
    prober = Prober(2, 1.0)
    prober.set_view(view(7000, "proxy", "broker", "gateway"))
    (path,) = prober.paths
    for number in (1, 2):
        assert "all 1 paths work" in shown(prober) or "lost single probes" in shown(prober)
        (probe,) = prober.begin_round(0.0)
        assert probe.number == number
        prober.expire(1.0)
    text = shown(prober)
    assert "of 1 paths 1 fail" in text
    assert f"{path.name}: did not arrive" in text
    said = result_json(prober)
    assert said["event"] == "result"
    assert said["failing_paths"] == 1
    entries: Any = said["paths"]
    (entry,) = entries
    assert entry["broker"] == {"role": "broker", "partition": 0, "replica": 4, "address": "127.0.0.1:7000"}
    assert (entry["sent"], entry["failed"], entry["failures_in_a_row"], entry["reason"]) == (2, 2, 2, "did not arrive")
    (probe,) = prober.begin_round(2.0)
    took = [Stamp(Hop.PROXY, 0, 1, 1, 2), Stamp(Hop.BROKER, 0, 9, 3, 4), Stamp(Hop.SUBSCRIBER, 0, 0, 5, 5)]
    prober.arrived(probe.number, path.gateway.endpoint, took)
    assert "probes that arrived, but bypassed the replica that they were meant for: 1" in shown(prober)
    assert f"{path.name}: bypassed it, through broker partition 0 replica 9" in shown(prober)
    entries = result_json(prober)["paths"]
    assert (entries[0]["failed"], entries[0]["around"], entries[0]["arounds_in_a_row"]) == (2, 1, 1)
    assert findings_json(prober.findings(), prober)["event"] == "alarm"
    assert findings_json([], prober)["event"] == "cleared"
