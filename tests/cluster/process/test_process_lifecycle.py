"""A real process of a role that does nothing, beside a real ZooKeeper: start, what it shows, how it ends, what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics.metrics import ALERTS
from onebox.embedded import EmbeddedZooKeeper
from ops.drain_command import drain_process
from pixiu.discovery import paths
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.operations import NoNode
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from registry.layout import ensure_layout
from registry.settings import change_settings
from tests.support.alerts import firing, moment
from tests.support.forks import fork_into
from tests.support.shared_zookeeper import shared_server
from tests.support.waiting import until

pytestmark = pytest.mark.process

LIMIT_S = 60.0
MAX_LINE = 1 << 20
"""Bytes: a traceback is one line of the log."""


@pytest.fixture
def registry() -> str:
    return shared_server().address


class Role:
    """One started process and what it printed."""

    def __init__(self, module: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        reading, writing = os.pipe()
        self._pipe = open(reading, "rb")  # noqa: SIM115 -- its transport closes it
        with open(writing, "wb") as output:
            self.process = fork_into(output, f"tests.cluster.process.{module}", arguments, environ)
        self.out: list[str] = []
        self.log: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self._news = asyncio.Condition()
        self._over = False
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        stream = asyncio.StreamReader(limit=MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._pipe)
        async for line in stream:
            async with self._news:
                self.raw.append(line.decode())
                if line.startswith(b"{"):
                    self.log.append(json.loads(line))
                else:
                    self.out.append(line.decode().rstrip())
                self._news.notify_all()
        async with self._news:
            self._over = True
            self._news.notify_all()

    async def until(self, found: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(lambda: found() or self._over)
        assert found(), self.text

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == name]

    def audited(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.events("audit") if line["kind"] == kind]

    async def running(self) -> dict[str, Any]:
        await self.until(lambda: self.events("running"))
        return self.events("running")[0]

    def kill(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            code = await self.process.ended()
            await self._reading
        return code

    @property
    def text(self) -> str:
        return "".join(self.raw)


def started(*options: str, log_format: str = "json", environ: dict[str, str] | None = None) -> AbstractAsyncContextManager[Role]:
    sets = [argument for option in (f"log_format={log_format}", *options) for argument in ("--set", option)]
    return ending(Role("idle_role", sets, environ))


@asynccontextmanager
async def ending(role: Role) -> AsyncIterator[Role]:
    """Its process ends with the block."""
    try:
        yield role
    finally:
        role.process.kill()
        await role.ended()


@asynccontextmanager
async def connected(registry: str) -> AsyncIterator[ZooKeeper]:
    zookeeper = ZooKeeper(registry)
    await zookeeper.connect()
    try:
        yield zookeeper
    finally:
        await zookeeper.close()


async def nodes(zookeeper: ZooKeeper, root: str, partition: int = 0) -> list[Node]:
    directory = paths.node_directory(root, "router", partition)
    try:
        names = await zookeeper.children(directory)
        return [
            Node.from_json((await zookeeper.get(f"{directory}/{name}"))[0], replica=paths.replica_of(name) or 0) for name in names
        ]
    except NoNode:
        return []


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as reply:
        return reply.status, await reply.text()


async def grpc_health(port: int, service: str = "") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)
        return int(reply.status)


async def reflected(port: int) -> set[str]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for reply in call:
            return {service.name for service in reply.list_services_response.service}
    return set()


async def test_a_role_starts_shows_itself_and_ends_in_order(registry: str) -> None:
    root = "/lifecycle"
    options = (f"registry=zk://{registry}{root}", "partition=3", "advertised_udp_host=203.0.113.9", "advertised_udp_port=17000")
    async with connected(registry) as zookeeper, started(*options, "reflection=true") as role:
        line = await role.running()
        port = int(line["address"].rpartition(":")[2])
        [node] = await nodes(zookeeper, root, partition=3)
        assert (node.role, node.partition, node.state, node.port) == ("router", 3, NodeState.RUNNING, port)
        assert (node.host, *node.udp_address) == ("127.0.0.1", "203.0.113.9", 17_000)
        assert (node.pid, node.http_port, node.mqtt_host) == (role.process.pid, line["http_port"], "prepared")
        assert (line["role"], line["partition"], line["replica"]) == ("router", 3, node.replica)

        status, text = await get(node.http_port, "/health")
        said = json.loads(text)
        assert status == 200
        assert (said["role"], said["partition"], said["replica"], said["state"]) == ("router", 3, node.replica, "Running")
        assert said["service"] == {"pid": role.process.pid}
        assert set(said["peers"]) == {"unknown", "alive", "suspect", "dead"}
        assert (await get(node.http_port, "/live"))[0] == 200

        status, text = await get(node.http_port, "/metrics")
        found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
        assert found["pixiu_router_running"] == found["pixiu_router_registry_connected"] == found["pixiu_router_view_nodes"] == 1
        # A family without any sample yet has no line of its own.
        by_reason = {"links_dropped_total", "links_refused_total"}
        assert {f"pixiu_router_{name}" for name in ALERTS.keys() - by_reason} <= found.keys()

        assert "# TYPE pixiu_loop_delay_seconds histogram" in text
        assert 'pixiu_received_batch_records_count{role="router",partition="3"} 0.0' in text

        assert await grpc_health(port) == health_pb2.HealthCheckResponse.SERVING
        assert await grpc_health(port, "grpc.health.v1.Health") == health_pb2.HealthCheckResponse.SERVING
        assert "grpc.health.v1.Health" in await reflected(port)

        role.kill(signal.SIGTERM)
        assert await role.ended() == 0
        assert await nodes(zookeeper, root, partition=3) == []
        assert [line for line in role.out if line != "view"] == ["prepare", "start", "drain", "drained", "stop"]
        assert role.out.index("prepare") < role.out.index("view") < role.out.index("start")
        # "waiting" is for a registry that is slow to answer, "audit" has a test of its own.
        lived = [line["event"] for line in role.log if line["event"] not in ("waiting", "audit")]
        audited = [line["kind"] for line in role.events("audit")]
        assert (audited[0], audited[-1], "layout" in audited) == ("start", "stop", True)
        # It has a login of the test's ZooKeeper, and says that nobody has guarded this root.
        assert lived == ["starting", "listener_open_to_all", "registered", "running", "draining", "stopped"]


async def test_two_processes_hear_each_other_and_draining_is_seen_before_the_end(registry: str, tmp_path: Path) -> None:
    root, key = "/two", tmp_path / "1.key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    key.chmod(0o644)
    options = (f"registry=zk://{registry}{root}", "cluster.heartbeat_interval_ms=100", f"cluster.key_dir={tmp_path}")
    async with connected(registry) as zookeeper, started(*options) as one, started(*options, "drain_s=600") as other:
        other_port = int((await other.running())["http_port"])
        await one.running()
        await one.until(lambda: "peer alive" in one.out)
        assert one.events("file_open_to_all")[0]["path"] == str(key)
        assert "0123456789abcdef" not in one.text
        other.kill(signal.SIGTERM)

        async def draining() -> bool:
            return NodeState.DRAINING in [node.state for node in await nodes(zookeeper, root)]

        await until(draining)
        await other.until(lambda: "drain" in other.out)
        status, text = await get(other_port, "/health")
        assert (status, json.loads(text)["state"]) == (503, "Draining")
        other.kill(signal.SIGTERM)
        assert await other.ended() == 128 + signal.SIGTERM
        assert "drained" not in other.out
        # Killed in the middle: its heartbeats are missed, and discovery is told.
        await one.until(lambda: "peer dead" in one.out)
        one.kill(signal.SIGINT)
        assert await one.ended() == 0


async def test_a_drain_that_takes_too_long_is_cut_off(registry: str) -> None:
    async with started(f"registry=zk://{registry}/slow", "drain_s=600", "drain_timeout_s=0.1") as role:
        await role.running()
        role.kill(signal.SIGTERM)
        assert await role.ended() == 0
        assert [line for line in role.out if line != "view"][-2:] == ["drain", "stop"]
        assert "not done after drain_timeout_s = 0.1" in role.events("drain_failed")[0]["error"]


async def test_a_signal_while_starting_ends_the_start_and_unregisters(registry: str) -> None:
    async with connected(registry) as zookeeper, started(f"registry=zk://{registry}/starting", "start_s=600") as role:
        await role.until(lambda: "start" in role.out)
        [node] = await nodes(zookeeper, "/starting")
        assert node.state is NodeState.INIT
        assert (await get(node.http_port, "/health"))[0] == 503
        assert await grpc_health(node.port) == health_pb2.HealthCheckResponse.NOT_SERVING
        role.kill(signal.SIGTERM)
        assert await role.ended() == 0
        assert await nodes(zookeeper, "/starting") == []
        assert role.out[-1] == "stop"
        assert "drain" not in role.out


@pytest.mark.parametrize(
    ("fail", "text", "traceback"),
    [("bug", "a bug in start", True), ("error", "nobody gave a snapshot", False), ("crash", "a bug in a task", True)],
)
async def test_a_failure_ends_with_1_and_only_a_bug_has_a_traceback(registry: str, fail: str, text: str, traceback: bool) -> None:
    async with connected(registry) as zookeeper, started(f"registry=zk://{registry}/{fail}", f"fail={fail}") as role:
        assert await role.ended() == 1
        [line] = role.events("crashed")
        assert text in line["error"]
        assert ("exception" in line) is traceback
        assert role.out[-1] == "stop"
        assert await nodes(zookeeper, f"/{fail}") == []


async def test_a_bug_in_on_view_is_logged_once_and_does_not_end_the_process(registry: str) -> None:
    async with started(f"registry=zk://{registry}/view", "fail=view") as role:
        port = (await role.running())["http_port"]
        await role.until(lambda: role.out.count("view") >= 2)
        text = (await get(port, "/metrics"))[1]
        failures = re.search(r"^pixiu_router_view_failures_total\{.*\} (\S+)", text, re.MULTILINE)
        assert failures is not None
        assert float(failures[1]) >= 2
        before = text.replace(failures[0], failures[0].rpartition(" ")[0] + " 0.0")
        assert "PixiuBug" in firing({"router": before.encode()}, {"router": text.encode()})
        assert len(role.events("view_failed")) == 1


async def test_a_partition_that_the_layout_does_not_have_is_refused(registry: str) -> None:
    async with connected(registry) as zookeeper:
        await ensure_layout(zookeeper, "/few", {"router": RoleLayout(2, 2, 1)})
    async with started(f"registry=zk://{registry}/few", "partition=2") as role:
        assert await role.ended() == 2
        [line] = role.events("start_failed")
        assert line["error"] == f"partition = 2: the layout at zk://{registry}/few has 2 of router, from 0 on"
    async with started(f"registry=zk://{registry}/few", "partition=1") as role:
        await role.running()


async def test_a_start_that_waits_for_the_registry_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        target = f"zk://127.0.0.1:{deaf.getsockname()[1]}/nobody"
        async with started(f"registry={target}") as role:
            await role.until(lambda: role.events("waiting"))
            [line] = role.events("waiting")
            assert (line["part"], line["registry"]) == ("registry", target)


async def test_a_start_that_waits_for_members_says_which_in_its_log_and_at_health(registry: str) -> None:
    async with connected(registry) as zookeeper:
        await ensure_layout(zookeeper, "/waits", {"router": RoleLayout(2, 2, 1), "broker": RoleLayout(1, 1, 2)})
        missing = ["router partition 0: 0 of 1 Running", "broker partition 0: 0 of 2 Running"]
        async with started(f"registry=zk://{registry}/waits", "partition=1", "start_s=600") as role:
            await role.until(lambda: len([line for line in role.events("waiting") if line["part"] == "members"]) >= 2)
            assert role.events("waiting")[-1]["missing"] == "; ".join(missing)
            [node] = await nodes(zookeeper, "/waits", partition=1)
            status, text = await get(node.http_port, "/health")
            assert (status, json.loads(text)["waits_for"]) == (503, missing)
            role.kill(signal.SIGTERM)
            assert await role.ended() == 0


async def test_a_process_that_finds_no_layout_says_how_one_is_written(registry: str) -> None:
    async with started(f"registry=zk://{registry}/unwritten") as role:
        await role.running()
        [line] = [line for line in role.events("waiting") if line["part"] == "layout"]
        assert "`pixiu layout set`" in line["missing"]


async def test_a_process_drains_when_an_operators_tool_asks_it_to(registry: str) -> None:
    async with connected(registry) as zookeeper, started(f"registry=zk://{registry}/asked") as role:
        await role.running()
        [node] = await nodes(zookeeper, "/asked")
        await change_settings(zookeeper, "/asked", {"all.log_level": "debug", "proxy.room_messages_per_s": 5}, "bob@desk")
        await role.until(lambda: role.audited("settings"))
        await change_settings(zookeeper, "/asked", {"proxy.room_messages_per_s": None}, "ann@desk")
        await role.until(lambda: len(role.audited("settings")) == 2)
        lines = [(line["version"], line["operator"], json.loads(line["settings"])) for line in role.audited("settings")]
        assert lines == [
            (1, "bob@desk", {"all.log_level": "debug", "proxy.room_messages_per_s": 5}),
            (2, "ann@desk", {"proxy.room_messages_per_s": None}),
        ], "every process has all changes, also those of other roles"
        await drain_process(zookeeper, "/asked", [node], "ann@desk", LIMIT_S)
        assert await role.ended() == 0
        [asked] = role.events("drain_asked")
        assert asked["by"] == "ann@desk"
        assert [line for line in role.out if line != "view"] == ["prepare", "start", "drain", "drained", "stop"]


async def test_a_taken_port_is_named_and_ends_with_2_without_a_traceback(registry: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        port = tcp.getsockname()[1]
        async with started(f"registry=zk://{registry}/taken", f"port={port}") as role:
            assert await role.ended() == 2
            [line] = role.events("start_failed")
            assert f"port {port} on 127.0.0.1 cannot be used for TCP (gRPC): Address already in use" in line["error"]
            assert "set port to another one" in line["error"]
            assert "Traceback" not in role.text
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        port = udp.getsockname()[1]
        async with started(f"registry=zk://{registry}/taken", f"port={port}") as role:
            assert await role.ended() == 2
            [line] = role.events("start_failed")
            assert f"127.0.0.1:{port}" in line["error"]
            assert "(options host and port)" in line["error"]
            assert "Traceback" not in role.text
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        port = tcp.getsockname()[1]
        async with started(f"registry=zk://{registry}/taken", f"http_port={port}") as role:
            assert await role.ended() == 2
            assert f"port {port} on 127.0.0.1 cannot be used for HTTP" in role.events("start_failed")[0]["error"]


async def test_without_zookeeper_it_says_which_address_and_ends_with_2() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: whoever connects is refused
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        often = ("poll_interval_s=5", "connect_timeout_s=0.3")
        async with started(f"registry=zk://{address}/x", *often, log_format="console") as role:
            assert await role.ended() == 2
            assert "setting_doubtful" in role.text
            assert "poll_interval_s = 5: ZooKeeper itself takes session_timeout_ms = 10000" in role.text
            assert "start_failed" in role.text
            assert address in role.text
            assert "check that it runs" in role.text
            assert "Traceback" not in role.text


async def test_an_outage_of_zookeeper_changes_nothing_and_does_not_keep_a_process_from_ending(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path) as server:
        async with started(f"registry=zk://{server.address}/outage", "session_timeout_ms=2000") as role:
            port = (await role.running())["http_port"]
            await asyncio.to_thread(server.stop)

            async def noticed() -> bool:
                return 'pixiu_router_registry_connected{role="router",partition="0"} 0.0' in (await get(port, "/metrics"))[1]

            await until(noticed)
            status, text = await get(port, "/health")
            assert (status, json.loads(text)["state"]) == (200, "Running")
            role.kill(signal.SIGTERM)
            assert await role.ended() == 0
            assert [line["part"] for line in role.events("drain_failed") + role.events("stop_failed")] == ["registry", "registry"]
            assert [line for line in role.out if line != "view"][-3:] == ["drain", "drained", "stop"]


async def test_wrong_options_are_told_before_anything_starts(tmp_path: Path) -> None:
    async with started("prot=1", "drain_s=x", environ={"PIXIU_CLUSTER_MTU_BYTES": "1"}) as role:
        assert await role.ended() == 2
        assert "router: wrong options:" in role.text
        assert "Did you mean port?" in role.text
        assert '--set drain_s: [router] drain_s = "x": must be a number from 0.0 to 600.0' in role.text
        assert "environment variable PIXIU_CLUSTER_MTU_BYTES: [cluster] mtu_bytes" in role.text
        assert "Traceback" not in role.text
        assert "prepare" not in role.out


async def test_other_cluster_settings_are_refused_with_2(registry: str) -> None:
    options = (f"registry=zk://{registry}/settings", "session_timeout_ms=1000")
    async with started(*options) as one:
        await one.running()
        async with started(*options, "cluster.push_back_ms=123") as other:
            assert await other.ended() == 2
            assert "[cluster]" in other.events("start_failed")[0]["error"]
            assert "Traceback" not in other.text


async def test_a_loop_that_hangs_loses_its_place_at_once_and_takes_a_new_one_when_it_is_back(registry: str) -> None:
    root = "/hang"
    options = (f"registry=zk://{registry}{root}", "session_timeout_ms=3000", "hang_s=8")
    async with connected(registry) as zookeeper, started(*options) as role:
        await role.running()
        [before] = await nodes(zookeeper, root)
        page = await moment(router=before)
        role.kill(signal.SIGUSR1)

        async def gone() -> bool:
            return await nodes(zookeeper, root) == []

        await until(gone)
        assert not role.events("loop_back")  # it hangs still: kazoo's own thread would have kept the node
        await role.until(lambda: role.events("loop_stalled"))
        assert "run_forever" in role.events("loop_stalled")[0]["stack"]
        await role.until(lambda: len(role.events("registered")) == 2)
        [after] = await nodes(zookeeper, root)
        assert {"PixiuLoopStalled", "PixiuLoopLate"} <= firing(page, await moment(router=after))
        assert after.endpoint == before.endpoint
        assert after.incarnation != before.incarnation
        assert after.replica > before.replica
        assert role.events("registered")[1]["replica"] == after.replica
        assert after.state is NodeState.RUNNING
        role.kill(signal.SIGTERM)
        assert await role.ended() == 0
        assert await nodes(zookeeper, root) == []
