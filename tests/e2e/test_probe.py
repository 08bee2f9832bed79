"""Probes and traces with real processes: every hop and path, the name of a stopped process, files of traces."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pixiu
from tests.support.cluster import PIXIU, WAIT_S, LocalCluster, running_cluster, wait_for
from tests.support.effort import portion
from tools.load.mqtt import MQTTClient

ALL = 2 * (4 + 4) * 2
"""Paths: through four brokers and four relays."""
HALF = ALL // 2
HOPS = {
    "publisher → proxy": ALL,
    "proxy": ALL,
    "proxy → broker": HALF,
    "proxy → relay": HALF,
    "broker": HALF,
    "broker → gateway": HALF,
    "relay": HALF,
    "relay → gateway": HALF,
    "gateway": ALL,
    "gateway → subscriber": ALL,
    "total": ALL,
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the gateways write."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> Iterator[LocalCluster]:
    """Two proxies, two partitions of two brokers, one router, two gateways; half of all messages is traced."""
    # A process that hangs is in the registry for as long as its session is: longer than a probe takes to begin on a busy machine.
    settings = (
        "cluster.trace_fraction=0.5",
        f"gateway.trace_dir={traces}",
        "gateway.trace_file_s=1",
        "gateway.trace_files=1000",  # on a busy machine the messages take longer than the default of 16 such files
        "broker.session_timeout_ms=30000",
    )
    arguments = ["--routers", "1", "--router-replicas", "1"]
    for setting in settings:
        arguments += ["--set", setting]
    with running_cluster(tmp_path_factory.mktemp("probe"), *arguments) as running:
        yield running


def lines(text: str) -> list[dict[str, Any]]:
    """What a command printed with --json."""
    return [json.loads(line) for line in text.splitlines()]


def address(process: dict[str, Any]) -> dict[str, Any]:
    """A process as `pixiu probe` names it: by the address of clients where it has one."""
    named = {key: process[key] for key in ("role", "partition", "replica")}
    return named | {"address": process["client_address"] or process["address"]}


@contextmanager
def stopped(process: dict[str, Any]) -> Iterator[None]:
    """A process hangs."""
    os.kill(process["pid"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process["pid"], signal.SIGCONT)


def test_the_table_has_every_hop_and_every_path(cluster: LocalCluster) -> None:
    result = cluster.pixiu("probe", "--count", "3", "--interval", "0.1", "--timeout", "30", "--json")
    assert result.returncode == 0, result.stderr
    said = lines(result.stdout)[-1]
    assert [row["hop"] for row in said["hops"]] == list(HOPS)
    assert {row["hop"]: row["count"] for row in said["hops"]} == {hop: 3 * paths for hop, paths in HOPS.items()}
    assert all(row["p99_us"] >= row["p50_us"] for row in said["hops"])
    status = cluster.status()["processes"]
    proxies, gateways = ([address(p) for p in status if p["role"] == role] for role in ("proxy", "gateway"))
    middles = [address(p) for p in status if p["role"] in ("broker", "relay")]
    expected = [(proxy, middle, gateway) for proxy in proxies for middle in middles for gateway in gateways]
    found = [(path["proxy"], path.get("broker") or path["relay"], path["gateway"]) for path in said["paths"]]
    assert len(found) == len(expected) == ALL
    assert all(path in found for path in expected)
    assert all((path["sent"], path["arrived"], path["failed"]) == (3, 3, 0) for path in said["paths"])


class Watching:
    """`pixiu probe --watch --json` in the background."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.output = folder / "probe.json"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [
                    PIXIU,
                    "probe",
                    "--target",
                    cluster.target,
                    "--watch",
                    "--interval",
                    "0.2",
                    "--timeout",
                    "1",
                    "--failures",
                    "3",
                    "--json",
                ],
                stdout=output,
            )
        wait_for(lambda: self.event("running"), "the first round of probes")

    def event(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names so far."""
        whole = self.output.read_text()
        return [found for found in lines(whole[: whole.rfind("\n") + 1]) if found["event"] in names]

    def named(self, process: dict[str, Any]) -> list[str]:
        """What alarms said of a process alone."""
        findings = [finding for event in self.event("alarm") for finding in event["findings"]]
        return [finding["text"] for finding in findings if finding["processes"] == [address(process)]]

    def end(self) -> int:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)


@pytest.mark.parametrize("role", portion(["relay", "gateway"]))
def test_a_process_that_hangs_is_named_and_the_alarm_ends_with_it(role: str, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.wait_healthy()
    victim = cluster.processes(role)[-1]
    watching = Watching(cluster, tmp_path)
    try:
        with stopped(victim):
            texts = wait_for(lambda: watching.named(victim), f"an alarm that names {victim['address']}")
        assert f" at {address(victim)['address']} seems stopped" in texts[0]
        assert texts[0].startswith(f"{role} ")
        wait_for(lambda: watching.event("alarm", "cleared")[-1]["event"] == "cleared", "the end of the alarm")
    finally:
        code = watching.end()
    assert code == 1
    assert watching.event("result")[0]["failing_paths"] == 0


def test_a_single_run_names_a_hung_broker_and_exits_with_1(cluster: LocalCluster) -> None:
    cluster.wait_healthy()
    victim = cluster.processes("broker")[0]
    with stopped(victim):
        result = cluster.pixiu("probe", "--count", "4", "--interval", "0.2", "--timeout", "1", "--failures", "3")
    assert result.returncode == 1, result.stderr
    name = f"broker partition {victim['partition']} replica {victim['replica']} at {victim['address']}"
    # Proxies may have noticed before the first round, and send around it.
    whats = "all 4 probed paths through it fail", "proxies bypass it on all 4 probed paths through it"
    assert any(f"{name} seems stopped: {what}" in result.stdout for what in whats), result.stdout
    cluster.wait_healthy()


async def test_a_fraction_of_the_messages_is_traced_into_files(cluster: LocalCluster, traces: Path) -> None:
    room, count = 777, 400
    ids: list[int] = []
    by_mqtt: list[bytes] = []
    client = MQTTClient("127.0.0.1", (await asyncio.to_thread(cluster.mqtt_ports))[0], "traced", "6")
    client.on_message = lambda _, payload: by_mqtt.append(payload)
    await client.connect()
    await client.subscribe([f"room/{room}"])
    async with pixiu.connect(cluster.target, uin=5) as px, px.subscribe(room=room) as subscription:
        for number in range(count):
            ids.append((await px.room(room).send(b"secret %d" % number)).id)
        await px.flush()
        got = []
        async with asyncio.timeout(WAIT_S):
            async for message in subscription:
                got.append(message.payload)
                if len(got) == count:
                    break
        for _ in range(64):
            ids.append((await px.room(room).signal(b"secret signal")).id)
        await px.flush()
        async with px.subscribe(chat=True):
            for _ in range(64):
                ids.append((await px.user(5).chat(b"secret chat")).id)
            await px.flush()
    expected = [b"secret %d" % number for number in range(count)]
    assert got == expected
    async with asyncio.timeout(WAIT_S):
        while len(by_mqtt) < count + 64:
            await asyncio.sleep(0.02)
    await client.close()
    assert [payload for payload in by_mqtt if payload != b"secret signal"] == expected
    assert len(by_mqtt) == count + 64

    def written() -> list[dict[str, Any]]:
        texts = [path.read_text() for path in sorted(traces.glob("traces-*.jsonl"))]
        assert "secret" not in "".join(texts)
        return [found for text in texts for found in lines(text) if found["key"] in (room, 5)]

    found: list[dict[str, Any]] = []

    def enough() -> bool:
        found[:] = written()
        return len(found) > count // 4 and {trace["kind"] for trace in found} == {"room", "signal", "chat"}

    await asyncio.to_thread(wait_for, enough, "the traces of a quarter of the messages")
    assert {trace["snowflake_id"] for trace in found} <= set(ids)
    for trace in found:
        middle = "relay" if trace["kind"] == "chat" else "broker"
        assert [stamp["role"] for stamp in trace["stamps"]] == ["proxy", middle, "gateway"]
        assert all(0 < stamp["in_us"] <= stamp["out_us"] for stamp in trace["stamps"])
        assert trace["stamps"][1]["partition"] == trace["key"] % 2
